"""The demo's generated data: short public texts, a clinic's private notes, and canaries with planted secrets.

Nothing is downloaded and every function is a pure function of its seed. The public texts and the private
notes share words and grammar but not form: a model pretrained on the former has a real gap, which fine-tuning
on the latter closes.

    public_texts     letters, lists, notices, memos …        pretraining of the embedded model
    private_records  the clinic's notes                      fine-tuning; by another seed, held-out evaluation
    make_canaries    notes that hold a random access code    what a model must not be able to recite
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from privlora.demo import words
from privlora.demo.templates import GENRES
from privlora.errors import ConfigError

SECRET_DIGITS = 6


def date(rng: random.Random) -> str:
    """A day of the year, such as 3 May."""
    return f"{rng.randint(1, 28)} {rng.choice(words.MONTHS)}"


def _code(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(SECRET_DIGITS))


_SLOTS: dict[str, Callable[[random.Random], str]] = {
    "name": lambda rng: rng.choice(words.FIRST_NAMES),
    "surname": lambda rng: rng.choice(words.SURNAMES + words.CANARY_SURNAMES),
    "title": lambda rng: rng.choice(("Mr", "Ms", "Dr")),
    "doctor": lambda rng: rng.choice(words.COMPLAINTS).doctor,
    "weekday": lambda rng: rng.choice(words.DAYS),
    "month": lambda rng: rng.choice(words.MONTHS),
    "date": date,
    "time": lambda rng: f"{rng.randint(8, 18)}:{rng.choice(('00', '15', '30', '45'))}",
    "daytime": lambda rng: rng.choice(("morning", "afternoon", "evening")),
    "money": lambda rng: str(rng.randint(5, 120)),
    "int": lambda rng: str(rng.randint(2, 60)),
    "age": lambda rng: str(rng.randint(18, 90)),
    "dose": lambda rng: str(rng.choice((10, 20, 250, 400, 500))),
    "number": lambda rng: rng.choice(words.NUMBERS),
    "code": _code,
    "drug": lambda rng: rng.choice(words.DRUGS),
    "illness": lambda rng: rng.choice(words.COMPLAINTS).complaint,
    "finding": lambda rng: rng.choice(words.COMPLAINTS).finding,
    "treatment": lambda rng: rng.choice(rng.choice(words.COMPLAINTS).plans),
    "worse": lambda rng: rng.choice(rng.choice(words.COMPLAINTS).details),
    "room": lambda rng: rng.choice(words.ROOMS),
    "topic": lambda rng: rng.choice(words.TOPICS),
    "goods": lambda rng: rng.choice(words.GOODS),
    "colour": lambda rng: rng.choice(words.COLOURS),
    "repair": lambda rng: rng.choice(words.REPAIRS),
    "street": lambda rng: rng.choice(words.STREETS),
    "shop": lambda rng: rng.choice(words.SHOPS),
    "food": lambda rng: rng.choice(words.FOODS),
    "dish": lambda rng: rng.choice(words.DISHES),
    "plant": lambda rng: rng.choice(words.PLANTS),
    "weather": lambda rng: rng.choice(words.WEATHER),
    "lost": lambda rng: rng.choice(words.LOST),
}


def public_texts(count: int, seed: int) -> list[str]:
    """`count` short public texts (letters, lists, notices, memos …); none is a clinic note."""
    rng = random.Random(f"public-{seed}")
    return [_public_text(rng) for _ in range(count)]


def _public_text(rng: random.Random) -> str:
    sentences = (rng.choice(alternatives) for alternatives in rng.choice(GENRES))
    template = " ".join(sentence for sentence in sentences if sentence)
    drawn: dict[str, str] = {}
    for slot in re.findall(r"{(\w+)}", template):
        if slot not in drawn:
            drawn[slot] = _SLOTS[slot.rstrip("23456789")](rng)
    return template.format_map(drawn)


def private_records(count: int, seed: int) -> list[dict[str, str]]:
    """`count` clinic notes as {"text", "patient"}, in random order; a patient has one to four of them.

    The clinic's habits (complaint -> doctor, finding, plan, review, fee) are the same for every seed, while
    patients, dates and details differ: what a model learned on one seed helps on another if it generalises.
    """
    rng = random.Random(f"private-{seed}")
    return notes_of_patients(
        rng, count, str(seed), lambda name: f"{_opening(name)}{date(rng)}: {_visit(rng)}"
    )


def notes_of_patients(
    rng: random.Random, count: int, label: str, note: Callable[[str], str]
) -> list[dict[str, str]]:
    """`count` notes as {"text", "patient"}, in random order; `note` writes one from the patient's name.

    Patients are called patient-`label`-… and have one to four notes each.
    """
    records: list[dict[str, str]] = []
    while len(records) < count:
        name = f"{rng.choice(words.FIRST_NAMES)} {rng.choice(words.SURNAMES)}"
        patient = f"patient-{label}-{len(records)}"
        for _ in range(min(rng.randint(1, 4), count - len(records))):
            records.append({"text": note(name), "patient": patient})
    rng.shuffle(records)
    return records


def _opening(name: str) -> str:
    return f"Clinic note for {name}, "


def _visit(rng: random.Random) -> str:
    visit = rng.choice(words.COMPLAINTS)
    return (
        f"{visit.complaint} for {rng.choice(words.NUMBERS)} {rng.choice(('days', 'weeks'))}, "
        f"{rng.choice(visit.details)}. Seen by {visit.doctor}. {visit.finding}. "
        f"Plan: {rng.choice(visit.plans)}. Follow up in {visit.review}. Fee {visit.fee} euros."
    )


@dataclass(frozen=True)
class Canary:
    """One invented patient whose notes hold a secret access code, drawn uniformly from 10^6 possible ones.

    Each of the patient's `texts` begins with `prefix + secret`. `references` are other codes from the same
    distribution, in none of these texts: `privlora.auditing.exposure` ranks the secret among them.
    """

    patient: str
    prefix: str
    secret: str
    references: tuple[str, ...]
    texts: tuple[str, ...]

    def records(self) -> list[dict[str, str]]:
        """The patient's notes, in the form of `private_records`."""
        return [{"text": text, "patient": self.patient} for text in self.texts]


