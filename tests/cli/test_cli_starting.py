"""privlora init and privlora settings, as a user types them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_cases import Call, Outcome, check, refuses, tree
from starting.starting_cases import SECRET, chat, jsonl, rows, save_base, sharegpt, table
from transformers import AutoTokenizer

from privlora.config import Settings, load_settings, settings_from
from privlora.data.examples import Template, build_examples
from privlora.federated.plans import client_plan, with_local_method
from privlora.starting.proposal import PLAIN_CHAT, owners_of
from privlora.starting.survey import survey
from privlora.training.promise import plan_privacy

ODD_KEY = "Greta_of_Rivers_road"


def _lines(records: list[dict[str, Any]]) -> Callable[[Path], Path]:
    return lambda folder: jsonl(folder / "d.jsonl", records)


MAKES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "text": (_lines(rows(300, text=SECRET)), {"text": "text"}),
    "plain lines": (lambda f: _text(f / "d.txt", 300), {"text": "text"}),
    "title and body": (_lines(rows(9, title="A", body=SECRET)), {"text": "{title}\n{body}"}),
    "capitals": (_lines(rows(9, Note=SECRET)), {"text": "Note"}),
    "the only text": (_lines(rows(9, anamnesis=SECRET, age=int)), {"text": "anamnesis"}),
    "Alpaca": (
        _lines(rows(2500, instruction="Say", input=lambda i: "", output=SECRET)),
        {"prompt": "{instruction}\n{input}", "completion": "output", "loss_on": "completion"},
    ),
    "instruction alone": (
        _lines(rows(9, instruction="Say", response=SECRET)),
        {"prompt": "instruction", "completion": "response"},
    ),
    "questions": (
        lambda f: table(f / "d.csv", rows(40_000, question="Who", answer=SECRET)),
        {"prompt": "question", "completion": "answer"},
    ),
    "set off already": (
        _lines(rows(9, prompt="Who", completion=lambda i: f" {SECRET}")),
        {"prompt": "prompt", "completion": "completion"},
    ),
    "messages": (
        _lines(rows(60, messages=chat, source="x")),
        {"messages": "messages", "loss_on": "completion"},
    ),
    "conversations": (_lines(rows(60, id=int, conversations=chat)), {"messages": "conversations"}),
    "conversations of ShareGPT": (
        _lines(rows(60, id=int, conversations=sharegpt)),
        {"messages": "conversations", "loss_on": "completion"},
    ),
    "preferences": (
        _lines(rows(60, question="Who?", better=SECRET, worse="Nobody.")),
        {"prompt": "question", "chosen": "better", "rejected": "worse"},
    ),
    "prompts and completions of messages": (
        _lines(rows(60, prompt=chat, completion=chat)),
        {"prompt": "prompt", "completion": "completion", "loss_on": "completion", "messages": None},
    ),
    "preferred chats with a prompt": (
        _lines(rows(60, prompt=chat, chosen=chat, rejected=chat)),
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    ),
    "preferred chats": (
        _lines(rows(60, chosen=chat, rejected=chat)),
        {"prompt": None, "chosen": "chosen", "rejected": "rejected"},
    ),
    "odd name of a file": (
        lambda f: jsonl(f / "my notes: 2024 #1.jsonl", rows(9, text=SECRET)),
        {"text": "text"},
    ),
}


def _text(path: Path, count: int) -> Path:
    path.write_text("".join(f"{SECRET} {i}\n" for i in range(count)))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), chat=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(call: Call, *argv: object) -> tuple[Settings, str, Outcome]:
    """What `privlora init` writes to run.yaml, in the place of an earlier one, as settings and as text."""
    Path("run.yaml").unlink(missing_ok=True)
    outcome = call("init", *argv, "--output", "run.yaml")
    assert outcome.code == 0, outcome.err
    return load_settings("run.yaml"), Path("run.yaml").read_text(encoding="utf-8"), outcome


@pytest.mark.parametrize("shape", MAKES)
def test_a_file_of_this_shape(shape: str, base: Path, here: Path, call: Call) -> None:
    make, form = MAKES[shape]
    settings, text, outcome = started(call, make(here), "--model", base)
    assert settings.data.model_dump(include=set(form)) == form
    plan_privacy(settings)  # the noise can be found
    assert settings.data.max_length <= 128
    assert settings.privacy.target_epsilon == 3
    assert settings.run.tokens_per_micro_batch == "auto"
    by_noise = settings.auto is not None and settings.auto.rate_by_noise
    assert by_noise == (settings.data.chosen is None)
    for said in (text, outcome.out, outcome.err):
        assert "Greta" not in said
        assert "cough" not in said
    assert [line for line in outcome.out.splitlines()[1:] if not line.startswith("example:")] == [
        "next:     privlora plan run.yaml",
        "next:     privlora train run.yaml",
    ]


def test_an_editor_finds_the_schema_beside_it(base: Path, here: Path, call: Call) -> None:
    (here / "privlora.schema.json").write_text(call("settings", "--schema").out)
    _, text, _ = started(call, jsonl(here / "d.jsonl", rows(9, text=SECRET)), "--model", base)
    assert text.startswith("# yaml-language-server: $schema=privlora.schema.json\n")


def test_few_records_take_what_was_measured_on_few(base: Path, here: Path, call: Call) -> None:
    settings, text, _ = started(call, jsonl(here / "d.jsonl", rows(210, text=SECRET)), "--model", base)
    assert (settings.method.clipping, settings.privacy.steps, settings.privacy.b) == ("automatic", 10, 100)
    assert "`privlora plan --advise` rehearses which does" in text
    settings, text, _ = started(call, jsonl(here / "h.jsonl", rows(1010, text=SECRET)), "--model", base)
    assert (settings.method.clipping, settings.privacy.steps, settings.privacy.b) == (None, 21, 238)
    assert "`privlora plan --advise` rehearses which does" in text
    settings, _, outcome = started(call, jsonl(here / "e.jsonl", rows(3, text=SECRET)), "--model", base)
    assert settings.privacy.b == 2
    assert "so few records" in outcome.err
    many = started(call, jsonl(here / "f.jsonl", rows(9000, text=SECRET)), "--model", base)[0]
    assert (many.method.clipping, many.privacy.steps) == (None, 64)
    pairs = jsonl(here / "g.jsonl", rows(9000, prompt=SECRET, chosen="yes", rejected="no"))
    preferred, text, _ = started(call, pairs, "--model", base)
    assert (preferred.method.clipping, preferred.privacy.steps) == (None, 64)
    assert "public.jsonl}" not in text


@pytest.mark.parametrize(
    ("count", "kind", "columns", "layers"),
    [
        (900, "llama", {"text": SECRET}, "feed-forward"),
        (500, "llama", {"text": SECRET}, "all-linear"),
        (900, None, {"text": SECRET}, "all-linear"),  # nothing says what it is
        (900, "mamba", {"text": SECRET}, "all-linear"),
        (900, "mixtral", {"text": SECRET}, "all-linear"),
        (900, "llama", {"prompt": "Who?", "chosen": SECRET, "rejected": "Nobody."}, "all-linear"),
    ],
)
def test_layers_outside_of_attention_are_proposed_where_that_was_measured(
    count: int, kind: str | None, columns: dict[str, str], layers: str, base: Path, here: Path, call: Call
) -> None:
    folder = shutil.copytree(base, here / "base")
    if kind is not None:  # which has no such layers, or routes tokens to them
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    settings, text, _ = started(call, jsonl(here / "d.jsonl", rows(count, **columns)), "--model", folder)
    assert settings.adapter.target_modules == layers
    assert ("all-linear: all layers" in text) == (layers == "feed-forward")


@pytest.mark.parametrize("count", [60, 500, 900, 4000])
@pytest.mark.parametrize(
    "columns", [{"text": SECRET}, {"prompt": "Who?", "chosen": SECRET, "rejected": "Me."}]
)
def test_auto_all_is_what_is_proposed(
    count: int, columns: dict[str, str], base: Path, here: Path, call: Call
) -> None:
    """In three public numbers: of the groups in which init chooses, each setting is the same."""
    proposed, _, _ = started(call, jsonl(here / "d.jsonl", rows(count, **columns)), "--model", base)
    privacy = {
        name: getattr(proposed.privacy, name) for name in ("target_epsilon", "delta", "public_dataset_size")
    }
    short = {
        "model": {"name": str(base)},
        "data": {"path": "d.jsonl", **proposed.data.model_dump(include=set(columns))},
        "privacy": privacy,
    }
    for everything in (True, {"all": True}):
        found = settings_from({**short, "auto": everything}, methods=True)
        assert found.privacy.model_dump() == proposed.privacy.model_dump()
        assert found.method.model_dump() == proposed.method.model_dump()
        assert found.adapter.r == proposed.adapter.r
        layers = found.adapter.target_modules
        assert (layers == "auto") == (
            count > 500 and "text" in columns
        )  # which init looks up in the model's files
        assert set(found.auto.choose if found.auto else ()) == set(
            proposed.auto.choose if proposed.auto else ()
        )
        assert "all" not in yaml.safe_load(found.to_yaml()).get("auto", {}) or found.auto is not None


def test_users_are_proposed_where_they_repeat(base: Path, here: Path, call: Call) -> None:
    records = jsonl(here / "d.jsonl", rows(600, text=SECRET, patient_id=lambda i: f"Mr{i % 50}"))
    settings, text, told = started(call, records, "--model", base)
    assert settings.privacy.unit == "record"
    assert "note: column patient_id repeats: if it names people, --user patient_id" in told.err
    assert "Mr" not in told.err
    assert "Mr" not in text
    warning, *_, user, column = text.partition("WARNING: ")[2].partition("\n\n")[0].splitlines()
    assert "column patient_id repeats" in warning
    assert (user, column) == ("  # unit: user", "  # user_column: patient_id")
    settings, text, _ = started(call, records, "--model", base, "--user", "patient_id")
    assert (settings.privacy.unit, settings.privacy.user_column) == ("user", "patient_id")
    assert settings.privacy.public_dataset_size == 50
    alone = jsonl(here / "e.jsonl", rows(600, text=SECRET, patient_id=int))
    assert "unit: user" not in started(call, alone, "--model", base)[1]


def test_a_short_run_is_saved_more_often(base: Path, here: Path, call: Call) -> None:
    """A crash costs charged steps: of sixteen, a checkpoint after twenty would keep none."""
    settings, _, _ = started(call, jsonl(here / "d.jsonl", rows(600, text=SECRET)), "--model", base)
    assert (settings.privacy.steps, settings.run.checkpoint_every) == (16, 1)
    settings, text, _ = started(call, jsonl(here / "e.jsonl", rows(2600, text=SECRET)), "--model", base)
    assert (settings.privacy.steps, settings.run.checkpoint_every) == (37, 3)
    assert "steps: auto" in text


def test_calls_of_tools_without_content_are_a_chat(base: Path, here: Path, call: Call) -> None:
    asked = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [{"role": "assistant", "content": None, "tool_calls": [asked]}, {"role": "tool", "content": "3"}]
    talk = [{"role": "user", "content": SECRET}, *said, {"role": "assistant", "content": "three"}]
    records = jsonl(here / "d.jsonl", rows(60, messages=lambda _: talk))
    settings, _, _ = started(call, records, "--model", base)
    assert settings.data.messages == "messages"
    plain = survey([str(records)]).columns["messages"].lengths[0]
    asked["function"]["arguments"] = '{"question": "how many"}'
    longer = (
        survey([str(jsonl(here / "l.jsonl", rows(3, messages=lambda _: talk)))])
        .columns["messages"]
        .lengths[0]
    )
    assert plain + len('"question": "how many"') <= longer  # calls are part of what is trained on


def test_a_label_is_proposed_and_its_values_are_not_shown(base: Path, here: Path, call: Call) -> None:
    records = jsonl(here / "d.jsonl", rows(60, text=SECRET, label=lambda i: "hypochondria"))
    _, text, _ = started(call, records, "--model", base)
    assert "# label: label" in text
    assert "hypochondria" not in text
    found = jsonl(here / "e.jsonl", rows(60, message=SECRET, intent=lambda i: f"hypochondria {i % 3}"))
    _, text, told = started(call, found, "--model", base)
    assert "# label: intent" in text
    assert "hypochondria" not in text + told.err
    other = jsonl(here / "f.jsonl", rows(60, message=SECRET, team=lambda i: f"hypochondria {i % 3}"))
    assert "label:" not in started(call, other, "--model", base)[1]


ODD_ONES: dict[str, dict[str, Any]] = {
    "a prompt that is set off otherwise": {"prompt": f"{SECRET} ", "completion": "a"},
    "an answer that is set off otherwise": {"prompt": SECRET, "completion": " a"},
    "a label": {"prompt": SECRET, "completion": "a", "label": "hypochondria"},
    "a key like no other": {"prompt": SECRET, "completion": "a", ODD_KEY: "a"},
    "another kind of user": {"prompt": SECRET, "completion": "a", "patient_id": 7},
    "nobody's record": {"prompt": SECRET, "completion": "a", "patient_id": None},
}


@pytest.mark.parametrize("odd", ODD_ONES)
@pytest.mark.parametrize("blank", ["", " "])
def test_one_odd_record_changes_neither_yaml_nor_screen(
    odd: str, blank: str, base: Path, here: Path, call: Call
) -> None:
    found = []
    usual = rows(60, prompt=SECRET, completion=lambda i: f"{blank}{SECRET}", patient_id=lambda i: f"Mr{i}")
    for records in (usual[:-1], [*usual[:-1], {"patient_id": "Mr59", **ODD_ONES[odd]}]):
        _, text, outcome = started(call, jsonl(here / "d.jsonl", records), "--model", base)
        found.append((text, outcome.out, outcome.err))
    assert found[0] == found[1]


def test_the_format_of_files_that_is_told(base: Path, here: Path, call: Call) -> None:
    paths = [jsonl(here / f"{name}.dat", rows(40, text=SECRET)) for name in "ab"]
    data = started(call, paths[0], "--model", base, "--format", "jsonl")[0].data
    assert (data.format, data.text) == ("jsonl", "text")
    settings = started(call, *paths, "--model", base, "--format", "jsonl", "--clients")[0]
    assert len(settings.federation.clients) == 2
    assert settings.data.format == "jsonl"


def test_users_of_two_kinds_are_none(base: Path, here: Path, call: Call) -> None:
    """7 and "7" may be one person, who would count twice."""
    records = jsonl(here / "d.jsonl", rows(600, text=SECRET, patient_id=lambda i: i % 9 if i else "1"))
    assert "user_column" not in started(call, records, "--model", base)[1]
    words = ("does not name a user in every record",)
    refuses(
        call, here, ["init", records, "--model", base, "--user", "patient_id", "--output", "b.yaml"], *words
    )


def test_columns_that_are_told(base: Path, here: Path, call: Call) -> None:
    records = jsonl(here / "d.jsonl", rows(9, alpha=SECRET, beta=SECRET, talk=chat))
    for argv, form in (
        (["--text", "{alpha}: {beta}"], {"text": "{alpha}: {beta}"}),
        (["--prompt", "alpha", "--completion", "beta"], {"prompt": "alpha", "completion": "beta"}),
        (["--messages", "talk"], {"messages": "talk"}),
    ):
        settings = started(call, records, "--model", base, *argv)[0]
        assert settings.data.model_dump(include=set(form)) == form


def test_a_run_is_named_after_a_yaml_that_is_named(base: Path, here: Path, call: Call) -> None:
    """Two of one file's records share no folder."""
    records = jsonl(here / "notes.jsonl", rows(9, text=SECRET))
    for argv, output in ((["--output", here / "of_users.yaml"], "runs/of_users"), ([], "runs/notes")):
        found = call("init", records, "--model", base, "--json", *argv)
        assert found.json["groups"]["run"]["output"] == output


