"""Whether a release is what its ledger promises, as a third person finds out who has its folder and nothing else.

Nothing is taken from the release that can be made again: epsilon comes from the ledger, card, page and annex from the
report, hashes from the files. What no key protects can be made anew as a whole, with other weights or words; the
annex's hash, kept apart from the folder, or a signature shows that.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn

from privlora.accounting import LedgerSummary
from privlora.accounting.accountants import within
from privlora.accounting.bands import band_coefficients
from privlora.config.methods import SPACES, MethodFacts, facts_of, space_in_words
from privlora.errors import ConfigError, PrivacyError, PrivloraError, RunError, in_one_line, named
from privlora.pages.figures import drawn_alike
from privlora.pages.numbers import number
from privlora.ranges import MOST_STEPS
from privlora.reporting.annex import (
    JSON_NAME,
    PAGE_NAME,
    SIGNATURE,
    Book,
    annex_of,
    annex_text,
    content_of,
    files_beside,
    read_book,
)
from privlora.reporting.annex_page import render_annex
from privlora.reporting.fields import strange
from privlora.reporting.limits import limits_of
from privlora.reporting.publication import (
    check_same_run,
    contradiction,
    differences,
    pages_of,
    parse_report,
    stated,
)
from privlora.reporting.pushing import copy_file, files_of
from privlora.reporting.rows import refuse_other_rows
from privlora.reporting.seals import (
    ANNEX,
    CARD_NAME,
    HTML_NAME,
    LEDGER,
    MADE_ANEW,
    REPORT_NAME,
    belongs,
    digests,
    refuse_altered,
    seals_itself,
    text_of,
)
from privlora.reporting.signing import fingerprint_of, is_signed_rightly
from privlora.reporting.statement import PRIVATE, REASONS, noise_facts
from privlora.reporting.verifying_clients import (
    check_clients,
    federation_again,
    ledgers_of_clients,
    refuse_other,
)
from privlora.rounding import rounded_up
from privlora.training.files import AUDITED, RunFolder, release_at
from privlora.version import VERSION, __version__

_OF_HUBS: Final = (".cache", ".git", ".gitattributes")  # what downloads from one leave beside a release
_LONGEST: Final = 400  # characters of what was found


@dataclass(frozen=True)
class Check:
    """name: of what was looked at. passed: None where there is nothing of the kind. found: what was found, one line."""

    name: str
    passed: bool | None
    found: str


@dataclass(frozen=True)
class Verified:
    """checks: in order. head: of the ledger, and epsilon by it; None where it cannot be read."""

    checks: tuple[Check, ...]
    head: str | None
    epsilon: float | None

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)


@dataclass(frozen=True)
class _Release(RunFolder):
    """A release without its run: the folder is what ``root`` would have beside private/, which is never looked at."""

    @property
    def release(self) -> Path:
        return self.root

    @property
    def private(self) -> Path:
        return Path(os.devnull) / "private"  # whatever lies in a release is no folder of its run


def verify(
    path: Path, *, annex_hash: str | None = None, public_key: str | None = None, base: str | None = None
) -> Verified:
    """Look at a release, or at that of a run's folder; at no other file. ``annex_hash``: as an annex on paper has it.
    ``public_key``: who must have signed, in hexadecimal. ``base``: folder or hub name of what is to be its base model.

    Raises RunError where there is no release, for what `privlora export` wrote and for a run of one's own that is not
    finished; ConfigError for a hash that is none.
    """
    folder = _Release(release_at(path))
    if base is not None:
        try:
            import_module("torch")
        except ImportError:
            raise ConfigError(
                "a base model is compared by torch, which is not installed here",
                fix="leave --base out, or `pip install privlora` in another environment",
            ) from None
    if annex_hash is not None:
        annex_hash = annex_hash.strip().lower()
        if re.fullmatch(r"[0-9a-f]{64}", annex_hash) is None:
            raise ConfigError(
                "--hash is not 64 hexadecimal digits", fix="copy the hash from the annex that was filed"
            )
    with tempfile.TemporaryDirectory(prefix="privlora-") as root:
        copied = _Release(Path(root))
        _refuse_an_export(folder, copied)
        with within():
            return _Verification(folder, copied).of(annex_hash, public_key, base)


def _refuse_an_export(folder: _Release, copied: _Release) -> None:
    """Raise RunError for what holds no page, and nothing but the report, the card and what the report names."""
    root = folder.root
    if root.name in ("release", "not-private") or (root / HTML_NAME).exists():
        return
    try:
        here = {path.name for path in root.iterdir()} - {*_OF_HUBS}
        copy_file(folder, REPORT_NAME, copied)
        report = json.loads(copied.report.read_bytes())
        if not seals_itself(report) or here != {REPORT_NAME, CARD_NAME, *report["files"]}:
            return
    except Exception:  # noqa: BLE001 - of which the checks speak
        return
    raise RunError(
        f"{str(root)!r} is what `privlora export` writes, a copy of the weights without {HTML_NAME}, and no release",
        why="what is verified is a release as its run left it",
        fix="verify RUN/release of the run that it was exported from (`privlora verify RUN/release`), and its annex "
        "where one was filed",
    )


class _Absent(Exception):
    """There is nothing of the kind that is looked at."""


class _Verification:
    """The checks of one release. What they look at are copies: what is in ``folder`` may change meanwhile."""

    def __init__(self, folder: _Release, copied: _Release) -> None:
        self.folder, self.copied = folder, copied
        self.checks: list[Check] = []
        self.report: dict[str, Any] = {}
        self.names: tuple[str, ...] = ()
        self.book: Book | None = None
        self.facts: dict[str, Any] = {}
        self.annex: dict[str, Any] | None = None
        self.base: str | None = None

    def of(self, annex_hash: str | None, public_key: str | None, base: str | None) -> Verified:
        read = self._take("report", self._report)
        if read:
            self._take("files", self._files)
        self._take("ledger", self._ledger)
        looks = {"epsilon": self._epsilon, "rows": self._rows, "pages": self._pages, "annex": self._annex}
        if "federation" in self.report:
            looks["clients"] = self._clients
        self.base, looks["base"] = base, self._base
        drawn = set() if read else {"pages"}  # which takes long, and shows nothing of a report that is none
        for name, look in looks.items():
            if self.report and self.book is not None and name not in drawn:
                self._take(name, look)
            else:
                self._add(name, None, "not checked, since it needs the report and the ledger")
        self._take("hash", partial(self._hash, annex_hash))
        self._take("signature", partial(self._signature, public_key))
        found = self.facts.get("statement")
        return Verified(
            tuple(self.checks),
            None if self.book is None else self.book.head,
            found["epsilon"] if found else None,
        )

    def _add(self, name: str, passed: bool | None, found: str) -> None:
        self.checks.append(Check(name, passed, in_one_line(found, _LONGEST)))

    def _take(self, name: str, look: Callable[[], str]) -> bool:
        """look: gives what it found, and raises _Absent or, where it fails, what is wrong."""
        try:
            self._add(name, True, look())
            return True
        except _Absent as absent:
            self._add(name, None, str(absent))
            return True
        except PrivloraError as error:
            self._add(name, False, f"{error.what}{f' ({error.why})' if error.why else ''}")
            return False
        except Exception as error:  # noqa: BLE001 - what no run wrote can lack anything
            self._add(name, False, f"not in the form that a run writes ({type(error).__name__})")
            return False

    def _copy(self, name: str) -> Path:
        place = self.copied.release / name
        if not place.exists():
            copy_file(self.folder, name, self.copied)
        return place

    def _read(self, name: str) -> bytes:
        return self._copy(name).read_bytes()

    def _report(self) -> str:
        if not self.folder.report.exists():
            raise RunError(f"there is no {REPORT_NAME}")
        content = self._read(REPORT_NAME)
        self.report = found = parse_report(self.folder.report, content)  # held against the ledger in any case
        if text_of(found).encode() != content:
            refuse_altered(self.folder, found, {})
            raise PrivacyError(
                f"{REPORT_NAME} is not written as a run writes it",
                why="with a name twice, or in another spelling, people and programs read other numbers in it",
            )
        refuse_altered(self.folder, found, {})
        if (place := next(strange(found), None)) is not None:
            raise PrivacyError(f"{REPORT_NAME} says of {named(place)} what no report says")
        stamp, versions = found["stamp"], found["versions"]
        for word in versions.values():
            if not VERSION.fullmatch(word):
                raise PrivacyError(f"{REPORT_NAME} says {named(word)} among its versions, which is none")
        if stamp["text"] != PRIVATE:
            if stamp["reason"] not in REASONS:
                raise PrivacyError(f"{REPORT_NAME} has a stamp that no run writes")
            raise PrivacyError(f"NOT PRIVATE: {stamp['reason']}, so nothing is promised")
        return f"says {PRIVATE}, written by privlora {versions['privlora']}; its own hash is right"

    def _files(self) -> str:
        known = [path.name for path in self.folder.release.iterdir() if belongs(path.name, self.report)]
        self.names = tuple(sorted(known))
        for name in known:
            self._copy(name)
        files_of(self.folder, self.report, beside=_OF_HUBS)
        held = [name for name in self.names if name not in MADE_ANEW]
        refuse_altered(self.folder, self.report, digests(self.copied.release, held))
        lacking = sorted(self.report["files"].keys() - set(held))
        if lacking:
            raise RunError(f"{', '.join(lacking)}: named by the report, and not here")
        beside = [name for name in _OF_HUBS if (self.folder.release / name).exists()]
        but = f" but {', '.join(beside)}, which is no part of a release" if beside else ""
        return f"the {len(held)} that training left match the report's hashes; no unexpected files{but}"

    def _ledger(self) -> str:
        if not self.folder.ledger.exists():
            raise RunError(f"there is no {LEDGER}, so no epsilon can be stated")
        book = read_book(self.folder.ledger, self._read(LEDGER))
        summary = book.summary
        if summary.plan.dataset.startswith(AUDITED):
            raise PrivacyError("it is of an audit, which has canaries among its records")
        if summary.plan.steps > MOST_STEPS:
            raise PrivacyError("it plans more releases than a run can have")
        self.book = book
        if not summary.closed:
            raise RunError("the run is not finished: its ledger is not closed")
        done = f"{summary.charges} of {summary.plan.steps} planned noisy steps"
        return f"its chain is whole and closed: {done}; head {book.head}"

    def _epsilon(self) -> str:
        assert self.book is not None
        summary = self.book.summary
        check_same_run(self.report.get("statement") or {}, summary)
        self.facts = stated(summary)
        true = _again(self.report, self.facts, summary)
        refuse_other(self.report, true, "the report", "by the ledger it is")
        statement = self.facts["statement"]
        own = ""
        if _known(self.report["method"]["name"]) is None:
            own = (
                f"; the method {named(self.report['method']['name'])} is not privlora's, and describes itself"
            )
        return (
            f"{rounded_up(statement['epsilon'])} at delta {number(statement['delta'])}, computed from the ledger "
            f"(PLD), is what the report states, for one {statement['unit']}, {statement['adjacency']}{own}"
        )

    def _clients(self) -> str:
        assert self.book is not None
        files = ledgers_of_clients(self.report)
        strange = [n for n in self.names if n.startswith("ledger-") and n not in files.values()]
        if strange:
            raise PrivacyError(f"{', '.join(strange)}: of no client that the report names")
        books = {
            name: read_book(self.folder.release / file, self._read(file))
            for name, file in files.items()
            if file in self.names
        }
        check_clients(self.report, books, self.book)
        if not files:
            raise _Absent("none has a ledger: the noise is the server's, and so is the ledger")
        return f"ledgers of {len(books)} of {len(files)} are whole, and say what the report says of them"

    def _rows(self) -> str:
        assert self.book is not None
        if not 0 <= int(self.report["method"].get("steps", 0)) <= MOST_STEPS:
            raise PrivacyError(f"{REPORT_NAME} names more steps than a run can have")
        refuse_other_rows(self.folder, self.report, self.copied)
        kept = [
            path
            for path in (self.copied.evaluations, self.copied.metrics, self.copied.choice)
            if path.exists()
        ]
        if not kept:
            raise _Absent("this release has no evaluations, metrics or choice")
        return f"match the report: {', '.join(path.name for path in kept)}"

    def _pages(self) -> str:
        for name, text in pages_of(self.report).items():
            found = self._read(name).decode()
            if not (found == text or (name == HTML_NAME and drawn_alike(found, text))):
                drawn = f", with matplotlib {version('matplotlib')}" if name == HTML_NAME else ""
                words = f"{name} is not what {REPORT_NAME} makes here{drawn}"
                _refuse_other(f"privlora {self.report['versions']['privlora']}", words)
        return f"{CARD_NAME} and {HTML_NAME}, made again from the report, are the same"

    def _base(self) -> str:
        adapter, classes = self.report["adapter"], self.report.get("classes")
        expected = adapter.get("base_sha256")
        if expected is None:
            raise _Absent("the report names no hash of its weights, since layers were packed")
        if self.base is None:
            raise _Absent(
                f"{named(adapter['base_model'])}, whose weights have SHA-256 {expected}, was not compared: "
                "--base MODEL does"
            )
        from privlora.config import ModelSettings
        from privlora.training.base_weights import refuse_another_base
        from privlora.training.classifier import Head
        from privlora.training.models import load_model

        head = None if classes is None else Head(classes["num_labels"], tuple(classes["names"]), 0)
        model, _ = load_model(ModelSettings(name=self.base, device="cpu"), head)
        refuse_another_base(adapter, model, classifies=head is not None)
        return f"the one given has the weights that the adapter was trained beside, SHA-256 {expected}"

    def _annex(self) -> str:
        here = [name for name in ANNEX if (self.folder.release / name).exists()]
        if not here:
            raise _Absent("there is none; `privlora report RUN --annex` writes it")
        book = self.book
        assert book is not None
        content = self._read(JSON_NAME)
        try:
            said = json.loads(content.decode())
        except (ValueError, RecursionError):
            raise RunError(f"{JSON_NAME} cannot be read: it is not JSON") from None
        by = str(said["written_by"])
        facts, files = {**self.report, **self.facts}, files_beside(self.copied.release, self.report)
        true = annex_of(facts, book, files)
        own = {name: value for name, value in true.items() if name != "sha256"}
        for name, one, other in differences(said, own):
            _refuse_other(by, contradiction(JSON_NAME, name, one, other, "made again it is"))
        if said.keys() - {SIGNATURE} != true.keys() or annex_text(said) != content.decode():
            _refuse_other(by, f"{JSON_NAME} is not what {REPORT_NAME} and the ledger make")
        if not seals_itself(content_of(said)):
            _refuse_other(by, f"{JSON_NAME} does not have the hash that it names")
        self.annex = said
        if render_annex(said) != self._read(PAGE_NAME).decode():
            _refuse_other(
                by,
                f"{PAGE_NAME} is not the page of {JSON_NAME}, whose numbers are right: it was edited, or saved with "
                "its fields filled in",
            )
        return (
            f"its numbers are those computed here, its page shows them, and the {len(said['files'])} files that it "
            "names match its hashes"
        )

    def _hash(self, annex_hash: str | None) -> str:
        if annex_hash is None:
            raise _Absent(
                "no filed hash was given, so a complete forgery would go unnoticed; give the annex's by --hash"
            )
        if self.annex is None:
            raise PrivacyError(f"not compared, because {self._no_annex}")
        if self.annex["sha256"] != annex_hash:
            raise PrivacyError(
                "the annex has another hash than the one given",
                why="the annex or the release was changed since it was filed, or is of another run",
            )
        return "the annex has the hash that was given, and it covers every file"

    @property
    def _no_annex(self) -> str:
        there = any((self.folder.release / name).exists() for name in ANNEX)
        return "the annex did not pass its check" if there else "there is no annex"

    def _signature(self, public_key: str | None) -> str:
        signature = None if self.annex is None else self.annex.get(SIGNATURE)
        if self.annex is not None and SIGNATURE in self.annex and signature is None:
            raise PrivacyError("the annex has a place for a signature, and none in it")
        if signature is None:
            if public_key is not None:
                raise PrivacyError("there is no signature to check with the public key")
            raise _Absent(
                "the annex is not signed" if self.annex else f"not checked, because {self._no_annex}"
            )
        if not is_signed_rightly(self.annex or {}):
            raise PrivacyError("the annex was changed after it was signed")
        by = fingerprint_of(signature["public_key"])
        if public_key is None:
            raise _Absent(
                f"by a key with fingerprint {by}; --public-key FILE checks whether it is one that you trust"
            )
        if signature["public_key"] != public_key:
            raise PrivacyError(
                f"the annex is signed by another key than the one given, with fingerprint {by}"
            )
        return f"by the key that was given, with fingerprint {by}"


def _known(name: str) -> MethodFacts | None:
    """What the table says of a method; None for the publisher's own, also where this process registered it."""
    row = facts_of(name)
    return row if row is not None and row.space in SPACES else None


