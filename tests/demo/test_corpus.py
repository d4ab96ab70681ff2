"""The generated data: reproducible, of the promised form, and with secrets only where they were planted."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from privlora.auditing.exposure import measure_exposure
from privlora.demo.corpus import COMPLAINTS, make_canaries, private_records, public_texts
from privlora.errors import ConfigError


def test_each_generator_is_a_function_of_its_seed() -> None:
    assert public_texts(50, 3) == public_texts(50, 3) != public_texts(50, 4)
    assert private_records(50, 3) == private_records(50, 3) != private_records(50, 4)
    assert [len(private_records(count, 0)) for count in (0, 1, 7, 500)] == [0, 1, 7, 500]
    assert make_canaries(5, 3) == make_canaries(5, 3) != make_canaries(5, 4)


def test_public_texts_are_varied_complete_sentences_and_no_clinic_notes() -> None:
    texts = public_texts(5000, 0)
    assert len(set(texts)) > 4500
    for text in texts:
        assert not re.search(r"[{}|]|  ", text)
        assert text[0].isupper() or text[0].isdigit()
        assert not text.startswith("Clinic note")


def test_public_texts_contain_the_words_of_the_private_notes() -> None:
    public = set(re.findall(r"[a-z]+", " ".join(public_texts(5000, 0)).lower()))
    private = set(re.findall(r"[a-z]+", " ".join(r["text"] for r in private_records(2000, 0)).lower()))
    assert private <= public


def test_a_patient_has_one_name_and_one_to_four_notes() -> None:
    records = private_records(1000, 0)
    names: dict[str, set[str]] = {}
    for record in records:
        name = re.match(r"Clinic note for (\w+ \w+), \d+ [A-Z]\w+: ", record["text"])
        assert name, record["text"]
        names.setdefault(record["patient"], set()).add(name[1])
    assert all(len(of_patient) == 1 for of_patient in names.values())
    assert set(Counter(record["patient"] for record in records).values()) == {1, 2, 3, 4}


def test_the_clinic_has_habits_that_another_seed_shares() -> None:
    habit = re.compile(r"Seen by (.+?)\. (.+?)\. Plan: (.+?)\. Follow up in (.+?)\. Fee (\d+)")
    seen = [{habit.search(r["text"]).groups() for r in private_records(2000, seed)} for seed in (0, 1)]
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2 * len(COMPLAINTS)  # two plans for each complaint


def test_another_seed_has_other_patients() -> None:
    train, held_out = ({r["patient"] for r in private_records(300, seed)} for seed in (0, 1))
    assert not train & held_out


def test_a_canary_is_one_patient_whose_notes_all_begin_with_the_secret() -> None:
    for canary in make_canaries(20, 0, repetitions=3, references=63):
        assert re.fullmatch(r"\d{6}", canary.secret)
        assert len(set(canary.references)) == 63
        assert canary.secret not in canary.references
        assert len(canary.texts) == 3
        assert all(text.startswith(canary.prefix + canary.secret) for text in canary.texts)
        assert {record["patient"] for record in canary.records()} == {canary.patient}
        assert [record["text"] for record in canary.records()] == list(canary.texts)


def test_canaries_share_neither_patients_nor_names_nor_secrets_with_anyone() -> None:
    canaries = make_canaries(20, 0)
    notes = " ".join(record["text"] for seed in (0, 1) for record in private_records(2000, seed))
    assert len({canary.prefix for canary in canaries}) == len({canary.secret for canary in canaries}) == 20
    assert not {c.patient for c in canaries} & {r["patient"] for r in private_records(2000, 0)}
    for canary in canaries:
        assert canary.prefix.split(",")[0] not in notes
        assert canary.secret not in notes


def test_secrets_are_uniform_over_the_digits() -> None:
    digits = Counter("".join(canary.secret for canary in make_canaries(900, 0, references=1)))
    expected = 900 * 6 / 10
    assert (
        sum((digits[digit] - expected) ** 2 / expected for digit in "0123456789") < 27.9
    )  # chi2(9), p = 0.001


def test_a_canary_can_be_measured() -> None:
    report = measure_exposure(make_canaries(3, 0), lambda prefix, candidates: range(len(candidates), 0, -1))
    assert report.mean == report.ceiling == 8.0


@pytest.mark.parametrize("arguments", [{"count": -1}, {"count": 10_000}])
def test_impossible_numbers_of_canaries_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="names reserved"):
        make_canaries(**arguments, seed=0)


@pytest.mark.parametrize("arguments", [{"repetitions": 0}, {"references": 0}, {"references": 10**6}])
def test_impossible_canaries_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        make_canaries(1, 0, **arguments)
