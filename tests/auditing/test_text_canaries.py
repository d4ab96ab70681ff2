"""Planted texts: what each kind holds, what of it is scored, and that nothing of it comes from the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_cases import read_state
from cli_cases import call, run_settings, save_tiny_model, write_config, write_records
from run_cases import StopAt
from test_canary_run import RECORDS, audited
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.auditing.canary_scores import CanaryState
from privlora.auditing.exposure import exposure_of_scores
from privlora.auditing.page import write_audit
from privlora.auditing.text_canaries import (
    TEXT_CANARIES,
    _first_new_token,
    _new_tokens,
    _usable_tokens,
    continued,
    record_losses,
    room_for,
    text_canaries,
)
from privlora.data.examples import IGNORED, Examples
from privlora.errors import ConfigError, DataError, ModelError, PrivacyError, RunError
from privlora.mechanisms import NoiseSource
from privlora.training.files import AUDIT_MARK
from privlora.training.loop import Interrupted

WRITTEN = ["sampled", "prefix-suffix", "new-token"]


def drawn(kind: str, count: int = 6, length: int = 12, *, seed: int = 3, **given: Any) -> Any:
    model = given.pop("model", None) or tiny_model()
    return text_canaries(kind, count, length, tiny_tokenizer(), seed, model=model, **given)


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_canary_is_a_function_of_its_seed_and_others_differ(kind: str) -> None:
    first, again, other = drawn(kind), drawn(kind), drawn(kind, seed=4)
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(first, again, strict=True))
    assert any((a.input_ids != b.input_ids).any() for a, b in zip(first, other, strict=True))
    assert len({tuple(each.input_ids) for each in first}) == len(first)
    for canary in first:  # as texts begin, and without special tokens
        assert canary.input_ids[0] == tiny_tokenizer().bos_token_id
        assert not set(canary.input_ids[1:].tolist()) & set(tiny_tokenizer().all_special_ids)


@pytest.mark.parametrize(("kind", "secret"), [("sampled", 12), ("prefix-suffix", 6), ("new-token", 1)])
def test_the_scored_tokens_are_the_secret(kind: str, secret: int) -> None:
    """Whatever the model says of the prefix is no part of the score: it is the loss on the secret alone."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    canaries = drawn(kind, model=model)
    with room_for(kind, model, tokenizer, len(canaries), 3):
        losses = record_losses(model, Examples(canaries, pad_token_id=0))
        for canary, loss in zip(canaries, losses, strict=True):
            labelled = np.flatnonzero(canary.labels != IGNORED)
            size = len(canary.input_ids)
            assert labelled.tolist() == list(range(size - secret, size))
            assert (canary.labels[labelled] == canary.input_ids[labelled]).all()
            ids = torch.from_numpy(canary.input_ids.astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            by_hand = -logits[torch.arange(size - 1), ids[1:]][-secret:].mean().detach()
            assert loss == pytest.approx(float(by_hand), abs=1e-5)


def test_a_temperature_makes_written_text_less_likely() -> None:
    """Losses of the base model on what it wrote itself: at a low temperature, its own, and nearly uniform."""
    model = tiny_model()

    def loss(kind: str, temperature: float | None) -> float:
        texts = drawn(kind, 40, model=model, temperature=temperature)
        return float(record_losses(model, Examples(texts, pad_token_id=0)).mean())

    assert loss("sampled", 0.3) < loss("sampled", None) < loss("sampled", 50.0)
    assert loss("prefix-suffix", 0.3) < loss("prefix-suffix", 50.0)
    assert loss("prefix-suffix", 50.0) == pytest.approx(loss("prefix-suffix", None), rel=0.15)


def test_what_is_written_follows_the_models_own_probabilities() -> None:
    """One token behind one start, 4,000 times: its frequencies are the model's probabilities."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    start = tokenizer.bos_token_id
    assert start is not None
    found = [each.input_ids[1] for each in drawn("sampled", 4000, 2, model=model)]
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    logits = model(input_ids=torch.tensor([[start]])).logits[0, -1, ordinary]
    expected = logits.double().softmax(-1).detach().numpy()
    counts = np.array([found.count(token) for token in ordinary])
    # 5 standard deviations of each count, and one more
    assert (np.abs(counts - 4000 * expected) <= 5 * np.sqrt(4000 * expected) + 1).all()


def test_a_new_token_is_in_no_record_and_each_canary_has_its_own() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    first = _first_new_token(model, tokenizer)
    known = len(model.get_input_embeddings().weight)
    assert first >= known > max(tokenizer.get_vocab().values())
    secrets = [canary.input_ids[-1] for canary in drawn("new-token", model=model)]
    assert secrets == list(range(first, first + 6))
    for canary in drawn("new-token", model=model):
        assert (canary.input_ids[:-1] < known).all()


def test_rows_of_new_tokens_follow_from_the_seed() -> None:
    """A resumed audit finds the model that it began with."""

    def found(seed: int) -> torch.Tensor:
        model = tiny_model()
        with _new_tokens(model, tiny_tokenizer(), 3, seed):
            return model.get_input_embeddings().weight[-3:].detach().clone()

    torch.testing.assert_close(found(1), found(1), rtol=0, atol=0)
    assert not torch.equal(found(1), found(2))


class MoreThanTheModel:
    """A tokenizer with tokens that were added behind the model's vocabulary."""

    all_special_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 3

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1, "added": 500}


