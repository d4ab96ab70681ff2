"""Private training of N adapters of one frozen model: own records, Poisson batches, noise and ledger for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import CyclicPoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.config import Settings
from privlora.coordinates.base import name_factors
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.data.members import check_members
from privlora.data.sampling import CyclicPoissonSampler, PoissonSampler
from privlora.data.units import Units
from privlora.errors import ConfigError, PrivacyError
from privlora.evaluation.next_token import row_losses
from privlora.mechanisms import NoiseSource
from privlora.mechanisms.charges import Charges, Uncharged
from privlora.randomness import private_generator, private_key
from privlora.stacked.adapter import StackedAdapter
from privlora.stacked.parts import stack_parts
from privlora.stacked.team import Member, Team
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.models import unchanged_afterwards
from privlora.training.promise import plan_privacy

# Side by side: enough to fill micro-batches of any usual size. From 8 on, more of them save nothing.
_TOGETHER = 16


@dataclass(frozen=True)
class TrainedAdapters:
    """N adapters and what was done to get them.

    factors: one (A (N, L, m, r), B (N, L, n, r)) a group of L modules; the update is A B^T. adapter: names the
    modules; detached. event: one step of one adapter, None in the non-private mode. insecure: seeds were given, so that
    batches and noise can be replayed and nothing here is private.
    """

    adapter: LowRankAdapter
    factors: list[tuple[Tensor, Tensor]]
    settings: Settings
    event: StepEvent | None
    insecure: bool

    def __len__(self) -> int:
        return len(self.factors[0][0])

    def epsilon(self, delta: float) -> float:
        """Of publishing one adapter (PLD, add or remove one unit); adapters that share records add up.

        Raises PrivacyError in the non-private mode.
        """
        if self.event is None:
            raise PrivacyError(
                "adapters trained without noise have no epsilon", fix="set privacy.private=true"
            )
        return epsilon([(self.event, self.settings.privacy.steps)], delta)

    def named_factors(self, n: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Site name -> (A (m, r), B (n, r)) of adapter ``n``, relative to W0, as adapters.write_adapter takes them."""
        named = name_factors(self.adapter, [(a[n], b[n]) for a, b in self.factors])
        return self.adapter.relative_to_w0(named)

    @torch.no_grad()
    def losses(self, examples: Examples, *, together: int = _TOGETHER) -> Tensor:
        """Mean next-token loss in nats per label token of every adapter on every record, (N, records) float64.

        0 where nothing is predicted; NaN or infinite for an adapter that has diverged.
        """
        found = torch.zeros(len(self), len(examples), dtype=torch.float64)
        model, max_tokens = self.adapter.model, self.settings.run.max_tokens
        with unchanged_afterwards(model):
            model.eval()
            for turn in _turns(len(self), together):
                adapter = StackedAdapter.like(self.adapter, len(turn), _owners(examples, len(turn)))
                with adapter:
                    for group, (a, b) in zip(adapter.groups, self.factors, strict=True):
                        left, right = (t[turn.start : turn.stop].flatten(0, 1) for t in (a, b))
                        adapter.install(group, left, left.new_ones(left.shape[0], left.shape[2]), right)
                    copies = _copies(examples, len(turn))
                    flat = found[turn.start : turn.stop].view(-1)
                    for batch in sequential_batches(copies, max_tokens=max_tokens, device=adapter.device):
                        with adapter.serving(batch.record_index):
                            flat[batch.record_index] = row_losses(model, batch.to(adapter.device)).cpu()
        return found


def train_adapters(
    settings: Settings,
    model: torch.nn.Module,
    examples: Examples,
    *,
    members: Tensor,
    units: Units | None = None,
    seeds: Sequence[int] | None = None,
    ledgers: Sequence[Charges] | None = None,
    public: PublicStart | None = None,
    together: int = _TOGETHER,
    progress: Callable[[int], None] | None = None,
) -> TrainedAdapters:
    """Train one adapter for each row of ``members``, as ``settings`` say, from the same public start.

    What is done to an adapter is what an ordinary run does: the same coordinates, clipping, noise, divisor, optimizer
    and schedule, from the same code. It does not depend on the adapters beside it. Nothing is written.

    Args:
        settings: of one run; ``data`` and ``run.output`` are not looked at.
        model: on its device; as before when this returns.
        examples: all records.
        members: (N, units) bool: which units each adapter may see (the IN and OUT sets of an attack).
        units: which records belong together; None: each record is a unit.
        seeds: for studies and tests only, N different integers >= 0; batches and noise can then be replayed, and the
            result says so. None: keys of the operating system.
        ledgers: one for each adapter; charged before the noise of each of its steps.
        public: for adapter.init=public-gradient.
        together: how many are trained side by side; the others wait for their turn.
        progress: called after each step with the number of steps taken so far, of N * privacy.steps.

    Raises:
        ConfigError: shapes do not fit, or a setting does not go with many adapters.
        PrivacyError: a ledger refuses; or ledgers are given with seeds, or in the non-private mode; or, where noise is
            correlated, one of them is not new, or is given twice.
        ModelError: a gradient is not finite in the non-private mode, which clips nothing.
    """
    units = Units(np.arange(len(examples))) if units is None else units
    check_members(members, len(units), seeds=seeds, ledgers=ledgers)
    _check(settings, ledgers, together)
    event = plan_privacy(settings, model).event if settings.privacy.private else None
    if event is not None and isinstance(event.sampling, CyclicPoissonSampling):
        _refuse_used(ledgers or (), settings.privacy.steps)
    factors: list[list[tuple[Tensor, Tensor]]] = []
    with unchanged_afterwards(model):
        template = build_parts(settings, model, public)
        template.adapter.detach()
        for turn in _turns(len(members), together):
            team = _team(
                template,
                examples,
                units,
                own=[np.flatnonzero(members[n].numpy()) for n in turn],
                keys=[None if seeds is None else seeds[n] for n in turn],
                ledgers=None if ledgers is None else [ledgers[n] for n in turn],
                event=event,
            )
            team.take(settings.privacy.steps, _told(progress, turn, settings.privacy.steps))
            factors.append(team.factors())
    groups = (zip(*of_group, strict=True) for of_group in zip(*factors, strict=True))
    pairs = [(torch.cat(a), torch.cat(b)) for a, b in groups]
    return TrainedAdapters(template.adapter, pairs, settings, event, insecure=seeds is not None)


