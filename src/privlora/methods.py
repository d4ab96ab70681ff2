"""The table of methods: one row = a space of gradients, an optimizer, its defaults. A new method is a new row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.headed import HeadedAdapter
from privlora.adapters.peft_files import lora_scaling
from privlora.config import OPTIMIZER_SETTINGS, MethodSettings, Settings, method_names, rows
from privlora.config.method_names import unknown_method
from privlora.config.rows import Row, cannot_clip, no_optimizer, no_setting, no_unit
from privlora.coordinates import (
    Coordinates,
    DirectionCoordinates,
    FactorCoordinates,
    OneFactorCoordinates,
    ProjectedCoordinates,
    ProjectedSpanCoordinates,
    ResidualSpanCoordinates,
    SpanCoordinates,
    SpanSpace,
    TangentCoordinates,
    TangentProjectedSpanCoordinates,
    TangentSpanCoordinates,
    WishartCoordinates,
)
from privlora.coordinates.headed import HeadedCoordinates
from privlora.coordinates.starts import (
    Subspaces,
    factor_start,
    projected_start,
    refuse_subspace_start,
    refuse_tangent_start,
    span_start,
    tangent_start,
)
from privlora.errors import ConfigError
from privlora.mechanisms import noise_in_sums
from privlora.names import PUBLIC_GRADIENT
from privlora.optimizers import (
    TANGENT_OPTIMIZERS,
    DirectionAdamW,
    DirectionSGD,
    FactorAdamBC,
    FactorAdamW,
    FactorLamb,
    FactorLoraFA,
    FactorLoraPlus,
    FactorRiemannian,
    FactorRite,
    FactorSGD,
    HeadedOptimizer,
    Optimizer,
    ProjectedAdamW,
    ProjectedSGD,
    span_optimizers,
    weight_units,
)
from privlora.precision import own_context

RATE_STEPS = 24
"""Of the runs in which default learning rates were measured."""

_OF_BANDS = 1.5
"""The power of what is left of noise in sums by which a default rate grows with bands: measured (docs/results.md)."""

RELATIVE_IN_WORDS = (
    "in the size of the frozen weights: the share of a matrix's norm by which one step's noise moves it"
)
"""What a learning rate is in, with method.relative_rate."""


@dataclass(frozen=True)
class Space:
    """Coordinates, how they start, and the optimizers that work in them.

    start: (adapter, init, *, seed, scale, dtype, subspaces) and the chosen optimizer's ``space_settings``. weight_unit:
    the mean of modules' weight units (optimizers.rate_units) on the model on which default rates were found,
    stories260K at rank 8: a rate in entries over it is one in the size of the frozen weights. None where modules have
    no such unit.
    """

    coordinates: type[Coordinates]
    start: Callable[..., Coordinates]
    optimizers: Mapping[str, type[Optimizer]]
    weight_unit: float | None = None


def _span(
    kind: type[SpanSpace], inner: Callable[..., Coordinates], optimizers: Mapping[str, type[Optimizer]]
) -> Space:
    """A span of public gradients around the space that ``inner`` starts."""
    return Space(kind, partial(span_start, kind=kind, inner=inner), span_optimizers(kind, optimizers))


_FACTORS: dict[str, type[Optimizer]] = {"adamw": FactorAdamW, "sgd": FactorSGD}
_TANGENTS = {name: rule for name, rule in TANGENT_OPTIMIZERS.items() if name != "paper"}  # Z = 0 is its end
_PROJECTED: dict[str, type[Optimizer]] = {"sgd": ProjectedSGD, "adamw": ProjectedAdamW}

SPACES: dict[str, Space] = {
    "tangent": Space(TangentCoordinates, tangent_start, TANGENT_OPTIMIZERS, weight_unit=0.286),
    "factors": Space(
        FactorCoordinates,
        factor_start,
        {
            "adamw": FactorAdamW,
            "sgd": FactorSGD,
            "adambc": FactorAdamBC,
            "lora+": FactorLoraPlus,
            "lamb": FactorLamb,
            "rite": FactorRite,
            "riemannian": FactorRiemannian,
        },
        weight_unit=0.278,
    ),
    "one-factor": Space(
        OneFactorCoordinates,
        partial(factor_start, kind=OneFactorCoordinates),
        {"adamw": FactorAdamW, "lora-fa": FactorLoraFA},
        weight_unit=0.414,
    ),
    "direction": Space(
        DirectionCoordinates,
        partial(factor_start, kind=DirectionCoordinates),
        {"sgd": DirectionSGD, "adamw": DirectionAdamW},
    ),
    "projected": Space(ProjectedCoordinates, projected_start, _PROJECTED, weight_unit=0.135),
    "wishart": Space(
        WishartCoordinates,
        partial(projected_start, kind=WishartCoordinates),
        _PROJECTED,
        weight_unit=0.135,
    ),
    "coefficients": _span(SpanCoordinates, factor_start, _FACTORS),
    "projected-span": _span(ProjectedSpanCoordinates, factor_start, _FACTORS),
    "tangent-projected-span": _span(TangentProjectedSpanCoordinates, tangent_start, _TANGENTS),
    "span-and-residual": _span(ResidualSpanCoordinates, factor_start, _FACTORS),
    "tangent-coefficients": _span(TangentSpanCoordinates, tangent_start, _TANGENTS),
}


@dataclass(frozen=True)
class Method:
    """One row. ``private`` is False for baselines that never clip or add noise.

    space: a name in SPACES. settings: what the row sets otherwise than its optimizer does (Optimizer.settings holds the
    defaults); init_settings: what it sets otherwise again for some starts; noiseless_settings: without noise, where
    nothing is averaged either. public_texts: the texts whose gradients the space leans on, if it does, which stay as
    they are or evolve from step to step. releases: what is noised, gradients in that space, or votes on public texts,
    after which the adapter learns the texts without noise. tunes_writer: whether votes tune the model that writes the
    texts, which then is the one that is trained, by trl. learning_rate: in entries. relative_rate: whether the default
    is in the size of the frozen weights instead: relative_learning_rate, or learning_rate over the space's usual unit.
    revision: raised when defaults change, so that no study
    takes runs with the old ones for runs with the new.
    """

    name: str
    summary: str
    reference: str
    space: str
    optimizers: tuple[str, ...]
    private: bool = True
    learning_rate: float = 3e-3
    relative_rate: bool = False
    relative_learning_rate: float | None = None
    init: str = "random"
    schedule: str = "constant"
    warmup_fraction: float = 0.0
    averaging: float = 0.0
    clipping: str = "flat"
    clippings: tuple[str, ...] = ("flat", "automatic", "spectral", "per-module")
    settings: Mapping[str, float] = field(default_factory=dict, hash=False)
    init_settings: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    noiseless_settings: Mapping[str, float] = field(default_factory=dict, hash=False)
    public_texts: Literal["fixed", "evolving"] | None = None
    releases: Literal["gradients", "votes"] = "gradients"
    tunes_writer: bool = False
    revision: int = 0

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise ConfigError(
                f"method {self.name!r} has the unknown space {self.space!r}",
                fix=f"register it before, as SPACES[{self.space!r}]",
            )

    @property
    def coordinates(self) -> type[Coordinates]:
        """Those of its space."""
        return SPACES[self.space].coordinates

    @property
    def charges_projections(self) -> bool:
        """Whether a projection of its coordinates is part of what is charged."""
        own, plain = (
            inspect.getattr_static(kind, "event_layers_of") for kind in (self.coordinates, Coordinates)
        )
        return own is not plain

    @property
    def row(self) -> Row:
        """What settings may ask of it."""
        kinds = SPACES[self.space].optimizers
        return Row(
            {each: tuple({**kinds[each].settings, **kinds[each].space_settings}) for each in self.optimizers},
            self.clippings,
            private=self.private,
            relative=SPACES[self.space].weight_unit is not None,
            weighed=self.rate_falls and not (self.charges_projections or self.coordinates.forward_only),
        )

    @property
    def rate_falls(self) -> bool:
        """Whether the default learning rate falls with the root of the steps: where noise limits how far a run may go.

        Rules move by the rate times about one standard deviation of noise in every coordinate, so after T steps noise
        has moved each by rate * sqrt(T), whatever the batch; and it is that which best rates have in common
        (docs/choosing.md). Of rows that lean on public texts it was not measured, and they keep one rate.
        """
        return self.private and self.public_texts is None and self.releases == "gradients"

    def is_relative(self, asked: bool | None) -> bool:
        """Whether a run's learning rate is in the size of the frozen weights: as asked, else as the row has it.

        Raises ConfigError where the row's modules have no unit of their own.
        """
        relative = self.relative_rate if asked is None else asked
        if relative and SPACES[self.space].weight_unit is None:
            raise no_unit(self.name)
        return relative

    def rate_of(
        self, steps: int, *, private: bool = True, relative: bool | None = None, bands: int = 1
    ) -> float:
        """The default learning rate of a run of so many steps, to three digits.

        relative: as a share of the frozen weights' norms, or in entries; None: as the row has it. bands: of the run's
        noise, whose sums leave room for larger steps.
        """
        rate = self.learning_rate
        if self.is_relative(relative):
            unit = SPACES[self.space].weight_unit
            assert unit is not None
            rate = self.relative_learning_rate or rate / unit
        if private and self.rate_falls:
            rate *= math.sqrt(RATE_STEPS / steps) / noise_in_sums(bands, steps) ** _OF_BANDS
        return float(f"{rate:.3g}")

    @property
    def called(self) -> str:
        """What its releases are sums of, as errors and plans call it."""
        return "preference scores" if self.tunes_writer else self.releases

    @property
    def optimizer(self) -> str:
        """The default optimizer."""
        return self.optimizers[0]

    def choose_optimizer(self, name: str | None) -> str:
        """``name``, or the default for None. Raises ConfigError for one that the row does not have."""
        chosen = name or self.optimizer
        if chosen not in self.optimizers:
            raise no_optimizer(self.name, chosen, self.optimizers)
        return chosen

    def optimizer_settings(
        self,
        optimizer: str,
        given: Mapping[str, float],
        init: str | None = None,
        *,
        private: bool = True,
    ) -> dict[str, float]:
        """All settings of one of the row's optimizers: given, else the row's for such a run, else the optimizer's own.

        Where hold_out is above 0, what it chooses before each step, which is what was not given, is left out.

        Raises ConfigError for a given one that the optimizer does not have, or if hold_out has nothing to choose.
        """
        kind = SPACES[self.space].optimizers[optimizer]
        own = {**kind.settings, **kind.space_settings}
        for name in given:
            if name not in own:
                raise no_setting(self.name, optimizer, name, tuple(own))
        row = {**self.settings, **self.init_settings.get(init or self.init, {})}
        if not private:
            row |= self.noiseless_settings
        complete = {name: given.get(name, row.get(name, default)) for name, default in own.items()}
        free = [name for name in _CHOSEN if name not in given]
        if not complete.get("hold_out"):
            return complete
        if not free and "hold_out" not in given:
            return {**complete, "hold_out": 0.0}
        if not free or not private:
            raise ConfigError(
                f"method.hold_out={complete['hold_out']:g} has nothing to choose"
                + ("" if private else ": there is no noise"),
                why=f"it is for those of {', '.join(_CHOSEN)} that are not given, by what noise leaves of the gradient",
                fix="set method.hold_out=0" + (", or leave one of them out" if private else ""),
            )
        return {name: value for name, value in complete.items() if name not in free}

    def resolve(
        self, chosen: MethodSettings, init: str | None, steps: int, *, private: bool = True, bands: int = 1
    ) -> Hyperparameters:
        """The settings that a run uses: what was chosen, else this row's defaults. bands: of its noise, as planned.

        Raises ConfigError.
        """
        private = private and self.releases == "gradients"  # what follows votes trains without noise
        given = {name: value for name, value in chosen.model_dump().items() if value is not None}
        optimizer = self.choose_optimizer(chosen.optimizer)
        clipping = given.get("clipping", self.clipping)
        if clipping not in self.clippings:
            raise cannot_clip(self.name, clipping, self.clippings)
        if given.get("averaging") and self.coordinates.dense:
            raise ConfigError(
                f"method {self.name!r} cannot average its iterates",
                why="they are dense, and an average that the layers do not compute with would be exported unseen",
                fix="remove method.averaging",
            )
        relative = self.is_relative(chosen.relative_rate)
        _refuse_start(self, init or self.init)
        return Hyperparameters(
            optimizer=optimizer,
            init=init or self.init,
            warmup_steps=given.get("warmup_steps", round(self.warmup_fraction * steps)),
            learning_rate=given["learning_rate"]
            if "learning_rate" in given
            else self.rate_of(steps, private=private, relative=relative, bands=bands),
            relative_rate=relative,
            schedule=given.get("schedule", self.schedule),
            averaging=given.get("averaging", self.averaging if private else 0.0),
            clipping=clipping if private else "none",
            settings=self.optimizer_settings(
                optimizer,
                {name: given[name] for name in OPTIMIZER_SETTINGS if name in given},
                init,
                private=private,
            ),
        )


@dataclass(frozen=True)
class Hyperparameters:
    """A method's settings with nothing left open. All public. settings: those of the optimizer.

    relative_rate: whether learning_rate is in the size of the frozen weights (optimizers.rate_units); else in entries.
    """

    optimizer: str
    init: str
    learning_rate: float
    relative_rate: bool
    schedule: str
    warmup_steps: int
    averaging: float
    clipping: str
    settings: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Name -> value, the optimizer's own settings among them."""
        values = asdict(self)
        return values | dict(values.pop("settings"))

    def in_comments(self, settings: Settings) -> str:
        """What null stands for in settings, as comments of YAML for readers: a run finds it again by itself."""
        found = {
            f"adapter.{name}" if name == "init" else f"method.{name}": v for name, v in self.to_dict().items()
        }
        given = {"adapter": settings.adapter, "method": settings.method}
        lines = [
            f"#   {place}: {value}\n"
            for place, value in found.items()
            for group, _, name in [place.partition(".")]
            if getattr(given[group], name, None) is None
        ]
        return "".join(["# What null stands for in this run:\n", *lines]) if lines else ""


