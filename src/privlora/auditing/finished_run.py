"""What a finished run gives away about records that one names: planted secrets, and members among non-members.

Everything is measured twice, on the base model and with the run's adapter: only the difference is the training's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from privlora.accounting import read_ledger
from privlora.accounting.accountants import Events
from privlora.auditing.asked import settings_of_finished
from privlora.auditing.bounds import Floats, one_run_epsilon
from privlora.auditing.exposure import greedy_extraction, log_likelihood_scorer, measure_exposure
from privlora.auditing.membership import MembershipResult, judge_membership
from privlora.auditing.text_canaries import record_losses
from privlora.data.examples import Examples
from privlora.data.records import load_records, text_of
from privlora.errors import DataError
from privlora.precision import own_context
from privlora.training.base_weights import with_adapter
from privlora.training.files import RunFolder
from privlora.training.inputs import tokenise
from privlora.training.models import load_model

_GUESSED = 0.2  # of the records; chosen before any score was seen
_DELTA = 1e-5  # of the bound, for a run that claims nothing


@dataclass(frozen=True)
class Secret:
    """A secret that stood in the training data after ``prefix``, and others from its distribution that did not."""

    prefix: str
    secret: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Leakage:
    """Planted secrets: mean exposure in bits, and how many of them greedy decoding completes from their prefix."""

    exposure: float
    chance: float
    ceiling: float
    extracted: int
    secrets: int


@dataclass(frozen=True, kw_only=True)
class Membership(MembershipResult):
    """Members against non-members by loss.

    epsilon_lower: by the bound for one run; it holds where a fair coin decided for each record of either file whether
    it was trained on. epsilon_most: what it could have been at most, had all guesses been right. correct of guesses:
    what it is made from. scores: of members and of non-members, the higher the more like a member.
    """

    epsilon_lower: float
    epsilon_most: float
    correct: int
    guesses: int
    scores: tuple[Floats, Floats]

    def to_dict(self) -> dict[str, Any]:
        """Without the scores of single records."""
        return {name: value for name, value in asdict(self).items() if name != "scores"}


@dataclass(frozen=True)
class FinishedAudit:
    """epsilon_claimed: what the run claims at delta, None for a run without a statement. leakage, membership: of the
    stages "before" and "after"; None where they were not asked for."""

    run: str
    model: str
    method: str
    epsilon_claimed: float | None
    delta: float
    confidence: float
    unit: str
    events: Events | None
    leakage: dict[str, Leakage] | None
    membership: dict[str, Membership] | None
    page: ClassVar[str] = "run"

    @property
    def curves(self) -> dict[str, tuple[Floats, Floats]]:
        """Scores of members and of non-members, of each stage."""
        return {stage: each.scores for stage, each in (self.membership or {}).items()}

    @property
    def _after(self) -> Membership | None:
        return (self.membership or {}).get("after")

    @property
    def epsilon_lower(self) -> float:
        """By guesses about members, 0 without any."""
        return self._after.epsilon_lower if self._after else 0.0

    @property
    def epsilon_most(self) -> float | None:
        """What guesses about members could have shown at most; None where they could have refuted the claim."""
        most = self._after.epsilon_most if self._after else math.inf
        return most if most < (self.epsilon_claimed or 0.0) else None

    @property
    def guessed(self) -> str:
        return f"{2 * min(self._after.members, self._after.non_members) if self._after else 0} records"

    @property
    def violated(self) -> bool:
        """The run gave away more than it claims."""
        return self.epsilon_claimed is not None and self.epsilon_lower > self.epsilon_claimed

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; facts about private records."""
        plain = ("run", "model", "method", "delta", "confidence", "unit", "epsilon_most", "violated")
        return {
            **{name: getattr(self, name) for name in plain},
            "epsilon": self.epsilon_claimed,
            "secrets": self.leakage and {stage: asdict(x) for stage, x in self.leakage.items()},
            "membership": self.membership and {stage: x.to_dict() for stage, x in self.membership.items()},
        }


