"""Settings with a comment on each, and the YAML that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from privlora.config.reference import groups

_COMMENT_AT = 44
_WIDTH = 118
_INDENT = "  "


class Plain(str):
    """Written as it stands, such as 1e-5."""

    __slots__ = ()


@dataclass(frozen=True)
class Line:
    """value: as Python has it. why: a comment. written: what the YAML says in its place, such as auto."""

    value: Any
    why: str = ""
    written: str | None = None


@dataclass
class Draft:
    """Group -> setting -> its line; and lines of comment below a group, each a proposal or a remark."""

    settings: dict[str, dict[str, Line]] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)

    def put(self, place: str, value: Any, why: str = "", *, written: str | None = None) -> None:
        """Set ``group.name``, in the place of what it was. written: what stands for the value in the YAML."""
        group, _, name = place.partition(".")
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
        return {
            group: {name: line.value for name, line in self.settings[group].items()} for group in self._order
        }

    @property
    def _order(self) -> list[str]:
        known: Mapping[str, Any] = groups()
        return [group for group in _ORDER if self.settings.get(group)] + [
            group for group in known if group not in _ORDER and self.settings.get(group)
        ]

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
    """A setting and its comment, beside it where there is room, else above it."""
    if not why:
        return [setting]
    if "\n" in setting:
        return [f"{_INDENT}# {why}", setting]
    beside = f"{setting:<{_COMMENT_AT}}# {why}" if len(setting) < _COMMENT_AT else f"{setting}  # {why}"
    return [beside] if len(beside) <= _WIDTH else [f"{_INDENT}# {why}", setting]


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
    return text.removesuffix("\n...").removesuffix("...").strip()
