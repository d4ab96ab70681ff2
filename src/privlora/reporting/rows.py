"""Rows of a release, held against its report: no key but the known ones, no number but those that follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import gcd, isclose
from pathlib import Path
from typing import Any, Final

from privlora.accounting.ledger_format import parse_ledger
from privlora.config.method_names import known as known_methods
from privlora.errors import PrivloraError
from privlora.rehearsals.kept import AIM, DRAWS, MOST_RATES, TEXTS, cost_on_private
from privlora.reporting.seals import altered
from privlora.reporting.statement import evaluation_rows
from privlora.training.files import RunFolder

OF_EVALUATIONS: Final = frozenset(
    (
        "step",
        "loss_per_token",
        "loss_per_example",
        "standard_error",
        "accuracy",
        "examples",
        "tokens",
        "f1",
        "matthews_correlation",
        "pearson",
        "spearman",
        "reward_margin",
    )
)
"""What a row of an evaluation may name: a test compares it with the results, which import torch."""
_MOST_TRIALS, _MOST_PUBLIC = 40, 10**7
_NAMES: Final = frozenset(("asked", "row"))
_OF_TRIAL: Final = frozenset(("name", "learning_rate", "loss"))
_OF_RATE: Final = _OF_TRIAL | {"spread", "draws"}
_OF_COST: Final = frozenset(("private_runs", "private_epsilon"))
_OF_CHOICE: Final = _NAMES | {
    "untrained",
    "spanning",
    "in_place_of_records",
    "held_out",
    "drawn",
    "aim",
    "of_its_own",
    "median_norm",
    "clip_norm",
    "draws",
    "lead",
    "standard_error",
    "equal_from",
    "equal_to",
    *_OF_COST,
}
_OF_METRICS: Final = frozenset(("step", "epsilon", "learning_rate", "held_out_loss"))
_FINITE: Final = frozenset(("step", "accuracy", "examples", "tokens"))  # whatever the model computes
_ROUNDING: Final = 1e-6  # of an accountant on two machines


def refuse_other_rows(folder: RunFolder, report: Mapping[str, Any], copied: RunFolder) -> None:
    """Raise PrivacyError for rows, in files or repeated by the report, and ledgers that hold anything else than what a
    run writes there.

    ``folder`` is for words alone; what is read lies in ``copied``.
    """
    checks: dict[Path, Callable[[str], bool]] = {
        # What stood in files when a run went on stands in its report, also without those files.
        copied.report: lambda _: _is_known(report["evaluation"], report["method"].get("choice")),
        copied.evaluations: lambda text: _are_evaluations(_rows(text), report),
        copied.choice: lambda text: _is_choice(text, report) and _is_priced(json.loads(text), copied.ledger),
        copied.metrics: lambda text: _are_metrics(_rows(text), report, copied.ledger),
        **dict.fromkeys(copied.release.glob("ledger*.jsonl"), _is_ledger),
    }
    for path, as_written in checks.items():
        if not path.exists():
            continue
        try:
            same = as_written(path.read_bytes().decode())
        except (
            PrivloraError,
            ArithmeticError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ):
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


def _is_known(evaluations: list[dict[str, Any]], choice: dict[str, Any] | None) -> bool:
    """Whether there are numbers alone under known names, and names of methods."""
    numbers = [row[name] for row in evaluations for name in row]
    known = all(row.keys() <= OF_EVALUATIONS for row in evaluations)
    if choice is not None:
        rows, top = choice["rows"], {name: value for name, value in choice.items() if name != "rows"}
        of_trial = _OF_TRIAL if "asked" in top else _OF_RATE
        known = known and top.keys() <= _OF_CHOICE and all(row.keys() == of_trial for row in rows)
        names = [*(row["name"] for row in rows), *(top[name] for name in _NAMES & top.keys())]
        known = known and set(names) <= set(known_methods())
        numbers += [value for name, value in top.items() if name not in _NAMES]
        numbers += [value for row in rows for name, value in row.items() if name != "name"]
    return known and all(value is None or _is_number(value) for value in numbers)


def _are_evaluations(rows: list[dict[str, Any]], report: Mapping[str, Any]) -> bool:
    numbers = all(
        _is_number(value) or (value is None and name not in _FINITE)
        for row in rows
        for name, value in row.items()
    )
    return numbers and evaluation_rows(rows) == report["evaluation"]


def _are_metrics(rows: list[dict[str, Any]], report: Mapping[str, Any], ledger: Path) -> bool:
    """Whether all follows from the plan, the method and the evaluations of the report: which steps, and every value."""
    if any(row.keys() != _OF_METRICS for row in rows):
        return False
    steps, evaluations = report["method"]["steps"], report["evaluation"]
    from privlora.training.public_rows import rows_of_report, steps_shown

    shown, evaluated = [row["step"] for row in rows], [row["step"] for row in evaluations]
    every = gcd(*(set(shown) - {1, steps, *evaluated})) or steps
    if shown != steps_shown(steps, every, evaluated):
        return False
    plan = parse_ledger(ledger, ledger.read_bytes())[0].plan
    true = rows_of_report(plan, report, shown, evaluations)
    return all(
        _alike(row[name], one[name]) for row, one in zip(rows, true, strict=True) for name in _OF_METRICS
    )


def _is_choice(text: str, report: Mapping[str, Any]) -> bool:
    found = json.loads(text)
    same = json.dumps(found, indent=1) + "\n" == text and found == report["method"].get("choice")
    return same and (("asked" in found and "aim" not in found) or _is_settled(found, report))


def _is_priced(found: Mapping[str, Any], ledger: Path) -> bool:
    """Whether the choice's cost on private records follows from the ledger. Older releases say nothing of it."""
    said = {name: found[name] for name in _OF_COST & found.keys()}
    if not said:
        return True
    true = cost_on_private(parse_ledger(ledger, ledger.read_bytes())[0].plan, len(found["rows"]))
    if said.keys() != true.keys() or said["private_runs"] != true["private_runs"]:
        return False
    mine, theirs = said["private_epsilon"], true["private_epsilon"]
    # the last digit is rounded up, from numbers that differ in their own last one between machines
    return mine == theirs or (
        None not in (mine, theirs) and mine == round(mine, 2) and abs(mine - theirs) < 0.015
    )