def test_several_files_and_a_model_of_the_hub(here: Path, call: Call) -> None:
    first, second = (jsonl(here / f"{name}.jsonl", rows(30, text=4 * SECRET)) for name in "ab")
    settings, text, outcome = started(call, first, second, "--model", "some-org/some-model")
    assert settings.data.path == [str(first), str(second)]
    assert "by characters, since no tokenizer is at hand" in text
    assert "no tokenizer of some-org/some-model is on this disk" in outcome.err


def test_the_name_of_the_file_is_the_runs(base: Path, here: Path, call: Call) -> None:
    (here / "runs/notes").mkdir(parents=True)
    found = call("init", jsonl(here / "notes.jsonl", rows(9, text=SECRET)), "--model", base, "--json")
    assert found.json["settings"] == "notes.yaml"
    assert found.json["groups"]["run"]["output"] == "runs/notes-2"
    assert found.json["next"] == ["privlora plan notes.yaml", "privlora train notes.yaml"]
    assert load_settings("notes.yaml").run.output == "runs/notes-2"


def _folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


BAD: dict[str, tuple[Any, ...]] = {
    "a table separated otherwise": (
        lambda f: table(f / "d.csv", rows(3, a="b", text=SECRET), ";"),
        ("separated by", "';'"),
    ),
    "tabs": (lambda f: table(f / "d.csv", rows(3, a="b", text=SECRET), "\t"), "separated by"),
    "no header": (lambda f: table(f / "d.csv", [{SECRET: SECRET, "a": "b c"}]), "header line"),
    "a folder": (
        lambda f: _folder(f / "all", "d.jsonl"),
        ("is not a file but a folder", "/all/d.jsonl]", "with --clients if each is of another owner"),
    ),
    "a folder of several kinds": (
        lambda f: _folder(f / "all", "b.jsonl.gz", "c.csv", "d.png"),
        ("/all/b.jsonl.gz, ", "/all/c.csv]"),
    ),
    "an empty folder": (lambda f: _folder(f / "all"), "no file of records, nor a folder of them"),
    "no such file": (lambda f: f / "none.jsonl", "there is no file"),
    "an unknown ending": (lambda f: _text(f / "d.doc", 3), "ending"),
    "empty": (lambda f: _text(f / "d.jsonl", 0), "no records in"),
    "UTF-16": (lambda f: _bytes(f / "d.txt", SECRET.encode("utf-16")), "iconv -f UTF-16 -t UTF-8"),
    "Latin": (lambda f: _bytes(f / "d.txt", "Müller".encode("latin-1")), "iconv -f WINDOWS-1252"),
    "no JSON": (lambda f: _text(f / "d.jsonl", 3), "lines 1, 2, 3: this is not JSON"),
    "lines that are no JSON": (
        lambda f: _bytes(
            f / "d.jsonl",
            b"\n".join([b'{"text": "a"}', b'{"text"', b"[1]", b"{", b'{"text": null}', b'{"text": "b"}']),
        ),
        (
            "d.jsonl, lines 2, 4: this is not JSON",
            "line 3: this is a JSON list",
            "of a file that is one list of records, set data.format=json",
            "line 5: column 'text' is empty",
        ),
    ),
    "a chat that is none": (
        _lines(
            [
                *rows(9, messages=chat, source=SECRET),
                {"messages": [{"role": "user"}], "source": SECRET},
                {"messages": SECRET, "source": SECRET},
                {ODD_KEY: "a"},
            ]
        ),
        (
            "d.jsonl, line 10: message 1 of column 'messages' has no content",
            "line 11: column 'messages' is not a list of messages",
            "line 12: has no column 'messages', which most records have",
        ),
    ),
    "a preference without its worse answer": (
        _lines(rows(9, prompt=SECRET, chosen=SECRET)),
        ("most records have: prompt, chosen", "--prompt COLUMN --completion COLUMN"),
    ),
    "no such format": (
        _lines(rows(3, text=SECRET)),
        ("format='lines' is unknown", "auto, jsonl"),
        "--format",
        "lines",
    ),
    "a list of words": (lambda f: _bytes(f / "d.json", b'["a"]'), "item 1"),
    "columns like any": (
        _lines(rows(3, alpha=SECRET, beta=SECRET)),
        ("cannot be guessed", "alpha, beta", "--text COLUMN"),
    ),
    "a key of few records": (
        _lines([*rows(3, alpha=SECRET, beta=SECRET), {ODD_KEY: "a"}]),
        ("cannot be guessed", "most records have: alpha, beta"),
    ),
    "a key of few records beside a column that is told": (
        _lines([*rows(3, alpha=SECRET, beta=SECRET), {ODD_KEY: "a"}]),
        "its columns are: alpha, beta",
        "--text",
        ODD_KEY[:-1],
    ),
    "a text that is missing once": (
        _lines([*rows(3, text=SECRET), {"id": 4}]),
        "d.jsonl, line 4: has no column 'text', which most records have. Fix: write a text there, or remove",
    ),
    "files of several kinds": (
        _lines([{"a": SECRET}, {"b": SECRET}]),
        "no column is in most of the records, so the files seem to be of several kinds: init one of them alone. Fix",
    ),
    "numbers alone": (_lines(rows(3, a=int)), "cannot be guessed"),
    "no such column": (_lines(rows(3, note=SECRET)), "did you mean 'note'?", "--text", "notes"),
    "a column of numbers": (
        _lines(rows(3, note=SECRET, age=int)),
        "d.jsonl, lines 1, 2, 3: column 'age' holds int, not text",
        "--text",
        "age",
    ),
    "no messages": (_lines(rows(3, note=SECRET)), "not a list of messages", "--messages", "note"),
    "half a form": (_lines(rows(3, note=SECRET)), "by halves", "--prompt", "note"),
    "two forms": (_lines(rows(3, note=SECRET)), "more than once", "--text", "note", "--messages", "note"),
    "a broken format": (_lines(rows(3, note=SECRET)), "cannot be read", "--text", "{note"),
    "a format without a column": (_lines(rows(3, note=SECRET)), "names no column", "--text", "{{}}"),
    "no users": (_lines(rows(3, text=SECRET, user=lambda i: None)), "names no unit", "--user", "user"),
    "a wrong column of users": (
        _lines([*rows(3, text=SECRET), {"text": "b", "rare": 1}]),
        ("--user: record 1: has no column 'patient'; its columns are: text", "name one of its columns"),
        "--user",
        "patient",
    ),
    "a misspelt column of users beside another": (
        _lines(rows(3, text=SECRET, patient="a")),
        (
            "2 mistakes",
            "has no column 'story'",
            "--user: record 1: has no column 'patent'",
            "did you mean 'patient'?",
        ),
        "--user",
        "patent",
        "--text",
        "story",
    ),
    "a file twice": (
        _lines(rows(3, text=SECRET)),
        ("d.jsonl is given twice", "Each record would be two units"),
        "d.jsonl",
    ),
    "a table without a header": (
        lambda f: (f / "d.csv").write_text("Lovelace,flu\nByron,gout\n", encoding="utf-8") and f / "d.csv",
        "--text: record 1: has no column 'story'; its columns are: (not shown",
        "--text",
        "story",
    ),
    "users that are missing late": (
        _lines([*rows(300, text=SECRET, user="a"), {"text": "b", "user": ""}]),
        ("d.jsonl, line 301: ", "column 'user'", "names no unit"),
        "--user",
        "user",
    ),
    "no epsilon": (_lines(rows(3, text=SECRET)), "from 0.001 to 500", "--epsilon", "0"),
    "no folder": (_lines(rows(3, text=SECRET)), "no folder", "--output", "no/x.yaml"),
    "over another file": (_lines(rows(3, text=SECRET)), "exists already", "--output", "d.jsonl"),
    "no model": (_lines(rows(3, text=SECRET)), "no local folder", "--model", "models/none"),
    "a text for a model": (_lines(rows(3, text=SECRET)), "not shown: it is a text", "--model", SECRET),
}
"""What is there -> who makes the file, words of the refusal, and further arguments."""


