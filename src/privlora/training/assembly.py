"""A run put together from its settings: the parts of its method on a model, and the step that they take."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from privlora.accounting import Ledger, Plan
from privlora.accounting.events import Sampling, StepEvent
from privlora.adapters import LowRankAdapter, write_adapter
from privlora.adapters.headed import HeadedAdapter
from privlora.adapters.peft_files import CONFIG_NAME, WEIGHTS_NAME
from privlora.config import PrivacySettings, Settings
from privlora.config.groups import PUBLIC_TEXTS
from privlora.coordinates import Coordinates, PublicGradients, SpanSpace
from privlora.coordinates.starts import Subspaces
from privlora.data.records import load_records
from privlora.data.sampling import BallsInBinsSampler, CyclicPoissonSampler, PoissonSampler
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.mechanisms import (
    AdaptiveClipNorm,
    CorrelatedNoise,
    GaussianMechanism,
    MeanMechanism,
    Mechanism,
    NoiseSource,
)
from privlora.methods import Hyperparameters, Method, build, find_row
from privlora.names import PUBLIC_GRADIENT
from privlora.optimizers import HeadedAverage, IterateAverage, Optimizer, SpanOptimizer
from privlora.precision import own_context
from privlora.randomness import private_generator
from privlora.schedules import learning_rate_at
from privlora.synthesis.directions import Embedding
from privlora.synthesis.embeddings import SentenceEmbedding, hidden_states
from privlora.training.files import write_atomically
from privlora.training.inputs import Data, tokenise
from privlora.training.misfits import (
    refuse_clashes,
    refuse_misfits,
    refuse_missing_texts,
    refuse_unrehearsed,
    refuse_unsettled,
    refuse_unused_texts,
)
from privlora.training.models import adapter_for, set_checkpointing
from privlora.training.promise import Cycles, bands_of, bands_to_come, cycle_of, plan_privacy, sampler
from privlora.training.public_form import PublicForm
from privlora.training.state import Part, TrainState
from privlora.training.step import Step
from privlora.training.texts.preferences import refuse_without_trl
from privlora.training.texts.public_gradients import (
    PublicTexts,
    Room,
    mean_gradient_subspaces,
    public_gradients,
)
from privlora.training.texts.synthetic_texts import SyntheticTexts

_OVER, _START = "over", "start."


class Ballot:
    """What a method that releases votes adds to a run's state, in its one checkpoint.

    embed: of texts, public; private records go through it one at a time.
    """

    def __init__(self, embed: Embedding) -> None:
        self.embed = embed
        self.rounds: dict[str, Tensor] = {}
        """Of ``synthesis.rounds.Rounds.state_dict``, as it was stored last; empty before the first release."""
        self.start: dict[str, Tensor] = {}
        """The coordinates before the first round, of rows whose rounds move them; else empty."""
        self.over = False
        """Whether all that follows from the last round is made."""

    @property
    def waiting(self) -> bool:
        """Whether the last release is stored and what follows from it is not."""
        return bool(self.rounds) and int(self.rounds["used"]) < len(self.rounds["released"])

    def state_dict(self) -> dict[str, Tensor]:
        start = {_START + name: tensor for name, tensor in self.start.items()}
        return {**self.rounds, **start, _OVER: torch.tensor(self.over)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.start = {n.removeprefix(_START): t for n, t in tensors.items() if n.startswith(_START)}
        self.rounds = {n: t for n, t in tensors.items() if n != _OVER and not n.startswith(_START)}
        self.over = bool(tensors[_OVER])


@dataclass(kw_only=True)
class Parts(TrainState):
    """A method on a model, as settings want it.

    texts: the run's own public texts, where settings have a group ``synthesis``. ballot: of rows that release votes.
    """

    method: Method
    settings: Settings
    hyper: Hyperparameters
    texts: SyntheticTexts | None = None
    ballot: Ballot | None = None

    def learning_rate(self, step: int) -> float:
        """Of step 1, 2, …; a function of public numbers."""
        hyper = self.hyper
        return learning_rate_at(
            step, self.settings.privacy.steps, hyper.learning_rate, hyper.schedule, hyper.warmup_steps
        )

    def _parts(self) -> dict[str, Part]:
        own: dict[str, Part | None] = {"texts": self.texts, "ballot": self.ballot}
        return super()._parts() | {name: part for name, part in own.items() if part is not None}

    def named_factors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What is exported, relative to W0: the averaged update where averaging is on, else the last iterate."""
        trained = self.average or self.coordinates
        return self.adapter.relative_to_w0(trained.named_factors())

    def install_result(self) -> None:
        """Let the model compute with what would be exported; ``coordinates.install`` goes back to training."""
        if self.average is not None:
            for group, (a, b) in zip(self.adapter.groups, self.average.factors(), strict=True):
                self.adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)

    @contextmanager
    def exported(self) -> Iterator[Any]:
        """The model, computing with what would be exported where the adapter is attached."""
        self.install_result()
        try:
            yield self.adapter.model
        finally:
            self.coordinates.install()

    def write_adapter(self, folder: Path) -> None:
        """Write what is exported as peft's files, each whole or not at all. Raises RunError if that fails."""
        lora = self.settings.adapter
        try:
            # Outside the folder, in case of a crash.
            with tempfile.TemporaryDirectory(prefix="privlora-") as temporary:
                write_adapter(
                    Path(temporary),
                    self.adapter,
                    self.named_factors(),
                    base_model=self.settings.model.name,
                    lora_alpha=lora.lora_alpha,
                    use_rslora=lora.use_rslora,
                )
                for name in (WEIGHTS_NAME, CONFIG_NAME):
                    write_atomically(folder / name, (Path(temporary) / name).read_bytes())
        except (OSError, SafetensorError) as error:
            what = f"cannot write the adapter into {str(folder)!r}: {error}"
            raise RunError(what, fix="free space or permissions, then `privlora resume`") from None


