"""YAML of anybody: plain types, no key twice, and read in seconds whatever it holds."""

from __future__ import annotations

from functools import cache
from typing import Any

import yaml

from privlora.config.base import group_in
from privlora.config.groups import Settings

_CHARACTERS, _OF_A_VALUE, _VALUES, _DEEP = 1_000_000, 50_000, 50_000, 20


class UnboundedError(yaml.MarkedYAMLError):
    """A text that could take without end to read, or to check. fix: how to mend it."""

    def __init__(self, problem: str, fix: str, mark: Any = None) -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.fix = fix
        self.where = "" if mark is None else f", line {mark.line + 1}"


def read_plain(text: str) -> Any:
    """What ``text`` holds. Raises yaml.YAMLError."""
    if len(text) > _CHARACTERS:
        raise UnboundedError(f"more than {_CHARACTERS} characters", "shorten it")
    return yaml.load(text, Loader=_PlainLoader)


class _PlainLoader(yaml.SafeLoader):
    """No aliases, since a few lines of them stand for billions of values; a key given twice would be lost silently."""

    _values = _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._values, self._depth = self._values + 1, self._depth + 1
        if isinstance(event, yaml.AliasEvent):
            fix = "write out what stands behind each &name, instead of its *name"
            raise UnboundedError("an alias", fix, event.start_mark)
        for number, most, what in (
            (self._values, _VALUES, f"more than {_VALUES} values"),
            (self._depth, _DEEP, f"more than {_DEEP} lists and mappings in one another"),
            (len(getattr(event, "value", "")), _OF_A_VALUE, f"a value of more than {_OF_A_VALUE} characters"),
        ):
            if number > most:
                raise UnboundedError(what, "keep what settings need, and remove the rest", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise UnboundedError("a merge (<<)", "write its settings out", key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # a list or a mapping, which yaml itself refuses as a key
            if key_node.value in seen:
                # Of records it may be a person's name.
                key = key_node.value if key_node.value in _names() else "a key"
                error = yaml.constructor.ConstructorError(
                    problem=f"{key} is given twice", problem_mark=key_node.start_mark
                )
                error.twice = key  # type: ignore[attr-defined]
                raise error
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value that is none of its kind is an error of YAML, without the value."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise yaml.constructor.ConstructorError(
                problem="a value that is none of its kind, as a day that no month has",
                problem_mark=node.start_mark,
            ) from None


@cache
def _names() -> frozenset[str]:
    """Of all groups and their settings."""
    groups = [group_in(field.annotation) for field in Settings.model_fields.values()]
    return frozenset(Settings.model_fields).union(
        *(group.model_fields for group in groups if group is not None)
    )
