"""Begins a process that minds what Windows would, as far as another system can tell it: `python as_windows.py SCRIPT`.

privlora's own modules find none of POSIX, and nothing in `os` that Windows lacks. No folder can be opened, no open or
mapped file removed or replaced, and none that was opened for reading synced. What `os.open` opened as text gets other
line ends; a signal 0 is a ctrl-C; some characters name no file; texts are read and written in an encoding that is said.
Locks are those of `msvcrt`: what is locked cannot be read.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

POSIX = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
LACKING = (
    "fchmod",
    "fork",
    "getuid",
    "nice",
    "posix_fallocate",
    "register_at_fork",
    "sched_getaffinity",
    "sync",
    "uname",
)
_BINARY = 1 << 30
_NO_NAME = set('<>:"|?*\\')
_as_text: set[int] = set()


def _refuse(number: int, path: Any) -> None:
    raise OSError(number, os.strerror(number), str(path))  # PermissionError for EACCES


def _in_use(path: Any) -> bool:
    """Whether this process has the file open, or in its memory."""
    name = os.path.realpath(path)
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(descriptor) == name:
                return True
        except OSError:  # that of the listing
            continue
    return any(
        line.rstrip().endswith(f" {name}") for line in Path("/proc/self/maps").read_text().splitlines()
    )


def _check_name(path: Any) -> None:
    if isinstance(path, str | os.PathLike) and _NO_NAME & set(Path(path).name):
        _refuse(errno.EINVAL, path)


def _locking(file: int, how: int, count: int) -> None:
    assert (how, count) == (2, 1)
    assert os.lseek(file, 0, os.SEEK_CUR) > os.fstat(file).st_size, "others could not read what is locked"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


def _patch_os() -> None:
    opened, written, synced, made = os.open, os.write, os.fsync, os.mkdir

    def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if os.path.isdir(path):
            _refuse(errno.EACCES, path)
        _check_name(path)
        file = opened(path, flags & ~_BINARY, *rest, **more)
        (_as_text.discard if flags & _BINARY else _as_text.add)(file)
        return file

    def write(file: int, content: bytes) -> int:
        if file not in _as_text:
            return written(file, content)
        written(file, content.replace(b"\n", b"\r\n"))
        return len(content)

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if not fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR):
            _refuse(errno.EBADF, number)
        synced(file)

    def moving(how: Callable[..., None], over: bool) -> Callable[..., None]:
        def move(old: Any, new: Any, **rest: Any) -> None:
            _check_name(new)
            if not over and os.path.exists(new):
                _refuse(errno.EEXIST, new)
            for path in (old, new):
                if _in_use(path):
                    _refuse(errno.EACCES, path)
            how(old, new, **rest)

        return move

    def removing(how: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, **rest: Any) -> None:
            if _in_use(path):
                _refuse(errno.EACCES, path)
            how(path, **rest)

        return remove

    def mkdir(path: Any, *rest: Any, **more: Any) -> None:
        _check_name(path)
        made(path, *rest, **more)

    def kill(process: int, number: int) -> None:
        raise AssertionError("Windows ends processes by signals, or sends them ctrl-C")

    os.open, os.write, os.fsync, os.mkdir, os.kill = open_, write, fsync, mkdir, kill
    os.replace, os.rename = moving(os.replace, True), moving(os.rename, False)
    os.unlink, os.remove = removing(os.unlink), removing(os.remove)
    os.O_BINARY = _BINARY  # type: ignore[attr-defined]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    for name in LACKING:
        delattr(os, name)


def _patch_builtins() -> None:
    imported, opened = builtins.__import__, builtins.open

    def import_(name: str, globals: Any = None, *rest: Any, **more: Any) -> Any:
        if name in POSIX and (globals or {}).get("__name__", "").split(".")[0] == "privlora":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, globals, *rest, **more)

    def open_(file: Any, mode: str = "r", *rest: Any, opener: Any = None, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            _check_name(file)
        # Python says itself that its files are binary.
        given = opener and (lambda name, flags: opener(name, flags | _BINARY))
        return opened(file, mode, *rest, opener=given, **more)

    builtins.__import__, builtins.open = import_, open_


def begin() -> None:
    """From here on; what is imported already stays."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    _patch_os()
    _patch_builtins()
    warnings.filterwarnings("error", category=EncodingWarning, module=r"privlora(\..*)?$")
    sys.modules["msvcrt"] = SimpleNamespace(locking=_locking, LK_NBLCK=2)  # type: ignore[assignment]
    platform, sys.platform = sys.platform, "win32"
    import privlora.disk

    sys.platform = platform
    assert privlora.disk.WINDOWS


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    begin()
    runpy.run_path(sys.argv[0], run_name="__main__")
