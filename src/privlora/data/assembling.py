"""From the token ids of segments to examples, many records at a time: BOS, EOS, what is cut, and where the loss is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frame:
    """What is the same for all examples: how they begin and end, and which tokens are labels."""

    bos: list[int]
    """The token that may begin a sequence, as a list of one or none."""
    adds_bos: bool
    eos: list[int]
    max_length: int
    label_all: bool


@dataclass(frozen=True, slots=True)
class Tokens:
    """Examples in flat arrays: those of example i are between positions i and i + 1 of what starts with ``starts``."""

    ids: NDArray[np.int32]
    """(T,) of all examples, one behind the other."""
    starts: Integers
    """(N + 1,) where each example starts in ``ids``; the last is T."""
    edges: NDArray[np.int32]
    """(2 R,) where each run of labelled tokens begins and ends, counted from the example's first token."""
    edge_starts: Integers
    """(N + 1,) where each example's edges start."""
    dropped: NDArray[np.int32]
    """(N,) tokens that did not fit into max_length."""
    blank: NDArray[np.bool_]
    """(N,) whether the trained part is empty."""

    @property
    def beside_ids(self) -> int:
        """Bytes of all that is kept beside the ids."""
        return sum(a.nbytes for a in (self.starts, self.edges, self.edge_starts, self.dropped, self.blank))

    @classmethod
    def joined(cls, parts: Iterable[Tokens]) -> Tokens:
        """Those of all parts, in their order. Each part is let go before the next is asked for."""
        ids, lengths, edges, edge_counts, dropped = (array("i") for _ in range(5))  # grow where they lie
        blank = array("b")
        for part in parts:
            ids.frombytes(part.ids.tobytes())
            lengths.frombytes(np.diff(part.starts).astype(np.int32).tobytes())
            edges.frombytes(part.edges.tobytes())
            edge_counts.frombytes(np.diff(part.edge_starts).astype(np.int32).tobytes())
            dropped.frombytes(part.dropped.tobytes())
            blank.frombytes(part.blank.tobytes())
        return cls(
            np.frombuffer(ids, np.int32),
            starts_of(np.frombuffer(lengths, np.int32)),
            np.frombuffer(edges, np.int32),
            starts_of(np.frombuffer(edge_counts, np.int32)),
            np.frombuffer(dropped, np.int32),
            np.frombuffer(blank, bool),
        )


