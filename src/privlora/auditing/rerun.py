"""A run that is trained once more for an audit, with canaries among its records, in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from privlora.auditing.canary_scores import CanaryState, other_sampling, unreadable
from privlora.config import Settings
from privlora.errors import ConfigError, RunError
from privlora.mechanisms import Mechanism
from privlora.rehearsals.settling import settled
from privlora.training.assembly import Parts
from privlora.training.files import AUDIT_MARK, AUDITED, RunFolder, write_atomically
from privlora.training.fitting import in_micro_batches, with_micro_batches
from privlora.training.inputs import Data, check_sources, fitted
from privlora.training.loop import finish_training
from privlora.training.models import check_model, given_or_loaded
from privlora.training.observer import Observer
from privlora.training.promise import plan_privacy
from privlora.training.takeover import make_room

_GO_ON = "give the settings and canaries of that audit, or another folder"
_WARNING = """This run was trained with canaries, to audit the training. Publish nothing of it.

Its ledger counts what its releases would cost: they were computed from the private records.
"""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Rerun:
    """settings: what is trained. asked: what an audit goes on with; how many tokens a micro-batch has may differ."""

    settings: Settings
    asked: Settings
    model: torch.nn.Module
    tokenizer: Any

    @classmethod
    def of(
        cls, settings: Settings, model: torch.nn.Module | None, tokenizer: Any, records: Any, *, usual: bool
    ) -> Rerun:
        """Before any record is read. usual: whether a step takes the memory that is counted for one. Raises what a
        run's own start does, and ConfigError for records to evaluate on."""
        if settings.data.evaluation is not None:
            raise ConfigError("an audit evaluates nothing", fix="set data.evaluation=null for the audit")
        check_sources(settings, records)
        model, tokenizer = given_or_loaded(settings.model, model, tokenizer)
        asked = fitted(settings, model)
        check_model(asked, model, tokenizer)
        settings = settled(asked, model, tokenizer)
        if usual:
            settings, _ = with_micro_batches(settings, model, next(model.parameters()).device)
        else:
            settings = in_micro_batches(settings, settings.run.max_tokens)
        return cls(settings, asked, model, tokenizer)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.settings.run.output))

    @property
    def texts(self) -> Path:
        """What canaries that are texts are, whether they are in or not."""
        return self.folder.private / "canaries.json"

    def open(self, kind: str, canaries: int, plant: Callable[[int], Any]) -> CanaryState:
        """The canaries of this folder: drawn, or those of an audit with the same settings. kind: what they are. plant:
        from their seed, what ``texts`` holds, or None where they are no texts. If it fails, nothing is written.

        An audit with other settings that failed before anything was charged is replaced. Raises RunError where the
        folder holds another run, or nothing can be written.
        """
        folder, kept = self.folder, self.asked.to_yaml()
        state, marked = folder.canaries, folder.release / AUDIT_MARK
        mark = f"{_WARNING}\ncanaries: {canaries} {kind}\n"
        if all(
            path.exists() and path.read_text(encoding="utf-8") == text
            for path, text in ((folder.settings, kept), (marked, mark))
        ):
            return CanaryState.load(state)
        spent = state.exists() and CanaryState.load(state).releases
        if spent or (folder.settings.exists() and not folder.is_audit):
            scored = "its canaries were scored on releases, which must not be forgotten"
            why = scored if spent else "it has no canaries that an audit could go on with"
            raise RunError(f"{str(folder.root)!r} holds another run", why=why, fix=_GO_ON)
        make_room(folder, [state, marked, self.texts], _GO_ON)
        drawn = CanaryState.draw(canaries)
        texts = plant(drawn.seed)
        folder.create(protects=self.settings.privacy.protects)
        write_atomically(folder.release / AUDIT_MARK, mark)
        drawn.save(state)
        if texts is not None:
            write_atomically(self.texts, json.dumps(texts, ensure_ascii=False) + "\n")
        # Last: from here on there is an audit to resume.
        write_atomically(folder.settings, kept)
        return drawn

    def read_texts(self, parse: Callable[[Any], _Found]) -> _Found:
        """What ``parse`` makes of what was planted. Raises RunError for a file that is damaged."""
        try:
            return parse(json.loads(self.texts.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(self.texts, error, "what to look for") from None

    def train(
        self,
        parts: Parts,
        data: Data,
        observer: Observer | None,
        instrument: Callable[[Mechanism], Mechanism] | None = None,
    ) -> None:
        """Take the steps that are left, if any. The ledger says that it is an audit's."""
        plan = None
        if self.settings.privacy.private and not self.folder.has_plan:
            plan = plan_privacy(self.settings, self.model)
            plan = replace(plan, dataset=AUDITED + plan.dataset)
        finish_training(parts, data, self.folder, plan, observer=observer, instrument=instrument)


def refuse_settings(settings: Settings) -> None:
    """Raise ConfigError for settings that no audit by canaries goes with."""
    if settings.privacy.max_batch_size is not None or settings.privacy.sampling != "poisson":
        raise other_sampling()
