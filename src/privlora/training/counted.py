"""What steps were found to take, kept with a run, so that going on does not count it again.

A function of settings, shapes of the model, kind of device and versions alone, so that it tells nothing of the records,
and holds on every machine; what is free is looked at anew. Where any of these is another one now, or the file cannot be
read, it is counted again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

import torch

from privlora.config import Settings
from privlora.training.files import RunFolder, write_atomically
from privlora.training.peak import Peak
from privlora.version import __version__

_OPEN: Final = {
    "model": {"name", "revision"},  # where it lies: its shapes are looked at
    # Which a run settles, and no memory depends on.
    "method": {"learning_rate", "relative_rate", "right_weight"},
    "privacy": {"clip_norm"},
}


@dataclass
class Counted:
    """of: what ``sizes`` are a function of, as a hash. sizes: tokens of a micro-batch -> what its step takes."""

    of: str
    sizes: dict[int, Peak] = field(default_factory=dict)
    kept: int = 0
    """How many of them the run has."""

    def keep(self, folder: RunFolder) -> None:
        """Write them where there are new ones. Raises RunError."""
        if len(self.sizes) > self.kept:
            content = {"of": self.of, "sizes": {str(n): peak.to_dict() for n, peak in self.sizes.items()}}
            write_atomically(folder.counted, json.dumps(content) + "\n")
            self.kept = len(self.sizes)


def counted(settings: Settings, model: torch.nn.Module, device: torch.device, folder: RunFolder) -> Counted:
    """Those that a run has of the same steps, of a ``folder`` that may have none."""
    of = _hash(settings, model, device)
    try:
        found = json.loads(folder.counted.read_text(encoding="utf-8"))
        if found["of"] != of:
            return Counted(of)
        sizes = {int(n): Peak(**peak) for n, peak in found["sizes"].items()}
        if not all(type(number) is int for peak in sizes.values() for number in peak.to_dict().values()):
            return Counted(of)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Counted(of)
    return Counted(of, sizes, len(sizes))


def _hash(settings: Settings, model: torch.nn.Module, device: torch.device) -> str:
    groups = {
        name: getattr(settings, name).model_dump(mode="json", exclude=_OPEN.get(name, set()))
        for name in ("model", "adapter", "method", "privacy")
    }
    data = settings.data
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    of_records = [data.max_length, settings.rows_of_a_unit, data.label is not None, data.chosen is not None]
    facts = [groups, of_records, device.type, shapes, __version__, torch.__version__]
    return sha256(json.dumps(facts).encode()).hexdigest()
