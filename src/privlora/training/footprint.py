"""What a micro-batch keeps in memory, from shapes alone, and how much a device has left. Nothing is read of records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.lowrank import checkpoints
from privlora.adapters.targets import feature_sizes, output_layer

_GRADIENT_BYTES = 4  # P and Q are float32, or float64 beside activations of that


def gradient_bytes(adapter: LowRankAdapter) -> int:
    """P (m, r) and Q (n, r) of one row over all modules, as they are captured; 0 where losses take their place."""
    if adapter.compared is not None:
        return 0
    numbers = 0
    for part in adapter.parts:
        p, q = (len(range(part.rank)[kept]) for kept in part.columns)
        numbers += sum(p * site.m + q * site.n for site in part.sites)
    return numbers * max(_GRADIENT_BYTES, _item_size(adapter.model))


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
    return max(1, whole) * _item_size(model)


def row_tokens(adapter: LowRankAdapter) -> int:
    """PUBLIC. As many tokens' activations take the memory of one row's gradients: r of float32, 2 r of bfloat16.

    Shorter rows count as this long where micro-batches are cut (data.batching), so gradients never take more than the
    activations of as many tokens as are allowed.
    """
    return math.ceil(gradient_bytes(adapter) / token_bytes(adapter.model))


def free_bytes(device: torch.device, root: Path = Path("/")) -> float:
    """Memory that a device has left for this process; without bound where that is not known.

    root: of the files in which Linux tells of its own.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    told = root / "proc/meminfo"
    if device.type != "cpu" or not told.exists():
        return float("inf")
    lines = dict(line.split(":", 1) for line in told.read_text(encoding="ascii").splitlines())
    return min(1024.0 * int(lines["MemAvailable"].split()[0]), _left_in_group(root))


def free_but_for_own(root: Path = Path("/")) -> float:
    """PUBLIC. What the machine had left if this process held nothing: neither records that it read or was given, nor
    what reading them left behind, is a part of it. root: as of ``free_bytes``."""
    return free_bytes(torch.device("cpu"), root) + _of_this_process("RssAnon", root)


def resident_bytes(root: Path = Path("/")) -> int:
    """What this process holds of the machine's memory; 0 where that is not known. root: as of ``free_bytes``."""
    return _of_this_process("VmRSS", root)


def _of_this_process(name: str, root: Path) -> int:
    told = root / "proc/self/status"
    if not told.exists():
        return 0
    lines = dict(line.split(":", 1) for line in told.read_text(encoding="utf-8").splitlines() if ":" in line)
    return 1024 * int(lines.get(name, "0 kB").split()[0])


def _left_in_group(root: Path) -> float:
    """What the process' control groups leave it: a container may have less than its machine."""
    left, own = float("inf"), root / "proc/self/cgroup"
    if not own.exists():
        return left
    for line in own.read_text(encoding="utf-8").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        names = (
            ("memory.max", "memory.current")
            if not kinds
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        base = root / "sys/fs/cgroup" / kinds
        # Inside a container the path may be the machine's, which is not there; then its root is the group's.
        for group in {base, *(base / path.lstrip("/")).parents, base / path.lstrip("/")}:
            if group.is_relative_to(base):
                left = min(left, _left_in(group, *names))
    return left


def _left_in(group: Path, limit: str, usage: str) -> float:
    try:
        most, used = ((group / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    if most == "max":
        return float("inf")
    stat = dict(line.split(" ", 1) for line in lines)
    # Cached files are given back when memory is needed, those that were read twice too: else private ones would count.
    cached = sum(
        int(stat.get(f"total_{name}", stat.get(name, "0"))) for name in ("inactive_file", "active_file")
    )
    return max(0.0, float(int(most) - int(used) + cached))


def _item_size(model: torch.nn.Module) -> int:
    return max((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), default=4)
