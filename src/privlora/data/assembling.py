"""From texts to examples, many records at a time: token ids, BOS, EOS, what is cut, and where the loss is."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from privlora.data.rendering import Rendered, Span, control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
TruncationMode = Literal["keep_start", "keep_end"]


@dataclass(frozen=True, slots=True)
class Frame:
    """What is the same for all examples: how they begin and end, and which tokens are labels."""

    bos: list[int]
    """The token that may begin a sequence, as a list of one or none."""
    adds_bos: bool
    eos: list[int]
    max_length: int
    label_all: bool
    keeps: TruncationMode = "keep_start"
    """Which part of a text that is too long stays."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Examples in flat arrays: those of example i are between positions i and i + 1 of what starts with ``starts``."""

    codes: NDArray[np.int32]
    """(T,) of all examples, one behind the other: the id of a token that is learnt, else its complement, -1 - id."""
    starts: Integers
    """(N + 1,) where each example starts in ``codes``; the last is T."""
    dropped: NDArray[np.int32]
    """(N,) tokens that did not fit into max_length."""
    blank: Flags
    """(N,) whether the trained part is empty, or the prompt before it is cut away altogether."""

    @property
    def ids(self) -> NDArray[np.int32]:
        """(T,) a new array: of all tokens."""
        return np.maximum(self.codes, ~self.codes)

    @classmethod
    def joined(cls, parts: Iterable[Tokens]) -> Tokens:
        """Those of all parts, in their order. Each part is let go before the next is asked for."""
        codes, lengths, dropped = whole = [array("i") for _ in range(3)]  # grow where they lie
        blank = array("b")
        for part in parts:
            for held, more in zip(whole, (part.codes, np.diff(part.starts), part.dropped), strict=True):
                held.frombytes(more.astype(np.int32).tobytes())
            blank.frombytes(part.blank.tobytes())
        flat, sizes, lost = (np.frombuffer(each, np.int32) for each in (codes, lengths, dropped))
        return cls(flat, starts_of(sizes), lost, np.frombuffer(blank, bool))