def _is_settled(found: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether what rehearsals settled is what the run did, in numbers as short as a run writes them."""
    method, rows = report["method"], found["rows"]
    counts = [
        found[name] for name in ("in_place_of_records", "held_out", "drawn", "of_its_own") if name in found
    ]
    counts += [row["draws"] for row in rows]
    losses = [*(row[name] for row in rows for name in ("loss", "spread"))]
    losses += [found["untrained"]] if rows else []
    rates = {None, *(row["learning_rate"] for row in rows)}
    if "aim" in found and not _is_by_noise(found):
        return False
    names = {found["row"], *(row["name"] for row in rows)}
    return (
        names == {method["name"]}
        and len(rows) <= _MOST_TRIALS
        and (not rows or rows[0]["learning_rate"] == method["learning_rate"])
        and ("clip_norm" not in found or found["clip_norm"] == report["statement"]["clip_norm"])
        and all(type(count) is int and 0 < count < _MOST_PUBLIC for count in counts)
        and all(loss is None or loss == round(loss, 6) for loss in losses)
        and all(row["learning_rate"] == float(f"{row['learning_rate']:.3g}") for row in rows)
        and {found.get("equal_from"), found.get("equal_to")} <= rates
        and all(
            found[name] == float(f"{found[name]:.4g}")
            for name in ("median_norm", "clip_norm")
            if name in found
        )
    )


def _is_by_noise(found: Mapping[str, Any]) -> bool:
    """Whether a choice by noise alone has what such a choice has, and no more."""
    return (
        found.keys() - _OF_COST == {"row", "rows", "aim", "of_its_own", "untrained"}
        and found["aim"] == AIM
        and 0 < found["of_its_own"] <= TEXTS
        and 0 < len(found["rows"]) <= MOST_RATES
        and all(row["draws"] == DRAWS for row in found["rows"])
    )


def _is_ledger(text: str) -> bool:
    """Whether nothing lies behind the last whole line, which readers pass over."""
    content = text.encode()
    return parse_ledger(Path(), content)[2] == len(content)


def _alike(said: object, true: object) -> bool:
    if isinstance(said, float) and isinstance(true, float):
        return isclose(said, true, rel_tol=_ROUNDING)
    return type(said) is type(true) and said == true


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
