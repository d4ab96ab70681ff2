"""Risks that remain for those whose data a run was trained on: the rows of docs/sharp-edges.md that apply to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE
from privlora.reporting.limits import COPIES, NOISE_KEPT
from privlora.reporting.wording import FLOAT32_KEEPS, Report, any_cyclic, any_projected, any_truncated


@dataclass(frozen=True)
class Risk:
    """edge: the first cell of the row in docs/sharp-edges.md. said: one or two sentences for who files the release.
    applies: whether to a run, as its report says."""

    edge: str
    said: str
    applies: Callable[[Report], bool]


def risks_of(report: Report) -> list[dict[str, str]]:
    """Those of a private run, JSON-ready; the most severe first."""
    return [{"edge": risk.edge, "risk": risk.said} for risk in RISKS if risk.applies(report)]


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


def _other_adapter(report: Report) -> bool:
    return report["adapter"]["init"] not in (RANDOM, W0_SUBSPACE, SPECTRAL_SPLIT, PUBLIC_GRADIENT)


def _written(report: Report) -> bool:
    return "texts" in report or "public_texts" in report["method"]


def _rounded_by_the_model(report: Report) -> bool:
    return bool(report["noise"]["clipping_slack"] > FLOAT32_KEEPS)


def _dropout(report: Report) -> bool:
    return not _votes(report) and bool(report["method"]["dropout"] or report["method"]["lora_dropout"])


RISKS: Final = (
    Risk(
        "One person has several records, unit = record",
        "The unit is one record, not one person: whoever has k records in the data is protected by about k times "
        "epsilon only.",
        _unit("record"),
    ),
    Risk(
        "One person is several users, unit = user",
        "The unit is what the user column says: a person under two names, or in the records of others, is in several "
        "units.",
        _unit("user"),
    ),
    Risk(
        "One person has records with several clients of a federation",
        "The unit is all that one client sends, and that a client takes part is public. Whoever has records with "
        "several clients is in several units.",
        _unit("client"),
    ),
    Risk(
        "One person has records with several clients of a federation",
        "Each client has a budget of its own: for whoever has a record with several clients, these add up.",
        _several_budgets,
    ),
    Risk(
        "When a trusted server's lines appear",
        "The server is trusted: it sees each client's update without noise, and knows whom it drew.",
        _noise_by("server"),
    ),
    Risk(
        "A federation's `survivors` counts clients that tell the server their noise",
        "The statement counts on clients that keep their share of the noise to themselves; against those that do not "
        "epsilon is larger.",
        _noise_by("shares"),
    ),
    Risk(
        "Clients of one federation do not know one another",
        "Sums are secret only from a server that hands out the clients' own keys.",
        lambda report: bool(_federation(report).get("secure_sums")),
    ),
    Risk(
        "The base model saw the records before",
        "What the base model learned in its own pretraining is not covered, not even if the records were in it.",
        _always,
    ),
    Risk(
        "Settings tuned on private results",
        "Settings that were chosen by looking at private results, and other runs on the same records, are not covered: "
        "their costs add up (privlora budget).",
        _always,
    ),
    Risk(
        "Evaluation records are private",
        "Losses on evaluation records are published without noise, so these records must be public.",
        lambda report: bool(report["evaluation"]),
    ),
    Risk(
        "`adapter.public_text` holds private texts",
        "The texts that the start was computed from have no protection, so they must be public.",
        lambda report: bool(report["adapter"]["init"] == PUBLIC_GRADIENT),
    ),
    Risk(
        "Training starts from another adapter",
        "The data of the adapter that training started from are not covered.",
        _other_adapter,
    ),
    Risk(
        "Texts of `synthesis`, or its prompts, follow from private records",
        "Generated or given texts that the run used, their generator and the words that asked it have no protection, "
        "so none of them may come from private records.",
        _written,
    ),
    Risk(
        "`private/` of a run with `privacy.bands` is read, or a copy of it is kept",
        NOISE_KEPT,
        lambda report: any_cyclic(report["statement"]),
    ),
    Risk(
        "Two copies of a run with `privacy.bands` go on apart",
        COPIES,
        lambda report: any_cyclic(report["statement"]),
    ),
    Risk(
        "Oversized batches cut by `max_batch_size`",
        "Batches are capped: the public number of units has to be at least the true one, and how many units there are "
        "is not hidden.",
        lambda report: any_truncated(report["statement"]),
    ),
    Risk(
        "`method: wishart-m2` (clip, then project)",
        "The statement covers adding or removing a unit; for replacing one no bound is known.",
        lambda report: any_projected(report["statement"]),
    ),
    Risk(
        "Dropout (`model.dropout`, `adapter.lora_dropout`)",
        "With dropout the bound on one unit's part is not strict where a unit's gradient is not a number.",
        _dropout,
    ),
    Risk(
        "bfloat16 models",
        "The model rounds: that one unit's part stays within the clipping norm is a measurement there, and no proof.",
        _rounded_by_the_model,
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
        "Noise is a floating-point Gaussian on a coarse grid: attacks on its lowest digits are not excluded by proof.",
        lambda report: not _noise_by("shares")(report),
    ),
    Risk(
        "Run time and memory use",
        "Whoever watched the machine while it trained may have learned about batches; this folder holds no times.",
        _always,
    ),
    Risk(
        "A release that was taken away from its run",
        "Hashes have no key: only that of this annex, kept apart from the folder, or a signature shows that they were "
        "not all made anew.",
        _always,
    ),
)
