"""What a federation's server keeps of its rounds: who was asked, who answered, and how many bytes went each way."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from privlora.accounting import read_ledger
from privlora.config import Settings, kept_settings
from privlora.disk import locked
from privlora.errors import RunError
from privlora.training import takeover
from privlora.training.files import RunFolder, append_line, read_lines

ROUNDS: Final = "rounds.jsonl"
"""In the server's private folder."""
_ID = 16  # bytes
STOPPED: Final = "the server stopped"
_OF_A_ROUND: Final = re.compile(r" in round \d+")
_SHOWN: Final = 3  # reasons


@dataclass(frozen=True)
class Round:
    """step: its number. down, up: bytes of all messages, without the engine's own. void: why nothing came of it. sent:
    how many clients were sent tensors, of those asked; None in histories of older versions."""

    step: int
    asked: tuple[str, ...]
    answered: tuple[str, ...]
    down: int
    up: int
    void: str | None = None
    sent: int | None = None

    def untold(self) -> Round:
        """Without whom it was with, and without what would tell: of a trusted server, whose epsilon counts on that."""
        return Round(self.step, (), (), 0, 0, None if self.void is None else "nothing came of it")


class RoundObserver:
    """Whoever wants to see a federation go on overrides what it wants to hear of. All of it is public."""

    def on_round(self, done: Round, rounds: int) -> None:
        """A round is over, and saved. done: names nobody where a trusted server drew in secret (`Round.untold`)."""

    def on_evaluation(self, step: int, loss: float) -> None:
        """Held-out loss after round ``step``, before `on_round` reports that round."""

    def on_phase(self, what: str, answered: int | None, asked: int | None) -> None:
        """What is done now, and how many clients have answered; None where that is a secret."""

    def on_local_step(self, done: int, steps: int) -> None:
        """How far clients that train in this process are."""


def why_void(rounds: Sequence[Round]) -> str:
    """The reasons of void rounds in words, each once whatever its round; the first few of many. "" for none."""
    found = sorted({_OF_A_ROUND.sub("", one.void) for one in rounds if one.void is not None})
    more = len(found) - _SHOWN
    return ", ".join([*found[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


ASIDE: Final = "answers.jsonl"


def set_aside(private: Path, text: str) -> None:
    """What a trusted server may say to nobody, since it follows from whom it drew: a line of JSON in a file of its
    private folder, which is there from the first line on."""
    append_line(private / ASIDE, {"said": text})


def rounds_begun(folder: RunFolder) -> int:
    """Of the federation in ``folder``, as its server noted; 0 before the first one. Nothing is changed."""
    return max((int(row["step"]) for row in read_lines(folder.private / ROUNDS)), default=0)


class History:
    """A file of JSON lines in the server's private folder. The first names the run; a round has a line when it begins
    and one when it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = read_lines(path)
        if not rows:
            append_line(path, {"step": 0, "run": secrets.token_hex(_ID)})
            rows = read_lines(path)
        self._rows = rows
        if "run" not in rows[0]:
            raise _nameless(path)
        self.run = str(rows[0]["run"])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One server serves a run at a time. Raises RunError while another one does, and where the file has gone."""
        try:
            if not self._path.exists():
                raise _nameless(self._path)
            with locked(self._path):
                self._rows = read_lines(self._path)
                if not self._rows:
                    raise _nameless(self._path)
                yield
        except BlockingIOError:
            what = f"another process serves the run of {str(self._path)!r}"
            raise RunError(what, fix="wait for it, or end it") from None

    @property
    def begun(self) -> int:
        """The last round that was begun; one that was not ended is void."""
        return max(int(row["step"]) for row in self._rows)

    def begin(self, number: int, asked: Sequence[str]) -> None:
        self._append({"step": number, "asked": list(asked)})

    def end(self, one: Round) -> None:
        self._append(asdict(one))

    def rounds(self) -> list[Round]:
        """All that were begun, in order; the last line on a round counts."""
        found: dict[int, Round] = {}
        for row in self._rows[1:]:
            number = row["step"]
            begun = asdict(Round(number, (), (), 0, 0, STOPPED))  # unless it was ended, too
            names = {name: tuple(row.get(name, ())) for name in ("asked", "answered")}
            found[number] = Round(**(row if "answered" in row else begun) | names)
        return list(found.values())

    def void_after(self, number: int) -> None:
        """Nothing came of rounds after ``number`` that ended well: the state that they led to was never saved."""
        for one in self.rounds():
            if one.step > number and one.void is None:
                self.end(replace(one, answered=(), void=STOPPED))

    def _append(self, row: dict[str, Any]) -> None:
        append_line(self._path, row)
        self._rows.append(row)


def _nameless(path: Path) -> RunError:
    what = f"{str(path)!r} is gone, or does not begin with the name of its run"
    why = "clients know the run by that name, and have been charged for its rounds"
    return RunError(what, why=why, fix="restore it; or start a new federation in another folder")


def is_over(folder: RunFolder, settings: Settings) -> bool:
    """Whether no round is left: by the server's notes of rounds and a trusted server's ledger, never by a report."""
    federation = settings.federation
    assert federation is not None
    done = rounds_begun(folder) >= federation.rounds
    if not (settings.privacy.private and federation.trusted_server):
        return done
    return done and folder.has_plan and read_ledger(folder.ledger).closed


def refuse_used(folder: RunFolder) -> None:
    """Raise RunError where a run is already, or a federation: one that is over is not to be continued."""
    if not (folder.settings.exists() or folder.ledger.exists()):
        return
    settings = kept_settings(folder.settings) if folder.settings.exists() else None
    if settings is None or settings.federation is None:
        if takeover.is_over(folder):
            raise takeover.finished(folder)
    elif is_over(folder, settings):
        raise takeover.finished(folder, kind="federation")
    folder.refuse_if_used()
