"""What operating systems do in their own ways with files: locks, links, and removals and names that survive a crash.

A lock lies on the very file that it protects, and not on one beside it, as packages for locks have it. A ledger is what
it is under whatever name it is opened, through links too; who removes or copies it takes no lock along, and whoever
asks sees by the file itself that it was removed meanwhile; nothing more lies in a folder that is published; and no
tidying up lets a second process in. Whatever ends a process gives its locks back.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

WINDOWS: Final = sys.platform == "win32"
BINARY: Final = getattr(os, "O_BINARY", 0)
"""For `os.open`: Windows would write other line ends than it is given, and a ledger's hashes are of its bytes."""

if sys.platform == "win32":
    import msvcrt

    _PLACE: Final = 2**31 - 2  # what is locked there cannot be read by others; no content reaches so far
    _PAUSE: Final = 0.02  # seconds

    def _lock(file: int, wait: bool) -> None:
        place = os.lseek(file, 0, os.SEEK_CUR)
        os.lseek(file, _PLACE, os.SEEK_SET)
        try:
            while True:
                try:
                    return msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
                except OSError as error:
                    if error.errno not in (errno.EACCES, errno.EDEADLK):
                        raise
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                time.sleep(_PAUSE)
        finally:
            os.lseek(file, place, os.SEEK_SET)

else:
    import fcntl

    def _lock(file: int, wait: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock(file: int, *, wait: bool = False) -> None:
    """Lock what the descriptor is of, for it alone, until it and its duplicates are closed.

    Raises BlockingIOError if another descriptor has the lock, unless ``wait``; OSError where the disk has no locks.
    """
    _lock(file, wait)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Inside, a file, made where there is none, is locked for this process alone. Raises as `lock`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o600)
    try:
        lock(descriptor, wait=wait)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make names that files got, lost or changed there survive a crash of the machine.

    Does nothing on Windows, which opens no folder and writes names into its own journal.
    """
    if WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TooLargeError(OSError):
    """A file that is not copied."""


def copy_plain(source: Path, target: Path, most: int) -> None:
    """Copy a file of one name and at most ``most`` bytes to a new one, which its owner alone may read.

    What is open is looked at, and not a name that can lead elsewhere a moment later: raises OSError for a link, a file
    that has other names, a folder or a pipe, and for a larger file, however little of it lies on the disk.
    """
    before = os.lstat(source)
    refused = OSError(errno.EMLINK, "is a link, or no file", str(source))
    if not stat.S_ISREG(before.st_mode):  # to open a device can do something
        raise refused
    with open(source, "rb", opener=_to_look_at) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or not os.path.samestat(before, found):
            raise refused
        if found.st_size > most:
            raise TooLargeError(errno.EFBIG, "is too large", str(source))
        with open(target, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as copied:
            try:
                shutil.copyfileobj(file, copied)
            except OSError:  # nothing takes a part of it for all
                target.unlink(missing_ok=True)
                raise


def _to_look_at(name: str, flags: int) -> int:
    """No link is followed and no pipe waited for, where the system can be told so."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def remove_held(path: Path) -> None:
    """Remove a file that this process has open, so that nobody else can take it in between.

    Windows removes no open file: there it is emptied, and `remove_emptied` is for the time when it is closed.
    """
    if WINDOWS:
        os.truncate(path, 0)
    else:
        path.unlink(missing_ok=True)


def remove_emptied(path: Path) -> None:
    """On Windows, what `remove_held` left. A file that another process has open, or has filled, stays."""
    if WINDOWS:
        try:
            if not path.stat().st_size:
                path.unlink()
        except OSError:
            return
