"""DPO of a low-rank adapter: against the published formula, from round to round, and without a trace."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import loaded_by_peft, tiny_model, tiny_tokenizer
from torch.nn.functional import logsigmoid

from privlora.adapters import LowRankAdapter, write_adapter
from privlora.errors import ConfigError, ModelError
from privlora.methods import METHODS, build
from privlora.optimizers import IterateAverage
from privlora.synthesis.popri import Preference
from privlora.training.state import States, TrainState
from privlora.training.texts.preferences import PreferenceTuner

CHOICES = [
    {"prompt": "one: ", "chosen": "abc abc", "rejected": "xyz"},
    {"prompt": "one: ", "chosen": "ab", "rejected": "xyz xyz zz"},
    {"prompt": "", "chosen": "bca cab", "rejected": "zy"},
]
SETTINGS: dict[str, Any] = {"beta": 0.5, "learning_rate": 0.01, "epochs": 3, "batch_size": 4}


@dataclass
class Tuned:
    """A model with a tuner of its adapter."""

    model: Any
    state: TrainState
    tune: Callable[[list[Preference]], None]
    tokenizer: Any

    def factors(self) -> dict[str, torch.Tensor]:
        return self.state.states()["coordinates"]


def state_of(model: Any, method: str = "dp-adamw", **settings: Any) -> TrainState:
    adapter = LowRankAdapter(model, rank=2, target_modules=["q_proj", "down_proj"])
    coordinates, optimizer = build(METHODS[method], adapter, lora_alpha=3.0, settings=settings)
    adapter.attach()
    return TrainState(
        coordinates=coordinates, optimizer=optimizer, average=IterateAverage(coordinates, "uniform")
    )


def tuned(settings: dict[str, Any] = SETTINGS, seed: int = 0) -> Tuned:
    pytest.importorskip("trl", reason="without the extra preferences")
    model, tokenizer = tiny_model(), tiny_tokenizer()
    state = state_of(model)
    return Tuned(model, state, PreferenceTuner(state, tokenizer, seed=seed, **settings).tune, tokenizer)


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


def round_by_formula(start: Tuned, model: Any) -> list[torch.Tensor]:
    """-log sigmoid(beta (margin - margin of the round's start)), by AdamW at a rate that falls to 0. W of each site."""
    space = start.state.coordinates
    sites, factors = [], []
    for group, left, right in zip(space.adapter.groups, space.left, space.right, strict=True):
        for k, site in enumerate(group.sites):
            sites.append(f"{site.name}.weight")
            factors.append((left[k].clone().requires_grad_(), right[k].T.clone().requires_grad_()))
    frozen = [model.get_parameter(name).detach().clone() for name in sites]

    def weights() -> list[torch.Tensor]:
        return [w + 3.0 / 2 * b @ a for w, (b, a) in zip(frozen, factors, strict=True)]

    def margin() -> torch.Tensor:
        put = dict(zip(sites, weights(), strict=True))
        return margins(lambda **inputs: torch.func.functional_call(model, put, kwargs=inputs))

    reference = margin().detach()
    moved = [tensor for pair in factors for tensor in pair]
    optimizer = torch.optim.AdamW(moved, lr=SETTINGS["learning_rate"], weight_decay=0.0)
    for step in range(SETTINGS["epochs"]):
        optimizer.param_groups[0]["lr"] = SETTINGS["learning_rate"] * (1 - step / SETTINGS["epochs"])
        optimizer.zero_grad()
        (-logsigmoid(SETTINGS["beta"] * (margin() - reference)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(moved, 1.0)
        optimizer.step()
    return [w.detach() for w in weights()]


def test_a_round_is_dpo_against_the_model_of_its_start() -> None:
    """The second round's reference is neither the base model nor that of the first round."""
    made, model = tuned(), tiny_model()
    for _ in range(2):
        wanted = round_by_formula(made, model)
        made.tune(CHOICES)
        space = made.state.coordinates
        found = [
            site.weight + a @ b.T
            for group, (left, right) in zip(space.adapter.groups, space.factors(), strict=True)
            for site, a, b in zip(group.sites, left, right, strict=True)
        ]
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert (margins(made.model) > margins(model)).all()


def test_the_average_begins_anew() -> None:
    made = tuned()
    made.tune(CHOICES)
    averaged, last = made.state.average.factors(), made.state.coordinates.factors()
    for (a, b), (c, d) in zip(averaged, last, strict=True):
        torch.testing.assert_close(a @ b.mT, c @ d.mT)


def test_without_a_preference_the_model_stays() -> None:
    made = tuned()
    before = made.state.states()
    made.tune([])
    assert_same(made.state.states(), before)


def assert_same(found: States, wanted: States) -> None:
    assert found.keys() == wanted.keys()
    for name, tensors in wanted.items():
        assert all(torch.equal(found[name][key], tensor) for key, tensor in tensors.items())


def test_a_round_follows_from_the_state_and_the_public_seed() -> None:
    settings = {"beta": 0.5, "learning_rate": 0.01, "batch_size": 1}  # the order counts
    first = tuned(settings)
    first.tune(CHOICES)
    stored = first.state.states()
    first.tune(CHOICES[1:])
    again, other = tuned(settings), tuned(settings, seed=1)
    for each in (again, other):
        torch.manual_seed(77)
        each.state.take_states(stored)
        each.tune(CHOICES[1:])
    assert_same(again.state.states(), first.state.states())
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again.model(ids).logits, first.model(ids).logits)
    assert not torch.equal(other.model(ids).logits, first.model(ids).logits)


def test_the_adapter_is_a_plain_one_of_peft(tmp_path: Path) -> None:
    made = tuned()
    made.tune(CHOICES)
    factors = made.state.coordinates.named_factors()
    write_adapter(tmp_path, made.state.adapter, factors, base_model="a-model", lora_alpha=3.0)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded_by_peft(tiny_model(), tmp_path)(ids).logits, made.model(ids).logits)


def test_the_model_and_its_surroundings_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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
    made = tuned()
    model, tokenizer = made.model, made.tokenizer
    tokenizer.pad_token = None
    model.generation_config.pad_token_id = None
    model.model.register_module("dropout", torch.nn.Dropout(0.25))
    before = facts(model, tokenizer)
    made.tune(CHOICES)
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
    made = tuned({"beta": 0.5, "learning_rate": float("inf")})
    before = made.state.states()
    with pytest.raises(ModelError, match="diverged"):
        made.tune(CHOICES)
    assert_same(made.state.states(), before)
    assert made.state.adapter.attached


def test_a_chat_is_tuned_on_turns() -> None:
    """What precedes a completion is what the template writes around the request."""
    made = tuned()
    made.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}. {% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    PreferenceTuner(made.state, made.tokenizer, chat=True, **SETTINGS).tune(CHOICES[:1])
    written = tuned()
    asked = [{"prompt": "u: one: . a: ", "chosen": "abc abc. ", "rejected": "xyz. "}]
    written.tokenizer.eos_token = " "  # the template ends a turn so
    written.tune(asked)
    for key, tensor in written.factors().items():
        torch.testing.assert_close(made.factors()[key], tensor, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_tuned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="without the extra preferences")
    with pytest.raises(ConfigError, match="both factors"):
        PreferenceTuner(state_of(tiny_model(), "ffa"), tiny_tokenizer(), **SETTINGS)
    with pytest.raises(ConfigError, match="both factors"):
        PreferenceTuner(state_of(tiny_model(), "prism"), tiny_tokenizer(), **SETTINGS)
    state, tokenizer = state_of(tiny_model()), tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no EOS"):
        PreferenceTuner(state, tokenizer, **SETTINGS)
    monkeypatch.setattr(LowRankAdapter, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        PreferenceTuner(state, tiny_tokenizer(), **SETTINGS)


@pytest.mark.parametrize("chat", [False, True])
def test_a_request_that_would_be_cut_is_refused(chat: bool) -> None:
    """Its answers would be drawn for one prompt and preferred for another, or for none. The context has 64 tokens."""
    made = tuned()
    made.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tuner = PreferenceTuner(made.state, made.tokenizer, chat=chat, **SETTINGS)
    tuner.refuse_long(["a" * 54], 10)
    tuner.refuse_long(["a" * 32], 500)
    for request, room in (("a" * 55, 10), ("a" * 33, 500)):
        with pytest.raises(ConfigError, match="a request for texts"):
            tuner.refuse_long(["a", request], room)
