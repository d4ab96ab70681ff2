"""All rates and seeds of one method on one task, side by side on one frozen model: how the fair table is measured.

An adapter of a team is what it would be in a run of its own (privlora.stacked): its own Poisson batches, clipping,
noise and state, from the code that `privlora train` runs. Only its learning rate differs from its neighbours', and that
multiplies the move of its own modules. Records are public, noise follows from seeds, and nothing is charged or
released.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privlora.config import settings_from
from privlora.data.assembling import Tokens, starts_of
from privlora.data.examples import Examples
from privlora.data.records import load_records
from privlora.data.sampling import PoissonSampler
from privlora.data.units import Units
from privlora.mechanisms import NoiseSource
from privlora.methods import find_method
from privlora.optimizers import Optimizer
from privlora.stacked import Member, Team, TrainedAdapters, stack_parts
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.inputs import tokenise
from privlora.training.models import given_or_loaded, unchanged_afterwards
from privlora.training.promise import plan_privacy

sys.path.append(str(Path(__file__).parents[1]))
from study_data import TASKS

FREE = {"clipping": "spectral", "averaging": 0.5, "beta1": 0.0}
"""PRISM's ingredients that cost nothing and work on factors too."""


@dataclass(frozen=True)
class Row:
    """A line of the table. settings: of group method. relative: rates are shares of each frozen matrix's norm, by which
    one step's noise moves it; else they are what its entries move by for one standard deviation of noise."""

    label: str
    method: str
    settings: Mapping[str, Any]
    init: str | None = None
    relative: bool = False


ROWS = {
    row.label: row
    for row in (
        Row("prism", "prism", {}, relative=True),
        Row("prism, by values", "prism", {"metric_power": 1.0}, relative=True),
        Row("prism, rates in entries", "prism", {}),
        Row("prism, longer averaging", "prism", {"averaging": 0.9}, relative=True),
        Row("dp-sgd", "dp-sgd", {}),
        Row("dp-sgd + free", "dp-sgd", FREE),
        Row("dp-sgd + free + start", "dp-sgd", FREE, init="w0-subspace"),
        Row("dp-sgd + free, relative rates", "dp-sgd", FREE, relative=True),
        Row("dp-sgd + free + start, relative rates", "dp-sgd", FREE, init="w0-subspace", relative=True),
        Row(
            "riemannian + free + start, relative rates", "riemannian", FREE, init="w0-subspace", relative=True
        ),
        Row("lora-fa + free + start, relative rates", "lora-fa", FREE, init="w0-subspace", relative=True),
        Row("prism, no error feedback", "prism", {"error_feedback": 0}, relative=True),
        Row("prism, random start", "prism", {}, init="random", relative=True),
        Row("prism, optimizer sgd", "prism", {"optimizer": "sgd"}, relative=True),
        Row("prism, right weight 0.25", "prism", {"right_weight": 0.25}, relative=True),
        Row(
            "prism, random start, right weight 0.1",
            "prism",
            {"right_weight": 0.1},
            init="random",
            relative=True,
        ),
        Row("ffa + free, relative rates", "ffa", FREE, relative=True),
        Row("dp-sgd + free, longer averaging", "dp-sgd", {**FREE, "averaging": 0.9}),
        Row("dp-adamw", "dp-adamw", {}),
        Row("dp-adamw + free", "dp-adamw", FREE),
        Row("dp-adamw + free + start", "dp-adamw", FREE, init="w0-subspace"),
        Row("dp-adambc + free", "dp-adambc", FREE),
        Row("lora+ + free", "lora+", FREE),
        Row("lora-rite + free", "lora-rite", FREE),
        Row("ffa + free", "ffa", FREE),
        Row("lora-fa + free", "lora-fa", FREE),
        Row("riemannian + free", "riemannian", FREE),
        Row("lamb + free", "lamb", FREE),
        Row("dp-sgd + spectral", "dp-sgd", {"clipping": "spectral"}),
        Row("dp-sgd + averaging", "dp-sgd", {"averaging": 0.5}),
        Row("prism, flat clipping", "prism", {"clipping": "flat"}, relative=True),
        Row("prism, no averaging", "prism", {"averaging": 0.0}, relative=True),
        Row("prism, linear schedule", "prism", {"schedule": "linear", "warmup_steps": 0}, relative=True),
        Row("prism, cosine schedule", "prism", {"schedule": "cosine", "warmup_steps": 0}, relative=True),
    )
}
RELATIVE = 0.02
"""Of rows with relative rates, at 24 steps: of one matrix, method.learning_rate over the root of the modules."""
CLIP_NORMS = {"reviews1M": 0.2}
"""Of models whose gradients are not longer than 1: what ``privacy.clip_norm: auto`` finds."""