def divided(ids: Sequence[int], frame: Frame) -> list[Sequence[int]]:
    """A text's token ids in consecutive parts of like length that fit into examples; its end of text in the last one.

    A text that fits is one part; so is an empty one.
    """
    whole = [*ids, *frame.eos] if frame.eos and list(ids[-1:]) != frame.eos else ids
    room = frame.max_length - bool(frame.adds_bos and frame.bos)
    count = max(1, -(-len(whole) // room))
    bounds = [len(whole) * part // count for part in range(count + 1)]
    return [whole[start:stop] for start, stop in pairwise(bounds)]


def starts_of(lengths: NDArray[Any]) -> Integers:
    """(N + 1,) where each of pieces of these (N,) lengths starts, and where the last one ends."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def frame_of(
    tokenizer: Any, max_length: int, label_all: bool, add_eos: bool, is_chat: bool, keeps: TruncationMode
) -> Frame:
    encoded = tokenizer("a", return_special_tokens_mask=True)
    adds_bos = not is_chat and encoded["special_tokens_mask"][:1] == [1]
    bos = encoded["input_ids"][0] if adds_bos else tokenizer.bos_token_id
    eos = [] if not add_eos or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Frame([] if bos is None else [bos], adds_bos, eos, max_length, label_all, keeps)


class Reader:
    """Token ids of texts, each read as a whole, so that they are those that transformers gives.

    What is learnt is found by the offsets of tokens: one that begins in a prompt and ends in what is learnt is learnt.
    A tokenizer without offsets reads a text in parts, which end where what is learnt does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = plain_backend(tokenizer)
        self._apart: dict[int, Any] = {}

    def __call__(self, texts: Sequence[Rendered]) -> tuple[list[list[int]], list[Flags]]:
        """Of each text the ids, without special tokens around it, and (T,) whether each is learnt."""
        if self._backend is None:
            read = [self._in_parts(each) for each in texts]
        else:
            self._ids("")  # brings the settings of a call: no padding, no truncation
            plain = [each.text for each in texts if not each.spelled]
            found = iter(self._backend.encode_batch(plain, add_special_tokens=False))
            apart = self._apart_from_spelled
            read = [apart(each) if each.spelled else _learnt(next(found), each) for each in texts]
        return [ids for ids, _ in read], [flags for _, flags in read]

    def _ids(self, text: str, **options: Any) -> list[int]:
        # verbose=False: the warning about long texts would print the length of a private one.
        found = self._tokenizer(text, add_special_tokens=False, verbose=False, **options)
        return list(found["input_ids"])

    def _in_parts(self, given: Rendered) -> tuple[list[int], Flags]:
        cuts = sorted({0, len(given.text), *chain.from_iterable((*given.trained, *given.spelled))})
        ids, flags = list[int](), list[bool]()
        for part in pairwise(cuts):
            options = {"split_special_tokens": True} if part in given.spelled else {}
            some = self._ids(given.text[slice(*part)], **options)
            ids += some
            flags += [any(a <= part[0] and part[1] <= b for a, b in given.trained)] * len(some)
        return ids, np.array(flags, bool)

    def _apart_from_spelled(self, given: Rendered) -> tuple[list[int], Flags]:
        """By a tokenizer whose control tokens are spelled by characters that the text lacks, in all places but those
        where the record spells one."""
        control, held = control_tokens(self._tokenizer), {ord(sign) // _SIGNS for sign in given.text}
        block = next((block for block in _BLOCKS if block not in held), None)
        if control is None or block is None:
            return self._in_parts(given)
        if block not in self._apart:
            self._apart[block] = _renamed(self._backend, block * _SIGNS)
        backend, names = self._apart[block]

        def renamed(match: re.Match[str]) -> str:
            return match[0] if match.span() in given.spelled else names.get(match[0], match[0])

        text = control.sub(renamed, given.text)
        return _learnt(backend.encode(text, add_special_tokens=False), given)


_SIGNS: Final = 1 << 13  # more than a tokenizer has special tokens
_BLOCKS: Final = range(0x100000 // _SIGNS, 0x10E000 // _SIGNS)  # of private use


def _renamed(backend: Any, first: int) -> tuple[Any, dict[str, str]]:
    """A copy of a fast tokenizer whose special tokens have other names, of the same length, and these."""
    told = json.loads(backend.to_str())
    special = [token for token in told["added_tokens"] if token["special"]]
    names = {
        each["content"]: chr(first + i) * len(each["content"]) for i, each in enumerate(special[:_SIGNS])
    }
    for token in special:
        token["content"] = names.get(token["content"], token["content"])
    model, vocab = told["model"], told["model"]["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(name, name): number for name, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    told |= {"post_processor": None, "truncation": None, "padding": None}
    return type(backend).from_str(json.dumps(told)), names


def _learnt(encoding: Any, given: Rendered) -> tuple[list[int], Flags]:
    ids: list[int] = encoding.ids
    if given.trained == ((0, len(given.text)),):
        return ids, np.ones(len(ids), bool)
    return ids, _within(np.array(encoding.offsets, np.int64).reshape(-1, 2), given.trained)


def _within(offsets: Integers, spans: Sequence[Span]) -> Flags:
    """(T,) whether each token has a part in one of the spans. offsets: (T, 2) in characters; a token without any stands
    for what is between the one before it and its end, as a blank that was trimmed."""
    begins, ends = offsets.T
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    begins = np.where(begins == ends, np.minimum(before, begins), begins)
    inside = np.zeros(len(offsets), bool)
    for a, b in spans:
        inside |= ((begins < b) & (ends > a)) | ((begins == ends) & (a <= begins) & (begins < b))
    return inside


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What a fast tokenizer of transformers asks, where asking it oneself gives the same ids; else None."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    private = ("_encode_plus", "_batch_encode_plus", "_convert_encoding", "_call_one")
    own = [(getattr(kind, name, None), getattr(PreTrainedTokenizerFast, name, None)) for name in private]
    own.append((kind.__call__, PreTrainedTokenizerBase.__call__))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast") or any(mine is not theirs for mine, theirs in own):
        return None
    return backend


def assemble(
    texts: Sequence[Sequence[int]],
    learnt: Sequence[Flags],
    frame: Frame,
    blank: list[bool],
    is_open: list[bool],
) -> Tokens:
    """Examples of N texts: token ids of each, and whether each is learnt; whether it says nothing, and whether nothing
    in it ends it."""
    sizes = np.array([len(ids) for ids in texts], np.int64)
    source = np.fromiter(chain.from_iterable(texts), np.int32, count=int(sizes.sum()))
    trained = np.concatenate([np.empty(0, bool), *learnt])
    ends_of_texts = starts_of(sizes)
    begins, ends = ends_of_texts[:-1], ends_of_texts[1:]

    begins_with_bos = np.zeros(len(texts), bool)  # a chat template or the text itself wrote it
    if frame.bos:
        some = begins < ends
        begins_with_bos[some] = source[begins[some]] == frame.bos[0]
    begins = begins + begins_with_bos
    bos = (begins_with_bos | frame.adds_bos) & bool(frame.bos)
    lacks_eos = np.array(is_open, bool) & bool(frame.eos)
    if frame.eos:
        some = begins < ends
        lacks_eos[some] &= source[ends[some] - 1] != frame.eos[0]

    excess = np.maximum(0, bos + (ends - begins) + lacks_eos - frame.max_length)
    unasked = np.zeros(len(texts), bool)
    if frame.keeps == "keep_end":
        prompt = _before_trained(trained, begins, ends)
        unasked = (prompt > 0) & (excess >= prompt)
        begins = begins + np.minimum(excess, ends - begins)
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
    empty = np.array(blank, bool) | unasked
    return Tokens(np.where(labelled, ids, ~ids), starts, excess.astype(np.int32), empty)


def _before_trained(trained: Flags, begins: Integers, ends: Integers) -> Integers:
    """(N,) how many tokens from each of ``begins`` come before the first trained one, or before the end."""
    at = np.append(np.flatnonzero(trained), len(trained))
    return np.minimum(at[np.searchsorted(at, begins)], ends) - begins
