"""A training pass: which mode the model is in, where its random numbers come from, and what is given back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from test_masks import dropping_model
from tiny_models import VOCAB, one_batch, set_checkpointing, tiny_model, uneven_examples
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.errors import RunError
from privlora.precision import _backends
from privlora.randomness import counter_generator, private_generator
from privlora.training import forward
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients


def opt_model() -> Any:
    """Its layers drop by themselves, not in submodules, and they are what is checkpointed."""
    torch.manual_seed(0)
    config = hf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.0,
        init_std=0.3,
    )
    return hf.AutoModelForCausalLM.from_config(config).eval()


def gradients(model: Any, *, key: int = 1, dropout: bool = False, lora_dropout: float = 0.0) -> list[Tensor]:
    """Of a batch at fixed operands, in one training pass."""
    # OPT's other layers take all tokens of a batch in one row.
    targets = r".*(c_attn|c_proj|q_proj|out_proj)"
    adapter = LowRankAdapter(model, rank=2, dropout=lora_dropout, target_modules=targets)
    operands = torch.Generator().manual_seed(5)
    with adapter:
        for g in adapter.groups:
            left, right = (torch.randn(len(g.sites), k, 2, generator=operands) for k in (g.m, g.n))
            adapter.install(g, left, torch.ones(len(g.sites), 2), right)
        with training_passes(model, counter_generator(key), dropout=dropout):
            captured, _ = micro_batch_gradients(adapter, one_batch(uneven_examples()))
    return [*captured.p, *captured.q]


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("make", [dropping_model, opt_model])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_the_models_own_dropout_is_off_and_on_request_on(make: Any, checkpointing: str | None) -> None:
    quiet = gradients(make())
    model = make()
    if checkpointing:
        set_checkpointing(model, reentrant=checkpointing == "reentrant")
    model.train()  # whatever mode the user left it in
    assert close(gradients(model, key=2), quiet)
    assert not close(gradients(model, dropout=True), quiet)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [dropping_model, opt_model])
def test_activations_are_recomputed_under_the_same_masks(make: Any, reentrant: bool) -> None:
    options: dict[str, Any] = {"dropout": True, "lora_dropout": 0.3}
    plain = gradients(make(), **options)
    model = make()
    set_checkpointing(model, reentrant=reentrant)
    assert close(gradients(model, **options), plain)
    assert not close(gradients(model, key=2, **options), plain)


def test_the_adapters_dropout_does_not_need_the_models() -> None:
    one, same, other = (gradients(tiny_model(), key=key, lora_dropout=0.5) for key in (1, 1, 2))
    assert close(one, same)
    assert not close(one, other)


def precisions() -> list[str]:
    return [torch.get_float32_matmul_precision(), str(torch.backends.cudnn.allow_tf32)] + [
        each.fp32_precision for each in _backends()
    ]


@pytest.fixture
def own_precision() -> Iterator[None]:
    """Whatever a test sets is taken back."""
    before = torch.get_float32_matmul_precision()
    own = [(each, each.fp32_precision) for each in _backends()]
    yield
    torch.set_float32_matmul_precision(before)
    for each, precision in own:
        each.fp32_precision = precision


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.usefixtures("own_precision")
def test_products_are_exact_inside_and_the_users_precision_comes_back(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    before = precisions()
    with training_passes(tiny_model(), private_generator()):
        assert precisions() == ["highest", "False", *["ieee"] * len(_backends())]
        assert not torch.backends.cuda.matmul.allow_tf32
    assert precisions() == before
    with pytest.raises(KeyError), training_passes(tiny_model(), private_generator()):
        raise KeyError
    assert precisions() == before


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 has no such setting"
)
@pytest.mark.usefixtures("own_precision")
def test_precisions_that_are_set_apart_come_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = (
        "tf32"  # torch's older interface has no word for this beside "ieee"
    )
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    before = [each.fp32_precision for each in _backends()]
    with training_passes(tiny_model(), private_generator()):
        assert torch.get_float32_matmul_precision() == "highest"
        assert {each.fp32_precision for each in _backends()} == {"ieee"}
    assert [each.fp32_precision for each in _backends()] == before


@pytest.mark.usefixtures("own_precision")
def test_gradients_do_not_depend_on_the_precision_that_the_user_set() -> None:
    model = tiny_model()
    plain = gradients(model)
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), plain, strict=True))


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_modes_and_checkpointing_come_back(training: bool, dropout: bool) -> None:
    model = opt_model().train(training)
    set_checkpointing(model, reentrant=False)
    model.model.decoder.layers[0].eval()
    before = [(module.training, dict(vars(module))) for module in model.modules()]
    with pytest.raises(KeyError), training_passes(model, private_generator(), dropout=dropout):
        raise KeyError
    after = [(module.training, dict(vars(module))) for module in model.modules()]
    assert before == after


def test_every_generator_is_keyed_afresh_and_given_back() -> None:
    def drawn() -> list[float]:
        return [
            float(torch.rand(())),
            float(torch.randn(40)[-1]),
            random.random(),
            np.random.rand(),
            np.random.randn(),
        ]

    model, seen = tiny_model(), list[list[float]]()
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        expected = drawn()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        for key in (3, 4):
            with training_passes(model, counter_generator(key)):
                seen.append(drawn())
        assert drawn() == expected
        seen.append(expected)
    assert seen[0] == seen[3]  # a function of the key alone
    assert seen[1] == seen[4]
    assert len({x for each in (0, 1, 2, 5) for x in seen[each]}) == 4 * 5


def test_states_of_many_batches_differ() -> None:
    """A key of 8 bits would repeat itself."""
    generator, states = private_generator(), []
    for _ in range(200):
        with forward._keyed(generator):
            states.append((torch.get_rng_state().numpy().tobytes(), random.getrandbits(64), np.random.rand()))
    for kind in zip(*states, strict=True):
        assert len(set(kind)) == 200


def test_all_words_of_torchs_generator_are_fresh() -> None:
    """mt19937 has 624 words of 32 bits; torch.manual_seed fills them from 32 bits in all."""
    state = forward._cpu_state(counter_generator(3))
    words = counter_generator(3).integers(2**32, size=624)
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words.astype(np.uint32), "pos": 624}}
    generator = torch.Generator()
    generator.set_state(state)
    drawn = torch.rand(2000, generator=generator, dtype=torch.float32).double() * 2**24
    assert np.array_equal(drawn.numpy(), twister.random_raw(2000) & (2**24 - 1))


def test_another_bit_generator_of_numpys_comes_back() -> None:
    old, own = np.random.get_bit_generator(), np.random.PCG64(1)
    np.random.set_bit_generator(own)
    try:
        before = own.state
        with training_passes(tiny_model(), private_generator()):
            np.random.rand(3)
            assert own.state["state"] != before["state"]
        assert own.state == before
    finally:
        np.random.set_bit_generator(old)


def test_every_device_gets_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CPU generators in the place of those of two GPUs."""
    devices = tuple(torch.Generator().manual_seed(0) for _ in range(2))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    before, seeds = [g.get_state() for g in devices], set()
    for _ in range(2):
        with training_passes(tiny_model(), private_generator()):
            seeds |= {g.initial_seed() for g in devices}
        assert all(torch.equal(g.get_state(), state) for g, state in zip(devices, before, strict=True))
    assert len(seeds) == 4
    assert max(seeds) > 2**56  # 64 bits each


def test_a_torch_that_keeps_its_state_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_WORDS_AT", 32)
    model = tiny_model()
    before = torch.get_rng_state()
    with pytest.raises(RunError, match="can be foreseen"), training_passes(model, private_generator()):
        pass
    assert torch.equal(torch.get_rng_state(), before)
