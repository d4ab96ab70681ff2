"""The noise of a release: its law, where it reaches, how often it is drawn, and that nobody can repeat it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from counting_ledger import CountingLedger
from method_cases import (
    Case,
    by_case,
    by_space,
    by_space_and_state,
    by_variant,
    flat,
    make_case,
    poisoned_model,
)
from scipy.stats import kstest
from tiny_models import uneven_examples
from torch import Tensor

from privlora.accounting.events import CyclicPoissonSampling, StepEvent
from privlora.coordinates import DirectionCoordinates, Sums
from privlora.coordinates.span import EncodedSpace
from privlora.errors import PrivacyError
from privlora.mechanisms import CorrelatedNoise, GaussianMechanism, NoiseSource, Release, band_coefficients
from privlora.mechanisms.noising import grid_width
from privlora.methods import METHODS

SIGMA, CLIP_NORM, BATCH = 0.8, 0.5, 4.0
TAU = SIGMA * CLIP_NORM / BATCH


def small_case(variant: tuple[str, str], folder: Path, state: str = "factors") -> Case:
    """Two modules only, so that the span of all gradients can be computed."""
    return make_case(variant, folder, state, targets=r".*layers\.0\.(self_attn\.q_proj|mlp\.down_proj)")


def data_directions(case: Case) -> Tensor:
    """Orthonormal basis (coordinates, k) of all that dense gradients G can reach through P = G right, Q = G^T left."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for _ in range(case.coordinates.dimension + 20):
        raw: Sums = []
        for group in case.adapter.groups:
            g = torch.randn(len(group.sites), group.m, group.n, generator=generator)
            left, right = case.adapter.met(group)
            raw.append((g @ right, g.mT @ left))
        columns.append(flat(case.coordinates.to_vector(raw)))
    u, s, _ = torch.linalg.svd(torch.stack(columns, dim=1), full_matrices=False)
    return u[:, s > 1e-5 * s[0]]


def empty_releases(case: Case, count: int) -> Tensor:
    """(count, coordinates): releases of empty batches, in units of tau."""
    mechanism = case.mechanism(sigma=SIGMA, clip_norm=CLIP_NORM, batch=BATCH, seed=5)
    return case.releases(mechanism, count) / TAU


