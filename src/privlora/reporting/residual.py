"""Risks that remain for those whose data a run was trained on: the rows of docs/sharp-edges.md that apply to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE
from privlora.reporting import limits
from privlora.reporting.wording import (
    FLOAT32_KEEPS,
    Report,
    any_cyclic,
    any_in_bins,
    any_projected,
    any_truncated,
)


@dataclass(frozen=True)
class Risk:
    """edge: the first cell of the row in docs/sharp-edges.md. said: in the words of the report (`limits`).
    applies: whether to a run, as its report says."""

    edge: str
    said: str
    applies: Callable[[Report], bool]


def risks_of(report: Report) -> list[dict[str, str]]:
    """Those of a private run, JSON-ready; the most severe first."""
    told = {"unit": report["statement"]["unit"], "t": _federation(report).get("threshold")}
    return [{"edge": risk.edge, "risk": risk.said.format(**told)} for risk in RISKS if risk.applies(report)]


def _always(_: Report) -> bool:
    return True


def _unit(name: str) -> Callable[[Report], bool]:
    return lambda report: bool(report["statement"]["unit"] == name)


def _noise_by(name: str) -> Callable[[Report], bool]:
    return lambda report: bool(_federation(report).get("noise_by") == name)


def _clipping(*names: str) -> Callable[[Report], bool]:
    return lambda report: not _votes(report) and report["method"]["clipping"] in names


def _federation(report: Report) -> dict[str, Any]:
    return dict(report.get("federation", {}))


def _votes(report: Report) -> bool:
    return bool(report["method"].get("releases") == "votes")


def _several_budgets(report: Report) -> bool:
    return _noise_by("client")(report) and not _unit("client")(report)


def _of_statement(holds: Callable[[Report], bool]) -> Callable[[Report], bool]:
    return lambda report: holds(report["statement"])


def _other_adapter(report: Report) -> bool:
    return report["adapter"]["init"] not in (RANDOM, W0_SUBSPACE, SPECTRAL_SPLIT, PUBLIC_GRADIENT)


def _dropout(report: Report) -> bool:
    return not _votes(report) and bool(report["method"]["dropout"] or report["method"]["lora_dropout"])


RISKS: Final = (
    Risk("One person has several records, unit = record", limits.RECORD, _unit("record")),
    Risk("One person is several users, unit = user", limits.USER, _unit("user")),
    Risk("One person has records with several clients of a federation", limits.CLIENT, _unit("client")),
    Risk(
        "One person has records with several clients of a federation",
        limits.SEVERAL_BUDGETS,
        _several_budgets,
    ),
    Risk("When a trusted server's lines appear", limits.TRUSTED, _noise_by("server")),
    Risk(
        "A federation's `survivors` counts clients that tell the server their noise",
        limits.SHARES,
        _noise_by("shares"),
    ),
    Risk(
        "Clients of one federation do not know one another",
        limits.KEYS,
        lambda report: bool(_federation(report).get("secure_sums")),
    ),
    Risk("The base model saw the records before", limits.BASE, _always),
    Risk("Settings tuned on private results", limits.CHOICES, _always),
    Risk("Evaluation records are private", limits.EVALUATION, lambda report: bool(report["evaluation"])),
    Risk(
        "`adapter.public_text` holds private texts",
        limits.PUBLIC_TEXTS,
        lambda report: report["adapter"]["init"] == PUBLIC_GRADIENT,
    ),
    Risk("Training starts from another adapter", limits.OTHER_ADAPTER, _other_adapter),
    Risk(
        "Texts of `synthesis`, or its prompts, follow from private records",
        limits.WRITTEN,
        lambda report: "texts" in report or "public_texts" in report["method"],
    ),
    Risk(
        "`private/` of a run with `privacy.bands` is read, or a copy of it is kept",
        limits.NOISE_KEPT,
        _of_statement(any_cyclic),
    ),
    Risk("Two copies of a run with `privacy.bands` go on apart", limits.COPIES, _of_statement(any_cyclic)),
    Risk(
        "`private/` of a run with `privacy.sampling` is read or copied",
        limits.DEALT,
        _of_statement(any_in_bins),
    ),
    Risk("`privacy.sampling: balls-in-bins`", limits.IN_BINS, _of_statement(any_in_bins)),
    Risk("Oversized batches cut by `max_batch_size`", limits.TRUNCATED, _of_statement(any_truncated)),
    Risk("`method: wishart-m2` (clip, then project)", limits.PROJECTED, _of_statement(any_projected)),
    Risk(
        "Dropout (`model.dropout`, `adapter.lora_dropout`)",
        "With dropout the bound on one unit's part is not strict where a unit's gradient is not a number.",
        _dropout,
    ),
    Risk(
        "bfloat16 models",
        "The model rounds: that one unit's part stays within the clipping norm is a measurement there, and no proof.",
        lambda report: bool(report["noise"]["clipping_slack"] > FLOAT32_KEEPS),
    ),
    Risk(
        "`method.clipping: spectral` (PRISM's default)",
        "With spectral clipping, what rounding adds to one unit's part was measured and allowed for, not proved.",
        _clipping("spectral"),
    ),
    Risk(
        "`method.clipping: per-module`",
        "Each module is clipped by itself, which enlarges the rounding of weak parts: what that adds to one unit's "
        "part was measured and allowed for, not proved.",
        _clipping("per-module"),
    ),
    Risk(
        "`method.clipping: automatic` or `normalized`",
        "Small gradients are enlarged, and their rounding too; each unit goes through the model by itself.",
        _clipping("automatic", "normalized"),
    ),
    Risk(
        "Noise is a floating-point Gaussian",
        limits.CONTINUOUS,
        lambda report: not _noise_by("shares")(report),
    ),
    Risk("Run time and memory use", limits.SIDE, _always),
    Risk(
        "A release that was taken away from its run",
        "Hashes have no key: only that of this annex, kept apart from the folder, or a signature shows that they were "
        "not all made anew.",
        _always,
    ),
)