def _again(report: Mapping[str, Any], facts: Mapping[str, Any], summary: LedgerSummary) -> dict[str, Any]:
    """What of a report follows from its ledger and its settings. facts: what the ledger alone decides."""
    plan, noise, found = summary.plan, report["noise"], dict(facts)
    rule = ""
    if "federation" in report:
        found["federation"] = federation_again(report, summary)
        rule = f"{report['federation']['rule']['name']} "  # of whole clients, whose ledgers name it
    elif plan.unit == "client":
        raise PrivacyError("the ledger protects whole clients, and the report names none")
    bands = noise.get("bands", {}).get("coefficients", [])
    count = getattr(plan.phases[-1][0].sampling, "classes", 0)
    true = band_coefficients(count, plan.steps) if count else ()
    same = ("bands" in noise) == bool(count) and len(bands) == count
    # They are found by a search, which ends a little elsewhere on another machine.
    if not same or any(abs(one - other) > 1e-3 for one, other in zip(bands, true, strict=True)):
        raise PrivacyError("the report's noise has other bands than that of the ledger")
    adaptive = noise["clip_quantile"] is not None
    found["noise"] = {**noise, **noise_facts(plan, adaptive=adaptive, coefficients=bands)}
    if "federation" not in report and not report["method"]["steps"] <= plan.steps == summary.charges:
        raise PrivacyError(
            "the ledger has not all the releases of a run in one place, which ends with the last one"
        )
    if plan.unit == "client" and not plan.method.startswith(rule):
        raise PrivacyError("the report names another rule than the ledger")
    found["target_epsilon"] = plan.target_epsilon
    name = plan.method.removeprefix(rule)
    found["method"] = {**report["method"], "name": name}
    if (row := _known(name)) is not None:
        described, law = space_in_words(row.space, report["method"])
        found["noise"]["law"] = law if row.releases == "gradients" else None
        found["method"] |= {"summary": row.summary, "reference": row.reference}
        found["method"] |= {"coordinates": row.space, "described": described}
        for key, there, word in (
            ("compares", SPACES[row.space].forward_only, "losses"),
            ("releases", row.releases != "gradients", row.releases),
        ):
            found["method"].pop(key, None)
            found["method"] |= {key: word} if there else {}
    return {**found, "not_protected": limits_of({**report, **found})}


def _refuse_other(by: str, words: str) -> NoReturn:
    mine = f"privlora {__version__}"
    if by != mine:
        who = by if VERSION.fullmatch(by.removeprefix("privlora ")) else "another program"
        words += f"; {who} wrote it and this is {mine}, so verify with that version"
    raise PrivacyError(words)
