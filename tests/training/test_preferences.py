"""DPO of a low-rank adapter: against the published formula, from round to round, and without a trace."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import loaded_by_peft, tiny_model, tiny_tokenizer
from torch.nn.functional import logsigmoid

from privlora.adapters import LowRankAdapter
from privlora.errors import ConfigError, ModelError
from privlora.training import preferences
from privlora.training.preferences import PreferenceSettings, PreferenceTuner

CHOICES = [
    {"prompt": "one: ", "chosen": "abc abc", "rejected": "xyz"},
    {"prompt": "one: ", "chosen": "ab", "rejected": "xyz xyz zz"},
    {"prompt": "", "chosen": "bca cab", "rejected": "zy"},
]
SETTINGS = PreferenceSettings(beta=0.5, learning_rate=0.01, epochs=3, batch_size=4)


@pytest.fixture(autouse=True)
def _needs_trl() -> None:
    pytest.importorskip("trl", reason="without the extra preferences")


@pytest.fixture
def tuner() -> Iterator[PreferenceTuner]:
    made = tuner_of(tiny_model())
    yield made
    made.adapter.detach()


def tuner_of(model: Any, settings: PreferenceSettings = SETTINGS, seed: int = 0) -> PreferenceTuner:
    adapter = LowRankAdapter(model, rank=2, target_modules=["q_proj", "down_proj"])
    return PreferenceTuner(adapter, tiny_tokenizer(), settings, lora_alpha=3.0, seed=seed)


def log_probability(model: Any, preference: dict[str, str], kind: str) -> torch.Tensor:
    """Of the tokens of a completion and EOS, given the prompt."""
    tokenizer = tiny_tokenizer()
    asked = tokenizer(preference["prompt"] or "<s>", add_special_tokens=False)["input_ids"]
    given = tokenizer(preference[kind], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    ids = torch.tensor([[*asked, *given]])
    found = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return found[len(asked) - 1 :].sum()


def margins(model: Any) -> torch.Tensor:
    return torch.stack(
        [log_probability(model, c, "chosen") - log_probability(model, c, "rejected") for c in CHOICES]
    )


def round_by_formula(tuner: PreferenceTuner, model: Any) -> dict[str, torch.Tensor]:
    """-log sigmoid(beta (margin - margin of the round's start)), by AdamW at a rate that falls to 0."""
    weights = {name: t.clone() for name, t in tuner.state_dict().items() if name != "rounds"}
    sites = sorted({name.rpartition(".")[0] for name in weights})
    frozen = {site: model.get_submodule(site).weight.detach().clone() for site in sites}
    for each in weights.values():
        each.requires_grad_()

    def margin() -> torch.Tensor:
        scaled = {
            f"{s}.weight": frozen[s] + 3.0 / 2 * weights[f"{s}.lora_B"] @ weights[f"{s}.lora_A"]
            for s in sites
        }
        return margins(lambda **inputs: torch.func.functional_call(model, scaled, kwargs=inputs))

    start = margin().detach()
    optimizer = torch.optim.AdamW(weights.values(), lr=SETTINGS.learning_rate, weight_decay=0.0)
    for step in range(SETTINGS.epochs):
        optimizer.param_groups[0]["lr"] = SETTINGS.learning_rate * (1 - step / SETTINGS.epochs)
        optimizer.zero_grad()
        (-logsigmoid(SETTINGS.beta * (margin() - start)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    return {name: t.detach() for name, t in weights.items()}


def test_a_round_is_dpo_against_the_model_of_its_start(tuner: PreferenceTuner) -> None:
    """The second round's reference is neither the base model nor that of the first round."""
    model = tiny_model()
    for _ in range(2):
        wanted = round_by_formula(tuner, model)
        tuner.tune(CHOICES)
        found = tuner.state_dict()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4)
    assert tuner.rounds == 2
    assert (margins(tuner.adapter.model) > margins(model)).all()


def test_without_a_preference_the_model_stays(tuner: PreferenceTuner) -> None:
    before = tuner.state_dict()
    tuner.tune([])
    after = tuner.state_dict()
    assert after.pop("rounds") == before.pop("rounds") + 1
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_round_follows_from_the_state_and_the_public_seed() -> None:
    settings = PreferenceSettings(beta=0.5, learning_rate=0.01, batch_size=1)  # the order counts
    first = tuner_of(tiny_model(), settings)
    first.tune(CHOICES)
    stored = first.state_dict()
    first.tune(CHOICES)
    torch.manual_seed(77)
    again = tuner_of(tiny_model(), settings, seed=0)
    again.load_state_dict(stored)
    again.tune(CHOICES)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in first.state_dict().items())
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again.adapter.model(ids).logits, first.adapter.model(ids).logits)
    other = tuner_of(tiny_model(), settings, seed=1)
    assert any(
        not torch.equal(other.state_dict()[name], tensor) for name, tensor in again.state_dict().items()
    )


def test_the_adapter_is_a_plain_one_of_peft(tuner: PreferenceTuner, tmp_path: Path) -> None:
    tuner.tune(CHOICES)
    tuner.write_adapter(tmp_path, "a-model")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded_by_peft(tiny_model(), tmp_path)(ids).logits, tuner.adapter.model(ids).logits
        )


def test_the_model_and_its_surroundings_are_as_before(
    tuner: PreferenceTuner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import _telemetry

    sent: list[str] = []
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: sent.append("started"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.delenv("CI", raising=False)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tuner.adapter.model, tuner._tokenizer
    tokenizer.pad_token = None
    model.generation_config.pad_token_id = None
    model.model.register_module("dropout", torch.nn.Dropout(0.25))
    before = facts(model, tokenizer)
    tuner.tune(CHOICES)
    assert facts(model, tokenizer) == before
    assert sent == []
    assert capfd.readouterr() == ("", "")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert constants.HF_HUB_DISABLE_TELEMETRY is False


def facts(model: Any, tokenizer: Any) -> dict[str, Any]:
    return {
        "vars": {name: id(value) for name, value in vars(model).items()},
        "modules": {name: (id(module), module.training) for name, module in model.named_modules()},
        "dropout": [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)],
        "weights": {name: (t.sum().item(), t.requires_grad) for name, t in model.named_parameters()},
        "config": copy.deepcopy(model.config.to_dict()),
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "tokenizer": copy.deepcopy(tokenizer.special_tokens_map),
        "drawn": torch.get_rng_state().tolist(),
    }


def test_a_round_that_diverges_leaves_the_model_of_its_start() -> None:
    tuner = tuner_of(tiny_model(), PreferenceSettings(beta=0.5, learning_rate=float("inf")))
    before = tuner.state_dict()
    with pytest.raises(ModelError, match="diverged"):
        tuner.tune(CHOICES)
    assert all(torch.equal(tuner.state_dict()[name], tensor) for name, tensor in before.items())
    assert tuner.adapter.attached


def test_a_tokenizer_without_an_end_and_several_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    adapter = LowRankAdapter(tiny_model(), rank=2, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="no EOS"):
        PreferenceTuner(adapter, tokenizer, SETTINGS)
    monkeypatch.setattr(LowRankAdapter, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        PreferenceTuner(adapter, tiny_tokenizer(), SETTINGS)


def test_without_trl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferences, "find_spec", lambda name: None)
    adapter = LowRankAdapter(tiny_model(), rank=2, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=r"pip install 'privlora\[preferences\]'"):
        PreferenceTuner(adapter, tiny_tokenizer(), SETTINGS)
    assert not adapter.attached
