"""What an error shows of a value that may be a record, a number of a person or a key in a setting's place."""

from __future__ import annotations

from datetime import date
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
from promises import promise

from privlora.config import settings_from
from privlora.errors import ConfigError, PrivloraError, Together, echoed, typed

WORDS = ["prism", "fedask", "json", "auto", "true", "false", "null", "none", "user", "tan"]


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 3, -0.25, 1e-5, 123456, 10**12, 2.5e300, 0.000123456, float("inf")),
        *("3", "1e-5", "2.5", "1,5", "100_000", "30%", "123456", "1e-30", ".5"),
        *("prism", "PRISM", "none", "True", "tan", "fed-ask", "fedaks", "prizm", "prsm", "prismm"),
    ],
)
def test_numbers_and_near_words_are_shown(value: Any) -> None:
    assert echoed(value, WORDS) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        *(78051120, 123456789, -4917484589, 1.9690401e7, 0.1234567, 2025551234),
        *("078051120", "078-05-1120", "1.4.1969", "19690401", "4917484589", "1_2_3_4_5_6_7", "12345678a"),
        *("Noel", "Nona", "Otto", "Jason", "Tom", "Uwer", "Falk", "Brisma", "Crism"),
        *("sk-live-1", "prism x", "", "-"),
        *("pr", "prisms2", "e5", "1e12345", "٣٤٥٦٧٨٩"),
    ],
)
def test_what_may_be_of_a_person_is_not(value: Any) -> None:
    shown = echoed(value, WORDS)
    assert "not shown" in shown
    assert not str(value) or str(value) not in shown.replace("not shown: it may be private", "")


PLACES = (
    "privacy.steps privacy.delta privacy.expected_batch_size privacy.unit privacy.private run.seed run.report_to "
    "run.tokens_per_micro_batch model.name model.dtype model.revision model.quantization data.text data.labels "
    "data.format data.task data.max_length adapter.r adapter.layers_to_transform method.name method.optimizer "
    "method.clipping method.learning_rate synthesis.preset federation.rule"
)


@pytest.mark.parametrize("place", PLACES.split())
@pytest.mark.parametrize("secret", [78051120, "078051120", "Noel", "sk-live-Mueller1987"])
def test_no_setting_shows_a_secret_in_its_place(place: str, secret: Any) -> None:
    """A key, a number of a person or a word of a record, instead of a number, of one of some words or of a name."""
    group, name = place.split(".")
    content: dict[str, Any] = {
        "model": {"name": "m"},
        "data": {"path": "a.jsonl"},
        "privacy": promise(steps=10, batch=4, records=10**9, target_epsilon=3),
    }
    content.setdefault(group, {})[name] = secret
    if name == "labels":
        content["data"]["label"] = "y"
    problems = Together()
    problems.of(None, partial(settings_from, content, methods=True))
    told = "".join(map(str, problems.found))
    assert str(secret) not in told
    assert "78051120" not in told.replace("_", "")


def test_only_whole_words_that_were_typed_are_shown() -> None:
    with typed(["run.label=Noel-x", "Ada"]):
        assert "not shown" in echoed("Noel")
        assert echoed("Ada") == "'Ada'"
        with typed(["Noel"]):
            assert (echoed("Noel"), echoed("Ada")) == ("'Noel'", "'Ada'")
    assert "not shown" in echoed("Ada")


def test_a_slip_of_the_pen_shows_no_number() -> None:
    with pytest.raises(PrivloraError, match="did you mean 'seed'") as caught:
        settings_from({"run": {"sed": 78051120}})
    assert "7805" not in str(caught.value)


class Patient(IntEnum):
    GRETA = 78051129


NUMBER = 78051129


@pytest.mark.parametrize(
    "content",
    [
        {"privacy": Patient.GRETA},
        {"model": np.float64(78051129.25)},
        {"model": NUMBER},
        {NUMBER: {}, (NUMBER,): {}, date(1978, 5, 11): {}},
        {"privacy": {NUMBER: 1, (NUMBER,): 2, b"78051129": 3, 10**5000: 4}},
        {"privacy": {"public_dataset_size": 10**5000, "steps": 10**5000, "delta": 10**5000}},
        {"data": {"labels": {4111780511290000: 3}}},
        {"federation": {"clients": NUMBER, "rounds": 2}, "privacy": {"steps": [{"text": "78051129"}]}},
        {"federation": {"clients": 3, "rounds": 2}, "privacy": {"steps": NUMBER}},
    ],
    ids=range(9),
)
def test_what_no_file_holds_is_refused_and_not_shown(content: Any) -> None:
    """A caller in Python may hand over anything."""
    with pytest.raises(ConfigError) as caught:
        settings_from(content)
    assert "7805" not in str(caught.value)
