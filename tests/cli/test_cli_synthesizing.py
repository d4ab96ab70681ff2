"""privlora synthesize: what lies in the release, where the texts come from, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Call, record, refuses, run_settings, tree, write_config, write_records
from safetensors.torch import load_file, save_file

from privlora.accounting import read_ledger
from privlora.api import resume_run, train_run
from privlora.cli import main
from privlora.config import load_settings
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.reporting.pushing import push
from privlora.training.files import RunFolder

VOTES = {"steps": 2, "sample_rate": 1.0, "expected_batch_size": None}
TEXTS = {"seeds": 3, "variations": 1}


def public(number: int) -> dict[str, Any]:
    return {"text": f"visitor {number} of ward {number % 3} left a note on day {number * 7}."}


def settings(model: Path, folder: Path, /, **groups: Any) -> dict[str, dict[str, Any]]:
    """Aug-PE on a public file; the texts of a round are the next ones of it."""
    write_records(folder / "records.jsonl")
    file = str(write_records(folder / "public.jsonl", 60, make=public))
    given = {"method": {"name": "aug-pe"}, "privacy": VOTES, "synthesis": {**TEXTS, "file": file}}
    return run_settings(model, folder, **{**given, **groups})


@pytest.fixture(scope="module")
def voted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A finished release of texts by Aug-PE, beside run.yaml."""
    folder = tmp_path_factory.mktemp("voted")
    config = write_config(folder, settings(model, folder, run={"label": "cases"}))
    assert main(["synthesize", str(config), "synthesis.samples=8"]) == 0
    return folder


