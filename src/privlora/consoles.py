"""The two places that are written to: results go to stdout, progress to stderr. Nothing is wrapped or recoloured, so
that paths and numbers can be copied and piped."""

from __future__ import annotations

import sys

from rich.console import Console


def out() -> Console:
    """For results, on stdout as it now is."""
    return Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)


def err() -> Console:
    """For progress, on stderr as it now is."""
    return Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
