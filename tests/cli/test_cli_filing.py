"""report --annex and verify: of runs of every kind, through the command line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_cases import CHECKING, NAMES, Call, after, check, run_settings, write_config, write_records
from federation_cases import federation_settings, write_clients
from test_api_synthesis import make as synthesized
from tiny_models import tiny_model

from privlora.cli import main
from privlora.reporting import verifying
from privlora.reporting.seals import ANNEX, text_of, with_files


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def test_an_annex_is_written_and_verified(run: Path, call: Call) -> None:
    shown = call("report", run, "--annex")
    assert shown.code == 0
    page, data, command = shown.out.splitlines()
    assert [page, data] == [str(run / "release" / name) for name in ("annex.html", "annex.json")]
    annex = json.loads(Path(data).read_text())
    head, digest = annex["ledger"]["head"], annex["sha256"]
    assert command == f"verify: privlora verify {run / 'release'} --hash {digest}"
    again = call("report", run, "--annex", "--json").json
    assert again == {"page": page, "json": data, "head": head, "hash": digest, "signed_by": None}

    shutil.rmtree(run / "private")  # a third person has none
    verified = call("verify", run / "release", "--hash", digest)
    *lines, verdict = verified.out.splitlines()
    assert (verified.code, verdict) == (0, "verified")
    names = ["report", "files", "ledger", "epsilon", "rows", "pages", "annex", "base", "hash", "signature"]
    assert [line.split()[1] for line in lines] == names
    assert [line.split()[0] for line in lines] == ["ok"] * 7 + ["-", "ok", "-"]
    found = call("verify", run / "release", "--json")
    assert found.code == 0
    assert found.json["verified"] is True
    assert (found.json["head"], found.json["epsilon"]) == (head, annex["statement"]["epsilon"])
    assert [check["name"] for check in found.json["checks"]] == names


def test_what_fails_ends_with_1(run: Path, call: Call) -> None:
    call("report", run, "--annex")
    (run / "release" / "adapter_config.json").write_text("{}")
    shown = call("verify", run)
    assert shown.code == 1
    assert after(shown, CHECKING) == []
    assert shown.out.splitlines()[-1].startswith("NOT verified: 2 of 10 checks failed. Do not rely on it")
    assert "FAILED  files      adapter_config.json in" in shown.out
    found = call("verify", run, "--json")
    assert (found.code, found.json["verified"]) == (1, False)


@pytest.mark.parametrize("form", ["merge", "as-lora"])
def test_an_export_is_told_from_a_release(run: Path, form: str, tmp_path: Path, call: Call) -> None:
    """It is no release that failed; what was changed in it is none of an export's, and fails."""
    copy = tmp_path / form
    assert call("export", run, copy, f"--{form}").code == 0
    shown = call("verify", copy)
    assert (shown.code, shown.out) == (2, "")
    assert "is what `privlora export` writes" in shown.err
    assert "Fix: verify RUN/release" in shown.err
    assert "not rely" not in shown.err
    (copy / "records.txt").write_text("a patient")
    shown = call("verify", copy)
    assert shown.code == 1
    assert "FAILED  files" in shown.out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize(
    "endless", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "zero"]
)
def test_a_report_without_end_is_not_read(
    run: Path, endless: Callable[[Path], None], tmp_path: Path, call: Call
) -> None:
    shutil.copy(run / "release/ledger.jsonl", tmp_path)
    endless(tmp_path / "privacy_report.json")
    shown = call("verify", tmp_path)
    assert shown.code == 1
    assert "FAILED  report" in shown.out


def test_nothing_inside_a_release_is_taken_for_its_run(run: Path) -> None:
    private = verifying._Release(run / "release").private
    assert not private.exists()
    assert not private.is_relative_to(run)


def test_an_annex_is_of_a_run_and_not_of_its_release(run: Path, call: Call) -> None:
    shown = call("report", run / "release", "--annex")
    assert shown.code == 2
    assert shown.err.endswith(f"is a part of a run. Fix: give the run's folder, {str(run)!r}\n")


def _hung_up(*_: object, **__: object) -> None:
    raise typer.Abort


