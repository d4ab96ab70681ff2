"""data.chat_template and what it is told: checked, part of what a run is, and told in its report."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer

from privlora.api import fine_tune, resume_run
from privlora.config import settings_from
from privlora.data.examples import Template, build_examples
from privlora.data.jinja import DATE
from privlora.errors import ConfigError, PrivacyError
from privlora.training.files import RunFolder
from privlora.training.token_cache import key_of

OWN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if thinks %} hm{% endif %}\n{% endfor %}"
RECORDS = [
    {"talk": [{"role": "user", "content": f"is {i} it?"}, {"role": "assistant", "content": "no."}]}
    for i in range(30)
]
PRIVACY: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 2, "expected_batch_size": 6}
PRIVACY["public_dataset_size"] = 30


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
        ({"chat_template": "{% patient %}{{ messages }}"}, "line 1, is no Jinja"),
        ({"chat_template": "{{ ['a', 'b']|random }}{{ messages }}"}, "draws at random"),
        ({"chat_template": "{{ messages }}{{ lipsum(1) }}"}, "draws at random"),
        ({"chat_template": "{{ [['a', 'b']]|map('random')|first }}{{ messages }}"}, "draws at random"),
        ({"chat_template": "{{ [['a', 'b']]|map(f)|first }}{{ messages }}"}, "draws at random"),
        ({"chat_template": "{{ [['a', 'b']]|map(*f)|first }}{{ messages }}"}, "draws at random"),
        (
            {"chat_template": "{%- generation -%}{{ 'ab'|random }}{%- endgeneration -%}{{ messages }}"},
            "draws at random",
        ),
        ({"chat_template_kwargs": {"strftime_now": "x"}}, "which is decided here"),
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template": OWN, "messages": None, "text": "text"}, "is read with messages alone"),
        ({"chat_template_kwargs": {"a": 1}, "messages": None, "text": "text"}, "is read with messages alone"),
        ({"chat_template_kwargs": {"tokenize": True}}, "which is decided here"),
        ({"chat_template_kwargs": {"tools": None}}, "which is decided here"),
        ({"chat_template_kwargs": {"a": ["b"]}}, "chat_template_kwargs"),
    ],
)
def test_what_is_no_template_is_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read(**data)
    assert "Fix:" in str(refused.value)
    assert "patient" not in str(refused.value)


def test_templates_with_the_tags_of_transformers_are_read() -> None:
    read(
        chat_template="{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    read(
        chat_template="{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m }}{% endfor %}"
    )


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


def test_kept_tokens_know_of_them(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = OWN
    told: list[dict[str, Any]] = [
        {},
        {"chat_template": OWN + " "},
        {"chat_template_kwargs": {"thinks": True}},
    ]
    keys = [key_of(read(path=str(file), **more), None, tokenizer) for more in told]
    assert None not in keys
    assert len(set(keys)) == 3
    assert (
        key_of(read(path=str(file), chat_template=OWN + "{{ strftime_now('%d') }}"), None, tokenizer) is None
    )


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
        columns=columns,
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
    with pytest.raises(PrivacyError, match="are not those that the run began with"):
        resume_run(folder.root, **given)


def test_a_tokenizers_own_template_may_not_draw_either() -> None:
    """What it draws for a record depends on how many were rendered before it."""
    tokenizer = tiny_tokenizer()
    for template in (
        "{{ ['a', 'b']|random }}{{ messages }}",
        {"default": "{{ lipsum(1) }}{{ messages }}"},
        "{{ ['ab']|map('random')|first }}{{ messages }}",
        "{%- generation -%}{{ 'ab'|random }}{%- endgeneration -%}{{ messages }}",
    ):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match="draws at random"):
            build_examples(RECORDS[:1], Template(messages="talk"), tokenizer, max_length=90)


def test_no_clock_reaches_a_text() -> None:
    found = ids(chat_template="{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}")
    assert found == ids(chat_template=f"{DATE}{{{{ messages[0]['content'] }}}}")


def test_what_others_templates_do_is_taken() -> None:
    """map over what an attribute or a filter without chance gives, and trimmed tags of transformers."""
    for text in (
        "{{ messages|map(attribute='content')|join }}",
        "{%- for m in messages -%}{%- generation -%}{{ m.content|trim }}{%- endgeneration -%}{%- endfor -%}",
        "{{ messages|map(attribute='content')|map('upper')|join }}",
    ):
        assert read(chat_template=text).columns["chat_template"] == text


def test_a_large_file_is_no_template(tmp_path: Path) -> None:
    file = tmp_path / "large.jinja"
    file.write_text("{{ messages }}" + " " * (1 << 20))
    with pytest.raises(ConfigError, match="too large for a template"):
        read(chat_template=str(file))