def test_ids_that_a_tokenizer_may_give_are_left_to_it() -> None:
    assert _first_new_token(tiny_model(), MoreThanTheModel()) == 501


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "phi", "gemma3"])
def test_new_tokens_leave_the_logits_of_all_others_and_the_model_as_they_were(family: str) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    ids = torch.tensor([[1, 5, 9, 14]])
    weights = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    before, first = model(input_ids=ids).logits, _first_new_token(model, tokenizer)
    with _new_tokens(model, tokenizer, 5, seed=1):
        inside = model(input_ids=ids).logits
        assert inside.shape[-1] == first + 5
        torch.testing.assert_close(inside[..., : before.shape[-1]], before)
        assert len({*inside[0, -1, first:].tolist()}) == 5  # each has a row of its own
        model(input_ids=torch.tensor([[1, first + 4]]))
        if family == "llama-tied":
            assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {name: p for name, (p, _) in weights.items()} == dict(model.named_parameters())
    for p, value in weights.values():
        assert torch.equal(p, value)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_failure_inside_gives_the_model_back_too() -> None:
    model = tiny_model()
    before = len(model.lm_head.weight)
    with pytest.raises(KeyError), _new_tokens(model, tiny_tokenizer(), 5, seed=1):
        raise KeyError
    assert len(model.lm_head.weight) == before


def test_a_model_without_plain_tables_can_have_no_new_tokens() -> None:
    with pytest.raises(ModelError, match="can have no new tokens"):
        _first_new_token(torch.nn.Linear(2, 2), tiny_tokenizer())
    uneven = tiny_model()
    uneven.lm_head = torch.nn.Linear(16, 9)
    with pytest.raises(ModelError, match="can have no new tokens"):
        drawn("new-token", model=uneven)


@pytest.mark.parametrize("kind", [*WRITTEN, "random-tokens", "codes"])
def test_an_audit_scores_them_and_nothing_looks_like_a_release(kind: str, tmp_path: Path) -> None:
    found = audited(tmp_path / "a", kind=kind, steps=2)
    assert np.abs(read_state(tmp_path / "a").scores).max() > 0
    assert {path.name for path in (tmp_path / "a/release").iterdir()} == {AUDIT_MARK, "ledger.jsonl"}
    planted = {"kind": kind, "temperature": None, "public_prefixes": False}
    page, series = write_audit(
        found, tmp_path / "a", **planted, **exposure_of_scores(*found.scores).to_dict()
    )
    content = json.loads(series.read_text())
    assert content["kind"] == kind
    assert 0 <= content["exposure"] <= content["ceiling"]
    assert page.parent.name == "private"
    assert "<svg" in page.read_text()
    assert f"canaries ({kind})" in page.read_text()


def test_without_noise_a_new_token_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secrets that were trained on, and no others, become likelier."""
    draw = NoiseSource.standard_normal
    monkeypatch.setattr(NoiseSource, "standard_normal", lambda self, shape: draw(self, shape) * 1e-3)
    # Half are in and every batch holds all: chance alone gave 0.59 once where both were drawn.
    monkeypatch.setattr(
        CanaryState, "draw", lambda canaries: CanaryState(7, np.arange(canaries) % 2 == 0, np.zeros(canaries))
    )
    all_drawn = {"expected_batch_size": 40, "public_dataset_size": 40}
    found = audited(tmp_path / "a", canaries=20, kind="new-token", rate=0.02, steps=30, **all_drawn)
    assert found.area > 0.7  # 0.86 to 0.96 in fifteen such audits


@pytest.mark.parametrize("kind", WRITTEN)
def test_canaries_do_not_depend_on_the_records(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is audited were another mechanism: one that shows the records in what it is attacked with."""
    monkeypatch.setattr(
        CanaryState, "draw", lambda canaries: CanaryState(7, np.arange(canaries) % 2 == 0, np.zeros(canaries))
    )
    for name, records in (("a", RECORDS), ("b", [{"text": f"no {n} such words"} for n in range(20)])):
        audited(tmp_path / name, canaries=20, kind=kind, steps=1, records=records)
    planted = [(tmp_path / name / "private/canaries.json").read_text() for name in ("a", "b")]
    assert planted[0] == planted[1]


