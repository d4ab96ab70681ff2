"""Whether a model can be trained privately at all: refused before the run folder exists and a record is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import MODEL_FOR_MASKED_LM_MAPPING

from privlora.adapters import LowRankAdapter
from privlora.adapters.quantised import bits, computes_in, hold, let_go, precisions
from privlora.adapters.targets import output_layer
from privlora.data.examples import IGNORED, Examples, pad_token
from privlora.errors import DataError, ModelError, reason_of
from privlora.evaluation.batches import rotary_kinds, stretched_by_length
from privlora.losses import class_logits, label_logits, label_states
from privlora.names import UNUSED
from privlora.training.reach import ROWS, TOKENS, noting_inputs, place_of

_HALF = 4
# Below float32 the width of a micro-batch is a multiple of this: kernels take sums over tokens in blocks of that size.
_COLUMNS: Final = 32
_FINEST: Final = 8  # where rows of other widths are computed apart: of short ones
_LENGTHS: Final = torch.tensor([8, 7, 6])  # of the rows; the rest is padding, as in training
_KEPT: Final = ((2, 0), (0, 2))  # (row, its new place): both get other neighbours on either side
# Where models say how many positions they have.
_POSITIONS: Final = ("max_position_embeddings", "max_seq_len", "max_target_positions", "seq_length")
# Logits move this much without cause, as a part of what a token moves those at its own position: far above rounding
# (kernels round by the shape of what they are given, which a mixture of experts makes others decide).
_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.05}

# In layers of 8 bits outliers of later tokens and of other rows decide how a token is rounded: by up to 0.15 of its own
# effect in a model of 260,000 parameters. There each unit goes through the model by itself.
_OUTLIERS: Final = 0.5

_LEAVE_OUT: Final = (
    "exclude it with adapter.exclude_modules, or set adapter.target_modules=all-linear, which does"
)

# In names of classes whose modules send tokens to parts of the model.
_ROUTING: Final = re.compile("Router|MoE|Moe|MOE|Experts")


def refuse_float16(model: torch.nn.Module, stored: bool = False) -> None:
    """Raise ModelError for a model with float16 weights. stored: whether its files hold such, if it has no weights."""
    fix = "set model.dtype to bfloat16 or float32 (of a loaded model: model.to(torch.bfloat16))"
    own = ((module, p) for module in model.modules() for p in module.parameters(recurse=False))
    if stored or any(p.dtype == torch.float16 and bits(module) != 4 for module, p in own):
        raise ModelError("the model is stored in float16, whose gradients overflow", fix=fix)
    if any(bits(module) == 4 and computes_in(module) == torch.float16 for module in model.modules()):
        what = "the model's packed weights compute in float16, whose gradients overflow"
        raise ModelError(what, fix="load it with bnb_4bit_compute_dtype bfloat16 or float32")


def refuse_adapted(model: torch.nn.Module) -> None:
    """Raise ModelError for a model that holds an adapter already: peft's, or any LoRA layer."""
    if hasattr(model, "peft_config") or any("lora_" in name for name, _ in model.named_parameters()):
        raise ModelError(
            "the model holds an adapter already",
            why="what is released would fit this adapted model alone, and no base model could load it",
            fix="give the base model; or merge_and_unload() the adapter, save_pretrained() the result, and give that",
        )


def refuse_encoder(model: Any) -> None:
    """Raise ModelError for a language model of which its class says that tokens see later ones. Needs no weights."""
    config = getattr(model, "config", None)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        raise _not_causal()


def _not_causal() -> ModelError:
    return ModelError(
        "the model is not causal: a later token changes what it predicts earlier",
        fix="use a decoder-only model (an encoder such as BERT is none, unless its config sets is_decoder)",
    )


def refuse_out_of_reach(model: torch.nn.Module, tokenizer: Any, *, max_length: int) -> None:
    """Raise ModelError for records longer than the model reads, or a tokenizer whose ids it does not know.

    Needs no weights. Tokens that were added to the vocabulary may lie beyond it as long as no record holds one:
    ``refuse_unknown_tokens`` looks.
    """
    positions = positions_of(model)
    if positions is not None and max_length > positions:
        raise ModelError(
            f"data.max_length={max_length} exceeds the {positions} positions of the model",
            why="the model does not read longer records",
            fix=f"set data.max_length to at most {positions}",
        )
    known = _vocabulary(model)
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    largest = max(tokenizer.vocab_size - 1, *(token for token in ends if token is not None))
    if known is not None and largest >= known:
        raise ModelError(
            f"the tokenizer has token ids up to {largest}, but the model knows only those below {known}",
            why="a record with another one would end a step before it is charged, and so show that it was drawn",
            fix="use the model's own tokenizer, or resize the model's embeddings and save it",
        )