def plan_run(settings: Settings, model: torch.nn.Module | None = None) -> Plan | None:
    """What a run will release and cost; None in the non-private mode. See ``plan_privacy``.

    Raises ConfigError for all that is wrong with the settings as far as they tell it alone, before a model is loaded.
    """
    refuse_unrehearsed(settings)
    method = find_row(settings.method.name)
    refuse_misfits(settings, method)
    refuse_other_texts(settings, method)
    return plan_privacy(settings, model) if settings.privacy.private else None


class PublicStart:
    """What starts from public texts: the subspaces of adapter.init=public-gradient, and generated texts.

    Keeps the subspaces of the last adapter and texts, one for each seed, for one model that does not change: runs that
    differ in method, privacy or learning rate share them. generator: instead of synthesis.callable, in Python.
    """

    def __init__(self, tokenizer: Any, generator: Any = None) -> None:
        self._tokenizer, self._generator = tokenizer, generator
        self._key = ""
        self._found: dict[int, Subspaces] = {}

    def subspaces(self, settings: Settings, model: torch.nn.Module) -> Subspaces:
        """A function of the model, the public texts, the adapter's shape and the public seed alone.

        Raises DataError for texts that cannot be read or used.
        """
        lora, data, run = settings.adapter, settings.data, settings.run
        template = data.model_dump_json(exclude={"path", "evaluation"})
        key = f"{settings.model.model_dump_json()} {lora.model_dump_json()} {template} {run.max_tokens}"
        if key != self._key:
            self._key, self._found = key, {}
        if run.seed not in self._found:
            assert lora.public_text is not None
            records = load_records(lora.public_text, format=data.format, limit=PUBLIC_TEXTS)
            self._found[run.seed] = mean_gradient_subspaces(
                adapter_for(settings, model),
                tokenise(records, data, self._tokenizer),
                seed=run.seed,
                max_tokens=run.max_tokens,
            )
        return self._found[run.seed]

    def texts(self, settings: Settings, model: torch.nn.Module, method: Method) -> SyntheticTexts:
        """New ones for a run, not yet written."""
        return SyntheticTexts(settings, model, self._tokenizer, method, self._generator)

    def ballot(self, settings: Settings, model: torch.nn.Module, adapter: LowRankAdapter) -> Ballot:
        """Of a method that releases votes, before its first round: with the embedding of synthesis.embedding, or the
        base model's hidden states, without the adapter. Raises ConfigError if there is no such embedding."""
        assert settings.synthesis is not None
        if settings.synthesis.embedding is not None:
            device = str(next(model.parameters()).device)
            return Ballot(SentenceEmbedding(settings.synthesis.embedding, device=device))
        length, tokens = settings.data.max_length, settings.run.max_tokens
        fixed = partial(hidden_states, model, self._tokenizer, adapter=adapter)
        return Ballot(partial(fixed, max_length=length, max_tokens=tokens))


