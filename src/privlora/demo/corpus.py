"""The demo's generated data: short public texts, notes of clinics, and canaries with planted secrets.

Nothing is downloaded, words are those of words.yaml, and every function is a pure function of its seed. The public
texts and the private notes share words and grammar but not form: a model pretrained on the former has a real gap,
which fine-tuning on the latter closes. Five clinics differ in what they treat and in how they write: what the notes of
one teach is of little help with another's.

    public_texts     letters, lists, notices, memos …         pretraining of the embedded model
    private_records  one form, what four clinics treat        fine-tuning; by another seed, held-out evaluation
    clinic_records   the notes of one of five clinics         the demos of few records and of a federation
    make_canaries    notes that hold a random access code     what a model must not be able to recite
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from privlora.errors import ConfigError

SECRET_DIGITS = 6


class Complaint(NamedTuple):
    """One kind of visit: what follows the complaint is the clinic's habit, and is learnable. fee: in euros."""

    complaint: str
    doctor: str
    finding: str
    review: str
    fee: int
    details: Sequence[str]
    plans: Sequence[str]


class Clinic(NamedTuple):
    """name: of the client. speciality: for readers. template: of a note. complaints: what its patients come with."""

    name: str
    speciality: str
    template: str
    complaints: Sequence[Complaint]


_LISTS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
_WORDS: dict[str, list[str]] = _LISTS["words"]
CLINICS = [
    Clinic(**{**clinic, "complaints": [Complaint(**habit) for habit in clinic["complaints"]]})
    for clinic in _LISTS["clinics"]
]
COMPLAINTS = [habit for clinic in CLINICS[:-1] for habit in clinic.complaints]
"""Of all clinics but the last, whose complaints and doctors stand in no other text."""
_GENRES = [
    [[alternative.strip() for alternative in line.split("|")] for line in genre.splitlines()]
    for genre in _LISTS["templates"].strip().replace("\n|", " |").split("\n\n")
]
_SLOTS: dict[str, Callable[[random.Random], str]] = {
    "surname": lambda rng: rng.choice(_WORDS["surname"] + _WORDS["canary"]),
    "doctor": lambda rng: rng.choice(COMPLAINTS).doctor,
    "date": lambda rng: f"{rng.randint(1, 28)} {rng.choice(_WORDS['month'])}",  # such as 3 May
    "time": lambda rng: f"{rng.randint(8, 18)}:{rng.choice(('00', '15', '30', '45'))}",
    "money": lambda rng: str(rng.randint(5, 120)),
    "int": lambda rng: str(rng.randint(2, 60)),
    "age": lambda rng: str(rng.randint(18, 90)),
    "dose": lambda rng: str(rng.choice((10, 20, 250, 400, 500))),
    "code": lambda rng: "".join(rng.choice("0123456789") for _ in range(SECRET_DIGITS)),
    "illness": lambda rng: rng.choice(COMPLAINTS).complaint,
    "finding": lambda rng: rng.choice(COMPLAINTS).finding,
    "treatment": lambda rng: rng.choice(rng.choice(COMPLAINTS).plans),
    "worse": lambda rng: rng.choice(rng.choice(COMPLAINTS).details),
}


def _drawn(slot: str, rng: random.Random) -> str:
    return _SLOTS[slot](rng) if slot in _SLOTS else rng.choice(_WORDS[slot])


def public_texts(count: int, seed: int) -> list[str]:
    """`count` short public texts (letters, lists, notices, memos …); none is a clinic note."""
    rng = random.Random(f"public-{seed}")
    return [_public_text(rng) for _ in range(count)]


def _public_text(rng: random.Random) -> str:
    sentences = (rng.choice(alternatives) for alternatives in rng.choice(_GENRES))
    template = " ".join(sentence for sentence in sentences if sentence)
    slots = dict.fromkeys(re.findall(r"{(\w+)}", template))  # each once, in the order of the text
    return template.format_map({slot: _drawn(slot.rstrip("23456789"), rng) for slot in slots})


def private_records(count: int, seed: int) -> list[dict[str, str]]:
    """`count` clinic notes as {"text", "patient"}, in random order; a patient has one to four of them.

    The clinic's habits (complaint -> doctor, finding, plan, review, fee) are the same for every seed, while
    patients, dates and details differ: what a model learned on one seed helps on another if it generalises.
    """
    rng = random.Random(f"private-{seed}")
    form = CLINICS[0].template

    def note(name: str) -> str:
        day = _drawn("date", rng)
        return _note(form, COMPLAINTS, name, rng, day)

    return _notes_of_patients(rng, count, str(seed), note)


def clinic_records(clinic: int, count: int, seed: int) -> list[dict[str, str]]:
    """`count` notes of `CLINICS[clinic]` as {"text", "patient", "clinic"}; a patient has one to four of them.

    Habits and seeds are as in `private_records`. Patients of two clinics or of two seeds are different people, though
    their names may be the same.
    """
    own = CLINICS[clinic]
    rng = random.Random(f"clinic-{own.name}-{seed}")
    records = _notes_of_patients(
        rng, count, f"{own.name}-{seed}", lambda name: _note(own.template, own.complaints, name, rng)
    )
    return [{**record, "clinic": own.name} for record in records]


def _notes_of_patients(
    rng: random.Random, count: int, label: str, note: Callable[[str], str]
) -> list[dict[str, str]]:
    """`count` notes in random order; `note` writes one from the patient's name. Patients are patient-`label`-…"""
    records: list[dict[str, str]] = []
    while len(records) < count:
        name = f"{rng.choice(_WORDS['name'])} {rng.choice(_WORDS['surname'])}"
        patient = f"patient-{label}-{len(records)}"
        for _ in range(min(rng.randint(1, 4), count - len(records))):
            records.append({"text": note(name), "patient": patient})
    rng.shuffle(records)
    return records


def _note(
    template: str, complaints: Sequence[Complaint], name: str, rng: random.Random, day: str | None = None
) -> str:
    visit = rng.choice(complaints)
    return template.format(
        **visit._asdict(),
        name=name,
        date=day or _drawn("date", rng),
        number=_drawn("number", rng),
        unit=rng.choice(("days", "weeks")),
        detail=rng.choice(visit.details),
        plan=rng.choice(visit.plans),
    )


class Canary(NamedTuple):
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
    names = [f"{first} {surname}" for first in _WORDS["name"] for surname in _WORDS["canary"]]
    if not 0 <= count <= len(names):
        raise ConfigError(f"canaries={count} is not between 0 and {len(names)}, the names reserved for them")
    if repetitions < 1 or not 1 <= references < 10**SECRET_DIGITS:
        raise ConfigError(
            f"repetitions={repetitions} or references={references} is out of range", fix="use 1 or more"
        )
    rng = random.Random(f"canaries-{seed}")
    return [_canary(rng, name, repetitions, references) for name in rng.sample(names, count)]


def _canary(rng: random.Random, name: str, repetitions: int, references: int) -> Canary:
    codes = rng.sample(range(10**SECRET_DIGITS), references + 1)
    secret, *others = (f"{code:0{SECRET_DIGITS}d}" for code in codes)
    prefix = f"Clinic note for {name}, access code "
    # As short as can be: the loss is a mean over a note's tokens, so any text beside the secret dilutes it.
    return Canary(f"canary-{name}", prefix, secret, tuple(others), (f"{prefix}{secret}.",) * repetitions)
