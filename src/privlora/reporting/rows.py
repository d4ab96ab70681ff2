"""Rows of a release, held against its report: no key but the known ones, no number but those that follow from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from privlora.accounting.ledger_format import parse_ledger
from privlora.config.methods import known_methods
from privlora.rehearsals.kept import (
    AIM,
    DRAWS,
    MOST_RATES,
    MOST_TURNING,
    TEXTS,
    clip_norm_of,
    cost_on_private,
    of_choice,
    right_weight_of,
)
from privlora.reporting.seals import LARGEST, altered
from privlora.reporting.statement import evaluation_rows
from privlora.training.files import RunFolder

_ALWAYS: Final = ("step", "accuracy", "examples", "tokens")
_IF_FINITE: Final = ("loss_per_token", "loss_per_example", "standard_error", "f1", "matthews_correlation")
OF_EVALUATIONS: Final = frozenset((*_ALWAYS, *_IF_FINITE, "pearson", "spearman", "reward_margin"))
"""What a row of an evaluation may name: a test compares it with the results, which import torch."""
_MOST_TRIALS, _MOST_PUBLIC, _LARGEST = 40, 10**7, 1e6
_COST: Final = ("private_runs", "private_epsilon")
_BY_NOISE: Final = ("row", "rows", "aim", "of_its_own", "untrained")
_PUBLIC: Final = ("spanning", "in_place_of_records", "held_out", "draws")
_BY_ROW: Final = ("asked", "row", "untrained", *_PUBLIC, "rows", "lead", "standard_error")
_OF_FILE: Final = ("row", "rows", "in_place_of_records", "held_out")
_MEASURED: Final = (("turning", "right_weight"), ("median_norm", "clip_norm"))
_BY_MEASURES: Final = ("row", "rows", "of_its_own")
_OF_RATES: Final = ("drawn", "untrained", "equal_from", "equal_to")
_OF_TRIAL: Final = ("name", "learning_rate", "loss")
_COUNTS: Final = (*_PUBLIC, "drawn", "of_its_own", "tried")
_LOSSES: Final = ("loss", "spread", "untrained", "lead", "standard_error")
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
    """Whether the choice's cost on private records follows from the ledger. Older releases say nothing of it."""
    said = {name: found[name] for name in _COST if name in found}
    if not said:
        return True
    true = cost_on_private(parse_ledger(ledger, ledger.read_bytes())[0].plan, of_choice(found))
    if said.keys() != true.keys() or type(said["private_runs"]) is not int:
        return False
    mine, theirs = said["private_epsilon"], true["private_epsilon"]
    if said["private_runs"] != true["private_runs"] or mine is None or theirs is None:
        return said == true
    # both are rounded up, from numbers that differ in their last digits between machines
    return type(mine) is float and mine == round(mine, 2) and -0.5 * _CENT < mine - theirs < 1.5 * _CENT


_CENT: Final = 0.01


def _is_settled(found: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether a choice is what the run did, in the names, the order and the numbers that such a choice has."""
    method, rows = report["method"], found["rows"]
    by_row, own = "asked" in found, "of_its_own" in found
    measured = tuple(name for pair in _MEASURED if pair[1] in found for name in pair)
    names: tuple[str, ...]
    if "aim" in found:
        names = (*_BY_NOISE, *measured)
    elif own:
        names = (*_BY_MEASURES, *measured)
    elif by_row:
        names = (*_BY_ROW, *(["tried"] if "tried" in found else []))
    else:
        names = (*_OF_FILE, *measured, *(_OF_RATES if rows else ()))
    of_row = _OF_TRIAL if by_row else (*_OF_TRIAL, "spread", "draws")
    if tuple(found) != (*names, *(_COST if "private_runs" in found else ())):
        return False
    if any(tuple(row) != of_row for row in rows) or len(rows) > _MOST_TRIALS:
        return False
    told = [(name, value) for each in (found, *rows) for name, value in each.items()]
    losses = [value for name, value in told if name in _LOSSES and value is not None]
    rates = [row["learning_rate"] for row in rows]
    order = [math.inf if row["loss"] is None else row["loss"] for row in rows[0 if by_row else 1 :]]
    return (
        found["row"] == method["name"]
        and (_is_by_row(found) if by_row else _is_by_rates(found, rates, losses))
        and (not own or found["of_its_own"] <= TEXTS)
        and ("aim" in found or not own or bool(measured and not rows))
        and (not rows or rates[0] == method["learning_rate"])
        and all(type(value) is int and 0 < value < _MOST_PUBLIC for name, value in told if name in _COUNTS)
        and all(_is_number(loss) and 0 <= loss < _LARGEST for loss in losses)
        and all(_is_number(rate) and 0 < rate < _LARGEST for rate in rates)
        and order == sorted(order)
        and {found.get("equal_from"), found.get("equal_to")} <= {None, *rates}
        and ("clip_norm" not in found or _is_by_median(found, report["statement"]))
        and ("right_weight" not in found or _is_by_turning(found, method))
    )


def _is_by_row(found: Mapping[str, Any]) -> bool:
    """Whether a choice among rows is one among some of the table, the best of which was taken."""
    names = [row["name"] for row in found["rows"]]
    return (
        0 < len(names) == len(set(names))
        and {*names, found["asked"]} <= set(known_methods())
        and found["asked"] not in names
        and names[0] == found["row"]
        and len(names) <= found.get("tried", len(names))
    )


def _is_by_rates(found: Mapping[str, Any], rates: list[float], losses: list[float]) -> bool:
    """Whether a choice is among rates of one row, in as many digits as a run keeps."""
    rows = found["rows"]
    by_noise = (
        found.get("aim") == AIM and 0 < len(rows) <= MOST_RATES and {row["draws"] for row in rows} == {DRAWS}
    )
    return (
        ("aim" not in found or by_noise)
        and {row["name"] for row in rows} <= {found["row"]}
        and all(loss == round(loss, 6) for loss in losses)
        and all(rate == float(f"{rate:.3g}") for rate in rates)
    )


def _is_by_median(found: Mapping[str, Any], statement: Mapping[str, Any]) -> bool:
    """Whether a clip norm is the run's, and follows from a median norm of as many digits as a run keeps."""
    median, norm = found["median_norm"], found["clip_norm"]
    return median == float(f"{median:.4g}") and norm == clip_norm_of(median) == statement["clip_norm"]


def _is_by_turning(found: Mapping[str, Any], method: Mapping[str, Any]) -> bool:
    """Whether a right weight is the run's, and follows from a measure of as many digits as a run keeps."""
    share, weight = found["turning"], found["right_weight"]
    return (
        type(share) is type(weight) is float
        and 0 <= share <= MOST_TURNING
        and share == float(f"{share:.4g}")
        and weight == right_weight_of(share) == method.get("right_weight")
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
