"""What a run keeps of a choice that it left to public texts, and how a report says it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from privlora.errors import PrivacyError, RunError
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder, write_atomically
from privlora.version import __version__

if TYPE_CHECKING:
    from privlora.accounting import Plan
    from privlora.config import Settings


AIM: Final = 0.1
"""Nats a token: what noise alone may cost where signal has yet to come (`noise_alone`)."""

TEXTS: Final = 16
"""That the model writes itself for what is chosen without public records, at most."""

DRAWS: Final = 2
"""Of noise, for each of its rates."""

MOST_RATES: Final = 8

MOST_TURNING: Final = 100.0
"""Beyond which nobody asks how much longer gradients are where V turns."""

_OF_MEDIAN: Final = 0.25
_LEAST_RIGHT: Final = 0.25


@dataclass(frozen=True)
class Chosen:
    """settings: of the run, in which nothing is left open. facts: why, as a report keeps it; all public."""

    settings: Settings
    facts: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The facts, as a run keeps them."""
        return json.dumps(self.facts, indent=1) + "\n"


def clip_norm_of(median: float) -> float:
    """What clips most gradients, where half of them are longer than ``median``; to two digits.

    >>> clip_norm_of(0.8153)
    0.2
    """
    return float(f"{_OF_MEDIAN * median:.2g}")


def right_weight_of(share: float) -> float:
    """How much what turns V counts, where a direction that does has ``share`` of the gradient of one within.

    Where the start knows no more of V than chance does, turning it is worth as much as anything: 1.

    >>> right_weight_of(0.5617), right_weight_of(1.019), right_weight_of(0.1)
    (0.56, 1.0, 0.25)
    """
    return float(f"{min(1.0, max(_LEAST_RIGHT, share)):.2g}")


@contextmanager
def measuring(folder: RunFolder, *of: object) -> Iterator[dict[str, Any]]:
    """What is measured inside for a choice: name -> JSON-ready. An interruption keeps it in private/, and the same run
    begins with it when it is started again. of: all that it follows from, by repr; of others nothing is taken up."""
    bound = sha256(repr((*of, __version__)).encode()).hexdigest()
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(folder.measured.read_text(encoding="utf-8"))
        found |= kept["found"] if kept["of"] == bound else {}
    try:
        yield found
    except KeyboardInterrupt:
        with suppress(OSError, RunError):
            folder.private.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(folder.measured, json.dumps({"of": bound, "found": found}) + "\n")
        raise


def once(found: dict[str, Any], name: str, measure: Callable[[], Any]) -> Any:
    """What was measured under that name, or what ``measure`` finds now, JSON-ready."""
    if name not in found:
        found[name] = measure()
    return found[name]


def cost_on_private(plan: Plan, runs: int) -> dict[str, Any]:
    """Epsilon of ``runs`` runs of the plan that are all looked at, at its delta; None where it is some 500 or more.

    That is what a choice among so many rates costs whoever makes it on private records, by trying each once.
    Nothing for a single one, which leaves no choice, and of a run that states no epsilon.
    """
    if runs < 2 or plan.insecure_noise:
        return {}
    from privlora.accounting import epsilon

    try:
        found = epsilon([*plan.phases] * runs, plan.delta, adjacency=plan.adjacency)
    except PrivacyError:  # so little noise that a number would mean nothing
        found = math.inf
    return {
        "private_runs": runs,
        "private_epsilon": float(rounded_up(found, 2)) if math.isfinite(found) else None,
    }


def because(facts: Mapping[str, Any]) -> str:
    """In a sentence what a run was left to find, and why; facts: of ``Chosen``, or as a report kept them."""
    of, said = "gradients of public records", list[str]()
    if "of_its_own" in facts:
        of = f"gradients of {facts['of_its_own']} texts that it wrote itself"
    if "right_weight" in facts:
        said.append(
            f"right weight {facts['right_weight']:g}, since {of} are {facts['turning']:.3g} times as long in a "
            "direction that turns the adapter's input subspaces as in one within (taken from 0.25 to 1)"
        )
    if "clip_norm" in facts:
        norm = f"a quarter of the median norm of {of}, {facts['median_norm']:.3g}"
        said.append(f"clip norm {facts['clip_norm']:g}, {norm}")
    if "aim" in facts:
        said.append(_why_noise(facts))
    elif "drawn" in facts:
        said.append(_why_rate(facts))
    why = "; and ".join(said)
    if "private_runs" not in facts:  # one alone was tried
        return why
    cost = facts["private_epsilon"]
    found = f"ε = {cost:.2f}" if cost is not None else "an ε of some 500 or more"
    runs = f"{facts['private_runs']} runs on the private records"
    return f"{why}. It cost no ε; the same {runs} would cost {found} together"