_OF_SPANS = ("normalized", "flat")
_CHOSEN = ("alpha", "ridge", "top_k")  # by method.hold_out

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            name="prism",
            summary="clip and noise in the tangent space of the rank-r update; no factor plays a part",
            reference="Wang and Zhang 2026 (PRISM)",
            space="tangent",
            optimizers=("rank", "scalar", "sgd", "paper"),
            learning_rate=4e-3,
            relative_rate=True,
            relative_learning_rate=0.02,
            init="w0-subspace",
            clipping="spectral",
            settings={"beta1": 0.0, "beta2": 0.99, "error_feedback": 1.0},
            init_settings={PUBLIC_GRADIENT: {"right_weight": 0.25}},
            noiseless_settings={"beta1": 0.5, "error_feedback": 0.0, "right_weight": 1.0},
            revision=1,
            averaging=0.5,
        ),
        Method(
            name="dp-adamw",
            summary="clip and noise the gradients of both LoRA factors, then AdamW",
            reference="Yu et al. 2022; Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            learning_rate=4e-3,
        ),
        Method(
            name="dp-sgd",
            summary="clip and noise the gradients of both LoRA factors, then SGD at learning_rate / noise std",
            reference="Abadi et al. 2016",
            space="factors",
            optimizers=("sgd",),
            learning_rate=4e-3,
        ),
        Method(
            name="dp-adambc",
            summary="as dp-adamw, with the noise's variance taken out of the second moment",
            reference="Tang et al. 2024 (DP-AdamBC)",
            space="factors",
            optimizers=("adambc",),
            learning_rate=4e-3,
        ),
        Method(
            name="lora+",
            summary="as dp-adamw; learning_rate is the right factor's, the left one's is learning_rate_ratio times it",
            reference="Hayou et al. 2024 (LoRA+)",
            space="factors",
            optimizers=("lora+",),
            learning_rate=5e-4,
        ),
        Method(
            name="ffa",
            summary="right factor frozen at its start; the left one clipped, noised and trained with AdamW",
            reference="Sun et al. 2024 (FFA-LoRA)",
            space="one-factor",
            optimizers=("adamw",),
            learning_rate=4e-3,
        ),
        Method(
            name="lora-fa",
            summary="as ffa, with the gradient brought as near to the dense one as the frozen factor allows",
            reference="Zhang et al. 2023 (LoRA-FA); peft",
            space="one-factor",
            optimizers=("lora-fa",),
            learning_rate=4e-3,
        ),
        Method(
            name="lamb",
            summary="clip and noise both factors, then Adam's step scaled to the norm of each matrix",
            reference="You et al. 2020 (LAMB)",
            space="factors",
            optimizers=("lamb",),
            learning_rate=8e-3,
        ),
        Method(
            name="lora-rite",
            summary="clip and noise both factors, then a rule whose effect on W no factoring changes",
            reference="Yen et al. 2025 (LoRA-RITE)",
            space="factors",
            optimizers=("rite",),
            learning_rate=2e-3,
        ),
        Method(
            name="riemannian",
            summary="clip and noise both factors, precondition each by the other one's Gram matrix, then AdamW",
            reference="Zhang and Pilanci 2024; peft",
            space="factors",
            optimizers=("riemannian",),
            learning_rate=4e-3,
        ),
        Method(
            name="projected",
            summary="dense update; gradients projected on r fresh random directions, then clipped and noised",
            reference="Hu et al. 2026, with the clip after the projection",
            space="projected",
            optimizers=("sgd", "adamw"),
            learning_rate=2e-3,
        ),
        Method(
            name="wishart-m2",
            summary="dense update; whole gradients clipped and noised, then projected on r fresh random directions",
            reference="Hu et al. 2026 (Wishart projection mechanism, M2), accounted exactly",
            space="wishart",
            optimizers=("sgd", "adamw"),
            clippings=("flat", "automatic"),
        ),
        Method(
            name="dp-zo",
            summary="no gradients: two passes a unit, whose losses differ along one random direction by what is noised",
            reference="Tang et al. 2024 (DP-ZO); Malladi et al. 2023 (MeZO)",
            space="direction",
            optimizers=("sgd", "adamw"),
            learning_rate=1e-4,
            clippings=("flat",),
        ),
        Method(
            name="pe-sgd",
            summary="coefficients of private gradients in those of public texts, which evolve with what is released",
            reference="Zou et al. 2026 (PE-SGD)",
            space="coefficients",
            optimizers=("adamw", "sgd"),
            clipping="normalized",
            clippings=_OF_SPANS,
            public_texts="evolving",
        ),
        Method(
            name="pe-sgd-fix",
            summary="as pe-sgd, with public texts that stay as they are",
            reference="Zou et al. 2026 (PE-SGD, FixSample)",
            space="coefficients",
            optimizers=("adamw", "sgd"),
            clipping="normalized",
            clippings=_OF_SPANS,
            public_texts="fixed",
        ),
        Method(
            name="span-prism",
            summary="as pe-sgd, in the tangent space of the rank-r update, where no factor plays a part",
            reference="this project: Zou et al. 2026 in the coordinates of Wang and Zhang 2026",
            space="tangent-coefficients",
            optimizers=("scalar", "sgd", "rank"),
            init="w0-subspace",
            clipping="normalized",
            clippings=_OF_SPANS,
            settings={"hold_out": 0.25, "ridge": 1.0},
            noiseless_settings={"hold_out": 0.0},
            public_texts="evolving",
            revision=1,
        ),
        Method(
            name="guided-prism",
            summary="as prism, and what is released counts in full along public gradients, beside them in part",
            reference="this project: Wang and Zhang 2026 (PRISM), Zhou et al. 2021 (PDP-SGD)",
            space="tangent-projected-span",
            optimizers=("rank", "scalar", "sgd"),
            learning_rate=0.016,
            init="w0-subspace",
            clipping="normalized",
            clippings=("normalized", "flat", "automatic", "spectral", "per-module"),
            settings={"beta1": 0.0, "beta2": 0.99, "error_feedback": 1.0},
            noiseless_settings={"beta1": 0.5, "error_feedback": 0.0, "beside": 1.0},
            averaging=0.5,
            public_texts="fixed",
        ),
        Method(
            name="pdp-sgd",
            summary="clip and noise both LoRA factors, then project on the leading directions of public gradients",
            reference="Zhou et al. 2021 (PDP-SGD)",
            space="projected-span",
            optimizers=("adamw", "sgd"),
            clippings=("flat", "normalized", "spectral", "per-module"),
            public_texts="fixed",
        ),
        Method(
            name="gep",
            summary="clip and noise what leading directions of public gradients see, and the rest by itself",
            reference="Yu et al. 2021 (GEP), accounted as one mechanism",
            space="span-and-residual",
            optimizers=("adamw", "sgd"),
            clipping="normalized",
            clippings=("normalized",),
            public_texts="fixed",
        ),
        Method(
            name="b-gep",
            summary="as gep, without the rest",
            reference="Yu et al. 2021 (B-GEP)",
            space="coefficients",
            optimizers=("adamw", "sgd"),
            clippings=_OF_SPANS,
            settings={"alpha": 0.5, "ridge": 0.0, "top_k": 50},
            public_texts="fixed",
        ),
        Method(
            name="adamw",
            summary="plain LoRA with AdamW: NOT PRIVATE, for comparison and public data",
            reference="Hu et al. 2022; Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            private=False,
        ),
    )
}


