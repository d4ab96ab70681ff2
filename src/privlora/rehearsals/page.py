"""The page of a recommendation: two curves and two tables, of public numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from privlora.config import Settings
from privlora.pages.figures import ACCENT, MUTED, SECOND, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import number
from privlora.pages.template import fill
from privlora.rehearsals.recommending import MEANING, Recommendation, advice
from privlora.training.files import write_atomically
from privlora.version import __version__


def write(found: Recommendation, settings: Settings, place: Path) -> None:
    """No script, no resource from elsewhere. Raises RunError if that fails."""
    page = fill(
        "recommendation.html.j2",
        "privlora.rehearsals",
        title="Sizes of a private run",
        banner=None,
        found=found,
        settings=settings,
        epsilon=settings.privacy.target_epsilon,
        figure=_curves(found),
        advice=advice(found),
        meaning=MEANING,
        version=__version__,
    )
    write_atomically(place, page)


@in_style
def _curves(found: Recommendation) -> Markup:
    """Noise, and losses where there are any, against passes and against epsilon."""
    losses = found.untrained is not None
    figure, axes = grid(1 + losses, 2, WIDTH, 2.6 * (1 + losses))
    for column, (name, sizes, of) in enumerate(
        (
            ("passes over the data", found.by_passes, lambda size: size.passes),
            ("ε", found.by_epsilon, lambda size: size.epsilon),
        )
    ):
        divided = [size for size in sizes if not size.own or size.divided or column]
        at = [of(size) for size in divided]
        own = next(size for size in sizes if size.own)
        _panel(axes[column], at, [size.noise for size in divided], (of(own), own.noise))
        axes[column].set(yscale="log", title="noise of the run", ylabel="σ / (batch √steps)")
        axes[column].yaxis.set_minor_locator(NullLocator())
        _numbers(axes[column].yaxis, [*(size.noise for size in divided), own.noise])
        below = axes[2 + column] if losses else axes[column]
        if losses:
            known = [size for size in divided if size.loss is not None]
            _panel(below, [of(s) for s in known], [s.loss for s in known], (of(own), own.loss))
            below.set(title="loss on public records, after a rehearsal", ylabel="nats per token")
            axes[column].set_xlabel("")
        below.set_xlabel(name)
    return inline_svg(figure, "noise and losses of runs against passes and epsilon")


def _panel(
    panel: Axes, at: Sequence[float], values: Sequence[float | None], own: tuple[float, float | None]
) -> None:
    panel.margins(0.12, 0.2)
    panel.plot(at, [v if v is not None else float("nan") for v in values], "o-", color=ACCENT, markersize=4)
    if own[1] is not None:
        panel.plot([own[0]], [own[1]], "D", color=SECOND, markersize=7)
        panel.annotate(
            "these settings", (own[0], own[1]), (9, 5), textcoords="offset points", color=MUTED, fontsize=8.5
        )
    panel.set_xscale("log")
    panel.xaxis.set_minor_locator(NullLocator())
    _numbers(panel.xaxis, at)


def _numbers(axis: object, values: Sequence[float]) -> None:
    """Ticks at these values, in plain numbers, as far as there is room."""
    kept: list[float] = []
    for value in sorted(values):
        if not kept or value / kept[-1] > 1.25:
            kept.append(value)
    axis.set_major_locator(FixedLocator(kept))  # type: ignore[attr-defined]
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 2)))  # type: ignore[attr-defined]
