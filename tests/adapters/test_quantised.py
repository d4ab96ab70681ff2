"""Packed frozen layers: what they compute in, that their gradients are right, and whose a row's gradient is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quantised_models import INT8, NF4, packed_model, unpacked_model
from run_cases import assert_same, fingerprint
from tiny_models import (
    one_batch,
    random_example,
    set_checkpointing,
    tiny_model,
    tiny_tokenizer,
    uneven_examples,
)
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.adapters.quantised import bits, dense_weight, hold, let_go, mixes_rows
from privlora.coordinates.starts import projected_start, tangent_start
from privlora.data.batching import MicroBatch
from privlora.errors import ModelError
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.model_checks import refuse_coupled, refuse_float16

COMPUTES = ("float32", "bfloat16")


def nf4(compute: str = "float32", **more: Any) -> dict[str, Any]:
    return {**NF4, "bnb_4bit_compute_dtype": compute, **more}


def int8(threshold: float) -> dict[str, Any]:
    return {**INT8, "llm_int8_threshold": threshold}


def started(model: Any, init: str = "w0-subspace") -> LowRankAdapter:
    adapter = LowRankAdapter(model, rank=2)
    tangent_start(adapter, init, seed=0).install()
    return adapter


def gradient(captured: Captured, unit: int) -> Tensor:
    return torch.cat([t[unit].reshape(-1).double() for t in (*captured.p, *captured.q)])


def of_record(adapter: LowRankAdapter, batch: MicroBatch, record: int) -> Tensor:
    row = int((batch.record_index == record).nonzero()[0])
    return gradient(micro_batch_gradients(adapter, batch)[0], int(batch.unit_index[row]))


@pytest.mark.parametrize(
    ("packing", "dtype", "reduced"),
    [
        (nf4("float32"), torch.float32, False),
        (nf4("bfloat16"), torch.float32, True),
        (nf4("float32"), torch.bfloat16, True),
        (nf4("bfloat16"), torch.bfloat16, True),
        (int8(0.0), torch.float32, True),
    ],
    ids=str,
)
def test_what_a_packed_model_computes_in(packing: Any, dtype: torch.dtype, reduced: bool) -> None:
    adapter = LowRankAdapter(packed_model(packing, dtype=dtype), rank=2)
    assert adapter.reduced_precision is reduced
    assert adapter.one_by_one is ("load_in_8bit" in packing)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_those_of_the_unpacked_weights(family: str, double: bool) -> None:
    model = packed_model(nf4(bnb_4bit_use_double_quant=double), family)
    plain = unpacked_model(model)
    batch = one_batch(uneven_examples())
    found = []
    for each in (model, plain):
        with started(each, "random") as adapter:
            found.append(micro_batch_gradients(adapter, batch))
    (packed, losses), (whole, expected) = found
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((*packed.p, *packed.q), (*whole.p, *whole.q), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_gradients_are_autograds() -> None:
    """Of a packed model's own pass, without hooks: the derivative of a row's loss by a term beside one layer."""
    model = packed_model(nf4())
    adapter = started(model)
    example = random_example(np.random.default_rng(3), 9)
    site = adapter.sites[-1]
    assert site.left is not None
    assert site.right is not None
    update = torch.zeros(site.m, site.n, requires_grad=True)
    held = hold(model)
    handle = site.module.register_forward_hook(lambda _, args, y: y + args[0] @ update.T)
    ids = torch.tensor(example.input_ids[None], dtype=torch.int64)
    logits = model(input_ids=ids).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
    handle.remove()
    let_go(held)
    with adapter:
        captured, _ = micro_batch_gradients(adapter, one_batch([example]))
    torch.testing.assert_close(captured.p[-1][0], update.grad @ site.right, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(captured.q[-1][0], update.grad.T @ site.left, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packing", [nf4("float32"), nf4("bfloat16"), int8(6.0)], ids=str)
def test_activations_that_are_computed_again_change_no_gradient(packing: Any, reentrant: bool) -> None:
    batch, found = one_batch(uneven_examples()), []
    for again in (False, True):
        adapter = started(packed_model(packing))
        if again:
            set_checkpointing(adapter.model, reentrant=reentrant)
        with adapter, training_passes(adapter.model, np.random.default_rng(0)):
            found.append(micro_batch_gradients(adapter, batch)[0])
    for a, b in zip((*found[0].p, *found[0].q), (*found[1].p, *found[1].q), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("threshold", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_8_bits_a_units_gradient_is_bit_by_bit_its_own(threshold: float, dtype: torch.dtype) -> None:
    model = packed_model(int8(threshold), dtype=dtype, louder=8.0)
    assert mixes_rows(model)
    adapter = started(model)
    rng = np.random.default_rng(0)
    first, *others = (random_example(rng, n) for n in (12, 12, 20, 5))
    with adapter:
        alone = of_record(adapter, one_batch([first]), 0)
        for company in ([others[0]], [others[1], others[2]], [others[1]] * 9):
            assert torch.equal(of_record(adapter, one_batch([first, *company]), 0), alone)


def test_in_8_bits_together_company_would_show() -> None:
    """What the test above holds off: outliers of another row change how a row is rounded."""
    adapter = started(packed_model(int8(1.0), louder=8.0))
    rng = np.random.default_rng(0)
    first, *others = (random_example(rng, 12) for _ in range(9))
    adapter.one_by_one = False
    with adapter:
        alone = of_record(adapter, one_batch([first]), 0)
        beside = [of_record(adapter, one_batch([first, other]), 0) for other in others]
    assert max(float((each - alone).norm() / alone.norm()) for each in beside) > 1e-4


@pytest.mark.parametrize("compute", COMPUTES)
def test_in_4_bits_company_does_not_show(compute: str) -> None:
    adapter = started(packed_model(nf4(compute), louder=8.0))
    assert not adapter.one_by_one
    rng = np.random.default_rng(0)
    first, *others = (random_example(rng, n) for n in (12, 12, 20, 5))
    with adapter:
        alone = of_record(adapter, one_batch([first]), 0)
        for company in ([others[0]], [others[1], others[2]], [others[1]] * 9):
            moved = of_record(adapter, one_batch([first, *company]), 0) - alone
            assert float(moved.norm() / alone.norm()) < (1e-5 if compute == "float32" else 0.01)


@pytest.mark.parametrize("packing", [nf4("float32"), nf4("bfloat16"), int8(6.0)], ids=str)
def test_causal_packed_models_pass_the_probe_and_stay_as_they_are(packing: Any) -> None:
    model = packed_model(packing)
    dense = {n: dense_weight(n, m) for n, m in model.named_modules() if bits(m) is not None}
    refuse_coupled(LowRankAdapter(model, rank=2), tiny_tokenizer())
    assert all(torch.equal(dense_weight(n, model.get_submodule(n)), w) for n, w in dense.items())


def test_a_pass_of_the_adapter_repacks_nothing_and_the_flag_comes_back() -> None:
    model = packed_model(nf4("bfloat16"), dtype=torch.bfloat16)
    layers = [m for m in model.modules() if bits(m) == 4]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True  # as on a processor that has such a kernel
    weights = [layer.weight.detach().clone() for layer in layers]
    with started(model), torch.no_grad():
        model(input_ids=torch.arange(3, 12)[None])
    assert all(layer.support_avx512bf16_for_cpu for layer in layers)
    assert all(torch.equal(layer.weight, w) for layer, w in zip(layers, weights, strict=True))


def test_a_model_that_was_repacked_is_refused() -> None:
    model = packed_model(nf4("bfloat16"), dtype=torch.bfloat16)
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj' were repacked.*load the model again"):
        LowRankAdapter(model, rank=2).attach()
    with pytest.raises(ModelError, match="were repacked"):
        dense_weight("up_proj", layer)


@pytest.mark.parametrize("packing", [nf4("float32"), nf4("bfloat16"), int8(0.0)], ids=str)
def test_spectral_split_leaves_the_model_as_it_is(packing: Any) -> None:
    model = packed_model(packing)
    ids = torch.arange(3, 20)[None]
    held = hold(model)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with started(model, "spectral-split") as adapter:
            after = model(input_ids=ids).logits
        assert all(site.offset is not None for site in adapter.sites)
    let_go(held)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attaching_leaves_a_packed_model_as_it_was(dtype: torch.dtype) -> None:
    model = packed_model(nf4("bfloat16"), dtype=dtype)
    held = hold(model)  # the prints' own passes are without gradients
    before = fingerprint(model)
    with started(model) as adapter:
        micro_batch_gradients(adapter, one_batch(uneven_examples()))
    held += hold(model)
    assert_same(before, fingerprint(model))


def test_operands_follow_what_a_packed_layer_gives() -> None:
    """Behind norms in float32, whatever the embeddings are in."""
    model = packed_model(nf4("bfloat16"), dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith(("norm", "lm_head")):
            module.float()
    adapter = started(model)
    assert {site.left.dtype for site in adapter.sites if site.left is not None} == {torch.bfloat16}
    with adapter:
        captured, _ = micro_batch_gradients(adapter, one_batch(uneven_examples()))
    assert bool(captured.finite().all())
    assert {side.dtype for site in adapter.sites for side in adapter.met_at(site)} == {torch.float32}


def test_dense_updates_are_refused() -> None:
    adapter = LowRankAdapter(packed_model(nf4()), rank=2)
    with pytest.raises(
        ModelError, match=r"quantised, and this method adds a dense update.*remove model.quant"
    ):
        projected_start(adapter, "random", seed=0)


def test_float16_inside_packed_weights_is_refused() -> None:
    refuse_float16(packed_model(nf4("bfloat16")))
    with pytest.raises(ModelError, match=r"packed weights compute in float16.*bnb_4bit_compute_dtype"):
        refuse_float16(packed_model(nf4("float16")))


def test_weights_of_another_kind_are_refused() -> None:
    model = tiny_model()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.zeros(24, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"stored as torch\.int8, which privlora does not know"):
        LowRankAdapter(model, rank=2)


def test_dense_weights_of_plain_layers() -> None:
    for family, name in (("llama", "model.layers.0.mlp.up_proj"), ("gpt2", "transformer.h.0.mlp.c_fc")):
        module = tiny_model(family).get_submodule(name)
        x = torch.randn(3, 16)
        bias = 0 if module.bias is None else module.bias
        torch.testing.assert_close(module(x), x @ dense_weight(name, module).T + bias)