VOTE_METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            name="aug-pe",
            summary="records vote for the nearest public texts, which evolve; then ordinary AdamW on the last of them",
            reference="Xie et al. 2024 (Aug-PE); Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            public_texts="evolving",
            releases="votes",
        ),
        Method(
            name="popri",
            summary="records score the model's texts, and it learns what they prefer; then AdamW on its new texts",
            reference="Hou et al. 2025 (POPri); Rafailov et al. 2023 (DPO); Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            public_texts="fixed",
            releases="votes",
            tunes_writer=True,
        ),
    )
}
"""Rows whose private phase is rounds of votes on public texts. Their space and optimizer are those of the ordinary
training that follows on the last texts, which is post-processing: no gradient of a private record is taken."""


@dataclass(frozen=True)
class Choice:
    """A name that stands for one of several rows: which of them a run takes, it finds on public texts before it begins.

    rows: in their order; of those that do equally well the first is taken. All are the same Gaussian mechanism to the
    accountant, so the noise is the same whichever is taken. clipping: of a row where the settings name none, if not the
    row's own.
    """

    name: str
    summary: str
    reference: str
    rows: tuple[str, ...]
    clipping: Mapping[str, str] = field(default_factory=dict, hash=False)


CHOICES: dict[str, Choice] = {
    choice.name: choice
    for choice in (
        Choice(
            name="auto",
            summary="that of its methods which does better in short rehearsals on public texts, before a run",
            reference="this project, after Zou et al. 2026 (a choice on held-out public gradients)",
            rows=("prism", "guided-prism", "span-prism"),
            clipping={"prism": "automatic"},  # batches are small, so no record's gradient can be left below C
        ),
    )
}
"""Names in the place of a row. Runs resolve them first (``rehearsals.choosing``), so nothing else knows them."""


