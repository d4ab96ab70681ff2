"""A base that is spread over devices: every layer computes where it lies, and gradients meet on one device.

There is no second device where these tests run. So one half of a model lies on paper, where whatever meets a tensor of
the CPU raises; and accelerate's own hooks are put on a model that lies in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from paper import DEVICE, paper_device
from quantised_models import saved_model
from run_cases import PRIVACY, RECORDS
from tiny_models import PUBLIC_TEXTS, one_batch, tiny_model, tiny_tokenizer, uneven_examples
from torch import Tensor
from transformers import AutoModelForCausalLM

from privlora.accounting import Ledger
from privlora.adapters import LowRankAdapter
from privlora.api import fine_tune
from privlora.config import ModelSettings, settings_from
from privlora.coordinates.starts import tangent_start
from privlora.data.examples import Examples
from privlora.data.units import Units
from privlora.errors import ConfigError, ModelError
from privlora.methods import METHODS
from privlora.training.assembly import build_parts, build_step
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import Data
from privlora.training.models import given_or_loaded, load_model
from privlora.training.promise import plan_privacy

EXAMPLES = Examples(uneven_examples(lengths=(9, 2, 5, 7)), pad_token_id=0)
UNITS = [np.array(unit) for unit in ((0,), (1, 2), (3,))]


def moved(value: Any, device: torch.device) -> Any:
    """What a layer is given or gives, on a device; as accelerate's hooks move it."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(moved(each, device) for each in value)
    if isinstance(value, Mapping):
        return {name: moved(each, device) for name, each in value.items()}
    return value


def spread(model: Any, layers: Any) -> Any:
    """The model with some of its layers on paper, and what passes between both moved by hooks."""
    home = next(model.parameters()).device
    for layer in layers:
        layer.to(DEVICE)
        layer.register_forward_pre_hook(
            lambda _, args, named: (moved(args, DEVICE), moved(named, DEVICE)), with_kwargs=True
        )
        layer.register_forward_hook(lambda _, __, out: moved(out, home))
    model.register_forward_pre_hook(
        lambda _, args, named: (moved(args, home), moved(named, home)), with_kwargs=True
    )
    return model


def settings_of(row: str, init: str | None = None) -> Any:
    method = METHODS[row]
    privacy: dict[str, Any] = {"steps": 3, "expected_batch_size": 4, "public_dataset_size": 20}
    privacy |= {"noise_multiplier": 1.0, "delta": 1e-3} if method.private else {"private": False}
    given = {
        "model": {"name": "random"},
        "data": {"path": "(in memory)"},
        "adapter": {"r": 2, "init": init},
        "method": {"name": row},
        "privacy": privacy,
    }
    return settings_from(given, source="test")


CASES = [(row, None, False) for row, method in METHODS.items() if method.releases != "votes"]
CASES += [("prism", "spectral-split", False), ("wishart-m2", None, True), ("prism", None, True)]


# From the other side each space is looked at once, and further rows by the long tests.
ONE_A_SPACE = {row.space: name for name, row in reversed(METHODS.items())}.values()


