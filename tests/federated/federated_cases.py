"""Tiny federations in this process over an exchange that keeps every message, and what tests do to their noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from privlora.accounting import Ledger, LedgerSummary, read_ledger
from privlora.config import Settings, settings_from
from privlora.data.sampling import PoissonSampler
from privlora.federated.client import Client, answer_all
from privlora.federated.history import History, Round
from privlora.federated.limits import ANYTHING, Limits
from privlora.federated.messages import Reply, Request
from privlora.federated.plans import client_plan, public_settings, server_plan, with_local_method
from privlora.federated.run import server_of
from privlora.federated.server import Rounds, Server
from privlora.federated.workplace import Workplace
from privlora.mechanisms import NoiseSource
from privlora.training.assembly import Parts, build_parts
from privlora.training.files import RunFolder
from privlora.training.models import unchanged_afterwards

Records = list[dict[str, str]]

# Five short records and a long one of each client: a loss that is averaged over a batch's tokens fails on them.
LENGTHS = (4, 5, 6, 4, 5, 30)
SIGMA = 0.7


def records(seed: int, lengths: Sequence[int] = LENGTHS) -> Records:
    """Random letters; a letter is a token."""
    rng = np.random.default_rng(seed)
    return [{"text": "".join(rng.choice(list("abcdefghij "), size=n))} for n in lengths]


def owners(count: int, lengths: Sequence[int] = LENGTHS) -> dict[str, Records]:
    return {f"owner-{k}": records(k, lengths) for k in range(count)}


def settings_of(rule: str, names: Sequence[str], **groups: Any) -> Settings:
    """privacy, method, …: groups, of which what is given takes the place of what tests usually have."""
    privacy = {"noise_multiplier": SIGMA, "delta": 1e-3, "expected_batch_size": 6.0, "sample_rate": 0.5}
    given = groups.pop("privacy", {})
    if given.get("private") is False:
        privacy = {
            name: value for name, value in privacy.items() if name not in ("noise_multiplier", "delta")
        }
    chosen = groups.pop("federation", {})
    timetable = {"rounds": 2, "local_steps": 1 if rule == "joint" else 2}
    federation = {"clients": [{"name": name} for name in names], "rule": rule, **timetable, **chosen}
    adapter = {"r": 2, "target_modules": ["q_proj", "up_proj"], **groups.pop("adapter", {})}
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"max_length": 40},
            "adapter": adapter,
            "privacy": {**privacy, **given},
            "federation": federation,
            **groups,
        },
        source="test",
    )


class Direct:
    """An Exchange that calls clients of this process, and keeps what was said.

    drop: which requests never arrive. ask: what a test makes of a request. change: and of a reply.
    """

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self.clients = clients
        self.messages: list[Request | Reply] = []
        self.drop: Callable[[Request], bool] = lambda request: False
        self.ask: Callable[[Request], Request] = lambda request: request
        self.change: Callable[[Reply], Reply] = lambda reply: reply

    def names(self) -> list[str]:
        return sorted(self.clients)

    def send(self, requests: Sequence[Request]) -> list[Reply]:
        requests = [self.ask(request) for request in requests]
        reached = [request for request in requests if not self.drop(request)]
        replies = [self.change(reply) for reply in answer_all(self.clients, reached)]
        self.messages += [*requests, *replies]
        return replies

    def requests(self, kind: str, number: int | None = None) -> list[Request]:
        found = (m for m in self.messages if isinstance(m, Request) and m.kind == kind)
        return [m for m in found if number in (None, m.round)]

    def replies(self, kind: str, number: int | None = None) -> list[Reply]:
        found = (m for m in self.messages if isinstance(m, Reply) and m.kind == kind)
        return [m for m in found if number in (None, m.round)]


class Federation:
    """A server and its clients in ``folder``.

    own: each client's records. model: shared; a new tiny one for None. limits: of every client's owner.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        own: Mapping[str, Records],
        *,
        model: Any = None,
        limits: Limits = ANYTHING,
    ) -> None:
        self.settings = with_local_method(settings)
        self.workplace = Workplace(self.settings, tiny_model() if model is None else model, tiny_tokenizer())
        self.model, _, self.settings = self.workplace.loaded
        self.plan, server = client_plan(self.settings, self.model), server_plan(self.settings)
        with unchanged_afterwards(self.model):
            self.parts: Parts = build_parts(self.settings, self.model)
            self.parts.adapter.detach()
        self.server: Server = server_of(self.parts, self.plan)
        self.folder = RunFolder(folder / "server")
        if not self.folder.private.exists():
            self.folder.create(protects=True)
        self.history = History(self.folder.private / "rounds.jsonl")
        self.ledger = None if server is None else Ledger.create(self.folder.ledger, server)
        shared = {
            self.history.run: Workplace(public_settings(self.settings), self.model, self.workplace.tokenizer)
        }
        self.clients = {
            name: Client(name, folder / name, records=found, workplaces=shared, limits=limits)
            for name, found in own.items()
        }
        self.exchange = Direct(self.clients)

    def rounds(self) -> Rounds:
        return Rounds(
            self.settings,
            self.exchange,
            self.server,
            self.history.run,
            plan=self.plan,
            ledger=self.ledger,
            folder=self.folder,
            history=self.history,
        )

    def run(self) -> Federation:
        self.rounds().serve()
        return self

    def join(self) -> Federation:
        """Clients join, and nobody trains."""
        self.rounds()._join()
        return self

    def request(self, name: str, kind: str = "train", number: int = 1, **values: Any) -> Request:
        """As an honest server sends it, without secure sums."""
        tensors = self.server.tensors(kind) if kind in self.server.stages else {}
        return Request(name, kind, number, tensors, {"run": self.history.run, **values})

    def done(self) -> list[Round]:
        return self.history.rounds()

    def ledger_of(self, name: str) -> LedgerSummary:
        return read_ledger(self.clients[name].folder / self.history.run / "ledger.jsonl")

    def updates(self) -> list[Tensor]:
        """The weights' change, dense, of each group (L, m, n), float64."""
        named = (
            self.parts.coordinates.factors() if self.settings.federation.joint else self.server.parts.update()  # type: ignore[union-attr, attr-defined]
        )
        return [(a.double() @ b.double().mT).clone() for a, b in named]


def without_noise(patch: pytest.MonkeyPatch) -> None:
    """Everything else is as it is: clipping, rounding, charges."""

    def zeros(self: NoiseSource, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    patch.setattr(NoiseSource, "standard_normal", zeros)
    patch.setattr(NoiseSource, "discrete_gaussian", lambda self, shape, std: np.zeros(shape, dtype=np.int64))


def drawing(patch: pytest.MonkeyPatch, choose: Callable[[int], Sequence[int]]) -> None:
    """Samplers draw what ``choose`` makes of their number of units."""
    patch.setattr(PoissonSampler, "draw", lambda self: np.array(choose(self._units), dtype=np.int64))


def everyone(units: int) -> range:
    return range(units)


def nobody(units: int) -> Sequence[int]:
    return ()