def test_who_is_in_is_drawn_by_the_operating_system() -> None:
    drawn = []
    for _ in range(2):
        np.random.seed(0)
        torch.manual_seed(0)
        drawn.append(CanaryState.draw(200))
    assert (drawn[0].included != drawn[1].included).any()
    assert drawn[0].seed != drawn[1].seed
    assert 60 < drawn[0].included.sum() < 140


def test_an_audit_goes_on_with_the_texts_that_it_planted(tmp_path: Path) -> None:
    """They are kept: another processor might round to other words."""
    first = audited(tmp_path / "a", kind="sampled", steps=1)
    kept = tmp_path / "a/private/canaries.json"
    before = kept.read_bytes()
    assert audited(tmp_path / "a", kind="sampled", steps=1).area == first.area
    assert kept.read_bytes() == before
    kept.write_text("nonsense")
    with pytest.raises(RunError, match="cannot be read"):
        audited(tmp_path / "a", kind="sampled", steps=1)


def test_an_interrupted_audit_goes_on_with_its_new_tokens(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        audited(tmp_path / "a", kind="new-token", observer=StopAt(2))
    assert read_state(tmp_path / "a").releases == 0  # nothing is scored before the end
    audited(tmp_path / "a", kind="new-token")
    assert read_state(tmp_path / "a").releases == 3
    assert read_ledger(tmp_path / "a/release/ledger.jsonl").charges == 3


def test_texts_of_an_audit_that_charged_nothing_are_forgotten_with_it(tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunError("the device is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.training.loop.build_step", fail)
        with pytest.raises(RunError, match="the device is gone"):
            audited(tmp_path / "a", kind="sampled")
    before = (tmp_path / "a/private/canaries.json").read_text()
    audited(tmp_path / "a", kind="sampled", steps=2)
    assert (tmp_path / "a/private/canaries.json").read_text() != before


def test_another_temperature_is_another_audit(tmp_path: Path) -> None:
    audited(tmp_path / "a", canaries=20, kind="sampled", steps=1, temperature=2.0)
    with pytest.raises(RunError, match="another run"):
        audited(tmp_path / "a", canaries=20, kind="sampled", steps=1)
    assert "sampled at temperature 2" in (tmp_path / "a/release" / AUDIT_MARK).read_text()


@pytest.mark.parametrize("kind", ["prefix-suffix", "new-token"])
def test_prefixes_are_the_beginnings_of_public_records_each_as_often_as_any(kind: str) -> None:
    public = [np.arange(5, 5 + length) for length in (4, 6, 9, 30)]  # the first is shorter than a prefix
    canaries = drawn(kind, 12, public=public)
    found = [tuple(each.input_ids[:6].tolist()) for each in canaries]
    assert found == [tuple(range(5, 11))] * 12
    other = [np.arange(first, first + 8) for first in (5, 9, 13)]
    firsts = [int(each.input_ids[0]) for each in drawn(kind, 12, public=other)]
    assert sorted(firsts) == [5] * 4 + [9] * 4 + [13] * 4
    with pytest.raises(ConfigError, match="no public record has the 6 tokens"):
        drawn(kind, public=public[:1])


def test_canaries_behind_public_records_are_an_audit_of_their_own(tmp_path: Path) -> None:
    def go(public: Any) -> None:
        audited(tmp_path / "a", canaries=20, kind="prefix-suffix", steps=1, prefixes=public)

    texts = [
        f"the {each} of this lies where anybody may read it, and says little" for each in ("door", "roof")
    ]
    with pytest.raises(ConfigError, match="no public record has"):
        go([{"text": "short"}])
    go([{"text": text} for text in texts])  # which is mended in the same folder
    kept = json.loads((tmp_path / "a/private/canaries.json").read_text())
    tokens = [tiny_tokenizer()(text)["input_ids"] for text in texts]
    prefix = kept[0]["labels"].count(IGNORED)
    assert {tuple(each["input_ids"][:prefix]) for each in kept} == {tuple(ids[:prefix]) for ids in tokens}
    go([{"text": text} for text in texts])
    for others in (None, [{"text": texts[0]}]):
        with pytest.raises(RunError, match="another run"):
            go(others)
    with pytest.raises(PrivacyError, match="records of --prefixes are private ones"):
        go([RECORDS[0]])


def test_temperatures_that_mean_nothing_are_refused() -> None:
    for kind in TEXT_CANARIES:
        if kind not in ("sampled", "prefix-suffix"):
            with pytest.raises(ConfigError, match="does not go with canaries of the kind"):
                drawn(kind, temperature=1.0)
    for temperature in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ConfigError, match="out of range"):
            drawn("sampled", temperature=temperature)


def test_a_model_that_counts_no_numbers_writes_nothing() -> None:
    model = tiny_model()
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="can write no canaries"):
        drawn("sampled", model=model)


