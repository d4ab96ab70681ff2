"""Checkpoints: the public state of a run in one safetensors file, replaced atomically.

They hold no sampler and no noise state on purpose: a resumed run draws both afresh from the operating system. Poisson
sampling has no memory, so this is exact, and noise can never repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from privlora.errors import RunError
from privlora.training.files import write_atomically


def save_checkpoint(path: Path, parts: Mapping[str, Mapping[str, Tensor]], *, step: int, run_id: str) -> None:
    """Write the parts' tensors under ``part/name``, with the step after which they were taken."""
    # Cloned, because parts may share tensors, which safetensors refuses.
    tensors = {
        f"{part}/{name}": tensor.detach().cpu().contiguous().clone()
        for part, named in parts.items()
        for name, tensor in named.items()
    }
    write_atomically(path, save(tensors, metadata={"step": str(step), "run_id": run_id}))


def load_checkpoint(path: Path, *, run_id: str) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """(step, part -> name -> tensor). Raises RunError if the file is damaged or of another run."""
    parts: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 - not a dict
                part, name = key.split("/", 1)
                parts.setdefault(part, {})[name] = file.get_tensor(key)
        step = int(metadata["step"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(
            f"checkpoint {str(path)!r} is damaged ({type(error).__name__})",
            why="the charged steps behind it stay charged",
            fix="remove it to restart from the beginning with the remaining budget",
        ) from None
    if metadata.get("run_id") != run_id:
        raise RunError(f"checkpoint {str(path)!r} belongs to another run", fix="restore the run's own files")
    return step, parts
