"""Every setting has a kind and a meaning; the pages and the schema that are made of them are those of the source."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from privlora.config import Settings, settings_from
from privlora.config.reference import find_settings, groups, purpose
from privlora.config.schema import schema, written
from privlora.errors import ConfigError

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


class Yaml12(yaml.SafeLoader):
    """As editors read YAML, where 1e-5 is a number."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "list_settings", raising=False)
    import list_settings

    return list_settings


@pytest.fixture(scope="module")
def validator() -> Any:
    kind = jsonschema.Draft202012Validator
    kind.check_schema(schema())
    return kind(schema())


def test_every_setting_has_words() -> None:
    found = find_settings()
    assert len(found) > 120
    assert [each.place for each in found if not each.meaning or not each.kind] == []
    assert {each.place.partition(".")[0] for each in found} == set(groups()) == set(Settings.model_fields)
    assert all(purpose(kind) for kind in groups().values())


def test_a_group_a_setting_and_what_there_is_not() -> None:
    assert {each.place.partition(".")[0] for each in find_settings("privacy")} == {"privacy"}
    assert [each.place for each in find_settings("privacy.delta")] == ["privacy.delta"]
    assert [each.place for each in find_settings("delta")] == ["privacy.delta"]
    for place, words in {
        "privacy.stepss": "did you mean 'privacy.steps'?",
        "no such": "no setting has all",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            find_settings(place)


def test_settings_are_found_by_words_of_what_they_mean() -> None:
    assert [each.place for each in find_settings("gradient checkpointing")] == [
        "model.gradient_checkpointing"
    ]
    for words in ("held-out", "held out", "Out held"):
        found = {each.place for each in find_settings(words)}
        assert "data.evaluation" in found
        assert len(found) < 10


def test_pages_are_those_of_the_source(pages: ModuleType) -> None:
    again = "run: python docs/list_settings.py"
    assert pages.SETTINGS.read_text(encoding="utf-8") == pages.page(), again
    assert pages.SCHEMA.read_text(encoding="utf-8") == written(), again


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_schema_takes_every_recipe(config: Path, validator: Any) -> None:
    content = yaml.load(config.read_text(encoding="utf-8"), Loader=Yaml12)
    assert [error.message for error in validator.iter_errors(content)] == []


def test_the_schema_takes_what_a_run_writes(validator: Any) -> None:
    content = yaml.safe_load(CONFIGS[0].read_text(encoding="utf-8"))
    written_down = yaml.load(settings_from(content).to_yaml(), Loader=Yaml12)
    assert [error.message for error in validator.iter_errors(written_down)] == []


def test_the_schema_refuses_what_no_run_has(validator: Any) -> None:
    good = yaml.load((ROOT / "configs/prism.yaml").read_text(encoding="utf-8"), Loader=Yaml12)
    for group, name, value in (
        ("privacy", "max_grad_norm", 1),
        ("privacy", "steps", 0),
        ("training", "x", 1),
    ):
        wrong = {**good, group: {**good.get(group, {}), name: value}}
        assert list(validator.iter_errors(wrong)), (group, name)
    del good["privacy"]["steps"]
    assert list(validator.iter_errors(good))


def test_each_part_of_the_schema_is_described() -> None:
    content = json.loads(written())
    for part in content["$defs"].values():
        assert part["description"]
        assert all(each.get("description") for each in part["properties"].values())
