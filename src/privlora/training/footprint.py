"""What a micro-batch keeps in memory, from shapes alone, and how much a device has left. Nothing is read of records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.lowrank import checkpoints
from privlora.adapters.targets import feature_sizes, output_layer

# By the controllers that a line of /proc/self/cgroup names: the files of a group's limit and use, of version 2 and 1.
_GROUPS = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}


def gradient_bytes(adapter: LowRankAdapter) -> int:
    """P (m, r) and Q (n, r) of one row over all modules, as they are captured; 0 where losses take their place."""
    if adapter.compared is not None:
        return 0
    numbers = 0
    for part in adapter.parts:
        p, q = (len(range(part.rank)[kept]) for kept in part.columns)
        numbers += sum(p * site.m + q * site.n for site in part.sites)
    return numbers * max(4, item_size(adapter.model))  # float32, or float64 next to activations of that


def token_bytes(model: torch.nn.Module) -> int:
    """About what one token's activations take between forward and backward pass: inputs and outputs of linear layers.

    With gradient checkpointing those of one block, and the others' inputs. Without logits.
    """
    head = output_layer(model)
    linear = [sizes for each in model.modules() if each is not head and (sizes := feature_sizes(each))]
    whole = sum(m + n for m, n in linear)
    config: Any = getattr(model, "config", None)
    blocks, width = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if checkpoints(model) and blocks and width:
        whole = whole // blocks + blocks * width
    return max(1, whole) * item_size(model)


def row_tokens(adapter: LowRankAdapter) -> int:
    """PUBLIC. As many tokens' activations take the memory of one row's gradients: r of float32, 2 r of bfloat16.

    Shorter rows count as this long where micro-batches are cut (data.batching), so gradients never take more than the
    activations of as many tokens as are allowed.
    """
    return math.ceil(gradient_bytes(adapter) / token_bytes(adapter.model))


def item_size(model: torch.nn.Module) -> int:
    """PUBLIC. Bytes of a number of the model's widest dtype."""
    return max((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), default=4)


def free_bytes(device: torch.device, root: Path = Path("/")) -> float:
    """Memory that a device has left for this process; without bound where that is not known.

    root: of the files in which Linux tells of its own.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    if device.type != "cpu":
        return math.inf
    return min(_in_file(root / "proc/meminfo", "MemAvailable", math.inf), _left_in_groups(root))


def free_but_for_own(root: Path = Path("/")) -> float:
    """PUBLIC. What the machine had left if this process held nothing: neither records that it read or was given, nor
    what reading them left behind, is a part of it. root: as of ``free_bytes``."""
    return free_bytes(torch.device("cpu"), root) + _in_file(root / "proc/self/status", "RssAnon", 0)


def resident_bytes(root: Path = Path("/")) -> int:
    """What this process holds of the machine's memory; 0 where that is not known. root: as of ``free_bytes``."""
    return int(_in_file(root / "proc/self/status", "VmRSS", 0))


def _in_file(path: Path, name: str, otherwise: float) -> float:
    """Bytes that a line "name: N kB" says."""
    if not path.exists():
        return otherwise
    lines = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines() if ":" in line)
    return 1024.0 * int(lines[name].split()[0]) if name in lines else otherwise


def _left_in_groups(root: Path) -> float:
    """What the process' control groups leave it: a container may have less than its machine."""
    left, own = math.inf, root / "proc/self/cgroup"
    for line in own.read_text(encoding="utf-8").splitlines() if own.exists() else ():
        _, kinds, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / kinds
        # Inside a container the path may be the machine's, which is not there; then its root is the group's.
        inner = base / path.lstrip("/")
        for group in {base, inner, *inner.parents} if kinds in _GROUPS else ():
            if group.is_relative_to(base):
                left = min(left, _left_in(group, *_GROUPS[kinds]))
    return left


def _left_in(group: Path, limit: str, usage: str) -> float:
    try:
        most, used, lines = (
            (group / name).read_text(encoding="ascii") for name in (limit, usage, "memory.stat")
        )
    except OSError:
        return math.inf
    if most.strip() == "max":
        return math.inf
    stat = dict(line.split(" ", 1) for line in lines.splitlines())
    # Cached files are given back when memory is needed, those that were read twice too: else private ones would count.
    cached = sum(int(stat.get(f"total_{n}", stat.get(n, 0))) for n in ("inactive_file", "active_file"))
    return max(0.0, float(int(most) - int(used) + cached))
