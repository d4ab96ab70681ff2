"""Runs by votes: what is charged and released, what survives a kill at any moment, and what such rows refuse."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from promises import promise
from run_cases import Bench, in_a_child
from safetensors.torch import load_file

from privlora.accounting import read_ledger
from privlora.api import Result
from privlora.errors import ConfigError, DataError, GeneratorError, PrivacyError, PrivloraError
from privlora.mechanisms import NoiseSource
from privlora.synthesis.embeddings import hidden_states
from privlora.synthesis.votes import Voters
from privlora.training.files import RunFolder, read_lines
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer, StepReport

ROUNDS, K = 3, 3
RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold.", "who": str(i % 4)} for i in range(12)]
PUBLIC = [{"text": f"visitor {i} left at {i % 7} with a dog."} for i in range(4)]
PRIVACY: dict[str, Any] = promise(steps=ROUNDS, records=12, noise_multiplier=1.0, sample_rate=1.0)
SYNTHESIS: dict[str, Any] = {"seeds": K, "variations": 1, "epochs": 2}

pytestmark = pytest.mark.usefixtures("quick_reports")


class Notes:
    """Texts of its own, whose variations are new ones; counts what it is asked for."""

    def __init__(self, then: Callable[[str, int], None] = lambda what, number: None) -> None:
        self.asked: list[str] = []
        self.then = then

    def random(self, count: int) -> list[str]:
        return self._made("random", [f"note {i}: a patient had a cough" for i in range(count)])

    def vary(self, texts: Sequence[str]) -> list[str]:
        texts = [f"{text[:24]} and {len(self.asked)}{i}" for i, text in enumerate(texts)]
        return self._made("vary", texts)

    def _made(self, what: str, texts: list[str]) -> list[str]:
        self.asked.append(what)
        self.then(what, len(self.asked))
        return texts


class Shop(Bench):
    """Runs by votes on its model."""

    def start(self, output: Path, generator: Notes | None = None, **options: Any) -> Result:
        groups: dict[str, Any] = {
            "records": RECORDS,
            "method": {"name": "aug-pe", "learning_rate": 0.05},
            **options,
            "privacy": {**PRIVACY, **options.get("privacy", {})},
            "synthesis": {**SYNTHESIS, **options.get("synthesis", {})},
        }
        return super().start(output, generator=generator or Notes(), **groups)

    def resume(self, output: Path, generator: Notes | None = None, **options: Any) -> Result:
        return super().resume(output, records=RECORDS, generator=generator or Notes(), **options)


@pytest.fixture(scope="module")
def shop() -> Shop:
    return Shop()


class Watch(Observer):
    def __init__(self, stop_at: int = 0) -> None:
        self.steps: list[StepReport] = []
        self.stop_at = stop_at

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)


def test_each_round_is_charged_once_and_training_costs_nothing(shop: Shop, tmp_path: Path) -> None:
    watch, notes = Watch(), Notes()
    result = shop.start(tmp_path / "run", notes, evaluation=PUBLIC, observer=watch)
    ledger = read_ledger(result.release / "ledger.jsonl")
    assert ledger.closed
    assert ledger.charges == result.steps == ROUNDS
    assert ledger.plan.method == "aug-pe"
    assert (ledger.plan.clip_norm, ledger.plan.expected_batch_size) == (1.0, 12.0)
    assert notes.asked == ["random"] + ["vary"] * (1 + ROUNDS)
    assert [(report.step, report.learning_rate) for report in watch.steps] == [
        (1, None),
        (2, None),
        (3, None),
    ]
    assert [row["step"] for row in read_lines(RunFolder(tmp_path / "run").evaluations)] == [0, ROUNDS]
    weights = torch.cat([t.flatten() for t in _adapter(result.release).values()])
    assert bool(weights.isfinite().all())
    assert any("lora_B" in name and bool(t.any()) for name, t in _adapter(result.release).items())
    # The model is given back, and the private phase trained no gradient.
    assert not (tmp_path / "run/private/training_loss.jsonl").exists()


def _adapter(release: Path) -> dict[str, torch.Tensor]:
    return load_file(release / "adapter_model.safetensors")


def test_a_user_votes_once_with_all_records(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    votes = Voters.votes

    def counted(self: Voters, candidates: np.ndarray) -> Any:
        found = list(votes(self, candidates))
        seen.append(len(found))
        return iter(found)

    monkeypatch.setattr(Voters, "votes", counted)
    result = shop.start(
        tmp_path / "run",
        privacy={
            "unit": "user",
            "user_column": "who",
            "max_records_per_user": 2,
            "public_dataset_size": 4,
            "delta": 1e-2,
        },
    )
    assert seen == [4] * ROUNDS
    assert read_ledger(result.release / "ledger.jsonl").plan.unit == "user"


def test_private_texts_are_embedded_one_by_one(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a record's direction, and with it a vote, would depend on the records beside it."""
    seen: list[list[str]] = []

    def noted(model: Any, tokenizer: Any, texts: Sequence[str], **settings: Any) -> np.ndarray:
        seen.append(list(texts))
        return hidden_states(model, tokenizer, texts, **settings)

    monkeypatch.setattr("privlora.training.assembly.hidden_states", noted)
    shop.start(tmp_path / "run")
    private = {record["text"] for record in RECORDS}
    assert [texts for texts in seen if private.intersection(texts)] == [[text["text"]] for text in RECORDS]
    assert len(seen) == len(RECORDS) + ROUNDS


