"""The group ``synthesis``: what is refused, what errors keep to themselves, and what it must not share with others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from promises import promise

from privlora.config import Settings, load_settings, settings_from
from privlora.config.synthesis import Preset
from privlora.errors import ConfigError
from privlora.synthesis.prompts import PRESETS

BASE: dict[str, Any] = {
    "model": {"name": "tiny"},
    "data": {"path": "notes.jsonl", "evaluation": "held_out.jsonl"},
    "privacy": promise(steps=5, batch=8, records=100, delta=1e-5, target_epsilon=3),
}


def of(**synthesis: Any) -> Settings:
    return settings_from({**BASE, "synthesis": synthesis})


def test_a_run_has_none_unless_it_says_so() -> None:
    assert settings_from(BASE).synthesis is None
    assert "synthesis" not in settings_from(BASE).to_yaml()
    default = of().synthesis
    assert (default.generator, default.seeds, default.variations) == ("model", 100, 1)
    assert (default.temperature, default.warm_start_epochs, default.evolution) == (1.0, 0, "variations")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"file": ["a.jsonl", "b.csv"]},
        {"endpoint": "http://localhost:8000/v1", "endpoint_model": "m"},
        {"callable": "my.texts:writers.write"},
        {"random_prompt": "a note", "variation_prompt": "like {text}, but {tone}"},
        {"preset": "clinical-note", "chat": False, "similarity_limit": None},
        {"warm_start_epochs": 2, "warm_start_learning_rate": 0.1},
    ],
)
def test_what_is_written_is_read_back(given: dict[str, Any], tmp_path: Path) -> None:
    settings = of(**given)
    (tmp_path / "run.yaml").write_text(settings.to_yaml())
    assert load_settings(tmp_path / "run.yaml") == settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpoint": "http://a/v1"}, "needs endpoint_model"),
        ({"file": "a.jsonl", "callable": "a:b"}, "file and callable are several writers"),
        ({"endpoint_model": "m"}, "endpoint_model is not read where the model writes"),
        ({"file": "a.jsonl", "preset": "text"}, "preset is not read where file is given"),
        ({"callable": "a:b", "temperature": 0.5}, "temperature is not read"),
        ({"preset": "text", "random_prompt": "a"}, "two kinds of text"),
        ({"warm_start_learning_rate": 0.1}, "goes with warm_start_epochs"),
        ({"preset": "text", "variation_prompt": "{text}"}, "variation_prompt goes with random_prompt"),
        ({"random_prompt": "a", "variation_prompt": "b {tone}"}, "no place for the text"),
        ({"random_prompt": "  "}, "it is empty"),
        ({"preset": "clinical-notes"}, "did you mean 'clinical-note'"),
        ({"generator": "model"}, "unknown setting"),
        ({"callable": "a.py"}, "it is not module:name"),
        ({"seeds": 0}, "greater than or equal to 1"),
        ({"variations": -1}, "greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": 3}, "unknown setting"),
        ({"source": "runs/a"}, "source is read by privlora synthesize"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        of(**given)
    assert "Fix: " in str(refused.value)


def test_a_finished_run_is_a_source_of_published_texts_alone() -> None:
    found = of(publish=True, source="runs/a").synthesis
    assert (found.publish, found.source) == (True, "runs/a")


ENDPOINTS = (
    "localhost:8000/v1",
    "ftp://host/v1",
    "http:///v1",
    "http://host:99999/v1",
    "http://me:sesame@host/v1",
    "http://host/v1?key=sesame",
    "http://host/v1#sesame",
    "sesame",
)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_address_without_secrets_is_wanted(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"synthesis\.endpoint: it (is no address|holds more)") as refused:
        of(endpoint=endpoint, endpoint_model="m")
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"file": 4711}, r"synthesis\.file"),
    ],
)
def test_a_secret_in_another_settings_place_is_not_shown(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        of(**given)
    assert not re.search("sesame|4711", str(refused.value))


def test_public_texts_are_no_private_ones(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "notes.jsonl")
    data = {"path": str(tmp_path / "notes.jsonl"), "evaluation": "held_out.jsonl"}
    for file, words in [
        ([str(tmp_path / "link.jsonl")], "which is private"),
        ("./held_out.jsonl", "also data.evaluation"),
    ]:
        with pytest.raises(ConfigError, match=words):
            settings_from({**BASE, "data": data, "synthesis": {"file": file}})


def test_a_federation_has_no_public_texts() -> None:
    privacy = {k: v for k, v in BASE["privacy"].items() if k != "steps"}
    federation = {"clients": 3, "rounds": 5}
    with pytest.raises(ConfigError, match="synthesis does not go with a federation"):
        settings_from({**BASE, "privacy": privacy, "federation": federation, "synthesis": {}})


def test_the_names_of_presets_are_those_of_the_table() -> None:
    assert list(get_args(Preset)) == list(PRESETS)
