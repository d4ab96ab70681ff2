"""Whether runs give what they gave: `make golden`, or with --write that from now on they give what they give now.

    python tests/golden/golden_runs.py [--write] [--only WORD...]

Of each run of golden_cases.py golden.json keeps a hash of the weights, one of the ledgers without ids, days and
chains, and some numbers. Hashes hold on one kind of processor, whose name is kept; on others ledgers and shapes have
to agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

KEPT = Path(__file__).with_name("golden.json")
_TOLERANCE = 2e-3  # of the length of the weights: what four steps make of another order of sums
_RANDOM = ("run_id", "created", "hash", "previous", "prev", "salt", "time", "date", "versions")


def found(name: str, folder: Path) -> dict[str, Any]:
    """What a run gives: JSON-ready."""
    from golden_cases import CASES

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        CASES[name](folder)
    finally:
        torch.set_num_threads(threads)
    release = next(each for each in (folder / "release", folder / "not-private") if each.exists())
    return {**_weights(release), "ledgers": _ledgers(folder), "losses": _losses(folder)}


def _weights(release: Path) -> dict[str, Any]:
    from safetensors import safe_open

    path = release / "adapter_model.safetensors"
    if not path.exists():
        texts = b"".join(each.read_bytes() for each in sorted(release.glob("*.jsonl")))
        return {"texts": hashlib.sha256(texts).hexdigest()}
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key).float() for key in sorted(file.keys())}
    whole = hashlib.sha256()
    for key, tensor in tensors.items():
        whole.update(key.encode() + tensor.numpy().tobytes())
    flat = torch.cat([tensor.flatten().double() for tensor in tensors.values()]).numpy()
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (4, len(flat)))
    shape = {key: list(tensor.shape) for key, tensor in tensors.items()}
    return {
        "weights": whole.hexdigest(),
        "shapes": hashlib.sha256(json.dumps(shape).encode()).hexdigest(),
        "length": float(np.linalg.norm(flat)),
        "projections": [float(each) / len(flat) ** 0.5 for each in signs @ flat],
    }


def _ledgers(folder: Path) -> str:
    """Of all ledgers what does not differ between two runs."""
    lines = []
    for path in sorted(folder.rglob("ledger*.jsonl")):
        for line in path.read_text().splitlines():
            lines.append(_without(json.loads(line)))
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without(part) for key, part in value.items() if not any(word in key for word in _RANDOM)
        }
    return [_without(part) for part in value] if isinstance(value, list) else value


def _losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for path in sorted(folder.rglob("evaluations*.jsonl")) for line in path.open()]
    return [row["loss_per_example"] for row in rows if "loss_per_example" in row]


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, to_the_bit: bool, numbers: bool = True
) -> list[str]:
    """What is another one; of weights by their numbers where hashes need not hold. Without numbers, by their shapes: on
    another processor a start may have other signs, which other noise goes with."""
    exact = ["failed", "ledgers", "shapes"] + (["texts", "weights"] if to_the_bit else [])
    wrong = [name for name in exact if old.get(name) != new.get(name)]
    if not numbers:
        return wrong
    if "length" in old and "length" in new:
        scale = max(old["length"], 1e-12)
        apart = [new["length"] - old["length"], *np.subtract(new["projections"], old["projections"])]
        if max(map(abs, apart)) > _TOLERANCE * scale:
            wrong.append("numbers")
    pairs = old["losses"], new["losses"]
    if len(pairs[0]) != len(pairs[1]) or not np.allclose(*pairs, rtol=1e-3):
        wrong.append("losses")
    return wrong


def machine() -> str:
    """Of which hashes are: processor, what it can do, and torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    kind = sorted({line for line in lines if line.startswith(("cpu family", "model\t", "stepping", "flags"))})
    return f"{name}, {hashlib.sha256(repr(kind).encode()).hexdigest()[:12]}, torch {torch.__version__}"


def quiet() -> None:
    """Nothing but what is found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def runs(only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    from golden_cases import CASES

    wanted = [name for name in CASES if all(word in name for word in only)]
    if not wanted:
        sys.exit(f"no golden run has {' and '.join(only)} in its name")
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield name, found(name, Path(folder) / "run")
            except Exception as error:  # noqa: BLE001 - one that fails must not hide the others
                yield name, {"failed": f"{type(error).__name__}: {error}"[:500], "losses": []}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    args = parser.parse_args()
    quiet()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": machine(), "runs": {}}
    here, began, wrong = machine() == kept["machine"], time.time(), 0
    for name, new in runs(args.only):
        old = kept["runs"].get(name)
        told = (
            "new"
            if old is None
            else ", ".join(differences(old, new, to_the_bit=here, numbers=here)) or "equal"
        )
        wrong += told not in ("equal", "new") or (told == "new" and not args.write)
        print(f"{time.time() - began:6.0f} s  {name}: {told}", flush=True)
        if "failed" in new:
            print(f"          {new['failed']}", flush=True)
        elif args.write:
            kept["runs"][name] = new
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    if wrong and not args.write:
        sys.exit(f"{wrong} of the golden runs are not what they were")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
