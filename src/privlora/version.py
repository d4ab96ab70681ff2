"""Which privlora this is, and which packages are next to it."""

import re
from importlib.metadata import version
from typing import Final

__version__ = "0.1.0"

VERSION: Final = re.compile(r"\d{1,9}(\.\d{1,9}){0,4}((a|b|rc|\.?dev|\.post)\d{1,9}){0,2}", re.ASCII)
"""A public version, as 2.13.0 or 1.0rc1."""


def version_of(package: str) -> str:
    """Of an installed package, without what its builder adds, as +cpu."""
    return version(package).partition("+")[0]
