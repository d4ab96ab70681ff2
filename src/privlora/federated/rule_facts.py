"""What the table of rules says of itself, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from privlora.config.federation import JOINT
from privlora.federated.plans import hides_clients, joint_methods, local_methods
from privlora.federated.rules import RULES, Rule, RuleSettings
from privlora.federated.rules.base import Sizes
from privlora.methods import METHODS


@dataclass(frozen=True)
class Example:
    """The federation for which numbers are given: modules of rows x columns."""

    modules: int = 64
    rows: int = 4096
    columns: int = 4096
    rank: int = 16
    oversampling: int = 0
    clients: int = 10

    def describe(self) -> str:
        sizes = f"{self.modules} modules of {self.rows} x {self.columns}"
        return f"{sizes}, r = {self.rank}, p = {self.oversampling}, {self.clients} clients"


EXAMPLE: Final = Example()

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


def rule_facts(example: Example = EXAMPLE) -> list[dict[str, Any]]:
    """One row for joint and one for each rule; floats are what one client is sent and answers in its second round."""
    return [_joint(example), *(_row(rule, example) for rule in RULES.values())]


def _row(rule: type[Rule], example: Example) -> dict[str, Any]:
    sizes: list[Sizes] = [(example.modules, example.rows, example.columns)]
    chosen = RuleSettings(rank=example.rank, oversampling=example.oversampling)
    down, up = rule.message_sizes(sizes, chosen, number=2, clients=example.clients)
    usual, private = local_methods(rule, RuleSettings(rank=example.rank, private=True))
    _, without = local_methods(rule, RuleSettings(rank=example.rank, private=False))
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
        "exact_without_privacy": rule.is_exact(replace(chosen, private=False), example.clients),
        "two_sided": rule.two_sided,
        "secure_sums": "possible" if rule.linear else "impossible",
        "privacy_models": ["record", "client"] if hides_clients(rule) else ["record"],
        "method": usual.name,
        "methods": [name for name in private if METHODS[name].private],
        "methods_without_privacy": without,
    }


def _joint(example: Example) -> dict[str, Any]:
    """Training itself, one step a round; numbers are those of its default method, prism."""
    rank, usual = example.rank, METHODS["prism"]
    factors = rank * (example.rows + example.columns)
    return {
        "name": JOINT,
        "summary": "One step of central training a round, its batch and its noise spread over the clients. "
        "The accuracy of central training; needs secure sums.",
        "reference": "Distributed discrete Gaussian (arXiv:2102.06387); secure sums (Bonawitz et al. 2017)",
        "stages": ["train"],
        "common": True,
        "floats_down": example.modules * (factors + rank),
        "floats_up": example.modules * (factors + rank**2),
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
