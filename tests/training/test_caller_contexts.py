"""A run inside a context of its caller's (an autocast, no_grad, another default dtype): it computes as outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from promises import promise
from run_cases import RECORDS as OF_LETTERS
from test_ranks import ROWS, groups_of
from tiny_models import PUBLIC_TEXTS, tiny_model, tiny_tokenizer

from privlora import federate, fine_tune, resume_run
from privlora.demo import model_path, private_records
from privlora.errors import ModelError
from privlora.evaluation import evaluate_next_token
from privlora.training.files import RunFolder

PROMISE: dict[str, Any] = promise(
    steps=2, batch=6, records=30, noise_multiplier=1.0, delta=1e-4, insecure_noise_seed=3
)
RECORDS, PUBLIC = private_records(30, seed=1), private_records(4, seed=2)

pytestmark = pytest.mark.usefixtures("quick_reports")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def nested() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.float16):
        yield


@contextmanager
def all_at_once() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ONCE:
            stack.enter_context(CONTEXTS[name]())
        yield


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "nested autocasts": nested,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": deterministic,
    "all at once": all_at_once,
}


def trained(folder: Path, **groups: Any) -> Any:
    groups = {"privacy": PROMISE, "adapter": {"r": 2}, "data": {"max_length": 40}, **groups}
    groups["run"] = {"tokens_per_micro_batch": 240}
    return fine_tune(str(model_path()), RECORDS, output=folder, show_progress=False, **groups)


def left(folder: Path) -> dict[str, bytes]:
    """All that is released, but for what names the ledger's own key."""
    place = RunFolder(folder).release
    kept = ("adapter_model.safetensors", "adapter_config.json", "evaluations.jsonl")
    return {name: (place / name).read_bytes() for name in kept if (place / name).exists()}


@cache
def outside() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        trained(Path(folder) / "outside", evaluation=PUBLIC)
        return left(Path(folder) / "outside")


ONCE = ("autocast", "no_grad", "bfloat16", "meta", "anomalies")  # "all at once" holds these


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ONCE else name for name in CONTEXTS]
)
def test_a_run_computes_as_outside(name: str, tmp_path: Path) -> None:
    expected = outside()
    with CONTEXTS[name]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        before = (*before, torch.get_default_device(), torch.is_autocast_enabled("cpu"))
        trained(tmp_path / "inside", evaluation=PUBLIC)
        after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        assert (*after, torch.get_default_device(), torch.is_autocast_enabled("cpu")) == before
    assert left(tmp_path / "inside") == expected


@pytest.mark.parametrize(
    "method",
    [
        name if name in ("prism", "dp-adamw", "pe-sgd") else pytest.param(name, marks=pytest.mark.long)
        for name in ROWS
    ],
)
def test_every_method_computes_as_outside(method: str, tmp_path: Path) -> None:
    groups = groups_of(method, tmp_path)
    trained(tmp_path / "outside", method=method, **groups)
    with all_at_once():
        trained(tmp_path / "inside", method=method, **groups)
    if groups["privacy"].get("private", True):  # else draws have no public seed
        assert left(tmp_path / "inside") == left(tmp_path / "outside")


def test_a_federation_computes_as_outside(tmp_path: Path) -> None:
    def run(folder: Path) -> dict[str, bytes]:
        federate(
            str(model_path()),
            {"a": RECORDS[:15], "b": RECORDS[15:]},
            federation={"rule": "tan", "rounds": 1, "local_steps": 2},
            privacy={name: value for name, value in PROMISE.items() if name != "steps"},
            adapter={"r": 2},
            data={"max_length": 40},
            output=folder,
        )
        return left(folder)

    outside = run(tmp_path / "outside")
    with all_at_once():
        assert run(tmp_path / "inside") == outside


def test_a_resumed_run_computes_as_outside(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    before = left(tmp_path / "run")
    with all_at_once():
        resume_run(tmp_path / "run", records=RECORDS)
    assert left(tmp_path / "run") == before


def test_a_held_out_loss_is_the_same() -> None:
    model, examples = tiny_model(), PUBLIC_TEXTS
    expected = evaluate_next_token(model, examples)
    with all_at_once():
        assert evaluate_next_token(model, examples) == expected


def test_a_model_that_was_made_in_inference_mode_is_refused(tmp_path: Path) -> None:
    """Before anything is charged, and what the error says helps."""
    with torch.inference_mode():
        model = tiny_model()
    run: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "privacy": PROMISE, "adapter": {"r": 2}}
    with pytest.raises(ModelError, match=r"made inside torch.inference_mode.*Fix: load it outside"):
        fine_tune(model, OF_LETTERS, output=tmp_path / "run", **run)
    assert not (tmp_path / "run").exists()
    fine_tune(tiny_model(), OF_LETTERS, output=tmp_path / "run", data={"max_length": 40}, **run)