def refuse_unknown_tokens(model: torch.nn.Module, *examples: Examples) -> None:
    """Raise DataError if a record holds a token that the model does not know; which one is not said."""
    known = _vocabulary(model)
    if known is not None and any(each.largest_id >= known for each in examples):
        raise DataError(
            f"a record holds a token that the model does not know: it has {known}, and the tokenizer more",
            why="the step that draws the record would end before it is charged, and so show that it was drawn",
            fix="use the model's own tokenizer, resize the model's embeddings, or remove such records",
        )


def steady_width(adapter: LowRankAdapter, width: int, device: torch.device | None = None) -> int:
    """To how many columns a micro-batch of ``width`` is padded below float32 (`gradients.steadied`).

    device: where it will be, if not where the model is."""
    apart = _apart(device or adapter.device)
    columns = min(_COLUMNS, max(_FINEST, 2 ** width.bit_length() // 16)) if apart else _COLUMNS
    wider, positions = (width // columns + 1) * columns, positions_of(adapter.model)
    return max(width, wider if positions is None else min(wider, positions))


def own_width(adapter: LowRankAdapter) -> Callable[[int], int] | None:
    """`steady_width` where units of several widths are computed apart, so that a unit's width follows from itself."""
    return partial(steady_width, adapter) if adapter.reduced_precision and _apart(adapter.device) else None


def _apart(device: torch.device) -> bool:
    return device.type == "cpu"  # a GPU waits for each micro-batch more


def refuse_too_short(adapter: LowRankAdapter, tokenizer: Any, *, max_length: int) -> None:
    """Raise ModelError for a model that cannot read ``max_length`` tokens, whatever its configuration says of it.

    One forward pass of as many random tokens, padded as they will be. adapter: detached; its model is in evaluation
    mode, and is not changed.
    """
    known = torch.tensor(_ordinary_tokens(adapter.model, tokenizer))
    generator = torch.Generator().manual_seed(0)
    tokens = known[torch.randint(len(known), (1, max_length), generator=generator)]
    more = steady_width(adapter, max_length) - max_length if adapter.reduced_precision else 0
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (0, more))
    tokens = torch.nn.functional.pad(tokens, (0, more), value=pad_token(tokenizer))
    try:
        _logits(adapter, tokens, mask)
    except ModelError as error:
        raise ModelError(
            f"with data.max_length={max_length}, {error.what}",
            why="a record of that length would end a step before it is charged, and so show that it was drawn",
            fix="lower data.max_length to what the model reads, and use a tokenizer with the model's padding token",
        ) from None


def refuse_coupled(adapter: LowRankAdapter, tokenizer: Any) -> None:
    """Raise ModelError for a model whose gradients cannot be told apart by record.

    A record's gradient is that record's alone only if every token is predicted from those before it in its own row, and
    if the rows of an adapted layer's input are the records. Three forward passes of three padded rows of random tokens
    show it: a first one; one with other later tokens, which must not move an earlier logit; and one whose rows have
    other places and another companion, which must not move a row's logits. Then the logits that training takes, of
    label positions alone, must be those of the first pass.

    adapter: detached; its model is in evaluation mode, and is not changed.
    """
    probe = _Probe(adapter, tokenizer)
    with _rows_come_first(adapter):
        first = probe.logits(probe.tokens[:ROWS], _LENGTHS)
    later = probe.logits(
        torch.cat([probe.tokens[:ROWS, :_HALF], probe.others[:ROWS, _HALF:]], dim=1), _LENGTHS
    )
    shortest, rounding = int(_LENGTHS.min()), _rounding(adapter.model)
    change = _distance(later, first)[:, :shortest]
    allowed = rounding * float(change[:, _HALF:].median())
    # A true dependence shows in every row; what rounding can do to one (another expert) it does not do to all.
    if float(change[:, :_HALF].amin(dim=0).max()) > allowed:
        raise _not_causal()
    if float(probe.moved(first)[:, :shortest].amin(dim=0).max()) > allowed:
        raise _coupled("a record's logits depend on the records beside it")
    if _leaked(adapter, probe.filled, probe.mask) > rounding:
        raise _coupled("the gradient of a record's loss reaches the records beside it")
    _refuse_other_labels(adapter, probe.filled, probe.mask, first, allowed)


def refuse_coupled_texts(adapter: LowRankAdapter, tokenizer: Any) -> None:
    """`refuse_coupled` of a classifier, whose tokens may see each other: a record's logits, and the gradient of its
    loss, must be the same whatever stands beside it and however far it is filled up. Raises ModelError.

    adapter: detached; its model is in evaluation mode, and pads by the tokenizer's token.
    """
    probe = _Probe(adapter, tokenizer)
    with _rows_come_first(adapter):
        first = probe.logits(probe.tokens[:ROWS], _LENGTHS)
    other = probe.logits(probe.tokens[[1, 2, ROWS]], _LENGTHS[torch.tensor([1, 2, 0])])
    rounding = _rounding(adapter.model)
    # As a part of what other tokens in the same row do to its logits.
    allowed = rounding * float(_distance(other[:2], first[:2]).median())
    company = float(probe.moved(first, TOKENS + _HALF).max())
    if company > allowed or _leaked(adapter, probe.filled, probe.mask) > rounding:
        raise _coupled("a record's logits depend on the records beside it, or on how far it is filled up")


class _Probe:
    """Rows of random tokens for a model. tokens, others: (rows + 1, tokens), which differ everywhere. filled, mask: the
    first rows as they are padded."""

    def __init__(self, adapter: LowRankAdapter, tokenizer: Any) -> None:
        self._adapter, self._pad = adapter, pad_token(tokenizer)
        known = torch.tensor(_ordinary_tokens(adapter.model, tokenizer))
        generator = torch.Generator().manual_seed(0)
        index = torch.randint(len(known), (ROWS + 1, TOKENS), generator=generator)
        others = index + torch.randint(1, max(2, len(known)), index.shape, generator=generator)
        self.tokens, self.others = known[index], known[others % len(known)]
        self.mask = torch.arange(TOKENS) < _LENGTHS[:, None]
        self.filled = torch.where(self.mask, self.tokens[:ROWS], self._pad)

    def logits(self, rows: Tensor, lengths: Tensor, width: int = TOKENS) -> Tensor:
        """Of rows of such lengths, filled up to ``width``."""
        mask = torch.arange(width) < lengths[:, None]
        rows = torch.nn.functional.pad(rows, (0, width - TOKENS), value=self._pad)
        return _logits(self._adapter, torch.where(mask, rows, self._pad), mask.long())

    def moved(self, first: Tensor, width: int = TOKENS) -> Tensor:
        """How far logits of `_KEPT` rows are from ``first`` in other places, next to a row that was not there."""
        order = torch.tensor([2, ROWS, 0])  # the last row drawn takes the place of row 1
        found = self.logits(self.tokens[order], _LENGTHS[torch.tensor([2, 1, 0])], width)
        return torch.stack([_distance(found[place], first[row]) for row, place in _KEPT])


def _coupled(how: str) -> ModelError:
    return ModelError(
        f"the model couples the rows of a batch: {how}",
        why="one record then changes the gradients of others, and no clipping bounds that",
        fix="use a model that treats each row by itself, or another model.attn_implementation, such as sdpa",
    )


def _rounding(model: torch.nn.Module) -> float:
    """Of the coarsest part: some models give float32 logits whatever they compute in."""
    if any(bits(module) == 8 for module in model.modules()):
        return _OUTLIERS
    return max(_ROUNDING.get(dtype, _ROUNDING[torch.bfloat16]) for dtype in precisions(model))


def public_logits(adapter: LowRankAdapter) -> Tensor:
    """(1, tokens, vocabulary) float32 on the CPU, of fixed tokens. Raises ModelError for whatever goes wrong."""
    model: Any = adapter.model
    ids = torch.arange(TOKENS)[None] % model.get_input_embeddings().weight.shape[0]
    return _logits(adapter, ids, torch.ones_like(ids)).float().cpu()


def _leaked(adapter: LowRankAdapter, input_ids: Tensor, mask: Tensor) -> float:
    """How much of the gradient of the middle row's logits lies in the other rows' embeddings, as a part of its own.

    0 for models that do not tell their embeddings. Raises ModelError if there is no backward pass.
    """
    model: Any = adapter.model
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if embeddings is None:
        return 0.0
    seen: list[Tensor] = []

    def keep(_: torch.nn.Module, __: Any, out: Tensor) -> Tensor:
        seen.append(out.detach().requires_grad_(True))
        return seen[-1]

    handle = embeddings.register_forward_hook(keep)
    try:
        logits = _logits(adapter, input_ids, mask.long(), graph=True)
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(logits.shape[1:], generator=generator)
        if logits.dim() == 3:
            weights = weights * mask[1][:, None]
        total = (logits[1].double() * weights.to(logits.device).double()).sum()
        gradient = torch.autograd.grad(total, seen[0], allow_unused=True)[0] if seen else None
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - as above: the tokens are random
        raise ModelError(
            f"the model has no backward pass ({type(error).__name__}: {reason_of(error)})",
            fix="set model.attn_implementation to sdpa or eager, or use another device or model",
        ) from None
    finally:
        handle.remove()
    if gradient is None:
        return 0.0
    squares = gradient.double().square().sum(dim=(1, 2))
    return float(((squares[0] + squares[2]) / squares[1]).sqrt().nan_to_num(nan=0.0))


def _refuse_other_labels(
    adapter: LowRankAdapter, tokens: Tensor, mask: Tensor, logits: Tensor, allowed: float
) -> None:
    """Raise ModelError if the logits of label positions are not among ``logits`` (rows, tokens, vocabulary).

    A record's labels would then be predicted from another one's states. tokens, mask: (rows, tokens). allowed: by how
    much rounding may move a logit.
    """
    ids, labels = tokens.to(adapter.device), tokens.where(mask, IGNORED)
    rows, before = mask[:, 1:].nonzero(as_tuple=True)
    expected = logits[rows.to(logits.device), before.to(logits.device)]
    for find in (label_logits, label_states):
        reason, held = "", hold(adapter.model)
        try:
            with torch.no_grad(), _frozen_head(adapter.model):
                made = find(adapter.model, ids, mask.long().to(adapter.device), labels).logits
            if made.shape == expected.shape and float(_distance(made, expected).max()) <= allowed:
                continue
        except (torch.OutOfMemoryError, ModelError):
            raise
        except Exception as error:  # noqa: BLE001 - as in `_logits`
            reason = f" ({type(error).__name__}: {reason_of(error)})"
        finally:
            let_go(held)
        raise ModelError(
            f"the model gives other logits where only tokens with labels reach its output layer{reason}",
            why="a record's labels may then be predicted from another record, and no clipping bounds that",
            fix="use a model whose output layer makes each token's logits of that token's state alone",
        )


@contextmanager
def _frozen_head(model: torch.nn.Module) -> Iterator[None]:
    """As it is in training."""
    head = output_layer(model)
    before = [(p, p.requires_grad) for p in head.parameters()] if head is not None else []
    try:
        for p, _ in before:
            p.requires_grad_(False)
        yield
    finally:
        for p, flag in before:
            p.requires_grad_(flag)


@contextmanager
def _rows_come_first(adapter: LowRankAdapter) -> Iterator[None]:
    """Raise ModelError, after the forward pass inside, if an adapted layer's input is not (rows, tokens, features)."""
    pooled = frozenset[str]().union(*(part.pooled for part in adapter.parts))
    with noting_inputs({site.name: site.module for site in adapter.sites}) as shapes:
        yield
    refuse_places(shapes, pooled)


def refuse_places(shapes: Mapping[str, Sequence[tuple[int, ...]]], pooled: Collection[str] = ()) -> None:
    """Raise ModelError for an adapted layer that a pass of `ROWS` rows of tokens does not give (rows, tokens, ...).

    shapes: layer -> those of its inputs. pooled: layers that may be given (rows, features).
    """
    for name, seen in shapes.items():
        wrong = place_of(seen, (2,) if name in pooled else (3,))
        if wrong == UNUSED:
            raise ModelError(f"module {name!r} is not used when the model reads text", fix=_LEAVE_OUT)
        if wrong is not None:
            raise ModelError(
                f"module {name!r} gets input of shape {seen[0]} for {ROWS} rows of {TOKENS} tokens",
                why="the rows of different records cannot be told apart where they do not come first",
                fix=f"{_LEAVE_OUT}, or use another model",
            )


def _logits(
    adapter: LowRankAdapter, input_ids: Tensor, attention_mask: Tensor, *, graph: bool = False
) -> Tensor:
    """(rows, tokens, vocabulary), of a classifier (rows, outputs), as the model computes them. Raises ModelError for
    whatever goes wrong."""
    ids, mask = input_ids.to(adapter.device), attention_mask.to(adapter.device)
    held = hold(adapter.model)
    try:
        with torch.set_grad_enabled(graph):
            if len(adapter.parts) > 1:
                logits = class_logits(adapter.model, ids, mask)
            else:
                logits = adapter.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model raises anything; the tokens are random, so the cause may be shown
        raise ModelError(
            f"the model does not run on a batch of tokens ({type(error).__name__}: {reason_of(error)})",
            fix="use a causal language model of transformers, or one that is called the same way; sdpa and eager are "
            "what model.attn_implementation has everywhere",
        ) from None
    finally:
        let_go(held)
    known = logits.shape[:1] if len(adapter.parts) > 1 else logits.shape[:2]
    if known != ids.shape[: len(known)] or bool(logits.isnan().any()):
        what = f"the model gives no numbers for every token (logits of shape {tuple(logits.shape)})"
        raise ModelError(what, fix="use a causal language model, and check that its weights are finite")
    return logits


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """(..., vocabulary) each -> (...): root mean square difference; a logit that is infinite in both is equal."""
    return (a.double() - b.double()).nan_to_num(nan=0.0).square().mean(dim=-1).sqrt()


def _ordinary_tokens(model: torch.nn.Module, tokenizer: Any) -> list[int]:
    """Ids that stand for text: not special, not added, and known to the model."""
    known = _vocabulary(model) or tokenizer.vocab_size
    added = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    return [i for i in range(min(known, tokenizer.vocab_size)) if i not in added] or list(range(known))


def _vocabulary(model: Any) -> int | None:
    """How many token ids the model knows, if it tells."""
    layer = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(layer, "weight", None)
    return None if weight is None else int(weight.shape[0])


def routes_tokens(model: Any) -> bool:
    """Whether tokens choose parts of the model, as in a mixture of experts: by its config, or its modules' names.

    Where scores nearly tie, rounding decides, and rounding depends on the micro-batch's width. That could change a
    record's whole gradient, in the same way for similar records. So each unit is computed alone, at its own width.
    """
    config: Any = getattr(model, "config", None)
    return _has_experts(config.to_dict() if hasattr(config, "to_dict") else {}) or any(
        _ROUTING.search(type(module).__name__) for module in model.modules()
    )


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a number of experts is above 1 (num_local_experts, n_routed_experts, ...), also in a part of a config."""
    return any(
        _has_experts(value)
        if isinstance(value, Mapping)
        else "expert" in str(name) and isinstance(value, int) and value > 1
        for name, value in config.items()
    )


def text_config(model: Any) -> Any:
    """Of the part of a model that reads text; None where it has no configuration."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def positions_of(model: Any) -> int | None:
    """How many tokens the model reads at most, if it tells.

    Rotary positions that are stretched by a fixed factor count as stretched. Those that are stretched once a batch is
    long enough do not: there a long record would change the positions of the rows beside it, and some remember it.
    """
    config = text_config(model)
    named = (getattr(config, name, None) for name in _POSITIONS)
    positions = next((value for value in named if isinstance(value, int) and value > 0), None)
    if positions is None:
        return None
    kinds = rotary_kinds(config)
    originals = [each.get("original_max_position_embeddings") for each in kinds]
    own = getattr(config, "original_max_position_embeddings", None)
    original = min([positions, *(n for n in (*originals, own) if isinstance(n, int) and n)])
    if stretched_by_length(config):
        return original
    factors = [each["factor"] for each in kinds if each.get("factor")]
    return max([positions, *(int(original * factor) for factor in factors)])
