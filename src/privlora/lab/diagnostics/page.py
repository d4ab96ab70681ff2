"""Writing diagnostics: one self-contained page, the series as JSON, and a PNG of each figure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privlora.errors import RunError
from privlora.lab.diagnostics.experiments import Diagnostics
from privlora.lab.diagnostics.findings import TEXTS
from privlora.pages.figures import inline_svg, png
from privlora.pages.numbers import number
from privlora.pages.template import fill
from privlora.training.files import write_atomically
from privlora.version import __version__

_PRIVATE = (
    "Computed from private records with noise of a known seed: keep this page, its pictures and its numbers where the "
    "records are"
)


@dataclass(frozen=True)
class Written:
    """Where things were written."""

    page: Path
    series: Path
    pictures: list[Path]


def findings(diagnostics: Diagnostics) -> dict[str, str]:
    """What each figure shows, in a sentence or two."""
    return {name: TEXTS[name].finding(result) for name, result in diagnostics.figures.items()}


def render(diagnostics: Diagnostics) -> str:
    """The page: no script, no resource from elsewhere; every text of a user is escaped."""
    found = findings(diagnostics)
    figures = [
        (name, TEXTS[name], found[name], inline_svg(TEXTS[name].draw(result), TEXTS[name].title))
        for name, result in diagnostics.figures.items()
    ]
    return fill(
        "diagnostics.html.j2",
        "privlora.lab.diagnostics",
        title=f"Diagnostics · {diagnostics.facts['model']}",
        banner=None if diagnostics.public else ("PRIVATE", _PRIVATE),
        public=diagnostics.public,
        model=diagnostics.facts["model"],
        seed=diagnostics.facts["seed"],
        facts=[(name.replace("_", " "), _shown(value)) for name, value in diagnostics.facts.items()],
        figures=figures,
        version=__version__,
    )


def write(diagnostics: Diagnostics, output: Path) -> Written:
    """Write diagnostics.html, diagnostics.json and NAME.png into ``output``, or ``output``/private if not public.

    Files of those names are replaced. Raises RunError if nothing can be written.
    """
    folder = output if diagnostics.public else output / "private"
    make_folder(folder, private=not diagnostics.public)
    pictures = [folder / f"{name}.png" for name in diagnostics.figures]
    written = Written(folder / "diagnostics.html", folder / "diagnostics.json", pictures)
    for path, (name, result) in zip(written.pictures, diagnostics.figures.items(), strict=True):
        write_atomically(path, png(TEXTS[name].draw(result)))
    write_atomically(written.series, json.dumps(diagnostics.to_dict(), indent=1, allow_nan=False) + "\n")
    write_atomically(written.page, render(diagnostics))
    return written


def make_folder(folder: Path, *, private: bool) -> None:
    """Create a folder, for its owner alone if private. Raises RunError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if private:
            folder.chmod(0o700)
    except OSError as error:
        raise RunError(
            f"cannot create {str(folder)!r}: {error.strerror}", fix="give a writable folder as --output"
        ) from None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return number(value) if isinstance(value, int | float) else "–" if value is None else str(value)
