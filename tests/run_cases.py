"""A tiny private run in memory, a log beside it of what really happened, and the checks that hold after any crash."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from promises import promise
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.api import Result, fine_tune, resume_run
from privlora.mechanisms import NoiseSource, Release
from privlora.optimizers import Optimizer
from privlora.training.checkpoint import digest_of
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer, StepReport

RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(30)]
PUBLIC = [{"text": f"visitor {i} left at {i % 7} with a dog."} for i in range(4)]
STEPS, STOPPED = 12, 8
PRIVACY = promise(steps=STEPS, batch=6, records=30, target_epsilon=4.0)


class Bench:
    """One model for all runs, which must come back from each as it went in."""

    def __init__(self) -> None:
        self.model = tiny_model()
        self.tokenizer = tiny_tokenizer()

    def start(
        self, folder: Path, *, method: Any = "prism", observer: Observer | None = None, **groups: Any
    ) -> Result:
        groups = {"privacy": PRIVACY, "adapter": {"r": 2}, "data": {"max_length": 40}, **groups}
        groups["run"] = {"checkpoint_every": 2, "tokens_per_micro_batch": 120, **groups.get("run", {})}
        records = groups.pop("records", RECORDS)
        given = {"tokenizer": self.tokenizer, "method": method, "output": folder, "observer": observer}
        return fine_tune(self.model, records, **given, **groups)

    def stopped(self, folder: Path, after: int, **options: Any) -> None:
        """A run that was stopped after so many steps."""
        with pytest.raises(Interrupted):
            self.start(folder, observer=StopAt(after), **options)

    def resume(
        self, folder: Path, evaluation: Any = None, observer: Observer | None = None, **options: Any
    ) -> Result:
        given = {"model": self.model, "tokenizer": self.tokenizer, "records": RECORDS, **options}
        return resume_run(folder, evaluation=evaluation, observer=observer, **given)

    def continue_or_start(self, folder: Path, **options: Any) -> Result:
        """What a user does after a crash: resume, or start again if the run had not begun."""
        if (folder / "private/config.resolved.yaml").exists():
            return self.resume(folder, options.get("evaluation"))
        return self.start(folder, **options)


def edit_settings(root: Path, group: str, change: Mapping[str, Any], *, unseen: bool = False) -> None:
    """What a run keeps of its settings, edited by hand. unseen: it has nothing left to compare the change with."""
    path, identity = root / "private/config.resolved.yaml", root / "private/identity.json"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings[group].update(change)
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    if unseen:
        kept = json.loads(identity.read_text(encoding="utf-8"))
        derived = ("method.learning_rate", "method.warmup_steps")  # from the number of steps
        for place in (*derived, *(f"{group}.{name}" for name in change)):
            kept["settings"].pop(place, None)
        identity.write_text(json.dumps(kept), encoding="utf-8")
        bind_again(root)


def bind_again(root: Path) -> None:
    """Lets the checkpoint be of the identity that lies beside it now."""
    path = root / "private/checkpoint.safetensors"
    if path.exists():
        with safe_open(path, framework="pt") as file:
            known, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, metadata=known | {"identity": digest_of(path.with_name("identity.json"))})


class StopAt(Observer):
    """Sends SIGINT to this process from inside a run."""

    def __init__(self, step: int, during: str = "step") -> None:
        self.step, self.during = step, during

    def on_step(self, report: StepReport) -> None:
        if self.during == "step" and report.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)

    def on_evaluation(self, step: int, loss: float) -> None:
        if self.during == "evaluation" and step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


class Warned(StopAt):
    """Stops nowhere, and keeps what it was warned of."""

    def __init__(self) -> None:
        super().__init__(step=0)
        self.warnings: list[str] = []

    def on_warning(self, what: str) -> None:
        self.warnings.append(what)


def in_a_child(work: Callable[[], object], kill_after: float | None = None) -> int:
    """Run ``work`` in a forked process, killed after so many seconds; returns how it ended (0: well)."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child may not return into pytest
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def side_log(path: Path) -> Iterator[None]:
    """Write every release and a hash of every block of noise to ``path``, each in one unbuffered write."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    draw, step = NoiseSource.standard_normal, Optimizer.step

    def note(kind: str, *tensors: torch.Tensor) -> None:
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
        os.pwrite(file, f"{kind} {digest}\n".encode(), 0)  # O_APPEND: always at the end

    def noted_draw(self: NoiseSource, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = draw(self, shape)
        note("noise", drawn)
        return drawn

    def noted_step(self: Optimizer, release: Release, learning_rate: float) -> None:
        note(f"release-{release.step}", *(t for parts in release.vector for t in parts))
        step(self, release, learning_rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseSource, "standard_normal", noted_draw)
        patch.setattr(Optimizer, "step", noted_step)
        yield
    os.close(file)


def releases(log: Path) -> list[int]:
    """Steps that were released, in order; also checks that no noise and no release occurred twice."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    hashes = [line.split()[1] for line in lines]
    assert len(set(hashes)) == len(hashes)
    return [int(line.split()[0].removeprefix("release-")) for line in lines if line.startswith("release")]


