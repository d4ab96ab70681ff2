"""What was taken over from another tool's settings, and why the rest was not.

Values that were not taken are never shown: among them may be keys of services.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from privlora.config.foreign_names import EVERYWHERE, Refused
from privlora.config.other_names import plain
from privlora.names import KINDS
from privlora.starting.draft import Line
from privlora.starting.survey import Survey

_NAME = re.compile(r"[\w.]+")
_SETTING = re.compile(r"(?=.{1,40}\Z)[a-z][a-z_.]*[0-9]{0,2}[a-z_.]*")
_MOST_SHOWN: Final = 20  # keys that nobody knows
Convert = Callable[[Any], Any]
"""From a value of theirs to ours. Raises ValueError, which says why not, for one that means nothing here."""


@dataclass
class Taken:
    """Of one file.

    left: what of it nobody has looked at yet. settings: ``group.name`` -> what it is here. batch, epochs, max_steps:
    from which numbers of steps follow once the number of records is known. kept_out: their key -> why it was not taken.
    """

    dialect: str
    left: dict[str, Any]
    settings: dict[str, Line] = field(default_factory=dict)
    data: list[str] = field(default_factory=list)
    batch: int | None = None
    batch_from: str = "a device's batch x accumulation, of one device"
    epochs: float | None = None
    max_steps: int | None = None
    warmup_share: float | None = None
    kept_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def pop(self, key: str) -> Any:
        """The value of their key, which is then looked at; None where it is not there."""
        return self.left.pop(key, None)

    def take(self, key: str, place: str, convert: Convert) -> None:
        """Take over a key, if it is there, or say why not."""
        value = self.pop(key)
        if value is None:
            return
        try:
            why = "as there" if place.endswith(f".{key}") else f"{key} there"
            self.settings[place] = Line(convert(value), why)
        except (ValueError, TypeError) as error:
            self.kept_out[key] = str(error) or "its value means nothing here"

    def put(self, place: str, value: Any, why: str) -> None:
        """Set ``group.name``."""
        self.settings[place] = Line(value, why)

    def refuse(self, key: str, why: str) -> None:
        """Look at a key, and leave it out, if it is there."""
        if key in self.left:
            del self.left[key]
            self.kept_out[key] = why

    def finish(self, harmless: Mapping[str, str]) -> None:
        """Explain what is left. harmless: their key -> why nothing is lost without it."""
        for key in list(self.left):
            name = plain(key).rpartition(".")[2]
            found = EVERYWHERE.get(name)
            if self.left.pop(key) is None:  # they leave it to a default, too
                continue
            why = next(
                (why for begin, why in harmless.items() if plain(key) == begin or _under(key, begin)), None
            )
            if why is not None:
                self.kept_out[key] = why
            elif isinstance(found, Refused):
                self.kept_out[key] = found.why + (f"; instead: {found.instead}" if found.instead else "")
            elif found is not None:
                self.kept_out[key] = f"see {found.setting} here" + (f": {found.but}" if found.but else "")
            else:
                self.unknown.append(key)

    def form(self, found: Survey) -> dict[str, str]:
        """Its columns of texts or messages, where the records have them."""
        named = {
            name: str(line.value)
            for name in ("text", "messages")
            if (line := self.settings.get(f"data.{name}")) is not None
        }
        usable = {"text": found.plain, "messages": found.chats}
        hints = {name: value for name, value in named.items() if value in usable[name]}
        joined: dict[str, str] = {name: name for name in ("prompt", "completion") if name in found.plain}
        if hints or self.dialect != "TRL" or len(joined) < 2:
            return hints
        self.put("data.template", "none", "there texts are rendered by no chat template")
        return joined

    def remarks(self) -> list[str]:
        """One line for each key that was not taken over."""
        found = [f"{shown(key)}: {why}" for key, why in self.kept_out.items()]
        if self.unknown:
            names = list(dict.fromkeys(map(shown, self.unknown)))
            more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
            found.append(f"not known to privlora, so without effect: {', '.join(names[:_MOST_SHOWN])}{more}")
        return found


def _under(key: str, begin: str) -> bool:
    return begin.endswith("*") and plain(key).startswith(begin[:-1])


def shown(key: object) -> str:
    """A key of theirs, as far as it is spelt like the name of a setting, and no longer than one: a key of a service has
    capitals and digits, and control characters could rule a screen."""
    return key if isinstance(key, str) and _SETTING.fullmatch(key) else "(a key that is no name)"


def _float(value: Any) -> float:
    """NaN for whatever is no number: Python's own words would quote it."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def number(value: Any) -> float:
    """Above 0; YAML's 2e-4 is a text to its reader."""
    found = _float(value)
    if not 0 < found < math.inf:
        raise ValueError("it is no number above 0")
    return found


def share(value: Any) -> float:
    """From 0 to below 1."""
    found = _float(value)
    if not 0 <= found < 1:
        raise ValueError("it is no number from 0 to below 1")
    return found


def not_negative(value: Any) -> float:
    """0 or more."""
    found = _float(value)
    if not 0 <= found < math.inf:
        raise ValueError("it is no number of 0 or more")
    return found


def whole(value: Any) -> int:
    """1 or more."""
    found = number(value)
    if found != int(found):
        raise ValueError("it is no whole number")
    return int(found)


def word(value: Any) -> str:
    """A text in one line."""
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise ValueError("it is no word")
    return value.strip()


def truth(value: Any) -> bool:
    """true or false, also as axolotl's auto, which means true where it can."""
    if isinstance(value, bool):
        return value
    raise ValueError("it is neither true nor false")


def names(value: Any) -> Any:
    """A list of words, also where they stand in one text with blanks or commas between."""
    if isinstance(value, str):
        found = value.replace(",", " ").split()
        alone = len(found) == 1 and (found[0] in KINDS or not _NAME.fullmatch(found[0]))
        return found[0] if alone else found  # a pattern stays one
    if isinstance(value, list) and value and all(isinstance(each, str) and each for each in value):
        return list(value)
    raise ValueError("it is no list of names")


def dtype(value: Any) -> str:
    """Of the frozen weights."""
    spelt = str(value).lower().removeprefix("torch.").removesuffix("-true").removesuffix("-mixed")
    if spelt in ("float16", "fp16", "half", "16"):
        raise ValueError(
            "float16 gradients overflow, and clipping would bound the wrong norm; bfloat16 does not"
        )
    found = {"bf16": "bfloat16", "fp32": "float32", "32": "float32", "float": "float32"}.get(spelt, spelt)
    if found not in ("auto", "bfloat16", "float32"):
        raise ValueError("weights are bfloat16 or float32 here")
    return found


_SCHEDULES: Final[dict[str, str]] = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}


def schedule(value: Any) -> str:
    """Of the learning rate."""
    spelt = str(value).lower().rpartition(".")[2]
    found = _SCHEDULES.get(spelt, spelt)
    if found not in ("constant", "linear", "cosine"):
        raise ValueError("schedules are constant, linear or cosine here")
    return found


def method_of(optimizer: Any) -> str:
    """The row that does the same to private gradients."""
    spelt = str(optimizer).lower().rpartition(".")[2]
    if "adam" in spelt and "adamax" not in spelt:
        return "dp-adamw"
    if spelt in ("sgd", "momentum"):
        return "dp-sgd"
    raise ValueError("no method of `privlora methods` has this optimizer; dp-adamw is the nearest")


def attention(value: Any) -> str:
    """The kernel."""
    known = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
    if value not in known:
        raise ValueError(f"attention is computed by one of {', '.join(known)} here")
    return str(value)
