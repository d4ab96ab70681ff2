"""Checkpoints: the public state of a run in one safetensors file, replaced atomically.

They hold no state of a sampler or of a generator on purpose: a resumed run draws both afresh from the operating system.
Poisson sampling has no memory, so this is exact, and noise can never repeat. With privacy.bands they also hold the
noise of the last steps, which the next ones take back: PRIVATE, as is the folder that they lie in.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from privlora.accounting import LedgerSummary
from privlora.errors import PrivacyError, RunError
from privlora.training.files import IDENTITY, RunFolder, read_lines, replace_atomically

NO_RUN: Final = "non-private"
"""A non-private run has no ledger; its checkpoints belong to it all the same."""


@dataclass(frozen=True)
class Mark:
    """Where in which run a checkpoint was taken.

    charge: hash of the ledger's line that charged ``step``; None without a ledger, or of an older version.
    """

    step: int
    run_id: str | None
    charge: str | None


def save_checkpoint(path: Path, parts: Mapping[str, Mapping[str, Tensor]], mark: Mark) -> None:
    """Write the parts' tensors under ``part/name``, with the step after which they were taken, from where they lie.

    With them goes a hash of the run's identity beside ``path``, so that no other one takes its place.
    """
    tensors, written = dict[str, Tensor](), set[int]()
    for part, named in parts.items():
        for name, tensor in named.items():
            there = tensor.detach().cpu().contiguous()
            place = there.untyped_storage().data_ptr()
            if place in written:
                there = there.clone()  # parts may share tensors, which safetensors refuses
            written.add(place)
            tensors[f"{part}/{name}"] = there
    known = asdict(mark) | {"step": str(mark.step), "identity": digest_of(path.with_name(IDENTITY))}
    metadata = {name: value for name, value in known.items() if value is not None}

    def write(half: Path) -> None:
        try:
            save_file(tensors, half, metadata=metadata)
        except SafetensorError as error:  # also for a full disk
            raise OSError(str(error)) from None

    replace_atomically(path, write)


def digest_of(path: Path) -> str | None:
    """SHA-256 of a file; None where there is none."""
    return sha256(path.read_bytes()).hexdigest() if path.exists() else None


def read_identity(path: Path) -> str | None:
    """The hash of the identity that a checkpoint was taken with; None without one. Raises RunError if it is damaged."""
    with _opened(path) as file:
        return (file.metadata() or {}).get("identity")


def read_mark(path: Path) -> Mark:
    """The mark alone. Raises RunError if the file is damaged."""
    with _opened(path) as file:
        return _mark_of(file)


def load_checkpoint(path: Path, *, run_id: str) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """(step, part -> name -> tensor). Raises RunError if the file is damaged or of another run."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)  # a part without state has no tensor in the file
    with _opened(path) as file:
        mark = _mark_of(file)
        for key in file.keys():  # noqa: SIM118 - not a dict
            part, name = key.split("/", 1)
            parts[part][name] = file.get_tensor(key)
    if mark.run_id != run_id:
        raise RunError(f"checkpoint {str(path)!r} belongs to another run", fix="restore the run's own files")
    return mark.step, parts


def _mark_of(file: Any) -> Mark:
    metadata = file.metadata() or {}
    return Mark(int(metadata["step"]), metadata.get("run_id"), metadata.get("charge"))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(
            f"checkpoint {str(path)!r} is damaged ({type(error).__name__})",
            why="the charged steps behind it stay charged",
            fix="remove it to restart from the beginning with the remaining budget",
        ) from None


def refuse_lost_charges(folder: RunFolder, ledger: LedgerSummary | None) -> None:
    """Raise PrivacyError if a file of the run proves a release that ``ledger`` does not show; None: there is none.

    By itself a ledger cannot tell that it was cut, replaced by an older copy, or comes from a copy of the run that went
    on apart. The files next to it can: each says after how many releases it was written.
    """
    hashes = () if ledger is None else ledger.charge_hashes
    before = 0 if ledger is None else ledger.plan.before_training
    for path, releases, charge in _proofs(folder, before, None if ledger is None else ledger.run_id):
        if releases > len(hashes):
            raise PrivacyError(
                f"{folder.ledger} shows {len(hashes)} releases, but {path} was written after {releases}",
                why="the run would release more than its ledger, and so its epsilon, says",
                fix="restore the run's latest ledger; without it no epsilon can be stated",
            )
        if charge is not None and hashes[releases - 1] != charge:
            raise PrivacyError(
                f"{folder.ledger} and {path} come from copies of the run that went on apart",
                why="neither copy's ledger shows what both released",
                fix="resume each copy with its own files; `privlora budget` composes the ledgers of both",
            )


def _proofs(folder: RunFolder, before: int, run_id: str | None) -> Iterator[tuple[Path, int, str | None]]:
    """Files of the run, each with a number of releases that must have happened before it was written, and the hash of
    the ledger's line that charged the last of them, where it is known.

    before: releases of the phases before training, whose steps evaluations count from 1.
    """
    if folder.checkpoint.exists():
        mark = read_mark(folder.checkpoint)
        yield folder.checkpoint, mark.step, mark.charge if mark.run_id == run_id else None
    losses = read_lines(folder.private_losses)  # one line for each release
    yield folder.private_losses, len(losses), None
    for row in losses:
        yield folder.private_losses, row["step"], row.get("charge")
    for row in read_lines(folder.evaluations):
        yield folder.evaluations, before + row["step"], None
    with suppress(OSError, ValueError, KeyError, TypeError):  # one that cannot be read is written anew
        report = json.loads(folder.report.read_text(encoding="utf-8"))
        yield folder.report, int(report["statement"]["steps_charged"]), None