RIGHT_WEIGHTS = {"reviews1M": 0.7, "babyllama105": 0.56}
"""Of models of whose inputs the start knows more than chance: what ``method.right_weight: auto`` finds."""


@dataclass(frozen=True)
class Cell:
    """One team, or several with other rates: what one place of the table stands for."""

    model: str
    task: str
    row: str
    epsilon: float
    steps: int
    batch: int = 64
    start: str = ""
    """rank R: a zero update of another rank than 8; layers L+M: of these layers alone, by the ends of their names;
    continued xC: an adapter that was trained on other texts, with B times C and A divided by it (geometry.py)."""
    clip_norm: float | str = ""
    """In the place of the task's."""

    @property
    def place(self) -> dict[str, Any]:
        """As a line of results names it."""
        return {k: v for k, v in asdict(self).items() if v != ""}

    @property
    def default(self) -> float:
        """The row's own rate for so many steps."""
        row = ROWS[self.row]
        if row.relative:
            return float(RELATIVE * (24 / self.steps) ** 0.5)
        return find_method(row.method).rate_of(self.steps, relative=False)


class DeviceNoise(NoiseSource):
    """Normal draws of a seeded generator of the device: of the law of private noise, but anyone can draw it again."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(insecure_seed=seed)
        self._device_generator = torch.Generator(device).manual_seed(seed)

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        generator = self._device_generator
        return torch.randn(shape, dtype=torch.float64, device=generator.device, generator=generator)


class Rated(Optimizer):
    """An optimizer of which module i moves by rates[i] times what the rule says: one number a module and adapter.

    rates: (K L,) of each group. Rules move in proportion to the learning rate, so this is what each rate does by
    itself.
    """

    def __init__(self, rule: Any, rates: list[Tensor]) -> None:
        self.rule, self.rates = rule, rates
        self.coordinates = rule.coordinates

    def _update(self, release: Any, learning_rate: float) -> None:
        space = self.coordinates
        if hasattr(space, "points"):
            move = space.move

            def rated(directions: Any, step: float, residuals: Any = None) -> Any:
                scaled = [d.scale(rate) for d, rate in zip(directions, self.rates, strict=True)]
                return move(scaled, step, residuals)

            space.move = rated
            try:
                self.rule.step(release, learning_rate)
            finally:
                del space.move
            return
        before = [tuple(t.clone() for t in of_group) for of_group in space.trained]
        self.rule.step(release, learning_rate)
        for old, new, rate in zip(before, space.trained, self.rates, strict=True):
            for was, now in zip(old, new, strict=True):
                now.copy_(torch.lerp(was, now, rate[:, None, None]))
        space.install()

    def state_dict(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.rule.state_dict()
        return found

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.rule.load_state_dict(tensors)


def tiled(examples: Examples, count: int) -> Examples:
    """The records once for each of ``count`` adapters, one copy behind the other."""
    t = examples.tokens
    starts = starts_of(np.tile(np.diff(t.starts), count))
    codes, dropped, blank = (np.tile(each, count) for each in (t.codes, t.dropped, t.blank))
    tokens = Tokens(codes, starts, dropped, blank)
    return Examples.of(tokens, pad_token_id=examples.pad_token_id)


def shape_of(parts: Any) -> Callable[[int], float]:
    """How the rate goes on, 1 at its height: constant, without a warm-up, where the row names no schedule."""
    if parts.settings.method.schedule is None:
        return lambda step: 1.0
    height = parts.hyper.learning_rate
    return lambda step: parts.learning_rate(step) / height


LABEL = "label_text"


def other_labels(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records, each with the other one of two labels."""
    first, second = sorted({record[LABEL] for record in records})
    return [{**record, LABEL: second if record[LABEL] == first else first} for record in records]


