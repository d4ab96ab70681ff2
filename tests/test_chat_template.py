"""data.chat_template and what it is told: checked, part of what a run is, and told in its report."""

from __future__ import annotations

from datetime import date, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from promises import promise
from tiny_models import tiny_model, tiny_tokenizer

from privlora.api import fine_tune, resume_run
from privlora.config import settings_from
from privlora.data.examples import Template, build_examples
from privlora.data.sandbox import DATE, rendering
from privlora.errors import ConfigError, DataError, PrivacyError
from privlora.training.files import RunFolder

OWN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if thinks %} hm{% endif %}\n{% endfor %}"
RECORDS = [
    {"talk": [{"role": "user", "content": f"is {i} it?"}, {"role": "assistant", "content": "no."}]}
    for i in range(30)
]
PRIVACY = promise(steps=2, batch=6, records=30, noise_multiplier=1.0)


def read(**data: Any) -> Any:
    data = {"path": "x.jsonl", "messages": "talk", **data}
    return settings_from({"model": {"name": "m"}, "data": data, "privacy": PRIVACY}, source="s").data


def test_a_file_is_read_into_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    found = read(chat_template=str(file))
    assert found.chat_template == OWN == read(chat_template=OWN).chat_template
    assert found.columns["chat_template"] == OWN
    assert "chat_template" not in read().columns


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"chat_template": "no/such.jinja"}, "is no file that can be read"),
        ({"chat_template": "a patient came in with a cold"}, "not shown"),
        ({"chat_template": "{# nothing #}"}, "shows nothing of a message"),
        ({"chat_template": "{% for m in messages %}"}, "line 1, is no Jinja"),
        ({"chat_template": "{{ messages }}\n{{ a patient }}"}, "line 2, is no Jinja"),
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template": OWN, "messages": None, "text": "text"}, "is read for chats alone"),
        ({"chat_template_kwargs": {"a": 1}, "messages": None, "text": "text"}, "is read for chats alone"),
        ({"chat_template_kwargs": {"tools": None}}, "which is decided here"),
        ({"chat_template_kwargs": {"a": ["b"]}}, "chat_template_kwargs"),
    ],
)
def test_what_is_no_template_is_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read(**data)
    assert "Fix:" in str(refused.value)
    assert "patient" not in str(refused.value)


@pytest.mark.parametrize("group", ["model", "data", "run"])
def test_trust_remote_code_is_refused_by_name(group: str) -> None:
    content = {"model": {"name": "m"}, "data": {"path": "x.jsonl"}, "privacy": PRIVACY, "run": {}}
    content[group] = {**content[group], "trust_remote_code": True}
    with pytest.raises(ConfigError, match=r"trust_remote_code.*could read private batches"):
        settings_from(content)


def ids(**template: Any) -> list[int]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found = build_examples(RECORDS[:1], Template(messages="talk", **template), tokenizer, max_length=90)
    assert "is" not in tokenizer.chat_template
    return list(found[0].input_ids)


def test_it_stands_in_the_tokenizers_place() -> None:
    plain, own = ids(), ids(chat_template=OWN)
    thinks = ids(chat_template=OWN, chat_template_kwargs={"thinks": True})
    assert len(plain) < len(own) < len(thinks)
    assert ids(chat_template_kwargs={"thinks": True}) == plain


