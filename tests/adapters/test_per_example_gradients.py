"""Per-example gradients against autograd through explicit dense weights, for every supported family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_models import (
    FAMILIES,
    everything_in_double,
    in_double,
    one_batch,
    random_example,
    set_checkpointing,
    tiny_model,
    uneven_examples,
    with_lora,
)
from torch import Tensor
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from privlora.adapters import Captured, LowRankAdapter
from privlora.data.batching import MicroBatch, micro_batches
from privlora.data.examples import Example, Examples
from privlora.losses import label_logits, weighted_cross_entropy
from privlora.training.gradients import micro_batch_gradients

RANK = 3
Gradients = dict[str, Tensor]  # site name -> dense dloss/dW (m, n)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with everything_in_double():
        yield


def attach(model: Any, **options: Any) -> LowRankAdapter:
    """An adapter with random float64 operands that change the model a lot."""
    adapter = LowRankAdapter(model, rank=RANK, **options).attach()
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for group in adapter.groups:
        count = len(group.sites)
        left, right = 0.4 * normal(count, group.m, RANK), 0.4 * normal(count, group.n, RANK)
        adapter.install(group, left, normal(count, RANK), right)
    return adapter


def dense_gradients(model: Any, adapter: LowRankAdapter, example: Example) -> Gradients:
    """Autograd of one example's mean loss with respect to explicit W0 + Z, without any hook of ours."""
    names = {site.name: site for site in adapter.sites}
    adapter.detach()
    leaves, replaced = {}, {}
    for name, site in names.items():
        z = (site.left * site.mid @ site.right.T).detach().requires_grad_(True)
        leaves[name] = z
        replaced[f"{name}.weight"] = site.module.weight + (z.T if isinstance(site.module, Conv1D) else z)
    ids = torch.tensor(example.input_ids, dtype=torch.long)[None]
    labels = torch.tensor(example.labels, dtype=torch.long)[None]
    inputs = {"input_ids": ids, "use_cache": False}
    logits = functional_call(model, replaced, kwargs=inputs, tie_weights=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    loss = loss / (labels[0, 1:] != -100).sum().clamp_min(1)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    adapter.attach()
    return dict(zip(leaves, gradients, strict=True))


def check(
    captured: Captured, adapter: LowRankAdapter, expected: list[Gradients], tolerance: float = 1e-10
) -> None:
    """P_i = G_i right and Q_i = G_i^T left, relative to the largest entry."""
    assert captured.units == len(expected)
    for s, site in enumerate(adapter.sites):
        g = torch.stack([gradients[site.name] for gradients in expected])
        for got, want in ((captured.p[s], g @ site.right), (captured.q[s], g.mT @ site.left)):
            assert got.dtype == torch.float64
            assert float((got - want).abs().max()) <= tolerance * float(want.abs().max()), site.name


def gradients_of(model: Any, adapter: LowRankAdapter, batch: MicroBatch) -> Captured:
    return micro_batch_gradients(adapter, batch)[0]


def by_record(parts: list[tuple[MicroBatch, Captured]], count: int) -> Captured:
    """The rows of several micro-batches in the order of the examples."""
    order = torch.argsort(torch.cat([batch.record_index for batch, _ in parts]))
    assert len(order) == count
    columns = zip(*(captured.p + captured.q for _, captured in parts), strict=True)
    tensors = [torch.cat(column)[order] for column in columns]
    half = len(tensors) // 2
    return Captured(tensors[:half], tensors[half:])


def test_a_layer_that_is_given_rows_of_several_heads() -> None:
    """As the shared one of DeepSeek, whose input is (rows, 1, tokens, features)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 4, "initializer_range": 0.3}
    config = hf.DeepseekV3Config(vocab_size=61, pad_token_id=0, **sizes, **heads, **ranks)
    model = hf.DeepseekV3ForCausalLM(config).double().eval()
    adapter = attach(model, target_modules=["kv_b_proj", "o_proj"])
    examples = Examples(uneven_examples(), pad_token_id=0)
    expected = [dense_gradients(model, adapter, example) for example in examples]
    batch = one_batch(list(examples), double=True)
    captured = by_record([(batch, gradients_of(model, adapter, batch))], len(examples))
    check(captured, adapter, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_loop_of_single_examples(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    adapter = attach(model)
    examples = Examples(uneven_examples(), pad_token_id=0)
    expected = [dense_gradients(model, adapter, example) for example in examples]

    for pad in (0, 17):
        batch = one_batch(examples, pad=pad, double=True)
        check(by_record([(batch, gradients_of(model, adapter, batch))], len(examples)), adapter, expected)

    for tokens in (10**6, 45, 1):  # one micro-batch, two, seven
        batches = [in_double(b) for b in micro_batches(range(7), examples, max_tokens=tokens)]
        assert len(batches) == {10**6: 1, 45: 2, 1: 7}[tokens]
        parts = [(batch, gradients_of(model, adapter, batch)) for batch in batches]
        check(by_record(parts, len(examples)), adapter, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox", "gpt2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_keeps_them_exact_step_after_step(family: str, reentrant: bool) -> None:
    model = tiny_model(family, dtype=torch.float64)
    adapter = attach(model)
    steps = [uneven_examples(seed) for seed in (0, 1)]
    expected = [[dense_gradients(model, adapter, example) for example in examples] for examples in steps]
    adapter.detach()
    set_checkpointing(model, reentrant=reentrant)
    adapter.attach()
    calls = _count_recomputation(adapter)
    model.train()
    for examples, want in zip(steps, expected, strict=True):
        batch = one_batch(examples, double=True)
        check(by_record([(batch, gradients_of(model, adapter, batch))], len(examples)), adapter, want)
    # Every forward pass ran twice: checkpointing was really on. One more finds out what follows the output layer.
    assert calls[0] == 2 * len(steps) + 1


def _count_recomputation(adapter: LowRankAdapter) -> list[int]:
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    adapter.sites[0].module.register_forward_pre_hook(count)
    return calls


def test_a_module_that_is_used_twice_adds_its_gradients_before_any_norm() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    model.model.layers[1] = model.model.layers[0]
    adapter = attach(model)
    assert len(adapter.sites) == 7
    examples = uneven_examples()
    expected = [dense_gradients(model, adapter, example) for example in examples]
    batch = one_batch(examples, double=True)
    check(by_record([(batch, gradients_of(model, adapter, batch))], len(examples)), adapter, expected)


def test_units_of_several_records_are_the_mean_of_their_records() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    adapter = attach(model)
    examples = uneven_examples()
    single = [dense_gradients(model, adapter, example) for example in examples]
    units = [[4, 0, 2], [1], [3, 6]]
    batch = one_batch(examples, units, double=True)
    members = [batch.record_index[batch.unit_index == u].tolist() for u in range(batch.unit_count)]
    assert sorted(members) == sorted(units)
    captured, losses = micro_batch_gradients(adapter, batch)
    expected = [
        {name: sum(single[i][name] for i in unit) / len(unit) for name in single[0]} for unit in members
    ]
    check(captured, adapter, expected)
    assert losses.shape == (3,)


def test_units_are_told_apart_by_their_index_alone() -> None:
    # As many rows as units, one of them empty: rows 0 and 1 are one unit all the same.
    model = tiny_model("llama", dtype=torch.float64)
    adapter = attach(model)
    batch = one_batch(uneven_examples(lengths=(9, 8, 7))[:3], double=True)
    rows = gradients_of(model, adapter, batch)
    index = torch.tensor([0, 0, 2])
    units = gradients_of(model, adapter, replace(batch, unit_index=index))
    for r, u in zip(rows.p + rows.q, units.p + units.q, strict=True):
        torch.testing.assert_close(u, torch.stack([r[0] + r[1], torch.zeros_like(r[0]), r[2]]))


def test_the_summed_gradient_is_the_sum() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    adapter = attach(model)
    batch = one_batch(uneven_examples(), double=True)
    each = gradients_of(model, adapter, batch)
    total, losses = micro_batch_gradients(adapter, batch, summed=True)
    assert total.units == 1
    assert losses.shape == (7,)
    for a, b in zip(total.p + total.q, each.p + each.q, strict=True):
        torch.testing.assert_close(a[0], b.sum(dim=0), rtol=1e-10, atol=1e-13)


def test_rows_without_labels_have_a_gradient_of_exactly_zero() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    adapter = attach(model)
    rng = np.random.default_rng(0)
    empty = Example(np.zeros(0, np.int32), np.zeros(0, np.int32))
    examples = [random_example(rng, 9), random_example(rng, 6, 0), random_example(rng, 1), empty]
    captured = gradients_of(model, adapter, one_batch(examples, double=True))
    for t in captured.p + captured.q:
        assert torch.isfinite(t).all()
        assert (t[1:] == 0).all()
        assert (t[0] != 0).any()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_row_does_not_feel_its_neighbours(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    adapter = attach(model)
    rng = np.random.default_rng(3)
    victim = random_example(rng, 11, 5)

    def victims_gradient(others: list[Example], place: int) -> list[Tensor]:
        examples = [*others[:place], victim, *others[place:]]
        batch = one_batch(examples, double=True)
        captured = gradients_of(model, adapter, batch)
        row = int((batch.record_index == place).nonzero())
        return [t[row] for t in captured.p + captured.q]

    baseline = victims_gradient([random_example(rng, 7) for _ in range(3)], 0)
    neighbourhoods = [
        ([random_example(rng, 7) for _ in range(3)], 2),  # other ids, another place
        ([random_example(rng, 23, 1), random_example(rng, 2)], 1),  # other lengths and labels
        ([random_example(rng, 30, 29) for _ in range(9)], 9),  # many more label tokens
        ([], 0),
    ]
    for others, place in neighbourhoods:
        for got, want in zip(victims_gradient(others, place), baseline, strict=True):
            assert float((got - want).abs().max()) <= 1e-12 * float(want.abs().max())


@pytest.mark.parametrize("training", [False, True])
def test_dropout_differs_between_rows_and_only_where_gradients_are_gathered(training: bool) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    adapter = attach(model, dropout=0.5)
    example = uneven_examples()[0]
    batch = one_batch([example, example, example], double=True)
    model.train(training)
    with torch.no_grad():
        rows = model(input_ids=batch.input_ids).logits
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-12, atol=1e-12)
    rows = gradients_of(model, adapter, batch).q[0]
    assert not torch.allclose(rows[0], rows[1])
    assert not torch.allclose(rows, gradients_of(model, adapter, batch).q[0])


def test_dropout_has_the_gradient_of_its_own_mask() -> None:
    # With the same torch seed the mask is the same, so a finite difference of the loss is that of the gradient.
    model = tiny_model("llama", dtype=torch.float64)
    adapter = attach(model, dropout=0.5, target_modules=["q_proj"], layers_to_transform=[1])
    batch = one_batch(uneven_examples()[:1], double=True)
    (site,) = adapter.sites
    left, mid, right = (t.clone() for t in (site.left, site.mid, site.right))

    def loss_at(change: Tensor) -> float:
        torch.manual_seed(5)
        adapter.install(adapter.groups[0], (left + change)[None], mid[None], right[None])
        with torch.no_grad(), adapter.capture(torch.arange(1)):
            found = label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)
            return float(weighted_cross_entropy(found, batch.token_weight)[0])

    torch.manual_seed(5)
    gradient = gradients_of(model, adapter, batch).p[0][0] * mid  # dloss/dleft = G right diag(mid)
    direction = torch.randn_like(left)
    slope = (loss_at(1e-5 * direction) - loss_at(-1e-5 * direction)) / 2e-5
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_opacus_agrees_on_the_factors_of_a_peft_model(family: str) -> None:
    from opacus import GradSampleModule

    scale = 1.5
    examples = [e for e in uneven_examples() if (e.labels[1:] >= 0).any()]
    batch = one_batch(examples, double=True)
    base = tiny_model(family, dtype=torch.float64)
    targets = ["c_attn", "c_proj", "c_fc"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    adapter = attach(base, target_modules=targets)
    for group in adapter.groups:
        left, right = (torch.stack([getattr(s, side) for s in group.sites]) for side in ("left", "right"))
        adapter.install(group, left, torch.full((len(group.sites), RANK), scale, dtype=torch.float64), right)
    ours = gradients_of(base, adapter, batch)
    adapter.detach()

    options = {"target_modules": targets, "fan_in_fan_out": family == "gpt2", "task_type": "CAUSAL_LM"}
    peft_model = with_lora(base, RANK, lora_alpha=scale * RANK, **options)
    for site in adapter.sites:
        layer = peft_model.base_model.model.get_submodule(site.name)
        layer.lora_B["default"].weight.data = site.left.clone()
        layer.lora_A["default"].weight.data = site.right.T.clone()
    sampled = GradSampleModule(peft_model.double().train(), batch_first=True, loss_reduction="sum")
    logits = sampled(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, batch.labels[:, 1:], reduction="none")
    (losses * batch.token_weight[:, 1:]).sum().backward()
    for s, site in enumerate(adapter.sites):
        layer = peft_model.base_model.model.get_submodule(site.name)
        left, right = (
            layer.lora_B["default"].weight.grad_sample,
            layer.lora_A["default"].weight.grad_sample.mT,
        )
        torch.testing.assert_close(scale * ours.p[s], left, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(scale * ours.q[s], right, rtol=1e-9, atol=1e-12)


def test_gradients_of_a_bfloat16_model_are_kept_in_float32() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    adapter = LowRankAdapter(model, rank=RANK).attach()
    for group in adapter.groups:
        count = len(group.sites)
        left, right = torch.randn(count, group.m, RANK), torch.randn(count, group.n, RANK)
        adapter.install(group, left, torch.ones(count, RANK), right)
    captured = gradients_of(model, adapter, one_batch(uneven_examples()))
    assert {t.dtype for t in captured.p + captured.q} == {torch.float32}
