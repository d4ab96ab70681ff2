"""Checkpoints are safetensors of one run, written whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from privlora.errors import RunError
from privlora.training.checkpoint import Mark, load_checkpoint, read_mark, save_checkpoint

PARTS = {
    "coordinates": {"0.U": torch.randn(2, 3), "0.S": torch.rand(2, dtype=torch.float64)},
    "optimizer": {"count": torch.tensor(3)},
}


def test_it_gives_back_the_bits(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, PARTS, Mark(7, "run", None))
    step, found = load_checkpoint(path, run_id="run")
    assert step == 7
    assert found.keys() == PARTS.keys()
    for part, tensors in PARTS.items():
        assert found[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[part][name].dtype == tensor.dtype
            assert torch.equal(found[part][name], tensor)


@pytest.mark.parametrize("charge", [None, "0a1b"])
def test_the_mark_is_read_alone(charge: str | None, tmp_path: Path) -> None:
    mark = Mark(7, "run", charge)
    save_checkpoint(tmp_path / "c", PARTS, mark)
    assert read_mark(tmp_path / "c") == mark


def test_parts_may_share_tensors(tmp_path: Path) -> None:
    shared = torch.randn(2, 3)
    parts = {"a": {"x": shared}, "b": {"x": shared, "transposed": shared.T}}
    save_checkpoint(tmp_path / "c", parts, Mark(1, "run", None))
    _, found = load_checkpoint(tmp_path / "c", run_id="run")
    assert torch.equal(found["b"]["transposed"], shared.T)


@pytest.mark.parametrize("other", ["one", "", None])
def test_another_runs_checkpoint_is_refused(other: str | None, tmp_path: Path) -> None:
    """Also one that does not say whose it is."""
    save_checkpoint(tmp_path / "c", PARTS, Mark(1, other, None))
    with pytest.raises(RunError, match="belongs to another run"):
        load_checkpoint(tmp_path / "c", run_id="two")


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "pickle", "missing"])
def test_a_damaged_one_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, PARTS, Mark(1, "run", None))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "pickle":
        torch.save({"step": 1}, path)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else bytes(range(256)))
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(path, run_id="run")
    if damage != "cut":  # the mark is at the front
        with pytest.raises(RunError, match="is damaged"):
            read_mark(path)


def test_it_is_written_from_where_the_tensors_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of large models have hundreds of megabytes: no second copy in memory."""
    seen: dict[str, int] = {}

    def save(tensors: dict[str, torch.Tensor], path: Path, metadata: object = None) -> None:
        seen.update({name: t.data_ptr() for name, t in tensors.items()})
        path.write_bytes(b"")

    monkeypatch.setattr("privlora.training.checkpoint.save_file", save)
    save_checkpoint(tmp_path / "c", PARTS, Mark(1, "run", None))
    assert seen == {f"{p}/{name}": t.data_ptr() for p, named in PARTS.items() for name, t in named.items()}


def test_a_disk_without_room_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, PARTS, Mark(1, "run", None))

    def fail(tensors: object, half: Path, metadata: object = None) -> None:
        half.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("privlora.training.checkpoint.save_file", fail)
    with pytest.raises(RunError, match="No space left"):
        save_checkpoint(path, PARTS, Mark(2, "run", None))
    assert [found.name for found in tmp_path.iterdir()] == ["c"]
    assert read_mark(path).step == 1
