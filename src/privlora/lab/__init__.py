"""A wing that no run needs: studies, diagnostics, projections (Hu et al. 2026), audits of a mechanism by itself."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from privlora.lab.audits.many_runs import RunsAudit, audit_runs
    from privlora.lab.audits.one_step import StepAudit, audit_step, trials_for
    from privlora.lab.audits.spaces import check_space
    from privlora.lab.diagnostics.choosing import FIGURES
    from privlora.lab.diagnostics.experiments import Diagnostics, diagnose
    from privlora.lab.diagnostics.gauges import gauge_study
    from privlora.lab.diagnostics.preconditioning import preconditioning_study
    from privlora.lab.diagnostics.sweep import GaugeSweep, gauge_sweep
    from privlora.lab.studies.settings import Study, load_study, study_from
    from privlora.lab.studies.study import StudyReport, report_study, run_study
    from privlora.lab.wishart.canaries import static_poison
    from privlora.lab.wishart.heads.descent import HeadData, TrainedHeads, train_heads
    from privlora.lab.wishart.heads.settings import HeadSettings
    from privlora.lab.wishart.mechanism import WishartProjection

__all__ = [
    "FIGURES",
    "Diagnostics",
    "GaugeSweep",
    "HeadData",
    "HeadSettings",
    "RunsAudit",
    "StepAudit",
    "Study",
    "StudyReport",
    "TrainedHeads",
    "WishartProjection",
    "audit_runs",
    "audit_step",
    "check_space",
    "diagnose",
    "gauge_study",
    "gauge_sweep",
    "load_study",
    "preconditioning_study",
    "report_study",
    "run_study",
    "static_poison",
    "study_from",
    "train_heads",
    "trials_for",
]

_FILES: Final = {
    **dict.fromkeys(("RunsAudit", "audit_runs"), "audits.many_runs"),
    **dict.fromkeys(("StepAudit", "audit_step", "trials_for"), "audits.one_step"),
    "check_space": "audits.spaces",
    "FIGURES": "diagnostics.choosing",
    **dict.fromkeys(("Diagnostics", "diagnose"), "diagnostics.experiments"),
    "gauge_study": "diagnostics.gauges",
    "preconditioning_study": "diagnostics.preconditioning",
    **dict.fromkeys(("GaugeSweep", "gauge_sweep"), "diagnostics.sweep"),
    **dict.fromkeys(("Study", "load_study", "study_from"), "studies.settings"),
    **dict.fromkeys(("StudyReport", "report_study", "run_study"), "studies.study"),
    "static_poison": "wishart.canaries",
    **dict.fromkeys(("HeadData", "TrainedHeads", "train_heads"), "wishart.heads.descent"),
    "HeadSettings": "wishart.heads.settings",
    "WishartProjection": "wishart.mechanism",
}
"""Public name -> its file. Nothing is imported before it is asked for."""


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"privlora.lab.{_FILES[name]}"), name)
    raise AttributeError(f"module 'privlora.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})
