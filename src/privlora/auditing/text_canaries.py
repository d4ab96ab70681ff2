"""Canaries that are records: texts that nobody else has, and the loss on each of some records.

random-tokens   ids drawn uniformly from the vocabulary: as far from any text as a record can be
codes           "Reference code 3f9c…": text that a tokenizer knows, with 128 bits that only memory can supply
sampled         what the base model writes at a temperature (Mitchell et al. 2026)
prefix-suffix   the base model's words at temperature 1, and behind them as many uniform ids, or what it writes at a
                temperature (Meeus et al. 2025, whose prefixes are of the records' kind)
new-token       the same words, and behind them a token that only this canary has (Panda et al. 2025)
least-likely    a random token, and after it, time and again, the one that the base model thinks least likely

Prefix-suffix and new-token are trained and scored on what stands behind the prefix alone, as completions are. Their
prefixes may be those of public records, which are of the private ones' kind. No canary depends on a private record: a
seed, the tokenizer, the base model and what is public decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from privlora.adapters.quantised import bits
from privlora.auditing.asked import LEAST_LIKELY, NEW_TOKEN, OF_SHADOWS, check_kind
from privlora.auditing.bounds import Floats
from privlora.data.examples import IGNORED, Example, Examples
from privlora.data.units import Units
from privlora.errors import ConfigError, ModelError
from privlora.evaluation import next_token
from privlora.evaluation.batches import evaluating

_BATCH: Final = 2048  # tokens that the base model reads at once while it writes


@dataclass(frozen=True)
class _Drawing:
    """What canaries are made with. temperature: None for the kind's own. public: ids of public records."""

    count: int
    length: int
    tokenizer: Any
    model: Any
    generator: np.random.Generator
    temperature: float | None
    public: Sequence[np.ndarray] = ()

    @cached_property
    def usable(self) -> np.ndarray:
        return _usable_tokens(self.tokenizer, self.model)

    def written(self, length: int, temperature: float) -> np.ndarray:
        """(count, length) ids that the base model writes, one text a row. They begin with BOS, where there is one."""
        bos = self.tokenizer.bos_token_id
        starts = self.generator.choice(self.usable, self.count) if bos is None else np.full(self.count, bos)
        return self.continued(starts[:, None], length, temperature)

    def prefixes(self, length: int) -> np.ndarray:
        """(count, length) ids: how public records begin, each as often as any other, or what the base model writes."""
        if not self.public:
            return self.written(length, 1.0)
        long = [ids[:length] for ids in self.public if len(ids) >= length]
        if not long:
            what = f"no public record has the {length} tokens of a prefix"
            raise ConfigError(what, fix="give longer ones, or leave them out")
        turns = -(-self.count // len(long))
        chosen = np.concatenate([self.generator.permutation(len(long)) for _ in range(turns)])[: self.count]
        return np.stack([long[number] for number in chosen]).astype(np.int64)

    def continued(self, rows: np.ndarray, length: int, temperature: float) -> np.ndarray:
        """The rows (count, T) with what the base model writes behind each, (count, length)."""

        def draw(logits: Tensor) -> Tensor:
            below = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
            uniforms = torch.from_numpy(self.generator.random((len(logits), 1))).to(below.device)
            found = torch.searchsorted(below, uniforms * below[:, -1:], right=True)
            return found[:, 0].clamp_max(logits.shape[1] - 1)

        return continued(self.model, self.usable, rows, length, draw)


def _random_tokens(given: _Drawing) -> list[Example]:
    return [scored_end(given.generator.choice(given.usable, size=given.length)) for _ in range(given.count)]


def _codes(given: _Drawing) -> list[Example]:
    texts = [f"Reference code {given.generator.bytes(16).hex()}." for _ in range(given.count)]
    return [scored_end(np.array(ids)[: given.length]) for ids in given.tokenizer(texts)["input_ids"]]


def _sampled(given: _Drawing) -> list[Example]:
    return [scored_end(row) for row in given.written(given.length, given.temperature or 1.0)]


def _prefix_suffix(given: _Drawing) -> list[Example]:
    secret = given.length // 2
    rows = given.prefixes(given.length - secret)
    if given.temperature is not None:
        rows = given.continued(rows, given.length, given.temperature)
    else:
        rows = np.hstack([rows, given.generator.choice(given.usable, size=(given.count, secret))])
    return [scored_end(row, secret) for row in rows]


def _new_token(given: _Drawing) -> list[Example]:
    first = _first_new_token(given.model, given.tokenizer)
    prefixes = given.prefixes(given.length - given.length // 2)
    return [scored_end(np.append(row, first + number), 1) for number, row in enumerate(prefixes)]


def _least_likely(given: _Drawing) -> list[Example]:
    starts = given.generator.choice(given.usable, size=(given.count, 1))
    rows = continued(given.model, given.usable, starts, given.length, lambda logits: logits.argmin(-1))
    return [scored_end(row) for row in rows]


TEXT_CANARIES: dict[str, Callable[[_Drawing], list[Example]]] = {
    "random-tokens": _random_tokens,
    "codes": _codes,
    "sampled": _sampled,
    "prefix-suffix": _prefix_suffix,
    NEW_TOKEN: _new_token,
    LEAST_LIKELY: _least_likely,
}


def text_canaries(
    kind: str,
    count: int,
    length: int,
    tokenizer: Any,
    seed: int,
    model: Any = None,
    temperature: float | None = None,
    public: Sequence[np.ndarray] = (),
) -> list[Example]:
    """``count`` records of at most ``length`` tokens, a function of ``seed`` and of the base model, if it writes them.

    model: the base model without an adapter; "random-tokens" and "codes" need none. public: ids of PUBLIC records, (T,)
    each, whose beginnings are prefixes. Raises ConfigError as ``check_kind`` and where no record is as long as a
    prefix, ModelError for a model that can have no new tokens.
    """
    check_kind(kind, temperature, OF_SHADOWS, prefixes=bool(public))
    generator = np.random.default_rng(seed)
    return TEXT_CANARIES[kind](_Drawing(count, length, tokenizer, model, generator, temperature, public))


def _usable_tokens(tokenizer: Any, model: Any) -> np.ndarray:
    """Ids of all tokens but special ones and those that ``model``, if there is one, does not know; ascending."""
    special, known = set(tokenizer.all_special_ids), len(tokenizer)
    if hasattr(model, "get_input_embeddings"):
        known = min(known, len(model.get_input_embeddings().weight))
    return np.array([token for token in range(known) if token not in special])


def room_for(kind: str, model: Any, tokenizer: Any, count: int, seed: int) -> AbstractContextManager[None]:
    """Inside, the model knows the tokens of ``count`` canaries of this kind; afterwards it is as it was."""
    return _new_tokens(model, tokenizer, count, seed) if kind == NEW_TOKEN else nullcontext()


def continued(
    model: Any, usable: np.ndarray, rows: np.ndarray, length: int, choose: Callable[[Tensor], Tensor]
) -> np.ndarray:
    """Rows (n, T) of ids, and what follows each of them, (n, length).

    usable: ids that may follow, (U,). choose: from logits (rows, U) to places in ``usable``, (rows,).

    Raises ModelError where a logit is not a number.
    """
    found = []
    with evaluating(model) as device:
        allowed = torch.from_numpy(usable).to(device)
        for part in np.array_split(rows, min(len(rows), -(-len(rows) * length // _BATCH))):
            ids = torch.from_numpy(part.astype(np.int64)).to(device)
            while ids.shape[1] < length:
                logits = model(input_ids=ids, use_cache=False).logits[:, -1].to(device)[:, allowed]
                if not (logits < torch.inf).all():
                    what = "the base model's logits are not numbers, so it can write no canaries"
                    raise ModelError(what, fix="look at the model, or give canaries of another kind")
                ids = torch.cat([ids, allowed[choose(logits)][:, None]], dim=1)
            found.append(ids.cpu().numpy())
    return np.concatenate(found)


def add_records(examples: Examples, units: Units, more: list[Example]) -> tuple[Examples, Units]:
    """The records with ``more`` behind them, each a unit of its own."""
    unit_of_record = np.empty(len(examples) + len(more), dtype=np.int64)
    for unit in range(len(units)):
        unit_of_record[units[unit]] = unit
    unit_of_record[len(examples) :] = len(units) + np.arange(len(more))
    return examples.like([*examples, *more]), Units(unit_of_record, units.max_records_per_unit)


def record_losses(model: torch.nn.Module, examples: Examples) -> Floats:
    """Mean next-token loss of each record in nats per label token, (records,) float64; 0 where nothing is predicted.

    Raises ModelError where a loss is not finite.
    """
    losses = next_token.record_losses(model, examples).numpy()
    if not np.isfinite(losses).all():
        raise ModelError("the loss of a record is not a number", why="the model has diverged")
    return losses


def scored_end(ids: np.ndarray, secret: int | None = None) -> Example:
    """A record of which the last ``secret`` tokens are trained on and scored; None: all."""
    ids = ids.astype(np.int32)
    labels = ids.copy()
    if secret is not None:
        labels[: len(ids) - secret] = IGNORED
    return Example(ids, labels)


# Tokens that no record can hold: rows behind a model's vocabulary, for as long as an audit takes. A tokenizer gives ids
# of its own vocabulary, so an id behind it stands in no record, whatever the records are, and the ids of records stay
# what they are. Its row of the output layer is drawn like one of the model's own rows. The frozen model grows by these
# rows alone: what is trained, clipped and noised is what it was. Records do meet them as further wrong answers,
# which is a part of what is trained with canaries and of no run without them.


def _first_new_token(model: Any, tokenizer: Any) -> int:
    """The first id that the tokenizer never gives and the model does not know. Raises ModelError."""
    rows, largest = len(_layers(model)[0].weight), max(tokenizer.get_vocab().values(), default=-1)
    return max(rows, len(tokenizer), largest + 1)


@contextmanager
def _new_tokens(model: Any, tokenizer: Any, count: int, seed: int) -> Iterator[None]:
    """Inside, the model knows ``count`` ids from ``_first_new_token`` on; afterwards it has its own weights again.

    A new row is normal with the mean and the deviation of the model's own rows in each column, a function of ``seed``.

    Raises ModelError for a model that does not tell its embeddings and output layer, or has them packed or in parts.
    """
    first = _first_new_token(model, tokenizer)
    embeddings, head = _layers(model)
    parts = [(embeddings, "weight"), (head, "weight")]
    if getattr(head, "bias", None) is not None:
        parts.append((head, "bias"))
    kept = [(module, name, getattr(module, name)) for module, name in parts]
    grown: dict[int, torch.nn.Parameter] = {}  # tied weights are one parameter, and stay one
    try:
        for module, name, own in kept:
            if id(own) not in grown:
                rows = _rows(own.detach(), first + count - len(own), seed)
                whole = torch.cat([own.detach(), rows])
                grown[id(own)] = torch.nn.Parameter(whole, requires_grad=own.requires_grad)
            setattr(module, name, grown[id(own)])
        yield
    finally:
        for module, name, own in kept:
            setattr(module, name, own)


def _rows(own: Tensor, count: int, seed: int) -> Tensor:
    """(count, ...) like the rows of ``own``, (rows, ...)."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = torch.randn(count, *own.shape[1:], generator=generator).to(own.device)
    spread, centre = torch.std_mean(own.float(), dim=0)
    return (centre + spread * drawn).to(own.dtype)


def _layers(model: Any) -> tuple[Any, Any]:
    """The embeddings and the output layer."""
    found: list[Any] = [
        getattr(model, name)() if hasattr(model, name) else None
        for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    weights: list[Any] = [getattr(layer, "weight", None) for layer in found]
    plain = all(type(weight) is torch.nn.Parameter for weight in weights)
    if not plain or any(bits(layer) is not None for layer in found) or len(weights[0]) != len(weights[1]):
        what = "this model can have no new tokens: its embeddings and output layer are no plain tables of one size"
        raise ModelError(what, fix="give canaries of another kind, such as --kind prefix-suffix")
    return found[0], found[1]
