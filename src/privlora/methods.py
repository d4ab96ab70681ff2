"""The classes behind the table of methods (config.methods), and what a run makes of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.headed import HeadedAdapter
from privlora.adapters.peft_files import lora_scaling
from privlora.config import OPTIMIZER_SETTINGS, MethodSettings, Settings, methods
from privlora.config.methods import MethodFacts, cannot_clip, no_setting, no_unit
from privlora.config.names import unknown_method
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
    span_start,
    tangent_start,
)
from privlora.errors import ConfigError
from privlora.mechanisms import noise_in_sums
from privlora.optimizers import (
    PAPER_OPTIMIZERS,
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


@dataclass(frozen=True)
class Space:
    """Coordinates, how they start, and the optimizers that work in them.

    start: (adapter, init, *, seed, scale, dtype, subspaces) and the chosen optimizer's ``space_settings``. weight_unit:
    that of the table (`config.methods.SpaceFacts`).
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
_PROJECTED: dict[str, type[Optimizer]] = {"sgd": ProjectedSGD, "adamw": ProjectedAdamW}

_SPACES: dict[str, Space] = {
    "tangent": Space(TangentCoordinates, tangent_start, TANGENT_OPTIMIZERS),
    "tangent-lifted": Space(TangentCoordinates, tangent_start, PAPER_OPTIMIZERS),
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
    ),
    "one-factor": Space(
        OneFactorCoordinates,
        partial(factor_start, kind=OneFactorCoordinates),
        {"adamw": FactorAdamW, "sgd": FactorSGD, "lora-fa": FactorLoraFA},
    ),
    "direction": Space(
        DirectionCoordinates,
        partial(factor_start, kind=DirectionCoordinates),
        {"sgd": DirectionSGD, "adamw": DirectionAdamW},
    ),
    "projected": Space(ProjectedCoordinates, projected_start, _PROJECTED),
    "wishart": Space(
        WishartCoordinates,
        partial(projected_start, kind=WishartCoordinates),
        _PROJECTED,
    ),
    "coefficients": _span(SpanCoordinates, factor_start, _FACTORS),
    "projected-span": _span(ProjectedSpanCoordinates, factor_start, _FACTORS),
    "tangent-projected-span": _span(TangentProjectedSpanCoordinates, tangent_start, TANGENT_OPTIMIZERS),
    "span-and-residual": _span(ResidualSpanCoordinates, factor_start, _FACTORS),
    "tangent-coefficients": _span(TangentSpanCoordinates, tangent_start, TANGENT_OPTIMIZERS),
}


SPACES: dict[str, Space] = {
    name: replace(space, weight_unit=methods.SPACES[name].weight_unit) for name, space in _SPACES.items()
}


@dataclass(frozen=True)
class Method(MethodFacts):
    """One method of the table, with the classes of its space."""

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

    def settings_of(self, optimizer: str) -> tuple[str, ...]:
        kind = SPACES[self.space].optimizers[optimizer]
        return tuple({**kind.settings, **kind.space_settings})

    @property
    def has_weight_unit(self) -> bool:
        return SPACES[self.space].weight_unit is not None

    @property
    def weighed(self) -> bool:
        return self.rate_falls and not (self.charges_projections or self.coordinates.forward_only)

    def is_relative(self, asked: bool | None) -> bool:
        """Whether a run's learning rate is in the size of the frozen weights: as asked, else as the method has it.

        Raises ConfigError where the method's modules have no unit of their own.
        """
        relative = self.relative_rate if asked is None else asked
        if relative and SPACES[self.space].weight_unit is None:
            raise no_unit(self.name)
        return relative

    def rate_of(
        self, steps: int, *, private: bool = True, relative: bool | None = None, bands: int = 1
    ) -> float:
        """The default learning rate of a run of so many steps, to three digits.

        relative: as a share of the frozen weights' norms, or in entries; None: as the method has it. bands: of the
        run's noise, whose sums leave room for larger steps.
        """
        rate = self.learning_rate
        if self.is_relative(relative):
            unit = SPACES[self.space].weight_unit
            assert unit is not None
            rate = self.relative_learning_rate or rate / unit
        if private and self.rate_falls:
            rate *= math.sqrt(RATE_STEPS / steps) / noise_in_sums(bands, steps) ** _OF_BANDS
        return float(f"{rate:.3g}")

    def optimizer_settings(
        self,
        optimizer: str,
        given: Mapping[str, float],
        init: str | None = None,
        *,
        private: bool = True,
    ) -> dict[str, float]:
        """All settings of one of its optimizers: given, else the method's for such a run, else the optimizer's own.

        Where hold_out is above 0, what it chooses before each step, which is what was not given, is left out.

        Raises ConfigError for a given one that the optimizer does not have, or if hold_out has nothing to choose.
        """
        kind = SPACES[self.space].optimizers[optimizer]
        own = {**kind.settings, **kind.space_settings}
        for name in given:
            if name not in own:
                raise no_setting(self.name, optimizer, name, tuple(own))
        usual = {**self.settings, **self.init_settings.get(init or self.init, {})}
        if not private:
            usual |= self.noiseless_settings
        complete = {name: given.get(name, usual.get(name, default)) for name, default in own.items()}
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
        """The settings that a run uses: what was chosen, else this method's defaults. bands: of its noise, as planned.

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


_CHOSEN = ("alpha", "ridge", "top_k")  # by method.hold_out


def _with_classes(table: dict[str, MethodFacts]) -> dict[str, Method]:
    """The same table, whose entries now know their classes: to those of before nobody holds on."""
    table |= {name: Method(**vars(facts)) for name, facts in table.items()}
    return cast(dict[str, Method], table)


METHODS, VOTE_METHODS = _with_classes(methods.METHODS), _with_classes(methods.VOTE_METHODS)
"""Name -> method; a user's own is put in here."""


