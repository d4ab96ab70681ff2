"""Settings with a comment on each, the YAML that they make, and how it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from privlora.config.reference import groups
from privlora.errors import RunError

_COMMENT_AT = 44
_WIDTH = 118
_INDENT = "  "


class Plain(str):
    """Written as it stands, such as 1e-5."""

    __slots__ = ()


@dataclass(frozen=True)
class Line:
    """value: as Python has it. why: a comment. written: what the YAML says instead, such as auto."""

    value: Any
    why: str = ""
    written: str | None = None


@dataclass
class Draft:
    """Group -> setting -> its line; and lines of comment below a group, each a proposal or a remark.

    whys: of settings, formats of the comments that stand where none is given.
    """

    whys: dict[str, str]
    settings: dict[str, dict[str, Line]] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)

    def put(self, place: str, value: Any, why: str = "", *, written: str | None = None, **facts: Any) -> None:
        """Set ``group.name``. written: what stands for the value in the YAML. facts: what the comment shows."""
        group, _, name = place.partition(".")
        why = why or self.whys.get(place, "").format(**facts)
        self.settings.setdefault(group, {})[name] = Line(value, why, written)

    def get(self, place: str) -> Any:
        """The value of ``group.name``; None if it is not set."""
        group, _, name = place.partition(".")
        line = self.settings.get(group, {}).get(name)
        return None if line is None else line.value

    def remark(self, group: str, *lines: str) -> None:
        """Comments below a group."""
        self.below.setdefault(group, []).extend(lines)

    def content(self) -> dict[str, dict[str, Any]]:
        """As plain mappings, in which a setting is what the YAML says or stands for."""
        lines = ((group, self.settings[group]) for group in self._order)
        return {group: {name: line.value for name, line in some.items()} for group, some in lines}

    @property
    def _order(self) -> list[str]:
        return [group for group in dict.fromkeys((*_ORDER, *groups())) if self.settings.get(group)]

    def written(self, top: Iterable[str]) -> str:
        """The YAML; ``top``: comments before all groups."""
        lines = [f"# {each}".rstrip() for each in top]
        for group in self._order:
            lines += ["", f"{group}:"]
            for name, line in self.settings[group].items():
                said = scalar(line.value) if line.written is None else line.written
                lines += _lines(f"{_INDENT}{name}: {said}".replace(": \n", ":\n"), line.why)
            lines += [f"{_INDENT}# {each}".rstrip() for each in self.below.get(group, [])]
        return "\n".join(lines) + "\n"


_ORDER: Final = ("model", "data", "adapter", "synthesis", "privacy", "federation", "method", "run")


def _lines(setting: str, why: str) -> list[str]:
    """A setting and its comment, next to it where there is room, else above it."""
    if not why:
        return [setting]
    line = f"{setting:<{_COMMENT_AT}}# {why}" if len(setting) < _COMMENT_AT else f"{setting}  # {why}"
    return [line] if "\n" not in setting and len(line) <= _WIDTH else [f"{_INDENT}# {why}", setting]


def scalar(value: Any) -> str:
    """A value in one line of YAML.

    >>> print(scalar("{a}\\n"), scalar(None), scalar(["a", "b"]), scalar(Plain("1e-5")))
    "{a}\\n" null [a, b] 1e-5
    """
    if isinstance(value, Plain):
        return str(value)
    if isinstance(value, str) and ("\n" in value or not value.isprintable()):
        return json.dumps(value)  # YAML reads what JSON quotes
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("...").strip()


def refuse_existing(path: Path) -> None:
    """Raise RunError where something is already, or the folder is not there."""
    if path.exists() or path.is_symlink():
        raise RunError(f"{str(path)!r} exists already", fix=_OTHER_NAME)
    if not path.parent.is_dir():
        raise RunError(f"there is no folder {str(path.parent)!r}", fix="create it, or give another --output")


_OTHER_NAME: Final = "give another name with --output; nothing is written over"


def write_new(path: Path, content: str) -> None:
    """Write a new file whole or not at all, and never over another. Raises RunError, with nothing written."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(half, "x", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(half, path)  # fails where a file came meanwhile, which a rename would replace
    except FileExistsError:
        raise RunError(f"{str(path)!r} exists already", fix=_OTHER_NAME) from None
    except OSError as error:
        what = f"cannot write {str(path)!r}: {error.strerror or error}"
        raise RunError(what, fix="give a writable place with --output") from None
    finally:
        half.unlink(missing_ok=True)
