"""The cells of the federated study: what one of them is, and how it is run on a model and records in memory.

A cell is one training from start to end with the product's own parts: a federation (`Rounds` over clients of this
process), a run in one place, or one run for each client. What it leaves is a loss on held-out public records.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from privlora.accounting import Plan
from privlora.adapters.peft_files import lora_scaling
from privlora.config import ModelSettings, Settings, settings_from
from privlora.data.examples import Examples
from privlora.data.partition import cut
from privlora.evaluation import evaluate_next_token
from privlora.federated.client import Client, answer_all
from privlora.federated.desk import Desk
from privlora.federated.history import History
from privlora.federated.limits import ANYTHING
from privlora.federated.messages import InProcess
from privlora.federated.plans import client_plan, federation_of, public_settings, with_local_method
from privlora.federated.rules import RULES
from privlora.federated.run import server_of
from privlora.federated.server import Rounds, RuleServer, Server
from privlora.federated.workplace import Workplace
from privlora.stacked.teams import train_adapters
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.files import RunFolder
from privlora.training.inputs import Data, load_data, tokenise
from privlora.training.loop import finish_training
from privlora.training.models import load_model, unchanged_afterwards
from privlora.training.promise import plan_privacy

CLIENTS, ROUNDS, LOCAL_STEPS = 10, 6, 3
STEPS = ROUNDS * LOCAL_STEPS
BATCH, DELTA, RANK = 128.0, 1e-5, 8
MODULES = ["q_proj", "v_proj"]
TOKENS = 24  # of a text; longer ones are cut
_LETTERS = 160  # more than TOKENS tokens are
EVALUATION = 800  # records, every second of which is for choosing rates
_CENTRAL = {"central prism": "prism", "central dp-adamw": "dp-adamw"}
_IN_MEMORY = "(in memory)"


@dataclass(frozen=True, kw_only=True)
class Task:
    """folder: below data/. column: what Dirichlet splits go by. domain: what the split by domain goes by, None for no
    such split. records: N, rounded, and their limit. data: how they are read.
    """

    folder: str
    column: str
    domain: str | None
    records: int
    clip_norm: float
    data: Mapping[str, Any]


TASKS = {
    "reviews": Task(
        folder="sentiment_domains",
        column="client",
        domain="client",
        records=7800,
        clip_norm=1.0,
        data={"text": "text"},
    ),
    "sentiment": Task(
        folder="sentiment_domains",
        column="label_text",
        domain="client",
        records=7800,
        clip_norm=10.0,
        data={"prompt": "Review: {text}\nIt is ", "completion": "label_text", "loss_on": "completion"},
    ),
    "sst2": Task(
        folder="glue/sst2",
        column="label_text",
        domain=None,
        records=7800,
        clip_norm=10.0,
        data={"prompt": "Review: {sentence1}\nIt is ", "completion": "label_text", "loss_on": "completion"},
    ),
    "authors": Task(
        folder="gutenberg_authors",
        column="client",
        domain="client",
        records=3000,
        clip_norm=1.0,
        data={"text": "text"},
    ),
}

SPLITS: dict[str, dict[str, Any]] = {
    "iid": {},
    "domain": {"column": "owner"},
    "Dir(0.1)": {"alpha": 0.1},
    "Dir(0.5)": {"alpha": 0.5},
    "Dir(1.0)": {"alpha": 1.0},
}


@dataclass(frozen=True)
class Row:
    """rule: of the federation, or None for a control. method, adapter: settings other than the rule's own."""

    rule: str | None
    method: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)


