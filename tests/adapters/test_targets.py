"""Which modules are adapted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from privlora.adapters.lowrank import LowRankAdapter
from privlora.adapters.targets import find_targets, output_layer_name, settled_targets
from privlora.errors import ModelError, PrivacyError, PrivloraError

MODULES_PER_LAYER = {"phi": 6, "phi3": 4, "gpt-neox": 4, "gpt2": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_takes_every_linear_layer_but_the_output(family: str) -> None:
    model = tiny_model(family)
    names = find_targets(model)
    assert len(names) == 2 * MODULES_PER_LAYER.get(family, 7)
    assert output_layer_name(model) not in names


FEED_FORWARD = {
    "phi": ["mlp.fc1", "mlp.fc2"],
    "phi3": ["mlp.down_proj", "mlp.gate_up_proj"],
    "gpt-neox": ["mlp.dense_4h_to_h", "mlp.dense_h_to_4h"],
    "gpt2": ["mlp.c_fc", "mlp.c_proj"],  # and attn.c_proj beside it
}


@pytest.mark.parametrize("family", FAMILIES)
def test_feed_forward_takes_what_is_in_no_attention(family: str) -> None:
    found = find_targets(tiny_model(family), "feed-forward")
    own = FEED_FORWARD.get(family, ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"])
    assert sorted({".".join(name.split(".")[-2:]) for name in found}) == own
    assert len(found) == 2 * len(own)
    assert set(found) < set(find_targets(tiny_model(family)))
    assert find_targets(tiny_model(family), "feed-forward", layers_to_transform=[1]) == found[len(own) :]


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral"])
def test_auto_is_one_of_two_words(family: str) -> None:
    """And what stands in reports, where it is settled."""
    model = tiny_model(family)
    word = "all-linear" if family == "mixtral" else "feed-forward"
    adapter = LowRankAdapter(model, rank=2, target_modules="auto")
    assert adapter.target_modules == settled_targets(model, "auto") == word
    assert {site.name for site in adapter.sites} == set(find_targets(model, word))
    assert settled_targets(model, ["q_proj"]) == ["q_proj"]


@pytest.mark.parametrize("router", ["router", "gate", "shared_expert_gate"])
def test_what_sends_tokens_to_experts_is_no_feed_forward_layer(router: str) -> None:
    """As of Phi-MoE, whose experts are no linear layers: a router alone would be trained."""
    model = torch.nn.Sequential()
    inner = {"attn": torch.nn.Linear(4, 4), router: torch.nn.Linear(4, 2), "gate_proj": torch.nn.Linear(4, 4)}
    for name, layer in inner.items():
        model.add_module(name, layer)
    assert find_targets(model, "feed-forward") == ["gate_proj"]
    del model.gate_proj
    with pytest.raises(ModelError, match="do not tell attention from the rest"):
        find_targets(model, "feed-forward")


@pytest.mark.parametrize("named", ["self_attention", "mixer"])
def test_names_that_tell_no_attention_are_refused(named: str) -> None:
    model = torch.nn.Sequential()
    model.add_module(named, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=r"do not tell attention from the rest.*Fix: give all-linear"):
        find_targets(model, "feed-forward")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target_modules": ["q_proj"]}, ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        ({"target_modules": ["mlp.up_proj"], "layers_to_transform": [1]}, ["1.mlp.up_proj"]),
        ({"target_modules": r".*\.0\..*[kv]_proj"}, ["0.self_attn.k_proj", "0.self_attn.v_proj"]),
        (
            {
                "target_modules": ["q_proj", "k_proj"],
                "exclude_modules": ["layers.0.self_attn.q_proj", "k_proj"],
            },
            ["1.self_attn.q_proj"],
        ),
    ],
)
def test_names_select_by_ending_and_strings_by_pattern(options: dict[str, Any], expected: list[str]) -> None:
    assert find_targets(tiny_model(), **options) == [f"model.layers.{name}" for name in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["q_porj"]}, "did you mean 'q_proj'"),
        ({"target_modules": ["proj"]}, "names 'proj'"),
        ({"target_modules": "no_such_.*"}, "no_such_"),
        ({"target_modules": ["mlp"]}, "is not a linear layer"),
        ({"target_modules": "ffn"}, "did you mean 'feed-forward'"),
        ({"target_modules": ["feed-forward", "q_proj"]}, "write it alone, as target_modules: feed-forward"),
        ({"target_modules": ["lm_head"]}, "output layer 'lm_head' cannot be adapted"),
        ({"target_modules": ["embed_tokens"]}, "is not a linear layer"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "no module is left"),
        ({"layers_to_transform": [7]}, "no module is left"),
    ],
)
def test_what_cannot_be_adapted_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_targets(tiny_model(), **options)


def test_a_model_that_normalises_over_the_batch_is_refused() -> None:
    model = tiny_model()
    model.model.norm = torch.nn.BatchNorm1d(16)
    with pytest.raises(PrivacyError, match=r"model\.norm.*normalises over the batch"):
        find_targets(model)
    assert issubclass(PrivacyError, PrivloraError)
