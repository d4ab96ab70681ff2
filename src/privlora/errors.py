"""Errors that a user can act on. The command line prints one line, and one for each of several mistakes or ways to
mend it, and exits with 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Self, TypeVar

_Found = TypeVar("_Found")


class PrivloraError(Exception):
    """A problem that the user can mend: what is wrong and where, why it matters, how to mend it, or each of several.

    >>> str(ConfigError("privacy.delta=0.1 is not below 1/N=0.001", fix="set privacy.delta to 1e-5"))
    'privacy.delta=0.1 is not below 1/N=0.001. Fix: set privacy.delta to 1e-5'
    """

    parts: tuple[PrivloraError, ...] = ()
    """The mistakes that `in_one` made one error of; () of one mistake."""
    what: str
    whom = ""
    """Of several mistakes, whom all of them are about."""

    def __init__(self, what: str, *, why: str | None = None, fix: str | Sequence[str] | None = None) -> None:
        fixes = (fix,) if isinstance(fix, str) else tuple(fix or ())
        self.fixes = tuple(each for each in fixes if each)
        self.what, self.why = what, why
        self.fix = "; ".join(each.rstrip(".") for each in self.fixes) or None
        parts = [what.rstrip(".")]
        if why:
            parts.append(why[0].upper() + why[1:].rstrip("."))
        if self.fix:
            parts.append(f"Fix: {self.fix.rstrip('.')}")
        super().__init__(". ".join(parts))

    def each(self) -> tuple[PrivloraError, ...]:
        """Every single mistake that it tells."""
        return self.parts or (self,)

    def of(self, whom: str) -> Self:
        """The same problem, with whom it is about in front.

        >>> str(DataError("there are no records", fix="give at least one").of("client north"))
        'client north: there are no records. Fix: give at least one'
        """
        if self.parts:
            return _together(self.parts, self.general(), f"{whom}: {self.whom}" if self.whom else whom)
        return self.general()(f"{whom}: {self.what}", why=self.why, fix=self.fixes)

    def general(self) -> type[Self]:
        """What several of its kind, or one of somebody, are errors of."""
        return type(self)

    def lines(self) -> list[str]:
        """For a terminal: the problem, and of several mistakes, or ways to mend it, each in its own line.

        >>> ConfigError("a and b are 0", fix=["a: 1", "b: 1"]).lines()
        ['a and b are 0. Fix:', '  - a: 1', '  - b: 1']
        """
        if self.parts:
            return _bullets(self.parts, self.whom)
        told = " ".join(str(self).split())
        if len(self.fixes) < 2:
            return [told]
        fixes = [" ".join(each.split()).rstrip(".") for each in self.fixes]
        return [told.removesuffix(f" {'; '.join(fixes)}"), *(f"  - {each}" for each in fixes)]


class ConfigError(PrivloraError):
    """A setting is unknown, missing, contradictory or out of range."""


class DataError(PrivloraError):
    """Records cannot be read or do not have the promised columns."""


class RecordError(DataError):
    """A record cannot be used. number: of it, from 1. bare: what is wrong with it, without its number."""

    def __init__(
        self, number: int, bare: str, *, why: str | None = None, fix: str | Sequence[str] | None = None
    ) -> None:
        super().__init__(f"record {number}: {bare}", why=why, fix=fix)
        self.number, self.bare = number, bare

    def general(self) -> Any:
        return DataError


class ModelError(PrivloraError):
    """The base model or an adapter cannot be loaded, or cannot be trained privately."""


class GeneratorError(PrivloraError):
    """A generator of public texts failed, hung, or gave what is no text."""


class PrivacyError(PrivloraError):
    """Continuing would break the privacy statement (budget spent, parameter without noise, wrong sampler)."""


class RunError(PrivloraError):
    """A run directory cannot be created, resumed or read."""


_Kind = TypeVar("_Kind", bound=PrivloraError)


def in_one(errors: Sequence[PrivloraError], whom: str = "") -> PrivloraError:
    """All of one or more problems, so that they are mended at once: of their kind, if they have one, else a
    ConfigError. whom: whom all of them are about, as a file of settings.

    >>> print(in_one([ConfigError("a is 0", fix="a: 1"), ConfigError("b is 0", fix="b: 1")], "run.yaml"))
    run.yaml: 2 mistakes:
      - a is 0. Fix: a: 1
      - b is 0. Fix: b: 1
    """
    if len(errors) == 1 and not whom:
        return errors[0]
    single = list(
        {  # each told once, also where two looks came upon it
            str(one): one
            for error in errors
            for part in error.parts or (error,)
            for one in [part.of(error.whom) if error.whom not in ("", whom) else part]
        }.values()
    )
    if len(single) == 1:
        return single[0].of(whom)
    kinds = {error.general() for error in errors}
    return _together(single, kinds.pop() if len(kinds) == 1 else ConfigError, whom)


def _together(parts: Sequence[PrivloraError], kind: type[_Kind], whom: str) -> _Kind:
    """One error of several mistakes."""

    def joined(texts: Iterable[str | None]) -> str:
        return "; ".join(text.rstrip(".") for text in dict.fromkeys(texts) if text)

    what, why = joined(part.what for part in parts), joined(part.why for part in parts)
    fixes = list(dict.fromkeys(fix for part in parts for fix in part.fixes))
    error = kind(f"{whom}: {what}" if whom else what, why=why or None, fix=fixes)
    error.parts, error.whom = tuple(parts), whom
    error.args = ("\n".join(_bullets(parts, whom)),)
    return error


def _bullets(parts: Sequence[PrivloraError], whom: str) -> list[str]:
    """How many mistakes there are, and a line for each."""
    first = f"{whom}: {len(parts)} mistakes:" if whom else f"{len(parts)} mistakes:"
    return [first, *(f"  - {' '.join(str(part).split())}" for part in parts)]


class Together:
    """Keeps the problems of several steps, of which none hides another, to raise all of them as one.

    >>> problems = Together()
    >>> problems.of(3, int, "4"), problems.found
    (4, [])
    """

    def __init__(self) -> None:
        self.found: list[PrivloraError] = []

    def of(self, instead: _Found, call: Callable[..., _Found], *arguments: Any) -> _Found:
        """What ``call`` gives; ``instead`` where it raises a PrivloraError, which is kept."""
        try:
            return call(*arguments)
        except PrivloraError as error:
            self.found.append(error)
            return instead

    def fails(self, call: Callable[..., object], *arguments: Any) -> bool:
        """Whether ``call`` raises a PrivloraError, which is kept."""
        found = len(self.found)
        self.of(None, call, *arguments)
        return len(self.found) > found

    def tell(self) -> None:
        """Raise what was kept, if anything was."""
        if self.found:
            raise in_one(self.found) from None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What to say of a name that is not among ``known``; capitals, - and _ make no difference.

    >>> nearest("DP_AdamW", ["prism", "dp-adamw"])
    "did you mean 'dp-adamw'?"
    """
    known = list(known)
    near = close(name, known, cutoff)
    return f"known: {', '.join(known)}" if near is None else f"did you mean {near!r}?"


