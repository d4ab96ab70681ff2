"""How a command says that its user stopped it."""

from __future__ import annotations


class Stopped(Exception):
    """The user interrupted a run; the message says how to go on."""
