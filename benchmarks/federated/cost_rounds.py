"""Rounds of a federation in one process, and what they are compared with: a run in one place, and sums on their own."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from study_cells import federation

from privlora.accounting import Plan
from privlora.config import Settings, settings_from
from privlora.data.partition import cut
from privlora.demo import model_path, private_records
from privlora.federated.history import Round, RoundObserver
from privlora.federated.plans import federation_of
from privlora.federated.secure.collector import Collector
from privlora.federated.secure.keys import Identity
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import Terms, Turn
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.files import RunFolder
from privlora.training.inputs import load_data
from privlora.training.loop import finish_training
from privlora.training.models import unchanged_afterwards
from privlora.training.observer import Observer, StepReport
from privlora.training.promise import plan_privacy

Spent = tuple[float, float]
"""Wall and CPU seconds."""


def now() -> Spent:
    return time.perf_counter(), time.process_time()


@dataclass
class Watch(Observer, RoundObserver):
    """When rounds or steps ended. The time up to the first of them, in which records are read, is nobody's."""

    times: list[Spent] = field(default_factory=list)

    def on_round(self, done: Round, rounds: int) -> None:
        assert done.void is None, done.void
        self.times.append(now())

    def on_step(self, report: StepReport) -> None:
        self.times.append(now())

    def each(self, parts: int = 1) -> list[Spent]:
        """Of every round but the first; of a part of one, where a round has several."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [((b[0] - a[0]) / parts, (b[1] - a[1]) / parts) for a, b in pairs]


@dataclass(frozen=True, kw_only=True)
class Job:
    """records: of all clients. batch: expected, of all clients. tokens: of a record at most."""

    model: torch.nn.Module
    tokenizer: Any
    clients: int = 10
    records: int = 600
    batch: float = 80.0
    tokens: int = 64
    rank: int = 8

    def settings(self, output: Path, *, steps: int | None = None, **federated: Any) -> Settings:
        """steps: of a run in one place; else what the federation is like."""
        privacy = {
            "target_epsilon": 3.0,
            "delta": 1e-5,
            "expected_batch_size": self.batch,
            "public_dataset_size": self.records,
        }
        content: dict[str, Any] = {
            "model": {"name": str(model_path())},
            "data": {"path": "(in memory)", "max_length": self.tokens, "unchecked": True},
            "adapter": {"r": self.rank},
            "privacy": privacy,
            "run": {"output": str(output)},
        }
        if steps is None:
            content["federation"] = {"clients": self.clients, **federated}
        else:
            privacy["steps"] = steps
        return settings_from(content)


def of_federation(job: Job, **federated: Any) -> tuple[list[Spent], list[Round]]:
    """What each round takes after the first, and all rounds."""
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="privlora-cost-") as temporary:
        folder = Path(temporary)
        settings = job.settings(folder / "run", **federated)
        own = cut(private_records(job.records, seed=1), federation_of(settings), seed=0)
        with federation(settings, job.model, job.tokenizer, own, folder) as (rounds, _):
            rounds.observer = watch
            rounds.serve()
            return watch.each(), rounds.history.rounds()


def of_run(job: Job, steps: int) -> list[Spent]:
    """What each step of a run in one place takes after the first."""
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="privlora-cost-") as temporary:
        settings = job.settings(Path(temporary) / "run", steps=steps)
        plan: Plan = plan_privacy(settings, job.model)
        data = load_data(settings, job.tokenizer, private_records(job.records, seed=1), model=job.model)
        folder = RunFolder(Path(settings.run.output))
        with unchanged_afterwards(job.model):
            parts = build_parts(settings, job.model, PublicStart(job.tokenizer))
            with parts.adapter:
                folder.create(protects=settings.privacy.protects)
                finish_training(parts, data, folder, plan, observer=watch)
    return watch.each()


def of_many(job: Job, rule: str, turns: int) -> dict[str, float]:
    """A round's seconds, the first of which reads records, and the process's peak of memory in MB."""
    spent, _ = of_federation(job, rule=rule, rounds=1 + turns)
    return {**medians(spent), "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def against_a_run(job: Job, turns: int, local_steps: int = 2) -> dict[str, Any]:
    """Rounds of joint and tan, and as many steps of a run in one place, by turns. A round of tan has ``local_steps``,
    and counts as so many."""
    found: dict[str, list[Spent]] = {"central": [], "joint": [], "tan": []}
    for _ in range(turns):
        found["central"] += of_run(job, 1 + local_steps)
        found["joint"] += of_federation(job, rule="joint", rounds=1 + local_steps)[0]
        for wall, cpu in of_federation(job, rule="tan", rounds=2, local_steps=local_steps)[0]:
            found["tan"] += [(wall / local_steps, cpu / local_steps)]
    return {
        name: {**medians(of), "ratio": medians(of)["cpu"] / medians(found["central"])["cpu"]}
        for name, of in found.items()
    }


def medians(spent: Sequence[Spent]) -> dict[str, Any]:
    return {
        "wall": median(wall for wall, _ in spent),
        "cpu": median(cpu for _, cpu in spent),
        "count": len(spent),
    }


def secure_against_plain(job: Job, turns: int, local_steps: int) -> dict[str, Any]:
    """Whole rounds of fedavg in one process, where all clients' work adds up, with secure sums and without."""
    found: dict[str, list[Spent]] = {"plain": [], "secure": []}
    up = 0
    for _ in range(turns):
        for name, secure in (("plain", False), ("secure", True)):
            given = {"rule": "fedavg", "rounds": 2, "local_steps": local_steps, "secure_aggregation": secure}
            spent, rounds = of_federation(job, **given)
            found[name] += spent
            up = up if secure else rounds[-1].up // job.clients
    plain, secure_ = medians(found["plain"]), medians(found["secure"])
    return {
        "message_bytes": up,
        "plain": plain,
        "secure": secure_,
        "wall_ratio": secure_["wall"] / plain["wall"],
        "cpu_ratio": secure_["cpu"] / plain["cpu"],
    }


