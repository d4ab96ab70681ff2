"""What a run will release and cost, from its settings: before a record is read, and mostly before a model is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from privlora.accounting import Plan
from privlora.accounting.calibration import Phases, calibrate_noise_multiplier
from privlora.accounting.events import Projections, Sampling, StepEvent
from privlora.accounting.meaning import noise_for
from privlora.adapters import LowRankAdapter
from privlora.config import PrivacySettings, Settings
from privlora.data.sampling import PoissonSampler
from privlora.methods import find_row
from privlora.training.classifier import head_of
from privlora.training.cycles import planned_sampling, refuse_bands
from privlora.training.misfits import refuse_misfits

if TYPE_CHECKING:
    import torch

ADJACENCY: Final = "add-or-remove-one"


def plan_privacy(settings: Settings, model: torch.nn.Module | None = None, phases: Phases = ()) -> Plan:
    """What the run will release and cost, before any record is read.

    model: the base model where it is at hand; else its configuration is read if the cost depends on it. phases:
    (sampling, steps) of each phase where there are several, all with one noise multiplier; ``settings`` are then of the
    last one.
    """
    privacy = settings.privacy
    assert privacy.private
    assert privacy.delta is not None
    method = find_row(settings.method.name)
    refuse_misfits(settings, method)
    if phases or method.public_texts:
        refuse_bands(privacy, "a run of several phases")
    phases = tuple(phases) or ((planned_sampling(privacy, sampler(privacy, 0).sampling), privacy.steps),)

    def skeleton() -> LowRankAdapter:
        from privlora.training.models import adapter_for, load_skeleton  # with transformers, and for few rows

        skeleton = load_skeleton(settings.model, head=head_of(settings)) if model is None else model
        return adapter_for(settings, skeleton)

    projections = method.coordinates.event_layers_of(skeleton)
    sigma = noise_multiplier(privacy, phases, projections)
    return Plan(
        phases=tuple((StepEvent(sampling, sigma, projections), steps) for sampling, steps in phases),
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        adjacency=ADJACENCY,
        unit=privacy.unit,
        records_per_user=privacy.max_records_per_user if privacy.unit == "user" else None,
        clip_norm=privacy.clip_norm,
        expected_batch_size=privacy.b,
        method=method.name,
        dataset=settings.run.label or "unnamed",
        insecure_noise=privacy.insecure_noise_seed is not None,
    )


def noise_multiplier(
    privacy: PrivacySettings, phases: tuple[tuple[Sampling, int], ...], projections: Projections = ()
) -> float:
    """sigma as it is given, or the smallest with which all phases together keep the target."""
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.target_epsilon is None:
        return noise_for(
            phases,
            right_guesses=privacy.target_right_guesses,
            found_at_1_percent=privacy.target_found,
            adjacency=ADJACENCY,
            projections=projections,
        )
    assert privacy.delta is not None
    (sampling, steps), *others = phases
    return calibrate_noise_multiplier(
        sampling,
        steps,
        privacy.target_epsilon,
        privacy.delta,
        adjacency=ADJACENCY,
        projections=projections,
        others=others,
    ).noise_multiplier


def sampler(privacy: PrivacySettings, units: int) -> PoissonSampler:
    """The sampler of a run, with operating-system randomness unless the run is a stamped test."""
    return PoissonSampler(
        units,
        privacy.q,
        max_batch_size=privacy.max_batch_size,
        dataset_size=privacy.public_dataset_size,
        insecure_seed=privacy.insecure_noise_seed,
    )
