"""Settings: precedence, conversion, what follows from them, and what is refused without a command line."""

from __future__ import annotations

import pickle
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, field_validator

from privlora.config import (
    IN_MEMORY,
    DataSettings,
    PrivacySettings,
    Settings,
    checked,
    load_settings,
    methods,
    mistakes,
    names,
    read_yaml,
    settings_from,
)
from privlora.config.base import group_in
from privlora.config.names import meant, settings_by_group
from privlora.errors import ConfigError, DataError, in_one, named

GOOD: dict[str, dict[str, Any]] = {
    "model": {"name": "org/model"},
    "data": {"path": "notes.txt"},
    "privacy": {
        "target_epsilon": 3,
        "delta": "1e-5",  # as PyYAML reads 1e-5
        "steps": 100,
        "expected_batch_size": 64,
        "public_dataset_size": 10_000,
    },
}


def test_numbers_in_scientific_notation(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(settings_from(GOOD).to_yaml().replace("delta: 1.0e-05", "delta: 1e-5"))
    assert "delta: 1e-5" in config.read_text()
    assert load_settings(config).privacy.delta == 1e-5
    assert load_settings(config, ["privacy.delta=1e-6"]).privacy.delta == 1e-6


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    settings = settings_from(GOOD, ["method.learning_rate=2e-4", "data.text='{a}: {b}'", "run.label='2024'"])
    (tmp_path / "run.yaml").write_text(settings.to_yaml())
    assert load_settings(tmp_path / "run.yaml") == settings
    assert settings.data.text == "{a}: {b}"
    assert settings.run.label == "2024"


def test_the_command_line_comes_after_the_file_and_the_last_wins() -> None:
    settings = settings_from(
        GOOD, ["privacy.steps=7", "privacy.steps=9", "adapter.target_modules=[q_proj, v_proj]"]
    )
    assert settings.privacy.steps == 9
    assert settings.adapter.target_modules == ["q_proj", "v_proj"]
    assert GOOD["privacy"]["steps"] == 100


def test_null_takes_a_setting_back() -> None:
    overrides = ["privacy.target_epsilon=null", "privacy.noise_multiplier=0.8"]
    assert settings_from(GOOD, overrides).privacy.noise_multiplier == 0.8


@pytest.mark.parametrize(
    "two",
    [
        {"expected_batch_size": 64, "public_dataset_size": 10_000},
        {"expected_batch_size": 64, "sample_rate": 0.0064},
        {"sample_rate": 0.0064, "public_dataset_size": 10_000},
    ],
)
def test_rate_and_batch_follow_from_two_of_three(two: dict[str, float]) -> None:
    privacy = PrivacySettings(noise_multiplier=1, delta=1e-5, steps=1, **two)
    assert (privacy.q, privacy.b) == pytest.approx((0.0064, 64))


def test_columns_are_those_of_a_template() -> None:
    named = {"text": None, "prompt": None, "completion": None, "messages": None}
    assert DataSettings(path="x").columns == {**named, "text": "text"}
    assert DataSettings(path="x", messages="chat").columns == {**named, "messages": "chat"}


def test_the_private_records_are_not_for_evaluation(tmp_path: Path) -> None:
    for evaluation in ("notes.txt", ["other.txt", "./notes.txt"], str(Path("notes.txt").resolve())):
        with pytest.raises(ConfigError, match="which is private"):
            checked(DataSettings, {"path": ["a.txt", "notes.txt"], "evaluation": evaluation}, "test")
    both_given = DataSettings(path=IN_MEMORY, evaluation=IN_MEMORY)  # a caller's two lists
    assert both_given.evaluation == IN_MEMORY


def test_no_file_of_private_records_is_named_twice(tmp_path: Path) -> None:
    """Each of its records would be two units, and the stated epsilon hold for one of them."""
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    for other in ("a.jsonl", "./a.jsonl", "b.jsonl"):
        with pytest.raises(ConfigError, match="twice: each record would be two units"):
            checked(DataSettings, {"path": [str(tmp_path / "a.jsonl"), f"{tmp_path}/{other}"]}, "test")


@pytest.mark.parametrize("name", ["clip_norm", "steps", "noise_multiplier", "max_batch_size"])
def test_a_truth_value_is_no_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=true: input should be a valid ") as told:
        settings_from({**GOOD, "privacy": {**GOOD["privacy"], name: True}})
    assert "YAML" not in str(told.value)  # which nobody wrote


def test_a_word_that_was_typed_is_shown_and_one_of_a_file_is_not(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(settings_from(GOOD).to_yaml().replace("seed: 0", "seed: Lovelace"))
    asked = ["privacy.steps=ten", "method.name=adamm", "run.log_every=78051120x", "privacy.unit=two words"]
    with pytest.raises(ConfigError) as caught:
        load_settings(config, [*asked, "data.evaluation=7", "synthesis.api_key_variable=7"])
    told = str(caught.value)
    for words in ("privacy.steps='ten'", "unknown method 'adamm'", "run.log_every='78051120x'"):
        assert words in told
    assert not re.search("Lovelace|two words|evaluation=7|variable=7", told)
    with pytest.raises(ConfigError, match="not shown"):  # what was typed once is forgotten
        settings_from({**GOOD, "privacy": {**GOOD["privacy"], "steps": "ten"}})


def test_settings_cannot_be_changed_afterwards() -> None:
    settings: Any = settings_from(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        settings.privacy.clip_norm = 100.0


PUBLIC = ["adapter.init=public-gradient", "data.evaluation=held_out.txt"]
QUANTILE = "privacy.clip_quantile=0.5"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.init=public-gradient"], "needs public_text"),
        (["adapter.public_text=public.txt"], "public_text is read for init=public-gradient only"),
        ([*PUBLIC, "adapter.public_text=[more.txt, ./notes.txt]"], "notes.txt', which is private"),
        ([*PUBLIC, "adapter.public_text=held_out.txt"], "which is also data.evaluation"),
        (["privacy.clip_quantile=1"], "clip_quantile=1"),
        ([QUANTILE, "method.clipping=automatic"], "there is none to adapt"),
        ([QUANTILE, "privacy.private=false", "privacy.target_epsilon=null"], "remove clip_quantile"),
        (["data.path=[]"], "path names no file"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings_from(GOOD, overrides)


def test_a_start_from_public_text_survives_its_file(tmp_path: Path) -> None:
    settings = settings_from(GOOD, ["adapter.init=public-gradient", "adapter.public_text=public.txt"])
    (tmp_path / "run.yaml").write_text(settings.to_yaml())
    assert load_settings(tmp_path / "run.yaml") == settings
    back = load_settings(tmp_path / "run.yaml", ["adapter.init=random", "adapter.public_text=null"])
    assert back.adapter.public_text is None


def test_tokens_of_a_micro_batch_are_a_number_or_auto() -> None:
    for given, number in (("auto", 4096), (70, 70), ("70", 70)):
        run = settings_from({**GOOD, "run": {"tokens_per_micro_batch": given}}, source="test").run
        assert run.max_tokens == number
        assert run.tokens_per_micro_batch == (given if given == "auto" else number)
    for bad in (0, "large", 2.5, None):
        with pytest.raises(ConfigError, match="tokens_per_micro_batch"):
            settings_from({**GOOD, "run": {"tokens_per_micro_batch": bad}}, source="test")


def without(*names: str) -> dict[str, dict[str, Any]]:
    return {
        group: {name: value for name, value in values.items() if f"{group}.{name}" not in names}
        for group, values in GOOD.items()
    }


def test_what_the_promise_lacks_is_told_at_once() -> None:
    left_out = ("target_epsilon", "steps", "expected_batch_size", "public_dataset_size")
    content = without(*(f"privacy.{name}" for name in left_out))
    content["privacy"]["stepz"] = 5  # whose mistake is another one
    with pytest.raises(ConfigError) as caught:
        settings_from(content)
    told = str(caught.value)
    assert "unknown setting 'privacy.stepz'" in told
    assert "steps is missing" not in told
    assert all(name in told for name in ("target_epsilon", *left_out[2:]))


def test_a_run_that_protects_nobody_lacks_no_epsilon() -> None:
    content = without("privacy.target_epsilon", "privacy.delta", "privacy.steps", "model.name")
    content["privacy"]["private"] = False
    with pytest.raises(ConfigError) as caught:
        settings_from(content)
    assert [part.what for part in caught.value.parts] == ["model.name is missing", "privacy.steps is missing"]


def test_a_name_that_only_the_table_knows_is_left_to_it() -> None:
    assert settings_from({**GOOD, "method": {"name": "prsm"}}).method.name == "prsm"


@pytest.mark.parametrize(
    ("group", "name", "place"),
    [
        ("privacy", "max_grad_norm", "privacy.clip_norm"),
        ("", "num_train_epochs", "privacy.steps"),
        ("", "model_name_or_path", "model.name"),
        ("privacy", "target_epislon", "privacy.target_epsilon"),
        ("run", "learning_rat", "method.learning_rate"),
        ("federation.clients", "pth", "federation.clients.path"),
        ("privacy", "insecure_noise_sed", None),  # nobody is led to noise that is none
        ("data", "packing", None),
    ],
)
def test_names_and_what_is_meant_by_them(group: str, name: str, place: str | None) -> None:
    assert meant(name, group).place == place


def test_names_of_other_tools_lead_to_settings_that_there_are() -> None:
    """And values of theirs to settings, so that no table grows old."""
    every = {f"{group}.{name}" for group, names in settings_by_group().items() for name in names}
    assert every >= {*names._HERE.values(), *names._NOTES, *names.VALUES, *mistakes._EXAMPLES}


def test_the_table_says_of_each_method_what_its_classes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from privlora.methods import METHODS, SPACES, VOTE_METHODS

    assert SPACES.keys() == methods.SPACES.keys()
    for row in (*METHODS.values(), *VOTE_METHODS.values()):
        facts = methods.MethodFacts(**vars(row))
        assert (facts.has_weight_unit, facts.weighed) == (row.has_weight_unit, row.weighed)
        for optimizer in row.optimizers:
            assert facts.settings_of(optimizer) == row.settings_of(optimizer)
    assert set(methods.CLIPPINGS) >= {each for row in METHODS.values() for each in row.clippings}
    monkeypatch.setitem(METHODS, "prsm", METHODS["prism"])  # a method of one's own
    assert "prsm" in methods.known_methods()
    with pytest.raises(ConfigError, match=r"^settings: privacy: delta is missing\. "):
        settings_from({**without("privacy.delta"), "method": {"name": "prsm"}})


PROMISE = """privacy:
  target_epsilon: 3
  delta: 1e-5
  steps: 10
  expected_batch_size: 4
  public_dataset_size: 100
"""


def test_all_wrong_values_are_told_at_once_with_where_they_stand(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    wrong = PROMISE.replace("delta: 1e-5", "delta: 2").replace("steps: 10", "steps: 2.5\n  stepz: 1")
    config.write_text(f"model: {{name: m, dropout: maybe}}\n{wrong}")
    with pytest.raises(ConfigError) as caught:
        load_settings(config, ["method.warmup_steps=1,5", "run.sed=3"])
    assert caught.value.whom == str(config)
    starts = (
        "model.dropout=(text, not shown: it may be private) (line 1): ",
        "privacy.delta=2 (line 4): ",
        "privacy.steps=2.5 (line 5): ",
        "unknown setting 'privacy.stepz' (line 6)",
        "method.warmup_steps='1,5' (on the command line): ",
        "unknown setting 'run.sed' (on the command line)",
        "data is missing",
    )
    told = [part.what for part in caught.value.parts]
    assert len(told) == len(starts)
    assert all(any(what.startswith(start) for what in told) for start in starts), told


def told_by(path: Path, content: str) -> ConfigError:
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    return caught.value


def test_what_a_wrong_value_leads_to_is_no_mistake(tmp_path: Path) -> None:
    """What is taken out to look at the rest lacks nowhere, and contradicts nothing."""
    rest = PROMISE + "model: {name: m}\n"
    for more in (
        "data: {path: a, prompt: '{{q}}', completion: b}",
        "data: {path: a, chosen: '{{q}}', rejected: b, prompt: c}",
        "data: {path: a}\nauto: {file: b}\nmethod: {learning_rate: fast}",
        "data: {path: a}\nadapter: {init: 5, public_text: b}",
    ):
        assert len(told_by(tmp_path / "a.yaml", f"{rest}{more}\n").fixes) == 1, more
    wrong = (
        rest.replace("steps: 10", "steps: ten\n  bands: 3") + "data: {path: a}\nmethod: {warmup_steps: 5}\n"
    )
    assert told_by(tmp_path / "a.yaml", wrong).fixes == ("as steps: 200, or auto",)


@pytest.mark.parametrize("group", ["adapter", "privacy", "method", "run", "federation", "auto"])
def test_a_word_in_the_place_of_a_group_is_not_shown(group: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from({**GOOD, group: "sk-live-9fQ"})
    assert "sk-live" not in str(caught.value)


def test_numbers_of_files_and_words_of_quantization_are_not_shown() -> None:
    for overrides, of_model in ((["data.path=78051120"], {}), ([], {"quantization": "Lovelace"})):
        with pytest.raises(ConfigError) as caught:
            settings_from({**GOOD, "model": {**GOOD["model"], **of_model}}, overrides)
        assert not re.search("78051120|Lovelace", str(caught.value))


@pytest.mark.parametrize("record", ["Lovelace", "4815 16 23", "http://bob:s3cret@host/v1"])
def test_a_record_in_the_place_of_data_is_not_shown(record: str) -> None:
    for content, overrides in (({**GOOD, "data": record}, []), (GOOD, [f"data={record}"])):
        with pytest.raises(ConfigError) as caught:
            settings_from(content, overrides)
        told = str(caught.value).replace(f"cannot read override {named(f'data={record}')}", "")
        assert record not in told


def test_settings_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(PROMISE + "model: {name: m}\ndata: {path: a}\n")
    settings = load_settings(path, ["run.seed=3"])
    copy = settings.located().model_copy()
    for found in (settings, copy, pickle.loads(pickle.dumps(settings))):  # noqa: S301 - as processes of a run do
        assert (
            str(found.placed(DataError("no", fix="yes"), "model.name")) == "model.name (line 7): no. Fix: yes"
        )
        assert str(found.placed(DataError("no"), "run.seed")) == "run.seed (on the command line): no"
    # Where they stood is no part of what they are.
    same = settings_from({**read_yaml(path), "run": {"seed": 3}})
    assert same == settings
    assert same.to_yaml() == settings.to_yaml()
    assert str(same.placed(DataError("no"), "model.name")) == "no"


WORDS = ("Lovelace-HIV-positive", "4815 16 23")


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("group", Settings.model_fields)
def test_values_of_misspelt_settings_are_not_shown(group: str, word: str) -> None:
    """They may be keys of services, or records: only numbers, truths and the setting's own words are shown again."""
    kind = group_in(Settings.model_fields[group].annotation)
    for name in kind.model_fields:
        wrong = name[:-1] if len(name) > 3 else f"{name}x"
        if wrong in kind.model_fields:
            continue
        base = {**GOOD, group: {**GOOD.get(group, {}), wrong: word}}
        for content, overrides in ((base, []), (GOOD, [f"{group}.{wrong}={word}"])):
            with pytest.raises(ConfigError) as caught:
                settings_from(content, overrides)
            assert word not in str(caught.value), wrong


def test_what_a_conversion_says_of_a_value_is_not_repeated() -> None:
    class Odd(BaseModel):
        number: int

        @field_validator("number", mode="before")
        @classmethod
        def _read(cls, given: str) -> int:
            return int(given)  # whose error quotes what it was given

    with pytest.raises(ConfigError, match=r"^odd: number is no value for it$"):
        checked(Odd, {"number": "Lovelace"}, "odd")


def told_of(content: dict[str, Any]) -> ConfigError | None:
    try:
        settings_from(content)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("group", list(Settings.model_fields))
def test_each_wrong_value_is_told_with_its_place_and_what_would_do(group: str) -> None:
    kind = group_in(Settings.model_fields[group].annotation)
    values = ("abc", "1,5", [], {"a": 1}, [None], 2.5, -1, 1e9, float("nan"), True, None)
    for name, value in product(kind.model_fields, values):
        own = GOOD.get(group, {})
        error = told_of({**GOOD, group: {**own, name: value}})
        if error is None:
            continue
        told = str(error)
        assert group in told
        assert "Value error" not in told
        assert error.fixes, told
        example = re.search(r" as (\w+): ([\w.-]+)(, or auto)?$", told)
        if example is not None:  # what is advised is taken
            assert example[1] == name
            again = told_of({**GOOD, group: {**own, name: yaml.safe_load(example[2])}})
            assert not str(again).startswith(f"settings: {group}.{name}="), again


def test_several_mistakes_stay_a_list_of_whom_they_are() -> None:
    whys = {"a": "it leaks", "b": "it leaks", "c": "it is odd"}
    several = in_one([ConfigError(f"{name} is 0", why=why, fix=f"{name}: 1") for name, why in whys.items()])
    told = several.of("run.yaml")
    assert type(told) is ConfigError
    assert told.lines() == str(told).splitlines()
    assert told.lines() == [
        "run.yaml: 3 mistakes:",
        "  - a is 0. It leaks. Fix: a: 1",
        "  - b is 0. It leaks. Fix: b: 1",
        "  - c is 0. It is odd. Fix: c: 1",
    ]
    other = in_one([told, DataError("there is no file")])  # whose are all that it holds
    assert [part.what for part in other.parts][-2:] == ["run.yaml: c is 0", "there is no file"]


def test_home_is_known_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {
        "model.name": "~/model",
        "data.path": "[~/a.jsonl, b.jsonl]",
        "data.evaluation": "~/c.jsonl",
        "run.output": "~/runs/x",
        "adapter.init": "~/adapter",
        "auto.file": "~/d.jsonl",
    }
    other = ["method.learning_rate=auto", "data.text='~/{a}'"]
    found = settings_from(GOOD, [*other, *(f"{place}={path}" for place, path in paths.items())])
    for place, path in paths.items():
        group, name = place.split(".")
        wanted = path.replace("~", str(tmp_path))
        assert getattr(getattr(found, group), name) == yaml.safe_load(wanted)
    assert found.data.text == "~/{a}"


def test_labels_that_yaml_takes_for_truths_are_mended_by_quotes(tmp_path: Path) -> None:
    def read(labels: str) -> str:
        path = tmp_path / "a.yaml"
        path.write_text(f"{PROMISE}model: {{name: m}}\ndata: {{path: a.jsonl, label: y, labels: {labels}}}\n")
        return str(load_settings(path).data.labels)

    with pytest.raises(ConfigError, match="YAML reads yes, no, on and off as true and false"):
        read("[yes, no]")
    assert read('["yes", "no"]') == "['yes', 'no']"
    assert read("{0: negative, 1: positive}") == "{0: 'negative', 1: 'positive'}"


@pytest.mark.parametrize(
    "given",
    [
        {"run": {"label": "a\ud800"}},
        {"data": {"chat_template_kwargs": {"level": "\udc00"}}},
        {"data": {"labels": {"0": "\ud800", "1": "b"}}},
        {"adapter": {"target_modules": ["q_proj", "\ud800"]}},
    ],
)
def test_half_a_character_is_refused_before_anything_is_charged(given: dict[str, Any]) -> None:
    """No file can hold it, so a run would end when it writes its report."""
    with pytest.raises(ConfigError, match="holds half of a character"):
        settings_from({**GOOD, **{g: {**GOOD.get(g, {}), **own} for g, own in given.items()}})
