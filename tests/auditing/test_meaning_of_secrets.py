"""What an audit of planted secrets says of them, in a sentence and a picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from privlora.auditing.finished_run import Leakage
from privlora.auditing.page import _secrets_picture, _verdict_of_secrets

CHANCE = Leakage(exposure=1.0, chance=1.42, ceiling=8.0, extracted=0, secrets=8)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("after", "leaks"),
    [
        (CHANCE, False),
        (replace(CHANCE, exposure=2.3), False),
        (replace(CHANCE, exposure=2.5), True),
        (replace(CHANCE, extracted=1), True),
        (replace(CHANCE, exposure=8.0, extracted=8), True),
    ],
)
def test_the_verdict_follows_from_the_numbers(after: Leakage, leaks: bool) -> None:
    said = _verdict_of_secrets(CHANCE, after)
    assert said.startswith("The adapter gives planted secrets away" if leaks else "This attack finds nothing")
    assert f"{after.extracted} of 8" in said
    assert f"{after.exposure:.2f} bits, {after.extracted} of 8 recited" in _secrets_picture(CHANCE, after)


def test_what_the_base_model_knew_is_not_the_adapters() -> None:
    known = replace(CHANCE, exposure=8.0, extracted=8)
    assert _verdict_of_secrets(known, known).startswith("This attack finds nothing")