def _row(name: str) -> Row | None:
    found = METHODS.get(name) or VOTE_METHODS.get(name)
    return None if found is None else found.row


method_names.ask(lambda: [*METHODS, *VOTE_METHODS, *CHOICES])
rows.ask(_row)


def find_method(name: str) -> Method:
    """The row called ``name``, which releases gradients. Raises ConfigError."""
    row = find_row(name)
    if row.releases != "gradients":
        raise ConfigError(
            f"method {name!r} releases {row.called} on public texts and no gradients, which are needed here",
            why="it has no private steps to federate, diagnose or attack",
            fix=f"one of {', '.join(METHODS)}; `privlora train`, `synthesize` and `compare` take {name}",
        )
    return row


def find_row(name: str) -> Method:
    """The row called ``name``, whatever it releases. Raises ConfigError."""
    rows = {**METHODS, **VOTE_METHODS}
    if name in CHOICES:
        among = CHOICES[name].rows
        raise ConfigError(
            f"method {name!r} stands for {' or '.join(among)}, and nothing chooses between them here",
            why="the choice is made on public texts before a run of `privlora train` or `synthesize` begins",
            fix=f"set method.name to one of {', '.join(among)}",
        )
    if name not in rows:  # a row that a user adds may be called what another tool calls something else
        raise unknown_method(name)
    return rows[name]