def test_a_signature_by_files(run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="signs and verifies")
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, private, public = Ed25519PrivateKey.generate(), tmp_path / "key.pem", tmp_path / "public.pem"
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    private.chmod(0o644)
    shown = call("report", run, "--annex", "--sign", private)
    assert shown.code == 2
    (error,) = after(shown)  # before anything is looked at, as a key may ask for its passphrase
    assert "chmod 600" in error
    assert not (run / "release/annex.json").exists()
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
    )
    monkeypatch.setattr("privlora.cli.filing._has_terminal", lambda: False)
    monkeypatch.setattr("typer.prompt", _hung_up)
    check(call("report", run, "--annex", "--sign", locked), "is encrypted, and there is no terminal")
    private.chmod(0o600)
    assert "signed by the key with fingerprint" in call("report", run, "--annex", "--sign", private).out
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    assert call("verify", run, "--public-key", public).code == 0
    assert "signed by the key" in call("report", run, "--annex").out  # it says the same
    assert call("verify", run, "--public-key", public).code == 0
    (run / "release/annex.json").unlink()
    call("report", run, "--annex")
    assert call("verify", run, "--public-key", public).code == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["report", "nowhere", "--annex"], "no run in"),
        (["report", "RUN", "--annex", "--sign", "nowhere"], "cannot read the key"),
        (["report", "RUN", "--sign", "nowhere"], "--sign signs an annex. Fix: add --annex"),
        (["verify", "nowhere"], "there is no release in"),
        (["verify", "RUN", "--hash", "12"], "is not 64 hexadecimal digits"),
        (["verify", "RUN", "--public-key", "nowhere"], "cannot read the key"),
    ],
)
def test_of_bad_inputs_one_line_is_said(argv: list[str], words: str, run: Path, call: Call) -> None:
    if "key" in words:
        pytest.importorskip("cryptography", reason="of the extra federated")
    shown = call(*(str(run) if word == "RUN" else word for word in argv))
    at_once = "--sign" in argv or argv[1] == "nowhere"
    (error,) = after(shown, *([] if at_once else [CHECKING]))
    assert (shown.code, shown.out) == (2, "")
    assert words in error
    assert not (run / "release/annex.json").exists()


def test_there_is_nothing_to_file_without_privacy(model: Path, folder: Path, call: Call) -> None:
    open_run = run_settings(
        model, folder, privacy={"private": False, "noise_multiplier": None, "delta": None}
    )
    assert main(["train", str(write_config(folder, {**open_run, "method": {"name": "adamw"}}))]) == 0
    shown = call("report", folder / "run", "--annex")
    assert (shown.code, shown.out) == (2, "")
    (error,) = after(shown, CHECKING)
    assert error.startswith("error: nothing to file: the release of the run in")
    assert not list((folder / "run").rglob("annex*"))
    shown = call("verify", folder / "run")
    assert shown.code == 1
    assert "NOT PRIVATE" in shown.out


def _trained(folder: Path, settings: dict[str, Any]) -> Path:
    assert main(["train", str(write_config(folder, settings))]) == 0
    return folder / "run"


def _users(model: Path, folder: Path) -> Path:
    privacy = {"unit": "user", "user_column": "patient", "max_records_per_user": 3, "public_dataset_size": 6}
    return _trained(folder, run_settings(model, folder, privacy=privacy))


def _classes(model: Path, folder: Path) -> Path:
    data = {"label": "patient", "text": "text", "labels": list(NAMES)}
    return _trained(folder, run_settings(model, folder, data=data))


def _preferences(model: Path, folder: Path) -> Path:
    def pair(number: int) -> dict[str, Any]:
        return {"prompt": f"case {number}: ", "chosen": f"good {number}", "rejected": "bad"}

    write_records(folder / "records.jsonl", make=pair)
    data = {"chosen": "chosen", "rejected": "rejected", "prompt": "prompt"}
    return _trained(folder, run_settings(model, folder, data=data))


def _federated(**federation: Any) -> Callable[[Path, Path], Path]:
    def make(model: Path, folder: Path) -> Path:
        given = {"clients": write_clients(folder), **federation}
        settings = federation_settings(model, folder, federation=given, privacy={"public_dataset_size": 48})
        settings["data"].pop("path", None)
        return _trained(folder, settings)

    return make


def _texts(model: Path, folder: Path) -> Path:
    return synthesized(tiny_model(), folder / "run").folder