@by_case
def test_it_is_white_wherever_data_can_reach(variant: tuple[str, str], state: str, tmp_path: Path) -> None:
    case = small_case(variant, tmp_path, state)
    basis = data_directions(case)
    draws = empty_releases(case, max(60, 5000 // basis.shape[1]))
    components = (draws @ basis).flatten().numpy()
    assert len(components) > 4000
    assert kstest(components, "norm").pvalue > 0.01
    for wrong in (2 / 3, 1.5):
        assert kstest(wrong * components, "norm").pvalue < 1e-6
    # The weakest direction: the smallest variance among all data directions, against chi-square with 60 draws.
    assert float((draws @ basis).var(dim=0).min()) > 0.35
    # Energy: as many coordinates as the space claims, no more.
    assert float(draws.square().sum(dim=1).mean()) == pytest.approx(case.coordinates.dimension, rel=0.03)
    assert basis.shape[1] <= case.coordinates.dimension


@by_space_and_state
def test_data_and_noise_span_the_same_space(variant: tuple[str, str], state: str, tmp_path: Path) -> None:
    """P24: no direction that carries data and no noise (compare the column spaces of the two linear maps)."""
    case = small_case(variant, tmp_path, state)
    noise = empty_releases(case, case.coordinates.dimension + 20)
    u, s, _ = torch.linalg.svd(noise.T, full_matrices=False)
    # The grid takes releases out of the tangent space, by 1e-4 of the noise.
    reached = u[:, s > 1e-3 * s[0]]
    assert reached.shape[1] == case.coordinates.dimension
    basis = data_directions(case)
    assert float((basis - reached @ (reached.T @ basis)).norm(dim=0).max()) < 1e-2


@by_space
def test_it_is_drawn_once_however_many_micro_batches(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    draws = []
    for tokens in (10**6, 45, 1):
        noisy, silent = (case.mechanism(sigma=s, clip_norm=0.1, seed=3) for s in (1.0, 0.0))
        for mechanism in (noisy, silent):
            case.feed(mechanism, uneven_examples(), max_tokens=tokens)
        draws.append(flat(noisy.release().vector) - flat(silent.release().vector))
    assert draws[0].norm() > 0
    for other in draws[1:]:
        torch.testing.assert_close(other, draws[0], rtol=0, atol=1.01 * grid_width(0.1 / 4))


@by_space
def test_its_scale_does_not_know_the_realised_batch_size(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    draws = []
    for size in (0, 1, 40):
        examples = uneven_examples(lengths=[3] * size)[:size]
        noisy, silent = (case.mechanism(sigma=s, clip_norm=0.01, seed=3) for s in (1.0, 0.0))
        for mechanism in (noisy, silent):
            case.feed(mechanism, examples)
        release = noisy.release()
        draws.append(flat(release.vector) - flat(silent.release().vector))
        assert release.noise_std == pytest.approx(0.01 / 4.0)
    for other in draws[1:]:
        torch.testing.assert_close(other, draws[0], rtol=0, atol=1.01 * grid_width(0.01 / 4))
    # and the signal is divided by the same public number
    one = case.clipped_sum(uneven_examples(lengths=[3])[:1], clip_norm=0.01)
    mechanism = case.mechanism(sigma=0.0, clip_norm=0.01, batch=8.0)
    case.feed(mechanism, uneven_examples(lengths=[3])[:1])
    torch.testing.assert_close(flat(mechanism.release().vector) * 8, one)


def unrelated(a: Tensor, b: Tensor) -> bool:
    """No equal entries but by chance, on a grid, and no correlation (6 standard errors)."""
    correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    return bool((a != b).double().mean() > 0.99) and abs(correlation) < 6 / len(a) ** 0.5


def enough(case: Case) -> int:
    """Releases that have 64 entries together: of fewer nothing can be told."""
    return max(1, -(-64 // case.coordinates.entries()))


@by_space
def test_public_seeds_do_not_fix_it(variant: tuple[str, str], tmp_path: Path) -> None:
    releases = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        case = make_case(variant, tmp_path)
        releases.append(case.releases(case.mechanism(), enough(case)).flatten())
    assert unrelated(*releases)


@by_space
def test_it_never_repeats_within_a_run(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    mechanism = case.mechanism()
    first, second = (case.releases(mechanism, enough(case)).flatten() for _ in range(2))
    assert unrelated(first, second)


@by_space
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_float32_whatever_the_models_dtype(
    variant: tuple[str, str], dtype: torch.dtype, tmp_path: Path
) -> None:
    if METHODS[variant[0]].space == "wishart" and dtype == torch.bfloat16:
        return  # refused: test_one_record_of_a_bfloat16_model
    case = make_case(variant, tmp_path, model=poisoned_model(dtype))
    releases = case.same_again(uneven_examples(), enough(case))  # of three entries two may be alike by chance
    check_float32(case, releases)


@by_variant
def test_whatever_makes_of_it_a_step_is_float32_too(variant: tuple[str, str], tmp_path: Path) -> None:
    dtype = torch.float32 if METHODS[variant[0]].space == "wishart" else torch.bfloat16
    case = make_case(variant, tmp_path, model=poisoned_model(dtype))
    check_float32(case, case.same_again([], enough(case)))


def check_float32(case: Case, releases: list[Release]) -> None:
    for release in releases:
        assert {t.dtype for parts in release.vector for t in parts} == {torch.float32}
    values = torch.cat([flat(release.vector) for release in releases])
    # The grid has some 15,000 points within two standard deviations; bfloat16, some 1,000 (P22).
    assert len(values.unique()) > 0.9 * len(values)
    case.optimizer.step(releases[-1], 0.1)
    for tensors in (case.coordinates.state_dict(), case.optimizer.state_dict()):
        for name, tensor in tensors.items():
            assert tensor.dtype in (torch.float32, torch.int64), name


@by_space
def test_every_entry_lies_on_a_grid_that_no_record_moves(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    width = grid_width(TAU)
    releases = enough(case)  # of six entries all may be even by chance
    for examples in ([], uneven_examples()):
        options = {"sigma": SIGMA, "clip_norm": CLIP_NORM, "batch": BATCH}
        drawn = case.same_again(examples, releases, **options)
        steps = torch.cat([flat(release.vector) for release in drawn]) / width
        assert torch.equal(steps, steps.round())
        assert bool((steps % 2 == 1).any())  # and on no coarser one


@by_space
def test_modules_of_one_shape_have_noise_of_their_own(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, targets=r".*self_attn\.(q|o)_proj")
    (group,) = case.adapter.groups
    assert len(group.sites) == 2
    if isinstance(case.coordinates, EncodedSpace | DirectionCoordinates):
        pytest.skip("no tensor of a release has one row a module")
    mechanism = case.mechanism(sigma=SIGMA)
    drawn: list[list[Tensor]] = []
    for _ in range(20):
        (parts,) = mechanism.release().vector
        drawn.append([part.double().flatten(1) for part in parts])
        case.coordinates.advance()
    for part in zip(*drawn, strict=True):
        one, two = torch.cat(part, dim=1)
        assert unrelated(one, two)


@by_space
def test_correlated_noise_follows_every_space_and_grows_in_none(
    variant: tuple[str, str], tmp_path: Path
) -> None:
    """While the state moves: what is brought along is in the space, linear in what it was, and no longer."""
    case = make_case(variant, tmp_path)
    coordinates, bands = case.coordinates, 3
    coordinates.prepare()
    if coordinates.event_layers:
        return  # refused: test_projections_have_independent_noise
    noise = CorrelatedNoise(band_coefficients(bands, 12), coordinates)
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=CLIP_NORM,
        event=StepEvent(CyclicPoissonSampling(0.1, bands), SIGMA),
        expected_batch_size=BATCH,
        ledger=CountingLedger(),
        noise=NoiseSource(3),
        correlated=noise,
    )
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for step in range(1, 5):
        frame, vector = coordinates.frame(), coordinates.standard_normal(draw)
        release = case.step(mechanism, uneven_examples(3))
        assert release.step == step
        assert bool(flat(release.vector).isfinite().all())
        coordinates.prepare()
        made = coordinates.followed(vector, frame)
        shapes = [[t.shape for t in parts] for parts in made]
        if shapes != [[t.shape for t in parts] for parts in coordinates.standard_normal(draw)]:
            continue  # a span of another size, where noise begins anew
        assert flat(made).norm() <= flat(vector).norm() * (1 + 1e-12)
        for k in range(len(vector[0])):  # nor is any part of a vector, or a column of one, on its own
            for column in range(min(3, vector[0][k].shape[-1])):
                one = [
                    tuple(t * (torch.arange(t.shape[-1]) == column) * (i == k) for i, t in enumerate(parts))
                    for parts in vector
                ]
                assert flat(coordinates.followed(one, frame)).norm() <= flat(one).norm() * (1 + 1e-6)
        torch.testing.assert_close(flat(coordinates.nearest(made)), flat(made), rtol=1e-5, atol=1e-5)
        twice = coordinates.followed([tuple(2 * t for t in parts) for parts in vector], frame)
        torch.testing.assert_close(flat(twice), 2 * flat(made))


@by_space
def test_projections_have_independent_noise(variant: tuple[str, str], tmp_path: Path) -> None:
    coordinates = make_case(variant, tmp_path).coordinates
    if not coordinates.event_layers and coordinates.draws is None:
        return
    with pytest.raises(PrivacyError, match=r"random projection|event has the projections"):
        GaussianMechanism(
            coordinates,
            clip_norm=CLIP_NORM,
            event=StepEvent(CyclicPoissonSampling(0.1, 3), SIGMA),
            expected_batch_size=BATCH,
            ledger=CountingLedger(),
            correlated=CorrelatedNoise(band_coefficients(3, 12), coordinates),
        )
