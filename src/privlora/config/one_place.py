"""Settings of runs in one place that federations do not have: each with the reason and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from privlora.config.auto import AUTO
from privlora.config.federation import JOINT
from privlora.errors import echoed
from privlora.names import EITHER, KINDS

MICRO_BATCH: Final = 4096
"""Tokens of a micro-batch where nothing else is said."""


METRIC_AND_RULE: Final = (
    "goes with federation.rule=joint alone: clients of other rules move from a fixed base",
    "remove metric_power, or set federation.rule=joint, whose steps all clients take together",
)
"""Why, and how to fix it."""


class Misplaced(NamedTuple):
    """place: ``group.name``. what: why it does not go with a federation. fix: what to do instead."""

    place: str
    what: str
    fix: str


def misplaced(value_of: Callable[[str, str], Any], steps: int | None = None) -> list[Misplaced]:
    """All that do not go with a federation, in the order of the groups.

    value_of: of a group and a setting's name what was given; None if nothing was. steps: that a client takes, which
    privacy.steps may repeat; None where that is not known.
    """
    found = []
    for place, wrong, why, fix in _ROWS:
        value, shown = value_of(*place.split(".")), "=auto" if wrong is _is_auto else ""
        what = f"{place}{shown} {why}"
        if place == "privacy.steps" and steps is not None:
            wrong = steps.__ne__ if value is not None else _given
            what = f"privacy.steps={echoed(value)}, and a client of this federation takes {steps}"
        if place == "method.metric_power" and value_of("federation", "rule") in (None, JOINT):
            continue  # whose steps all clients take together
        if wrong(value):
            found.append(Misplaced(place, what, fix))
    return found


def of_mapping(values: Mapping[str, Any]) -> Callable[[str, str], Any]:
    """``value_of`` for groups as a file has them."""

    def value_of(group: str, name: str) -> Any:
        inner = values.get(group)
        if group == "federation" and not isinstance(inner, Mapping):  # which a call may have made already
            return getattr(inner, name, None)
        return inner.get(name) if isinstance(inner, Mapping) else None

    return value_of


def _given(value: Any) -> bool:
    return value is not None


def _is_auto(value: Any) -> bool:
    return bool(value == AUTO)


def _true(value: Any) -> bool:
    return value is True


def _logs(value: Any) -> bool:
    return bool(value) and value not in ("none", ["none"])


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and value not in (*KINDS, EITHER)


def _drawn_in_passes(value: Any) -> bool:
    return value not in (None, "poisson")


def _several(value: Any) -> bool:
    return value is not None and value != 1


_NOT: Final = "does not go with a federation"
_NO_RECORDS: Final = f"{_NOT}, whose clients have no public records"
_RATE: Final = "remove it: the rule's own rate stands for it"
_ROWS: Final[tuple[tuple[str, Callable[[Any], bool], str, str], ...]] = (
    (
        "data.chunk",
        _true,
        f"{_NOT}, whose clients count whole records",
        "divide long texts before, with unit: user",
    ),
    ("data.chosen", _given, f"{_NOT}, whose clients learn texts", "remove either"),
    ("data.label", _given, f"{_NOT}, whose rules know the factors of adapters alone", "remove either"),
    (
        "data.chat_template",
        _given,
        f"{_NOT}: it is a program, and would run where the clients' records are",
        "give all clients a base model whose tokenizer has it",
    ),
    (
        "adapter.target_modules",
        _is_pattern,
        "is a regular expression, which could keep the machine of a client busy without end",
        "list the names of layers, as in [q_proj, v_proj]",
    ),
    (
        "privacy.steps",
        _given,
        "is of a run in one place, and a federation's follows from its rounds",
        "remove privacy.steps, which follows from rounds, clients_per_round and local_steps",
    ),
    (
        "privacy.expected_batch_size",
        _is_auto,
        f"{_NOT}, whose sizes are those of its rounds",
        "give a number",
    ),
    (
        "privacy.clip_norm",
        _is_auto,
        f"{_NOT}, whose clients clip at one norm",
        "give a number; 1 is the default",
    ),
    ("privacy.bands", _several, f"{_NOT}: nobody could keep its noise from round to round", "remove it"),
    ("privacy.sampling", _drawn_in_passes, f"{_NOT}, whose rounds are accounted one by one", "remove it"),
    ("privacy.clip_quantile", _given, f"{_NOT}: sums need one clip norm for all clients", "remove it"),
    (
        "privacy.max_batch_size",
        _given,
        f"{_NOT}: its cost depends on each client's number of records, which nobody publishes",
        "remove it",
    ),
    ("method.learning_rate", _is_auto, _NO_RECORDS, _RATE),
    ("method.right_weight", _is_auto, _NO_RECORDS, "give a number; 1 is the default"),
    ("method.metric_power", bool, *METRIC_AND_RULE),
    ("auto.all", _true, f"{_NOT}, whose clients have no texts to choose on", "remove it"),
    ("run.report_to", _logs, "is not read in a federation, so nothing would be logged", "remove it"),
    (
        "run.tokens_per_micro_batch",
        _is_auto,
        f"{_NOT}: clients of one process train at once, and others on unlike machines",
        f"give one number, such as {MICRO_BATCH}",
    ),
)
"""``group.name``, whether a value of it is wrong, why, and how to fix it."""