def test_texts_are_pushed_as_they_were_written(voted: Path, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(voted / "run", tmp_path / "run")))
    pushed = push(run, "me/texts", dry_run=True)
    assert (pushed.kind, "synthetic.jsonl" in pushed.files) == ("dataset", True)
    with open(run.texts, "a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "a patient"}) + "\n")
    with pytest.raises(PrivacyError, match=r"synthetic.jsonl in .* is not as the run wrote it"):
        push(run, "me/texts", dry_run=True)


def texts_of(release: Path, column: str = "text") -> list[str]:
    rows = [json.loads(line) for line in (release / "synthetic.jsonl").read_text().splitlines()]
    assert all(list(row) == [column] for row in rows)
    return [row[column] for row in rows]


@pytest.mark.usefixtures("drawn")
def test_the_release_is_a_data_set(voted: Path) -> None:
    release = voted / "run/release"
    files = ["README.md", "ledger.jsonl", "privacy_report.json", "report.html", "synthetic.jsonl"]
    assert sorted(tree(release)) == files
    texts = texts_of(release)
    assert len(set(texts)) == 8
    assert set(texts) <= {public(i)["text"] for i in range(60)}
    assert read_ledger(release / "ledger.jsonl").charges == 2
    report = json.loads((release / "privacy_report.json").read_text())
    assert report["texts"]["count"] == len(report["quality"]["tokens_per_text"]) == 8
    assert report["texts"]["from"] == "population"
    assert report["quality"]["near_public"] == {"synthesis.file": 1.0}
    card = (release / "README.md").read_text()
    assert "data_files: synthetic.jsonl" in card
    assert "All of them are texts of the public file, word for word" in card
    assert "Learning rate" not in card  # nothing was trained
    for page in (card, (release / "report.html").read_text()):
        assert "8 public texts that were chosen privately" in page


def test_nothing_of_the_machine_or_the_records_is_in_it(voted: Path) -> None:
    content = b"".join(content or b"" for content in tree(voted / "run/release").values())
    assert str(voted).encode() not in content
    assert b"records.jsonl" not in content
    assert not any(record(i)["text"].encode() in content for i in range(40))
    times = {path.stat().st_mtime_ns for path in (voted / "run/release").iterdir()}
    assert len(times) == 1
    assert times.pop() % (86400 * 10**9) == 0


def test_a_finished_release_is_resumed_to_the_same(voted: Path, call: Call) -> None:
    before = tree(voted / "run")
    ended = call("resume", voted / "run", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["count"] == 8
    assert ended.json["private"] is True
    assert ended.json["quality"]["near_public"] == {"synthesis.file": 1.0}
    assert {name: content for name, content in tree(voted / "run").items() if "private" not in name} == {
        name: content for name, content in before.items() if "private" not in name
    }
    assert call("report", voted / "run").code == 0
    assert tree(voted / "run/release") == {
        name.removeprefix("release/"): content
        for name, content in before.items()
        if name.startswith("release/")
    }


def test_then_train_on_it(voted: Path, folder: Path, model: Path, call: Call) -> None:
    open_run = run_settings(
        model, folder, privacy={"private": False, "noise_multiplier": None, "delta": None}
    )
    config = write_config(folder, {**open_run, "method": {"name": "adamw"}})
    ended = call("train", config, f"data.path={voted}/run/release/synthetic.jsonl", "data.unchecked=true")
    assert ended.code == 0, ended.err
    assert (folder / "run/not-private/adapter_model.safetensors").exists()
    # What that adapter writes promises nothing about the records of its own run, and does not say that it does.
    argv = ["synthesize", config, "--from", folder / "run", f"run.output={folder / 'open'}"]
    asked = call(*argv, "synthesis.samples=3", "synthesis.max_new_tokens=8", "--json")
    assert asked.code == 0, asked.err
    assert asked.json["private"] is False
    assert not (folder / "open/release").exists()
    assert "# NOT PRIVATE: 3 synthetic texts" in (folder / "open/not-private/README.md").read_text()


def test_an_adapter_that_was_trained_before_is_asked_at_no_cost(
    finished: Path, folder: Path, model: Path, call: Call
) -> None:
    chosen = {"max_new_tokens": 12, "random_prompt": "Ada came in with"}
    # With it a figure would tell how many texts are near copies of what may be the records under another name.
    evaluation = write_records(folder / "said-to-be-public.jsonl")
    data = {"path": "not-there.jsonl", "evaluation": str(evaluation)}
    config = write_config(folder, run_settings(model, folder, synthesis=chosen, data=data))
    argv = ["synthesize", config, "--from", finished / "run", "synthesis.samples=40"]
    ended = call(*argv, "--json")
    assert ended.code == 0, ended.err
    release = folder / "run/release"
    assert ended.json["count"] == len(set(texts_of(release))) == 40
    own, theirs = read_ledger(release / "ledger.jsonl"), read_ledger(finished / "run/release/ledger.jsonl")
    assert own.run_id == theirs.run_id
    assert ended.json["epsilon"] == theirs.epsilon()
    assert "asking its adapter cost nothing more" in (release / "README.md").read_text()
    report = json.loads((release / "privacy_report.json").read_text())
    report.pop("answers")  # the adapter's own, to its public prompts
    assert "data.evaluation" not in json.dumps(report)
    again = call("budget", finished / "run", folder / "run", "--json")
    assert again.json["epsilon"] == theirs.epsilon()
    # Half done: the texts that are there are gone on with, and the same seed writes the same others.
    whole = texts_of(release)
    (release / "synthetic.jsonl").unlink()
    assert call("resume", folder / "run").code == 0
    assert texts_of(release) == whole


def test_other_methods_train_and_their_adapter_writes(model: Path, folder: Path, call: Call) -> None:
    chosen = {"max_new_tokens": 12, "seeds": 3, "random_prompt": "Ada came in with"}
    given = run_settings(
        model, folder, method={"name": "prism"}, synthesis=chosen, data={"text": "Note: {text}"}
    )
    ended = call("synthesize", write_config(folder, given), "synthesis.samples=5")
    assert ended.code == 0, ended.err
    assert len(texts_of(folder / "run/release")) == 5
    report = json.loads((folder / "run/release/privacy_report.json").read_text())
    assert report["texts"]["from"] == "adapter"
    assert "step 3/3" in ended.err
    assert "texts to release: " in ended.err
    assert re.search(r"figures:  5 texts, perplexity \S+ under the base model", ended.out)
    assert load_settings(folder / "run/private/config.resolved.yaml").synthesis.publish  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"synthesis": None}, ["nothing says who writes the texts", "add the group synthesis"]),
        ({"method": {"name": "prism"}}, ["synthesis.file asks another writer", "remove synthesis.file"]),
        ({"method": {"name": "pe-sgd-fix"}}, ["synthesis.file asks another writer"]),
        ({"method": {"name": "aug-p"}}, ["unknown method 'aug-p'", "aug-pe"]),
        (
            {"data": {"text": None, "prompt": "question", "completion": "answer"}},
            ["synthesis writes whole texts"],
        ),
        ({"synthesis": {**TEXTS, "seeds": 40}}, [" has 60 different texts", "lower synthesis.seeds"]),
    ],
)
def test_bad_settings_are_refused(
    change: dict[str, Any], words: list[str], model: Path, folder: Path, call: Call
) -> None:
    groups = settings(model, folder)
    for group, values in change.items():
        if values is None:
            del groups[group]
        else:
            merged = {**groups.get(group, {}), **values}
            groups[group] = {key: value for key, value in merged.items() if value is not None}
    ended = call("synthesize", write_config(folder, groups))
    assert ended.code == 2
    for word in words:
        assert word in ended.err
    assert "Traceback" not in ended.err
    assert not (folder / "run/release/synthetic.jsonl").exists()


def test_an_embedding_that_is_not_there_is_refused_before_anything_is_charged(
    model: Path, folder: Path, call: Call
) -> None:
    config = write_config(folder, settings(model, folder))
    refuses(
        call, folder, ["synthesize", config, "synthesis.embedding=no/such-model"], "embedding", quiet=False
    )


def test_runs_without_an_adapter_cannot_be_asked(voted: Path, model: Path, folder: Path, call: Call) -> None:
    config = write_config(folder, run_settings(model, folder, synthesis={"max_new_tokens": 8}))
    for source, words in (
        (voted / "run", "no adapter that could be asked"),
        (folder / "nowhere", "no run in"),
    ):
        refuses(call, folder, ["synthesize", config, "--from", source], words, quiet=False)