KINDS: dict[str, tuple[Callable[[Path, Path], Path], dict[str, str]]] = {
    "users": (_users, {"protected/who": "one user: all of a user's records, at most 3 of them in a step"}),
    "classes": (_classes, {"subject/task": "to tell 6 classes of texts"}),
    "preferences": (_preferences, {"subject/task": "which of two answers is preferred"}),
    "texts": (_texts, {"subject/title": "9 synthetic texts", "subject/release": "texts"}),
    "clients' noise": (_federated(), {"subject/rule": "tan", "size/of": "each of 3 clients"}),
    "shares": (
        _federated(rule="joint", local_steps=1, secure_aggregation=True),
        {"subject/rule": "joint", "size/of": "all data"},
    ),
    "server": (
        _federated(rule="fedavg", privacy_model="client", trusted_server=True, clients_per_round=2),
        {"size/of": "the federation", "protected/adjacency": "adding or removing one client"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_filed_and_verified(
    kind: str, model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, told = KINDS[kind]
    root = make(model, folder)
    assert call("report", root, "--annex").code == 0
    release = Path(shutil.move(root / "release", folder / "handed-over"))
    annex = json.loads((release / "annex.json").read_text())
    for path, words in told.items():
        group, name = path.split("/")
        assert annex[group][name] == words
    found = call("verify", release, "--hash", annex["sha256"])
    assert found.code == 0, found.out
    monkeypatch.setattr(verifying, "pages_of", lambda report: {})  # takes most of the time
    for path in sorted(release.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole + b" ")
        assert not verifying.verify(release).passed, path.name
        path.write_bytes(whole)
    assert {path.name for path in release.iterdir()} >= set(ANNEX)


def _failed_when_sealed(release: Path, report: dict[str, Any] | None = None) -> set[str]:
    """Checks that fail where the report, or another one, is sealed anew over what lies there."""
    path = release / "privacy_report.json"
    path.write_text(text_of(with_files(report or json.loads(path.read_text()), release)))
    return {each.name for each in verifying.verify(release).checks if each.passed is False}


@pytest.fixture(scope="module")
def together(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The filed release of a federation whose clients share the noise. Tests must not change it."""
    root = KINDS["shares"][0](model, tmp_path_factory.mktemp("together"))
    assert main(["report", str(root), "--annex"]) == 0
    return root / "release"


@pytest.mark.parametrize(
    ("path", "value", "check"),
    [
        ("colluding/0/epsilon", 0.9, "epsilon"),
        ("colluding/0/noise_multiplier", 2.0, "epsilon"),
        ("colluding/0/clients", 2, "epsilon"),
        ("threshold", 2, "epsilon"),
        ("clients/1/epsilon", 0.1, "clients"),
        ("clients/1/epsilon_planned", 0.1, "clients"),
        ("clients/1/steps_charged", 1, "clients"),
        ("clients/1/delta", 1e-9, "clients"),
        ("statement_of", "south", "clients"),
    ],
)
def test_a_federations_budgets_are_those_of_its_ledgers(
    path: str, value: Any, check: str, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a report that was sealed anew, so that by its hash it is right."""
    monkeypatch.setattr(verifying, "pages_of", lambda report: {})
    release = Path(shutil.copytree(together, tmp_path / "release"))
    report = json.loads((release / "privacy_report.json").read_text())
    inner: Any = report["federation"]
    *way, last = (int(part) if part.isdecimal() else part for part in path.split("/"))
    for part in way:
        inner = inner[part]
    inner[last] = value
    failed = _failed_when_sealed(release, report)
    assert check in failed
    assert failed <= {check, "annex"}


def test_every_clients_ledger_is_read_to_its_end(
    together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "pages_of", lambda report: {})
    release = Path(shutil.copytree(together, tmp_path / "release"))
    lines = (release / "ledger-south.jsonl").read_bytes().splitlines(keepends=True)
    for changed in (lines[:-1], lines[:-2], [*lines, b"a patient"], lines[1:]):
        (release / "ledger-south.jsonl").write_bytes(b"".join(changed))
        assert {"clients", "annex"} <= _failed_when_sealed(release)


def test_no_ledger_of_nobody_is_part_of_a_release(
    together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "pages_of", lambda report: {})
    release = Path(shutil.copytree(together, tmp_path / "release"))
    shutil.copy(release / "ledger-south.jsonl", release / "ledger-nobody.jsonl")
    assert _failed_when_sealed(release) == {"clients", "annex"}


def test_no_name_of_a_client_leads_out_of_the_folder(together: Path, tmp_path: Path) -> None:
    release = Path(shutil.copytree(together, tmp_path / "place" / "release"))
    (tmp_path / "place" / "ledger-x").mkdir()
    report = json.loads((release / "privacy_report.json").read_text())
    report["federation"]["clients"][0]["name"] = report["federation"]["statement_of"] = "x/../../../secret"
    (tmp_path / "secret.jsonl").write_text("a patient")
    (release / "privacy_report.json").write_text(text_of(with_files(report, release)))
    found = verifying.verify(release)
    assert not found.passed
    assert "a patient" not in str(found)