@pytest.mark.parametrize(
    ("row", "init", "twice", "home"),
    [
        pytest.param(
            *case,
            home,
            marks=pytest.mark.long if home == 1 and case[0] not in ONE_A_SPACE else (),
            id=f"{'-'.join(map(str, case))}-gathered {('beside the CPU', 'on paper')[home]}",
        )
        for home in (0, 1)
        for case in CASES
    ],
)
def test_a_step_of_a_model_on_two_devices(
    row: str, init: str | None, twice: bool, home: int, tmp_path: Path
) -> None:
    """Two steps, the states, and what is exported; home: which of two layers lies on the CPU. twice: the second layer
    is used once more, so that its gradients are added up."""
    settings, method = settings_of(row, init), METHODS[row]
    public = Examples(list(PUBLIC_TEXTS)[:3], pad_token_id=0)
    answers = {"coordinates/tangent.py:TangentCoordinates._orthonormal": 0}  # what is left of U^T U - 1
    with paper_device(answers):
        model = tiny_model()
        layers = list(model.model.layers)
        spread(model, [layers[1 - home]])
        if twice:
            model.model.layers.append(layers[1])
            model.config.num_hidden_layers = 3
        parts = build_parts(settings, model, texts=(lambda _: public) if method.public_texts else None)
        assert parts.adapter.device.type == ("cpu" if home == 0 else "meta")
        for site in parts.adapter.sites:
            tensors = (site.left, site.mid, site.right, *(site.offset or ()))
            assert {t.device for t in tensors if t is not None} == {site.weight.device}
        ledger = None
        if method.private:
            ledger = Ledger.create(tmp_path / "ledger.jsonl", plan_privacy(settings, model=model))
        step = build_step(parts, Data(EXAMPLES, Units(np.arange(4)), Examples([], pad_token_id=0)), ledger)
        for _ in range(2):
            step.take(UNITS)
        for group in parts.adapter.groups:
            assert {side.device for side in parts.adapter.met(group)} == {parts.adapter.device}
        parts.take_states(parts.states())
        parts.install_result()
        assert len(parts.named_factors()) == len(parts.adapter.sites)
        parts.adapter.detach()


def test_gradients_under_accelerates_hooks_are_those_without() -> None:
    """They replace forward methods, and a layer's own hooks see its input before they have moved it."""
    batch = one_batch(uneven_examples())
    found = []
    for hooked in (False, True):
        model = tiny_model()
        if hooked:
            names = [
                "model.embed_tokens",
                "model.layers.0",
                "model.layers.1",
                "model.norm",
                "model.rotary_emb",
            ]
            dispatch_model(model, dict.fromkeys([*names, "lm_head"], "cpu"), force_hooks=True)
            assert "forward" in vars(model.model.layers[1])
        adapter = LowRankAdapter(model, rank=2)
        tangent_start(adapter, "w0-subspace", seed=0).install()
        with adapter:
            found.append(micro_batch_gradients(adapter, batch))
    (plain, losses), (hooked_found, hooked_losses) = found
    torch.testing.assert_close(hooked_losses, losses)
    for a, b in zip((*plain.p, *plain.q), (*hooked_found.p, *hooked_found.q), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("chosen", ["auto", {"": "cpu"}], ids=str)
def test_a_run_with_a_device_map(chosen: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("made for machines with one device")
    result = fine_tune(
        saved_model(tmp_path / "base"),
        RECORDS,
        privacy={**PRIVACY, "steps": 2},
        adapter={"r": 2},
        data={"max_length": 40},
        loading={"device_map": chosen},
        output=tmp_path / "run",
    )
    assert result.steps == 2


def test_a_part_on_a_disk_is_refused(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(folder)
    parts = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    dispatch_model(
        model,
        {**parts, "model.layers.0": "cpu", "model.layers.1": "disk"},
        offload_dir=str(tmp_path / "away"),
    )
    with pytest.raises(ModelError, match=r"'model\.layers\.1\..* lies on a disk or in another memory"):
        given_or_loaded(ModelSettings(name="given"), model, tiny_tokenizer())


def test_what_cannot_be_mapped_is_told_in_one_line(tmp_path: Path) -> None:
    folder = saved_model(tmp_path)
    settings = ModelSettings(name=str(folder), device_map={"": "cuda:97"})
    with pytest.raises(ModelError, match=r"cannot load model.*check model\.device_map") as caught:
        load_model(settings)
    assert "\n" not in str(caught.value)
    content = {"data": {"path": "x.jsonl"}, "privacy": PRIVACY}
    with pytest.raises(ConfigError, match="device and device_map both say where the model lies"):
        settings_from({"model": {"name": "m", "device": "cpu", "device_map": "auto"}, **content})
    with pytest.raises(ConfigError, match=r"write model\.device_map"):
        settings_from({"model": {"name": "m"}, "run": {"device_map": "auto"}, **content})
