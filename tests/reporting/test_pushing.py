"""A release on the hub: the files that reporting writes and nothing else, of runs that protect somebody."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from push_cases import BASE, FILES, Hub, sealed_again

from privlora.accounting import read_ledger
from privlora.cli import main
from privlora.demo import model_path
from privlora.errors import ConfigError, PrivacyError, PrivloraError, RunError
from privlora.reporting import pushing
from privlora.reporting.pushing import push
from privlora.result import Result
from privlora.training.files import AUDIT_MARK, RunFolder


def test_the_release_goes_up_and_nothing_else(run: RunFolder) -> None:
    hub = Hub()
    pushed = push(run, "me/notes", base_model=BASE, api=hub)
    assert pushed.files == FILES == tuple(sorted(hub.files))
    assert pushed.url == "https://hub.test/me/notes"
    assert hub.made == {"repo": "me/notes", "repo_type": "model", "private": True, "exist_ok": True}
    same = set(FILES) - {"README.md", "adapter_config.json", "privacy_report.json", "report.html"}
    assert all(hub.files[name] == (run.release / name).read_bytes() for name in same)


def test_a_local_base_gets_its_name_on_the_hub(run: RunFolder) -> None:
    hub, before = Hub(), {path.name: path.read_bytes() for path in run.release.iterdir()}
    push(run, "me/notes", base_model=BASE, private=False, api=hub)
    assert not hub.made["private"]
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == BASE
    card = hub.files["README.md"].decode()
    assert f"base_model: {BASE}" in card
    assert f"from_pretrained('{BASE}')" in card
    report = json.loads(hub.files["privacy_report.json"])
    assert (report["adapter"]["base_model"], report["adapter"]["base_is_local"]) == (BASE, False)
    assert report["statement"] == json.loads(before["privacy_report.json"])["statement"]
    local = json.loads(before["privacy_report.json"])["adapter"]["base_model"]
    for name, content in hub.files.items():
        assert str(model_path()).encode() not in content, name
        assert f"path/to/{local}".encode() not in content, name
    assert before == {path.name: path.read_bytes() for path in run.release.iterdir()}


def test_a_local_base_without_a_name_is_refused(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="name the hub's copy of the base: --base-model"):
        push(run, "me/notes", api=Hub())


def test_a_base_of_the_hub_keeps_its_name(run: RunFolder) -> None:
    for name, group, key in (
        ("privacy_report.json", "adapter", "base_model"),
        ("adapter_config.json", "", ""),
    ):
        content = json.loads((run.release / name).read_text())
        if group:
            content[group] |= {key: BASE, "base_is_local": False}
        else:
            content["base_model_name_or_path"] = BASE
        (run.release / name).write_text(json.dumps(content))
    sealed_again(run)
    for name in ("README.md", "report.html"):
        (run.release / name).write_text("a patient")
    hub = Hub()
    push(run, "me/notes", api=hub)
    same = set(FILES) - {"README.md", "privacy_report.json", "report.html"}  # which are made anew
    assert all(hub.files[name] == (run.release / name).read_bytes() for name in same)
    assert json.loads(hub.files["privacy_report.json"]) == json.loads(run.report.read_text())
    assert all(b"a patient" not in content for content in hub.files.values())
    (run.release / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/home/me/base"}))
    sealed_again(run)
    with pytest.raises(RunError, match="names another base model than the report"):
        push(run, "me/notes", api=hub)


def _unknown(run: RunFolder) -> None:
    (run.release / "notes.jsonl").write_text("{}")


def _hidden(run: RunFolder) -> None:
    (run.release / ".adapter.privlora-tmp").write_text("{}")


def _folder(run: RunFolder) -> None:
    (run.release / "choice.json").mkdir()


def _link(run: RunFolder) -> None:
    (run.release / "choice.json").symlink_to(run.settings.absolute())


def _hard_link(run: RunFolder) -> None:
    (run.release / "metrics.jsonl").unlink(missing_ok=True)
    (run.release / "metrics.jsonl").hardlink_to(run.private / "training_loss.jsonl")


def _planted_choice(run: RunFolder) -> None:
    (run.release / "choice.json").write_text('{"note": "a patient"}')


def _altered_evaluations(run: RunFolder) -> None:
    path = run.release / "evaluations.jsonl"
    row, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(row), "note": "a patient"}), *others]) + "\n")


def _private_losses(run: RunFolder) -> None:
    (run.release / "metrics.jsonl").write_bytes((run.private / "training_loss.jsonl").read_bytes())


def _no_rows(run: RunFolder) -> None:
    (run.release / "metrics.jsonl").write_text("a patient\n")


def _linked(run: RunFolder) -> None:
    elsewhere = run.release.rename(run.root / "elsewhere")
    run.release.symlink_to(elsewhere.absolute())


def _open(run: RunFolder) -> None:
    run.release.rename(run.root / "not-private")


def _audit(run: RunFolder) -> None:
    (run.release / AUDIT_MARK).write_text("")


def _unmarked_audit(run: RunFolder) -> None:
    run.canaries.write_bytes(b"")


def _stamped(run: RunFolder) -> None:
    report = json.loads(run.report.read_text())
    report["stamp"] = {"text": "NOT PRIVATE", "reason": "repeatable"}
    run.report.write_text(json.dumps(report))


def _unfinished(run: RunFolder) -> None:
    run.report.unlink()


def _not_closed(run: RunFolder) -> None:
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(lines[:-1]))


def _no_weights(run: RunFolder) -> None:
    (run.release / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "error", "says"),
    [
        (_unknown, PrivacyError, "'notes.jsonl' in .* is nothing that a run leaves there"),
        (_hidden, PrivacyError, "may hold records"),
        (_folder, PrivacyError, "'choice.json' in .* is no file"),
        (_link, PrivacyError, "'choice.json' in .* is a link"),
        (_hard_link, PrivacyError, "'metrics.jsonl' in .* is a link"),
        (_unmarked_audit, PrivacyError, "holds an audit"),
        (_linked, PrivacyError, "release' is a link"),
        (_planted_choice, PrivacyError, "choice.json in .* is not as the run wrote it"),
        (_altered_evaluations, PrivacyError, "evaluations.jsonl in .* is not as the run wrote it"),
        (_private_losses, PrivacyError, "metrics.jsonl in .* is not as the run wrote it"),
        (_no_rows, PrivacyError, "metrics.jsonl in .* is not as the run wrote it"),
        (_open, PrivacyError, "NOT PRIVATE"),
        (_stamped, PrivacyError, "NOT PRIVATE"),
        (_audit, PrivacyError, "holds an audit"),
        (_unfinished, RunError, "privlora resume"),
        (_not_closed, RunError, "is not finished"),
        (_no_weights, RunError, "lacks adapter_model.safetensors"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_is_not_for_release_stays(
    harm: Callable[[RunFolder], None],
    error: type[PrivloraError],
    says: str,
    dry_run: bool,
    run: RunFolder,
) -> None:
    harm(run)
    hub = Hub()
    with pytest.raises(error, match=says):
        push(run, "me/notes", base_model=BASE, dry_run=dry_run, api=hub)
    assert not hub.made


def test_a_ledger_that_says_audit_is_not_pushed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its mark and its canaries are gone."""
    monkeypatch.setattr(pushing, "AUDITED", read_ledger(run.ledger).plan.dataset)
    with pytest.raises(PrivacyError, match="holds an audit"):
        push(run, "me/notes", base_model=BASE, dry_run=True)


