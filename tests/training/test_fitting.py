"""Micro-batches as large as fit: chosen from public facts before a record is read, and within what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise, small_settings
from run_cases import Bench, StopAt
from tiny_models import tiny_llama

import privlora.running
from privlora.config import MethodSettings, Settings
from privlora.errors import ConfigError
from privlora.mechanisms import CorrelatedNoise, band_coefficients
from privlora.training import fitting
from privlora.training.assembly import build_parts
from privlora.training.fitting import Peak, StepMemory, with_micro_batches
from privlora.training.footprint import free_but_for_own, free_bytes
from privlora.training.loop import Interrupted
from privlora.training.models import adapter_for
from privlora.training.promise import kept_bytes

CPU = torch.device("cpu")
MIB = 2**20


def settings(tokens: Any = "auto", **groups: Any) -> Settings:
    given = {
        "data": {"path": "(in memory)", "max_length": 64},
        "adapter": {"r": 4},
        "privacy": promise(steps=3, batch=5000, records=100_000, noise_multiplier=1.0, delta=1e-6),
        "run": {"tokens_per_micro_batch": tokens},
    }
    return small_settings(**{**given, **groups})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A step takes 10 MiB and one for each thousand tokens. Gives the tokens that it was asked of."""
    seen = list[int]()

    def peak(_: StepMemory, tokens: int, longest: int | None = None) -> Peak:
        seen.append(tokens)
        return Peak(10 * MIB + tokens * MIB // 1000, 0, 1, tokens)

    monkeypatch.setattr(StepMemory, "peak", peak)
    return seen


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Say how much of what is free may be used for steps."""

    def of(mebibytes: float) -> None:
        records = 100_000 * (64 + 5 * 64)
        monkeypatch.setattr(
            fitting, "free_bytes", lambda _: (mebibytes * MIB + records) / fitting._PART["cpu"]
        )

    return of


def chosen(given: Settings, model: torch.nn.Module, because: str = "") -> int:
    found, why = with_micro_batches(given, model, CPU)
    assert found.run.max_tokens == found.run.tokens_per_micro_batch == why.tokens
    assert str(why.tokens) in why.why
    assert why.why.endswith(because)
    return why.tokens


def test_a_number_stays(asked: list[int]) -> None:
    given = settings(300)
    assert with_micro_batches(given, tiny_llama(), CPU) == (given, None)
    assert asked == []


def test_the_largest_that_fits(asked: list[int], free: Callable[[float], None]) -> None:
    for room, tokens in ((10.3, 256), (10.2, 192), (11.6, 1536), (12.0, 1536), (12.1, 2048), (10.07, 64)):
        free(room)
        assert chosen(settings(), tiny_llama(), "larger ones do not fit") == tokens


def test_noise_that_is_kept_takes_room(asked: list[int], free: Callable[[float], None]) -> None:
    """16 bytes a number and band, at most: what CorrelatedNoise keeps is never more."""
    model = tiny_llama()
    banded = settings(privacy={**settings().privacy.model_dump(), "steps": 9, "bands": 9})
    kept = kept_bytes(9, adapter_for(banded, model)) / MIB
    free(kept + 10.3)
    assert chosen(banded, model) == 256
    assert chosen(settings(), model) > 256
    for row in ("prism", "dp-sgd"):
        parts = build_parts(banded.model_copy(update={"method": MethodSettings(name=row)}), tiny_llama())
        coordinates = parts.coordinates
        noise = CorrelatedNoise(band_coefficients(9, 9), coordinates)
        for step in range(1, 10):
            noise.next(step, lambda: coordinates.standard_normal(torch.zeros))  # noqa: B023
        size = sum(t.numel() * t.element_size() for t in noise.state_dict().values())
        assert 0 < size <= kept_bytes(9, parts.adapter)


def test_processes_share_what_is_free_or_was_before_records(
    asked: list[int], free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(12.1)
    assert chosen(settings(), tiny_llama()) == 2048
    given = {"sharing": 3, "free": 3 * fitting.free_bytes(CPU)}
    monkeypatch.setattr(fitting, "free_bytes", lambda _: pytest.fail("known"))
    _, found = with_micro_batches(settings(), tiny_llama(), CPU, **given)
    assert found.tokens == 2048


def test_one_row_that_does_not_fit_is_refused_with_what_would(
    asked: list[int], free: Callable[[float], None]
) -> None:
    free(10.05)
    with pytest.raises(ConfigError) as refused:
        chosen(settings(), tiny_llama())
    assert "a single record of data.max_length=64 tokens" in str(refused.value)
    assert "set data.max_length=50 or" in str(refused.value)
    free(3)
    with pytest.raises(ConfigError) as refused:
        chosen(settings(), tiny_llama())
    assert "set data.max_length" not in str(refused.value)


def test_only_what_makes_room_by_itself_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a user's records, which go through as a whole."""
    users = {"unit": "user", "user_column": "who", "max_records_per_user": 16}
    of_users = settings().changed(privacy=users)
    whole = StepMemory(of_users, tiny_llama(), CPU).peak(1).step_bytes
    monkeypatch.setattr(fitting, "free_bytes", lambda _: 0.8 * whole / fitting._PART["cpu"])
    with pytest.raises(ConfigError) as refused:
        chosen(of_users, tiny_llama())
    assert "one user's 16 records" in str(refused.value)
    assert "set privacy.max_records_per_user=4 or" in str(refused.value)


def test_no_more_than_the_rounding_was_measured_for(asked: list[int], free: Callable[[float], None]) -> None:
    free(1e6)
    rows_of_16 = settings(adapter={"r": 16})
    assert chosen(rows_of_16, tiny_llama(), "larger ones were not tested for rounding") == 1024 * 16
    assert chosen(settings(adapter={"r": 2}), tiny_llama()) == 4096
    assert chosen(rows_of_16, tiny_llama().bfloat16()) == 4096
    plain = {"private": False, "steps": 3, "public_dataset_size": 100_000, "expected_batch_size": 5000}
    assert chosen(settings(privacy=plain, method={"name": "adamw"}), tiny_llama().bfloat16()) == 65_536


def test_no_more_than_a_batch_has(asked: list[int], free: Callable[[float], None]) -> None:
    free(1e6)
    few = {**settings().privacy.model_dump(exclude_unset=True), "expected_batch_size": 5, "max_batch_size": 9}
    assert chosen(settings(privacy=few), tiny_llama(), "a batch holds no more") == 9 * 64
    long = settings(data={"path": "(in memory)", "max_length": 5000})
    bound = "one row of data.max_length=5000 is more than others may share"
    assert chosen(long, tiny_llama(max_position_embeddings=5000), bound) == 5000


def test_a_model_that_is_not_loaded_takes_room_too(asked: list[int], free: Callable[[float], None]) -> None:
    model = tiny_llama(vocab_size=4000)
    free(11.6)
    weights = fitting._PART["cpu"] * sum(p.nbytes for p in model.parameters()) / MIB
    assert weights > 0.2
    _, loaded = with_micro_batches(settings(), model, CPU)
    _, planned = with_micro_batches(settings(), model, CPU, loaded=False)
    assert planned.tokens < loaded.tokens


def test_methods_without_gradients_have_the_default() -> None:
    votes = settings(method={"name": "aug-pe"}, synthesis={})
    assert chosen(votes, tiny_llama()) == 4096


def test_runs_choose_before_records_are_read_and_resumed_ones_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    order, bench = list[str](), Bench()
    load, fit = privlora.running.load_all, privlora.running.with_micro_batches

    def noted(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **options: Any) -> Any:
            order.append(name)
            return do(*args, **options)

        return told

    monkeypatch.setattr(privlora.running, "load_all", noted("records", load))
    monkeypatch.setattr(privlora.running, "with_micro_batches", noted("choice", fit))
    bench.stopped(tmp_path / "run", 3, run={"tokens_per_micro_batch": "auto"})
    assert order == ["choice", "records"]
    kept = (tmp_path / "run/private/config.resolved.yaml").read_text()
    assert "tokens_per_micro_batch: auto\n" in kept
    assert asked
    asked.clear()
    with pytest.raises(Interrupted):
        bench.resume(tmp_path / "run", observer=StopAt(4))
    assert asked
    assert order == ["choice", "records"] * 2
    bench.resume(tmp_path / "run")
    asked.clear()
    bench.resume(tmp_path / "run")  # over: there is nothing to cut
    assert not asked


def test_what_this_process_holds_is_no_part_of_what_is_free(tmp_path: Path) -> None:
    """It may hold records: those that it looked at, what reading them left, or those of who calls."""

    def of(available: int, own: int) -> float:
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {available} kB\n")
        (tmp_path / "proc/self/status").write_text(f"Name: python\nVmRSS: {own + 77} kB\nRssAnon: {own} kB\n")
        return free_but_for_own(tmp_path)

    assert of(5000, 200) == of(4900, 300) == of(1200, 4000) == 5200 * 1024


def test_runs_choose_by_what_is_free_but_for_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen(Exception):
        pass

    def choose(*_: Any, **given: Any) -> Any:
        raise Chosen(given["free"], given["loaded"])

    monkeypatch.setattr(privlora.running, "free_but_for_own", lambda: 12345.0)
    monkeypatch.setattr(privlora.running, "with_micro_batches", choose)
    auto = {"tokens_per_micro_batch": "auto"}
    with pytest.raises(Chosen) as found:
        Bench().start(tmp_path / "run", run=auto)
    assert found.value.args == (12345.0, False)


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    def say(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert free_bytes(CPU, tmp_path) == float("inf")
    say("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert free_bytes(CPU, tmp_path) == 5000 * 1024
    say("proc/self/cgroup", "0::/a/b\n")
    say("sys/fs/cgroup/a/memory.max", "3000000\n")
    say("sys/fs/cgroup/a/memory.current", "2500000\n")
    say("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 400000\n")
    assert free_bytes(CPU, tmp_path) == 900_000
    say("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 100000\nactive_file 300000\n")  # read twice
    assert free_bytes(CPU, tmp_path) == 900_000
    say("sys/fs/cgroup/a/b/memory.max", "max\n")
    say("sys/fs/cgroup/a/b/memory.current", "5\n")
    say("sys/fs/cgroup/a/b/memory.stat", "anon 1\n")
    assert free_bytes(CPU, tmp_path) == 900_000
    say("proc/self/cgroup", "3:cpu:/x\n4:memory:/y\n")
    say("sys/fs/cgroup/memory/memory.limit_in_bytes", "600000\n")
    say("sys/fs/cgroup/memory/memory.usage_in_bytes", "200000\n")
    say("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 100\n")
    assert free_bytes(CPU, tmp_path) == 400_100
