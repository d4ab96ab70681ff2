"""The table of methods, as data and without torch: each is a space of gradients, an optimizer, and its defaults.

`privlora.methods` has the classes behind it. A new method is a new entry here; the guide is docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from privlora.errors import ConfigError, echoed
from privlora.names import PUBLIC_GRADIENT

CLIPPINGS: Final = ("flat", "automatic", "spectral", "normalized", "per-module")
"""Those of all methods."""

_ADAMW: Final = "beta1 beta2 weight_decay"
_TANGENT: Final = "beta1 beta2 error_feedback"
OPTIMIZERS: Final = {
    "adamw": _ADAMW,
    "sgd": "beta1",
    "adambc": "beta1 beta2 floor",
    "lora+": f"{_ADAMW} learning_rate_ratio",
    "lora-fa": "beta1 beta2",
    "lamb": _ADAMW,
    "rite": "beta1 beta2",
    "riemannian": _ADAMW,
}
"""Optimizer -> the settings that it has; `TANGENT_RULES` and `PAPER_RULES` have others."""
TANGENT_RULES: Final = dict.fromkeys(("rank", "scalar", "sgd"), _TANGENT)
_INGREDIENTS: Final = ("alignment", "debiasing", "floor", "condition-bound", "cap")
PAPER_RULES: Final = dict.fromkeys(
    ("paper", "bias-correction", "minimum-norm", *(f"no-{each}" for each in _INGREDIENTS)), "beta1 beta2"
)
"""PRISM's own algorithm, and it with one ingredient changed (optimizers.paper)."""


@dataclass(frozen=True)
class SpaceFacts:
    """described: in what gradients are clipped and noised. law: what the noise of one step does to W, with settings in
    braces. Both are as reports say them.

    settings: what a space has next to its optimizers' own. rules: optimizer -> its settings. weight_unit: the mean
    of modules' weight units (optimizers.rate_units) on the model on which default rates were found, stories260K at rank
    8 with all 35 linear layers: a rate in entries over it is a relative one; None where modules have no such unit.
    relative: to what such a rate is relative, in words.
    weighed: whether what its noise alone does to a model says how far it may go. forward_only: whether of units the
    losses are taken and no gradients."""

    described: str
    law: str
    settings: str = ""
    rules: Mapping[str, str] = field(default_factory=lambda: OPTIMIZERS)
    weight_unit: float | None = None
    relative: str = (
        "the share of the frozen weights' norms by which one step's noise moves all of them together"
    )
    weighed: bool = True
    forward_only: bool = False

    def settings_of(self, optimizer: str) -> tuple[str, ...]:
        return tuple(f"{self.rules[optimizer]} {self.settings}".split())


