"""Losses per sequence: what transformers computes for one sequence alone, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, everything_in_double, one_batch, tiny_model, uneven_examples
from torch import Tensor

from privlora import losses
from privlora.data.batching import MicroBatch
from privlora.errors import ModelError
from privlora.losses import (
    LabelLogits,
    LabelStates,
    divergences,
    label_logits,
    label_states,
    weighted_cross_entropy,
)


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


def same_as_plain(model: Any) -> type:
    """What ``label_states`` finds; its losses and gradients are those of the logits that the model gives."""
    batch = one_batch(uneven_examples(), double=True)
    found, each, gradient = of_states(model, batch)
    _, expected, theirs = of_states(model, batch, label_logits)
    torch.testing.assert_close(each, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-12)
    return type(found)


def llama() -> Any:
    return frozen(tiny_model("llama", dtype=torch.float64))


def _double_logits(_: torch.nn.Module, __: Any, out: Any) -> None:
    out.logits = 2 * out.logits


def _write_into_logits(_: torch.nn.Module, __: Any, out: Any) -> None:
    out.logits[..., 3] = -1e9


def test_what_follows_later_counts_from_then_on() -> None:
    """A hook on the model, one on all modules, or a cap that is set when the first batches have been through."""
    doubled = llama()
    assert same_as_plain(doubled) is LabelStates
    handle = doubled.register_forward_hook(_double_logits)
    assert same_as_plain(doubled) is LabelLogits
    handle.remove()
    written = llama()
    assert same_as_plain(written) is LabelStates
    written.register_forward_hook(_write_into_logits)
    assert same_as_plain(written) is LabelLogits
    capped = frozen(tiny_model("gemma2", dtype=torch.float64))
    capped.config.final_logit_softcapping = None
    assert same_as_plain(capped) is LabelStates
    capped.config.final_logit_softcapping = 2.0
    assert same_as_plain(capped) is LabelLogits
    model = llama()
    assert same_as_plain(model) is LabelStates

    def double(module: torch.nn.Module, _: Any, out: Any) -> Any:
        return 2 * out if module is model.lm_head else None

    handle = torch.nn.modules.module.register_module_forward_hook(double)
    try:
        assert same_as_plain(model) is LabelLogits
    finally:
        handle.remove()
    assert same_as_plain(model) is LabelStates


def test_hooks_on_the_way_back_count() -> None:
    model = llama()
    model.lm_head.register_full_backward_hook(lambda _, inputs, __: (3 * inputs[0],))
    assert same_as_plain(model) is LabelLogits
    model = llama()
    model.lm_head.register_full_backward_pre_hook(lambda _, outputs: (3 * outputs[0],))
    assert same_as_plain(model) is LabelLogits


def test_a_vocabulary_that_is_cut_is_cut() -> None:
    model = llama()
    model.lm_head = frozen(torch.nn.Linear(16, VOCAB + 9, bias=False, dtype=torch.float64))
    whole = model.forward

    def forward(**inputs: Any) -> Any:
        out = whole(**inputs)
        out.logits = out.logits[..., :VOCAB]
        return out

    model.forward = forward
    assert same_as_plain(model) is LabelLogits


def test_a_linear_layer_of_ones_own_is_asked() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = llama()
    own = Doubled(16, VOCAB, bias=False, dtype=torch.float64)
    own.weight = model.lm_head.weight
    model.lm_head = own
    assert same_as_plain(model) is LabelLogits


def test_the_bias_of_an_output_layer_counts() -> None:
    model = frozen(tiny_model("phi", dtype=torch.float64))
    torch.nn.init.normal_(model.lm_head.bias, std=3.0)
    assert same_as_plain(model) is LabelStates


def test_states_are_scaled_by_what_comes_from_above() -> None:
    states = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    head = frozen(torch.nn.Linear(4, 7, dtype=torch.float64))
    plain = labelled(head(states), torch.randint(0, 7, (6,)), 2)
    found = LabelStates(plain.targets, plain.rows, plain.columns, 2, states, head)
    torch.testing.assert_close(found.logits, plain.logits)
    weights = torch.rand(2, 4, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(5 * weighted_cross_entropy(each, weights)[0], states)[0]
        for each in (found, plain)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("first", [True, False])
def test_of_two_uses_of_an_output_layer_that_which_is_returned_is_meant(first: bool) -> None:
    model = llama()

    def forward(input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = [model.lm_head(states), model.lm_head(0.5 * states)]
        return SimpleNamespace(logits=logits[0 if first else 1])

    model.forward = forward
    assert same_as_plain(model) is (LabelStates if first else LabelLogits)


@pytest.mark.parametrize("find", [label_states, label_logits])
def test_an_output_layer_that_does_not_get_rows_of_tokens_gets_nothing(find: Any) -> None:
    """The check before a run has rows and tokens of its own; every other batch is looked at, too."""
    model = llama()

    def forward(input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        states = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return SimpleNamespace(logits=model.lm_head(states.transpose(0, 1)).transpose(0, 1))

    model.forward = forward
    batch = one_batch(uneven_examples(), double=True)
    with pytest.raises(ModelError, match="not given one state a token, row by row") as caught:
        find(model, batch.input_ids, batch.attention_mask, batch.labels)
    assert not any(character.isdigit() for character in str(caught.value))  # sizes of a batch are private


def test_finding_out_leaves_generators_as_they_are() -> None:
    model = frozen(tiny_model("gpt2", dtype=torch.float64)).train()
    batch = one_batch(uneven_examples(), double=True)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        found = label_states(model, batch.input_ids, batch.attention_mask, batch.labels)
        drawn.append(weighted_cross_entropy(found, batch.token_weight)[1])
    assert torch.equal(*drawn)


def test_divergences_are_those_of_the_definition() -> None:
    """Of p from q, as of torch.distributions; in blocks, and of logits in bfloat16."""
    generator = torch.Generator().manual_seed(5)
    p, q = (3 * torch.randn(700, 40, generator=generator) for _ in range(2))
    p, q = p.bfloat16(), q.bfloat16()
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p.double()), torch.distributions.Categorical(logits=q.double())
    )
    torch.testing.assert_close(divergences(p, q).double(), expected, rtol=1e-4, atol=1e-5)
    assert divergences(p, p).abs().max() < 1e-6
    p[:, 3:], q[:, 4:] = -torch.inf, -torch.inf  # tokens that a model never writes
    assert divergences(p, p).abs().max() < 1e-6
    assert divergences(p, q).isfinite().all()
    assert divergences(q, p).isposinf().all()
