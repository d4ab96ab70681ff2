"""Which kinds of canaries there are, and what may be asked of each: known before slow imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from privlora.errors import ConfigError

GRADIENT: Final = "gradient"
NEW_TOKEN: Final = "new-token"
LEAST_LIKELY: Final = "least-likely"
OF_TEXTS: Final = ("random-tokens", "codes", "sampled", "prefix-suffix", NEW_TOKEN)
OF_ONE_RUN: Final = (GRADIENT, *OF_TEXTS)
OF_SHADOWS: Final = (*OF_TEXTS, LEAST_LIKELY)
_WITH_TEMPERATURE: Final = ("sampled", "prefix-suffix")
_WITH_PREFIXES: Final = ("prefix-suffix", NEW_TOKEN)


def check_kind(
    kind: str, temperature: float | None, kinds: Sequence[str] = OF_TEXTS, *, prefixes: bool = False
) -> None:
    """Raise ConfigError for a kind that is none of ``kinds``, a temperature that is out of range or not its own, or
    prefixes for a kind without any."""
    if kind not in kinds:
        raise ConfigError(f"unknown canaries {kind!r}", fix=f"one of {', '.join(kinds)}")
    if prefixes and kind not in _WITH_PREFIXES:
        raise ConfigError(
            f"--prefixes does not go with canaries of the kind {kind!r}",
            fix=f"leave it out, or give --kind {' or '.join(_WITH_PREFIXES)}",
        )
    if temperature is None:
        return
    if kind not in _WITH_TEMPERATURE:
        raise ConfigError(
            f"--temperature does not go with canaries of the kind {kind!r}",
            fix=f"leave it out, or give --kind {' or '.join(_WITH_TEMPERATURE)}",
        )
    if not 0.05 <= temperature <= 100:
        raise ConfigError(f"temperature {temperature} is out of range", fix="give 0.05 to 100; 1 is usual")
