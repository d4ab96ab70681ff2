"""The page of a profile and its numbers, in the run's private folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from privlora.pages.numbers import duration, finite, number
from privlora.pages.template import fill
from privlora.profiling.facts import Facts
from privlora.profiling.figures import stages_figure, steps_figure
from privlora.profiling.findings import findings
from privlora.profiling.trace import BATCHES
from privlora.training.files import write_atomically
from privlora.version import __version__

PAGE, JSON = "profile.html", "profile.json"
_BANNER: Final = (
    "PRIVATE",
    "How long a step takes, and how long its rows are, follows from the records that were drawn: keep this page and "
    "its trace where the records are",
)


def write(facts: Facts, folder: Path, trace: Path | None) -> Path:
    """Write profile.html and profile.json into ``folder``; gives the page. Raises RunError."""
    advice = findings(facts)
    write_atomically(
        folder / JSON, json.dumps(finite({**facts, "findings": advice}), indent=1) + "\n", mode=0o600
    )
    write_atomically(folder / PAGE, render(facts, advice, trace), mode=0o600)
    return folder / PAGE


def render(facts: Facts, advice: list[str], trace: Path | None) -> str:
    """The page: no script, no resource from elsewhere; every text of a user is escaped."""
    return fill(
        "profile.html.j2",
        "privlora.profiling",
        title=f"Where a step's time goes · {facts['model']}",
        banner=_BANNER,
        facts=facts,
        lead=_lead(facts),
        key_figures=_key_figures(facts),
        stages_figure=stages_figure(facts),
        steps_figure=steps_figure(facts),
        findings=advice,
        micro_batches=_micro_batches(facts),
        memory=_memory(facts),
        trace=None if trace is None else trace.name,
        most_batches=BATCHES,
        version=__version__,
    )


def _lead(facts: Facts) -> str:
    """The page in a sentence."""
    first, *rest = sorted(facts["stages"], key=lambda line: -line["share"])[:3]
    words = [f"{first['words']} {first['share']:.0%}"] + [
        f"{line['words']} {line['share']:.0%}" for line in rest
    ]
    return f"A median step takes {duration(facts['seconds']['median'])}: " + "; ".join(words) + "."


def _key_figures(facts: Facts) -> list[tuple[str, str, str]]:
    """(value, name, detail) of the numbers that are read first."""
    seconds, micro, memory = facts["seconds"], facts["micro_batches"], facts["memory"]
    found = [
        (
            duration(seconds["median"]),
            "a median step",
            f"half of them {duration(seconds['low'])} to {duration(seconds['high'])}",
        ),
        (f"{facts['tokens_per_second']:,.0f}", "tokens a second", "of records; padding not counted"),
        (f"{micro['padding']:.0%}", "padding", f"of {number(micro['positions_of_a_step'])} positions a step"),
        (
            number(micro["of_a_step"]),
            "micro-batches a step",
            f"{number(micro['rows'][1])} rows x {number(micro['width'][1])} in the median"
            if micro["rows"]
            else "none",
        ),
    ]
    if memory["of_steps"] is not None:
        told = memory["told"]
        words = f"plan tells {_gib(told['step_bytes'])} GiB at most" if told else "over the loaded model"
        found.append((f"{_gib(memory['of_steps'])} GiB", "steps took at most", words))
    return found


def _micro_batches(facts: Facts) -> list[tuple[str, str]]:
    micro = facts["micro_batches"]

    def three(name: str) -> str:
        found = [number(value) for value in micro[name]]
        return f"{found[1]} in the median, {found[0]} to {found[2]}" if found else "–"

    return [
        ("micro-batches of a step", number(micro["of_a_step"])),
        ("rows", three("rows")),
        ("width, positions", three("width")),
        (
            "rows x width",
            f"{three('positions')}; run.tokens_per_micro_batch allows {number(micro['allowed'])}",
        ),
        (
            "tokens of a step",
            f"{number(micro['tokens_of_a_step'])} of {number(micro['positions_of_a_step'])} positions",
        ),
        ("padding", f"{micro['padding']:.1%}"),
    ]


def _memory(facts: Facts) -> list[tuple[str, str]]:
    memory = facts["memory"]
    whose = "torch's allocator" if facts["on_gpu"] else "the process"
    rows = []
    if memory["before"] is not None:
        rows.append(("before the first step", f"{_gib(memory['before'])} GiB, of {whose}, the model in it"))
    if memory["most"] is not None:
        rows.append(("at most, in steps", f"{_gib(memory['most'])} GiB"))
    if memory["of_steps"] is not None:
        rows.append(("so steps took", f"{_gib(memory['of_steps'])} GiB"))
    told = memory["told"]
    if told is not None:
        rows.append(
            (
                "what plan tells",
                f"{_gib(told['step_bytes'])} GiB at most, with a micro-batch of {told['rows']} rows x {told['width']}"
                + (
                    ""
                    if facts["on_gpu"]
                    else "; the C library's heap and packages that load late come on top"
                ),
            )
        )
    elif memory["why_not"]:
        rows.append(("what plan tells", f"nothing: {memory['why_not']}"))
    return rows


def _gib(size: float) -> str:
    return number(size / 2**30, 3)
