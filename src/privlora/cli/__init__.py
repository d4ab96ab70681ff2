"""The command line; an interruption is exit code 130, also while the commands are being imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. ``argv``: without the program's name; None: the process's."""
    try:
        from privlora.cli.commands import run

        code = run(argv)
    except KeyboardInterrupt:
        print("interrupted: nothing was started or changed", file=sys.stderr)
        code = 130
    if code == 130:
        # One that passed through exec or eval of a text (as of any dataclass) would make CPython end by the signal,
        # although it was caught; the next text makes it forget.
        exec("")
    return code
