"""Which private records and which model a run belongs to, kept in its private folder as two hashes.

A resume with others would train on, or evaluate, what the run's statement does not speak of.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256

import torch

from privlora.errors import PrivacyError, RunError
from privlora.training.files import RunFolder, write_atomically
from privlora.training.inputs import Data

_VALUES = 64  # of each parameter


@dataclass(frozen=True)
class Identity:
    """records: SHA-256 of the tokenised private records and their units; private; empty where none are at hand. model:
    of the base model."""

    records: str
    model: str


def identify(data: Data | None, model: torch.nn.Module) -> Identity:
    """Of a run's data (None: its records are elsewhere) and of its base model without an adapter."""
    return Identity("" if data is None else _of_records(data), _of_model(model))


def keep_identity(folder: RunFolder, identity: Identity) -> None:
    """Write it into private/. Raises RunError."""
    write_atomically(folder.identity, json.dumps(asdict(identity)) + "\n")


def refuse_others(folder: RunFolder, identity: Identity) -> None:
    """Raise PrivacyError for other records than the run's, RunError for another model; old runs kept neither."""
    if not folder.identity.exists():
        return
    try:
        kept = Identity(**json.loads(folder.identity.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{str(folder.identity)!r} is damaged ({type(error).__name__})",
            why="it says which records and which model the run belongs to",
            fix="restore it",
        ) from None
    if kept.records != identity.records:
        raise PrivacyError(
            "the private records are not those that the run began with",
            why="its statement speaks of one set of records, and what was private then could be published now",
            fix="resume with the same records, units and tokenizer, or start a new run",
        )
    if kept.model != identity.model:
        raise RunError(
            "the base model is not the one that the run began with",
            why="its adapter and its losses would belong to neither",
            fix="resume with the same model in the same dtype, or start a new run",
        )


def _of_records(data: Data) -> str:
    """The order of units, and of the records of one, makes no difference."""
    units = sorted(
        sha256(b"".join(sorted(data.examples[i].digest for i in unit))).digest() for unit in data.units
    )
    return sha256(b"".join(units)).hexdigest()


def _of_model(model: torch.nn.Module) -> str:
    """Of each parameter its name, shape, dtype and first values: what tells models apart without reading them whole."""
    found = sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:_VALUES].cpu().contiguous()
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
