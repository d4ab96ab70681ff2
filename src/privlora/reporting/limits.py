"""What the privacy statement does not cover, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE
from privlora.reporting.wording import any_cyclic, any_in_bins, any_projected, any_truncated

_USED = "What is sent to the model when it is used: prompts, context and answers."
BASE = (
    "The base model. Whatever it learned before this run is outside this statement: from its pretraining data, or in a "
    "private run that was merged into it. Of records that were in both runs the epsilons add up."
)
CHOICES = (
    "Choices made by looking at the private records: filters, columns, hyper-parameters, the best of several "
    "runs. Each run on the same records has its own cost; the command “privlora budget” adds them up."
)
EVALUATION = (
    "The evaluation records. Losses on them and a few of their prompts are published, so they must be public."
)
SIDE = "Side channels of the training machine, such as how long a step took."
_ALWAYS = (
    BASE,
    "What many records have in common. Differential privacy hides whether one {unit} took part; "
    "it does not hide what the records say together.",
    CHOICES,
    "Settings, prompt templates, the data set's label and its public size: published as they were given.",
    EVALUATION,
    "Everything outside this folder: the training losses and logs that stay with whoever trained.",
    SIDE,
    "{rounding}",
    _USED,
)
CONTINUOUS = (
    "Rounding. Noise is continuous in the proof and floating point in the computer (Mironov 2012); "
    "it is added in double precision, but attacks on the lowest bits are not excluded."
)
_DISCRETE = (
    "Rounding before the noise. Noise is discrete, integers on a lattice, and epsilon is that of integers; but what "
    "one {unit} adds is bounded by the clipping norm in floating point, before it is rounded to the lattice."
)
RECORD = (
    "Other records of the same person. The unit is one record; for whoever contributed k records the "
    "guarantee is weaker, about k times epsilon. Training with users as the unit protects people."
)
CLIENT = (
    "That a client takes part. The unit is all that one client sends, and names of clients are published. People whose "
    "records lie with several clients are in several units."
)
USER = "People who appear in the records of several users. The unit is what the user column says."
OTHER_ADAPTER = (
    "The adapter that training started from. The data that it was trained on is outside this statement."
)
PUBLIC_TEXTS = (
    "The texts that the start was computed from (adapter.public_text). They get no noise and are outside this "
    "statement, so they must be public."
)
WRITTEN = (
    "The generated texts that training leaned on, and what their generator knows. They get no noise and are outside "
    "this statement, so neither they nor the words that asked for them may come from private records."
)
_WRITER = (
    "What the generator knows, and the words that asked it. They get no noise and are outside this statement, so none "
    "of them may come from private records."
)
_INVENTED = (
    "People whom a text seems to speak of. Names and facts are invented, stand in the public file, or come from what "
    "the generator was trained on, and may be true of somebody; the statement is about the records alone."
)
TRUNCATED = (
    "How many {unit}s there are. With a cap on the batch, a {unit} is removed by putting an empty one in its "
    "place (arXiv:2508.15089)."
)


NOISE_KEPT: Final = (
    "While the run went on, its private folder held the noise of its last steps: whoever read or copied it can "
    "subtract that noise from what those steps released."
)
COPIES: Final = (
    "Noise is correlated between steps: had a copy of the run gone on by itself, no bound would cover both."
)
"""Of privacy.bands; the annex names them as risks that remain."""

PROJECTED = (
    "One {unit} replaced by another. The bound for clipping before a random projection is one for adding or removing "
    "a {unit}."
)
IN_BINS = (
    "One {unit} replaced by another. The bound for balls in bins is one for adding or removing a {unit}."
)
DEALT: Final = (
    "Who is drawn when follows from a key in the private folder: whoever read or copied it knows each batch, and had a "
    "copy of the run gone on by itself, no bound would cover both."
)
_ATTENDANCE = (
    "Who was asked, who answered and who dropped out, and which rounds were void. It is published, and a client that "
    "stops because of what its records are would show."
)
_POISON = (
    "The adapter from its clients. Nothing proves that a client sent what it should have; noise hides records, and "
    "does not repair what they teach."
)
SEVERAL_BUDGETS = (
    "Records of one person with several clients. Each client has a budget of its own, and for whoever has a record "
    "with k of them their budgets add up."
)
_SECRET = (
    "Anybody from who knows which clients trained in which round. A trusted server draws them in secret, and epsilon "
    "counts on that: no published file says who, or how many. The server knows, and so does who watches its network."
)
SHARES = (
    "A client from others that know a large part of the noise. The statement counts on {t} clients of every sum that "
    "keep their share to themselves; for each one that does not, epsilon is larger, as the report's table says."
)
KEYS = (
    "Anybody from a server that hands out keys of its own in the place of the clients'. Clients that compared each "
    "other's fingerprints over another channel notice."
)
TRUSTED = (
    "Anything from the server. It sees each client's update before there is noise, and is trusted with it."
)


def not_protected(
    statement: Mapping[str, Any] | None,
    start: str,
    federation: Mapping[str, Any] | None = None,
    *,
    discrete: bool | None = None,
    written: bool = False,
    released: Literal["adapter", "texts"] = "adapter",
) -> list[str]:
    """Sentences for a report; ``statement``, ``start`` (adapter.init) and ``federation`` as in its JSON.

    written: whether texts were generated for the run. released: what the statement is about. discrete: whether noise is
    integers; None: whether clients of ``federation`` share it.
    """
    if statement is None or statement["epsilon"] is None:
        what = "these texts as if they" if released == "texts" else "this adapter as if it"
        return [f"Any training record. Handle {what} were the training records themselves."]
    if discrete is None:
        discrete = federation is not None and federation["noise_by"] == "shares"
    rounding = (_DISCRETE if discrete else CONTINUOUS).format(unit=statement["unit"])
    sentences = [text.format(unit=statement["unit"], rounding=rounding) for text in _ALWAYS]
    sentences.insert(1, {"record": RECORD, "user": USER, "client": CLIENT}[statement["unit"]])
    if any_truncated(statement):
        sentences.append(TRUNCATED.format(unit=statement["unit"]))
    if any_cyclic(statement):
        sentences += [f"What a copy shows. {NOISE_KEPT}", f"Copies of the run. {COPIES}"]
    if any_in_bins(statement):
        sentences += [IN_BINS.format(unit=statement["unit"]), f"Copies of the run. {DEALT}"]
    if any_projected(statement):
        sentences.append(PROJECTED.format(unit=statement["unit"]))
    if start == PUBLIC_GRADIENT:
        sentences.insert(1, PUBLIC_TEXTS)
    elif start not in (RANDOM, W0_SUBSPACE, SPECTRAL_SPLIT):
        sentences.insert(1, OTHER_ADAPTER)
    if released == "texts":
        sentences.remove(_USED)
        sentences.insert(1, _INVENTED)
    if written:
        sentences.insert(1, _WRITER if released == "texts" else WRITTEN)
    return [*_of_federation(statement, federation), *sentences] if federation else sentences


def limits_of(report: Mapping[str, Any]) -> list[str]:
    """Of an ended run, as its report says."""
    texts = "texts" in report
    return not_protected(
        report["statement"],
        report["adapter"]["init"],
        report.get("federation"),
        written=texts or "public_texts" in report["method"],
        released="texts" if texts else "adapter",
    )


def _of_federation(statement: Mapping[str, Any], federation: Mapping[str, Any]) -> list[str]:
    """What several parties leave open; the most specific first."""
    by = federation["noise_by"]
    first = [SHARES.format(t=federation["threshold"]), KEYS] if by == "shares" else []
    first += [TRUSTED] if by == "server" else []
    several = [] if statement["unit"] == "client" or by == "shares" else [SEVERAL_BUDGETS]
    return [*first, *several, _SECRET if by == "server" else _ATTENDANCE, _POISON]