def find_method(name: str) -> Method:
    """The method called ``name``, which releases gradients. Raises ConfigError."""
    method = find_row(name)
    if method.releases != "gradients":
        raise ConfigError(
            f"method {name!r} releases {method.called} on public texts and no gradients, which are needed here",
            why="it has no private steps to federate, diagnose or attack",
            fix=f"one of {', '.join(METHODS)}; `privlora train`, `synthesize` and `compare` take {name}",
        )
    return method


def find_row(name: str) -> Method:
    """The method called ``name``, whatever it releases. Raises ConfigError."""
    known = {**METHODS, **VOTE_METHODS}
    if name not in known:  # a method that a user adds may be called what another tool calls something else
        raise unknown_method(name)
    return known[name]


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
    """A given learning rate, the method's default for such a run, and whether both are in the size of the weights."""
    rate, privacy = settings.method.learning_rate, settings.privacy
    if rate is None:
        return None
    method = find_row(settings.method.name)
    relative = method.is_relative(settings.method.relative_rate)
    default = method.rate_of(privacy.steps, private=privacy.private, relative=relative, bands=bands)
    return rate, default, relative


def far_rate(settings: Settings, bands: int = 1) -> str | None:
    """In a sentence that a learning rate is eight times the method's default for such a run, or an eighth, or farther.

    bands: of the run's noise, as planned. None for a rate that is nearer, one that is left to the method or to
    rehearsals, and where a method is yet to be chosen.
    """
    found = _beside_default(settings, bands)
    if found is None:
        return None
    rate, default, relative = found
    method, privacy, times = find_row(settings.method.name), settings.privacy, rate / default
    if max(times, 1 / times) <= _FAR * (1 - _ROUNDING):
        return None
    ratio = max(times, 1 / times)
    shown = f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"
    far = f"{shown} times" if times > 1 else f"1/{shown} of"
    unit = " (relative)" if relative else ""
    end = "noise would drown what is learnt" if times > 1 else "the run would hardly learn"
    return (
        f"method.learning_rate {rate:g} is {far} the method's default ({default:g}{unit} for {method.name} and "
        f"{privacy.steps} steps): is it meant? Rates of other tools do not transfer: {end}. Leave it out for "
        "the default"
    )


def _start_of(method: Method) -> Callable[..., Coordinates]:
    """How its coordinates start, or those inside a span of public gradients."""
    start = SPACES[method.space].start
    inner = getattr(start, "keywords", {}).get("inner", start)
    found: Callable[..., Coordinates] = getattr(inner, "func", inner)
    return found


def _refuse_start(method: Method, init: str) -> None:
    """Raise ConfigError for an adapter.init that the method's coordinates do not have, as far as no adapter is
    needed."""
    if _start_of(method) is projected_start:
        refuse_subspace_start(init)


def uses_lora_alpha(name: str) -> bool:
    """Whether what a method learns depends on lora_alpha: its adapter's factors themselves are moved."""
    # Else it is not known which method will be taken, or votes train by ordinary steps.
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
    """The coordinates and the optimizer of a method on an adapter; ``None`` takes its default.

    settings: of the optimizer, by name. subspaces: where init=public-gradient starts. relative_rate: whether the rates
    that its steps are given are in the size of the frozen weights; else in entries, whatever the method's default is
    in. Raises ConfigError for an optimizer or a setting that the method does not have.
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
