"""The group ``synthesis``: what is refused, what errors keep to themselves, and what it must not share with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from privlora.config import Settings, load_settings, settings_from
from privlora.config.synthesis import _OF, Preset, SynthesisSettings
from privlora.errors import ConfigError
from privlora.synthesis.prompts import PRESETS

BASE: dict[str, Any] = {
    "model": {"name": "tiny"},
    "data": {"path": "notes.jsonl", "evaluation": "held_out.jsonl"},
    "privacy": {
        "target_epsilon": 3,
        "delta": 1e-5,
        "steps": 5,
        "expected_batch_size": 8,
        "public_dataset_size": 100,
    },
}


def of(**synthesis: Any) -> Settings:
    return settings_from({**BASE, "synthesis": synthesis})


def test_a_run_has_none_unless_it_says_so() -> None:
    assert settings_from(BASE).synthesis is None
    assert "synthesis" not in settings_from(BASE).to_yaml()
    default = of().synthesis
    assert default is not None
    assert (default.generator, default.seeds, default.variations) == ("model", 100, 1)
    assert (default.temperature, default.warm_start_epochs, default.evolve_every) == (1.0, 0, 1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"generator": "file", "file": ["a.jsonl", "b.csv"], "column": "body"},
        {
            "generator": "endpoint",
            "endpoint": "http://localhost:8000/v1",
            "endpoint_model": "m",
        },
        {"generator": "callable", "callable": "my.texts:writers.write"},
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
        ({"generator": "file"}, "generator=file needs file"),
        ({"generator": "endpoint", "endpoint": "http://a/v1"}, "needs endpoint_model"),
        ({"generator": "callable"}, "needs callable"),
        ({"generator": "endpoint"}, "add endpoint: http://localhost:8000/v1, and endpoint_model: "),
        (
            {"file": "a.jsonl"},
            "file is read for generator=file only, and generator is model unless it is set",
        ),
        (
            {"file": "a.jsonl", "column": "a"},
            "file and column are read for .*Fix: set generator to file, or remove",
        ),
        (
            {"generator": "file", "file": "a.jsonl", "preset": "text"},
            "preset is read for generator=model, endpoint or callable only, and generator is file. ",
        ),
        (
            {"generator": "file", "file": "a.jsonl", "temperature": 2.0},
            "temperature is read for generator=model",
        ),
        ({"generator": "callable", "callable": "a:b", "temperature": 0.5}, "temperature is read"),
        ({"preset": "text", "random_prompt": "a"}, "two kinds of text"),
        ({"warm_start_learning_rate": 0.1}, "goes with warm_start_epochs"),
        ({"preset": "text", "variation_prompt": "{text}"}, "variation_prompt goes with random_prompt"),
        ({"random_prompt": "a", "variation_prompt": "b {tone}"}, "no place for the text"),
        ({"random_prompt": "  "}, "it is empty"),
        ({"preset": "clinical-notes"}, "did you mean 'clinical-note'"),
        ({"generator": "modell"}, "did you mean 'model'"),
        (
            {"generator": "openai"},
            r"model, file \(with file\), endpoint \(with endpoint and endpoint_model\)",
        ),
        ({"generator": "my_texts:write"}, "generator to callable, and callable to it"),
        ({"generator": "public.jsonl"}, "generator to file, and file to that name"),
        ({"generator": 3}, "synthesis.generator=3"),
        ({"generator": None}, "synthesis.generator=None"),
        ({"generator": "callable", "callable": "a.py"}, "it is not module:name"),
        ({"seeds": 0}, "greater than or equal to 1"),
        ({"seeds": True}, "valid integer"),
        ({"variations": -1}, "greater than or equal to 0"),
        ({"temperature": 0}, "greater than 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"similarity_limit": 0}, "greater than 0"),
        ({"seed": 3}, "unknown setting"),
        ({"source": "runs/a"}, "source is read by privlora synthesize"),
        ({"source": "runs/a", "publish": False}, "give its folder with --from"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        of(**given)
    assert "Fix: " in str(refused.value)


def test_a_finished_run_is_a_source_of_published_texts_alone() -> None:
    found = of(publish=True, source="runs/a").synthesis
    assert found is not None
    assert (found.publish, found.source) == (True, "runs/a")


@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:8000/v1",
        "ftp://host/v1",
        "http:///v1",
        "http://host:99999/v1",
        " http://host/v1",
        "http://me:sesame@host/v1",
        "http://sesame@host/v1",
        "http://host/v1?key=sesame",
        "http://host/v1#sesame",
        "sesame",
    ],
)
def test_an_address_without_secrets_is_wanted(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"synthesis\.endpoint: it (is no address|holds more)") as refused:
        of(generator="endpoint", endpoint=endpoint, endpoint_model="m")
    assert "sesame" not in str(refused.value)


def test_an_address_in_the_place_of_a_generator_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="generator to endpoint, and endpoint to the address") as refused:
        of(generator="https://me:sesame@host/v1")
    assert "sesame" not in str(refused.value)


def test_a_key_in_the_place_of_its_variable_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="no name of an environment variable") as refused:
        of(generator="endpoint", endpoint="http://a/v1", endpoint_model="m", api_key_env="sk-sesame")
    assert "sesame" not in str(refused.value)


def test_public_texts_are_no_private_ones(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "notes.jsonl")
    data = {"path": str(tmp_path / "notes.jsonl"), "evaluation": "held_out.jsonl"}
    for file, words in [
        ([str(tmp_path / "link.jsonl")], "which is private"),
        ("./held_out.jsonl", "also data.evaluation"),
    ]:
        with pytest.raises(ConfigError, match=words):
            settings_from({**BASE, "data": data, "synthesis": {"generator": "file", "file": file}})


def test_a_record_in_the_place_of_a_file_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"synthesis\.file") as refused:
        of(generator="file", file=4711)  # a number that would be shown as the value of another setting
    assert "4711" not in str(refused.value)


def test_a_federation_has_no_public_texts() -> None:
    privacy = {k: v for k, v in BASE["privacy"].items() if k != "steps"}
    federation = {"clients": 3, "rounds": 5}
    with pytest.raises(ConfigError, match="synthesis does not go with a federation"):
        settings_from({**BASE, "privacy": privacy, "federation": federation, "synthesis": {}})


def test_the_names_of_presets_are_those_of_the_table() -> None:
    assert list(get_args(Preset)) == list(PRESETS)


def test_the_table_of_readers_names_settings() -> None:
    assert _OF.keys() <= SynthesisSettings.model_fields.keys()
