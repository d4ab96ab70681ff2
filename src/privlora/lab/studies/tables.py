"""What a study's table.md and page say, in one order. The same results give the same bytes of Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup
from matplotlib.lines import Line2D

from privlora.lab.studies.summary import Summary
from privlora.pages.figures import HUES, INK, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import number
from privlora.pages.template import fill
from privlora.rounding import rounded_up

REPEATABLE = "the noise of every run is repeatable, and the same for all methods of a (task, seed)"
_RULES = {
    "own-best": "Each method at its own best learning rate for each task",
    "shared": "Each method at one learning rate for all tasks",
}
_EDGE = "* the rate is at an edge of the method's grid, so a better one may lie beyond."
Element = tuple[str, Any]
"""Of a report: its kind and content. "h1" to "h3", "p" or "ul" and text (of a list, a line an item); "table" and rows
of cells, heads first; "figure" and an inline SVG, which is for the page alone."""


def markdown(summary: Summary) -> str:
    """All tables of a study."""
    found = [_markdown(kind, content) for kind, content in elements(summary) if kind != "figure"]
    return "\n\n".join(found) + "\n"


def render(summary: Summary) -> str:
    """study.html: no script, no resource from elsewhere; every text of a user is escaped."""
    return fill(
        "study.html.j2",
        "privlora.lab.studies",
        title=f"{summary['name']} · comparison of methods",
        banner=("NOT PRIVATE", REPEATABLE) if summary["insecure_noise"] else None,
        elements=elements(summary, figures=True),
        summary=summary,
    )


def elements(summary: Summary, *, figures: bool = False) -> Iterator[Element]:
    """Everything that a study reports, from its name on."""
    yield "h1", summary["name"]
    if summary["insecure_noise"]:
        yield "p", f"**NOT PRIVATE: {REPEATABLE}.**"
    yield "p", f"{_how_chosen(summary)}\n{_grids(summary)}"
    yield "p", f"A cell is the mean ± standard deviation over seeds, and the learning rate.\n{_EDGE}"
    failures = summary["failures"]
    if failures:
        count = f"{len(failures)} run{'' if len(failures) == 1 else 's'} failed"
        yield "p", f"**{count}**, listed at the end and left out of all means."
    if lines := summary["differences"]:
        yield "h2", "What differs"
        yield "p", "All take the same number of steps on the same records, at the same ε."
        yield "table", [*_differences(lines, summary)]
    for rule in summary["rules"]:
        yield "h2", _RULES[rule["rule"]] if summary["selects"] else "Results"
        for rank in summary["rank"]:
            yield from _overall(rule, summary, rank)
            if figures:
                yield "figure", utility_figure(summary, rule, rank)
            for task in summary["tasks"]:
                yield from _task(rule, summary, task, rank)
    if lines := summary["tuning_cost"]:
        yield "h2", "What tuning would cost"
        yield "p", "To choose one method's rate on one task, were the records private; report runs add to it."
        yield "table", [["tasks", "ε of one run", "runs", "ε of choosing"], *map(_choosing, lines)]
    if failures:
        yield "h2", "Failed runs"
        yield "ul", "\n".join(f"{_place(failure)}: {failure['error']}" for failure in failures)


def _markdown(kind: str, content: Any) -> str:
    if kind == "table":
        lines = [content[0], ["---"] * len(content[0]), *content[1:]]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join("| " + " | ".join(line) + " |" for line in escaped)
    if kind == "ul":
        return "\n".join(f"- {line}" for line in content.split("\n"))
    return content if kind == "p" else f"{'#' * int(kind[1])} {content}"


def _overall(rule: Mapping[str, Any], summary: Summary, rank: int) -> Iterator[Element]:
    """Private methods over all tasks."""
    yield "h3", f"Mean over tasks, rank {rank}"
    lines = [line for line in rule["overall"] if line["rank"] == rank]
    if not lines:
        yield "p", "No private method has all its runs yet."
        return
    epsilons, missing = summary["epsilon"], []
    rows = [["method", *(f"ε = {number(epsilon)}" for epsilon in epsilons)]]
    private = [method["label"] for method in summary["methods"] if method["private"]]
    for method in private:
        cells = {line["epsilon"]: _standing(line) for line in lines if line["method"] == method}
        rows.append([method, *(cells.get(epsilon, "–") for epsilon in epsilons)])
    for epsilon in epsilons:
        present = {line["method"] for line in lines if line["epsilon"] == epsilon}
        if names := [name for name in private if name not in present]:
            missing.append(f"{', '.join(names)} at ε = {number(epsilon)}, rank {rank}")
    yield "table", rows
    notes = [_verdict(line) for line in lines if line["place"] == 1]
    if missing:
        notes.append(f"Not in the means, because runs failed or are missing: {'; '.join(missing)}.")
    yield "ul", "\n".join(notes)


def _task(rule: Mapping[str, Any], summary: Summary, task: Mapping[str, Any], rank: int) -> Iterator[Element]:
    before = "" if task["untouched"] is None else f"; {task['untouched']:.3f} before training"
    yield "h3", f"{task['name']}, rank {rank}"
    yield "p", f"{task['words']}, {'lower' if task['lower_is_better'] else 'higher'} is better{before}"
    columns: list[float | None] = [*summary["epsilon"]]
    if any(not method["private"] for method in summary["methods"]):
        columns.append(None)
    cells = {
        (cell["method"], cell["epsilon"]): _score(cell)
        for cell in rule["cells"]
        if (cell["task"], cell["rank"]) == (task["name"], rank)
    }
    heads = ["no noise" if epsilon is None else f"ε = {number(epsilon)}" for epsilon in columns]
    labels = [method["label"] for method in summary["methods"]]
    rows = ([label, *(cells.get((label, epsilon), "–") for epsilon in columns)] for label in labels)
    yield "table", [["method", *heads], *rows]


def _differences(lines: list[dict[str, Any]], summary: Summary) -> Iterator[list[str]]:
    """Of methods of federations: heads, then a line for each; with its tasks where they differ."""
    epsilons, methods = summary["epsilon"], [line["method"] for line in lines]
    reported = [f"reported at ε = {number(epsilon)}" for epsilon in epsilons]
    yield ["method", "clients train by", "rounds × steps", "the server sees", *reported]
    for line in lines:
        tasks = f" ({', '.join(line['tasks'])})" if methods.count(line["method"]) > 1 else ""
        rounds = " × ".join(map(str, line["rounds"]))
        found = [_reported(line, epsilon) for epsilon in epsilons]
        yield [line["method"] + tasks, line["local_method"], rounds, line["sees"], *found]


def _reported(line: Mapping[str, Any], epsilon: float) -> str:
    """The largest of any run, and against another client where that is larger."""
    if epsilon not in line["epsilons"]:
        return "–"
    reported, against = line["epsilons"][epsilon]
    more = "" if against <= reported else f", against a client {rounded_up(against)}"
    return f"{rounded_up(reported)}{more}"


def _how_chosen(summary: Summary) -> str:
    """How learning rates were chosen, and on what is reported."""
    if not summary["selects"]:
        return (
            f"Each method has one learning rate, so nothing was chosen. Reported: {_seeds(summary['seeds'])}."
        )
    selection = summary["selection"]
    chose, reported = _seeds(selection["seeds"]), _seeds(summary["seeds"])
    records = "every second evaluation record; the others are reported"
    return f"Learning rates were chosen by runs with {chose} on {records}, from runs with {reported}."


def _grids(summary: Summary) -> str:
    """Which learning rates every method could choose from."""
    texts: dict[str, None] = {}  # an ordered set
    for method in sorted(summary["methods"], key=lambda method: method["own_grid"]):
        rates = ", ".join(map(number, method["learning_rates"]))
        own = f"{method['label']} has a grid of its own"
        texts[f"{own if method['own_grid'] else 'Learning rates'}: {rates}."] = None
    return " ".join(texts)


def _score(cell: Mapping[str, Any]) -> str:
    """``2.882 ± 0.016`` and the rate, or why there is none."""
    if cell["mean"] is None:
        return "failed" if cell["failed"] or "failed" in cell["state"] else "…"
    deviation = cell["standard_deviation"]
    text = f"{cell['mean']:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")
    text += f" ({number(cell['learning_rate'])}{'*' if cell['at_edge'] else ''})"
    if cell["failed"]:
        text += f", {cell['failed']} of {cell['failed'] + cell['count'] + cell['missing']} runs failed"
    return text + (f", {cell['missing']} missing" if cell["missing"] else "")


def _standing(line: Mapping[str, Any]) -> str:
    """``0.953 (place 1.3)``, and how far behind the best: ``0.930 (place 2.1; behind by 0.023, 4.1 SE)``."""
    lead, behind = line["lead"], ""
    if line["place"] > 1 and lead is not None and lead["lead"] is not None:
        errors = "" if lead["in_errors"] is None else f", {-lead['in_errors']:.1f} SE"
        behind = f"; behind by {-lead['lead']:.3f}{errors}"
    return f"{line['mean_score']:.3f} (place {line['mean_place']:.1f}{behind})"


def _verdict(line: Mapping[str, Any]) -> str:
    """Of the first: how far it is ahead, and how sure that is."""
    where, lead = f"ε = {number(line['epsilon'])}, rank {line['rank']}", line["lead"]
    if lead is None:
        return f"{where}: {line['method']} is the only private method with all its runs."
    text = f"{where}: {line['method']} is best in the mean, {lead['lead']:.3f} ahead of {lead['against']}"
    low, errors = lead["low"], lead["in_errors"]
    if low is not None:
        text += f" [{low:.3f}, {lead['high']:.3f}]"
    if errors is not None:
        text += f", {errors:.1f} standard errors"
    sure = low is not None and low > 0 and (errors is None or errors > 2)
    return text + ("." if sure else ": no more than a tie.")


def _choosing(line: Mapping[str, Any]) -> list[str]:
    way, cost = line["smallest"] or ("no bound", math.inf)
    of = rounded_up(line["one_run"], 2), str(line["runs"]), f"{rounded_up(cost, 2)} ({way})"
    return [", ".join(line["tasks"]), *of]


def _place(failure: Mapping[str, Any]) -> str:
    epsilon = f"ε {number(failure['epsilon'])}" if failure["epsilon"] else "no noise"
    rate = f"rate {number(failure['learning_rate'])}, seed {failure['seed']}"
    return f"{failure['task']}, {failure['method']}, {epsilon}, rank {failure['rank']}, {rate}"


def _seeds(seeds: list[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


_MARKERS, _DASHES = "osD^vPX*", ("-", "--", "-.")
_PANEL, _LINE = 2.6, 0.19  # inches: the height of a panel, and of a line of the legend
_ACROSS, _NAMES = 3, 2  # panels next to each other, and names of the legend


@in_style
def utility_figure(summary: Summary, rule: Mapping[str, Any], rank: int) -> Markup | None:
    """Score against epsilon; bars are one standard error over seeds, dotted lines are methods without noise."""
    cells = [cell for cell in rule["cells"] if cell["rank"] == rank and cell["mean"] is not None]
    if not any(cell["epsilon"] for cell in cells):
        return None
    tasks, looks = summary["tasks"], _looks(summary)
    columns = min(_ACROSS, len(tasks))
    rows, lines = math.ceil(len(tasks) / columns), math.ceil(len(looks) / _NAMES)
    figure, axes = grid(rows, columns, WIDTH, _PANEL * rows + _LINE * lines)
    for one, task in zip(axes, tasks, strict=False):
        for method, look in looks.items():
            own = [cell for cell in cells if (cell["task"], cell["method"]) == (task["name"], method)]
            points = sorted(
                (c["epsilon"], c["mean"], c["standard_error"] or 0.0) for c in own if c["epsilon"]
            )
            if points:
                x, mean, error = zip(*points, strict=True)
                one.errorbar(x, mean, error, **look)
            elif own:
                one.axhline(own[0]["mean"], **look)
        one.set(xscale="log", title=task["name"], xlabel="ε")
        one.set_ylabel("nats per token" if task["metric"] == "loss" else task["words"])
        one.set_xticks(summary["epsilon"], map(number, summary["epsilon"]), minor=False)
        one.minorticks_off()
    for one in axes[len(tasks) :]:
        one.set_axis_off()
    handles = [Line2D([], [], **look) for look in looks.values()]
    figure.legend(handles=handles, loc="outside upper left", ncols=_NAMES, labelcolor=INK)
    return inline_svg(figure, f"score against epsilon, {rule['rule']} rates, rank {rank}")


def _looks(summary: Summary) -> dict[str, dict[str, Any]]:
    """Colour, dash and marker of each method, by its place in the study's file."""
    return {
        method["label"]: {
            "color": HUES[place % 8],
            "linestyle": _DASHES[place // 8 % 3] if method["private"] else ":",
            "marker": _MARKERS[place % 8] if method["private"] else "",
            **{"linewidth": 1.5, "markersize": 4, "label": method["label"]},
        }
        for place, method in enumerate(summary["methods"])
    }
