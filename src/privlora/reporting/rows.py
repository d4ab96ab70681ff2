"""Rows of a release, held against its report: no key but the known ones, no number but those that follow from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from privlora.accounting.ledger_format import parse_ledger
from privlora.rehearsals.kept import clip_norm_of, cost_on_private, right_weight_of
from privlora.reporting.seals import LARGEST, altered
from privlora.reporting.statement import evaluation_rows
from privlora.training.files import RunFolder

_ALWAYS: Final = ("step", "accuracy", "examples", "tokens")
_IF_FINITE: Final = ("loss_per_token", "loss_per_example", "standard_error", "f1", "matthews_correlation")
OF_EVALUATIONS: Final = frozenset((*_ALWAYS, *_IF_FINITE, "pearson", "spearman", "reward_margin"))
"""What a row of an evaluation may name: a test compares it with the results, which import torch."""
_COST: Final = ("private_runs", "private_epsilon")
_OF_METRICS: Final = frozenset(("step", "epsilon", "learning_rate", "held_out_loss"))
_ROUNDING: Final = 1e-6  # of an accountant on two machines


def refuse_other_rows(folder: RunFolder, report: Mapping[str, Any], copied: RunFolder) -> None:
    """Raise PrivacyError for rows, in files or repeated by the report, and ledgers that hold anything else than what a
    run writes there.

    ``folder`` is for words alone; what is read lies in ``copied``.
    """
    checks: dict[Path, Callable[[str], bool]] = {
        # What stood in files when a run went on stands in its report, also without those files.
        copied.report: lambda _: _are_known(report["evaluation"]) and _is_repeated(report, copied.ledger),
        copied.evaluations: lambda text: _are_evaluations(_rows(text), report),
        copied.choice: lambda text: _is_choice(text, report),
        copied.metrics: lambda text: _are_metrics(_rows(text), report, copied.ledger),
        **dict.fromkeys(copied.release.glob("ledger*.jsonl"), _is_ledger),
    }
    for path, as_written in checks.items():
        if not path.exists():
            continue
        if path.stat().st_size > LARGEST:
            raise altered(folder, path.name)
        try:
            same = as_written(path.read_bytes().decode())
        except Exception:  # noqa: BLE001 - what no run wrote can lack anything
            same = False
        if not same:
            raise altered(folder, path.name)


def _rows(text: str) -> list[dict[str, Any]]:
    """Of JSON lines as `append_line` writes them: no key twice, no other spelling, nothing behind the last line.

    Steps rise, which evaluations do through every resume.
    """
    *lines, rest = text.split("\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [row["step"] for row in rows]
    if rest or any(type(step) is not int or step < 0 for step in steps) or steps != sorted(set(steps)):
        raise ValueError
    if [json.dumps(row) for row in rows] != lines:
        raise ValueError
    return rows


def _are_known(evaluations: list[dict[str, Any]]) -> bool:
    """Whether there are numbers alone under known names."""
    known = all(row.keys() <= OF_EVALUATIONS for row in evaluations)
    return known and all(value is None or _is_number(value) for row in evaluations for value in row.values())


def _is_repeated(report: Mapping[str, Any], ledger: Path) -> bool:
    """Whether the report's choice, if it has one, is one that the run can have made."""
    choice = report["method"].get("choice")
    return choice is None or (_is_settled(choice, report) and _is_priced(choice, ledger))


def _are_evaluations(rows: list[dict[str, Any]], report: Mapping[str, Any]) -> bool:
    numbers = all(
        _is_number(value) or (value is None and name not in _ALWAYS)
        for row in rows
        for name, value in row.items()
    )
    return numbers and evaluation_rows(rows) == report["evaluation"]


def _are_metrics(rows: list[dict[str, Any]], report: Mapping[str, Any], ledger: Path) -> bool:
    """Whether all follows from the plan, the method and the evaluations of the report: which steps, and every value."""
    if any(row.keys() != _OF_METRICS for row in rows):
        return False
    steps, evaluations = report["method"]["steps"], report["evaluation"]
    from privlora.training.loggers import rows_of_report, steps_shown

    shown, evaluated = [row["step"] for row in rows], [row["step"] for row in evaluations]
    every = math.gcd(*(set(shown) - {1, steps, *evaluated})) or steps
    if shown != steps_shown(steps, every, evaluated):
        return False
    plan = parse_ledger(ledger, ledger.read_bytes())[0].plan
    true = rows_of_report(plan, report, shown, evaluations)
    return all(
        alike(row[name], one[name]) for row, one in zip(rows, true, strict=True) for name in _OF_METRICS
    )


def _is_choice(text: str, report: Mapping[str, Any]) -> bool:
    found = json.loads(text)
    return json.dumps(found, indent=1) + "\n" == text and found == report["method"].get("choice")


def _is_priced(found: Mapping[str, Any], ledger: Path) -> bool:
    """Whether the choice's cost on private records follows from the ledger, at most a cent above it: it is rounded up,
    from a number that differs in its last digits between machines."""
    said = {name: found[name] for name in _COST if name in found}
    true = cost_on_private(parse_ledger(ledger, ledger.read_bytes())[0].plan, len(found["rows"]))
    mine, theirs = said.get("private_epsilon"), true.get("private_epsilon")
    if mine is None or theirs is None:
        return said == true
    same = said["private_runs"] == true["private_runs"] and mine == round(mine, 2)
    return same and -0.005 < mine - theirs < 0.015


def _is_settled(found: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether what was chosen is what the run had, and follows from what was measured for it."""
    method, rates = report["method"], [row["learning_rate"] for row in found["rows"]]
    taken = {"row": method["name"], "clip_norm": report["statement"]["clip_norm"]}
    taken |= {"right_weight": method.get("right_weight")}
    return (
        all(found[name] == value for name, value in taken.items() if name in found)
        and rates[:1] in ([], [method["learning_rate"]])
        and ("clip_norm" not in found or found["clip_norm"] == clip_norm_of(found["median_norm"]))
        and ("right_weight" not in found or found["right_weight"] == right_weight_of(found["turning"]))
    )


def _is_ledger(text: str) -> bool:
    """Whether nothing lies behind the last whole line, which readers pass over."""
    content = text.encode()
    return parse_ledger(Path(), content)[2] == len(content)


def alike(said: object, true: object) -> bool:
    """The same, but for numbers that another machine rounds in its own way."""
    if isinstance(said, Mapping) and isinstance(true, Mapping):
        return said.keys() == true.keys() and all(alike(said[name], true[name]) for name in true)
    if isinstance(said, list | tuple) and isinstance(true, list | tuple):
        return len(said) == len(true) and all(map(alike, said, true))
    if isinstance(said, float) and isinstance(true, float):
        return math.isclose(said, true, rel_tol=_ROUNDING)
    return type(said) is type(true) and said == true


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