def check_after_crash(folder: Path, log: Path, crashes: int) -> None:
    """The ledger shows what was released, at most one more for each crash, and no file is half-written."""
    released = releases(log)
    assert released == sorted(set(released))
    ledger = folder / "release/ledger.jsonl"
    charged = read_ledger(ledger).charges if ledger.exists() and b"\n" in ledger.read_bytes() else 0
    assert len(released) <= charged <= min(STEPS, len(released) + crashes)
    assert max(released, default=0) <= charged
    check_files(folder)


def check_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.name.startswith("."):
            continue  # a temporary file, which no reader takes for the real one
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert list(file.keys())
        elif path.suffix == ".json":
            json.loads(path.read_text())


def check_finished(folder: Path, log: Path, result: Result) -> None:
    check_after_crash(folder, log, crashes=STEPS)
    summary = read_ledger(folder / "release/ledger.jsonl")
    assert summary.closed
    assert summary.charges == STEPS
    assert result.epsilon is not None
    assert 0 < result.epsilon <= PRIVACY["target_epsilon"]
    assert {path.name for path in folder.iterdir()} == {"release", "private"}
    assert not [path.name for path in folder.rglob(".*")]


def fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """Everything about a module that a run could change: bits, flags, hooks and attributes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "bits": {name: t.clone() for name, t in model.state_dict().items()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grad": {name: p.grad is None for name, p in model.named_parameters()},
        "hooks": {(n, h): len(getattr(m, h)) for n, m in model.named_modules() for h in hooks},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "training": {n: m.training for n, m in model.named_modules()},
        "checkpointing": {n: getattr(m, "gradient_checkpointing", None) for n, m in model.named_modules()},
        "forward": _logits(model),
    }


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=torch.arange(3, 23)[None]).logits


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key == "bits":
            assert value.keys() == after[key].keys()
            assert all(torch.equal(t, after[key][name]) for name, t in value.items())
        elif key == "forward":
            assert torch.equal(value, after[key])
        else:
            assert value == after[key], key


def failing(call: Callable[..., Any], at: int, after: bool) -> Callable[..., Any]:
    """``call``, except that its ``at``-th call fails before or after it did its work."""
    count = [0]

    def wrapped(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == at and not after:
            raise OSError(28, "No space left on device")
        result = call(*args, **options)
        if count[0] == at:
            raise OSError(28, "No space left on device")
        return result

    return wrapped


@contextmanager
def no_space_at(step: int) -> Iterator[None]:
    """Inside, a run ends for want of room on the disk once this step is charged, before the optimizer moves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", failing(Optimizer.step, step, after=False))
        with pytest.raises(OSError, match="No space"):
            yield