_FAR, _HOPELESS, _ROUNDING = 8, 1000, 1e-9  # as a factor


def refuse_hopeless_rate(settings: Settings) -> None:
    """Raise ConfigError for a learning rate of a private run that is a thousand times the method's default."""
    found = _beside_default(settings, 1)
    if found is None or not settings.privacy.private or found[0] <= _HOPELESS * found[1]:
        return
    rate, default, _ = found
    raise ConfigError(
        f"method.learning_rate={rate:g} is {rate / default:.3g} times the method's default, {default:.3g}",
        why="noise would throw the adapter about from the first step on, and all of epsilon be spent on that",
        fix="leave it out for the default, or give a rate less far from it",
    )


def _beside_default(settings: Settings, bands: int) -> tuple[float, float, bool] | None:
    """A given learning rate, the row's default for such a run, and whether both are in the size of the weights."""
    rate, privacy = settings.method.learning_rate, settings.privacy
    if rate is None or settings.method.name in CHOICES:
        return None
    row = find_row(settings.method.name)
    relative = row.is_relative(settings.method.relative_rate)
    return rate, row.rate_of(privacy.steps, private=privacy.private, relative=relative, bands=bands), relative


def far_rate(settings: Settings, bands: int = 1) -> str | None:
    """In a sentence that a learning rate is eight times the method's default for such a run, or an eighth, or farther.

    bands: of the run's noise, as planned. None for a rate that is nearer, one that is left to the row or to rehearsals,
    and where a row is yet to be chosen.
    """
    found = _beside_default(settings, bands)
    if found is None:
        return None
    rate, default, relative = found
    row, privacy, times = find_row(settings.method.name), settings.privacy, rate / default
    if max(times, 1 / times) <= _FAR * (1 - _ROUNDING):
        return None
    far = f"{times:.3g} times" if times > 1 else f"1/{1 / times:.3g} of"
    unit = " of each frozen matrix's norm" if relative else ""
    end = "noise would drown what is learnt" if times > 1 else "the run would hardly learn"
    return (
        f"method.learning_rate {rate:g} is {far} the method's default ({default:g}{unit} for {row.name} and "
        f"{privacy.steps} steps): is it meant? Rates of other tools are of other rules, and {end}. Leave it out for "
        "the default"
    )