def make_canaries(count: int, seed: int, *, repetitions: int = 8, references: int = 255) -> list[Canary]:
    """`count` canaries, each with its secret in `repetitions` equal notes of one patient, never of two.

    With R `references`, exposure lies between 0 and log2(R + 1) bits. Raises ConfigError where there are more
    canaries than reserved names, and where `repetitions` or `references` is out of range.
    """
    names = [f"{first} {surname}" for first in words.FIRST_NAMES for surname in words.CANARY_SURNAMES]
    if not 0 <= count <= len(names):
        raise ConfigError(
            f"canaries={count} is not between 0 and {len(names)}, the number of names reserved for them"
        )
    if repetitions < 1 or not 1 <= references < 10**SECRET_DIGITS:
        raise ConfigError(
            f"repetitions={repetitions} or references={references} is out of range", fix="use 1 or more"
        )
    rng = random.Random(f"canaries-{seed}")
    return [_canary(rng, name, repetitions, references) for name in rng.sample(names, count)]


def _canary(rng: random.Random, name: str, repetitions: int, references: int) -> Canary:
    secret, *others = (
        f"{code:0{SECRET_DIGITS}d}" for code in rng.sample(range(10**SECRET_DIGITS), references + 1)
    )
    prefix = f"{_opening(name)}access code "
    # As short as can be: the loss is a mean over a note's tokens, so any text beside the secret dilutes it.
    texts = (f"{prefix}{secret}.",) * repetitions
    return Canary(f"canary-{name}", prefix, secret, tuple(others), texts)