@own_context()
def build_parts(
    settings: Settings,
    model: torch.nn.Module,
    public: PublicStart | None = None,
    texts: PublicTexts | None = None,
) -> Parts:
    """Attach the adapter and start the method's state.

    public: needed where adapter.init=public-gradient, or where settings have a group ``synthesis``. texts: in the place
    of those that settings.synthesis describes, of methods that lean on public texts.

    Raises ConfigError where such texts are missing, or would not be used.
    """
    refuse_unsettled(settings)
    method = find_row(settings.method.name)
    refuse_clashes(settings, method)
    votes = method.releases == "votes"
    if method.tunes_writer:
        refuse_without_trl()
    own = None
    if settings.synthesis is not None and public is not None:
        refuse_unused_texts(settings)
        own = public.texts(settings, model, method)
    if texts is None and own is None:
        refuse_missing_texts(method)
    lora, privacy, max_tokens = settings.adapter, settings.privacy, settings.run.max_tokens
    bands, private = bands_to_come(privacy), privacy.private
    hyper = method.resolve(settings.method, lora.init, privacy.steps, private=private, bands=bands)
    set_checkpointing(model, settings.model.gradient_checkpointing)
    subspaces = None
    if hyper.init == PUBLIC_GRADIENT and public is not None:
        subspaces = public.subspaces(settings, model)
    adapter = adapter_for(settings, model, dropout=lora.lora_dropout)
    double = next(model.parameters()).dtype == torch.float64
    coordinates, optimizer = build(
        method,
        adapter,
        optimizer=hyper.optimizer,
        init=hyper.init,
        seed=settings.run.seed,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        settings=hyper.settings,
        dtype=torch.float64 if double else torch.float32,
        subspaces=subspaces,
        relative_rate=hyper.relative_rate,
    )
    if texts is not None:
        _lean_on(texts, coordinates, optimizer, max_tokens)
    elif own is not None:
        _lean_on(own, coordinates, optimizer, max_tokens, own.without_copies, own.tell_of_gradients)
    kind: Any = HeadedAverage if isinstance(adapter, HeadedAdapter) else IterateAverage
    average = kind(coordinates, hyper.averaging) if hyper.averaging else None
    quantile = privacy.clip_quantile
    adaptive = None if quantile is None else AdaptiveClipNorm(privacy.clip_norm, quantile)
    ballot = public.ballot(settings, model, adapter) if votes and public is not None else None
    adapter.attach()  # last: a setting that is refused leaves the model alone
    return Parts(
        method=method,
        coordinates=coordinates,
        optimizer=optimizer,
        average=average,
        settings=settings,
        hyper=hyper,
        adaptive=adaptive,
        texts=own,
        ballot=ballot,
    )


def refuse_other_texts(settings: Settings, method: Method) -> None:
    """Raise ConfigError where a row's public texts are missing, or those of the settings would not be used or cannot
    be written with what is installed."""
    if settings.synthesis is None:
        refuse_missing_texts(method)
    else:
        refuse_unused_texts(settings)
        PublicForm(settings).refuse_none()
    if method.tunes_writer:
        refuse_without_trl()


def _lean_on(
    texts: PublicTexts,
    coordinates: Coordinates,
    optimizer: Optimizer,
    max_tokens: int,
    without_copies: Callable[[PublicGradients], PublicGradients] = lambda found: found,
    told: Callable[[int, int], None] | None = None,
) -> None:
    """Let every step span the gradients of the texts that it is given; other methods take no notice of them.

    without_copies: leaves out rows, and the texts that they belong to. told: see ``public_gradients``.
    """
    if isinstance(coordinates, SpanSpace) and isinstance(optimizer, SpanOptimizer):
        room = Room()

        def gradients(scores: Tensor | None) -> PublicGradients:
            asked = texts(scores)
            found = public_gradients(coordinates.inner, asked, max_tokens=max_tokens, told=told, room=room)
            return without_copies(found)

        coordinates.refresh = lambda: gradients(optimizer.take_scores())
        coordinates.look_again = lambda: gradients(None)  # scores wait on, so nothing evolves


