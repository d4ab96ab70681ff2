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
    "method.metric_power goes with federation.rule=joint alone: a metric follows the update from step to step, and "
    "clients move from a base that stays for a round",
    "remove metric_power, or set federation.rule=joint, whose steps all clients take together",
)
"""Why, and how to mend it."""


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
    for place, (wrong, what, fix) in _TABLE.items():
        value = value_of(*place.split("."))
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


def _several(value: Any) -> bool:
    return value is not None and value != 1


_TABLE: Final[Mapping[str, tuple[Callable[[Any], bool], str, str]]] = {
    "data.chunk": (
        _true,
        "data.chunk does not go with a federation, whose clients count whole records",
        "remove it, and divide long texts before, with privacy.unit: user",
    ),
    "data.chosen": (
        _given,
        "data.chosen does not go with a federation, whose clients learn texts",
        "remove either",
    ),
    "data.label": (
        _given,
        "data.label does not go with a federation, whose rules know the factors of adapters alone",
        "remove either",
    ),
    "data.chat_template": (
        _given,
        "data.chat_template does not go with a federation: it is a program, and would run where the clients' records "
        "are",
        "give all clients a base model whose tokenizer has it",
    ),
    "adapter.target_modules": (
        _is_pattern,
        "adapter.target_modules is a regular expression, which could keep the machine of a client busy without end",
        "list the names of layers, as in [q_proj, v_proj]",
    ),
    "privacy.steps": (
        _given,
        "privacy.steps is of a run in one place, and a federation's follows from its rounds",
        "remove privacy.steps, which follows from rounds, clients_per_round and local_steps",
    ),
    "privacy.expected_batch_size": (
        _is_auto,
        "privacy.expected_batch_size=auto does not go with a federation, whose sizes are those of its rounds",
        "give a number",
    ),
    "privacy.clip_norm": (
        _is_auto,
        "privacy.clip_norm=auto does not go with a federation, whose clients clip at one norm that they are told",
        "give a number, or remove it: 1 stands for it",
    ),
    "privacy.bands": (
        _several,
        "privacy.bands does not go with a federation: its noise would have to be kept from round to round, by nobody "
        "knows whom",
        "remove it",
    ),
    "privacy.sampling": (
        lambda value: value not in (None, "poisson"),
        "privacy.sampling does not go with a federation, whose rounds are accounted one by one",
        "remove it",
    ),
    "privacy.clip_quantile": (
        _given,
        "privacy.clip_quantile does not go with a federation: each client would learn a clip norm of its own, and "
        "their sums need one for all",
        "remove it",
    ),
    "privacy.max_batch_size": (
        _given,
        "privacy.max_batch_size does not go with a federation: what a cap costs depends on each client's number of "
        "records, which nobody publishes",
        "remove it",
    ),
    "method.learning_rate": (
        _is_auto,
        "method.learning_rate=auto does not go with a federation, whose clients have no public records",
        "remove it: the rule's own rate stands for it",
    ),
    "method.right_weight": (
        _is_auto,
        "method.right_weight=auto does not go with a federation, whose clients have no public records",
        "give a number, or remove it: 1 stands for it",
    ),
    "method.metric_power": (bool, *METRIC_AND_RULE),
    "auto.all": (
        _true,
        "auto.all does not go with a federation, whose sizes are those of its rounds, and whose clients have no texts "
        "to choose on",
        "remove it",
    ),
    "run.report_to": (
        _logs,
        "run.report_to is not read in a federation, so nothing would be logged",
        "remove it",
    ),
    "run.tokens_per_micro_batch": (
        _is_auto,
        "run.tokens_per_micro_batch=auto does not go with a federation: all clients have one number, on unlike "
        "machines, and those of one process train side by side",
        f"give one, such as {MICRO_BATCH}",
    ),
}
"""``group.name`` -> whether a value of it is wrong, why, and how to mend it."""