def _team(
    template: Parts,
    examples: Examples,
    units: Units,
    own: list[np.ndarray],
    keys: list[int | None],
    ledgers: Sequence[Charges] | None,
    event: StepEvent | None,
) -> Team:
    """The adapters of one turn, each on its own copy of the records. own: the units of each; keys: its seed or None;
    event: of a step, None in the non-private mode."""
    privacy = template.settings.privacy

    def sampler(size: int, key: int | None) -> PoissonSampler | CyclicPoissonSampler:
        seed = None if key is None else 2 * key
        if event is None or not isinstance(event.sampling, CyclicPoissonSampling):
            return PoissonSampler(size, privacy.q, insecure_seed=seed)
        return CyclicPoissonSampler(
            size,
            event.sampling.sample_rate,
            event.sampling.classes,
            key=private_key(seed),
            charged=count().__next__,  # a team takes its steps without a gap, and draws once in each
            insecure_seed=seed,
        )

    members = [
        Member(
            units=units,
            sampler=sampler(len(each), key),
            first=k * len(examples),
            own=each,
            noise=NoiseSource(None if key is None else 2 * key + 1),
            ledger=Uncharged() if ledgers is None else ledgers[k],
        )
        for k, (each, key) in enumerate(zip(own, keys, strict=True))
    ]
    return Team(
        stack_parts(template, len(own), _owners(examples, len(own))),
        _copies(examples, len(own)),
        members,
        noise_multiplier=None if event is None else event.noise_multiplier,
        masks=private_generator(keys[0]),
    )


def _copies(examples: Examples, count: int) -> Examples:
    """The records once for each of ``count`` adapters: copy k of record i is number k * records + i."""
    return Examples(list(examples) * count, pad_token_id=examples.pad_token_id)


def _owners(examples: Examples, count: int) -> Tensor:
    """Which adapter each copy is of."""
    return torch.arange(count).repeat_interleave(len(examples))


def _told(progress: Callable[[int], None] | None, turn: range, steps: int) -> Callable[[int], None] | None:
    """``progress`` of all turns, from the steps of this one."""
    return None if progress is None else lambda taken: progress(turn.start * steps + taken * len(turn))


def _turns(total: int, together: int) -> list[range]:
    return [range(first, min(first + together, total)) for first in range(0, total, together)]


def _refuse_used(ledgers: Sequence[Charges], steps: int) -> None:
    """Raise PrivacyError for a ledger that is not of one adapter's run alone: each deals its units to classes anew."""
    if len({id(ledger) for ledger in ledgers}) < len(ledgers):
        what = "two adapters with correlated noise have one ledger"
    elif any(getattr(ledger, "charges", 0) for ledger in ledgers):
        what = "an adapter with correlated noise has a ledger that shows charges"
    elif any(ledger.plan.steps != steps for ledger in ledgers if hasattr(ledger, "plan")):
        what = f"the ledger of an adapter with correlated noise plans another number of steps than {steps}"
    else:
        return
    raise PrivacyError(
        what,
        why="a cycle of steps is paid for once, and units that are dealt to other classes could join twice in it",
        fix="give each adapter a new ledger of its own, of privacy.steps steps",
    )


def _check(settings: Settings, ledgers: Sequence[Charges] | None, together: int) -> None:
    privacy = settings.privacy
    if ledgers is not None and not privacy.private:
        raise PrivacyError(
            "adapters without noise cannot be charged to ledgers", fix="leave ledgers out if this is a study"
        )
    if privacy.sampling != "poisson":
        raise ConfigError(
            f"privacy.sampling={privacy.sampling} does not go with many adapters", fix="remove it"
        )
    if together < 1:
        raise ConfigError(f"together={together} is below 1", fix="train at least one adapter at a time")
    for name, fix in (
        ("insecure_noise_seed", "give seeds"),
        ("clip_quantile", "set clip_norm to what the run ended with"),
        ("max_batch_size", "leave it out"),
    ):
        if getattr(privacy, name) is not None:
            raise ConfigError(f"privacy.{name} does not go with many adapters", fix=fix)