def divided(ids: Sequence[int], frame: Frame) -> list[Sequence[int]]:
    """A text's token ids in consecutive parts of like length that fit into examples; its end of text in the last one.

    A text that fits is one part; so is an empty one.
    """
    whole = [*ids, *frame.eos] if frame.eos and list(ids[-1:]) != frame.eos else ids
    room = frame.max_length - bool(frame.adds_bos and frame.bos)
    count = max(1, -(-len(whole) // room))
    bounds = [len(whole) * part // count for part in range(count + 1)]
    return [whole[start:stop] for start, stop in pairwise(bounds)]


def starts_of(lengths: NDArray[np.integer[Any]]) -> Integers:
    """(N + 1,) where each of pieces of these (N,) lengths starts, and where the last one ends."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def edges_of(labelled: NDArray[np.bool_], starts: Integers) -> tuple[NDArray[np.int32], Integers]:
    """``edges`` and ``edge_starts`` of `Tokens` for (T,) flags of all tokens."""
    here = np.flatnonzero(labelled)
    first, last = np.zeros(len(labelled) + 1, bool), np.zeros(len(labelled) + 1, bool)
    first[starts], last[starts] = True, True
    begins = here[first[here] | ~labelled[here - 1]]
    ends = here[last[here + 1] | ~np.append(labelled, False)[here + 1]] + 1
    example = np.searchsorted(starts, begins, side="right") - 1
    edges = (np.stack([begins, ends], axis=1) - starts[example, None]).astype(np.int32)
    return edges.reshape(-1), starts_of(2 * np.bincount(example, minlength=len(starts) - 1))


def frame_of(
    tokenizer: PreTrainedTokenizerBase, max_length: int, label_all: bool, add_eos: bool, *, is_chat: bool
) -> Frame:
    encoded = tokenizer("a", return_special_tokens_mask=True)
    adds_bos = not is_chat and encoded["special_tokens_mask"][:1] == [1]
    bos = encoded["input_ids"][0] if adds_bos else tokenizer.bos_token_id
    eos = [tokenizer.eos_token_id] if add_eos and not is_chat else []
    return Frame([] if bos is None else [bos], adds_bos, eos, max_length, label_all)


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The token ids of each text by itself, without special tokens around it; a text that repeats is read once."""
    distinct = list(dict.fromkeys(texts))
    found = dict(zip(distinct, _encode(distinct, tokenizer), strict=True))
    return (found[text] for text in texts)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    backend = plain_backend(tokenizer)
    # verbose=False: the warning about long texts would print the length of a private one.
    whole = texts if backend is None else texts[:1]
    ids: list[list[int]] = (
        tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"] if whole else []
    )
    if backend is not None:  # its settings (no padding, no truncation) were made for the first text
        ids += [encoding.ids for encoding in backend.encode_batch_fast(texts[1:], add_special_tokens=False)]
    return ids


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What a fast tokenizer of transformers asks, where asking it oneself gives the same ids; else None."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = (
        (kind.__call__, PreTrainedTokenizerBase.__call__),
        *(
            (getattr(kind, name, None), getattr(PreTrainedTokenizerFast, name, None))
            for name in ("_encode_plus", "_batch_encode_plus", "_convert_encoding", "_call_one")
        ),
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast") or any(mine is not theirs for mine, theirs in own):
        return None
    return backend


def assemble(
    segments: Sequence[Sequence[tuple[list[int], bool]]], blank: Sequence[bool], frame: Frame
) -> Tokens:
    """Examples of records whose (token ids, whether they are trained on) are given segment by segment."""
    parts = list(chain.from_iterable(segments))
    sizes = np.array([len(ids) for ids, _ in parts], np.int64)
    source = np.fromiter(chain.from_iterable(ids for ids, _ in parts), np.int32, count=int(sizes.sum()))
    trained = np.repeat(np.array([flag for _, flag in parts], bool), sizes)
    ends_of_parts = starts_of(sizes)[np.cumsum([0, *map(len, segments)])]
    begins, ends = ends_of_parts[:-1], ends_of_parts[1:]

    begins_with_bos = np.zeros(len(segments), bool)  # a chat template or the text itself wrote it
    if frame.bos:
        some = begins < ends
        begins_with_bos[some] = source[begins[some]] == frame.bos[0]
    begins = begins + begins_with_bos
    bos = (begins_with_bos | frame.adds_bos) & bool(frame.bos)
    prompt = _before_trained(trained, begins, ends)
    lacks_eos = np.full(len(segments), bool(frame.eos))
    if frame.eos:
        some = begins < ends
        lacks_eos[some] = source[ends[some] - 1] != frame.eos[0]

    excess = np.maximum(0, bos + (ends - begins) + lacks_eos - frame.max_length)
    begins = begins + np.minimum(excess, prompt)
    kept = np.minimum(ends - begins, frame.max_length - bos)
    adds_eos = lacks_eos & (bos + kept < frame.max_length)
    starts = starts_of(bos + kept + adds_eos)

    ids, labelled = np.empty(starts[-1], np.int32), np.empty(starts[-1], bool)
    first = starts[:-1] + bos
    within = np.arange(kept.sum()) - np.repeat(starts_of(kept)[:-1], kept)
    to, of = within + np.repeat(first, kept), within + np.repeat(begins, kept)
    ids[to], labelled[to] = source[of], trained[of]
    # Nothing precedes BOS, so it is never predicted.
    ids[starts[:-1][bos]], labelled[starts[:-1][bos]] = frame.bos or 0, False
    ids[starts[1:][adds_eos] - 1], labelled[starts[1:][adds_eos] - 1] = frame.eos or 0, True
    if frame.label_all:
        labelled[:] = True
    return Tokens(ids, starts, *edges_of(labelled, starts), excess.astype(np.int32), np.array(blank, bool))


def _before_trained(trained: NDArray[np.bool_], begins: Integers, ends: Integers) -> Integers:
    """(N,) how many tokens from each of ``begins`` come before the first trained one, or before the end."""
    at = np.append(np.flatnonzero(trained), len(trained))
    return np.minimum(at[np.searchsorted(at, begins)], ends) - begins