def _why_noise(facts: Mapping[str, Any]) -> str:
    taken, *others = facts["rows"]
    others.sort(key=lambda one: float(one["learning_rate"]))

    def rise(row: Mapping[str, Any]) -> float | None:
        return None if row["loss"] is None else row["loss"] - facts["untrained"]

    def rose(row: Mapping[str, Any]) -> str:
        return "not finite" if rise(row) is None else f"{rise(row):.3f}"

    near = (rise(taken) or 0.0) / facts["aim"]
    beside = ", ".join(f"{rose(one)} at {one['learning_rate']:.3g}" for one in others)
    return (
        f"learning rate {taken['learning_rate']:.3g}, at which the run's noise alone, without a record, moves the "
        f"model by {rose(taken)} nats a token on {facts['of_its_own']} texts that it wrote itself; the aim is "
        f"{facts['aim']:g}"
        + ("" if 0.5 < near < 2 else ", which no rate that was tried comes near")
        + (f" ({beside})" if beside else "")
    )


def _why_rate(facts: Mapping[str, Any]) -> str:
    loss, untrained, says_little = facts["rows"][0]["loss"], facts["untrained"], ""
    if loss is None or loss >= untrained:
        says_little = (
            f". No rate did better than no training ({_loss(untrained)}), so these records say little"
        )
    return (
        f"learning rate {facts['rows'][0]['learning_rate']:.3g}, because with {facts['in_place_of_records']} public "
        f"records instead of private ones, for all steps at the run's noise and {facts['drawn']:g} records a step, on "
        f"{facts['held_out']} others {of_rates(facts)}" + says_little
    )


def of_rates(facts: Mapping[str, Any]) -> str:
    """The loss at each rate that was tried, the one that was taken first, and which ones their draws do not tell apart.

    facts: with "rows", "equal_from" and "equal_to".
    """

    def at(row: Mapping[str, Any]) -> str:
        spread = "" if row.get("spread") is None else f" ± {row['spread']:.4f}"
        return f"{_loss(row['loss'])}{spread} at {row['learning_rate']:.3g}"

    best, *others = facts["rows"]
    others.sort(key=lambda one: float(one["learning_rate"]))
    words = f"the loss was {at(best)}" + (f", against {', '.join(map(at, others))}" if others else "")
    low, high = facts.get("equal_from"), facts.get("equal_to")
    if low is None or high is None:
        return words
    words += (
        f" (± the standard deviation of {max(row['draws'] for row in facts['rows'])} draws of batches and noise at "
        "most, which rates have in common); "
    )
    if low == high:
        return f"{words}no other rate is as good within what draws differ by"
    return f"{words}rates {low:.3g} to {high:.3g} are equal within what draws differ by"


def keep_choice(folder: RunFolder, chosen: Chosen | None) -> None:
    """Write how a new run found its settings; None: they were given, and what a start that failed left goes. Raises
    RunError."""
    if chosen is not None:
        write_atomically(folder.choice, chosen.text)
    elif folder.choice.exists():
        folder.choice.unlink()


def read_choice(folder: RunFolder) -> dict[str, Any] | None:
    """The facts that a run kept; None where it chose nothing. Raises RunError if they are damaged, or others than it
    began with."""
    if not folder.choice.exists():
        return None
    from privlora.training.identity import refuse_another_choice  # torch and transformers

    try:
        text = folder.choice.read_bytes().decode("utf-8")
        found = json.loads(text, parse_constant=_no_number)
        because(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{str(folder.choice)!r} is damaged ({type(error).__name__})",
            why="it says how the run found its settings, and the report repeats it",
            fix="restore it, or remove it: the report then does not say",
        ) from None
    refuse_another_choice(folder, text)
    return dict(found)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
