"""Five clinics whose notes differ in what they treat and in how they write, for the demo of federated training.

The notes are made of the words of `words`, whose complaints four of the clinics share out by doctor, and of a fifth
clinic's own. What one clinic's notes teach is of little help with another's; all five together teach all five forms.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from privlora.demo import words
from privlora.demo.corpus import date, notes_of_patients
from privlora.errors import ConfigError

_ACCIDENTS = (
    words.Complaint(
        "a broken arm",
        ("after a fall", "on the stairs", "in the workshop"),
        "Dr Stone",
        "Arm tender",
        ("bandages for 6 weeks", "paracetamol 500 mg and no lifting"),
        "6 weeks",
        55,
    ),
    words.Complaint(
        "a cut knee",
        ("on the wet stairs", "in the garden", "at school"),
        "Dr Stone",
        "Knee red",
        ("clean bandages every day", "rest and a walking stick"),
        "1 week",
        40,
    ),
    words.Complaint(
        "a sore arm",
        ("after lifting chairs", "when running", "worse at night"),
        "Dr Stone",
        "Arm warm with swelling",
        ("cold gel twice a day", "no lifting for 2 weeks"),
        "2 weeks",
        45,
    ),
)


@dataclass(frozen=True)
class Clinic:
    """name: of the client. speciality: for readers. template: of a note. complaints: what its patients come with."""

    name: str
    speciality: str
    template: str
    complaints: tuple[words.Complaint, ...]


def _of_doctor(doctor: str) -> tuple[words.Complaint, ...]:
    return tuple(complaint for complaint in words.COMPLAINTS if complaint.doctor == doctor)


CLINICS = (
    Clinic(
        "hillside",
        "joints and backs",
        "Clinic note for {name}, {date}: {complaint} for {number} {unit}, {detail}. Seen by {doctor}. {finding}. "
        "Plan: {plan}. Follow up in {review}. Fee {fee} euros.",
        _of_doctor("Dr Varga"),
    ),
    Clinic(
        "harbour",
        "lungs and throats",
        "{date}: {name} has {complaint}, {detail}, since {number} {unit}. {doctor}: {finding}. Take {plan}. "
        "Come again after {review}. Cost {fee} euros.",
        _of_doctor("Dr Osei"),
    ),
    Clinic(
        "station",
        "nerves and sleep",
        "Dear {doctor}, please see {name} about {complaint}, {number} {unit}, {detail}. On {date}: {finding}. "
        "The plan is {plan}, next visit in {review}, {fee} euros.",
        _of_doctor("Dr Lindt"),
    ),
    Clinic(
        "market",
        "skin and stomachs",
        "{name}, {date}, paid {fee} euros. Found: {finding}. {complaint} ({number} {unit}), {detail}. "
        "To do: {plan}. Meet {doctor} in {review}.",
        _of_doctor("Dr Sorel"),
    ),
    Clinic(
        "riverside",
        "accidents",
        "Patient card of {name}. {finding}, {complaint}, {detail}, {number} {unit} before {date}. "
        "Order: {plan}. {doctor} again in {review}. Fee of {fee} euros.",
        _ACCIDENTS,
    ),
)


def clinic_records(clinic: int, count: int, seed: int) -> list[dict[str, str]]:
    """`count` notes of `CLINICS[clinic]` as {"text", "patient", "clinic"}; a patient has one to four of them.

    A clinic's habits are the same for every seed, while patients, dates and details differ, as in `private_records`.
    Patients of two clinics or of two seeds are different people, though their names may be the same. Raises ConfigError
    where there is no such clinic.
    """
    chosen = _find(clinic)
    rng = random.Random(f"clinic-{chosen.name}-{seed}")
    records = notes_of_patients(rng, count, f"{chosen.name}-{seed}", lambda name: _note(chosen, name, rng))
    return [{**record, "clinic": chosen.name} for record in records]


def _find(clinic: int) -> Clinic:
    if not 0 <= clinic < len(CLINICS):
        raise ConfigError(f"clinic={clinic} is not between 0 and {len(CLINICS) - 1}")
    return CLINICS[clinic]


def _note(clinic: Clinic, name: str, rng: random.Random) -> str:
    visit = rng.choice(clinic.complaints)
    return clinic.template.format(
        name=name,
        date=date(rng),
        number=rng.choice(words.NUMBERS),
        unit=rng.choice(("days", "weeks")),
        complaint=visit.complaint,
        detail=rng.choice(visit.details),
        doctor=visit.doctor,
        finding=visit.finding,
        plan=rng.choice(visit.plans),
        review=visit.review,
        fee=visit.fee,
    )
