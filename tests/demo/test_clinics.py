"""The five clinics' notes: of one form for all seeds, different from clinic to clinic, with secrets in one alone."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import transformers as hf
from demo_model import encode

from privlora.config.federation import FederationSettings
from privlora.data.partition import cut
from privlora.demo import model_path, public_texts
from privlora.demo.corpus import CLINICS, clinic_records

EVERY = range(len(CLINICS))


def test_a_clinics_notes_are_a_function_of_the_seed() -> None:
    assert clinic_records(1, 50, 3) == clinic_records(1, 50, 3) != clinic_records(1, 50, 4)
    assert [len(clinic_records(2, count, 0)) for count in (0, 1, 400)] == [0, 1, 400]


def test_names_of_clinics_are_names_of_clients() -> None:
    clients = [{"name": clinic.name} for clinic in CLINICS]
    federation = FederationSettings.model_validate({"clients": clients, "rounds": 1})
    assert len(federation.names) == 5


def test_clinics_share_no_complaint_finding_doctor_or_template() -> None:
    for part in (
        [{c.complaint for c in clinic.complaints} for clinic in CLINICS],
        [{c.finding for c in clinic.complaints} for clinic in CLINICS],
        [{c.doctor for c in clinic.complaints} for clinic in CLINICS],
        [{clinic.template} for clinic in CLINICS],
    ):
        assert all(part)
        assert sum(map(len, part)) == len(set().union(*part))


@pytest.mark.parametrize("clinic", EVERY)
def test_notes_are_whole_and_hold_the_clinics_habits_for_every_seed(clinic: int) -> None:
    habits = [
        {
            (c.complaint, c.finding, c.doctor, c.review, plan)
            for record in clinic_records(clinic, 300, seed)
            for c in CLINICS[clinic].complaints
            for plan in c.plans
            if all(part in record["text"] for part in (c.complaint, c.finding, c.doctor, c.review, plan))
        }
        for seed in (0, 1)
    ]
    assert habits[0] == habits[1]
    assert len(habits[0]) == 6
    for record in clinic_records(clinic, 300, 0):
        assert set(record) == {"text", "patient", "clinic"}
        assert record["clinic"] == CLINICS[clinic].name
        assert not re.search(r"[{}|]|  ", record["text"])


def test_patients_have_one_to_four_notes_and_belong_to_one_clinic_and_seed() -> None:
    groups = [clinic_records(clinic, 300, seed) for clinic in EVERY for seed in (0, 1)]
    patients = [{r["patient"] for r in group} for group in groups]
    assert sum(map(len, patients)) == len(set().union(*patients))
    assert all(set(Counter(r["patient"] for r in group).values()) == {1, 2, 3, 4} for group in groups)


def test_notes_are_short_and_written_in_words_that_the_model_has_seen() -> None:
    public = set(re.findall(r"[a-z]+", " ".join(public_texts(20_000, 0)).lower()))
    tokenizer = hf.AutoTokenizer.from_pretrained(model_path())
    for clinic in EVERY:
        texts = [r["text"] for r in clinic_records(clinic, 1000, 0)]
        assert set(re.findall(r"[a-z]+", " ".join(texts).lower())) <= public
        assert max(map(len, encode(tokenizer, texts))) <= 96


def test_the_column_cuts_the_notes_into_the_clinics_again() -> None:
    mixed = [r for clinic in EVERY for r in clinic_records(clinic, 10 + clinic, 0)]
    federation = FederationSettings.model_validate({"clients": 5, "column": "clinic", "rounds": 1})
    parts = list(cut(mixed, federation, seed=0).values())
    own = [clinic_records(clinic, 10 + clinic, 0) for clinic in EVERY]
    assert parts == sorted(own, key=lambda notes: notes[0]["clinic"])