_AS_TAN = {"clipping": "spectral", "beta1": 0.0, "averaging": 0.5}
ROWS: dict[str, Row] = {
    **{rule: Row(rule) for rule in [*RULES, "joint"]},
    # One rule with the others' settings, and the others with its: what is the rule, and what is not.
    "tan, flat": Row(
        "tan", {"clipping": "flat", "averaging": 0.0, "beta1": 0.9, "beta2": 0.999}, {"init": "random"}
    ),
    **{f"{rule}, spectral": Row(rule, _AS_TAN) for rule in ("fedavg", "ffa", "fedask", "alt")},
    **{name: Row(None, {"name": method}) for name, method in _CENTRAL.items()},
    "each alone": Row(None, {"name": "prism"}),
    "zero training": Row(None),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """epsilon: None without privacy. rate: learning rate, 0 for no training. role: selection or report."""

    task: str
    row: str
    split: str
    epsilon: float | None
    per_round: int
    seed: int
    rate: float
    role: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def exists(cell: Cell) -> bool:
    """Whether there is such a cell. Without privacy nothing is clipped, so no row clips otherwise than others."""
    if cell.epsilon is None and "clipping" in ROWS[cell.row].method:
        return False
    return cell.split != "domain" or TASKS[cell.task].domain is not None


def settings_of(cell: Cell, assets: Path, folder: Path) -> Settings:
    """Of a federation; the controls take what they need of it."""
    task, row = TASKS[cell.task], ROWS[cell.row]
    joint = row.rule == "joint"
    split = dict(SPLITS[cell.split])
    if "alpha" in split:
        split["column"] = task.column
    privacy: dict[str, Any] = {"private": False} if cell.epsilon is None else {"target_epsilon": cell.epsilon}
    content = {
        "model": {"name": str(model_folder(assets))},
        "data": {"path": _IN_MEMORY, "max_length": TOKENS, "unchecked": True, **task.data},
        "adapter": {"r": RANK, "target_modules": MODULES, **row.adapter},
        "privacy": {
            **privacy,
            "delta": DELTA,
            "expected_batch_size": BATCH,
            "public_dataset_size": task.records,
            "clip_norm": task.clip_norm,
        },
        "method": {"learning_rate": cell.rate or 1e-3, "relative_rate": False, **row.method},
        "run": {"output": str(folder), "seed": cell.seed},
        "federation": {
            "clients": CLIENTS,
            "rule": row.rule or "tan",
            "rounds": STEPS if joint else ROUNDS,
            "local_steps": 1 if joint else LOCAL_STEPS,
            "clients_per_round": cell.per_round,
            **split,
        },
    }
    if row.rule is None:  # a run in one place
        del content["federation"]
        content["privacy"]["steps"] = STEPS
    return settings_from(content)


def model_folder(assets: Path) -> Path:
    return assets / "models" / "stories260K"


@cache
def read(assets: Path, folder: str, part: str) -> tuple[dict[str, Any], ...]:
    with gzip.open(assets / "data" / folder / f"{part}.jsonl.gz", "rt", encoding="utf-8") as file:
        return tuple(json.loads(line) for line in file)


@cache
def records_of(assets: Path, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Private and held-out records of a task, cut short before they are tokenised."""
    task = TASKS[name]
    train, held = read(assets, task.folder, "train"), read(assets, task.folder, "validation")
    step = max(1, len(train) // task.records)
    return _short(train[::step][: task.records], task), _short(held, task)[:: max(1, len(held) // EVALUATION)]


def _short(records: Sequence[Mapping[str, Any]], task: Task) -> list[dict[str, Any]]:
    """With the column owner: a domain is cut into several clients, or several make one, so that there are CLIENTS."""
    found = []
    domains = sorted({r[task.domain] for r in records}) if task.domain else []
    for number, record in enumerate(records):
        short = {k: v[:_LETTERS] if isinstance(v, str) else v for k, v in record.items()}
        if len(domains) > CLIENTS:
            short["owner"] = f"owner-{domains.index(record[task.domain]) % CLIENTS}"
        elif domains:
            short["owner"] = f"{record[task.domain]}-{number % (CLIENTS // len(domains))}"
        found.append(short)
    return found


class Runner:
    """Runs cells one after the other; the model and the held-out records stay loaded."""

    def __init__(self, assets: Path) -> None:
        self.assets = assets
        self.model, self.tokenizer = load_model(ModelSettings(name=str(model_folder(assets))))
        self._held: dict[str, Examples] = {}

    def run(self, cell: Cell) -> dict[str, Any]:
        """What came out: loss on the records of the cell's role, and what is known of the cell's training."""
        with tempfile.TemporaryDirectory(prefix="privlora-study-") as temporary:
            settings = settings_of(cell, self.assets, Path(temporary) / "run")
            if cell.row == "zero training":
                return {"loss": self.loss(cell)}
            if cell.row in _CENTRAL:
                return self._central(cell, settings)
            if cell.row == "each alone":
                return self._alone(cell, settings)
            return self._federated(cell, settings, Path(temporary))

    def loss(self, cell: Cell) -> float:
        """Of the model as it computes now, mean over records."""
        return evaluate_next_token(self.model, self.held(cell)).loss_per_example

    def held(self, cell: Cell) -> Examples:
        """Held-out records of the cell's role."""
        if cell.task not in self._held:
            records, settings = records_of(self.assets, cell.task)[1], self._plain(cell)
            self._held[cell.task] = tokenise(records, settings.data, self.tokenizer)
        every = self._held[cell.task]
        first = 0 if cell.role == "selection" else 1
        return every.like(every[i] for i in range(first, len(every), 2))

    def _read(self, cell: Cell, records: Sequence[Mapping[str, Any]]) -> Data:
        return load_data(self._plain(cell), self.tokenizer, records, model=self.model, all_public=True)

    def _plain(self, cell: Cell) -> Settings:
        return settings_of(replace(cell, row="zero training"), self.assets, Path("unused"))

    def _central(self, cell: Cell, settings: Settings) -> dict[str, Any]:
        data = self._read(cell, records_of(self.assets, cell.task)[0])
        plan = plan_privacy(settings, self.model) if settings.privacy.private else None
        folder = RunFolder(Path(settings.run.output))
        with unchanged_afterwards(self.model):
            parts = build_parts(settings, self.model, PublicStart(self.tokenizer))
            with parts.adapter:
                folder.create(protects=settings.privacy.protects)
                finish_training(parts, data, folder, plan)
                parts.install_result()
                return {"loss": self.loss(cell), **_noise_of(plan)}

    def _alone(self, cell: Cell, settings: Settings) -> dict[str, Any]:
        """Each client for itself: the same steps at the same sampling rate, an adapter of its own. Mean of losses."""
        privacy = settings.privacy
        share = {"sample_rate": privacy.q, "expected_batch_size": privacy.b / CLIENTS}
        settings = settings.model_copy(
            update={"privacy": privacy.model_copy(update={**share, "public_dataset_size": None})}
        )
        own = _cut(replace(cell, row="tan"), self.assets)
        data = self._read(cell, [record for records in own.values() for record in records])
        members = torch.zeros(CLIENTS, len(data.units), dtype=torch.bool)
        first = 0
        for client, records in enumerate(own.values()):
            members[client, first : first + len(records)] = True
            first += len(records)
        trained = train_adapters(settings, self.model, data.examples, members=members, units=data.units)
        losses = trained.losses(self.held(cell)).mean(dim=1)
        sigma = None if trained.event is None else trained.event.noise_multiplier
        return {"loss": float(losses.mean()), "of_clients": losses.tolist(), "noise_multiplier": sigma}

    def _federated(self, cell: Cell, settings: Settings, folder: Path) -> dict[str, Any]:
        with federation(settings, self.model, self.tokenizer, _cut(cell, self.assets), folder) as (
            rounds,
            plan,
        ):
            rounds.serve()
            done = rounds.history.rounds()
            found: dict[str, Any] = {
                "down": sum(one.down for one in done),
                "up": sum(one.up for one in done),
                "void": sum(one.void is not None for one in done),
                **_noise_of(plan),
            }
            with rounds.server.parts.exported(), rounds.server.parts.adapter:
                found["loss"] = self.loss(cell)
            if cell.row == "fedsa":
                found["of_clients"] = self._personal(cell, rounds, folder)
        return found

    def _personal(self, cell: Cell, rounds: Rounds, folder: Path) -> list[float]:
        """Of fedsa, where each client keeps a left factor of its own: the loss of each client's model."""
        server, lora = rounds.server, rounds.settings.adapter
        assert isinstance(server, RuleServer)
        scale = lora_scaling(lora.lora_alpha, lora.r, lora.use_rslora)
        losses = []
        for name in federation_of(rounds.settings).names:
            kept = Desk(folder / name / rounds.history.run).kept("memory")
            with server.parts.exported(), server.parts.adapter:
                for g, (_, right) in enumerate(server.rule.factors()):
                    left, group = scale * kept[f"{g}.left"].to(right), server.parts.adapter.groups[g]
                    server.parts.adapter.install(
                        group, left, left.new_ones(left.shape[0], left.shape[2]), right
                    )
                losses.append(self.loss(cell))
        return losses


@contextmanager
def federation(
    settings: Settings, model: torch.nn.Module, tokenizer: Any, own: Mapping[str, Any], folder: Path
) -> Iterator[tuple[Rounds, Plan | None]]:
    """What `federate` makes, without what it publishes: rounds that are ready to be served, and each client's plan."""
    settings = with_local_method(settings)
    model, tokenizer, settings = Workplace(settings, model, tokenizer).loaded
    run = RunFolder(Path(settings.run.output))
    run.create(protects=settings.privacy.protects)
    history = History(run.private / "rounds.jsonl")
    shared = {history.run: Workplace(public_settings(settings), model, tokenizer)}
    clients = {
        name: Client(name, folder / name, records=records, workplaces=shared, limits=ANYTHING)
        for name, records in own.items()
    }
    exchange = InProcess(own, lambda requests: answer_all(clients, requests))
    plan = client_plan(settings, model)
    with unchanged_afterwards(model):
        server = _server(settings, model, tokenizer, plan)
        yield Rounds(settings, exchange, server, history.run, plan=plan, folder=run, history=history), plan


def _server(settings: Settings, model: torch.nn.Module, tokenizer: Any, plan: Plan | None) -> Server:
    parts = build_parts(settings, model, PublicStart(tokenizer))
    parts.adapter.detach()  # clients of this process need the model as it is
    return server_of(parts, plan)


def _cut(cell: Cell, assets: Path) -> dict[str, Any]:
    federated = federation_of(settings_of(cell, assets, Path("unused")))
    return dict(cut(records_of(assets, cell.task)[0], federated, seed=cell.seed))


def _noise_of(plan: Plan | None) -> dict[str, Any]:
    return {"noise_multiplier": None if plan is None else plan.event.noise_multiplier}
