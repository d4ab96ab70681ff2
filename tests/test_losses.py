"""Losses per sequence: what transformers computes for one sequence alone, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, everything_in_double, one_batch, tiny_model, uneven_examples
from torch import Tensor

from privlora import losses
from privlora.data.batching import MicroBatch
from privlora.losses import LabelLogits, LabelStates, label_logits, label_states, weighted_cross_entropy


def found_in(model: Any, batch: MicroBatch) -> LabelLogits:
    return label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)


def labelled(logits: Tensor, targets: Tensor, rows: int) -> LabelLogits:
    """All tokens of ``rows`` rows but the first one of each."""
    where = torch.ones(rows, len(targets) // rows, dtype=torch.bool).nonzero()
    return LabelLogits(targets, where[:, 0], where[:, 1] + 1, rows, logits)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with everything_in_double():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_the_loss_that_transformers_gives_it_alone(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    examples = uneven_examples()
    batch = one_batch(examples, double=True)
    found = found_in(model, batch)
    _, losses = weighted_cross_entropy(found, batch.token_weight)
    rows = found.per_row(losses * found.at_labels(batch.token_weight))
    for row, record in enumerate(batch.record_index):
        example = examples[int(record)]
        ids = torch.tensor(example.input_ids, dtype=torch.long)[None]
        labels = torch.tensor(example.labels, dtype=torch.long)[None]
        if (labels[0, 1:] == -100).all():
            assert float(rows[row]) == 0.0
        else:
            expected = model(input_ids=ids, labels=labels).loss.detach()
            assert float(rows[row]) == pytest.approx(float(expected), rel=1e-10), family


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "gpt2"])
def test_only_label_positions_reach_the_output_layer(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    batch = one_batch(uneven_examples(), double=True)
    seen: list[torch.Size] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    found = found_in(model, batch)
    handle.remove()
    count = int((batch.labels[:, 1:] != -100).sum())
    assert seen == [torch.Size([1, count, VOCAB])]
    assert not head._forward_pre_hooks
    full = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    torch.testing.assert_close(found.logits, full[found.rows, found.columns - 1], rtol=1e-10, atol=1e-12)
    assert torch.equal(found.targets, batch.labels[found.rows, found.columns])


def test_the_hook_is_removed_when_the_model_fails() -> None:
    model = tiny_model()
    batch = one_batch(uneven_examples())
    with pytest.raises(IndexError):
        label_logits(model, batch.input_ids + VOCAB, batch.attention_mask, batch.labels)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_a_model_that_does_not_name_its_output_layer_works_too() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    batch = one_batch(uneven_examples())
    torch.testing.assert_close(found_in(Wrapped(), batch).logits, found_in(tiny_model(), batch).logits)


@pytest.mark.parametrize("count", [1, 7, 512, 513, 1100])
def test_the_gradient_equals_autograds(count: int) -> None:
    logits = (3 * torch.randn(count, 11, dtype=torch.float64)).requires_grad_(True)
    targets = torch.randint(0, 11, (count,))
    weights = torch.rand(1, count + 1, dtype=torch.float64)
    found = labelled(logits, targets, 1)
    total, losses = weighted_cross_entropy(found, weights)
    (ours,) = torch.autograd.grad(2 * total, logits)
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    (theirs,) = torch.autograd.grad(2 * (each * weights[0, 1:]).sum(), logits)
    torch.testing.assert_close(losses, each.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    assert not losses.requires_grad
    assert float(total.detach()) == pytest.approx(float((each.detach() * weights[0, 1:]).sum()), rel=1e-12)


def test_bfloat16_logits_have_float32_losses() -> None:
    logits = torch.randn(5, 11, dtype=torch.bfloat16, requires_grad=True)
    found = labelled(logits, torch.randint(0, 11, (5,)), 1)
    total, losses = weighted_cross_entropy(found, torch.ones(1, 6))
    assert losses.dtype == total.dtype == torch.float32
    (gradient,) = torch.autograd.grad(total, logits)
    expected = torch.softmax(logits.detach().float(), dim=-1)
    expected[torch.arange(5), found.targets] -= 1
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float(), expected, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_batch_without_labels_has_no_loss_and_a_backward_pass(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    batch = one_batch(uneven_examples()[-1:], double=True)
    found = found_in(model, batch)
    assert found.logits.shape == (0, VOCAB)
    total, losses = weighted_cross_entropy(found, batch.token_weight)
    assert losses.shape == (0,)
    assert float(total.detach()) == 0.0
    total.backward()
    assert _largest_gradient(model) == 0.0


def _largest_gradient(model: torch.nn.Module) -> float:
    gradients: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    return max(float(g.abs().max()) for g in gradients)


def test_weights_scale_each_tokens_own_gradient_only() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    found = labelled(logits, torch.randint(0, 7, (4,)), 2)
    weights = torch.tensor([[9.0, 1.0, 0.0], [9.0, 2.0, 5.0]], dtype=torch.float64)
    total, _ = weighted_cross_entropy(found, weights)
    (gradient,) = torch.autograd.grad(total, logits)
    assert float(gradient[1].abs().max()) == 0.0
    unit, _ = weighted_cross_entropy(found, torch.ones_like(weights))
    (plain,) = torch.autograd.grad(unit, logits)
    torch.testing.assert_close(gradient[3], 5 * plain[3])


def test_the_root_of_a_backward_pass_need_not_be_multiplied() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    found = labelled(logits, torch.randint(0, 7, (4,)), 2)
    weights = torch.rand(2, 3, dtype=torch.float64)
    (plain,) = torch.autograd.grad(weighted_cross_entropy(found, weights)[0], logits)
    weighted_cross_entropy(found, weights, is_root=True)[0].backward()
    assert torch.equal(logits.grad, plain)


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


def of_states(model: Any, batch: MicroBatch, find: Any = label_states) -> tuple[Any, Tensor, Tensor]:
    """What is found, the token losses, and the gradient by the states that reach the output layer, (batch, T, d)."""
    reached: list[Tensor] = []

    def reach(_: torch.nn.Module, __: Any, out: Any) -> None:
        states = out[0] if isinstance(out, tuple) else out.last_hidden_state
        reached[:] = [states.requires_grad_(True)] if not states.requires_grad else [states]
        states.retain_grad()

    handle = model.base_model.register_forward_hook(reach)
    try:
        found = find(model, batch.input_ids, batch.attention_mask, batch.labels)
    finally:
        handle.remove()
    total, each = weighted_cross_entropy(found, batch.token_weight, is_root=True)
    total.backward()
    assert reached[0].grad is not None
    return found, each, reached[0].grad


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "gpt-neox", "phi"])
@pytest.mark.parametrize("numbers", [2**25, 1])
def test_an_output_layer_in_blocks_gives_the_same(
    family: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_NUMBERS", numbers)
    monkeypatch.setattr(losses, "_FEW", 3)
    model = frozen(tiny_model(family, dtype=torch.float64))
    batch = one_batch(uneven_examples(), double=True)
    found, each, gradient = of_states(model, batch)
    assert isinstance(found, LabelStates)
    plain, expected, theirs = of_states(model, batch, label_logits)
    assert isinstance(plain, LabelLogits)
    torch.testing.assert_close(each, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-12)


def test_what_follows_the_output_layer_is_not_left_out() -> None:
    """Gemma 2 caps its logits; a head that is trained, hooked or replaced is taken as it is."""
    batch = one_batch(uneven_examples(), double=True)

    def kind(model: Any) -> type:
        return type(label_states(model, batch.input_ids, batch.attention_mask, batch.labels))

    assert kind(frozen(tiny_model("gemma2", dtype=torch.float64))) is LabelLogits
    assert kind(tiny_model("llama", dtype=torch.float64)) is LabelLogits  # its head would train
    hooked = frozen(tiny_model("llama", dtype=torch.float64))
    assert kind(hooked) is LabelStates
    handle = hooked.lm_head.register_forward_hook(lambda _, __, out: 2 * out)
    assert kind(hooked) is LabelLogits
    handle.remove()
    masking = frozen(tiny_model("llama", dtype=torch.float64))
    whole = masking.forward

    def forward(**inputs: Any) -> Any:
        out = whole(**inputs)
        out.logits[..., 3] = -1e9  # in place, as models do that never write some tokens
        return out

    masking.forward = forward
    assert kind(masking) is LabelLogits
    hooked.lm_head.forward = lambda states: torch.nn.Linear.forward(hooked.lm_head, 2 * states)
    assert kind(hooked) is LabelLogits


def test_finding_out_leaves_generators_as_they_are() -> None:
    model = frozen(tiny_model("gpt2", dtype=torch.float64)).train()
    batch = one_batch(uneven_examples(), double=True)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        found = label_states(model, batch.input_ids, batch.attention_mask, batch.labels)
        drawn.append(weighted_cross_entropy(found, batch.token_weight)[1])
    assert torch.equal(*drawn)
