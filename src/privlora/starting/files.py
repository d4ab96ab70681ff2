"""Writing a new file whole or not at all, and never over another."""

from __future__ import annotations

import os
from pathlib import Path

from privlora.errors import RunError


def refuse_existing(path: Path) -> None:
    """Raise RunError where something is already, or the folder is not there."""
    if path.exists() or path.is_symlink():
        raise RunError(
            f"{str(path)!r} exists already", fix="give another name with --output; nothing is written over"
        )
    if not path.parent.is_dir():
        raise RunError(f"there is no folder {str(path.parent)!r}", fix="create it, or give another --output")


def write_new(path: Path, content: str) -> None:
    """Raises RunError, with nothing written."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(half, "x", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(half, path)  # fails where a file came meanwhile, which a rename would replace
    except FileExistsError:
        raise RunError(
            f"{str(path)!r} exists already", fix="give another name with --output; nothing is written over"
        ) from None
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r}: {error.strerror or error}",
            fix="give a writable place with --output",
        ) from None
    finally:
        half.unlink(missing_ok=True)


def free(folder: Path) -> Path:
    """A folder that is not there yet, with a number behind its name where it is."""
    tries = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in range(1, 10**6))
    return next(each for each in tries if not each.exists())