def _bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_in_one_line(
    name: str, base: Path, here: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words, *more = BAD[name]
    path = make(here)
    words = (words,) if isinstance(words, str) else words
    refuses(call, here, ["init", path, "--model", base, *more], *words, "Fix: ")
    assert SECRET not in capsys.readouterr().err
    assert ODD_KEY not in call("init", path, "--model", base, *more).err


def test_what_the_command_line_lacks(here: Path, call: Call) -> None:
    refuses(call, here, ["init", "--model", "a/b"], "no DATA is given")
    refuses(call, here, ["init", jsonl(here / "d.jsonl", rows(3, text=SECRET))], "no model is given")


def test_all_that_is_wrong_is_told_at_once(here: Path, call: Call) -> None:
    jsonl(here / "d.jsonl", rows(3, text=SECRET))
    (here / "d.yaml").touch()
    asked = ["init", "d.jsonl", "--model", "models/none", "--epsilon", "-1"]
    refuses(call, here, asked, "--epsilon -1", "'d.yaml' exists already", "'models/none'")
    refuses(call, here, ["init", "e.jsonl"], "there is no file e.jsonl", "no model is given")


def test_a_tokenizer_without_a_chat_template_gets_a_plain_one(here: Path, call: Call) -> None:
    plain = save_base(here / "plain")
    calls = [{"function": {"name": "look", "arguments": "{}"}}]
    odd = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "Greta"},
        {"role": "assistant", "content": "Greta."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here."},
    ]
    records = [*rows(9, messages=chat), {"messages": odd}]
    settings = started(call, jsonl(here / "d.jsonl", records), "--model", plain)[0]
    data = settings.data
    assert data.chat_template == PLAIN_CHAT
    tokenizer = AutoTokenizer.from_pretrained(plain)
    examples = build_examples(
        records, Template(**data.columns), tokenizer, max_length=1000, loss_on="completion"
    )
    first, last = examples[0], examples[9]
    assert tokenizer.decode(first.input_ids) == f"user: {SECRET}?\nassistant: yes 0</s>\n"
    assert tokenizer.decode(first.input_ids[first.labels >= 0]) == "yes 0</s>\n"
    whole = tokenizer.decode(last.input_ids)
    assert whole.startswith("system: Be brief.\nuser: Who?\nassistant: [{")
    assert "look" in whole
    assert whole.endswith("tool: Greta\nassistant: Greta.</s>\nuser: Where?\nassistant: Here.</s>\n")
    assert tokenizer.decode(last.input_ids[last.labels >= 0]).endswith("}]</s>\nGreta.</s>\nHere.</s>\n")


