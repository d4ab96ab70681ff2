"""The learning rate and the clip norm of a run whose settings leave them to public records (``auto``).

As with ``choosing``, all follows from public records, settings and the public seed, before a record plays a part, so it
costs no epsilon. Trials take the run's steps and its noise with smaller batches: noise moves a step further than the
draw of records does, so a few records a step tell which rate serves, at a small part of the run's compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Final

import torch
from torch import Tensor

from privlora.accounting import Plan
from privlora.adapters import Captured
from privlora.config import Settings
from privlora.config.auto import MOST_TEXTS, AutoSettings
from privlora.coordinates import Coordinates
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.data.records import load_records
from privlora.errors import DataError
from privlora.pages.numbers import finite
from privlora.randomness import counter_generator
from privlora.rehearsals.kept import MOST_TURNING, Chosen, clip_norm_of, once, right_weight_of
from privlora.rehearsals.noise_alone import own_texts, rate_by_noise
from privlora.rehearsals.rates import equal_rates, settle_rate
from privlora.rehearsals.trials import Bench, Noise, Texts, Told, start_losses, trials_of
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.footprint import row_tokens
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import tokenise
from privlora.training.misfits import refuse_unrehearsed
from privlora.training.models import unchanged_afterwards
from privlora.training.promise import bands_to_come, plan_privacy

_FEWEST = 16  # records instead of private ones, and held out
_MOST_HELD = 256
_NORMS = 128  # records whose gradients are measured
_SMALLEST_BATCH = 8
_USUAL_TRIALS = 8
_READING = "reading public records"
_NORMS_OF: Final = "measuring gradient norms of "
_DIRECTIONS_OF: Final = "measuring where gradients point of "
_SHARE = 0.2  # what drawing fewer records adds to the variance of a trial's step, at most, as a part of the noise's


def settled(settings: Settings, model: torch.nn.Module, tokenizer: Any) -> Settings:
    """The settings that a run would take, for what repeats one: an audit, a diagnosis. As they are where nothing is
    left open; else what ``settle`` finds, which is the same each time where auto.file is. That file stays, for
    ``load_data`` to hold it against the private records. Raises ConfigError and DataError."""
    if settings.auto is None or not settings.auto.choose:
        return settings
    found = settle(settings, plan_privacy(settings, model), model, tokenizer).settings
    return found.changed(auto=settings.auto.model_copy(update={"choose": []}))


def settle(
    settings: Settings,
    plan: Plan,
    model: torch.nn.Module,
    tokenizer: Any,
    told: Told = lambda what, done, total: None,
    measured: dict[str, Any] | None = None,
) -> Chosen:
    """The run's settings with what ``auto.choose`` names; ``plan`` is of the run, whatever they become.

    The clip norm is a quarter of the median norm of public records at the start, to two digits: what matters is that
    most records are clipped, since rules divide by the noise, which is in proportion to it (docs/clipping.md). The
    learning rate is found from the method's default on (``settle_rate``). Without auto.file the model's own texts are
    taken instead of public records, whose gradients are shorter than those of texts that it would not write, and the
    learning rate is that of ``noise_alone``. measured: see `kept.measuring`.

    Raises DataError where there are too few public records.
    """
    refuse_unrehearsed(settings)
    auto = settings.auto
    assert auto is not None
    sigma, open_yet = plan.event.noise_multiplier, settings
    settings = settings.changed(auto=None)
    bench = Bench(model, tokenizer, told, {} if measured is None else measured)
    if auto.file is None:
        return _on_own_texts(settings, auto, plan, bench)
    texts = public_texts(open_yet, bench)
    digests = b"".join(each.digest for each in (*texts.records, *texts.held))
    bench = replace(bench, measured=bench.measured.setdefault(sha256(digests).hexdigest(), {}))
    facts: dict[str, Any] = {
        "row": settings.method.name,
        "rows": [],
        "in_place_of_records": len(texts.records),
        "held_out": len(texts.held),
    }
    settings, found = _measured(settings, auto.choose, texts.records, bench, "public records")
    facts |= found
    if "learning_rate" in auto.choose:
        untrained = float(start_losses(model, texts).mean())
        tried = try_rates(settings, sigma, texts, bench, untrained)
        facts |= {"drawn": tried.drawn, **tried.to_dict(settings.method.name, untrained)}
        settings = settings.changed(method={"learning_rate": tried.learning_rate})
    return Chosen(settings, facts)


def _on_own_texts(settings: Settings, auto: AutoSettings, plan: Plan, bench: Bench) -> Chosen:
    """``settle`` without a public record."""
    row, choose = settings.method.name, auto.choose
    texts = own_texts(bench, settings.run.seed, whole=auto.places)
    rows, facts = list[dict[str, Any]](), dict[str, Any](of_its_own=len(texts))
    settings, found = _measured(settings, choose, texts, bench, "its own texts")
    if "learning_rate" in choose:
        rate, facts = rate_by_noise(settings, plan, bench, texts)
        tried = _Tried(rate, facts.pop("losses"), 0)
        rows = tried.to_dict(row, facts["untrained"])["rows"]
        settings = settings.changed(method={"learning_rate": rate})
    return Chosen(settings, {"row": row, "rows": rows, **facts, **found})


def _measured(
    settings: Settings, choose: Sequence[str], texts: Examples, bench: Bench, of: str
) -> tuple[Settings, dict[str, Any]]:
    """The settings with what follows from gradients of texts at the start, and that as facts. of: the texts."""
    facts: dict[str, Any] = {}
    if "right_weight" in choose:
        turning = once(bench.measured, "turning", partial(turning_share, settings, texts, bench, of))
        share = float(f"{turning:.4g}")
        facts |= {"turning": share, "right_weight": right_weight_of(share)}
        settings = settings.changed(method={"right_weight": facts["right_weight"]})
    if "clip_norm" in choose:
        norm = once(bench.measured, "norm", partial(_median_norm, settings, texts, bench, of))
        median = float(f"{norm:.4g}")
        facts |= {"median_norm": median, "clip_norm": clip_norm_of(median)}
        settings = settings.changed(privacy={"clip_norm": facts["clip_norm"]})
    return settings, facts


def public_texts(settings: Settings, bench: Bench) -> Texts:
    """The records of auto.file, a quarter of them held out, drawn by the public seed. Raises DataError if too few."""
    auto = settings.auto
    assert auto is not None
    assert auto.file is not None
    bench.told(_READING, 0, 1)
    records = load_records(auto.file, format=settings.data.format, limit=MOST_TEXTS)
    read = tokenise(records, settings.data, bench.tokenizer)
    bench.told(_READING, 1, 1)
    return Texts((), *_split(read, settings.run.seed))


@dataclass(frozen=True)
class _Tried:
    """learning_rate: to take. losses: of each rate that was tried, (draws, held). drawn: records in a step."""

    learning_rate: float
    losses: Mapping[float, Tensor]
    drawn: int

    @property
    def loss(self) -> float:
        return float(self.losses[self.learning_rate].mean())

    def to_dict(self, row: str, untrained: float) -> dict[str, Any]:
        """As a report keeps it: the rate that is taken first, the others from the best on; and the rates that draws do
        not tell from it. untrained: the loss before."""
        order = sorted(
            self.losses, key=lambda rate: (rate != self.learning_rate, float(self.losses[rate].mean()))
        )
        equal = equal_rates(self.learning_rate, self.losses, untrained)
        found: dict[str, Any] = finite(
            {
                "untrained": round(untrained, 6),
                "rows": [
                    {"name": row, "learning_rate": rate, **_of_draws(self.losses[rate])} for rate in order
                ],
                "equal_from": None if equal is None else equal[0],
                "equal_to": None if equal is None else equal[1],
            }
        )
        return found


def _of_draws(losses: Tensor) -> dict[str, Any]:
    """Mean over (draws, held), and the standard deviation of the draws' means; None of a single one."""
    means = losses.mean(1)
    spread = round(float(means.std()), 6) if len(means) > 1 else None
    return {"loss": round(float(means.mean()), 6), "spread": spread, "draws": len(means)}


