"""What a ledger says: its lines, read and verified.

A ledger is a file of JSON lines. Line 1 is the plan; then come

    {"type": "charge", "step": k, "event": ..., "salt": ..., "prev": ...}   one release is about to happen
    {"type": "close", "prev": ...}    the run is over; nothing may follow

`event` is a fingerprint of the plan's event at this step, `salt` 64 fresh random bits, `prev` the SHA-256 of the line
before: an edited, removed or inserted line breaks the chain and the ledger is refused, and copies that were continued
apart differ from there on. The chain has no key, and no end mark before the "close" line: by itself it does not find a
file rewritten as a whole, cut at its end, or replaced by an older copy; the files beside it do (`training.checkpoint`).

A ledger is public: it holds no private count, only the plan and how many steps of it were taken, and no clock but the
day it was begun on. How long a step took, or how often a run had to be resumed, depends on private records.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from itertools import accumulate, groupby, repeat
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard, get_args

from privlora.accounting.accountants import (
    Adjacency,
    accountant_versions,
    check_covered,
    check_delta,
    epsilon,
    ranges,
)
from privlora.accounting.events import (
    MOST_PROJECTIONS,
    StepEvent,
    describe_events,
    events_to_dicts,
    exact_fields,
)
from privlora.errors import PrivacyError, RunError
from privlora.ranges import BATCHES, CLIP_NORMS
from privlora.rounding import rounded_up
from privlora.version import VERSION

SCHEMA_VERSION = 3
_MALFORMED = (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError, PrivacyError)
Unit = Literal["record", "user", "client"]


@dataclass(frozen=True)
class Plan:
    """What a run intends to release; the first line of its ledger. Every field is public.

    Attributes:
        phases: (event, how often at most), in the order in which they are released; a run in one place trains in the
            last one, a client of a federation in all. Equal neighbours are one phase.
        delta: total delta of the guarantee, in (0, 1).
        target_epsilon: what the noise was calibrated for; None if the noise was given.
        adjacency: which data sets are neighbours.
        unit: whose data is protected: one "record", all records of one "user", or all that a "client" of a federation
            sends.
        records_per_user: bound on the records of one user in a batch; None for other units.
        clip_norm: C, the bound on one unit's contribution in norm.
        expected_batch_size: what sums are divided by, in units; in the last phase, if there are several.
        method: name of the training method.
        dataset: public name that the user gives the data; runs on the same data share it.
        insecure_noise: the noise can be replayed (tests only): no epsilon is ever stated.

    Raises:
        PrivacyError: a field is out of range.
    """

    phases: tuple[tuple[StepEvent, int], ...]
    delta: float
    target_epsilon: float | None
    adjacency: Adjacency
    unit: Unit
    records_per_user: int | None
    clip_norm: float
    expected_batch_size: float
    method: str
    dataset: str
    insecure_noise: bool = False

    def __post_init__(self) -> None:
        check_delta(self.delta)
        bound = self.records_per_user
        good = {
            "phases": self.phases and all(map(_is_phase, self.phases)),
            "target_epsilon": self.target_epsilon is None
            or (_is_number(self.target_epsilon) and 0 < self.target_epsilon < math.inf),
            "unit": self.unit in get_args(Unit),
            "records_per_user": _is_integer(bound) and bound >= 1 if self.unit == "user" else bound is None,
            "clip_norm": _is_number(self.clip_norm) and CLIP_NORMS[0] <= self.clip_norm <= CLIP_NORMS[1],
            "expected_batch_size": _is_number(self.expected_batch_size)
            and BATCHES[0] <= self.expected_batch_size <= BATCHES[1],
            "method": isinstance(self.method, str),
            "dataset": isinstance(self.dataset, str),
            "insecure_noise": isinstance(self.insecure_noise, bool),
        }
        for name, is_good in good.items():
            if not is_good:
                raise PrivacyError(
                    f"the plan's {name}={getattr(self, name)!r} is not usable",
                    why="what is released would not be what is accounted for",
                    fix="plan the run with sound settings",
                )
        for event, _ in self.phases:
            check_covered(event, self.adjacency)
            if event.sampling.cycle > 1 and len(set(self.phases)) > 1:
                raise PrivacyError(
                    "the plan has several phases, and one of them samples in cycles",
                    why="how cycles of several phases meet is not defined",
                    fix="plan cyclic sampling in a run of one phase",
                )
        kinds = {event for event, _ in self.phases}
        costly = len(kinds) > 1 and ranges(kinds) > _MOST_RANGES
        if costly or sum(len(event.projections) for event in kinds) > MOST_PROJECTIONS:
            raise PrivacyError(
                "the plan's phases would take minutes and gigabytes to account for",
                why="each has losses of its own, over the wider a range the less noise there is",
                fix="plan fewer phases, or more noise",
            )
        runs = groupby(self.phases, key=lambda phase: phase[0])
        joined = tuple((event, sum(count for _, count in run)) for event, run in runs)
        object.__setattr__(self, "phases", joined)

    @property
    def steps(self) -> int:
        """How many releases, in all phases together."""
        return sum(count for _, count in self.phases)

    @property
    def event(self) -> StepEvent:
        """The step that a plan of one phase repeats; PrivacyError if there are several."""
        if len(self.phases) > 1:
            raise PrivacyError(
                f"the plan has {len(self.phases)} phases, and this is for runs of one",
                why="the event of one phase would misstate what the others release",
                fix="use the plan's phases, or event_of(step)",
            )
        return self.phases[0][0]

    @property
    def before_training(self) -> int:
        """How many releases come before the last phase, in which a run trains."""
        return self.steps - self.phases[-1][1]

    def promise(self, spent: float | None = None) -> str:
        """The promise in one sentence. spent: epsilon, where it is known; None composes that of all planned steps.

        Versions of packages are in the ledger and in `describe`.
        """
        if self.insecure_noise:
            return self.describe()
        total = epsilon(self.phases, self.delta, adjacency=self.adjacency) if spent is None else spent
        return (
            f"epsilon {rounded_up(total)} at delta {self.delta:g} for each {self.unit}, {self.conditions()}"
        )

    def conditions(self) -> str:
        """What its epsilon depends on besides delta and the unit, in short."""
        kinds = dict.fromkeys(
            event.to_dict()["sampling"]["kind"].replace("_", " ") for event, _ in self.phases
        )
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        return (
            f"over {steps} with {' and '.join(kinds)} sampling (adjacency {self.adjacency}, PLD accountant)"
        )

    def describe(self) -> str:
        """Everything that an epsilon of this plan depends on, in one line."""
        packages = ", ".join(f"{name} {number}" for name, number in accountant_versions().items())
        if self.insecure_noise:
            return "NOT PRIVATE: the noise is repeatable, so that whoever knows its seed can subtract it"
        how = "replaced by another" if self.adjacency == "replace-one" else "there or not"
        return (
            f"per {self.unit}, {how} (adjacency {self.adjacency}); {describe_events(self.phases)}; "
            f"epsilon by PLD (the accountant; {packages})"
        )

    def event_of(self, step: int) -> StepEvent:
        """What is released in step 1, 2, …; PrivacyError for a step that is not planned."""
        return self.phases[self.phase_of(step)][0]

    def phase_of(self, step: int) -> int:
        """In which of `phases`, from 0, step 1, 2, … is; PrivacyError for a step that is not planned."""
        if not 1 <= step <= self.steps:
            raise PrivacyError(f"step {step} is not one of the plan's {self.steps}")
        return len(self.events(step)) - 1

    def events(self, steps: int) -> list[tuple[StepEvent, int]]:
        """What the first `steps` steps release, run-length encoded."""
        starts = accumulate((count for _, count in self.phases), initial=0)
        return [
            (event, min(count, steps - start))
            for (event, count), start in zip(self.phases, starts, strict=False)
            if start < steps
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "phases": events_to_dicts(self.phases)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote; PrivacyError for missing, unknown or unusable fields."""
        values = dict(exact_fields(data, {field.name for field in fields(cls)}, "plan"))
        phases = [exact_fields(phase, {"event", "steps"}, "phase") for phase in values.pop("phases")]
        found = tuple((StepEvent.from_dict(phase["event"]), phase["steps"]) for phase in phases)
        return cls(phases=found, **values)