def test_a_run_that_is_not_there_is_told_beside_wrong_settings(model: Path, folder: Path, call: Call) -> None:
    config = write_config(folder, run_settings(model, folder, synthesis={"max_new_tokens": 8}))
    words = ("no run in 'runs/none'", "unknown setting 'synthesis.count'")
    argv: list[object] = ["synthesize", config, "synthesis.count=10", "--from", "runs/none"]
    refuses(call, folder, argv, *words)


def test_another_base_model_is_refused(finished: Path, model: Path, folder: Path, call: Call) -> None:
    config = write_config(folder, run_settings(model, folder, synthesis={"max_new_tokens": 8}))
    argv: list[object] = ["synthesize", config, "--from", finished / "run"]
    other = shutil.copytree(model, folder / "other")
    refuses(call, folder, [*argv, f"model.name={other}"], f"of {model.name!r}, and model.name", quiet=False)
    twin = shutil.copytree(model, folder / "twin" / model.name)
    weights = load_file(twin / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()}, twin / "model.safetensors", {"format": "pt"}
    )
    refuses(call, folder, [*argv, f"model.name={twin}"], "the base model is not the one", quiet=False)


def test_train_refuses_settings_that_release_texts(model: Path, folder: Path, call: Call) -> None:
    config = write_config(folder, settings(model, folder))
    refuses(call, folder, ["train", config, "synthesis.publish=true"], "use `privlora synthesize`")


def test_a_run_that_trains_takes_no_finished_run_for_itself(
    finished: Path, voted: Path, folder: Path, model: Path, call: Call
) -> None:
    config = write_config(folder, settings(model, folder))
    named = ["synthesis.publish=true", f"synthesis.source={finished / 'run'}"]
    refuses(call, folder, ["synthesize", config, *named], "synthesis.source is for --from alone")
    with pytest.raises(ConfigError, match=r"synthesis\.source names a finished run"):
        train_run(load_settings(config, named))
    # Nor on a resume, which would put that run's ledger in the place of its own.
    shutil.copytree(voted / "run", folder / "run")
    kept = RunFolder(folder / "run")
    kept.settings.write_text(load_settings(kept.settings, named).to_yaml())
    before = kept.ledger.read_bytes()
    with pytest.raises(RunError, match="trained on records of its own"):
        resume_run(folder / "run")
    assert kept.ledger.read_bytes() == before


def test_what_needs_gradients_refuses_votes(model: Path, folder: Path, call: Call) -> None:
    config = write_config(folder, settings(model, folder))
    refuses(call, folder, ["audit", config, "--one-run"], "releases votes", quiet=False)
    refuses(call, folder, ["audit", config, "--shadows", 20], "releases votes", quiet=False)


def test_a_plan_counts_rounds(model: Path, folder: Path, call: Call) -> None:
    """Zou et al. 2026: T = 10 rounds of everybody need sigma = 11.80 at (1, 1e-5)."""
    config = write_config(folder, settings(model, folder))
    change = ["privacy.noise_multiplier=null", "privacy.target_epsilon=1", "privacy.delta=1e-5"]
    found = call("plan", config, "privacy.steps=10", *change, "--json")
    assert found.json["noise_multiplier"] == pytest.approx(11.80, abs=0.005)
    assert found.json["releases"] == "votes"


def test_the_texts_are_audited_in_a_folder_of_their_own(model: Path, folder: Path, call: Call) -> None:
    file = str(folder / "public.jsonl")
    chosen = {**TEXTS, "seeds": 20, "variations": 0, "file": file}
    given = settings(model, folder, synthesis=chosen, privacy={**VOTES, "steps": 1}, data={"max_length": 120})
    # What would be evaluated on is no matter of an audit.
    given["data"]["evaluation"] = str(write_records(folder / "held_out.jsonl", 8, first=100))
    config = write_config(folder, given)
    ended = call("synthesize", config, "--audit", "--canaries", 24, "--confidence", 0.9)
    assert ended.code == 0, ended.err
    assert "audit, not for release: epsilon " in ended.err
    assert "PRIVATE: these numbers are about the records" in ended.out
    assert not (folder / "run").exists()
    place = folder / "run-audit"
    assert sorted(tree(place / "release")) == ["AUDIT-NOT-FOR-RELEASE.txt", "ledger.jsonl"]
    again = call("synthesize", config, "--audit", "--canaries", 24, "--json")
    assert again.json["canaries"] == 24
    assert again.json["confidence"] == 0.95
    assert json.loads((place / "private/audit.json").read_text())["included"] == again.json["included"]
    refuses(call, folder, ["resume", place], "holds an audit", quiet=False)
    refuses(call, folder, ["synthesize", config, "--canaries", 24], "--canaries goes with --audit")
    refuses(
        call, folder, ["synthesize", config, "--audit", "--canaries", 25], "holds another run", quiet=False
    )
