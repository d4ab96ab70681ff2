"""What all groups of settings share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from privlora.errors import echoed
from privlora.ranges import MOST_STEPS


class Wrong(ValueError):
    """What is wrong with settings, and how to mend it.

    places: the settings that it is about, as group.name, or as name in their own group. lacking: whether one of them is
    needed and not given. parts: of several mistakes, each.
    """

    def __init__(self, what: str, fix: str, *places: str, lacking: bool = False) -> None:
        super().__init__(f"{what}. Fix: {fix}")
        self.what, self.fix, self.places, self.lacking = what, fix, places, lacking
        self.parts: tuple[Wrong, ...] = (self,)


def all_of(wrong: Iterable[Wrong]) -> None:
    """Raise what a group has to say of itself, all of it."""
    found = list(wrong)
    if found:
        whole = Wrong("; ".join(one.what for one in found), "; ".join(one.fix for one in found))
        whole.parts = tuple(found)
        raise whole


def countable(steps: int) -> int:
    """Raises Wrong for more steps than can be accounted for while somebody waits."""
    if steps > MOST_STEPS:
        raise Wrong(
            f"{echoed(steps)} steps are more than {MOST_STEPS}: the noise for so many releases takes many "
            "minutes to find, and each has a line in a ledger",
            "fewer; 100 to 10000 steps are usual",
        )
    return steps


Countable = Annotated[int, AfterValidator(countable)]
"""A number of steps, or of rounds."""


class Truth:
    """Stands for true or false where neither is a value, so that no setting takes it and each is reported."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value).lower()


_PATHS = ("path", "evaluation", "public_text", "file", "source", "init", "output", "name", "chat_template")
"""Settings that may name a file or a folder; ~ in them is the user's home, as in a shell."""


def _from_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _refuse_half_characters(value: Any, name: str) -> None:
    """Raise Wrong for what no file can hold, such as JSON's "\\ud800" alone: a run would end when it writes it."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Wrong(f"{name} holds half of a character", "write it whole", name) from None
    elif isinstance(value, Mapping):
        for inner in (*value, *value.values()):
            _refuse_half_characters(inner, name)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_half_characters(inner, name)


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _paths_from_home(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        for name, value in values.items():
            _refuse_half_characters(value, str(name))
        return {**values, **{name: _from_home(values[name]) for name in _PATHS if name in values}}

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, values: Any) -> Any:
        # Pydantic takes true for 1, and YAML takes yes and on for true: clip_norm: on would clip at 1.
        if not isinstance(values, Mapping):
            return values
        wrong = {
            name: Truth(value)
            for name, value in values.items()
            if isinstance(value, bool)
            and (field := cls.model_fields.get(name)) is not None
            and bool not in (get_args(field.annotation) or (field.annotation,))
        }
        return {**values, **wrong} if wrong else values


def group_in(annotation: Any) -> type[Group] | None:
    """The group of which a setting holds a list; None for other settings."""
    if isinstance(annotation, type) and issubclass(annotation, Group):
        return annotation
    return next((found for inner in get_args(annotation) if (found := group_in(inner)) is not None), None)
