"""An annex differs where the release does, and nowhere else: neighbouring data sets, another hour, another folder."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from promises import promise
from run_cases import PUBLIC, RECORDS, Bench
from test_publication import MORNING, NIGHT, Clock, ruled_by

from privlora.adapters import Captured
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.reporting.filing import file_annex
from privlora.reporting.seals import ANNEX
from privlora.reporting.verifying import verify
from privlora.training import assembly
from privlora.training.files import RunFolder


def filed(
    bench: Bench, root: Path, records: list[dict[str, str]], start: float, *, sums: bool = False
) -> RunFolder:
    """A run that repeats noise, identifier and salts, without the sums of its units unless ``sums``; with its annex."""
    accumulate, noise, salts = GaussianMechanism.accumulate, NoiseSource(7), count()

    def summed(self: GaussianMechanism, captured: Captured) -> None:
        accumulate(self, captured)
        if not sums:
            self.discard()

    with ruled_by(Clock(start)) as patch:
        patch.setattr(GaussianMechanism, "accumulate", summed)
        patch.setattr(assembly, "NoiseSource", lambda seed: noise)
        patch.setattr("privlora.accounting.ledger.uuid.uuid4", lambda: "0" * 8)
        patch.setattr(
            "privlora.accounting.ledger.secrets.token_hex", lambda size: f"{next(salts):0{2 * size}x}"
        )
        privacy = promise(steps=3, records=30, noise_multiplier=1.0, sample_rate=0.2)
        bench.start(root, records=records, privacy=privacy, evaluation=PUBLIC)
        file_annex(RunFolder(root))
    return RunFolder(root)


def content(folder: RunFolder) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.release.iterdir()}


def test_neighbours_have_equal_annexes_where_releases_are(bench: Bench, tmp_path: Path) -> None:
    one = content(filed(bench, tmp_path / "here" / "one", RECORDS, MORNING))
    other = content(filed(bench, tmp_path / "another", RECORDS[1:], NIGHT))
    assert set(ANNEX) <= one.keys()
    assert one == other


def test_the_comparison_would_see_a_record(bench: Bench, tmp_path: Path) -> None:
    runs = [
        filed(bench, tmp_path / name, records, MORNING, sums=True)
        for name, records in (("a", RECORDS), ("b", RECORDS[1:]))
    ]
    one, other = map(content, runs)
    differ = {name for name in one if one[name] != other[name]}
    assert differ >= {"adapter_model.safetensors", *ANNEX}
    assert "ledger.jsonl" not in differ
    assert verify(runs[0].release).passed
