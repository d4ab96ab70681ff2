import json
import subprocess
import sys

import pytest
from accounting_cases import poisson

from privlora.accounting import PoissonSampling, StepEvent, TruncatedPoissonSampling
from privlora.accounting.events import MOST_BINS, MOST_PROJECTIONS, BallsInBinsSampling, CyclicPoissonSampling
from privlora.errors import PrivacyError
from privlora.ranges import MOST_BANDS

EVENTS = [
    poisson(64 / 9919, 0.6413174),
    poisson(1, 10),
    StepEvent(TruncatedPoissonSampling(0.01, max_batch_size=20, dataset_size=1000), 0.7),
    StepEvent(PoissonSampling(0.02), 0.2125, ((24, 768), (64, 2048))),
]


@pytest.mark.parametrize("event", EVENTS)
def test_round_trip_through_json(event):
    assert StepEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event


def test_dictionary_is_stable():
    """Ledgers on disk are read by later versions."""
    assert poisson(0.5, 2.0).to_dict() == {
        "mechanism": "gaussian",
        "noise_multiplier": 2.0,
        "sampling": {"kind": "poisson", "sample_rate": 0.5},
    }


def test_dictionary_of_a_projected_step_is_stable():
    event = StepEvent(PoissonSampling(0.5), 2.0, ((64, 2048), (24, 768), (64, 2048)))
    assert event.to_dict() == {
        "mechanism": "projected_gaussian",
        "noise_multiplier": 2.0,
        "sampling": {"kind": "poisson", "sample_rate": 0.5},
        "projections": [[24, 768], [64, 2048]],
    }


def test_layers_with_the_same_projection_are_one_entry_in_any_order():
    sampling = PoissonSampling(0.5)
    first = StepEvent(sampling, 2.0, ((64, 2048), (24, 768), (64, 2048)))
    assert first == StepEvent(sampling, 2.0, ((24, 768), (64, 2048)))
    assert first.projections == ((24, 768), (64, 2048))
    assert first != StepEvent(sampling, 2.0)


def _without(data, key):
    return {name: value for name, value in data.items() if name != key}


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d | {"clipping": "none"},
        lambda d: _without(d, "noise_multiplier"),
        lambda d: d | {"mechanism": "laplace"},
        lambda d: d | {"noise_multiplier": "1.0"},
        lambda d: d | {"noise_multiplier": True},
        lambda d: d | {"noise_multiplier": float("nan")},
        lambda d: d | {"sampling": "poisson"},
        lambda d: d | {"sampling": {"kind": "shuffled", "sample_rate": 0.1}},
        lambda d: d | {"sampling": {"kind": ["poisson"], "sample_rate": 0.1}},
        lambda d: d | {"sampling": d["sampling"] | {"max_batch_size": 3}},
        lambda d: d | {"sampling": {"kind": "poisson"}},
        lambda d: (
            d
            | {
                "sampling": {
                    "kind": "truncated_poisson",
                    "sample_rate": 0.1,
                    "max_batch_size": 2.5,
                    "dataset_size": 9,
                }
            }
        ),
    ],
)
def test_unreadable_dictionaries_are_refused(change):
    with pytest.raises(PrivacyError):
        StepEvent.from_dict(change(poisson(0.1, 1.0).to_dict()))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: _without(d, "projections"),
        lambda d: d | {"mechanism": "gaussian"},
        lambda d: d | {"projections": []},
        lambda d: d | {"projections": "64 of 2048"},
        lambda d: d | {"projections": [[64]]},
        lambda d: d | {"projections": [[64, 2048.0]]},
        lambda d: d | {"projections": [[True, 2048]]},
        lambda d: d | {"projections": [[2048, 64]]},
        lambda d: d | {"projections": [64, 2048]},
    ],
)
def test_unreadable_projections_are_refused(change):
    with pytest.raises(PrivacyError):
        StepEvent.from_dict(change(EVENTS[3].to_dict()))


@pytest.mark.parametrize(
    "projections", [((0, 4),), ((5, 4),), ((1.0, 4),), ([1, 4],), [(1, 4)], ((1, 4, 2),)]
)
def test_unusable_projections_are_refused(projections):
    with pytest.raises(PrivacyError, match="projection"):
        StepEvent(PoissonSampling(0.1), 1.0, projections)


def test_a_ledger_holds_no_event_that_is_priced_for_minutes():
    """Of classes, bins and kinds of projections there are bounds, since anybody writes a ledger."""
    for sampling in (CyclicPoissonSampling(0.1, MOST_BANDS), BallsInBinsSampling(MOST_BINS)):
        more = {"classes": MOST_BANDS + 1, "bins": MOST_BINS + 1}
        event = StepEvent(sampling, 1.0).to_dict()
        assert StepEvent.from_dict(event)
        event["sampling"] |= {name: value for name, value in more.items() if name in event["sampling"]}
        with pytest.raises(PrivacyError, match="is not between 2 and"):
            StepEvent.from_dict(event)
    kinds = tuple((1, width) for width in range(2, MOST_PROJECTIONS + 3))
    assert StepEvent(PoissonSampling(0.1), 1.0, kinds[1:] * 3)
    with pytest.raises(PrivacyError, match="kinds of projections"):
        StepEvent(PoissonSampling(0.1), 1.0, kinds)


def test_projected_steps_do_not_truncate_their_batches():
    with pytest.raises(PrivacyError, match="neither truncated"):
        StepEvent(TruncatedPoissonSampling(0.1, 20, 100), 1.0, ((4, 8),))


@pytest.mark.parametrize("sample_rate", [-0.1, 1.1, float("nan")])
def test_sample_rate_must_be_a_probability(sample_rate):
    with pytest.raises(PrivacyError, match="sample_rate"):
        PoissonSampling(sample_rate)
    with pytest.raises(PrivacyError, match="sample_rate"):
        TruncatedPoissonSampling(sample_rate, 10, 100)


@pytest.mark.parametrize("noise_multiplier", [-1.0, float("inf"), float("nan")])
def test_noise_must_be_finite_and_not_negative(noise_multiplier):
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        poisson(0.1, noise_multiplier)


@pytest.mark.parametrize(("max_batch_size", "dataset_size"), [(0, 100), (10, 0)])
def test_truncation_needs_positive_sizes(max_batch_size, dataset_size):
    with pytest.raises(PrivacyError, match="positive"):
        TruncatedPoissonSampling(0.1, max_batch_size, dataset_size)


def test_describe_names_noise_and_sampling():
    assert EVENTS[2].describe() == (
        "Gaussian mechanism, sigma=0.7, Poisson sampling cut to 20, q=0.01, 1000 privacy units"
    )


def test_describe_names_the_projections():
    assert EVENTS[3].describe() == (
        "Gaussian mechanism on a fresh random projection of clipped gradients (24 of 768, 64 of 2048), "
        "sigma=0.2125, Poisson sampling, q=0.02"
    )


def test_room_imports_neither_torch_nor_dp_accounting():
    """`privlora calibrate` and `privlora budget --help` must start fast."""
    code = "import sys, privlora.accounting; print({'torch', 'dp_accounting', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