def likelier(held: Examples, losses: Tensor, other: Examples, of_other: Tensor) -> Tensor:
    """(..., records) 1 where the model gives the record's own label the larger probability, 0 elsewhere.

    losses, of_other: (..., records) in nats per label token, of which labels have different numbers.
    """
    own, others = (torch.as_tensor(x.label_counts, dtype=torch.float64) for x in (held, other))
    return (losses * own < of_other * others).double()


class Table:
    """One model at a time, the records of each task read once, and what is common to all cells.

    data: the folder that study_data.py wrote. tokens: of a micro-batch.
    """

    def __init__(self, data: str, *, tokens: int = 16384, device: str = "auto") -> None:
        self.data, self.tokens, self.device = data, tokens, device
        self.name, self.model, self.tokenizer = "", None, None
        self.records: dict[str, tuple[Examples, Examples]] = {}
        self.others: dict[str, Examples] = {}
        """The held-out records of classifications, each with a label that is not its own."""

    def settings(self, cell: Cell) -> Any:
        task, row = dict(TASKS[cell.task]), ROWS[cell.row]
        name, units, clip = task.pop("file"), task.pop("units"), task.pop("clip_norm", 1.0)
        kind, _, number = cell.start.partition(" ")
        rank = int(number) if kind == "rank" else 8
        targets = {"target_modules": number.split("+")} if kind == "layers" else {}
        own = {"right_weight": RIGHT_WEIGHTS.get(cell.model, 1.0)} if "metric_power" in row.settings else {}
        init = f"{self.data}/starts/{cell.model} {number}" if kind == "continued" else row.init
        return settings_from(
            {
                "model": {"name": f"{self.data}/models/{cell.model}", "device": self.device},
                "data": {
                    "max_length": 48,
                    "unchecked": True,
                    "path": f"{self.data}/{name}-train.jsonl",
                    **task,
                },
                "adapter": {
                    "r": rank,
                    "lora_alpha": 2 * rank,
                    **targets,
                    **({"init": init} if init else {}),
                },
                "privacy": {
                    "target_epsilon": cell.epsilon,
                    "delta": 1e-5,
                    "steps": cell.steps,
                    "expected_batch_size": cell.batch,
                    "public_dataset_size": units,
                    "clip_norm": cell.clip_norm or clip,
                },
                "method": {"name": row.method, "relative_rate": row.relative, **own, **row.settings},
                "run": {"tokens_per_micro_batch": self.tokens},
            }
        )

    def load(self, settings: Any, task: str) -> tuple[Examples, Examples]:
        """The model, and the task's records: all of training's, all that are held out."""
        if self.name != settings.model.name:
            self.model, self.tokenizer = given_or_loaded(settings.model, None, None)
            self.name, self.records, self.others = settings.model.name, {}, {}
        if task not in self.records:
            places = settings.data.path, settings.data.path.replace("-train", "-heldout")
            train, held = (tokenise(load_records(p), settings.data, self.tokenizer) for p in places)
            if settings.data.completion == LABEL:
                flipped = other_labels(list(load_records(places[1])))
                self.others[task] = tokenise(flipped, settings.data, self.tokenizer)
            usable = [i for i, count in enumerate(train.label_counts) if count]
            self.records[task] = train.like(train[i] for i in usable), held
        return self.records[task]

    def run(self, cell: Cell, rates: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
        """Every rate with every seed. before: the untouched model's loss on either half of the held-out records.
        choosing, report: (rates, seeds) mean losses in nats per token on the even and on the odd ones; infinite where
        training went astray, which a matrix without a decomposition says of the whole team. Of classifications also
        answered_before, answered_choosing and answered_report: the share of records whose own label is the likelier."""
        began = time.perf_counter()
        settings = self.settings(cell)
        train, held = self.load(settings, cell.task)
        train = train if len(train) <= settings.privacy.n else train[: round(settings.privacy.n)]
        count = len(rates) * len(seeds)
        event = plan_privacy(settings, self.model).event
        with unchanged_afterwards(self.model):
            template = build_parts(settings, self.model, PublicStart(self.tokenizer))
            template.adapter.detach()
            owners = torch.arange(count).repeat_interleave(len(train))
            parts = stack_parts(template, count, owners)
            multiples = torch.tensor(rates, device=parts.adapter.device).repeat_interleave(len(seeds))
            if ROWS[cell.row].relative:
                multiples *= len(parts.adapter.sites) ** 0.5
            by_group = [multiples.repeat_interleave(len(group.sites)) for group in parts.adapter.groups]
            parts.optimizer = Rated(parts.optimizer, by_group)
            keys = self.keys(len(rates), seeds)
            members = [
                Member(
                    units=Units(np.arange(len(train))),
                    sampler=PoissonSampler(len(train), settings.privacy.q, insecure_seed=2 * key),
                    first=k * len(train),
                    noise=DeviceNoise(2 * key + 1, parts.adapter.device),
                )
                for k, key in enumerate(keys)
            ]
            team = Team(
                parts,
                tiled(train, count),
                members,
                noise_multiplier=event.noise_multiplier,
                learning_rate=shape_of(template),
            )
            astray = False
            try:
                team.take(cell.steps)
            except torch.linalg.LinAlgError:
                astray = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            trained = time.perf_counter()
            other = self.others.get(cell.task)
            losses = torch.full((count, len(held)), float("inf"), dtype=torch.float64)
            right = torch.zeros_like(losses)
            if not astray:
                factors = team.factors()
                found = TrainedAdapters(template.adapter, factors, settings, event, insecure=True)
                losses = found.losses(held, together=16).nan_to_num(nan=float("inf"))
                if other is not None:
                    right = likelier(held, losses, other, found.losses(other, together=16))
        before = self._before(held)
        answered = {}
        if other is not None:
            first = likelier(held, before, other, self._before(other))
            answered = {"answered_before": [round(float(first[half::2].mean()), 4) for half in (0, 1)]}
            of_each = right.unflatten(0, (len(rates), len(seeds)))
            for half, name in enumerate(("choosing", "report")):
                answered[f"answered_{name}"] = _rounded(of_each[..., half::2].mean(-1))
        shaped = losses.unflatten(0, (len(rates), len(seeds)))
        done = time.perf_counter()
        return {
            "sigma": event.noise_multiplier,
            "rates": list(rates),
            "seeds": list(seeds),
            "before": [round(float(before[half::2].mean()), 5) for half in (0, 1)],
            "choosing": _rounded(shaped[..., 0::2].mean(-1)),
            "report": _rounded(shaped[..., 1::2].mean(-1)),
            **answered,
            "seconds": [round(trained - began, 2), round(done - trained, 2)],
        }

    def keys(self, rates: int, seeds: Sequence[int]) -> list[int]:
        """Of the draws of each rate with each seed."""
        return [1000 * seed + 7 * k for k in range(rates) for seed in seeds]

    def _before(self, held: Examples) -> Tensor:
        from privlora.evaluation.next_token import record_losses

        return record_losses(self.model, held)


def _rounded(t: Tensor) -> list[list[float]]:
    return [[round(x, 5) for x in row] for row in t.tolist()]