def test_an_older_ledger_is_refused(shop: Shop, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        shop.start(folder.root, observer=Watch(stop_at=2))
    lines = folder.ledger.read_bytes().splitlines(keepends=True)
    folder.ledger.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(PrivacyError, match="was written after 2"):
        shop.resume(folder.root)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("moment", "charged"),
    [
        ("noise 1", 1),  # charged, and nothing is stored yet: the first texts are written again
        ("noise 2", 2),  # a charge whose release is lost
        ("vary 4", 2),  # the release is stored, its use is not
        ("vary 6", ROUNDS),  # texts beyond the population are being written
        ("figures", ROUNDS),
        ("report", ROUNDS),  # the texts are written, the card is not
    ],
)
def test_kill_9_while_texts_are_made(moment: str, charged: int, shop: Shop, tmp_path: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "noise"
    synthesis = {"publish": True, "samples": 9}
    draw = NoiseSource.standard_normal

    def noted(self: NoiseSource, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = draw(self, shape)
        with open(log, "ab") as file:
            file.write(drawn.numpy().tobytes())
        if log.stat().st_size == 8 * 2 * K * int(moment.split()[-1] if "noise" in moment else -1):
            die()
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseSource, "standard_normal", noted)

        def killed() -> None:
            if moment == "figures":
                patch.setattr("privlora.reporting.texts.text_figures", lambda *_, **__: die())
            if moment == "report":
                patch.setattr("privlora.reporting.texts.write_report", lambda *_: die())
            notes = Notes(lambda what, number: die() if moment == f"{what} {number}" else None)
            shop.start(folder.root, notes, synthesis=synthesis)

        assert in_a_child(killed) == -signal.SIGKILL
        ledger = read_ledger(folder.ledger)
        assert ledger.charges == charged
        shop.resume(folder.root)

    ledger = read_ledger(folder.ledger)
    assert ledger.closed
    assert ledger.charges == ROUNDS
    blocks = np.frombuffer(log.read_bytes()).reshape(-1, 2 * K)
    assert (
        len(blocks) == ROUNDS == len(np.unique(blocks, axis=0))
    )  # no noise is drawn twice, or beyond the plan
    texts = [json.loads(line)["text"] for line in folder.texts.read_text().splitlines()]
    assert len(texts) == len(set(texts)) == 9
    assert not list(folder.root.rglob(".*"))


def test_a_generator_that_dies_charges_nothing_twice(shop: Shop, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")

    def fail(what: str, number: int) -> None:
        if number == 5:  # random, vary of the start, and then one vary a round
            raise OSError("the line is dead")

    with pytest.raises(
        GeneratorError, match=r"generator a Notes, call 5 \(vary, 3 texts\): it raised OSError"
    ):
        shop.start(folder.root, Notes(fail))
    assert read_ledger(folder.ledger).charges == 3
    assert not (folder.release / "adapter_model.safetensors").exists()
    stored = load_file(folder.checkpoint)["ballot/released"]
    notes = Notes()
    result = shop.resume(folder.root, notes)
    assert notes.asked == ["vary"]  # the release is used, which is paid for
    assert read_ledger(folder.ledger).charges == ROUNDS
    assert torch.equal(load_file(folder.checkpoint)["ballot/released"], stored)
    assert (result.release / "adapter_model.safetensors").exists()


def test_an_interruption_says_the_round_and_goes_on(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="after round 2"):
        shop.start(tmp_path / "run", observer=Watch(stop_at=2))
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 2
    watch = Watch()
    shop.resume(tmp_path / "run", observer=watch)
    assert [report.step for report in watch.steps] == [3]


def test_a_crash_in_the_last_training_trains_again_from_the_last_round(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shop.start(tmp_path / "whole", privacy={"insecure_noise_seed": 1})
    with monkeypatch.context() as patch:
        patch.setattr("privlora.training.texts.voting.train_on_texts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shop.start(tmp_path / "run", privacy={"insecure_noise_seed": 1})
    broken = shop.resume(tmp_path / "run")
    for name, weights in _adapter(whole.release).items():
        assert torch.equal(weights, _adapter(broken.release)[name])


def test_an_interruption_while_texts_are_written_keeps_them(shop: Shop, tmp_path: Path) -> None:
    folder, synthesis = RunFolder(tmp_path / "run"), {"publish": True, "samples": 40}

    def stop(what: str, number: int) -> None:
        if number == 6:  # the first call after the last round
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="after text 38"):  # a population of 6, and 32 more
        shop.start(folder.root, Notes(stop), synthesis=synthesis)
    assert not folder.texts.exists()
    told: list[tuple[int, int]] = []

    class Hears(Observer):
        def on_texts(self, done: int, total: int) -> None:
            told.append((done, total))

    notes = Notes()
    shop.resume(folder.root, notes, observer=Hears())
    assert told[-1] == (40, 40)
    assert set(notes.asked) == {"vary"}
    assert len(folder.texts.read_text().splitlines()) == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"privacy": {"clip_norm": 2.0}}, "privacy.clip_norm does not go with method 'aug-pe'"),
        ({"privacy": {"clip_quantile": 0.5}}, "privacy.clip_quantile does not go with"),
        ({"privacy": {"max_batch_size": 12}}, "privacy.max_batch_size does not go with"),
        ({"method": {"name": "aug-pe", "clipping": "flat"}}, "method.clipping does not go with"),
        ({"privacy": {"private": False, "noise_multiplier": None}}, "exact ones are never made"),
        ({"method": {"name": "aug-pe", "optimizer": "sgd"}}, "has no optimizer"),
    ],
)
def test_what_votes_have_not_is_refused(
    options: dict[str, Any], words: str, shop: Shop, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        shop.start(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ([], DataError),
        ([{"text": 3}] * 12, DataError),
        ([{"note": "x"}] * 12, DataError),
        ([{"text": ""}] * 12, DataError),
    ],
)
def test_records_that_cannot_vote(data: Any, kind: type[PrivloraError], shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(kind):
        shop.start(tmp_path / "run", records=data)
    assert not (tmp_path / "run").exists()


def test_one_record_and_texts_without_a_word_vote_like_all_others(shop: Shop, tmp_path: Path) -> None:
    """What is checked against the public numbers may be unchecked; how many vote is nobody's to see."""
    unchecked = {"max_length": 40, "unchecked": True}
    for name, data in (("one", RECORDS[:1]), ("empty", [{"text": ""}, *RECORDS[1:]])):
        result = shop.start(tmp_path / name, records=data, data=unchecked)
        assert read_ledger(result.release / "ledger.jsonl").charges == ROUNDS