def build_step(
    parts: Parts,
    data: Data,
    ledger: Ledger | Plan | None,
    *,
    done: int = 0,
    instrument: Callable[[Mechanism], Mechanism] | None = None,
    cycles: Cycles | None = None,
    correlated: CorrelatedNoise | None = None,
) -> Step:
    """The step that ``parts`` take on ``data``. ledger: of the run's plan; None in the non-private mode; a plan where
    another process has the ledger, so that nothing can be released here.

    done: steps that were taken without a ledger. instrument: for audits; what is used in the mechanism's place. cycles,
    correlated: of a ledger whose plan has correlated noise.

    Raises PrivacyError if the settings are not those of the ledger's plan.
    """
    settings = parts.settings
    if parts.ballot is not None:
        what = f"method {parts.method.name!r} releases {parts.method.called} and takes no private steps"
        raise ConfigError(what, fix="choose a method that releases gradients")
    draws: PoissonSampler | CyclicPoissonSampler | BallsInBinsSampler = sampler(
        settings.privacy, len(data.units)
    )
    plan = ledger if isinstance(ledger, Plan) or ledger is None else ledger.plan
    before, bands = (0, 1) if plan is None else (plan.before_training, bands_of(plan))
    if settings.privacy.bands not in ("auto", bands):
        raise _other_plan(f"privacy.bands={settings.privacy.bands}, and the plan has {bands}")
    if ledger is not None and plan is not None and cycle_of(plan) > 1:
        if isinstance(ledger, Plan):  # what draws and releases is another process
            cycles = Cycles.drawn(ledger, data)
            correlated = CorrelatedNoise(cycles.coefficients, parts.coordinates) if bands > 1 else None
        if cycles is None or (correlated is None and bands > 1):
            raise PrivacyError(
                "the plan prices steps together, and neither who is drawn when nor their noise is given",
                why="dealt anew, a unit could join twice in a cycle of steps that is paid for once",
                fix="take those of training.promise",
            )
        draws = _in_cycles(settings.privacy, ledger, plan, cycles, len(data.units))
    mechanism = _mechanism(parts, ledger, plan, done, draws.sampling, correlated)
    return Step(
        state=parts,
        mechanism=mechanism if instrument is None else instrument(mechanism),
        examples=data.examples,
        learning_rate=lambda number: parts.learning_rate(number - before),
        draw=lambda: data.units.draw_records(draws.draw(), draws.generator),
        max_tokens=settings.run.max_tokens,
        dropout=settings.model.dropout,
        masks=private_generator(settings.privacy.insecure_noise_seed),
    )


def _other_plan(what: str) -> PrivacyError:
    why = "the stated epsilon holds for the plan only"
    return PrivacyError(what, why=why, fix="resume with the settings of the first run")


def _in_cycles(
    privacy: PrivacySettings, ledger: Ledger | Plan, plan: Plan, cycles: Cycles, units: int
) -> CyclicPoissonSampler | BallsInBinsSampler:
    cycle, bands = cycle_of(plan), bands_of(plan)

    def charged() -> int:
        if isinstance(ledger, Plan):
            raise PrivacyError(
                "this process is to draw a batch, and the run's ledger is another's",
                why="whose turn it is follows from what is charged",
                fix="let the first process draw",
            )
        return ledger.charges

    seed = privacy.insecure_noise_seed
    if bands == 1:
        return BallsInBinsSampler(units, cycle, key=cycles.key, charged=charged, insecure_seed=seed)
    rate = bands * privacy.q
    return CyclicPoissonSampler(units, rate, bands, key=cycles.key, charged=charged, insecure_seed=seed)


class _LedgerElsewhere:
    """Of a process that has only a part of each batch."""

    def charge(self, event: StepEvent) -> int:
        raise PrivacyError(
            "this process is to release, and the run's ledger is another's",
            why="the release would not be accounted for",
            fix="let the first process release the sum of all",
        )


def _mechanism(
    parts: Parts,
    ledger: Ledger | Plan | None,
    plan: Plan | None,
    done: int,
    sampling: Sampling,
    correlated: CorrelatedNoise | None,
) -> Mechanism:
    privacy = parts.settings.privacy
    if plan is None or ledger is None:
        return MeanMechanism(parts.coordinates, expected_batch_size=privacy.b, steps=privacy.steps, done=done)
    if (plan.unit, plan.insecure_noise) != (privacy.unit, privacy.insecure_noise_seed is not None):
        raise _other_plan("the privacy unit or the kind of noise is not what was planned")
    return GaussianMechanism(
        parts.coordinates,
        clip_norm=plan.clip_norm,
        # What is charged is what is sampled; the ledger refuses it if it is not what was planned.
        event=StepEvent(sampling, plan.phases[-1][0].noise_multiplier, parts.coordinates.event_layers),
        expected_batch_size=plan.expected_batch_size,
        ledger=_LedgerElsewhere() if isinstance(ledger, Plan) else ledger,
        noise=NoiseSource(privacy.insecure_noise_seed),
        clipping=parts.hyper.clipping,
        adaptive=parts.adaptive,
        correlated=correlated,
    )