def test_at_the_models_limit_nothing_is_said_to_fit(base: Path, here: Path, call: Call) -> None:
    """By the length alone, which stands there: how many records are longer is theirs."""
    wide = save_base(here / "wide", positions=9000)
    for name, folder, text, length in (
        ("long", base, 40 * SECRET, 128),
        ("just", base, 3 * SECRET, 128),
        ("short", wide, 2 * SECRET, 128),
        ("longest", wide, 400 * SECRET, 2048),
    ):
        records = jsonl(here / f"{name}.jsonl", rows(9, text=text))
        settings, written, _ = started(call, records, "--model", folder)
        assert settings.data.max_length == length
        assert ("most records fit" in written) == (name == "short")
        assert ("longer records are cut" in written) == (name != "short")


# --- several owners ---


def _clinics(folder: Path, *names: str, count: int = 40, **columns: Any) -> list[Path]:
    return [jsonl(folder / name, rows(count, **(columns or {"text": SECRET}))) for name in names]


@pytest.mark.parametrize("count", [40, 4000])
def test_a_federation_that_runs_as_it_is(count: int, base: Path, here: Path, call: Call) -> None:
    files = _clinics(here, "north.jsonl", "south ward.jsonl", count=count)
    settings, text, _ = started(call, *files, "--clients", "--model", base)
    federation = settings.federation
    assert settings.adapter.target_modules == "all-linear"
    assert [(each.name, each.path) for each in federation.clients] == [
        ("north", str(files[0])),
        ("south-ward", str(files[1])),
    ]
    plan = client_plan(with_local_method(settings))
    assert plan.steps == federation.rounds * federation.local_steps
    assert f"{plan.steps} in all are charged" in text
    assert settings.privacy.n == 2 * count
    assert "Greta" not in text
    assert max(len(line) for line in text.splitlines() if str(here) not in line) <= 120
    pytest.importorskip("cryptography", reason="of the extra federated")
    from privlora.federated.run import _refuse_missing_sources

    _refuse_missing_sources(with_local_method(settings), None, None)
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_the_files_of_a_folder_are_the_clients(base: Path, here: Path, call: Call) -> None:
    (here / "wards").mkdir()
    _clinics(here / "wards", "b.jsonl", "a.jsonl")
    (here / "wards/README.md").write_text("no records")
    call("init", "wards", "--clients", "--model", base)
    federation = load_settings("federation.yaml").federation
    assert federation.names == ["a", "b"]