def test_tokens_that_the_model_does_not_know_are_in_no_canary() -> None:
    class Wider(MoreThanTheModel):
        def __len__(self) -> int:
            return 500

    model = tiny_model()
    assert _usable_tokens(Wider(), model).tolist() == list(range(len(model.lm_head.weight)))
    assert len(_usable_tokens(Wider(), None)) == 500


def test_rows_are_written_alike_in_one_batch_and_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, usable = np.array([[1], [5], [9]]), np.arange(3, 40)
    together = continued(tiny_model(), usable, rows, 8, lambda logits: logits.argmin(-1))
    monkeypatch.setattr("privlora.auditing.text_canaries._BATCH", 1)
    assert (continued(tiny_model(), usable, rows, 8, lambda logits: logits.argmin(-1)) == together).all()


def test_exposure_is_the_rank_among_those_that_were_not_in() -> None:
    found = exposure_of_scores(np.array([5.0, 2.0, 0.0]), np.array([1.0, 2.0, 3.0]))
    assert list(found.ranks) == [1, 3, 4]  # equal scores count against the secret
    assert list(found.exposures) == pytest.approx([2.0, np.log2(4 / 3), 0.0])
    with pytest.raises(DataError, match="no canary to rank"):
        exposure_of_scores(np.zeros(0), np.ones(3))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    save_tiny_model(folder / "model")
    write_records(folder / "records.jsonl", 12)
    written = run_settings(folder / "model", folder)
    written["privacy"]["public_dataset_size"] = 12
    return write_config(folder, written)


def test_planted_texts_from_the_command_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["privacy.steps=1", "--canaries=20", "--kind=prefix-suffix", "--temperature=2"]
    outcome = call(capsys, "audit", config, "--one-run", *options, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["exposure"] <= outcome.json["ceiling"]
    assert "canaries (prefix-suffix, temperature 2)" in Path(outcome.json["page"]).read_text()
    again = call(capsys, "audit", config, "--one-run", *options)
    assert f"exposure:    {outcome.json['exposure']:.2f} bits" in again.out


def test_public_prefixes_from_the_command_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = config.parent / "public.jsonl"
    public.write_text('{"text": "what anybody may read, and nobody would hide from anybody"}\n')
    options = ["privacy.steps=1", "--canaries=20", f"--prefixes={public}"]
    options.append(f"--output={config.parent / 'public'}")
    outcome = call(capsys, "audit", config, "--one-run", "--kind=prefix-suffix", *options, "--json")
    assert outcome.code == 0, outcome.err
    assert "behind the beginnings of public records" in Path(outcome.json["page"]).read_text()
    for more, words in (
        (["--one-run", "--kind=codes"], "--prefixes does not go with canaries of the kind 'codes'"),
        (["--shadows=20", "--kind=new-token"], "--prefixes goes with --one-run"),
    ):
        assert words in call(capsys, "audit", config, *more, f"--prefixes={public}").err
    absent = call(capsys, "audit", config, "--one-run", "--kind=new-token", "--prefixes=absent.jsonl")
    assert "--prefixes: there is no file" in absent.err
    public.write_text('{"body": "under another name"}\n')
    other = call(capsys, "audit", config, "--one-run", "--kind=new-token", f"--prefixes={public}")
    assert "--prefixes: " in other.err
    assert "record 1: has no column 'text'" in other.err
    elsewhere = f"--output={config.parent / 'none'}"
    assert "can show nothing" in call(capsys, "audit", config, "--one-run", "--canaries=0", elsewhere).err


@pytest.mark.parametrize("kind", WRITTEN)
def test_shadow_adapters_take_the_same_texts(
    kind: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = config.parent / f"shadows-{kind}"
    options = ["privacy.steps=2", f"--kind={kind}", f"--output={output}", "--json"]
    outcome = call(capsys, "audit", config, "--shadows=20", *options)
    assert outcome.code == 0, outcome.err
    assert outcome.json["kind"] == kind
    assert outcome.json["judged"] == 16
