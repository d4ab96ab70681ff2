"""What the table of rules says of itself, for people and for machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from privlora.config.federation import JOINT
from privlora.federated.plans import hides_clients, joint_methods, local_methods
from privlora.federated.rules import RULES, Rule, RuleSettings
from privlora.methods import METHODS

EXAMPLE: Final = {"modules": 64, "rows": 4096, "columns": 4096, "rank": 16, "oversampling": 0, "clients": 10}
"""The federation for which numbers are given: modules of rows x columns."""

EXAMPLE_IN_WORDS: Final = (
    "{modules} modules of {rows} x {columns}, r = {rank}, p = {oversampling}, {clients} clients".format(
        **EXAMPLE
    )
)

# Sizes that say which letter they stand for: no two are equal, and none is another's multiple.
_ROWS, _COLUMNS, _CLIENTS, _RANK, _WIDTH = 4099, 4093, 10, 16, 19
_LETTERS: Final = {
    _ROWS: "m",
    _COLUMNS: "n",
    _RANK: "r",
    _WIDTH: "(r + p)",
    _CLIENTS * _RANK: "K r",
    (_CLIENTS - 1) * _RANK: "(K − 1) r",
}


def rule_facts() -> list[dict[str, Any]]:
    """One row for joint and one for each rule; floats are what one client is sent and answers in its second round."""
    return [_joint(), *map(_row, RULES.values())]


def _row(rule: type[Rule]) -> dict[str, Any]:
    modules, rows, columns, rank, oversampling, clients = EXAMPLE.values()
    chosen = RuleSettings(rank=rank, oversampling=oversampling)
    down, up = rule.message_sizes([(modules, rows, columns)], chosen, number=2, clients=clients)
    usual, private = local_methods(rule, chosen)
    open_to_all = replace(chosen, private=False)
    return {
        "name": rule.name,
        "summary": rule.summary,
        "reference": rule.reference,
        "stages": list(rule.stages),
        "common": rule.common,
        "floats_down": int(down),
        "floats_up": int(up),
        "down": _formula(rule, 0),
        "up": _formula(rule, 1),
        "exact": rule.exact,
        "exact_without_privacy": rule.is_exact(open_to_all, clients),
        "two_sided": rule.two_sided,
        "secure_sums": "possible" if rule.linear else "impossible",
        "privacy_models": ["record", "client"] if hides_clients(rule) else ["record"],
        "method": usual.name,
        "methods": [name for name in private if METHODS[name].private],
        "methods_without_privacy": local_methods(rule, open_to_all)[1],
    }


def _joint() -> dict[str, Any]:
    """Training itself, one step a round; numbers are those of its default method, prism."""
    modules, rank, usual = EXAMPLE["modules"], EXAMPLE["rank"], METHODS["prism"]
    factors = rank * (EXAMPLE["rows"] + EXAMPLE["columns"])
    return {
        "name": JOINT,
        "summary": "One step of central training a round, its batch and its noise spread over the clients. "
        "The accuracy of central training; needs secure sums.",
        "reference": "Distributed discrete Gaussian (arXiv:2102.06387); secure sums (Bonawitz et al. 2017)",
        "stages": ["train"],
        "common": True,
        "floats_down": modules * (factors + rank),
        "floats_up": modules * (factors + rank**2),
        "down": "m r + r + n r",
        "up": "r r + m r + n r",
        "exact": True,
        "exact_without_privacy": True,
        "two_sided": True,
        "secure_sums": "needed",
        "privacy_models": ["record"],
        "method": usual.name,
        "methods": [name for name in joint_methods() if METHODS[name].private],
        "methods_without_privacy": joint_methods(),
    }


def _formula(rule: type[Rule], way: int) -> str:
    """Numbers a module, of rounds 1, 2 and 3. way: 0 is down, 1 is up."""
    chosen, sizes = RuleSettings(rank=_RANK, oversampling=_WIDTH - _RANK), [(1, _ROWS, _COLUMNS)]
    sums = []
    for number in (1, 2, 3):
        of_stages = [rule.shapes(stage, number, sizes, chosen, _CLIENTS)[way] for stage in rule.stages]
        shapes = [shape[1:] for shapes in of_stages for shape in shapes.values() if 0 not in shape]
        products = (" ".join(_LETTERS.get(size, str(size)) for size in shape) for shape in shapes)
        sums.append(" + ".join(products) or "nothing")
    first, second, third = sums
    if first == second == third:
        return first
    return f"{first}, then {second}, by turns" if first == third else f"{second} in round 2, more in each"