@dataclass(frozen=True)
class LedgerSummary:
    """What a ledger says.

    Attributes:
        path: the file.
        run_id: random identifier of the run.
        created: the day, UTC, as YYYY-MM-DD.
        versions: the software that wrote it.
        plan: what was intended.
        charge_hashes: of each charged step's line. A hash covers all lines before it, so it is that of no other run,
            and of no copy that was continued apart.
        closed: whether the run is over.
    """

    path: Path
    run_id: str
    created: str
    versions: dict[str, str]
    plan: Plan
    charge_hashes: tuple[str, ...] = field(default=(), repr=False)
    closed: bool = False

    @property
    def charges(self) -> int:
        """How many steps were charged: the number released, or one more after a crash."""
        return len(self.charge_hashes)

    @property
    def remaining(self) -> int:
        """Steps of the plan that are not charged."""
        return self.plan.steps - self.charges

    def events(self) -> list[tuple[StepEvent, int]]:
        """What happened, run-length encoded; empty before the first charge."""
        return self.plan.events(self.charges)

    def require_secure_noise(self) -> None:
        """Raise PrivacyError if this run's noise could be replayed, because then no epsilon holds."""
        if self.plan.insecure_noise:
            raise PrivacyError(
                f"{self.path}: NOT PRIVATE, the noise of run {self.run_id} was reproducible",
                why="whoever knows the seed subtracts the noise, so no epsilon holds",
                fix="train again without the insecure seed",
            )

    def epsilon(self, delta: float | None = None) -> float:
        """PLD epsilon of the charges so far, at the plan's delta and adjacency unless another delta is given.

        Raises:
            PrivacyError: the run used reproducible noise, or delta is not in (0, 1).
        """
        self.require_secure_noise()
        return epsilon(
            self.events(), self.plan.delta if delta is None else delta, adjacency=self.plan.adjacency
        )


