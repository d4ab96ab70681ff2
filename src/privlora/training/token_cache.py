"""Tokens of a run's private records in a file of its private folder, for a resumed run and for cells of a study.

They are as private as the records. The file is mapped into memory, not read into it, so nobody may write into it while
a run goes on; another file in its place does no harm. It begins with the SHA-256 of all
that follows, and says what it is of (a key): what is damaged, or of other records, settings, software or another
tokenizer, is none. Behind that stand arrays as .npy files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BufferedRandom, BufferedReader
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import transformers

from privlora.config import DataSettings
from privlora.data.assembling import Tokens, frame_of, plain_backend
from privlora.data.examples import Template
from privlora.data.records import CONTENT_BYTES, files_in, local_file
from privlora.data.rendering import is_chat
from privlora.data.summary import DataSummary
from privlora.data.tasks import find_task
from privlora.disk import lock
from privlora.errors import RunError
from privlora.training.files import for_owner, replace_atomically
from privlora.version import __version__

_log = logging.getLogger(__name__)

_FORMAT: Final = 3  # raise it with what is in the file, and with how records become tokens
_DIGEST: Final = 32
_BLOCK: Final = 64  # bytes
_CHAT: Final = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]


@dataclass(frozen=True)
class Kept:
    """What a cache holds: tokens as in `Tokens`, the unit of each record, (N, 16) uint8 hashes of what each holds in
    its columns, and what follows from these: `Data.summary` and `Data.proof`. All of it is private."""

    tokens: Tokens
    unit_of_record: np.ndarray
    contents: np.ndarray
    summary: DataSummary
    proof: str

    def fits(self) -> bool:
        """Whether its parts are of one another, so that nothing that reads them goes beyond an end."""
        tokens, units, said = self.tokens, self.unit_of_record, self.summary
        kinds = (
            *((a, np.int64) for a in (units, tokens.starts, tokens.edge_starts)),
            *((a, np.int32) for a in (tokens.ids, tokens.edges, tokens.dropped)),
            (tokens.blank, np.bool_),
        )
        if any(array.ndim != 1 or array.dtype != kind for array, kind in kinds):
            return False
        count = len(units)
        if not (
            count > 0
            and all(len(a) == count for a in (tokens.dropped, tokens.blank))
            and _starts(tokens.starts, count, len(tokens.ids))
            and _starts(tokens.edge_starts, count, len(tokens.edges))
            and not (tokens.edge_starts % 2).any()
            and 0 <= units.min() <= units.max() < count
            and self.contents.shape == (len(self.contents), CONTENT_BYTES)
            and self.contents.dtype == np.uint8
        ):
            return False
        begins, ends = tokens.edges.reshape(-1, 2).T
        lengths = np.repeat(np.diff(tokens.starts), np.diff(tokens.edge_starts) // 2)
        numbers = [value for value in asdict(said).values() if value is not None]
        return bool(
            (tokens.ids >= 0).all()
            and ((begins >= 0) & (begins < ends) & (ends <= lengths)).all()
            and (np.bincount(units) > 0).all()
            and all(type(value) in (int, float) and 0 <= value < float("inf") for value in numbers)
            and said.units == units.max() + 1
            and count == (said.records if said.chunks is None else said.chunks)
            and type(self.proof) is str
        )


def _starts(starts: np.ndarray, count: int, end: int) -> bool:
    """Whether these are where ``count`` pieces of ``end`` entries start, and the last one ends."""
    return len(starts) == count + 1 and bool(
        starts[0] == 0 and starts[-1] == end and (np.diff(starts) >= 0).all()
    )


def key_of(data: DataSettings, user_column: str | None, tokenizer: Any) -> str | None:
    """A hash of what decides tokens and units: each byte of files and tokenizer, templates, settings, versions.

    None where content cannot be told: of a tokenizer with code of its own, or without a fast one behind it, and of a
    chat template that tells the time.
    """
    backend = plain_backend(tokenizer)
    renders = type(tokenizer).apply_chat_template is transformers.PreTrainedTokenizerBase.apply_chat_template
    rendered = is_chat(Template(**data.columns), tokenizer)
    template = data.chat_template or tokenizer.chat_template
    if backend is None or not renders or (rendered and "strftime_now" in str(template)):
        return None
    try:
        told = json.loads(backend.to_str())
    except Exception:  # noqa: BLE001 - what tokenizers raises of a part that is written in Python
        return None
    of_last_call = {"truncation", "padding"}
    paths = [data.path] if isinstance(data.path, str) else data.path
    content = {
        "format": _FORMAT,
        "versions": [__version__, transformers.__version__, tokenizers.__version__],
        "files": [
            [format, file.suffix.lower() == ".gz", *map(_hash, files_in(file))]
            for file, format in (local_file(path, data.format) for path in paths)
        ],
        "columns": data.columns,
        "task": None if data.task is None else repr(find_task(data.task)),
        "read": [data.limit, data.loss_on, user_column, data.chunk],
        "frame": asdict(
            frame_of(tokenizer, data.max_length, data.loss_on == "all", data.add_eos, is_chat=rendered)
        ),
        "keeps": data.truncation_mode,
        "tokenizer": {name: part for name, part in told.items() if name not in of_last_call},
        "chat": [tokenizer.chat_template, tokenizer.special_tokens_map, _probe(tokenizer)]
        if rendered
        else None,
        "splits": getattr(tokenizer, "split_special_tokens", None),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _probe(tokenizer: Any) -> str | None:
    """A chat as it is rendered: what a template finds around it is not in its text. None if the template refuses it."""
    with suppress(Exception):  # a template is a program
        return str(tokenizer.apply_chat_template(_CHAT, tokenize=False))
    return None


def _hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def held(path: Path) -> Iterator[None]:
    """While one process looks for the file and makes it, another one waits, and then finds it."""
    with ExitStack() as closed:
        # Windows opens no folder, and not every disk has locks: both make it then, and the digest tells what is whole.
        with suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            closed.callback(os.close, folder)
            lock(folder, wait=True)
        yield


def keep(path: Path, key: str, kept: Kept) -> None:
    """Write the file whole, or leave the one that is there; a run does not fail for lack of a cache."""
    tokens = kept.tokens
    # Wide ones first, so that each lies where its dtype is aligned.
    arrays: tuple[np.ndarray, ...] = (
        *(kept.unit_of_record, tokens.starts, tokens.edge_starts),
        *(tokens.ids, tokens.edges, tokens.dropped, tokens.blank, kept.contents),
    )
    facts = {"summary": kept.summary.to_dict(), "proof": kept.proof}
    head = np.frombuffer(json.dumps({"key": key, "facts": facts}).encode(), np.uint8)

    def write(half: Path) -> None:
        with open(half, "w+b", opener=for_owner) as file:
            file.seek(_BLOCK)
            for array in (head, *arrays):
                np.lib.format.write_array(file, array, allow_pickle=False)
                file.write(bytes(-file.tell() % _BLOCK))
            file.seek(0)
            file.write(_digest(file))

    try:
        replace_atomically(path, write)
    except RunError as error:
        _log.warning("tokens are not kept, so they will be made again: %s", error.what)


def kept_in(path: Path, key: str) -> Kept | None:
    """What the file holds, mapped and not to be written to, if it is whole and of ``key``."""
    try:
        with open(path, "rb") as file:
            if file.read(_DIGEST) != _digest(file):
                _log.warning("%s is damaged, so tokens are made again", path)
                return None
            whole = mmap(file.fileno(), 0, access=ACCESS_READ)
            file.seek(_BLOCK)
            head = json.loads(_next_array(file, whole).tobytes())
            if head["key"] != key:
                return None
            unit_of_record, starts, edge_starts, ids, edges, dropped, blank, contents = (
                _next_array(file, whole) for _ in range(8)
            )
            facts = head["facts"]
            tokens = Tokens(ids, starts, edges, edge_starts, dropped, blank)
            kept = Kept(tokens, unit_of_record, contents, DataSummary(**facts["summary"]), facts["proof"])
            if not kept.fits():
                raise ValueError
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s cannot be read (%s), so tokens are made again", path, type(error).__name__)
        return None
    return kept


def _digest(file: BufferedReader | BufferedRandom) -> bytes:
    """Of all behind the first block, where it stands itself."""
    file.seek(_BLOCK)
    found = hashlib.file_digest(file, "sha256").digest()
    file.seek(0)
    return found


def _next_array(file: BufferedReader | BufferedRandom, whole: mmap) -> np.ndarray:
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    start = file.tell()
    array = np.frombuffer(whole, dtype, prod(shape), start).reshape(shape)
    end = start + array.nbytes
    file.seek(end + -end % _BLOCK)
    return array
