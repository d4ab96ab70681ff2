"""A client and a server's rounds that are no federation at all, but use everything that carries one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from privlora.federated.messages import Exchange, Reply, Request

STAGES = ("train", "sketch")


class StubClient:
    """Keeps a running sum on disk: what it answers depends on every request that it has had."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder, self.source = folder, source

    def answer(self, request: Request) -> Reply:
        if request.values.get("fail") == request.client:
            raise ValueError("a record about Alice")
        state = self.folder / "sum.json"
        total = json.loads(state.read_text()) if state.exists() else len(self.source)
        total += int(request.tensors["x"].sum())
        self.folder.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(total))
        tensors = {"y": request.tensors["x"] * total, "key": torch.tensor([total], dtype=torch.uint32)}
        return Reply(request.client, request.kind, request.round, tensors, {"name": request.client.encode()})


def stub_serve(settings: Mapping[str, Any], exchange: Exchange, folder: Path) -> None:
    """Two stages a round. After the first stage of a round in settings["stops"] it waits until a file says "go"."""
    folder.mkdir(parents=True, exist_ok=True)
    names, lines = exchange.names(), []
    lines.append(f"names {names}")
    shared = torch.ones(2, 3)
    for number in range(1, settings["rounds"] + 1):
        for stage in STAGES:
            values = {"fail": settings.get("fail", "")}
            replies = exchange.send(
                [Request(name, stage, number, {"x": shared + k}, values) for k, name in enumerate(names)]
            )
            kept = sorted(
                (reply for reply in replies if reply.refused is None), key=lambda reply: reply.client
            )
            shared = sum((reply.tensors["y"] for reply in kept), torch.zeros(2, 3)) % 17
            keys = [int(reply.tensors["key"]) for reply in kept]
            lines.append(f"{number} {stage} {[reply.client for reply in kept]} {keys} {shared.tolist()}")
            if stage == STAGES[0] and number in settings.get("stops", ()):
                (folder / "stopped").touch()
                while not (folder / "go").exists():
                    time.sleep(0.05)
    (folder / "result").write_text("\n".join(lines))
    (folder / "result").rename(folder / "result.txt")  # whoever waits for it finds it whole


def expected(names: Sequence[str], rounds: int, gone: Mapping[tuple[int, str], str] | None = None) -> str:
    """The result without a grid. gone: which client misses from a round's stage on."""
    totals = {name: len(f"data-{name}") for name in names}
    lines, shared, left = [f"names {list(names)}"], torch.ones(2, 3), list(names)
    for number in range(1, rounds + 1):
        for stage in STAGES:
            left = [name for name in left if name != (gone or {}).get((number, stage))]
            answers = {}
            for k, name in enumerate(names):
                if name in left:
                    totals[name] += int((shared + k).sum())
                    answers[name] = (shared + k) * totals[name]
            shared = sum(answers.values(), torch.zeros(2, 3)) % 17
            lines.append(f"{number} {stage} {left} {[totals[name] for name in left]} {shared.tolist()}")
    return "\n".join(lines)
