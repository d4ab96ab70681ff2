from __future__ import annotations

import numpy as np
import pytest
import transformers as hf
from tiny_models import byte_tokenizer, tiny_tokenizer

from privlora.data.examples import IGNORED, Example, Template, build_examples, encode_asked
from privlora.errors import ConfigError, DataError

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Llama 2: BOS in the template, no header for the assistant, roles must take turns.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Like Qwen 3: an empty thought in front of the last answer only.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like reasoning models: the prompt for an answer opens a thought that the conversation does not show.
OPEN_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# Numbers the messages from the end, so nothing about a turn stays as it was.
COUNTDOWN = "{% for m in messages %}{{ loop.revindex }}:{{ m['content'] }}\n{% endfor %}"
# Asked for an answer, it changes what stands before.
ANNOUNCING = "{% if add_generation_prompt %}answer!{% endif %}" + CHATML


def make_tokenizer(
    *, adds_bos: bool = True, chat_template: str | None = None, eos: bool = True
) -> hf.PreTrainedTokenizerFast:
    """One token a byte, so that decoding labels gives back exactly the trained text."""
    tokenizer = byte_tokenizer(
        SPECIAL,
        template="<s> $A" if adds_bos else None,
        bos_token="<s>",
        eos_token="</s>" if eos else None,
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def build(
    record: dict[str, object], template: Template, tokenizer: hf.PreTrainedTokenizerFast, **kwargs
) -> Example:
    kwargs.setdefault("max_length", 1000)
    (example,) = build_examples([record], template, tokenizer, **kwargs)
    assert example.input_ids.dtype == example.labels.dtype == np.int32
    assert example.input_ids.shape == example.labels.shape
    kept = example.labels != IGNORED
    assert (example.labels[kept] == example.input_ids[kept]).all()
    return example


def shown(tokenizer: hf.PreTrainedTokenizerFast, example: Example) -> tuple[str, list[str]]:
    """The whole text, and each stretch that is trained on."""
    trained = example.labels != IGNORED
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained, [0]])))
    spans = [tokenizer.decode(example.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return tokenizer.decode(example.input_ids), spans


PAIR = Template(prompt="question", completion="answer")
QUESTION = {"question": "2+2? ", "answer": "four"}


class TestText:
    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_begins_and_ends_once(self, adds_bos: bool) -> None:
        tokenizer = make_tokenizer(adds_bos=adds_bos)
        begin = "<s>" if adds_bos else ""
        example = build({"text": "hé"}, Template(text="text"), tokenizer)
        assert shown(tokenizer, example) == (f"{begin}hé</s>", [f"{begin}hé</s>"])

    def test_markers_of_a_text_are_read_only_if_they_are_to_be(self) -> None:
        tokenizer = make_tokenizer()
        example = build({"text": "<s>hi</s>"}, Template(text="text"), tokenizer)
        assert example.input_ids.tolist().count(BOS) == example.input_ids.tolist().count(EOS) == 1
        assert shown(tokenizer, example)[0] == "<s><s>hi</s>"
        read = Template(text="text", split_special_tokens=False)
        assert shown(tokenizer, build({"text": "<s>hi</s>"}, read, tokenizer))[0] == "<s>hi</s>"

    def test_without_eos(self) -> None:
        tokenizer = make_tokenizer(eos=False)
        example = build({"text": "hi"}, Template(text="text"), tokenizer, add_eos=False)
        assert shown(tokenizer, example)[0] == "<s>hi"

    def test_is_cut_at_its_end(self) -> None:
        tokenizer = make_tokenizer()
        example = build({"text": "abcdef"}, Template(text="text"), tokenizer, max_length=4)
        assert shown(tokenizer, example)[0] == "<s>abc"

    def test_formats(self) -> None:
        tokenizer = make_tokenizer()
        record = {"title": "T{x}", "a.b": "{title}", "text": "body"}
        example = build(record, Template(text="{{{title}}} {a.b}\n{text}"), tokenizer)
        assert shown(tokenizer, example)[0] == "<s>{T{x}} {title}\nbody</s>"

    def test_empty_records_stay(self) -> None:
        tokenizer = make_tokenizer(adds_bos=False)
        records = [{"text": "a"}, {"text": ""}, {"text": "b"}]
        examples = build_examples(records, Template(text="text"), tokenizer, max_length=9, add_eos=False)
        assert examples.lengths.tolist() == [1, 0, 1]
        assert examples.label_counts.tolist() == [0, 0, 0]

    def test_many_records_keep_their_order(self) -> None:
        records = [{"text": "x" * (i % 7)} for i in range(2500)]
        examples = build_examples(records, Template(text="text"), make_tokenizer(), max_length=99)
        assert examples.lengths.tolist() == [2 + i % 7 for i in range(2500)]
        assert examples.label_counts.tolist() == [1 + i % 7 for i in range(2500)]


class TestPromptAndCompletion:
    def test_trains_on_the_completion(self) -> None:
        tokenizer = make_tokenizer()
        example = build(QUESTION, PAIR, tokenizer, loss_on="completion")
        assert shown(tokenizer, example) == ("<s>2+2? four</s>", ["four</s>"])

    def test_trains_on_all(self) -> None:
        tokenizer = make_tokenizer()
        example = build(QUESTION, PAIR, tokenizer)
        assert shown(tokenizer, example)[1] == ["<s>2+2? four</s>"]

    @pytest.mark.parametrize("loss_on", ["all", "completion"])
    @pytest.mark.parametrize(
        ("max_length", "text", "trained"),
        [
            (11, "<s>2+2? four</s>", "four</s>"),
            (10, "<s>2+2? four", "four"),
            (8, "<s>2+2? fo", "fo"),
            (6, "<s>2+2? ", ""),
            (2, "<s>2", ""),
        ],
    )
    def test_the_end_is_cut_off(self, max_length: int, text: str, trained: str, loss_on: str) -> None:
        tokenizer = make_tokenizer()
        example = build(QUESTION, PAIR, tokenizer, max_length=max_length, loss_on=loss_on)
        learnt = text if loss_on == "all" else trained
        assert shown(tokenizer, example) == (text, [learnt] if learnt else [])
        assert not example.blank

    @pytest.mark.parametrize("adds_bos", [True, False])
    @pytest.mark.parametrize(
        ("room", "text", "trained", "unasked"),
        [
            (10, "2+2? four</s>", "four</s>", False),
            (6, " four</s>", "four</s>", False),
            (5, "four</s>", "four</s>", True),
            (3, "ur</s>", "ur</s>", True),
        ],
    )
    def test_or_the_beginning(
        self, room: int, text: str, trained: str, unasked: bool, adds_bos: bool
    ) -> None:
        """An answer without any of its question counts as one that says nothing."""
        tokenizer, begin = make_tokenizer(adds_bos=adds_bos), "<s>" if adds_bos else ""
        example = build(
            *(QUESTION, PAIR, tokenizer),
            max_length=room + adds_bos,
            loss_on="completion",
            truncation_mode="keep_end",
        )
        assert shown(tokenizer, example) == (begin + text, [trained])
        assert example.blank == unasked

    def test_a_token_across_the_boundary_is_learnt(self) -> None:
        """As TRL has it: the text is read as a whole, and what is learnt begins where it differs from the prompt."""
        tokenizer = byte_tokenizer(SPECIAL, merges=[("Ġ", "b")], eos_token="</s>", bos_token="<s>")
        example = build({"question": "a ", "answer": "b"}, PAIR, tokenizer, loss_on="completion")
        assert example.input_ids.tolist() == [*tokenizer("a b")["input_ids"], EOS]
        assert (example.labels != IGNORED).tolist() == [False, True, True]

    @pytest.mark.parametrize(
        ("question", "answer", "text"),
        [
            ("a", "b", "a\nb"),
            ("a ", "b", "a b"),
            ("a", "\tb", "a\tb"),
            ("a\n", " b", "a\n b"),
            ("", "b", "b"),
        ],
    )
    def test_a_newline_stands_where_nothing_does(self, question: str, answer: str, text: str) -> None:
        tokenizer, record = make_tokenizer(adds_bos=False), {"question": question, "answer": answer}
        example = build(record, PAIR, tokenizer, loss_on="completion")
        assert shown(tokenizer, example) == (f"{text}</s>", [f"{answer}</s>"])
        (asked,) = encode_asked([record], PAIR, tokenizer, max_length=99)
        assert f"{tokenizer.decode(asked)}{answer}" == text

    def test_an_empty_completion_trains_its_end(self) -> None:
        tokenizer = make_tokenizer()
        example = build({"question": "q", "answer": ""}, PAIR, tokenizer, loss_on="completion")
        assert shown(tokenizer, example)[1] == ["</s>"]
        silent = build({"question": "q", "answer": ""}, PAIR, tokenizer, loss_on="completion", add_eos=False)
        assert shown(tokenizer, silent) == ("<s>q\n", [])


CHAT = Template(messages="messages")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


class TestMessages:
    def spans(self, template: str, talk: list[dict[str, str]], **kwargs) -> tuple[str, list[str]]:
        tokenizer = make_tokenizer(chat_template=template)
        return shown(tokenizer, build({"messages": talk}, CHAT, tokenizer, loss_on="completion", **kwargs))

    def test_trains_on_the_assistant(self) -> None:
        text, spans = self.spans(CHATML, TALK)
        assert text == make_tokenizer(chat_template=CHATML).apply_chat_template(TALK, tokenize=False)
        assert spans == ["Hello<|im_end|>\n", "See you<|im_end|>\n"]

    def test_messages_of_sharegpt(self) -> None:
        """from and value are role and content, also beside the null keys that a table adds."""
        speakers = {"user": "human", "assistant": "gpt", "system": "system"}
        talk = [{"from": speakers[each["role"]], "value": each["content"]} for each in TALK]
        assert self.spans(CHATML, talk) == self.spans(CHATML, TALK)
        filled = [{**each, "role": None, "content": None} for each in talk]
        assert self.spans(CHATML, filled) == self.spans(CHATML, TALK)
        assert self.spans(CHATML, [{**each, "from": None, "value": None} for each in TALK]) == self.spans(
            CHATML, TALK
        )

    def test_a_template_sees_nothing_of_from_and_value(self) -> None:
        """It renders a chat of either form as the same: what it asks of `from` is not there."""
        asks = CHATML.replace("{% for m in messages %}", "{% for m in messages %}{{ m['from'] }}")
        assert asks != CHATML
        talk = [{"from": each["role"], "value": each["content"]} for each in TALK]
        assert self.spans(asks, talk) == self.spans(asks, TALK)

    def test_trains_on_all(self) -> None:
        tokenizer = make_tokenizer(chat_template=CHATML)
        example = build({"messages": TALK}, CHAT, tokenizer)
        text = tokenizer.apply_chat_template(TALK, tokenize=False)
        assert shown(tokenizer, example) == (text, [text])

    def test_the_template_writes_bos_and_eos(self) -> None:
        text, spans = self.spans(INSTRUCT, TALK[1:])
        assert text == "<s>[INST] Hi [/INST] Hello</s>[INST] Bye [/INST] See you</s>"
        assert spans == [" Hello</s>", " See you</s>"]

    def test_answers_shown_otherwise_once_others_follow(self) -> None:
        _, spans = self.spans(THINKING, TALK)
        assert spans == ["Hello<|im_end|>\n", "<think>\n\n</think>\n\nSee you<|im_end|>\n"]

    def test_a_thought_opened_by_the_prompt_alone(self) -> None:
        _, spans = self.spans(OPEN_THOUGHT, TALK)
        assert spans == ["Hello<|im_end|>\n", "See you<|im_end|>\n"]

    def test_an_answer_that_repeats_the_question(self) -> None:
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        assert self.spans(THINKING, [*talk, *talk])[1][0] == "Hello<|im_end|>\n"

    def test_without_an_answer_nothing_is_trained(self) -> None:
        assert self.spans(CHATML, TALK[:2])[1] == []

    def test_the_question_may_be_cut(self) -> None:
        text, spans = self.spans(INSTRUCT, TALK[1:3], max_length=12, truncation_mode="keep_end")
        assert text == "<s>NST] Hello</s>"
        assert spans == [" Hello</s>"]

    @pytest.mark.parametrize(
        ("template", "talk", "message"),
        [
            (INSTRUCT, TALK, "template refuses"),
            (
                "{{ messages[0].patient.name }}",
                TALK,
                "asks for what these messages, or the template itself, do not",
            ),
            (COUNTDOWN, TALK, "message 3 differently"),
            (ANNOUNCING, TALK, "message 3 differently"),
            (CHATML, TALK[2:], "starts with the assistant"),
            (CHATML, [], "not a list of messages"),
            (CHATML, "Zanzibar", "not a list of messages"),
            (CHATML, ["Zanzibar"], "message 1 .* no known role"),
            (CHATML, [{"role": "gpt", "content": "Zanzibar"}], "message 1 .* no known role.*assistant"),
            (CHATML, [{"from": "Zanzibar", "value": "x"}], "message 1 .* no known role.*human, gpt"),
            (CHATML, [{"from": "human", "value": "x", "content": "y"}], "message 1 .* no known role"),
            (
                CHATML,
                [{"from": "human", "value": 3}],
                "message 1 .* has a content that is no text but an int",
            ),
            (CHATML, [{"role": "user"}], "message 1 of column 'messages' has no content"),
            (CHATML, [{"from": "human"}], "message 1 of column 'messages' has no known role"),
            (CHATML, [{"role": "user", "content": [{"text": "Zanzibar"}]}], "no text but a list"),
            (CHATML, [{"role": "user", "content": None}], "message 1 .* has no content"),
        ],
    )
    def test_refuses(self, template: str, talk: list[dict[str, str]], message: str) -> None:
        with pytest.raises(DataError, match=f"record 1.*{message}") as caught:
            self.spans(template, talk)
        assert "Zanzibar" not in str(caught.value)

    def test_refuses_a_tokenizer_without_template(self) -> None:
        with pytest.raises(ConfigError, match=r"no chat template.*instruction-tuned"):
            build({"messages": TALK}, CHAT, make_tokenizer())


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"text": "t", "messages": "m"},
        {"text": "t", "prompt": "p", "completion": "c"},
        {"prompt": "p"},
        {"completion": "c"},
        {"text": "{"},
        {"text": "a}"},
        {"text": "{}"},
        {"text": "{a!r}"},
        {"text": "{a:>9}"},
        {"prompt": "{a:{b}}", "completion": "c"},
    ],
)
def test_template_refuses(kwargs: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Template(**kwargs)


@pytest.mark.parametrize(
    ("template", "kwargs", "error", "message"),
    [
        (PAIR, {"max_length": 1}, ConfigError, "max_length"),
        (PAIR, {"loss_on": "prompt"}, ConfigError, "loss_on"),
        (Template(text="question"), {"loss_on": "completion"}, ConfigError, "completion"),
        (Template(text="{qestion}"), {}, DataError, "record 1: has no column 'qestion'.*mean 'question'"),
        (Template(text="{question.__class__}"), {}, DataError, "no column 'question.__class__'"),
    ],
)
def test_build_refuses(
    template: Template, kwargs: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(QUESTION, template, make_tokenizer(), **kwargs)


def test_refuses_eos_that_the_tokenizer_lacks() -> None:
    with pytest.raises(ConfigError, match="no EOS"):
        build(QUESTION, PAIR, make_tokenizer(eos=False))


def test_a_late_record_is_called_by_its_number() -> None:
    """Records are read in chunks of some hundreds."""
    with pytest.raises(DataError, match="record 1235"):
        build_examples([{"text": "a"}] * 1234 + [{}], Template(text="text"), tiny_tokenizer(), max_length=5)
