"""Projections that are never formed have the law of those that are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from head_cases import generators
from scipy.stats import beta, kstest
from torch import Tensor

from privlora.lab.wishart.head_mechanisms import gaussian_factors, orthonormal_bases, project_afresh

D = 12


def formed(values: Tensor, rank: int, projection: str, seed: int) -> Tensor:
    """The same release from a projection that is drawn."""
    if projection == "wishart":
        a = gaussian_factors(rank, D, values.dtype, generators(len(values), seed))
        return values @ a.mT @ a
    q = orthonormal_bases(rank, D, values.dtype, generators(len(values), seed))
    return values @ q @ q.mT * (D / rank)


def fixed_rows(rows: int, lower_rank: bool, count: int) -> Tensor:
    values = torch.randn(rows, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if lower_rank:
        values[-1] = -values[:-1].sum(0)  # as residuals of a softmax: rows add up to zero
    return values.expand(count, rows, D).clone()


@pytest.mark.slow
@pytest.mark.parametrize("projection", ["haar", "wishart"])
@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("lower_rank", [False, True])
def test_first_and_second_moments_agree(projection: str, rank: int, lower_rank: bool) -> None:
    count = 2500
    values = fixed_rows(3, lower_rank, count)
    fast = project_afresh(values, rank, projection, generators(count, 1)).flatten(1)
    slow = formed(values, rank, projection, 2).flatten(1)
    for sample in (fast, slow):
        error = sample.std(0) / count**0.5
        assert ((sample.mean(0) - values[0].flatten()).abs() <= 5 * error + 1e-9).all()
    # every product of two entries, of which the standard error is estimated too
    for i in (0, 5, 17, 30):
        first, second = fast[:, i, None] * fast, slow[:, i, None] * slow
        error = ((first.var(0) + second.var(0)) / count).sqrt()
        assert ((first.mean(0) - second.mean(0)).abs() <= 5 * error + 1e-9).all()


@pytest.mark.parametrize("rank", [2, 7])
def test_captured_energy_is_beta(rank: int) -> None:
    count = 2000
    values = fixed_rows(2, False, count)
    images = project_afresh(values, rank, "haar", generators(count, 4)) * (rank / D)
    kept = images.square().sum(-1) / values.square().sum(-1)
    for row in kept.T:
        assert kstest(row.numpy(), beta(rank / 2, (D - rank) / 2).cdf).pvalue > 1e-3
    # an orthogonal projection: what is kept of a row is its inner product with it
    torch.testing.assert_close((images * values).sum(-1), images.square().sum(-1))


@pytest.mark.parametrize("projection", ["haar", "wishart"])
@pytest.mark.parametrize("rank", [1, 2, 6])
def test_result_is_possible_for_a_projection(projection: str, rank: int) -> None:
    """V M V^T is symmetric and positive semidefinite, and M has rank r: what Proposition 2 rests on."""
    values = fixed_rows(4, False, 50)
    images = project_afresh(values, rank, projection, generators(50, 5))
    gram = images @ values.mT
    torch.testing.assert_close(gram, gram.mT)
    found = torch.linalg.eigvalsh(gram)
    assert (found > -1e-9).all()
    assert (found[:, : max(0, 4 - rank)].abs() < 1e-9).all()


def test_full_rank_haar_is_the_identity() -> None:
    values = fixed_rows(3, False, 5)
    torch.testing.assert_close(project_afresh(values, D, "haar", generators(5)), values)


def test_noise_of_low_dimension_has_the_law_of_full_noise() -> None:
    """(V + sigma E) A^T A, given A, is (V A^T + sigma X L^T) A with L L^T = A A^T: the covariance of E A^T."""
    count, rank, sigma = 4000, 3, 0.5
    a = gaussian_factors(rank, D, torch.float64, generators(1))[0]
    value = fixed_rows(2, False, 1)[0]
    generator = torch.Generator().manual_seed(6)
    full = torch.randn(count, 2, D, generator=generator, dtype=torch.float64)
    low = torch.randn(count, 2, rank, generator=generator, dtype=torch.float64)
    direct = ((value + sigma * full) @ a.mT @ a).flatten(1)
    cheap = ((value @ a.mT + sigma * low @ torch.linalg.cholesky(a @ a.mT).mT) @ a).flatten(1)
    covariance = np.kron(np.eye(2), sigma**2 * (a.mT @ a @ a.mT @ a).numpy())
    for sample in (direct, cheap):
        torch.testing.assert_close(sample.mean(0), (value @ a.mT @ a).flatten(), rtol=0, atol=0.05)
        error = np.abs(np.cov(sample.numpy().T) - covariance).max()
        assert error < 0.1 * covariance.max()
