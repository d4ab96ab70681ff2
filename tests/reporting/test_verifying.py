"""What a third person finds in a release alone: whatever is changed in it, some check fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from annex_cases import failed, forged, leaves, said, told
from push_cases import FILES, appended, sealed_again
from reporting_cases import Run

from privlora.accounting import Ledger
from privlora.accounting.events import StepEvent
from privlora.accounting.ledger_format import read_ledger
from privlora.errors import ConfigError, PrivloraError, RunError
from privlora.reporting import verifying
from privlora.reporting.fields import FIELDS, TEXT
from privlora.reporting.filing import file_annex
from privlora.reporting.publication import stated
from privlora.reporting.seals import ANNEX
from privlora.reporting.statement import noise_facts
from privlora.reporting.verifying import verify
from privlora.training.files import RunFolder
from privlora.version import VERSION, version_of

pytestmark = pytest.mark.usefixtures("drawn")  # pages are made again, as the run made them

KEYS = ("schema_version", "written_by", "subject", "to_fill", "statement", "means", "protected", "size")
KEYS += ("public", "private", "attacks", "risks", "versions", "ledger", "files", "sha256")


def in_a_run(release: Path) -> RunFolder:
    """The release moved into the folder of a run."""
    folder = RunFolder(release.parent / "run")
    folder.root.mkdir()
    release.rename(folder.root / "release")
    return folder


@pytest.mark.usefixtures("quick")
def test_what_a_hub_leaves_beside_a_download_is_named(release: Path, tmp_path: Path) -> None:
    (release / ".cache" / "huggingface").mkdir(parents=True)
    (release / ".gitattributes").write_text("*.safetensors filter=lfs")
    (tmp_path / "link").symlink_to(release)
    found = verify(tmp_path / "link")
    assert found.passed
    assert "no unexpected files but .cache, .gitattributes" in found.checks[1].found
    for name in (".DS_Store", "Thumbs.db"):
        (release / name).touch()
        assert "a file of the operating system, which is no part" in verify(release).checks[1].found
        assert not verify(release).passed
        (release / name).unlink()


def test_a_whole_release_is_verified_by_itself_and_in_its_run(filed: RunFolder, release: Path) -> None:
    before = {path.name: path.read_bytes() for path in release.iterdir()}
    for place in (release, filed.root, filed.release):
        found = verify(place, annex_hash=said(release)["sha256"])
        assert failed(found) == []
        assert [check.name for check in found.checks if check.passed is None] == ["base", "signature"]
        assert found.passed
        assert found.epsilon == pytest.approx(said(release)["statement"]["epsilon"])
        assert found.head == said(release)["ledger"]["head"]
    assert {path.name: path.read_bytes() for path in release.iterdir()} == before


def test_a_release_without_an_annex_is_verified_too(run: RunFolder) -> None:
    found = verify(run.release)
    assert found.passed
    absent = {check.name: check.found for check in found.checks if check.passed is None}
    assert absent.keys() == {"annex", "base", "hash", "signature"}
    assert "there is none" in absent["annex"]


def test_no_private_file_is_opened(filed: RunFolder, tmp_path: Path) -> None:
    root = Path(shutil.copytree(filed.root, tmp_path / "run"))
    for path in (root / "private").iterdir():
        path.unlink()
        path.mkdir()  # whoever reads it gets an error
    assert verify(root).passed


def _another(value: Any) -> Any:
    """Of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * (1 - 1e-5)
    return "a patient" if value is None else f"{value} "


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_the_annex_can_be_changed(key: str, release: Path) -> None:
    """Not even by who makes its hash and its page anew, which differ where they are not."""
    assert set(KEYS) == said(release).keys()
    kept = {name: (release / name).read_bytes() for name in ANNEX}
    for path in [leaf for leaf in leaves(said(release)) if leaf.split("/")[0] == key]:
        found = forged(release, partial(_altered, path=path), anew=key != "sha256")
        assert failed(found) == ["annex"], path
        for name, content in kept.items():
            (release / name).write_bytes(content)