_SPAN: Final = "alpha ridge top_k hold_out"
_BESIDE: Final = "ridge top_k beside"
_IN_SPAN: Final = (
    "It lies in the span of the public gradients at the last step and follows their Gram matrix."
)
_LEFT: Final = (
    "It is what the projection on the span of public gradients at the last step leaves of white noise"
)
_ESTIMATE: Final = "As an estimate of the gradient, which would move W at rate 1, it is"
SPACES: Final = {
    "tangent": SpaceFacts(
        "in isometric coordinates of the tangent space at the low-rank update",
        "In tangent coordinates with the right weight w = {right_weight:.4g} the closed form is "
        "τ·√(r(m + w²(n − r))), whatever the factors are.",
        "right_weight metric_power",
        TANGENT_RULES,
        weight_unit=0.0484,
    ),
    "tangent-lifted": SpaceFacts(
        "in isometric coordinates of the tangent space at the low-rank update, lifted to its factors after the noise",
        "In tangent coordinates the closed form is τ·√(r(m + n − r)), whatever the factors are.",
        rules=PAPER_RULES,
    ),
    "factors": SpaceFacts(
        "in the entries of both LoRA factors",
        "In factor coordinates it depends on the factors: τ·s·√(m‖right‖² + n‖left‖²), here at the final state.",
        weight_unit=0.047,
    ),
    "one-factor": SpaceFacts(
        "in the entries of the trained LoRA factor",
        "Where the left factor alone is trained it is τ·s·√m·‖right‖.",
        weight_unit=0.07,
    ),
    "direction": SpaceFacts(
        "as differences of the loss along one random direction of both LoRA factors",
        "It lies along one direction z of the factors, of standard normal entries, drawn for the step: τ·‖z‖.",
        "perturbation",
        weighed=False,
        forward_only=True,
    ),
    "projected": SpaceFacts(
        "after a fresh random projection of the whole gradient",
        f"{_ESTIMATE} τ·√(mn), as for dense noise.",
        weight_unit=0.0228,
    ),
    "wishart": SpaceFacts(
        "with a random projection after the clip",
        f"{_ESTIMATE} τ·n·√(m/r): more with more inputs.",
        weight_unit=0.0228,
        weighed=False,
    ),
    "coefficients": SpaceFacts(
        "as coefficients of public gradients in the entries of both LoRA factors", _IN_SPAN, _SPAN
    ),
    "projected-span": SpaceFacts(
        "in the entries of both LoRA factors, projected on public gradients after the noise",
        f"{_LEFT}, and {{beside:g}} of what lies beside it.",
        _BESIDE,
    ),
    "tangent-projected-span": SpaceFacts(
        "in isometric coordinates of the tangent space, drawn towards public gradients after the noise",
        f"{_LEFT}, and {{beside:g}} of what lies beside it.",
        _BESIDE,
        TANGENT_RULES,
    ),
    "span-and-residual": SpaceFacts(
        "in the span of public gradients and beside it, each part clipped by itself",
        "It is white beside the span of public gradients at the last step, and of another size along it.",
        "top_k",
    ),
    "tangent-coefficients": SpaceFacts(
        "as coefficients of public gradients in isometric coordinates of the tangent space",
        _IN_SPAN,
        _SPAN,
        TANGENT_RULES,
        weight_unit=0.00477,
        relative="the length of one step, over all modules together",
    ),
}
_IN_METRIC: Final = replace(
    SPACES["tangent"],
    described="in coordinates of the tangent space at the low-rank update, weighed by its singular values",
    law="In a metric that follows the singular values the closed form τ·√(r(m + w²(n − r))), here with "
    "w = {right_weight:.4g}, is the root mean square of draws.",
)


