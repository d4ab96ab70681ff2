"""A client and a server's rounds that are no federation at all, but use everything that carries one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from privlora.federated.messages import Reply, Request


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
