"""The example of our own making that `init` and `plan` show."""

from __future__ import annotations

from tiny_models import byte_tokenizer

from privlora.cli.example import example_rows
from privlora.config import DataSettings

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "<|im_start|>user\\nWhat is two and two?<|im_end|>\\n<|im_start|>assistant\\n«It is four.<|im_end|>\\n» "
    "(invented example; only the text in « » is trained on)"
)
PAIR = {"prompt": "q", "completion": "a", "loss_on": "completion"}
CHAT = {"messages": "m", "loss_on": "completion"}


def rows(chat_template: str | None = None, **data: object) -> dict[str, str]:
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer(special, eos_token="</s>", additional_special_tokens=special[3:])
    tokenizer.chat_template = chat_template
    return dict(example_rows(DataSettings(path="x.jsonl", **data), tokenizer))  # type: ignore[arg-type]


def test_what_is_learnt_is_marked() -> None:
    assert rows(CHATML, **PAIR) == rows(CHATML, **CHAT) == {"example": TURNS}
    assert rows(**PAIR)["example"].startswith("What is two and two?\\n«It is four.</s>»")
    assert rows(text="{title}: {body}")["example"].startswith("«It is four.: It is four.</s>»")
    assert rows(label="l", labels=2) == rows(task="sst2") == {}


def test_a_templates_own_system_prompt_is_named() -> None:
    adds = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
    assert rows(adds, **PAIR)["system"].endswith('"Be kind."')
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    assert rows(strict, **CHAT) == {"example": TURNS}


def test_a_template_that_cannot_show_it() -> None:
    assert "leaves out" in rows("{{ messages[0].content }}", **CHAT)["example"]