def read_ledger(path: str | os.PathLike[str]) -> LedgerSummary:
    """What the ledger at `path` says. Takes no lock and changes nothing, so it also reads a running ledger.

    Raises:
        RunError: there is no such file, or it has no complete first line.
        PrivacyError: a line was changed, removed or is not understood.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(
            f"{path}: cannot be read: {error.strerror}", fix="give the path of a run's ledger"
        ) from error
    return parse_ledger(path, content)[0]


def parse_ledger(path: Path, content: bytes) -> tuple[LedgerSummary, str, int]:
    """What the complete lines say, the hash of the last one, and their length in bytes."""
    size = content.rfind(b"\n") + 1
    if size == 0:
        raise RunError(
            f"{path}: has no complete first line", why="so nothing was released", fix="delete it, start anew"
        )
    lines = content[:size].splitlines(keepends=True)
    reader: _Reader | None = None
    head: str | None = None
    for number, line in enumerate(lines, start=1):
        try:
            record = _parsed(line)
            if record["prev"] != head:
                raise PrivacyError("does not continue the line before")
            head = digest(line)
            if reader is None:
                reader = _Reader(record)
            else:
                reader.advance(record, head)
        except _MALFORMED as error:
            if reader is None and b'"prev"' not in line:
                raise PrivacyError(
                    f"{path} is no ledger",
                    why="its line 1 is not what was written by a run, so no epsilon can be stated",
                    fix="give the ledger.jsonl in a run's release/; if this was one, restore the original file",
                ) from error
            raise PrivacyError(
                f"{path}: line {number} is not what was written: {error}",
                why="a changed ledger no longer shows what was released",
                fix="restore the original file; without it no epsilon can be stated",
            ) from error
    assert reader is not None
    assert head is not None
    return reader.summary(path), head, size


def _parsed(line: bytes) -> Any:
    """The object of a line, if it is written as ledgers are: no key twice, and nothing beside it."""
    text = line.decode()  # bytes would have their encoding guessed
    record = json.loads(text)
    if json.dumps(record, sort_keys=True) + "\n" != text:
        raise PrivacyError("is not written as a run writes it")
    return record


_FIRST_DAY: Final = date(
    2000, 1, 1
)  # files are given it as their time, which systems do not take before 1970
_MOST_RANGES: Final = 128.0  # of a plan, half of what `epsilon` adds up with other runs


_RUN: Final = re.compile("[0-9a-f-]{8,64}")


def _is_run(found: object) -> bool:
    return isinstance(found, str) and _RUN.fullmatch(found) is not None


def _are_versions(found: object) -> bool:
    """Whether they are those of `accountant_versions`."""
    return (
        isinstance(found, dict)
        and found.keys() == accountant_versions().keys()
        and all(isinstance(each, str) and VERSION.fullmatch(each) for each in found.values())
    )


class _Reader:
    """What the lines say so far."""

    def __init__(self, record: dict[str, Any]) -> None:
        expected = {"type", "schema_version", "run_id", "created", "versions", "plan", "prev"}
        exact_fields(record, expected, "first line")
        schema = record["schema_version"]
        if not _is_integer(schema) or not _is_run(record["run_id"]):
            raise PrivacyError("is not a plan with a version and the identifier of a run")
        if record["type"] != "plan" or schema != SCHEMA_VERSION:
            raise PrivacyError(f"is not a plan of schema version {SCHEMA_VERSION}")
        created = date.fromisoformat(record["created"])
        if created < _FIRST_DAY or created.isoformat() != record["created"]:
            raise PrivacyError("is of no day of a run")
        self._created = created.isoformat()
        self._run_id, self._versions = record["run_id"], record["versions"]
        if not _are_versions(self._versions):
            raise PrivacyError("names no versions of what computed epsilon")
        self._plan = Plan.from_dict(record["plan"])
        phases = self._plan.phases
        self._planned = (name for event, count in phases for name in repeat(fingerprint(event), count))
        self._steps = self._plan.steps
        self._charges: list[str] = []
        self._closed = False

    def advance(self, record: dict[str, Any], line_hash: str) -> None:
        """Take in one more line."""
        if self._closed:
            raise PrivacyError("follows the end of the run")
        kind = record["type"]
        if kind == "charge":
            exact_fields(record, {"type", "step", "event", "salt", "prev"}, "charge")
            if not re.fullmatch(r"[0-9a-f]{16}", record["salt"]):
                raise PrivacyError("has no salt of 16 hexadecimal digits")
            self._check_charge(record)
            self._charges.append(line_hash)
            return
        exact_fields(record, {"type", "prev"}, "line")
        if kind != "close":
            raise PrivacyError(f"has the unknown type {kind!r}")
        self._closed = True

    def _check_charge(self, record: dict[str, Any]) -> None:
        done, planned = len(self._charges), self._steps
        if not _is_integer(record["step"]) or record["step"] != done + 1 or done == planned:
            raise PrivacyError(f"charges step {record['step']} after {done} of {planned}")
        if record["event"] != next(self._planned):
            raise PrivacyError(f"charges another event than the plan's of step {done + 1}")

    def summary(self, path: Path) -> LedgerSummary:
        return LedgerSummary(
            path,
            self._run_id,
            self._created,
            self._versions,
            self._plan,
            tuple(self._charges),
            self._closed,
        )


def fingerprint(event: StepEvent) -> str:
    """Short hash of an event, by which a charge names it."""
    return digest(json.dumps(event.to_dict(), sort_keys=True).encode())[:16]


def digest(line: bytes) -> str:
    """SHA-256 in hexadecimal, which the next line repeats."""
    return hashlib.sha256(line).hexdigest()


def _is_phase(value: object) -> bool:
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], StepEvent)):
        return False
    return _is_integer(value[1]) and value[1] >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