def _altered(annex: dict[str, Any], path: str) -> None:
    value: Any = annex
    for part in path.split("/"):
        value = value[int(part) if part.isdecimal() else part]
    told(annex, path, ["a patient"] if isinstance(value, list | dict) else _another(value))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("where", ["", "statement", "means", "ledger", "files", "subject"])
def test_nothing_is_added_to_an_annex(where: str, release: Path) -> None:
    assert failed(forged(release, lambda annex: told(annex, f"{where}/note".strip("/"), 1))) == ["annex"]


@pytest.mark.usefixtures("quick")
def test_nothing_is_left_out_of_an_annex(release: Path) -> None:
    for name in ("risks", "means", "statement", "written_by", "sha256"):
        kept = (release / "annex.json").read_text()
        annex = said(release)
        del annex[name]
        (release / "annex.json").write_text(json.dumps(annex, indent=1, ensure_ascii=False) + "\n")
        assert failed(verify(release)) == ["annex"]
        (release / "annex.json").write_text(kept)


def test_another_machines_rounding_is_no_difference(release: Path) -> None:
    def nearly(annex: dict[str, Any]) -> None:
        annex["statement"]["epsilon"] *= 1 + 1e-9
        annex["means"]["found_at_1_percent"] *= 1 - 1e-9

    assert forged(release, nearly).passed


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", [*FILES, *ANNEX])
@pytest.mark.parametrize("harm", ["added", "byte", "gone", "link"])
def test_no_file_can_be_changed(name: str, harm: str, release: Path, tmp_path: Path) -> None:
    path = release / name
    if harm == "added":
        appended(name, " ")(release)
    elif harm == "byte":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    else:
        kept = path.rename(tmp_path / "elsewhere")
        if harm == "link":
            path.symlink_to(kept)
    assert not verify(release).passed


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", sorted({*FILES} - {"README.md", "report.html", "privacy_report.json"}))
def test_what_is_altered_is_no_file_of_the_report(name: str, run: RunFolder) -> None:
    """Also without an annex."""
    appended(name, " ")(run.release)
    assert "files" in failed(verify(run.release))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["notes.txt", "annex.pdf", "ledger-north.jsonl", ".hidden"])
def test_nothing_else_lies_there(name: str, release: Path) -> None:
    (release / name).write_text("a patient")
    assert failed(verify(release)) == ["files"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("statement/epsilon", 0.5, {"epsilon", "annex"}),
        ("statement/epsilon_replace_one", 0.5, {"epsilon", "annex"}),
        ("statement/delta", 1e-9, {"epsilon", "annex"}),
        ("statement/noise_multiplier", 2.0, {"epsilon", "annex"}),
        ("statement/unit", "user", {"epsilon", "annex"}),
        ("statement/steps_charged", 2, {"epsilon", "annex"}),
        ("statement/dataset", "others", {"epsilon", "annex"}),
        ("means/right_guesses", 0.5, {"epsilon", "annex"}),
        ("means/found_at_1_percent", 0.01, {"epsilon", "annex"}),
        ("evaluation/0/accuracy", "a patient", {"rows", "annex"}),
        ("adapter/base_model", "another", {"annex"}),
    ],
)
def test_a_report_that_was_sealed_anew_is_held_against_the_ledger(
    path: str, value: Any, names: set[str], release: Path
) -> None:
    """By its own hash it is right."""
    handed = verifying._Release(release)
    report = json.loads(handed.report.read_text())
    told(report, path, value)
    sealed_again(handed, **report)
    assert set(failed(verify(release))) == names


def test_card_and_page_are_those_of_the_report(run: RunFolder) -> None:
    """Also without an annex."""
    for name in ("README.md", "report.html"):
        kept = (run.release / name).read_text()
        (run.release / name).write_text(kept.replace("(1.5", "(0.5"))
        assert failed(verify(run.release)) == ["pages"]
        (run.release / name).write_text(kept)


