"""Runs that write their own public texts, killed in every phase: what is charged, drawn, released and written again."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from run_cases import in_a_child
from safetensors.torch import load_file
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

import privlora.running
import privlora.training.assembly
import privlora.training.loop
from privlora.accounting import Ledger, read_ledger
from privlora.api import fine_tune, resume_run
from privlora.mechanisms import GaussianMechanism, NoiseSource, Release
from privlora.optimizers import SpanOptimizer
from privlora.synthesis.writers import ModelWriter
from privlora.training.files import RunFolder
from privlora.training.texts.synthetic_texts import SyntheticTexts

RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(6)]
STEPS = 3
SETTINGS: dict[str, Any] = {
    # Everybody is in each batch, so that nothing but the noise is drawn.
    "privacy": promise(steps=STEPS, batch=6, records=6, noise_multiplier=1.0),
    "adapter": {"r": 2, "target_modules": ["q_proj"]},
    "data": {"max_length": 40},
    "method": {"name": "pe-sgd", "learning_rate": 0.05},
    "synthesis": {
        "chat": False,
        "random_prompt": "note: ",
        "seeds": 3,
        "variations": 1,
        "max_new_tokens": 8,
        "warm_start_epochs": 1,
    },
    "run": {"checkpoint_every": 1},
}
# What a run does, in the order of its first time: owner, and name.
PHASES: list[tuple[Any, str]] = [
    (ModelWriter, "write"),
    (privlora.training.loop, "warm_start"),
    (privlora.training.assembly, "public_gradients"),
    (GaussianMechanism, "accumulate"),
    (Ledger, "charge"),
    (NoiseSource, "standard_normal"),
    (SpanOptimizer, "_update"),
    (privlora.training.loop, "save_checkpoint"),
    (Ledger, "finish"),
    (privlora.running, "publish"),
]
# Between these the step is charged, and what it released is not yet stored.
LOST = ["charge>", "standard_normal<", "standard_normal>", "_update<", "_update>", "save_checkpoint<"]

pytestmark = pytest.mark.usefixtures("quick_reports")


class Killed(BaseException):
    """In the place of a crash of the process: nothing in memory is used afterwards."""


class Machine:
    """Runs in one folder, on which a process may die; ``log`` is what really happened, across all processes."""

    def __init__(self, root: Path, die: Callable[[], None]) -> None:
        self.root, self._die = root, die
        self.folder = RunFolder(root / "run")
        self.passed: list[str] = []  # points of the present process

    def go(self, die_at: int = -1) -> None:
        """What a user does: start, or resume. die_at: the number of the point at which the process dies."""
        self.passed = []
        with pytest.MonkeyPatch.context() as patch:
            self._watch(patch)
            for owner, name in PHASES:
                patch.setattr(owner, name, self._dying(getattr(owner, name), name, die_at))
            common: dict[str, Any] = {"model": tiny_model(), "tokenizer": tiny_tokenizer()}
            if self.folder.settings.exists():
                resume_run(self.folder.root, records=RECORDS, **common)
            else:
                fine_tune(common.pop("model"), RECORDS, output=self.folder.root, **common, **SETTINGS)

    def log(self, kind: str) -> list[str]:
        path = self.root / "log"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [what for name, what in lines if name == kind]

    def result(self) -> dict[str, Tensor]:
        """What is released, and the last texts."""
        texts = load_file(self.folder.checkpoint)["texts/population.utf8"]
        return {**load_file(self.folder.release / "adapter_model.safetensors"), "texts": texts}

    @property
    def charges(self) -> int:
        path = self.folder.ledger
        return read_ledger(path).charges if path.exists() and b"\n" in path.read_bytes() else 0

    def _note(self, kind: str, what: object) -> None:
        with (self.root / "log").open("a") as file:
            file.write(f"{kind} {what}\n")

    def _dying(self, call: Callable[..., Any], name: str, die_at: int) -> Callable[..., Any]:
        def point(mark: str) -> None:
            self.passed.append(name + mark)
            if len(self.passed) - 1 == die_at:
                self._die()

        def wrapped(*args: Any, **options: Any) -> Any:
            point("<")
            found = call(*args, **options)
            point(">")
            return found

        return wrapped

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        release, texts = GaussianMechanism.release, SyntheticTexts.examples

        def drawn(source: NoiseSource, shape: tuple[int, ...]) -> Tensor:
            """Noise that belongs to a charge, so that runs can be compared."""
            self._note("noise", self.charges)
            return torch.randn(shape, generator=torch.Generator().manual_seed(self.charges)).double()

        def released(mechanism: GaussianMechanism, total: Any = None) -> Release:
            found = release(mechanism, total)
            self._note("release", found.step)
            return found

        def read(own: SyntheticTexts) -> Any:
            self._note("texts", hashlib.sha256("\n".join(own.texts).encode()).hexdigest())
            return texts(own)

        patch.setattr(NoiseSource, "standard_normal", drawn)
        patch.setattr(GaussianMechanism, "release", released)
        patch.setattr(SyntheticTexts, "examples", read)


def killed() -> None:
    raise Killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A run that nothing stops."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    machine = Machine(tmp_path_factory.mktemp("whole"), killed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.reporting.facts.gather", lambda *_: {})
        patch.setattr("privlora.reporting.publication.write_report", lambda folder, report: None)
        machine.go()
    return machine


def chosen(points: list[str], seed: int) -> list[int]:
    """Of each kind of point one of its times."""
    rng = random.Random(seed)
    return [rng.choice([i for i, name in enumerate(points) if name == kind]) for kind in sorted(set(points))]


def check(machine: Machine, whole: Machine, died_at: int) -> None:
    """After a death at that point and a resumption."""
    summary = read_ledger(machine.folder.ledger)
    assert summary.closed
    assert summary.charges == STEPS
    noise, released = machine.log("noise"), machine.log("release")
    assert noise == sorted(set(noise))  # one draw for each charge at most
    assert set(released) <= set(noise)
    assert released == sorted(set(released))
    texts, expected = ([text for text, _ in groupby(own.log("texts"))] for own in (machine, whole))
    point = whole.passed[died_at]
    if point not in LOST:
        assert released == whole.log("release")
        assert texts == expected
        result, other = machine.result(), whole.result()
        assert result.keys() == other.keys()
        assert all(torch.equal(result[name], other[name]) for name in other)
        return
    step = 1 + whole.passed[:died_at].count("save_checkpoint>")
    assert len(released) >= STEPS - 1
    assert texts[:step] == expected[:step]  # the next step has those of the one that was lost
    assert len(texts) == STEPS - (step < STEPS)


@pytest.mark.parametrize("number", range(2 * len(PHASES)))
def test_a_crash_in_any_phase(number: int, whole: Machine, tmp_path: Path) -> None:
    point = chosen(whole.passed, seed=4)[number]
    machine = Machine(tmp_path, killed)
    with pytest.raises(Killed):
        machine.go(point)
    assert machine.passed == whole.passed[: point + 1]
    assert len(machine.log("release")) <= machine.charges
    machine.go()
    check(machine, whole, point)


@pytest.mark.parametrize("kind", ["charge>", "save_checkpoint<"])
def test_kill_9(kind: str, whole: Machine, tmp_path: Path) -> None:
    point = max(i for i, name in enumerate(whole.passed) if name == kind)
    machine = Machine(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert in_a_child(lambda: machine.go(point)) == -signal.SIGKILL
    assert len(machine.log("release")) <= machine.charges
    machine.go()
    check(machine, whole, point)
