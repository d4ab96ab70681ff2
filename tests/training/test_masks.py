"""Dropout masks: none unless asked for, none that anybody can foresee, and the user's generators are given back."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from promises import promise
from run_cases import PRIVACY
from test_crashes import in_a_child
from tiny_models import VOCAB, tiny_model, tiny_tokenizer
from torch import Tensor

from privlora.api import fine_tune
from privlora.mechanisms import GaussianMechanism, Release
from privlora.training.observer import Observer, StepReport

pytestmark = pytest.mark.usefixtures("quick_reports")

CLIP_NORM = 1e-3  # every record is clipped
EVERYBODY = promise(steps=1, batch=40, noise_multiplier=1.0, sample_rate=1.0, clip_norm=CLIP_NORM)
RECORDS = [{"text": f"patient {i} came in at {i % 7} with {'a ' * (i % 11)}cold."} for i in range(40)]


def dropping_model() -> Any:
    """A tiny GPT-2 with the dropout that its configuration has by default, 0.1 in three places."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    )
    return hf.AutoModelForCausalLM.from_config(config).eval()


def run(model: Any, folder: Path, records: Any = RECORDS, **groups: Any) -> None:
    groups = {"privacy": EVERYBODY, "adapter": {"r": 2}, "data": {"max_length": 60}, **groups}
    fine_tune(
        model,
        records,
        tokenizer=tiny_tokenizer(),
        output=folder,
        run={"tokens_per_micro_batch": 10**6},
        **groups,
    )


def clipped_sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What noise is added to in each release from now on."""
    seen: list[Tensor] = []
    release = GaussianMechanism.release

    def noted(self: GaussianMechanism, total: Any = None) -> Release:
        found = self.clipped_sum()
        seen.append(torch.cat([t.double().flatten() for parts in found for t in parts]))
        return release(self, total)

    monkeypatch.setattr(GaussianMechanism, "release", noted)
    return seen


@pytest.mark.parametrize("method", ["prism", "dp-adamw"])
def test_nobody_moves_the_sum_by_more_than_c_whatever_was_seeded(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masks that repeat, one record's leaving gives all others other masks."""
    model, seen = dropping_model(), clipped_sums(monkeypatch)
    for left_out in (None, 0, 17):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        rest = [record for i, record in enumerate(RECORDS) if i != left_out]
        run(model, tmp_path / str(left_out), rest, method=method)
    changes = [float((seen[0] - other).norm()) / CLIP_NORM for other in seen[1:]]
    assert max(changes) <= 1 + 1e-5
    assert min(changes) > 0.98


def masks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hash of where each dropout from now on put zeros."""
    seen: list[str] = []
    dropout = torch.nn.functional.dropout

    def noted(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p:
            seen.append(hashlib.sha256(dropout(torch.ones_like(x), p).numpy().tobytes()).hexdigest())
        return dropout(x, p, training, inplace)

    monkeypatch.setattr(torch.nn.functional, "dropout", noted)
    return seen


DROPPING: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "base model": (dropping_model, {"loading": {"dropout": True}}),
    "adapter": (tiny_model, {"adapter": {"r": 2, "lora_dropout": 0.1}}),
}


@pytest.mark.parametrize("where", DROPPING)
def test_no_seed_fixes_the_masks(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, groups = DROPPING[where]
    seen, model = masks(monkeypatch), make()

    def seeded_run(folder: Path) -> set[str]:
        seen.clear()
        torch.manual_seed(0)
        run(model, folder, **groups)
        # A model's first pass is made twice with its masks: first to find out what follows the output layer.
        again = len(seen) - len(set(seen))
        assert len(set(seen)) > max(3, again)
        assert seen[:again] == seen[again : 2 * again]
        return set(seen)

    def in_another_process(folder: Path) -> set[str]:
        note = folder.with_suffix(".masks")
        assert in_a_child(lambda: note.write_text(" ".join(seeded_run(folder)))) == 0
        return set(note.read_text().split())

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    here = [seeded_run(tmp_path / name) for name in ("a", "b")]
    there = [in_another_process(tmp_path / name) for name in ("c", "d")]
    assert len(set.union(*here, *there)) == sum(map(len, here + there))


def test_without_asking_nothing_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = masks(monkeypatch)
    run(dropping_model(), tmp_path / "run")
    assert not seen


def global_states() -> list[Any]:
    name, words, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), name, words.tolist(), rest]


class Fails(Observer):
    def on_step(self, report: StepReport) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize("where", DROPPING)
@pytest.mark.parametrize("fails", [False, True])
def test_the_users_generators_are_given_back(where: str, fails: bool, tmp_path: Path) -> None:
    make, groups = DROPPING[where]
    model = make()
    torch.randn(3), np.random.randn(3), random.gauss(0, 1)  # each has half a pair of normals in stock
    before = global_states()
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            fine_tune(
                model,
                RECORDS,
                tokenizer=tiny_tokenizer(),
                output=tmp_path / "run",
                privacy=PRIVACY,
                observer=Fails(),  # type: ignore[arg-type]
                **groups,
            )
    else:
        run(model, tmp_path / "run", **groups)
    assert global_states() == before
