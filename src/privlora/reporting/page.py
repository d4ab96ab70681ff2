"""The web page: one self-contained file, a pure function of the report."""

from __future__ import annotations

from typing import Any

from privlora.pages.numbers import nats, number
from privlora.pages.template import fill
from privlora.reporting import federation, plots, wording
from privlora.reporting.federation_plot import rounds_plot
from privlora.reporting.parties import parties, warnings
from privlora.reporting.wording import Report, is_private
from privlora.rounding import rounded_up


def render(report: Report) -> str:
    """report.html: no script, no resource from elsewhere; every text of a user is escaped."""
    stamp, private = report["stamp"], is_private(report)
    return fill(
        "report.html.j2",
        "privlora.reporting",
        title=f"{stamp['text']} · {wording.quoted(report['adapter']['base_model'])}",
        quoted=wording.quoted,
        banner=None if private else (stamp["text"], stamp["reason"]),
        report=report,
        private=private,
        sentence=wording.sentence(report),
        means=wording.means(report),
        key_figures=_key_figures(report),
        privacy_table=wording.privacy_table(report),
        method_table=wording.method_table(report),
        epsilon_plot=plots.epsilon_plot(report),
        noise_plot=plots.noise_plot(report),
        loss_plot=plots.loss_plot(report),
        astray=wording.astray(report),
        loss_unit=wording.loss_unit(report),
        answers=report.get("answers"),
        faults=wording.faults(report.get("answers")),
        spectrum_plot=plots.spectrum_plot(report),
        noise_scope=federation.noise_scope(report.get("federation")),
        **_federation(report),
    )


def _federation(report: Report) -> dict[str, Any]:
    """What the section on a federation needs."""
    facts = report.get("federation")
    if facts is None:
        return {"federation": None}
    return {
        "federation": facts,
        "warnings": warnings(facts, report["adapter"]["rank"]),
        "parties": parties(facts),
        "rounds_plot": rounds_plot(report),
        "federation_table": federation.federation_table(report),
        "clients_table": federation.clients_table(facts),
        "by_whom": federation.by_whom(facts),
        "who_trained": federation.who_trained(facts),
        "silent": federation.many_silent(facts),
        "colluding": [
            (str(row["clients"]), number(row["noise_multiplier"]), rounded_up(row["epsilon"]))
            for row in facts["colluding"]
        ],
    }


def _key_figures(report: Report) -> list[tuple[str, str, str]]:
    """(value, name, detail) of the numbers that are read first."""
    figures, s, rows = [], report["statement"], report["evaluation"]
    if is_private(report):
        figures += [
            (rounded_up(s["epsilon"]), "ε", f"at δ = {number(s['delta'])}{wording.against_readers(report)}"),
            (f"one {s['unit']}", "privacy unit", wording.adjacency(s)),
        ]
        known = wording.against_a_client(report)
        if known is not None:
            figures.insert(1, (known, "ε against another client", "which knows its own share of the noise"))
        charged = number(s["steps_charged"])
        if "phases" in s:
            figures.append((charged, "releases", f"in {len(s['phases'])} phases"))
        else:
            noise, norm = number(s["noise_multiplier"]), f"clipping norm C = {wording.clip_norm(report)}"
            rate = f"sampling rate q = {number(wording.rate(s['sampling']))}"
            figures += [(noise, "noise multiplier σ", norm), (charged, "releases", rate)]
    if rows:
        before, after = rows[0], rows[-1]
        figures.append(
            (
                f"{nats(before['loss_per_example'])} → {nats(after['loss_per_example'])}",
                "held-out loss",
                f"± {number(after['standard_error'], 2)} (mean over {number(after['examples'])} public records)",
            )
        )
        shown = wording.metrics(report)
        if shown:
            figures.append(
                (
                    f"{number(before[shown[0]], 3)} → {number(after[shown[0]], 3)}",
                    shown[0],
                    ", ".join(f"{name.replace('_', ' ')} {number(after[name], 3)}" for name in shown[1:]),
                )
            )
    return figures
