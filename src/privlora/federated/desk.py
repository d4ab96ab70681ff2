"""A client's own files of one federation: its ledger, what it has answered, what it keeps. None of them leave it.

A fresh process may start for each message, so everything that must survive one lies here. The note of what was answered
is on the disk before anything is done for a message, and it says how many charges the ledger showed when the last
answer left: a ledger that was cut, restored from an older copy or exchanged does not fit the note, and neither does a
folder of which a copy went on elsewhere and came back in part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import pydantic.dataclasses
import yaml
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from privlora.accounting import Ledger, LedgerSummary, Plan, read_ledger
from privlora.config import AT_CLIENTS, Settings, UnboundedError, read_plain, settings_from
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.federated.messages import KINDS, TRAINING, Request, refusal
from privlora.federated.plans import server_plan
from privlora.training.files import write_atomically

_Content = TypeVar("_Content")
_FOLDER, _FILE = 0o700, 0o600
_NEXT = "go on with the next round"
_PLACES: Final[dict[str, tuple[str, ...]]] = {
    "data": ("path", "evaluation"),
    "adapter": ("init", "public_text"),
    "synthesis": ("file",),
}
"""Settings that name files, by group; `public_settings` leaves none of them."""


_Count = Annotated[int, Field(ge=0)]


@pydantic.dataclasses.dataclass(frozen=True, config={"strict": True})
class Note:
    """What was asked last, and what the ledger showed when an answer left last.

    round, stage, kind: in the order in which an honest server asks. charge: hash of the ledger's line number
    ``charges``; None before the first.
    """

    round: _Count = 0
    stage: _Count = 0
    kind: _Count = 0
    charges: _Count = 0
    charge: str | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        return self.round, self.stage, self.kind


class Desk:
    """FOLDER/RUN of one client. Only its owner can read it. Used under the client's lock (`Client.locked`).

    stated: a ledger of what a trusted server said at joining that it would release; it is never charged or closed, so
    that all of it counts as spent: a client cannot know better.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.ledger, self.stated = root, root / "ledger.jsonl", root / "stated.jsonl"
        self._settings, self._answered = root / "settings.yaml", root / "answered.json"
        self._survivors, self._secret = root / "survivors.json", root / "sum.secret"

    @property
    def joined(self) -> bool:
        return self._settings.exists()

    @property
    def settings(self) -> Settings:
        """The public settings that this client has agreed to. Raises RunError before it has joined."""
        if not self.joined:
            raise RunError("asked to train before it joined", fix="join the federation first")
        try:
            text = self._settings.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(self._settings, error, "restore it") from None
        return read_terms(text)

    def open(self, settings: Settings, plan: Plan | None, *, stated: Plan | None = None) -> None:
        """Join: ledgers and note first, so that whoever has joined has them. Joining again on the same terms changes
        nothing. stated: what a trusted server says that it will release.

        Raises PrivacyError on other terms, or for files that do not belong together.
        """
        self._refuse_links()
        if self.joined:
            if self.settings != settings:
                raise _other_terms()
            self._begin_ledger(self.stated, stated)
            self.opened(plan is not None, closed=True)
            return
        self.root.mkdir(parents=True, exist_ok=True, mode=_FOLDER)
        self._begin_ledger(self.stated, stated)
        self._begin_ledger(self.ledger, plan)
        self._keep_note(Note())
        self._write(self._settings, settings.to_yaml())

    def keep_stated(self) -> None:
        """Write what a trusted server stated at joining where that is missing, from the terms: of runs that were joined
        by a version which kept nothing of it, and where the file was lost.

        Raises PrivacyError where the terms cannot be read, so that nobody knows what was stated.
        """
        if not self.joined or has_begun(self.ledger) or has_begun(self.stated):
            return
        try:
            plan = server_plan(self.settings)
        except PrivloraError as error:
            what = f"{str(self._settings)!r} does not say what the run released: {error.what}"
            why = "it counts for what this client may release in other runs"
            fix = "restore it; or give the client a new folder, and count that run by yourself"
            raise PrivacyError(what, why=why, fix=fix) from None
        self._refuse_links()
        self._begin_ledger(self.stated, plan)

    def _begin_ledger(self, path: Path, plan: Plan | None) -> None:
        if has_begun(path):
            if plan is None or read_ledger(path).plan != plan:
                raise _other_terms()
        elif plan is not None:
            Ledger.create(path, plan).close()
            path.chmod(_FILE)

    def begin(self, request: Request) -> None:
        """Note that ``request`` is being answered, before anything is done for it.

        Raises PrivacyError for one that came before, or that comes after a later one; for a later stage of a round
        whose first stage was not answered; and for files that do not belong together.
        """
        self._refuse_links()
        note, place = self._note(), _place_of(request)
        if place <= note.place:
            why = "two answers to one question could be taken apart, and would both be charged"
            raise refusal(f"asked again for {request.kind} of round {request.round}", why, _NEXT)
        if place[1] and (note.round != request.round or (note.stage, note.kind) < (0, KINDS.index("train"))):
            why = "what this client keeps is of another round, and was summed over other clients"
            raise refusal(
                f"asked for a later stage of round {request.round} without its first one", why, _NEXT
            )
        if place[0] > note.round:
            self.keep_secret(None)  # of a sum that was never finished
        self._keep_note(Note(*place, note.charges, note.charge))

    def opened(self, private: bool, *, closed: bool = False) -> LedgerSummary | None:
        """What the ledger says, held against the note. private: whether there has to be one. closed: it may be over.

        Raises PrivacyError for a ledger that is missing, is older than the note, or is not the one it speaks of.
        """
        note = self._note()
        if not private:
            return None
        if not self.ledger.exists():
            raise _lost(f"{str(self.ledger)!r} is missing")
        summary = read_ledger(self.ledger)
        hashes = summary.charge_hashes
        if summary.charges < note.charges:
            shown = f"{summary.charges} charges, and this client answered after {note.charges}"
            raise _lost(f"{str(self.ledger)!r} shows {shown}")
        if note.charges and hashes[note.charges - 1] != note.charge:
            raise _lost(f"{str(self.ledger)!r} is not the ledger that this client's answers were charged to")
        if summary.closed and not closed:
            raise RunError("asked to train after it left", fix="start a new federation")
        return summary

    def charged(self, summary: LedgerSummary) -> None:
        """Note what the ledger shows; before the answer that was charged for leaves."""
        note, hashes = self._note(), summary.charge_hashes
        self._keep_note(Note(*note.place, len(hashes), hashes[-1] if hashes else None))

    def _note(self) -> Note:
        try:
            return Note(**json.loads(self._answered.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            what = f"{str(self._answered)!r} is missing or damaged ({type(error).__name__})"
            why, fix = "what this client has answered is unknown", "restore it, or leave this federation"
            raise PrivacyError(what, why=why, fix=fix) from None

    def _keep_note(self, note: Note) -> None:
        self._write(self._answered, json.dumps(asdict(note)) + "\n")

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Tensors for a later message."""
        content = save({k: t.contiguous() for k, t in tensors.items()})
        self._write(self.root / f"{name}.safetensors", content)

    def kept(self, name: str) -> dict[str, Tensor]:
        """What was kept, or nothing."""
        return self._read(self.root / f"{name}.safetensors", load, fix="leave this federation") or {}

    def own_adapter(self) -> Path:
        """The folder of this client's own model, which nobody else has; made."""
        folder = self.root / "private"
        folder.mkdir(exist_ok=True, mode=_FOLDER)
        return folder

    def keep_secret(self, content: bytes | None) -> None:
        """Keys of a secure sum that is under way; None forgets them."""
        if content is None:
            self._secret.unlink(missing_ok=True)
        else:
            self._write(self._secret, content)

    def secret(self) -> bytes | None:
        return self._secret.read_bytes() if self._secret.exists() else None

    def keep_survivors(self, number: int, names: Sequence[str]) -> None:
        """Whom the secure sum of round ``number`` is over, for the round's next sum."""
        self._write(self._survivors, json.dumps([number, *names]) + "\n")

    def survivors(self, number: int) -> list[str]:
        """Whom the last secure sum of this round was over; nobody, if there was none. Raises RunError."""

        def read(content: bytes) -> list[str]:
            first, *names = json.loads(content)
            return [str(name) for name in names] if first == number else []

        return self._read(self._survivors, read, fix=_NEXT) or []

    def leave(self, private: bool) -> str:
        """End: the ledger is closed, so that nothing more is released in this run; secrets go. Gives the ledger as
        text, which is public; empty without one. Leaving again changes nothing."""
        self.keep_secret(None)
        self._survivors.unlink(missing_ok=True)
        summary = self.opened(private, closed=True)
        if summary is None:
            return ""
        if not summary.closed:
            Ledger.open(self.ledger).finish()
        return self.ledger.read_text(encoding="utf-8")

    def _read(self, path: Path, read: Callable[[bytes], _Content], fix: str) -> _Content | None:
        """None where there is no file. Raises RunError for a damaged one."""
        if not path.exists():
            return None
        try:
            return read(path.read_bytes())
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise _unreadable(path, error, fix) from None

    def _write(self, path: Path, content: str | bytes) -> None:
        write_atomically(path, content, mode=_FILE)

    def _refuse_links(self) -> None:
        for path in (self.root, self.ledger, self.stated):
            if path.is_symlink():
                why = "two clients, or a client and its copy, could charge one ledger without knowing"
                raise PrivacyError(f"{str(path)!r} is a link", why=why, fix="put the folder itself there")


def _unreadable(path: Path, error: Exception, fix: str) -> RunError:
    return RunError(f"{str(path)!r} is damaged, or cannot be read ({type(error).__name__})", fix=fix)


def has_begun(ledger: Path) -> bool:
    """Whether there is a plan in it; else nothing was charged."""
    return ledger.exists() and b"\n" in ledger.read_bytes()


@lru_cache(maxsize=4)
def read_terms(text: str) -> Settings:
    """The settings that a text holds; read once for all clients of a process.

    Raises RunError, ConfigError or, where they name a file, PrivacyError; nothing is looked up on the disk.
    """
    try:
        content = read_plain(text)
    except UnboundedError as error:
        what = f"the server's settings{error.where}, hold {error.problem}"
        raise RunError(what, fix=f"let the server {error.fix}") from None
    except yaml.YAMLError:
        content = None
    if not isinstance(content, dict):
        raise refusal("the server's settings are not readable")
    _refuse_places(content)  # first: settings are checked for two names of one file, which looks at the disk
    return settings_from(content, source="the server's settings")


def _refuse_places(content: Mapping[Any, Any]) -> None:
    """Raise PrivacyError for settings, not checked yet, that name a file. Clients are a list of groups without any."""
    named = []
    for group, names in _PLACES.items():
        inner = content.get(group)
        given = inner if isinstance(inner, dict) else {}
        named += [f"{group}.{name}" for name in names if given.get(name) not in (None, AT_CLIENTS)]
    federation = content.get("federation")
    clients = federation.get("clients") if isinstance(federation, dict) else None
    listed = clients if isinstance(clients, list) else [clients]
    if not all(isinstance(one, dict) and one.get("path") is None for one in listed):
        named.append("federation.clients")
    if named:
        why = "whether they are refused would tell the server which files there are here"
        raise refusal(f"the server's settings name files: {', '.join(named)}", why)


def _place_of(request: Request) -> tuple[int, int, int]:
    """When an honest server asks this. Raises PrivacyError for a stage that is not the kind's own."""
    told = request.values.get("stage", request.kind if request.kind in TRAINING else None)
    if told not in TRAINING or (request.kind in TRAINING and told != request.kind):
        raise refusal(f"asked for {request.kind} in an unknown stage")
    return request.round, TRAINING.index(told), KINDS.index(request.kind)


def _other_terms() -> PrivacyError:
    return PrivacyError("asked to join the same run on other terms", fix="start a new run for other settings")


def _lost(what: str) -> PrivacyError:
    why = "this client would release more than its ledger, and so its epsilon, says"
    fix = "restore the latest ledger, or leave this federation; what it released is spent"
    return PrivacyError(what, why=why, fix=fix)
