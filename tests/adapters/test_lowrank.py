"""Attaching and detaching: the user's module is never wrapped, and comes back exactly as it was."""

from __future__ import annotations

import pytest
import torch
from adapter_cases import logits, with_operands
from tiny_models import one_batch, set_checkpointing, tiny_model, uneven_examples

from privlora.adapters import LowRankAdapter
from privlora.errors import ModelError, PrivacyError
from privlora.losses import label_logits
from privlora.training.gradients import micro_batch_gradients


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_detach_restores_the_module_exactly(family: str) -> None:
    model = tiny_model(family)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    bits = {name: t.clone() for name, t in model.state_dict().items()}
    before = logits(model)
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    assert not any(p.requires_grad for p in model.parameters())
    assert not torch.allclose(logits(model), before)
    micro_batch_gradients(adapter, one_batch(uneven_examples()))
    adapter.detach()
    adapter.detach()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(torch.equal(t, bits[name]) for name, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(logits(model), before)


def test_it_detaches_when_its_block_fails() -> None:
    model = tiny_model()
    with pytest.raises(ZeroDivisionError), LowRankAdapter(model, rank=2):
        raise ZeroDivisionError
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_the_attached_model_computes_with_w0_plus_z(family: str) -> None:
    model = tiny_model(family)
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    attached = logits(model)
    adapter.detach()
    for site in adapter.sites:
        z = site.left * site.mid @ site.right.T
        site.module.weight.data += z if z.shape == site.module.weight.shape and family != "gpt2" else z.T
    torch.testing.assert_close(logits(model), attached, rtol=1e-4, atol=1e-4)


def test_attaching_twice_is_an_error() -> None:
    adapter = LowRankAdapter(tiny_model(), rank=2).attach()
    with pytest.raises(ModelError, match="attached already"):
        adapter.attach()


def test_a_module_that_was_replaced_after_the_adapter_was_built_is_an_error() -> None:
    model = tiny_model()
    adapter = LowRankAdapter(model, rank=2)
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(16, 16)
    with pytest.raises(ModelError, match="replaced"):
        adapter.attach()
    assert all(p.requires_grad for p in model.parameters())


def test_a_backward_pass_outside_capture_is_refused() -> None:
    model = tiny_model()
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    batch = one_batch(uneven_examples())
    with adapter.capture(batch.record_index):
        found = label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)
    with pytest.raises(PrivacyError, match=r"outside LowRankAdapter\.capture"):
        found.logits.sum().backward()


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    model = tiny_model()
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    batch = one_batch(uneven_examples())
    with adapter.capture(torch.arange(2)):
        found = label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)
        with pytest.raises(PrivacyError, match="cannot be told apart"):
            found.logits.sum().backward()


def test_a_capture_that_was_abandoned_leaves_nothing_behind() -> None:
    model = tiny_model()
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    batch = one_batch(uneven_examples())
    clean, _ = micro_batch_gradients(adapter, batch)
    with adapter.capture(batch.record_index):
        found = label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)
        found.logits.sum().backward()
    again, _ = micro_batch_gradients(adapter, batch)
    for a, b in zip(clean.p + clean.q, again.p + again.q, strict=True):
        assert torch.equal(a, b)


def test_evaluation_inside_training_keeps_no_gradient() -> None:
    model = tiny_model()
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    logits(model)
    with pytest.raises(PrivacyError, match="got no gradient"):
        adapter.captured()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_may_be_switched_on_while_attached(reentrant: bool) -> None:
    model = tiny_model()
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    batch = one_batch(uneven_examples())
    plain, _ = micro_batch_gradients(adapter, batch)
    set_checkpointing(model, reentrant=reentrant)
    model.disable_input_require_grads()  # transformers 4 does not add these hooks
    model.train()
    checkpointed, _ = micro_batch_gradients(adapter, batch)
    for a, b in zip(plain.p + plain.q, checkpointed.p + checkpointed.q, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_captured_zero_clears_whole_units_only() -> None:
    model = tiny_model()
    adapter = with_operands(LowRankAdapter(model, rank=2)).attach()
    captured, _ = micro_batch_gradients(adapter, one_batch(uneven_examples()))
    before = [t.clone() for t in captured.p + captured.q]
    marked = torch.tensor([False, True] + [False] * 5)
    captured.zero(marked)
    for t, b in zip(captured.p + captured.q, before, strict=True):
        assert float(t[1].abs().max()) == 0.0
        assert torch.equal(t[~marked], b[~marked])


def test_a_rank_above_the_smaller_side_names_the_module() -> None:
    with pytest.raises(ModelError, match=r"adapter\.r=17 exceeds .*q_proj"):
        LowRankAdapter(tiny_model(), rank=17)


def test_groups_hold_every_site_once_in_the_order_of_sites() -> None:
    adapter = LowRankAdapter(tiny_model(), rank=2)
    assert [site for group in adapter.groups for site in group.sites] == adapter.sites
    assert all((site.m, site.n) == (group.m, group.n) for group in adapter.groups for site in group.sites)
    assert len(adapter.sites) == 14


@pytest.mark.parametrize("count", [3, 5])
def test_each_row_needs_a_unit(count: int) -> None:
    adapter = with_operands(LowRankAdapter(tiny_model(), rank=2)).attach()
    batch = one_batch(uneven_examples()[:4])
    with adapter.capture(batch.record_index):
        found = label_logits(adapter.model, batch.input_ids, batch.attention_mask, batch.labels)
        found.logits.sum().backward()
    with pytest.raises(PrivacyError, match=rf"4 rows says of {count} whose"):
        adapter.captured(torch.arange(count), count)