def try_rates(settings: Settings, sigma: float, texts: Texts, bench: Bench, untrained: float) -> _Tried:
    """How a run of these sizes does at each rate that was tried; at method.learning_rate alone where it is given.

    untrained: the loss of the held-out texts before.
    """
    done, what = 0, f"rehearsing learning rates of {settings.method.name} on public records"
    usual = _USUAL_TRIALS * settings.privacy.steps

    def tick(steps: int = 1) -> None:
        nonlocal done
        done += steps
        bench.told(what, done, max(done + 1, usual))

    bench.told(what, 0, usual)
    with unchanged_afterwards(bench.model):
        parts = build_parts(settings, bench.model, PublicStart(bench.tokenizer))
        with parts.adapter:
            privacy = settings.privacy
            drawn = _trial_batch(privacy.b, sigma, parts.coordinates.dimension)
            noise = Noise(sigma, privacy, privacy.n, drawn=drawn, bands=bands_to_come(privacy))
            start = parts.hyper.learning_rate
            trial = trials_of(parts, parts.states(), texts, noise, tick)

            def attempt(rate: float, draw: int) -> Tensor:
                name = f"trial at {rate!r}, draw {draw}"
                if name in bench.measured:
                    tick(settings.privacy.steps)
                found = once(bench.measured, name, lambda: trial(rate, draw).tolist())
                return torch.tensor(found, dtype=torch.float64)

            if settings.method.learning_rate is None:
                rate, losses = settle_rate(start, attempt, untrained)
            else:
                rate, losses = start, {start: attempt(start, 0)[None]}
    total = max(done + 1, usual)  # as it was said last; no more are needed
    bench.told(what, total, total)
    return _Tried(rate, losses, drawn)