def _read_secrets(path: str) -> list[Secret]:
    """JSONL of {"prefix": …, "secret": …, "references": […, …]}. Raises DataError, which shows no content."""
    secrets = []
    for number, record in enumerate(load_records(path, format="jsonl"), start=1):
        references = record.get("references")
        if not isinstance(references, list) or not all(isinstance(text, str) for text in references):
            fix = 'write {"prefix": "…", "secret": "…", "references": ["…", "…"]} on each line'
            raise DataError(f"{path}, secret {number}: references is not a list of texts", fix=fix)
        prefix, secret = (text_of(record, column, number) for column in ("prefix", "secret"))
        secrets.append(Secret(prefix, secret, tuple(references)))
    return secrets


@own_context()
def audit_finished(
    root: str | Path,
    *,
    secrets: str | None = None,
    members: str | None = None,
    non_members: str | None = None,
    limit: int | None = None,
    confidence: float = 0.95,
    on_stage: Callable[[str], None] = lambda name: None,
) -> FinishedAudit:
    """Audit the run in ``root`` with the given files; ``members`` and ``non_members`` go together.

    members, non_members: records in the columns of the run's own data, one a privacy unit. limit: use the first so many
    of each. on_stage: told what begins.

    Raises ConfigError if nothing is given to audit with, RunError for a run without an adapter, DataError for files
    that cannot be used.
    """
    settings = settings_of_finished(root, secrets=secrets, members=members, non_members=non_members)
    folder = RunFolder(Path(root))
    # A member is one record, with one loss.
    data = settings.data.model_copy(update={"chunk": False})
    summary = read_ledger(folder.ledger) if settings.privacy.private else None
    delta = summary.plan.delta if summary is not None else _DELTA
    stated = None if summary is None or summary.plan.insecure_noise else summary
    planted = _read_secrets(secrets) if secrets is not None else None
    on_stage("loading the model")
    model, tokenizer = load_model(settings.model)
    examples = None
    if members is not None and non_members is not None:
        on_stage("reading the records")
        records = [load_records(path, format=data.format, limit=limit) for path in (members, non_members)]
        examples = [tokenise(each, data, tokenizer) for each in records]
        _refuse_shared(*examples)
    leakage: dict[str, Leakage] = {}
    losses: dict[str, list[Floats]] = {}
    for stage, read in (("before", "the base model"), ("after", "the adapter")):
        if stage == "after":
            model = with_adapter(model, folder.release)
        if planted is not None:
            on_stage(f"secrets under {read}")
            report = measure_exposure(planted, log_likelihood_scorer(model, tokenizer))
            extracted = sum(greedy_extraction(model, tokenizer, planted))
            leakage[stage] = Leakage(**report.to_dict(), extracted=extracted, secrets=len(planted))
        if examples is not None:
            on_stage(f"members under {read}")
            losses[stage] = [record_losses(model, each) for each in examples]
    membership = None
    if losses:  # the loss itself before the training, and how much it fell after
        before = [-each for each in losses["before"]]
        fall = [one - other for one, other in zip(*losses.values(), strict=True)]
        scores = {"before": before, "after": fall}
        membership = {stage: _judge(each[0], each[1], delta, confidence) for stage, each in scores.items()}
    return FinishedAudit(
        run=str(root),
        model=settings.model.name,
        method=settings.method.name,
        epsilon_claimed=None if stated is None else stated.epsilon(),
        delta=delta,
        confidence=confidence,
        unit=settings.privacy.unit,
        events=None if stated is None else stated.events(),
        leakage=leakage or None,
        membership=membership,
    )


def _refuse_shared(members: Examples, non_members: Examples) -> None:
    if {one.digest for one in members} & {one.digest for one in non_members}:
        what = "--members and --non-members hold the same records, as the model reads them"
        raise DataError(what, fix="give records that took part, and others of their kind that did not")


def _judge(members: Floats, non_members: Floats, delta: float, confidence: float) -> Membership:
    each = min(len(members), len(non_members))  # a fair coin gives as many of either
    scores = np.concatenate([members[:each], non_members[:each]])
    half = max(1, round(_GUESSED * each))
    order = np.argsort(scores, kind="stable")
    correct = int((order[-half:] < each).sum() + (order[:half] >= each).sum())
    guesses = 2 * half
    return Membership(
        **vars(judge_membership(members, non_members, confidence=confidence)),
        epsilon_lower=one_run_epsilon(correct, guesses, 2 * each, delta, confidence),
        epsilon_most=one_run_epsilon(guesses, guesses, 2 * each, delta, confidence),
        correct=correct,
        guesses=guesses,
        scores=(members, non_members),
    )
