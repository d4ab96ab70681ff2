"""Writing diagnostics: one self-contained page, the series as JSON, and a PNG of each figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from privlora.errors import RunError
from privlora.lab.diagnostics import plots
from privlora.lab.diagnostics.experiments import Diagnostics
from privlora.pages.figures import inline_svg, png
from privlora.pages.numbers import number
from privlora.pages.template import fill
from privlora.training.files import write_atomically
from privlora.version import __version__

_PRIVATE = (
    "Computed from private records with noise of a known seed: keep all of this page where the records are"
)


FIGURES: Final[dict[str, tuple[str, str, Callable[[Any], Figure]]]] = {
    "noise-ratio": ("Noise on Z over steps", "Figure 1: above 1 throughout", plots.draw_noise_ratio),
    "gauge-sensitivity": (
        "Steps from five gauges of one start",
        "Figures 2 and 6: persistent for factor methods, near zero for PRISM after a warm-up",
        plots.draw_gauge_sensitivity,
    ),
    "noise-energy": (
        "Noise energy against Sₜ = Σ(m‖B‖² + n‖A‖²)",
        "Figure 3: linear in Sₜ for factor methods; low and nearly constant for PRISM",
        plots.draw_noise_energy,
    ),
    "clipping": (
        "Clipping across gauges",
        "Figures 5 and 7–11: the gauge decides who is clipped in factor space",
        plots.draw_clipping,
    ),
    "gauge-sweep": (
        "Gauge sweep at a fixed Z",
        "Figures 12 and 13: a V over c for factor methods, flat for PRISM",
        plots.draw_gauge_sweep,
    ),
    "preconditioning": (
        "Noise after preconditioning",
        "Figures 4, 14–16, 18 and 19: nearly independent of σ for DP-AdamW; lower for PRISM",
        plots.draw_preconditioning,
    ),
    "gram-stress": (
        "Conditioning of the Gram matrices",
        "Figures 17 and 20: higher for DP-AdamW",
        plots.draw_gram_stress,
    ),
}
"""Name -> title, which of the paper's figures it is and what the paper says, and what draws it."""


def render(diagnostics: Diagnostics) -> str:
    """The page: no script, no resource from elsewhere; every text of a user is escaped."""
    figures = []
    for name, result in diagnostics.figures.items():
        title, paper, draw = FIGURES[name]
        figures.append((name, title, paper, inline_svg(draw(result), title)))
    return fill(
        "diagnostics.html.j2",
        "privlora.lab.diagnostics",
        title=f"Diagnostics · {diagnostics.facts['model']}",
        banner=None if diagnostics.public else ("PRIVATE", _PRIVATE),
        public=diagnostics.public,
        facts=diagnostics.facts,
        rows=[(name.replace("_", " "), _shown(value)) for name, value in diagnostics.facts.items()],
        figures=figures,
        version=__version__,
    )


def write(diagnostics: Diagnostics, output: Path) -> list[Path]:
    """Write diagnostics.html, diagnostics.json and NAME.png into ``output``, or ``output``/private if not public.

    Files of those names are replaced. Returns them, the page and the series first. Raises RunError if nothing can be
    written.
    """
    folder = output if diagnostics.public else output / "private"
    make_folder(folder, private=not diagnostics.public)
    series = json.dumps(diagnostics.to_dict(), indent=1, allow_nan=False) + "\n"
    content: dict[str, str | bytes] = {"diagnostics.html": render(diagnostics), "diagnostics.json": series}
    for name, result in diagnostics.figures.items():
        _, _, draw = FIGURES[name]
        content[f"{name}.png"] = png(draw(result))
    for name, written in content.items():
        write_atomically(folder / name, written)
    return [folder / name for name in content]


def make_folder(folder: Path, *, private: bool) -> None:
    """Create a folder, for its owner alone if private. Raises RunError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if private:
            folder.chmod(0o700)
    except OSError as error:
        fix = "give a writable folder as --output"
        raise RunError(f"cannot create {str(folder)!r}: {error.strerror}", fix=fix) from None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return number(value) if isinstance(value, int | float) else "–" if value is None else str(value)
