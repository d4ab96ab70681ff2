"""The command line. An interruption is exit code 128 and the signal's number, also while commands are imported; output
that nobody reads stops nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from privlora.training.stopping import exit_code, interrupting


def main(argv: Sequence[str] | None = None, *, of: Sequence[str] = ()) -> int:
    """Run one command and return the exit code. ``argv``: without the program's name; None: the process's. of: which
    commands there are; all, where none is named."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed, so the next file would take its place, and what is printed would go there
            os.open(os.devnull, os.O_RDWR)
    try:
        with interrupting():
            from privlora.consoles import unbroken

            with unbroken():
                from privlora.cli.commands import run

                code = run(argv, of)
    except KeyboardInterrupt:
        print("interrupted: nothing was started or changed", file=sys.stderr)
        code = exit_code()
    if code == 130:
        # One that passed through exec or eval of a text (as of any dataclass) would make CPython end by the signal,
        # although it was caught; the next text makes it forget.
        exec("")
    return code


def audit_main() -> int:
    """The commands that need no torch, as the wheel privlora-verify has them."""
    return main(of=("verify", "calibrate", "budget"))