def test_a_run_is_of_its_template(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()  # without a template of its own
    columns = {
        "messages": "talk",
        "chat_template": OWN,
        "chat_template_kwargs": {"thinks": False},
        "max_length": 60,
    }
    result = fine_tune(
        *(model, RECORDS),
        tokenizer=tokenizer,
        privacy=PRIVACY,
        data=columns,
        adapter={"r": 2},
        output=tmp_path / "run",
    )
    assert tokenizer.chat_template is None
    method = result.report["method"]
    assert method["chat_template_sha256"] == sha256(OWN.encode()).hexdigest()
    assert method["chat_template_kwargs"] == {"thinks": False}
    assert f"SHA-256 {method['chat_template_sha256']}, thinks=False" in result.card.read_text()
    folder = RunFolder(tmp_path / "run")
    given = {"model": model, "tokenizer": tokenizer, "records": RECORDS}
    assert resume_run(folder.root, **given).epsilon == result.epsilon
    folder.settings.write_text(folder.settings.read_text().replace("thinks: false", "thinks: true"))
    with pytest.raises(PrivacyError, match=r"other ones now: data\.chat_template_kwargs is another"):
        resume_run(folder.root, **given)


DRAWS = [
    "{{ ['a', 'b']|random }}{{ messages }}",
    "{{ lipsum(1) }}{{ messages }}",
    "{{ [['a', 'b']]|map('random')|first }}{{ messages }}",
    "{% set f = 'random' %}{{ [['a', 'b']]|map(f)|first }}{{ messages }}",
    "{%- generation -%}{{ 'ab'|random }}{%- endgeneration -%}{{ messages }}",
]


@pytest.mark.parametrize("template", DRAWS)
def test_no_template_may_draw(template: str) -> None:
    """What it draws for a record depends on how many were rendered before it."""
    with pytest.raises(DataError, match="draws at random"):
        ids(chat_template=template)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="draws at random"):
        build_examples(RECORDS[:1], Template(messages="talk"), tokenizer, max_length=90)