def _trial_batch(batch: float, noise_multiplier: float, dimension: int) -> int:
    """Records a step of a trial, for a run of expected batch size b, sigma, and a release of so many numbers.

    A mean of B clipped gradients strays from its expectation by C / sqrt(B) at most, in root mean square, and the noise
    has the norm sigma C sqrt(dimension) / b. B is such that the former's square is a fifth of the latter's.

    >>> _trial_batch(256, 0.83, 46_240), _trial_batch(1024, 1.2, 40_000_000), _trial_batch(4, 1.0, 100)
    (11, 8, 4)
    """
    needed = batch**2 / (_SHARE * noise_multiplier**2 * dimension)
    return math.ceil(min(batch, max(needed, _SMALLEST_BATCH)))


def _split(records: Examples, seed: int) -> tuple[Examples, Examples]:
    """In the place of private records, and held out: a quarter, drawn by the public seed."""
    # A record that stands there twice would be learnt and held out.
    once = {
        (record.input_ids.tobytes(), record.labels.tobytes()): record
        for record, count in zip(records, records.label_counts, strict=True)
        if count
    }
    usable = list(once.values())
    if len(usable) < 2 * _FEWEST:
        raise DataError(
            f"auto.file holds {len(usable)} different records with a token to learn, and {2 * _FEWEST} are needed",
            why="the choice would follow from single records",
            fix="give more PUBLIC records of the form of the private ones, or a number instead of auto",
        )
    order = counter_generator(seed, stream=_SPLIT).permutation(len(usable)).tolist()
    count = max(_FEWEST, min(len(usable) // 4, _MOST_HELD))
    return records.like([usable[i] for i in order[count:]]), records.like([usable[i] for i in order[:count]])


_SPLIT: Final = 2**63 + 2**61 + 2**59  # a stream of the public seed: apart from those of trials


def _median_norm(settings: Settings, texts: Examples, bench: Bench, of: str) -> float:
    """Of gradients at the start, before they are clipped, in the coordinates of the method. of: the texts, in words.

    Raises DataError where none has a gradient.
    """

    def norm(coordinates: Coordinates, captured: Captured, clipping: str) -> Tensor:
        return coordinates.norms_squared(coordinates.encode(captured)).clamp_min(0).sqrt()

    found = _at_the_start(settings, texts, bench, _NORMS_OF + of, norm)
    found = found[torch.isfinite(found) & (found > 0)]
    if not len(found):
        raise _no_gradient(of, "privacy.clip_norm")
    return float(found.median())


def turning_share(settings: Settings, texts: Examples, bench: Bench, of: str = "the texts") -> float:
    """Of gradients at the start, brought to one length as they are clipped: the root mean square of a coordinate of Vp
    over that of one of M, in isometric coordinates. About 1 where the start knows no more of V than chance. of: the
    texts, in words.

    Raises DataError where none has a gradient.
    """
    settings = settings.changed(method={"right_weight": 1.0, "metric_power": 0.0})
    numbers = [0, 0]

    def parts(coordinates: Coordinates, captured: Captured, clipping: str) -> Tensor:
        rank, sites = coordinates.adapter.rank, coordinates.adapter.sites
        numbers[:] = rank * rank * len(sites), sum(rank * (site.n - rank) for site in sites)
        counted = coordinates.evened(captured).formed() if clipping == "spectral" else captured
        core, beside, turning = coordinates.parts_squared(counted)
        return torch.stack([core, turning]) / (core + beside + turning)

    found = _at_the_start(settings, texts, bench, _DIRECTIONS_OF + of, parts)
    found = found[:, torch.isfinite(found).all(dim=0)]
    if not found.shape[1]:
        raise _no_gradient(of, "method.right_weight")
    core, turning = found.mean(dim=1).tolist()
    if not numbers[1] or not core:  # V is all of the layers' inputs, or none of what gradients see
        return 1.0
    return min(MOST_TURNING, math.sqrt(turning / numbers[1] / (core / numbers[0])))


def _no_gradient(of: str, setting: str) -> DataError:
    return DataError(
        f"none of {of} has a gradient that is finite and not zero",
        fix=f"give other PUBLIC records as auto.file, or a number as {setting}",
    )


def _at_the_start(
    settings: Settings,
    texts: Examples,
    bench: Bench,
    what: str,
    measure: Callable[[Coordinates, Captured, str], Tensor],
) -> Tensor:
    """What ``measure`` finds of the first texts' gradients, (..., texts). It is given how units are clipped. what: is
    done, in words."""
    some = texts.like(list(texts)[:_NORMS])
    found: list[Tensor] = []
    done = 0
    bench.told(what, 0, len(some))
    generator = counter_generator(settings.run.seed)  # there is no dropout, so nothing is drawn
    with unchanged_afterwards(bench.model):
        parts = build_parts(settings, bench.model, PublicStart(bench.tokenizer))
        adapter, coordinates = parts.adapter, parts.coordinates
        with adapter, training_passes(bench.model, generator):
            for batch in sequential_batches(
                some,
                max_tokens=settings.run.max_tokens,
                max_rows=coordinates.rows_at_once(),
                row_tokens=row_tokens(adapter),
                device=adapter.device,
            ):
                captured, _ = micro_batch_gradients(adapter, batch, public=True)
                found.append(measure(coordinates, captured, parts.hyper.clipping).cpu())
                done += captured.units
                bench.told(what, done, len(some))
    return torch.cat(found, dim=-1)