def space_in_words(space: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """What a report says of a space of the table: in what gradients are clipped and noised, and the noise's law.

    settings: of the method, all that the space has; an optimizer without a right weight has 1.
    """
    facts = _IN_METRIC if settings.get("metric_power") else SPACES[space]
    known = {"right_weight": 1.0, **settings}
    described = facts.described
    if known["right_weight"] != 1:
        plain = described.replace("isometric coordinates", "coordinates")
        described = f"{plain}, with what turns V weighed by {known['right_weight']:.4g}"
    return described, facts.law.format(**known)


_SETTINGS: Final = frozenset(
    " ".join([*OPTIMIZERS.values(), _TANGENT, *(space.settings for space in SPACES.values())]).split()
)
"""Those that some optimizer has."""


@dataclass(frozen=True)
class MethodFacts:
    """One method. ``private`` is False for baselines that never clip or add noise.

    space: a name in SPACES. settings: what the method sets otherwise than its optimizer does (Optimizer.settings holds
    the defaults); init_settings: what it sets otherwise again for some starts; noiseless_settings: without noise, where
    nothing is averaged either. public_texts: the texts whose gradients the space leans on, if it does, which stay as
    they are or evolve from step to step. releases: what is noised, gradients in that space, or votes on public texts,
    after which the adapter learns the texts without noise. tunes_writer: whether votes tune the model that writes the
    texts, which then is the one that is trained, by trl. learning_rate: in entries. relative_rate: whether the default
    is relative instead (SpaceFacts.relative): relative_learning_rate, or learning_rate over the space's usual unit.
    revision: raised when defaults change, so that no study takes runs with the old ones for runs with the new.
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

    def settings_of(self, optimizer: str) -> tuple[str, ...]:
        """The settings that one of its optimizers has."""
        return SPACES[self.space].settings_of(optimizer)

    @property
    def has_weight_unit(self) -> bool:
        """Whether its modules have a unit of their own, in which a learning rate may be."""
        return SPACES[self.space].weight_unit is not None

    @property
    def weighed(self) -> bool:
        """Whether what its noise alone does to a model says how far it may go."""
        return self.rate_falls and SPACES[self.space].weighed

    @property
    def rate_falls(self) -> bool:
        """Whether the default learning rate falls with the root of the steps: where noise limits how far a run may go.

        Rules move by the rate times about one standard deviation of noise in every coordinate, so after T steps noise
        has moved each by rate * sqrt(T), whatever the batch; and it is that which best rates have in common
        (docs/choosing.md). Of methods that lean on public texts it was not measured, and they keep one rate.
        """
        return self.private and self.public_texts is None and self.releases == "gradients"

    @property
    def called(self) -> str:
        """What its releases are sums of, as errors and plans call it."""
        return "preference scores" if self.tunes_writer else self.releases

    @property
    def optimizer(self) -> str:
        """The default optimizer."""
        return self.optimizers[0]

    def choose_optimizer(self, name: str | None) -> str:
        """``name``, or the default for None. Raises ConfigError for one that the method does not have."""
        chosen = name or self.optimizer
        if chosen not in self.optimizers:
            raise _no_optimizer(self.name, chosen, self.optimizers)
        return chosen


_OF_SPANS = ("normalized", "flat")

METHODS: dict[str, MethodFacts] = {
    method.name: method
    for method in (
        MethodFacts(
            name="prism",
            summary="clip and noise in the tangent space of the rank-r update, independent of how it is factored",
            reference="Wang and Zhang 2026 (PRISM)",
            space="tangent",
            optimizers=("rank", "scalar", "sgd"),
            learning_rate=4e-3,
            relative_rate=True,
            relative_learning_rate=0.1,
            init="w0-subspace",
            clipping="spectral",
            settings={"beta1": 0.0, "beta2": 0.99, "error_feedback": 1.0},
            init_settings={PUBLIC_GRADIENT: {"right_weight": 0.25}},
            noiseless_settings={"beta1": 0.5, "error_feedback": 0.0, "right_weight": 1.0},
            revision=1,
            averaging=0.5,
        ),
        MethodFacts(
            name="prism-paper",
            summary="prism as its paper has it: Eq. 24-26 in balanced factors, from a split of the frozen weights",
            reference="Wang and Zhang 2026 (PRISM), Algorithm 1",
            space="tangent-lifted",
            optimizers=tuple(PAPER_RULES),
            learning_rate=4e-3,
            init="spectral-split",
        ),
        MethodFacts(
            name="dp-adamw",
            summary="clip and noise the gradients of both LoRA factors, then AdamW",
            reference="Yu et al. 2022; Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            learning_rate=4e-3,
        ),
        MethodFacts(
            name="dp-sgd",
            summary="clip and noise the gradients of both LoRA factors, then SGD at learning_rate / noise std",
            reference="Abadi et al. 2016",
            space="factors",
            optimizers=("sgd",),
            learning_rate=4e-3,
        ),
        MethodFacts(
            name="dp-adambc",
            summary="as dp-adamw, with the noise's variance taken out of the second moment",
            reference="Tang et al. 2024 (DP-AdamBC)",
            space="factors",
            optimizers=("adambc",),
            learning_rate=4e-3,
        ),
        MethodFacts(
            name="lora+",
            summary="as dp-adamw; learning_rate is the right factor's, the left one's is learning_rate_ratio times it",
            reference="Hayou et al. 2024 (LoRA+)",
            space="factors",
            optimizers=("lora+",),
            learning_rate=5e-4,
        ),
        MethodFacts(
            name="ffa",
            summary="right factor frozen at its start; the left one clipped, noised and trained with AdamW or SGD",
            reference="Sun et al. 2024 (FFA-LoRA); with sgd, Hu et al. 2026 (DP-LoRA-FA)",
            space="one-factor",
            optimizers=("adamw", "sgd"),
            learning_rate=4e-3,
        ),
        MethodFacts(
            name="lora-fa",
            summary="as ffa, with the gradient brought as near to the dense one as the frozen factor allows",
            reference="Zhang et al. 2023 (LoRA-FA); peft",
            space="one-factor",
            optimizers=("lora-fa",),
            learning_rate=4e-3,
        ),
        MethodFacts(
            name="lamb",
            summary="clip and noise both factors, then Adam's step scaled to the norm of each matrix",
            reference="You et al. 2020 (LAMB)",
            space="factors",
            optimizers=("lamb",),
            learning_rate=8e-3,
        ),
        MethodFacts(
            name="lora-rite",
            summary="clip and noise both factors, then a rule whose effect on W no factoring changes",
            reference="Yen et al. 2025 (LoRA-RITE)",
            space="factors",
            optimizers=("rite",),
            learning_rate=2e-3,
        ),
        MethodFacts(
            name="riemannian",
            summary="clip and noise both factors, precondition each by the other one's Gram matrix, then AdamW",
            reference="Zhang and Pilanci 2024; peft",
            space="factors",
            optimizers=("riemannian",),
            learning_rate=4e-3,
        ),
        MethodFacts(
            name="projected",
            summary="dense update; gradients projected on r fresh random directions, then clipped and noised",
            reference="Hu et al. 2026, with the clip after the projection",
            space="projected",
            optimizers=("sgd", "adamw"),
            learning_rate=2e-3,
        ),
        MethodFacts(
            name="wishart-m2",
            summary="dense update; whole gradients clipped and noised, then projected on r fresh random directions",
            reference="Hu et al. 2026 (Wishart projection mechanism, M2), accounted exactly",
            space="wishart",
            optimizers=("sgd", "adamw"),
            clippings=("flat", "automatic"),
        ),
        MethodFacts(
            name="dp-zo",
            summary="no gradients: two passes a unit, whose losses differ along one random direction by what is noised",
            reference="Tang et al. 2024 (DP-ZO); Malladi et al. 2023 (MeZO)",
            space="direction",
            optimizers=("sgd", "adamw"),
            learning_rate=1e-4,
            clippings=("flat",),
        ),
        MethodFacts(
            name="pe-sgd",
            summary="coefficients of private gradients in those of public texts, which evolve with what is released",
            reference="Zou et al. 2026 (PE-SGD)",
            space="coefficients",
            optimizers=("adamw", "sgd"),
            clipping="normalized",
            clippings=_OF_SPANS,
            public_texts="evolving",
        ),
        MethodFacts(
            name="pe-sgd-fix",
            summary="as pe-sgd, with public texts that stay as they are",
            reference="Zou et al. 2026 (PE-SGD, FixSample)",
            space="coefficients",
            optimizers=("adamw", "sgd"),
            clipping="normalized",
            clippings=_OF_SPANS,
            public_texts="fixed",
        ),
        MethodFacts(
            name="span-prism",
            summary="as pe-sgd, in the tangent space of the rank-r update, independent of how it is factored",
            reference="this project: Zou et al. 2026 in the coordinates of Wang and Zhang 2026",
            space="tangent-coefficients",
            optimizers=("scalar", "sgd", "rank"),
            relative_rate=True,
            init="w0-subspace",
            clipping="normalized",
            clippings=_OF_SPANS,
            settings={"hold_out": 0.25, "ridge": 1.0},
            noiseless_settings={"hold_out": 0.0},
            public_texts="evolving",
            revision=1,
        ),
        MethodFacts(
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
        MethodFacts(
            name="pdp-sgd",
            summary="clip and noise both LoRA factors, then project on the leading directions of public gradients",
            reference="Zhou et al. 2021 (PDP-SGD)",
            space="projected-span",
            optimizers=("adamw", "sgd"),
            clippings=("flat", "normalized", "spectral", "per-module"),
            public_texts="fixed",
        ),
        MethodFacts(
            name="gep",
            summary="clip and noise what leading directions of public gradients see, and the rest by itself",
            reference="Yu et al. 2021 (GEP), accounted as one mechanism",
            space="span-and-residual",
            optimizers=("adamw", "sgd"),
            clipping="normalized",
            clippings=("normalized",),
            public_texts="fixed",
        ),
        MethodFacts(
            name="b-gep",
            summary="as gep, without the rest",
            reference="Yu et al. 2021 (B-GEP)",
            space="coefficients",
            optimizers=("adamw", "sgd"),
            clippings=_OF_SPANS,
            settings={"alpha": 0.5, "ridge": 0.0, "top_k": 50},
            public_texts="fixed",
        ),
        MethodFacts(
            name="adamw",
            summary="plain LoRA with AdamW: NOT PRIVATE, for comparison and public data",
            reference="Hu et al. 2022; Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            private=False,
        ),
    )
}


VOTE_METHODS: dict[str, MethodFacts] = {
    method.name: method
    for method in (
        MethodFacts(
            name="aug-pe",
            summary="records vote for the nearest public texts, which evolve; then ordinary AdamW on the last of them",
            reference="Xie et al. 2024 (Aug-PE); Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            public_texts="evolving",
            releases="votes",
        ),
        MethodFacts(
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
"""Methods whose private phase is rounds of votes on public texts. Their space and optimizer are those of the ordinary
training that follows on the last texts, which is post-processing: no gradient of a private record is taken."""


def known_methods() -> list[str]:
    """All names that ``method.name`` may have."""
    return [*METHODS, *VOTE_METHODS]


def facts_of(name: str) -> MethodFacts | None:
    """Of a method; None for a name of none."""
    return METHODS.get(name) or VOTE_METHODS.get(name)


def wrong_for_method(
    chosen: Mapping[str, Any], *, private: bool, federated: bool
) -> list[tuple[str, ConfigError]]:
    """What is wrong with ``chosen``, the group method as given, since its method cannot have it: (setting, the error).

    A name that stands for several methods, one that is not known yet, and the method that a federation takes by its
    rule are left to the table.
    """
    name = chosen.get("name", "prism")
    if not isinstance(name, str) or (federated and "name" not in chosen):
        return []
    method = facts_of(name)
    if method is None:
        return []
    found = list[tuple[str, ConfigError]]()
    if private and not method.private:
        found.append(("name", adds_no_noise(name)))
    optimizer, clipping = chosen.get("optimizer"), chosen.get("clipping")
    if isinstance(optimizer, str) and optimizer not in method.optimizers:
        found.append(("optimizer", _no_optimizer(name, optimizer, method.optimizers)))
    elif optimizer is None or isinstance(optimizer, str):
        used = optimizer or method.optimizer
        own = method.settings_of(used)
        found += [
            (each, no_setting(name, used, each, own))
            for each, value in chosen.items()
            if value is not None and each in _SETTINGS and each not in own
        ]
    if (
        clipping in CLIPPINGS and clipping not in method.clippings
    ):  # what is no clipping at all is reported elsewhere
        found.append(("clipping", cannot_clip(name, clipping, method.clippings)))
    if chosen.get("relative_rate") is True and not method.has_weight_unit:
        found.append(("relative_rate", no_unit(name)))
    return found


def adds_no_noise(method: str) -> ConfigError:
    what = f"method.name={method} adds no noise, so it cannot meet a privacy target"
    keep = "to keep the promise write method.name: prism, or dp-adamw"
    without = (
        "to train without one write privacy.private: false, and remove target_epsilon or noise_multiplier"
    )
    return ConfigError(what, fix=[keep, without])


def _no_optimizer(method: str, optimizer: str, known: tuple[str, ...]) -> ConfigError:
    what = f"method {method!r} has no optimizer {echoed(optimizer, known)}"
    return ConfigError(what, fix=f"one of {', '.join(known)}")


def no_setting(method: str, optimizer: str, name: str, known: Sequence[str]) -> ConfigError:
    """Of a setting that another optimizer has."""
    what = f"optimizer {optimizer!r} of method {method!r} has no setting {name!r}"
    why = "a setting that is ignored would make two runs look different that are the same"
    return ConfigError(what, why=why, fix=f"remove it; the optimizer has {', '.join(known)}")


def cannot_clip(method: str, clipping: str, known: tuple[str, ...]) -> ConfigError:
    what = f"method {method!r} cannot clip as clipping={clipping!r} does"
    why = "what that does to a unit is not defined in its coordinates"
    return ConfigError(what, why=why, fix=f"one of {', '.join(known)}")


def no_unit(method: str) -> ConfigError:
    """Of a method whose learning rate cannot be in the size of the frozen weights."""
    what = f"method.relative_rate=true cannot be used with method {method!r}"
    why = "its steps have no unit that the norm of a frozen weight could give"
    fix = "remove relative_rate, and give a learning_rate in entries; or choose another method, such as prism"
    return ConfigError(what, why=why, fix=fix)