def test_names_that_are_none_are_numbers(here: Path) -> None:
    def named(*paths: str) -> list[str]:
        return [each.name for each in owners_of(paths)]

    assert named("x/notes.jsonl", "y/notes.jsonl", "z.csv.gz") == ["client-1", "client-2", "client-3"]
    assert named("Ä.jsonl", "b.jsonl") == ["client-1", "client-2"]
    assert named("a.jsonl", "A.jsonl") == ["client-1", "client-2"]
    assert named("-St. Mary (2).jsonl", "b.csv.gz") == ["St", "b"]


FEDERATED_BAD: dict[str, tuple[list[str], list[str]]] = {
    "one owner": (["north.jsonl"], ["--clients, and 1 file of records", "at least two"]),
    "chats without a template": (["c.jsonl", "d.jsonl"], ["no chat template", "is a program"]),
    "preferences": (["p.jsonl", "q.jsonl"], ["data.chosen does not go with a federation"]),
}


@pytest.mark.parametrize("name", FEDERATED_BAD)
def test_what_no_federation_can_be_of(name: str, here: Path, call: Call) -> None:
    plain = save_base(here / "plain")
    _clinics(here, "north.jsonl", "south.jsonl")
    _clinics(here, "c.jsonl", "d.jsonl", messages=chat)
    _clinics(here, "p.jsonl", "q.jsonl", prompt="Who?", chosen=SECRET, rejected="Nobody.")
    argv, words = FEDERATED_BAD[name]
    refuses(call, here, ["init", *argv, "--clients", "--model", plain], *words, "Fix: ")


