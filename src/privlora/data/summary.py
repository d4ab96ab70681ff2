"""What the private records are, for the eyes of whoever may see them, and whether they can be what was said of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from privlora.data.examples import Examples
from privlora.errors import DataError

_FACTOR = 2.0  # how far the number of units may be from the public one
_MOST = 0.5
_UNCHECKED = "or set data.unchecked=true"


@dataclass(frozen=True)
class DataSummary:
    """Counts and lengths of tokenised records. All of it is private.

    records, units: how many. median_tokens, p95_tokens: of the records before any is cut. cut: share of records
    that max_length shortens. mostly_cut: share that loses more than half of its tokens. empty: share without a word to
    train on. repeated: share that says what an earlier record says. spelled: share that spells control tokens, read as
    text. chunks: into how many all records are divided,
    where they are; the rest is then of chunks.
    """

    records: int
    units: int
    median_tokens: float
    p95_tokens: float
    cut: float
    mostly_cut: float
    empty: float
    repeated: float
    spelled: float = 0.0
    chunks: int | None = None

    def to_dict(self) -> dict[str, float]:
        """JSON-ready, and private."""
        return asdict(self)

    def describe(self, unit: str) -> str:
        """One line. unit: privacy.unit."""
        divided = "" if self.chunks is None else f" in {self.chunks} chunks"
        of_units = "" if self.units == self.records else f" of {self.units} {unit}s"
        shares = {
            "are cut by max_length": self.cut,
            "have nothing to train on": self.empty,
            "repeat an earlier one": self.repeated,
            "spell control tokens, which are read as text": self.spelled,
        }
        told = [f"{share:.1%} {words}" for words, share in shares.items() if share > 0]
        return (
            f"{self.records} records{of_units}{divided}, {self.median_tokens:.0f} tokens each (median; 95 % have at "
            f"most {self.p95_tokens:.0f}); {', '.join(told) or 'none is cut, empty or a repetition'}"
        )


def summarise(examples: Examples, units: int) -> DataSummary:
    """Of at least one example; units: how many privacy units they make."""
    # Eight bytes of each digest, and no set of them: one of a million has more bytes than the tokens.
    said = np.fromiter((int.from_bytes(e.digest[:8], "big") for e in examples), np.uint64, len(examples))
    said.sort()
    whole = examples.lengths + examples.dropped
    return DataSummary(
        records=len(examples) if examples.chunks is None else len(examples.chunks),
        units=units,
        median_tokens=float(np.median(whole)),
        p95_tokens=float(np.quantile(whole, 0.95)),
        cut=float((examples.dropped > 0).mean()),
        mostly_cut=float((examples.dropped > examples.lengths).mean()),
        empty=float(((examples.label_counts == 0) | examples.blank).mean()),
        repeated=float((said[1:] == said[:-1]).sum() / len(examples)),
        spelled=examples.spelled / (len(examples) if examples.chunks is None else len(examples.chunks)),
        chunks=None if examples.chunks is None else len(examples),
    )


def _refuse_far_count(units: int, *, public_units: float, unit: str, at_clients: bool = False) -> None:
    """The part of `refuse_implausible` for which it is enough to count the units."""
    if public_units / _FACTOR <= units <= _FACTOR * public_units:
        return
    whose, where = ("all clients together", "federation.clients") if at_clients else ("the data", "data.path")
    much = "more than twice as many" if units > public_units else "fewer than half as many"
    meant = "" if unit == "record" else f"; with unit={unit} it counts {unit}s, not records"
    raise DataError(
        f"{whose} hold {much} {unit}s as the {public_units:g} that group privacy says (public_dataset_size{meant})",
        why="batches would be as far from the expected size, for which noise and learning rate are chosen",
        fix=f"check {where} and the {unit}s, give the true number, rounded, {_UNCHECKED}",
    )


def refuse_implausible(
    summary: DataSummary, *, public_units: float, unit: str, max_length: int, at_clients: bool = False
) -> None:
    """Raise DataError where the records cannot be what was said of them; it states no number that is private.

    at_clients: the records are those of all clients of a federation, each with files of its own.
    """
    _refuse_far_count(summary.units, public_units=public_units, unit=unit, at_clients=at_clients)
    most = "more than half of the records"
    if summary.empty > _MOST:
        why = "noise and budget would be spent on nothing"
        fix = f"check the columns, loss_on and data.max_length={max_length}, which answers need; remove empty records"
        raise DataError(f"{most} have nothing to train on", why=why, fix=f"{fix}, {_UNCHECKED}")
    if summary.spelled > _MOST:
        what = f"{most} spell control tokens, such as the ends of turns, which are read as text"
        why = "a chat template seems to have rendered them already, whose tokens would be learnt letter by letter"
        fix = "set data.split_special_tokens=false if that is so, give messages themselves as data.messages"
        raise DataError(what, why=why, fix=f"{fix}, {_UNCHECKED}")
    if summary.mostly_cut > _MOST:
        what = f"{most} lose more than half of their tokens to data.max_length={max_length}"
        why = "most of what they say would not be trained on"
        fix = "raise data.max_length, divide long records by data.chunk=true (all chunks of one are one unit)"
        raise DataError(what, why=why, fix=f"{fix}, {_UNCHECKED}")