def _start_of(method: Method) -> Callable[..., Coordinates]:
    """How its coordinates start, or those inside a span of public gradients."""
    start = SPACES[method.space].start
    inner = getattr(start, "keywords", {}).get("inner", start)
    found: Callable[..., Coordinates] = getattr(inner, "func", inner)
    return found


def _refuse_start(method: Method, init: str) -> None:
    """Raise ConfigError for an adapter.init that the row's coordinates do not have, as far as no adapter is needed."""
    start = _start_of(method)
    if start is factor_start:
        refuse_tangent_start(init)
    elif start is projected_start:
        refuse_subspace_start(init)


def uses_lora_alpha(name: str) -> bool:
    """Whether what a row learns depends on lora_alpha: its adapter's factors themselves are moved."""
    # Else it is not known which row will be taken, or votes train by ordinary steps.
    return name not in METHODS or _start_of(METHODS[name]) is factor_start


@own_context()
def build(
    method: Method,
    adapter: LowRankAdapter,
    *,
    optimizer: str | None = None,
    init: str | None = None,
    seed: int = 0,
    lora_alpha: float = 16.0,
    use_rslora: bool = False,
    settings: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
    subspaces: Subspaces | None = None,
    relative_rate: bool = False,
) -> tuple[Coordinates, Optimizer]:
    """The coordinates and the optimizer of a row on an adapter; ``None`` takes the row's default.

    settings: of the optimizer, by name. subspaces: where init=public-gradient starts. relative_rate: whether the rates
    that its steps are given are in the size of the frozen weights; else in entries, whatever the row's default is in.
    Raises ConfigError for an optimizer or a setting that the row does not have.
    """
    relative = method.is_relative(relative_rate)
    chosen = method.choose_optimizer(optimizer)
    complete = method.optimizer_settings(chosen, settings or {}, init)
    scale = lora_scaling(lora_alpha, adapter.rank, use_rslora)
    space = SPACES[method.space]
    body = adapter.body if isinstance(adapter, HeadedAdapter) else adapter
    of_space = {name: complete.get(name) for name in space.optimizers[chosen].space_settings}  # None: chosen
    coordinates = space.start(
        body, init or method.init, seed=seed, scale=scale, dtype=dtype, subspaces=subspaces, **of_space
    )
    rule = make_optimizer(method.space, chosen, coordinates, complete, relative_rate=relative)
    if not isinstance(adapter, HeadedAdapter):
        return coordinates, rule
    both = HeadedCoordinates(adapter, coordinates)
    return both, HeadedOptimizer(both, rule, (relative and space.weight_unit) or 1.0)