def test_nor_one_that_a_tokenizer_renders_by_its_own_code() -> None:
    class Own(hf.PreTrainedTokenizerFast):
        def apply_chat_template(self, *given: Any, **named: Any) -> Any:
            return super().apply_chat_template(*given, **named)

    tokenizer = Own(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="</s>")
    tokenizer.chat_template = OWN
    build_examples(RECORDS[:1], Template(messages="talk"), tokenizer, max_length=90)
    tokenizer.chat_template = DRAWS[0]
    with pytest.raises(ConfigError, match="draws at random"):
        build_examples(RECORDS[:1], Template(messages="talk"), tokenizer, max_length=90)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ [['ab']]|map('map', 'random')|map('list')|list }}", "draws at random"),
        ("{% for x in [['ab']]|map('map', 'random') %}{{ x|list }}{% endfor %}", "draws at random"),
        ("{{ messages|map(attribute='content') }}", "passes on"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|string }}", "passes on"),
        ("{{ messages|reverse }}", "passes on"),
        ("{{ [messages|batch(2)] }}", "passes on"),
        ("{{ '%s'|format(messages|map('upper')) }}", "passes on"),
        ("{{ '%s' % (messages|map('upper')) }}", "passes on"),
        ("{{ '{}'.format(messages|map('upper')) }}", "passes on"),
        ("{{ 'a' ~ (messages|map('upper')) }}", "passes on"),
        ("{{ messages[0].items }}", "address"),
        ("{{ messages|map(attribute='items')|join }}", "address"),
        ("{{ messages|map(attribute='items')|list|length }}", "address"),
        ("{{ joiner() }}", "address"),
        ("{{ [joiner()] }}", "address"),
        ("{{ {'a': (1, joiner())} }}", "address"),
        ("{{ {joiner(): 1} }}", "address"),
        ("{{ 'a' ~ ('b' ~ joiner()) }}", "address"),
        ("{{ (''|e).escape(joiner()) }}", "address"),
        ("{{ {range(1): 'a', range(2): 'b'}|pprint }}", "pprint"),
        ("{{ joiner()|string|length }}", "address"),
        ("{{ 'a'|replace('a', x=joiner()) }}", "address"),
        ("{{ '%s' % joiner() }}", "address"),
        ("{{ '%(a)s' % {'a': joiner()} }}", "address"),
        ("{{ '{}'.format(joiner()) }}", "address"),
        ("{{ '{a}'.format(a=joiner()) }}", "address"),
        ("{% for m in messages %}{{ loop.cycle }}{% endfor %}", "address"),
        ("{{ cycler('a') }}{{ namespace(a=1) }}", "address"),
        ("{{ namespace(a=1) }}", "address"),
        ("{% block b %}{% endblock %}{{ self.b }}", "address"),
        ("{% macro f() %}{% endmacro %}{{ f }}", "address"),
        ("{{ range }}", "address"),
        ("{{ dict }}", "address"),
        ("{{ raise_exception }}", "address"),
        ("{% if messages[0].content is sameas messages[0].content %}a{% endif %}", "sameas"),
    ],
)
def test_neither_chance_nor_addresses_reach_a_text(text: str, says: str) -> None:
    """By no way around: printed, joined, formatted, filtered, or as items of what is passed on."""
    read(chat_template=text + "{{ messages }}")
    with pytest.raises(DataError, match=says) as refused:
        ids(chat_template=text)
    assert "record 1" in str(refused.value)
    assert "Fix:" in str(refused.value)
    assert " 0x" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content|trim + eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "{%- set ns = namespace(seen=false, text='') -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{%- set ns.seen = true -%}{%- set ns.text = ns.text ~ m.content ~ loop.index ~ none ~ nothing -%}{%- endif -%}"
        "{%- endfor -%}{{ ns.text }}{{ ns.seen }}",
        "{% for m in messages %}{{ m|tojson }}{{ m|tojson(indent=1) }}{{ m.tool_calls|tojson if m.tool_calls }}"
        "{% if m.thinking is defined %}[{{ m.reasoning_content }}{{ m.thinking }}]{% endif %}{% endfor %}",
        "{{ messages|map(attribute='content')|map('upper')|join(', ') }}"
        "{{ ', '.join(messages|map(attribute='role')) }}",
        "{% set x = messages|selectattr('role', 'equalto', 'nobody') %}{{ 'a' if x else 'b' }}{{ x|list }}{{ x|list }}",
        "{{ messages[::-1] }}{{ messages|list }}{{ messages|length }}{{ messages[0].items()|list }}{{ range(3) }}",
        "{% macro show(m) %}{{ m.content }}{{ caller() }}{% endmacro %}{% set comma = joiner(';') %}"
        "{% for m in messages %}{{ comma() }}{% call show(m) %}!{% endcall %}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ tools }}",
        "{% if tools is none and documents is none and thinks is sameas true %}{{ '%s-%d' % ('a', 3) }}"
        "{{ '{} {}'.format(1, [2]) }}{{ dict(a=1).a }}{{ messages|groupby('role') }}{% endif %}",
        "{{ messages|unique(attribute='role')|sort(attribute='role')|list }}"
        "{{ nothing|default('d') }}{{ none|d('e', 1) }}",
        "{% filter upper %}{{ messages[0].content }}{% endfilter %}{{ messages|batch(1)|map('first')|list }}",
    ],
)
@pytest.mark.parametrize("ask", [False, True])
def test_all_else_is_rendered_as_by_transformers(text: str, ask: bool) -> None:
    tokenizer = tiny_tokenizer()
    call = {"type": "function", "name": "f", "arguments": {"a": 1, "é": ["<b>", None]}}
    answer = {"role": "assistant", "content": " it is\n", "reasoning": "hm", "tool_calls": [call]}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "is it?"},
        answer,
        {"role": "tool", "content": "x"},
    ]
    shown = rendering(text, tokenizer)(talk, ask, None, {"thinks": True})
    assert shown
    assert read(chat_template=text).columns["chat_template"] == text
    assert shown == tokenizer.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=ask, chat_template=text, thinks=True
    )


@pytest.mark.parametrize("text", ["{{ messages[0].content + 1 }}", "{{ nothing.more }}", "{{ '%d' % 'a' }}"])
def test_a_template_that_fails_names_the_record_and_shows_nothing_of_it(text: str) -> None:
    with pytest.raises(DataError, match=r"record 1: data.chat_template") as refused:
        ids(chat_template=text)
    assert "is 0 it" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_objects_of_a_table_are_words() -> None:
    said = {"role": "user", "content": "a", "when": datetime(2024, 1, 2), "dates": [date(2024, 1, 2)]}
    text = "{{ messages[0].when }} {{ messages[0].when.now is defined }} {{ messages[0].dates }}"
    shown = rendering(text, tiny_tokenizer())([said], False, None, {})
    assert shown == "<datetime> False ['<date>']"


def test_no_clock_reaches_a_text() -> None:
    said = "{{ messages|map(attribute='content')|join }}"
    assert ids(chat_template="{{ strftime_now('%d %b %Y') }}" + said) == ids(chat_template=DATE + said)
