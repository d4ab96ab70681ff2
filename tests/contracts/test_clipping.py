"""However a unit is brought to norm C, it moves the sum by C at most and depends on nobody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from method_cases import Case, by_space, flat, make_case, poisoned_model
from test_sensitivity import check_remove_one, hard_batch
from tiny_models import uneven_examples

from privlora.config import MethodSettings
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import point_from_factors
from privlora.mechanisms import CLIPPING

by_clipping = pytest.mark.parametrize("clipping", ["automatic", "spectral", "normalized", "per-module"])


def refused(case: Case, clipping: str) -> bool:
    """Whether the row does not clip like that; then it says so."""
    if clipping in case.row.clippings:
        return False
    with pytest.raises(ConfigError, match="cannot clip as"):
        case.row.resolve(MethodSettings(name=case.row.name, clipping=clipping), None, 1)
    if clipping in ("spectral", "per-module"):
        with pytest.raises(
            ConfigError, match=r"clipping before projecting|cannot clip (spectrally|module by)"
        ):
            case.clipped_sum(uneven_examples(), clipping=clipping)
    return True


@by_space
@by_clipping
@pytest.mark.parametrize("state", ["zero", "ill-conditioned"])
def test_one_record(variant: tuple[str, str], clipping: str, state: str, tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, state)
    examples = hard_batch()
    if refused(case, clipping):
        return
    changes = check_remove_one(case, examples, list(range(len(examples))), clip_norm=1e-3, clipping=clipping)
    assert min(changes[:6]) > case.reached(
        {"automatic": 0.985, "spectral": 0.9899, "per-module": 0.83}.get(clipping, 0.9996)
    )
    assert max(changes[6:]) < 1e-4  # no label, one token, empty, NaN, inf: nothing but rounding


@by_space
@by_clipping
def test_one_user(variant: tuple[str, str], clipping: str, tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    if refused(case, clipping):
        return
    units = [np.array(u) for u in ([0, 3, 5], [1, 2], [4], [6, 7, 8], [9])]
    changes = check_remove_one(case, hard_batch(), units, clip_norm=1e-3, clipping=clipping)
    assert min(changes[:3]) > case.reached(0.9899)
    assert changes[4] < 1e-4


@by_space
@by_clipping
def test_micro_batches_do_not_matter(variant: tuple[str, str], clipping: str, tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    if refused(case, clipping):
        return
    releases = []
    for tokens in (10**6, 45, 1):
        mechanism = case.mechanism(seed=11, clip_norm=0.1, batch=1.0, clipping=clipping)
        case.feed(mechanism, uneven_examples(), max_tokens=tokens)
        releases.append(flat(mechanism.release().vector))
    # Roots of what is small bring its rounding up: about 1e-4 of C, where flat clipping keeps 2e-6.
    for other in releases[1:]:
        assert float((other - releases[0]).norm()) < (5e-4 if clipping == "spectral" else 1e-5) * 0.1


def test_automatic_clipping_brings_everyone_to_the_norm(tmp_path: Path) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    one = uneven_examples()[:1]
    assert float(case.clipped_sum(one, clip_norm=1e4, clipping="flat").norm()) < 1e3
    assert float(case.clipped_sum(one, clip_norm=1e4, clipping="automatic").norm()) > 9e3


def test_spectral_clipping_does_not_depend_on_the_factors(tmp_path: Path) -> None:
    case = make_case(("prism", "rank"), tmp_path, model=poisoned_model(torch.float64), dtype=torch.float64)
    pairs = case.coordinates.factors()
    sums = []
    for c in (1.0, 1e-3, 30.0):
        case.coordinates.points = [point_from_factors(c * a, b / c) for a, b in pairs]
        case.coordinates.install()
        sums.append(case.clipped_sum(uneven_examples(), clip_norm=0.1, clipping="spectral"))
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], rtol=1e-7, atol=1e-8)


def test_spectral_clipping_evens_out_modules(tmp_path: Path) -> None:
    case = make_case(("prism", "rank"), tmp_path)

    def spread(clipping: str) -> float:
        mechanism = case.mechanism(sigma=0.0, batch=1.0, clipping=clipping)
        case.feed(mechanism, uneven_examples()[:1])
        parts = mechanism.release().vector
        norms = torch.cat([sum(t.square().sum(dim=(-2, -1)) for t in group).sqrt() for group in parts])
        return float(norms.max() / norms.min())

    assert spread("spectral") < spread("flat") ** 0.5


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    with pytest.raises(ConfigError, match="flat, automatic, spectral, normalized, per-module"):
        case.mechanism(clipping="spectrum")
    assert CLIPPING == ("flat", "automatic", "spectral", "normalized", "per-module")