def close(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """The one of ``known`` that is spelt most nearly as ``name``; None for names that all differ by more."""
    spelt = {_plainly(each): each for each in known}
    near = difflib.get_close_matches(_plainly(name), spelt, n=1, cutoff=cutoff)
    return spelt[near[0]] if near else None


def no_pattern(text: str) -> ModelError:
    """The error for a text in adapter.target_modules that is no regular expression."""
    return ModelError(
        f"adapter.target_modules={named(text)} is no regular expression",
        fix="give all-linear, feed-forward, a list of name endings such as [q_proj, v_proj], or a pattern of whole "
        "module names such as '.*proj'",
    )


_KINDS: Final = ("all-linear", "feed-forward", "auto")
"""Words that stand for layers, in the place of their names."""


_FEED_FORWARD: Final = ("mlp", "ff", "ffn", "feedforward", "feed_forward")


def no_feed_forward(linear: Sequence[str]) -> ModelError:
    """The error for adapter.target_modules=feed-forward where no name tells it from attention. linear: all layers."""
    known = sorted({name.rsplit(".", 1)[-1] for name in linear})
    return ModelError(
        "adapter.target_modules=feed-forward: the names of this model's layers do not tell attention from the rest",
        fix=f"give all-linear, or a list of name endings; its linear layers are {', '.join(known)}",
    )


def unknown_layers(missing: Sequence[str], known: Sequence[str]) -> ModelError:
    """The error for names in adapter.target_modules that no layer has. known: the linear layers' last names.

    >>> unknown_layers(["q_prj"], ["k_proj", "q_proj"]).fix
    "did you mean 'q_proj'? its linear layers are k_proj, q_proj"
    """
    if any("," in each for each in missing):
        return ModelError(
            f"adapter.target_modules names {', '.join(map(named, missing))}, which is no module but several",
            fix="write them as a list: [q_proj, v_proj]",
        )
    if words_of_kinds := [each for each in missing if each in _KINDS]:
        return ModelError(
            f"adapter.target_modules names {', '.join(map(named, words_of_kinds))} beside layers",
            fix=f"write it alone, as target_modules: {words_of_kinds[0]}, or list layers: {', '.join(known)}",
        )
    words = [*known, *_KINDS]
    meant = ["feed-forward" if each.lower() in _FEED_FORWARD else each for each in missing]
    near = [close[0] for each in meant if (close := difflib.get_close_matches(each, words, n=1))]
    return ModelError(
        f"adapter.target_modules names {', '.join(map(named, missing))}, which this model does not have",
        fix=(f"did you mean {' and '.join(map(repr, dict.fromkeys(near)))}? " if near else "")
        + f"its linear layers are {', '.join(known)}",
    )


def rank_too_large(rank: int, name: str, sizes: tuple[int, int], most: int) -> ModelError:
    """The error for adapter.r above the smaller side of a layer. most: that all layers that are adapted allow."""
    return ModelError(
        f"adapter.r={rank} exceeds the smaller side of {name!r} ({sizes[0]} x {sizes[1]})",
        fix=f"set adapter.r to at most {most}, which the smallest of the adapted modules allows, or exclude small ones",
    )


def _plainly(name: object) -> str:
    return str(name).lower().replace("_", "-")


def named(value: object, longest: int = 40) -> str:
    """How an error shows what may be a record in the wrong place: numbers and single words, of the rest the type."""
    return repr(value) if is_shown(value, longest) else _unshown(value)


def is_shown(value: object, longest: int = 40) -> bool:
    """Whether `named` shows it: it is too short, or a number, to be a record."""
    if isinstance(value, str):
        return len(value) <= longest and len(value.split()) <= 1 and value == value.strip()
    return value is None or (type(value) in (bool, int, float) and not _is_long(value))


def _is_long(value: object) -> bool:
    """Whether it is a whole number that Python may refuse to write: it has a limit of digits."""
    return isinstance(value, int) and abs(value) >= _LARGEST


def _unshown(value: object) -> str:
    kind = "text" if isinstance(value, str) else article(type(value).__name__)
    return f"({kind}, not shown: it may be private)"


_LARGEST: Final = 10**18
_NUMBER: Final = re.compile(
    r"[-+]?(\d[\d_]*([.,]\d*)?|[.,]\d+)(e[-+]?\d{1,2})?[%a-z]?", re.IGNORECASE | re.ASCII
)
_MOST_DIGITS: Final = 6  # significant, of a number that is shown: dates and numbers of persons have more
_SHORTEST_WORD: Final = 5  # letters of a word near which others are shown: many names are near a shorter one


_TYPED: ContextVar[frozenset[str]] = ContextVar("typed", default=frozenset())


@contextmanager
def typed(words: Iterable[str]) -> Iterator[None]:
    """Inside, errors show these words too, which stand on the command line and are no secrets of a file."""
    token = _TYPED.set(_TYPED.get() | frozenset(words))
    try:
        yield
    finally:
        _TYPED.reset(token)


def echoed(value: object, allowed: Iterable[str] = ()) -> str:
    """How an error shows what was given for a setting: true, false and null; numbers of up to six significant digits;
    words that the setting may have, and those that are one slip away from a long one. Of the rest the type, since it
    may be a key, a number of a person, or a word of a record. A word that was typed on the command line is shown as it
    is: see ``typed``.

    >>> echoed("1e-5x"), echoed("fedaks", ["fedask", "tan"]), echoed("sk-live-1", ["fedask", "tan"])
    ("'1e-5x'", "'fedaks'", '(text, not shown: it may be private)')
    >>> echoed(10**8), echoed(78051120), echoed("Noel", ["none"])
    ('100000000', '(an int, not shown: it may be private)', '(text, not shown: it may be private)')
    """
    if _is_long(value):
        return _unshown(value)
    if isinstance(value, str | int | float) and str(value) in _TYPED.get():
        return named(value)
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        word, words = _plainly(value), [_plainly(each) for each in allowed]
        near = word in words or any(is_a_slip(word, each) for each in words if len(each) >= _SHORTEST_WORD)
        return named(value) if near else _unshown(value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        mantissa = re.split("[eE]", str(value))[0]
        if sum(map(str.isdigit, mantissa.strip("-+0.,_"))) > _MOST_DIGITS:
            return _unshown(value)
    return named(value)


def is_a_slip(word: str, right: str) -> bool:
    """Whether two words with the same first letter differ by one that is left out, put in, another, or swapped with its
    neighbour."""
    if word[:1] != right[:1] or abs(len(word) - len(right)) > 1:
        return False
    start = next(
        (k for k, (a, b) in enumerate(zip(word, right, strict=False)) if a != b), min(len(word), len(right))
    )
    mine, other = word[start:], right[start:]
    swapped = len(mine) > 1 and mine[1::-1] + mine[2:] == other
    return swapped or mine[1:] == other[1:] or mine[1:] == other or mine == other[1:]


def in_one_line(said: str, longest: int = 200) -> str:
    """What somebody else's code said, as far as an error has room for it; nothing in it can steer a terminal.

    >>> in_one_line(" no credit left:\\n  \\x1b[31mpay\\n", longest=20)
    'no credit left: [31m…'
    """
    words = " ".join("".join(c if c.isprintable() else " " for c in said).split())
    return words if len(words) <= longest else f"{words[:longest]}…"


def reason_of(error: BaseException) -> str:
    """The first line of what somebody else's code raised, or the error's name where it says nothing.

    >>> reason_of(KeyError()), reason_of(ValueError("no such file:\\nx"))
    ('KeyError', 'no such file:')
    """
    return in_one_line((str(error).strip().splitlines() or [type(error).__name__])[0])


def article(noun: str) -> str:
    """
    >>> article("object"), article("dict")
    ('an object', 'a dict')
    """
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