def make_optimizer(
    space: str,
    name: str,
    coordinates: Coordinates,
    settings: Mapping[str, float],
    *,
    relative_rate: bool = False,
) -> Optimizer:
    """The optimizer of a space that goes by ``name``, on coordinates of that space.

    settings: all of its own; those that its coordinates have taken are left out. relative_rate: whether its rates are
    in the size of the frozen weights. Raises ConfigError where modules, or the rule, have no such unit.
    """
    # Each class takes the coordinates of its own space and the settings that it declares.
    kind = SPACES[space].optimizers[name]
    make: Callable[..., Optimizer] = kind
    rule = make(coordinates, **{n: v for n, v in settings.items() if n not in kind.space_settings})
    if relative_rate:
        units = weight_units(coordinates)
        if not kind.takes_weight_units:
            raise ConfigError(
                f"the optimizer {name!r} takes no learning rate in the size of the frozen weights",
                why="its steps would be in entries, many times as long or as short as the rate says",
                fix="set method.relative_rate=false",
            )
        rule.weight_units = units
    return rule


def optimizer_of(space: str, hyper: Hyperparameters, coordinates: Coordinates) -> Optimizer:
    """What ``hyper`` says, on coordinates of a space."""
    return make_optimizer(
        space, hyper.optimizer, coordinates, hyper.settings, relative_rate=hyper.relative_rate
    )