@pytest.mark.parametrize("name", ["", "a/b/c", "me/no tes", "../notes", "/etc", "a" * 97, "notes"])
def test_names_are_the_hubs(name: str, run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="is no name of a repository"):
        push(run, name, base_model=BASE, api=Hub())
    if name not in ("", "notes"):
        with pytest.raises(ConfigError, match=r"no hub name of a base model|no name of a repository"):
            push(run, "me/notes", base_model=name.replace("a" * 97, "./a"), api=Hub())


def test_what_the_hub_says_is_not_repeated(run: RunFolder) -> None:
    class Closed(Hub):
        def create_repo(self, repo: str, **options: Any) -> None:
            raise ValueError("token hf_secret is not allowed")

    with pytest.raises(RunError, match=r"the hub did not take 'me/notes' \(ValueError\)") as refused:
        push(run, "me/notes", base_model=BASE, api=Closed())
    assert "secret" not in str(refused.value)


def test_the_command_shows_before_it_sends(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    command = ["push", str(run.root), "me/notes", "--base-model", BASE]
    assert main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[-1] for line in shown.splitlines()[: len(FILES)]] == list(FILES)
    assert "no tokenizer: it is the base model's" in shown
    assert "nothing was sent" in shown
    assert not hub.made
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        **{"repo": "me/notes", "kind": "model", "files": list(FILES)},
        "url": "https://hub.test/me/notes",
    }
    assert main(["push", str(run.root), "me/notes"]) == 2


def test_a_result_tells_what_the_run_left(finished: Result, run: RunFolder) -> None:
    assert finished.page.name == "report.html"
    assert finished.card.read_text().startswith("---")
    assert finished.report["statement"]["epsilon"] == pytest.approx(finished.epsilon)
    rows = finished.history
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["epsilon"] == pytest.approx(finished.epsilon)
    assert [row["held_out_loss"] is None for row in rows] == [False, True, True, False]
    lines = (finished.release / "metrics.jsonl").read_text().splitlines()
    assert rows == [json.loads(line) for line in lines]
    assert finished.push("me/notes", base_model=BASE, dry_run=True).files == FILES
    assert Result(run.release, 3, None, None).history == rows
    model = finished.model
    assert model is finished.model
    assert type(model).__name__.startswith("PeftModel")
    assert not model.training
    handed_over = Result(run.release, 3, None, None, base_was_given=True)
    with pytest.raises(RunError, match=r"PeftModel.from_pretrained\(model, result.release\)"):
        _ = handed_over.model


def test_what_comes_to_lie_there_meanwhile_stays(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = pushing.files_of

    def late(*arguments: Any) -> tuple[str, ...]:
        found = looked(*arguments)
        (run.release / "notes.jsonl").write_text("{}")
        return found

    monkeypatch.setattr(pushing, "files_of", late)
    hub = Hub()
    push(run, "me/notes", base_model=BASE, api=hub)
    assert tuple(sorted(hub.files)) == FILES