def sums_alone(clients: int, entries: int, bits: int) -> dict[str, Any]:
    """One secure sum over random vectors: what a client spends, and what the server does, in CPU seconds."""
    names = [f"client-{number:02d}" for number in range(clients)]
    identities = {name: Identity.create() for name in names}
    turn = Turn("benchmark", 1, "train")
    terms = Terms(turn, clients, bits, tuple(identities[name].public(name) for name in names))
    collector, sent = Collector(terms), bytes(32)
    vector = np.arange(entries, dtype=f"<u{bits // 8}")
    members: dict[str, Participant] = {}
    spent = {"clients": 0.0, "server": 0.0}
    before = now()
    for phase in ("share", "mask", "agree", "unmask"):
        start = time.process_time()
        asks = {
            "share": collector.ask_shares,
            "mask": lambda: collector.ask_vectors(sent, entries),
            "agree": collector.ask_agreement,
            "unmask": collector.ask_unmasking,
        }[phase]()
        spent["server"] += time.process_time() - start
        for name, ask in asks.items():
            start = time.process_time()
            if phase == "share":
                members[name], reply = Participant.begin(identities[name], name, ask, turn=turn)
            elif phase == "mask":
                reply = members[name].mask(ask, vector.copy(), sent)
            else:
                reply = getattr(members[name], phase)(ask)
            between = time.process_time()
            collector.take(phase, name, reply)
            spent["clients"] += between - start
            spent["server"] += time.process_time() - between
    start = time.process_time()
    total = collector.total()
    spent["server"] += time.process_time() - start
    assert (total == vector * np.asarray(clients, vector.dtype)).all()
    after = now()
    return {
        "bits": bits,
        "bytes": vector.nbytes,
        "wall": after[0] - before[0],
        "client_cpu": spent["clients"] / clients,
        "server_cpu": spent["server"],
    }
