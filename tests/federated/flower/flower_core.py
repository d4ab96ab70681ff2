"""Small federations of the demo's model for every engine, and what makes their results comparable."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from privlora.config import Settings, settings_from
from privlora.demo import model_path, private_records
from privlora.federated import run
from privlora.federated.messages import Exchange, InProcess, Reply, Request

NAMES = ("a", "b", "c")
FOUR = (*NAMES, "d")
EACH = 8
"""Records of each client."""

ADAPTER = "adapter_model.safetensors"


def write_records(root: Path) -> dict[str, str]:
    """Each client's file."""
    root.mkdir(parents=True, exist_ok=True)
    found = {}
    for k, name in enumerate(FOUR):
        path = root / f"{name}.jsonl"
        records = private_records(EACH, seed=k + 1)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        found[name] = str(path)
    return found


def federation(
    root: Path,
    output: Path,
    rule: str,
    names: Sequence[str] = NAMES,
    *,
    privacy: dict[str, Any] | None = None,
    **more: Any,
) -> Settings:
    """Whole batches (every record in every step), so that nothing is drawn. privacy: by default without noise."""
    paths = write_records(root / "records")
    total = EACH * len(names)
    batch = {"public_dataset_size": total, "expected_batch_size": total}
    return settings_from(
        {
            "model": {"name": str(model_path())},
            "adapter": {"r": 2, "target_modules": ["q_proj"]},
            "data": {"max_length": 64, "unchecked": True},
            "privacy": {**batch, **({"private": False} if privacy is None else privacy)},
            "run": {"output": str(output), "seed": 3},
            "federation": {
                "clients": [{"name": name, "path": paths[name]} for name in names],
                "rounds": 2,
                "rule": rule,
                **more,
            },
        }
    )


class Losing:
    """Loses one client from a kind of round 1 on, until that round is over."""

    def __init__(self, exchange: Exchange, client: str, kind: str) -> None:
        self.exchange, self.client, self.kind, self.lost = exchange, client, kind, False

    def names(self) -> list[str]:
        return self.exchange.names()

    def send(self, requests: Sequence[Request]) -> list[Reply]:
        about = {(request.kind, request.round) for request in requests}
        self.lost = (self.lost or (self.kind, 1) in about) and all(number == 1 for _, number in about)
        return list(self.exchange.send([r for r in requests if not (self.lost and r.client == self.client)]))


def federate_losing(settings: Settings, client: str, kind: str, patch: Any) -> run.Federated:
    """In one process. patch: pytest's monkeypatch."""
    patch.setattr(run, "InProcess", lambda *given: Losing(InProcess(*given), client, kind))
    return run.federate(settings)


class Gated:
    """Waits before some messages of a run until a test has done what it wants to be done by then."""

    def __init__(self, exchange: Exchange, gates: Path, kinds: Sequence[str]) -> None:
        self.exchange, self.gates, self.kinds = exchange, gates, list(kinds)
        gates.mkdir(parents=True, exist_ok=True)
        self.times = gates / "times.jsonl"

    def names(self) -> list[str]:
        return self.exchange.names()

    def send(self, requests: Sequence[Request]) -> list[Reply]:
        kind = requests[0].kind
        if kind in self.kinds:
            self.kinds.remove(kind)
            (self.gates / f"{kind}-waits").touch()
            while not (self.gates / f"{kind}-goes").exists():
                time.sleep(0.05)
        begun = time.monotonic()
        replies = list(self.exchange.send(requests))
        with self.times.open("a") as file:
            row = [kind, requests[0].round, len(replies), round(time.monotonic() - begun, 1)]
            file.write(json.dumps(row) + "\n")
        return replies


def gated_serve(settings: Settings, exchange: Exchange, folder: Path) -> None:
    """A deployed server's, with gates where the label of the run says so; ends with a file that says how it went."""
    from privlora.federated.flower.server_app import _serve_aloud

    gates = folder.with_name(f"gates-{folder.name}")
    try:
        kinds = settings.run.label.split("-") if settings.run.label else []
        said = str(_serve_aloud(settings, Gated(exchange, gates, kinds), folder))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        raise
    finally:
        (gates / "over").write_text(said)


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    place = folder / "release" if (folder / "release").exists() else folder / "not-private"
    return load_file(place / ADAPTER)


def difference(one: Path, other: Path) -> float:
    """The largest of the updates' entries, against the largest entry; factors themselves may be turned."""
    a, b = adapter_of(one), adapter_of(other)
    assert a.keys() == b.keys()
    worst = 0.0
    for name in (name for name in a if ".lora_A." in name):
        mate = name.replace(".lora_A.", ".lora_B.")
        mine, its = a[mate].double() @ a[name].double(), b[mate].double() @ b[name].double()
        assert mine.abs().max() > 0
        worst = max(worst, float((mine - its).abs().max() / mine.abs().max()))
    return worst