def _ledger(release: Path, change: Callable[[StepEvent], StepEvent], steps: int) -> None:
    """Another ledger of the same run in its place, whole in itself."""
    old = read_ledger(release / "ledger.jsonl")
    (release / "ledger.jsonl").unlink()
    plan = replace(old.plan, phases=((change(old.plan.event), 3),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.accounting.ledger.uuid.uuid4", lambda: old.run_id)
        with Ledger.create(release / "ledger.jsonl", plan) as ledger:
            for _ in range(steps):
                ledger.charge(plan.event)
            ledger.finish()


def _all_anew(release: Path) -> RunFolder:
    """Report, seals and annex made again, as by who has the whole folder, the program and no conscience."""
    folder = in_a_run(release)
    summary = read_ledger(folder.ledger)
    noise = json.loads(folder.report.read_text())["noise"]
    noise |= noise_facts(summary.plan, adaptive=False, coefficients=())
    sealed_again(folder, **stated(summary), noise=noise)
    (folder.release / "metrics.jsonl").unlink()
    sealed_again(folder)
    file_annex(folder)
    return folder


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["noise", "steps"])
def test_a_ledger_that_was_made_anew_needs_the_hash_of_the_sheet(kind: str, release: Path) -> None:
    """It is why the hash is printed: within the folder nothing tells."""
    digest = said(release)["sha256"]
    assert failed(verify(release, annex_hash=digest)) == []
    more = 2.0 if kind == "noise" else 1.0
    _ledger(release, lambda event: replace(event, noise_multiplier=more), 3 if kind == "noise" else 2)
    found = verify(release, annex_hash=digest)
    assert {"files", "epsilon", "annex", "hash"} <= set(failed(found))
    folder = _all_anew(release)
    # A ledger that was cut does not end with the last planned release.
    seen = [] if kind == "noise" else ["epsilon"]
    assert failed(verify(folder.release)) == seen
    assert failed(verify(folder.release, annex_hash=digest)) == [*seen, "hash"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", ["weights", "words"])
def test_what_no_ledger_decides_needs_the_hash_of_the_sheet(what: str, release: Path) -> None:
    digest = said(release)["sha256"]
    folder = in_a_run(release)
    if what == "weights":
        (folder.release / "adapter_model.safetensors").write_bytes(b"somebody else's")
        sealed_again(folder)
    else:
        adapter = json.loads(folder.report.read_text())["adapter"]
        sealed_again(folder, adapter={**adapter, "base_model": "another"})
    file_annex(folder)
    assert verify(folder.release).passed
    assert failed(verify(folder.release, annex_hash=digest)) == ["hash"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["summary", "reference", "coordinates", "described", "compares", "releases"])
def test_a_method_is_what_the_table_says_of_it(name: str, release: Path) -> None:
    folder = in_a_run(release)
    method = json.loads(folder.report.read_text())["method"]
    sealed_again(folder, method={**method, name: "no noise is needed"})
    assert "epsilon" in failed(verify(folder.release))


def placed(value: Any, kind: Any = FIELDS, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a report holds a value, the first of each list, and whether a publisher may write any text there."""
    if isinstance(value, list):
        yield from placed(value[0], kind, (*place, 0)) if value else ()
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from placed(inner, kind[name] if isinstance(kind, Mapping) else kind, (*place, name))
    else:
        yield place, kind is TEXT


@pytest.mark.usefixtures("quick")
def test_no_sentence_of_a_publisher_finds_a_place(release: Path) -> None:
    """But in names and in texts that are quoted."""
    folder = in_a_run(release)
    before = json.loads(folder.report.read_text())
    tried = 0
    for place, free in placed({k: v for k, v in before.items() if k not in ("files", "sha256")}):
        changed = deepcopy(before)
        inner = reduce(getitem, place[:-1], changed)
        inner[place[-1]] = "(0.1, 0)-DP in truth"
        try:
            sealed_again(folder, **{place[0]: changed[place[0]]})
        except PrivloraError:
            continue
        assert free or {"report", "epsilon", "rows"} & {*failed(verify(folder.release))}, place
        tried += not free
    assert tried > 40
    for group in ("noise", "adapter", "method", "answers", "versions"):
        sealed_again(folder, **before | {group: {**before[group], "epsilon": 0.1}})
        assert "report" in failed(verify(folder.release))
    sealed_again(folder, **before, promise=0.1)
    assert "report" in failed(verify(folder.release))


@pytest.mark.usefixtures("quick")
def test_a_target_is_that_of_the_ledger(release: Path) -> None:
    folder = in_a_run(release)
    sealed_again(folder, target_epsilon=0.1)
    assert "epsilon" in failed(verify(folder.release))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", ["NOT PRIVATE", "PRIVATE, says a patient"])
def test_a_forged_stamp_is_named_and_not_shown(text: str, release: Path) -> None:
    sealed_again(verifying._Release(release), stamp={"text": text, "reason": "a patient"})
    found = {check.name: check.found for check in verify(release).checks if check.passed is False}
    assert found["report"] == "privacy_report.json has a stamp that no run writes"
    assert "and by the ledger it is" in found["epsilon"]
    assert "a patient" not in str(found)


@pytest.mark.usefixtures("quick")
def test_a_report_says_each_thing_once(release: Path) -> None:
    """Who reads the first of two numbers reads another promise than who reads the last."""
    path = release / "privacy_report.json"
    path.write_text(path.read_text().replace('"epsilon":', '"epsilon": 0.01,\n"epsilon":', 1))
    assert "report" in failed(verify(release))


def test_a_changed_number_is_named_with_what_the_ledger_says(release: Path) -> None:
    path = release / "privacy_report.json"
    whole = path.read_text()
    true = json.loads(whole)["statement"]["noise_multiplier"]
    path.write_text(whole.replace(f'"noise_multiplier": {true}', '"noise_multiplier": 9.5', 1))
    found = {check.name: check.found for check in verify(release).checks}
    assert "is not as the run wrote it" in found["report"]
    assert f"says statement.noise_multiplier = 9.5, and by the ledger it is {true}" in found["epsilon"]
    # What no ledger decides is told as changed, and not as spelt otherwise.
    rank = json.loads(whole)["adapter"]["rank"]
    path.write_text(whole.replace(f'"rank": {rank}', '"rank": 77', 1))
    found = {check.name: check.found for check in verify(release).checks}["report"]
    assert "another spelling" not in found
    assert "is not as the run wrote it" in found
    path.write_text(whole.replace('"epsilon":', '"epsilon": 0.01,\n"epsilon":', 1))
    assert "another spelling" in {check.name: check.found for check in verify(release).checks}["report"]
    (release / "ledger.jsonl").write_text("torn")
    path.write_text(whole.replace(f'"noise_multiplier": {true}', '"noise_multiplier": 9.5', 1))
    assert {"report", "ledger"} <= set(failed(verify(release)))


def test_absurd_numbers_and_names_end_in_a_line(release: Path) -> None:
    handed = verifying._Release(release)
    report = json.loads((release / "privacy_report.json").read_text())
    sealed_again(handed, method={**report["method"], "steps": 10**9})
    assert "rows" in failed(verify(release))
    with pytest.raises(RunError, match="there is no release in"):
        verify(Path("a" * 3000))


@pytest.mark.usefixtures("quick")
def test_an_empty_signature_is_none(release: Path) -> None:
    annex = json.loads((release / "annex.json").read_text())
    (release / "annex.json").write_text(
        json.dumps({**annex, "signature": None}, indent=1, ensure_ascii=False) + "\n"
    )
    assert "signature" in failed(verify(release))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("line", range(5))
def test_no_line_of_the_ledger_can_be_changed_or_left_out(line: int, release: Path) -> None:
    lines = (release / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    other = lines[line].replace(b"e", b"f", 1)
    for changed in (lines[:line] + lines[line + 1 :], [*lines[:line], other, *lines[line + 1 :]]):
        (release / "ledger.jsonl").write_bytes(b"".join(changed))
        assert "ledger" in failed(verify(release)) or not changed


def test_what_is_not_private_is_said_to_be(public_run: Run, insecure_run: Run) -> None:
    for run in (public_run, insecure_run):
        found = verify(run.folder.root)
        assert not found.passed
        assert found.checks[0].passed is False
        assert "NOT PRIVATE" in found.checks[0].found


@pytest.mark.usefixtures("quick")
def test_an_audits_ledger_is_no_releases(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records have canaries among them, whose texts are known."""
    monkeypatch.setattr(verifying, "AUDITED", read_ledger(release / "ledger.jsonl").plan.dataset)
    assert "ledger" in failed(verify(release))


@pytest.mark.usefixtures("quick")
def test_steps_are_no_more_than_the_ledgers(release: Path) -> None:
    """Each is accounted for where metrics are held against the plan."""
    folder = in_a_run(release)
    method = json.loads(folder.report.read_text())["method"]
    sealed_again(folder, method={**method, "steps": 100_000})
    assert "epsilon" in failed(verify(folder.release))


@pytest.mark.parametrize(
    "built", ["0.6.0", "2.13.0+cpu", "1.0rc1", "1.2.post1", "2.3.0a0+6ddf5cf85e.nv24.04"]
)
def test_versions_are_numbers(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a builder's own is shown."""
    monkeypatch.setattr("privlora.version.version", lambda package: built)
    assert VERSION.fullmatch(version_of("torch"))
    for more in ("+true.epsilon.is.0.1", "-true.epsilon.is.0.1", " is safe"):
        assert not VERSION.fullmatch(version_of("torch") + more)


@pytest.mark.usefixtures("quick")
def test_a_report_of_another_size_is_not_read_and_one_that_fails_is_not_drawn(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "pages_of", lambda _: pytest.fail("drawn"))
    report = release / "privacy_report.json"
    content = json.loads(report.read_text())
    report.write_text(json.dumps({**content, "promise": 0.1}))
    assert "report" in failed(verify(release))
    report.write_text(" " * (17 * 2**20))
    assert "report" in failed(verify(release))


@pytest.mark.usefixtures("quick")
def test_an_annex_of_another_version_says_which(release: Path) -> None:
    found = forged(release, lambda annex: told(annex, "written_by", "privlora 99"))
    (annex,) = (check.found for check in found.checks if check.name == "annex")
    assert "privlora 99 wrote it and this is privlora" in annex
    assert "verify with that version" in annex


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "content",
    [b"[]", b"\xff", b"[" * 100_000, b'{"schema_version": 3}', b'{"schema_version": 3, "stamp": 1}', b""],
)
@pytest.mark.parametrize("name", ["privacy_report.json", "annex.json", "ledger.jsonl"])
def test_damaged_files_are_failed_checks(name: str, content: bytes, release: Path) -> None:
    (release / name).write_bytes(content)
    found = verify(release)
    assert not found.passed
    assert not [check for check in found.checks if "\n" in check.found]


@pytest.mark.usefixtures("quick")
def test_nothing_of_a_release_steers_a_terminal(release: Path) -> None:
    handed = verifying._Release(release)
    sealed_again(handed, versions={"privlora": "\x1b[31m1", "dp-accounting": "1"})
    assert not [check for check in verify(release).checks if not check.found.isprintable()]


def test_bad_arguments_are_one_error(release: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no release in"):
        verify(tmp_path / "nowhere")
    with pytest.raises(RunError, match="there is no release in"):
        verify(release / "ledger.jsonl")
    for digest in ("", "abc", "g" * 64, "0" * 63):
        with pytest.raises(ConfigError, match="is not 64 hexadecimal digits"):
            verify(release, annex_hash=digest)
