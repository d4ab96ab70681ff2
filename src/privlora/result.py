"""What a finished run leaves, as `fine_tune` and `resume_run` give it back, read from the run's own files. Slow imports
wait until they are needed, since `api` is loaded before its arguments are looked at."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privlora.accounting import read_ledger
from privlora.config import kept_settings
from privlora.errors import RunError
from privlora.training.files import RunFolder, read_lines

if TYPE_CHECKING:
    from privlora.reporting.pushing import Pushed


@dataclass(frozen=True)
class Result:
    """What a finished run leaves.

    release: folder that is safe to publish: a plain peft adapter, the privacy report, the card and the ledger. In the
        non-private mode and with repeatable noise, ``not-private`` beside where it would be.
    epsilon, delta: the statement under add-or-remove-one; None in the non-private mode or with repeatable noise.
    profile: PRIVATE trace that shows where the time of a step went, where it was asked for and a step was taken.
    base_was_given: whether the caller handed over a loaded model.
    """

    release: Path
    steps: int
    epsilon: float | None
    delta: float | None
    profile: Path | None = field(default=None, kw_only=True)
    base_was_given: bool = field(default=False, kw_only=True, repr=False)

    @property
    def page(self) -> Path:
        """report.html."""
        from privlora.reporting.seals import HTML_NAME

        return self.release / HTML_NAME

    @property
    def card(self) -> Path:
        """README.md, the model card."""
        from privlora.reporting.seals import CARD_NAME

        return self.release / CARD_NAME

    @property
    def report(self) -> Mapping[str, Any]:
        """privacy_report.json. Raises RunError if it cannot be read."""
        from privlora.reporting.publication import read_report

        return read_report(self._folder.report)

    @cached_property
    def model(self) -> Any:
        """The base model, loaded anew as the run's settings say, with the adapter on it: a peft.PeftModel in evaluation
        mode. It is loaded when it is first asked for, and kept.

        Raises RunError for a release without an adapter, and where the base was a loaded model of the caller's: peft
        would put its layers into that very model.
        """
        folder = self._folder
        if "texts" in self.report:
            raise RunError(
                "this run released texts, and no adapter", fix=f"read them from {str(folder.texts)!r}"
            )
        if self.base_was_given:
            raise RunError(
                "the base model was handed over, and to put the adapter on it changes it",
                fix="PeftModel.from_pretrained(model, result.release) does, and its method unload() undoes it; "
                "for a model of its own give fine_tune a folder or a hub name",
            )
        from privlora.training.base_weights import with_adapter
        from privlora.training.classifier import head_of
        from privlora.training.models import load_model

        settings = kept_settings(folder.settings)
        head = head_of(settings)
        base, _ = load_model(settings.model, head)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks by names that transformers renames
            return with_adapter(base, self.release, head).eval()

    @property
    def history(self) -> list[dict[str, Any]]:
        """Public numbers of the first and last step, of every ``run.log_every``-th and of those that were evaluated,
        from the run's own files, so also after a resume: step, epsilon (after it), learning_rate (of it) and
        held_out_loss (nats, as in evaluations; None where it was not evaluated)."""
        from privlora.training.loggers import rows_of_report, steps_shown

        folder = self._folder
        evaluations = read_lines(folder.evaluations)
        every = kept_settings(folder.settings).run.log_every if folder.settings.exists() else self.steps
        plan = read_ledger(folder.ledger).plan if folder.ledger.exists() else None
        shown = steps_shown(self.steps, every, [row["step"] for row in evaluations])
        return rows_of_report(plan, self.report, shown, evaluations)

    def push(
        self, repo: str, *, private: bool = True, base_model: str | None = None, dry_run: bool = False
    ) -> Pushed:
        """Upload the release, and nothing else; see `privlora.reporting.pushing.push`."""
        from privlora.reporting.pushing import push

        return push(self._folder, repo, private=private, base_model=base_model, dry_run=dry_run)

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.release.parent)