def test_a_full_disk_leaves_nothing(
    base: Path, here: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    records = jsonl(here / "d.jsonl", rows(9, text=SECRET))
    monkeypatch.setattr("os.fsync", full)
    refuses(call, here, ["init", records, "--model", base], "No space left")
    assert [path.name for path in here.iterdir()] == ["d.jsonl"]


def test_a_file_that_came_meanwhile_is_kept(
    base: Path, here: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    records = jsonl(here / "d.jsonl", rows(9, text=SECRET))
    monkeypatch.setattr("os.fsync", lambda _: (here / "d.yaml").write_text("mine"))
    check(call("init", records, "--model", base), "exists already")
    assert (here / "d.yaml").read_text() == "mine"
    assert len(tree(here)) == 2


def test_settings_are_listed(call: Call) -> None:
    shown = call("settings", "privacy.delta")
    assert shown.code == 0
    assert "privacy.delta  (number, above 0, below 1 or null; default null)" in shown.out
    assert "1 / public_dataset_size" in shown.out
    found = call("settings", "--json").json["settings"]
    assert {each["place"].partition(".")[0] for each in found} == set(Settings.model_fields)
    assert yaml.safe_load(call("settings", "--schema").out)["$defs"]["PrivacySettings"]
    for words in (["gradient", "checkpointing"], ["gradient checkpointing"]):
        (one,) = call("settings", *words, "--json").json["settings"]
        assert one["place"] == "model.gradient_checkpointing"
    check(call("settings", "privacy.dela"), "did you mean 'privacy.delta'?")
    check(call("settings", "privacy", "--schema"), "the schema is of a whole file")


OPTIONS = {
    "--steps 3": "settings have no dashes: write privacy.steps=…",
    "--learning_rate 1e-4": "write method.learning_rate",
    "--learning-rate=1e-4": "write method.learning_rate",
    "--privacy.steps 3": "write privacy.steps",
    "--privacy.stepz 3": "write privacy.steps",
    "--max_grad_norm 1": "privacy.clip_norm",
    "--num_train_epochs 3": "privacy.steps",
    "--nothing 3": "see `privlora train --help`",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_settings_as_options(option: str, call: Call) -> None:
    check(call("train", "run.yaml", *option.split()), OPTIONS[option])


def test_all_settings_as_options_are_told_at_once(call: Call) -> None:
    outcome = call("train", "run.yaml", "--epochs", 3, "--lr=2e-4", "--json")
    check(outcome, "error: 2 mistakes:", "method.learning_rate", "'--epochs'")
    assert "--json" not in outcome.err


def test_a_record_in_the_place_of_an_option_is_not_shown(call: Call) -> None:
    outcome = call("train", "run.yaml", "--steps", SECRET)
    check(outcome, "write privacy.steps")
    assert SECRET not in outcome.err


def test_no_exact_number_of_records_or_users_is_told(base: Path, here: Path, call: Call) -> None:
    records = jsonl(here / "d.jsonl", rows(4307, text=SECRET, patient_id=lambda i: f"Mr{i % 950}"))
    _, text, outcome = started(call, records, "--model", base)
    for said in (text, outcome.out, outcome.err):
        assert "4307" not in said
        assert "950" not in said


def test_a_name_that_is_no_folder_is_said_to_be_the_hubs(here: Path, call: Call) -> None:
    jsonl(here / "d.jsonl", rows(300, text=SECRET))
    (here / "models" / "stories260K").mkdir(parents=True)
    (here / "models" / "stories260K" / "config.json").write_text("{}")
    told = call("init", "d.jsonl", "--model", "stories260k")
    assert told.code == 0, told.err
    assert "the hub will be asked for it by that name. " in told.err
    assert "Did you mean the folder 'models/stories260K'?\n" in told.err
