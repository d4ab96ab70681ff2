"""Cells of a study dealt to several machines: which part runs which, whatever has been run before.

Who owns a cell follows from the study's content alone, so parts agree without a word. Of one task the cells lie in an
order that their fingerprints give, so that no part gets the slow method or the seed that fails more often than others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from privlora.lab.studies.results import Role
from privlora.lab.studies.settings import Cell, Study
from privlora.lab.studies.shares import Part


@dataclass(frozen=True)
class Deal:
    """Who runs which cell of ``study``, in ``count`` parts."""

    study: Study
    count: int

    def owner(self, cell: Cell, role: Role) -> Part:
        """The part that runs a cell. The rates of a (place, seed) that is reported go to one part: which of them is
        wanted is known once rates are chosen, and who owns it must not depend on that."""
        key: Hashable = cell if role == "selection" else _reported(cell)
        return Part(self._numbers[role, key], self.count)

    @cached_property
    def _numbers(self) -> Mapping[tuple[Role, Hashable], int]:
        study, found = self.study, dict[tuple[Role, Hashable], int]()
        seeds: dict[Role, list[int]] = {
            "selection": list(study.settings.selection.seeds),
            "report": list(study.settings.seeds),
        }
        for role, of_role in seeds.items():
            keys = dict[Hashable, tuple[int, str]]()
            for cell in study.grid(of_role):
                if role == "selection" and len(study.by_label[cell.method].learning_rates) < 2:
                    continue
                key = cell if role == "selection" else _reported(cell)
                keys.setdefault(key, (study.tasks.index(cell.task), study.fingerprint(cell, role)))
            for place, key in enumerate(sorted(keys, key=keys.__getitem__)):
                found[role, key] = place % self.count + 1
        return found


def content_of(study: Study) -> str:
    """A digest of everything that decides who owns which cell."""
    seeds = (*study.settings.selection.seeds, *study.settings.seeds)
    cells = sorted(
        study.fingerprint(cell, role) for cell in study.grid(seeds) for role in ("selection", "report")
    )
    return hashlib.sha256("".join(cells).encode()).hexdigest()[:16]


def _reported(cell: Cell) -> Hashable:
    return cell.task, cell.method, cell.epsilon, cell.rank, cell.seed
