"""What is read in an answer, by hand, for every form of answer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privlora.evaluation.answers import read_label, read_letter, read_number, read_score

NUMBERS = [
    ("The answer is 18.", 18),
    ("the answer is: 18", 18),
    ("Answer: 18", 18),
    ("The final answer is 18 dollars per day.", 18),
    ("3 + 4 = 7 #### 7", 7),
    ("#### 1,450", 1450),
    ("So he has 5 left.", 5),
    ("He has 5 apples and 12 pears", 12),
    ("72", 72),
    (" 72\n", 72),
    ("She makes 9 * 2 = $18 every day. The answer is 18. The next question has 5 parts.", 18),
    ("The answer is 3 + 4 = 7.", 7),
    ("The answer is 4. No, wait. The answer is 5.", 5),
    ("The answer is unknown, perhaps 9", 9),
    ("We have 8. The answer is not clear.", 8),
    ("The answer is 1,234,567.", 1234567),
    ("$70,000", 70000),
    ("The answer is -$1,200.50.", -1200.5),
    ("The answer is $-12.", -12),
    ("1, 2, 3", 3),
    ("10{,}000", 10000),
    (r"10\,000", 10000),
    ("The answer is -15.", -15),
    ("x = −4", -4),
    ("It is - 3", -3),
    ("16-3", 3),
    ("x=16 - 3", 3),
    ("(2) - 5", 5),
    ("-7", -7),
    ("The answer is 1.833333.", 1.833333),
    ("3.", 3),
    ("costs .5 each", 0.5),
    ("-.25", -0.25),
    ("It weighs 0.001 g", 0.001),
    ("The answer is 145.0", 145),
    ("3/4", 0.75),
    ("The answer is 3/4.", 0.75),
    ("The answer is -1/2.", -0.5),
    ("The answer is 2 1/2 hours.", 2.5),
    ("- 1 1/2", -1.5),
    (r"The answer is \frac{3}{8}.", 0.375),
    (r"\boxed{42}", 42),
    (r"The answer is \boxed{\frac{1}{2}}.", 0.5),
    ("The answer is **12**.", 12),
    ("25%", 25),
    ("The answer is 25 %.", 25),
    ("5kg", 5),
    ("1e3", 1000),
    ("2.5e-3", 0.0025),
    ("The answer is 5e.", 5),
    ("x5", 5),
    ("The answer is:\n\n64", 64),
    ("The answer is 3.5.", 3.5),
    ("on 12/25/2020", 2020),
    ("the ratio is 3 / 4", 0.75),
    ("16 - 3/4", 0.75),
    ("4/0", None),
    ("1e999", None),
    ("no number at all", None),
    ("", None),
    ("The answer is", None),
    ("...", None),
]

LETTERS = [
    ("The answer is E.", "E"),
    ("The answer is (B).", "B"),
    ("the answer is b", "B"),
    ("Answer: D, because this is a trick.", "D"),
    ("Answer: E The answer is E.", "E"),
    ("So, 36 is the multiple of X\nAnswer is A The answer is A.", "A"),
    ("The answer is option C", "C"),
    ("The correct choice is D", "D"),
    ("The answer is: (c)", "C"),
    ("The answer is **B**", "B"),
    (r"The answer is $\boxed{C}$", "C"),
    ("#### A", "A"),
    ("A", "A"),
    ("a", "A"),
    (" (d)\n", "D"),
    ("e.", "E"),
    ("B) 15", "B"),
    ("c) 15", "C"),
    ("I choose (A) and not a car", "A"),
    ("First (A), then (D)", "D"),
    ("It must be B", "B"),
    ("A car needs 5 litres, so C", "C"),
    ("A car needs a wheel", None),
    ("The answer is a car", None),
    ("Dad ate DEED", None),
    ("E's speed", None),
    ("The answer is 36", None),
    ("F", None),
    ("", None),
]

SCORES = [
    (" 4.2", 4.2),
    ("4.2 out of 5", 4.2),
    ("5", 5),
    ("7.5", 5),
    ("-1", 0),
    ("The similarity is 3.0.", 3),
    ("0.0", 0),
    ("1/2", 0.5),
    ("very similar", None),
    ("", None),
]

BINARY, SENTIMENT, THREE = ("no", "yes"), ("negative", "positive"), ("yes", "maybe", "no")
LABELS = [
    (" yes", BINARY, 1),
    ("No.", BINARY, 0),
    ("YES!", BINARY, 1),
    ("yes or no", BINARY, 1),
    ("I know nothing", BINARY, None),
    ("not yes", BINARY, None),
    ("no-one", BINARY, None),
    ("positive", SENTIMENT, 1),
    ("The sentiment is negative", SENTIMENT, 0),
    ("non-negative", SENTIMENT, None),
    ("not positive", SENTIMENT, None),
    ("it isn't positive", SENTIMENT, None),
    ("positively", SENTIMENT, None),
    (" maybe", THREE, 1),
    ("no", THREE, 2),
    ("acceptable", ("unacceptable", "acceptable"), 1),
    ("unacceptable", ("unacceptable", "acceptable"), 0),
    ("not_entailment", ("entailment", "not_entailment"), 1),
    ("", BINARY, None),
]


@pytest.mark.parametrize(("text", "expected"), NUMBERS)
def test_numbers(text: str, expected: float | None) -> None:
    found = read_number(text)
    assert found is expected is None or found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("text", "expected"), LETTERS)
def test_letters(text: str, expected: str | None) -> None:
    assert read_letter(text) == expected


@pytest.mark.parametrize(("text", "expected"), SCORES)
def test_scores(text: str, expected: float | None) -> None:
    assert read_score(text) == expected


@pytest.mark.parametrize(("text", "labels", "expected"), LABELS)
def test_labels(text: str, labels: tuple[str, ...], expected: int | None) -> None:
    assert read_label(text, labels) == expected


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text("0123456789 .,-/+eE$=()#ABab\n\\{}"), st.text("1/ -.")))
def test_any_text_can_be_read(text: str) -> None:
    number, letter, score = read_number(text), read_letter(text), read_score(text)
    assert number is None or math.isfinite(number)
    assert letter is None or letter in "ABCDE"
    assert score is None or 0 <= score <= 5
    assert read_label(text, BINARY) in (None, 0, 1)


@given(
    st.floats(-1e6, 1e6),
    st.sampled_from(["{}", "The answer is {}.", "#### {}", "so x = {} kg", "first 3, then {}"]),
)
def test_a_written_number_is_read_back(value: float, form: str) -> None:
    for shown in (f"{value:.3f}", f"{value:,.3f}"):
        assert read_number(form.format(shown)) == pytest.approx(round(value, 3), abs=1e-9)


def test_long_texts_are_read_quickly() -> None:
    """No pattern backtracks over a whole hallucination."""
    for text in ("1" * 20000, "a " * 20000, "(" * 20000, "1 " * 20000, "1,111" * 5000, "answer is " * 5000):
        read_number(text)
        read_letter(text)
        read_score(text)
        read_label(text, BINARY)
