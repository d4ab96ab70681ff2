"""What a generated text answers: a label, a score, a number or a letter; None where nothing can be read.

All look for a conclusion first ("The answer is 18.", "#### 18") and then for the last candidate, which LLM-Adapters
(Hu et al. 2023) takes at once. STS-B's scores and labels are the first candidate, since their answers come at once.
"""

from __future__ import annotations

import re

_CONCLUSION = re.compile(r"(?:\banswer\s*(?:is\b|[:=])|\bchoice\s+is\b|####)[\s:=]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?;](?=\s|$)")

# An optional minus that is no subtraction; then a mixed number, a fraction, or a decimal with an exponent.
_SIGN = r"(?:(?<![\w.)])-\s?)?"
_NUMBER = re.compile(
    rf"(?P<mixed>{_SIGN}(?<![\d.])\d+\s+\d+/\d+)(?![\d/])"
    rf"|(?P<fraction>{_SIGN}(?<![\d./])\d+\s?/\s?\d+)(?!/?\d|\.\d)"
    rf"|(?P<plain>{_SIGN}(?:\d+\.?\d*|(?<!\d)\.\d+)(?:[eE][+-]?\d+\b)?)"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|(?<=\d)\\,(?=\d{3}(?!\d))|(?<=\d)\{,\}(?=\d{3}(?!\d))")
_SUBTRACTION = re.compile(r"(?<=[\d)])(?: - |-)(?=\.?\d)")
_CURRENCY = re.compile(r"(?<=-)\\?[$€£]\s?")

# A letter alone: not part of a word or a number, and no "a" of "a car" or "A car".
_LETTER = r"(?<![\w'’])[(\[{*]{0,3}(?P<letter>[A-E])[)\]}*]{0,3}(?![\w'’])"
_ANY_LETTER = r"(?<![\w'’])[(\[{*]{0,3}(?P<letter>[A-Ea-e])[)\]}*]{0,3}(?![\w'’])"
_NO_ARTICLE = r"(?!(?<=[Aa])\s+[a-z])"


def read_number(text: str) -> float | None:
    """The number that a solution ends in: after the last conclusion if it states one, else the last number.

    Understands 1,234 (also LaTeX's), -5, .5, 3/4, 2 1/2, \\frac{3}{4}, 1e3, and units or currency around them.
    ``16-3`` is a subtraction: it reads as 3.
    """
    text = _LATEX_FRACTION.sub(r"\1/\2", text.replace("−", "-").replace("–", "-"))
    text = _SUBTRACTION.sub(" | ", _CURRENCY.sub("", _THOUSANDS.sub("", text)))
    *_, conclusion = [None, *_CONCLUSION.finditer(text)]
    if conclusion is not None:
        stated = _SENTENCE_END.split(text[conclusion.end() :], maxsplit=1)[0]
        first = _NUMBER.search(stated.rpartition("=")[2]) or _NUMBER.search(stated)
        if first is not None:
            return _value(first)
    *_, last = [None, *_NUMBER.finditer(text)]
    return _value(last) if last is not None else None


def _value(found: re.Match[str]) -> float | None:
    shown = re.sub(r"(?<=-)\s", "", found[0])
    sign = -1.0 if shown.startswith("-") else 1.0
    *whole, last = shown.lstrip("-").split() if found["mixed"] else [shown.lstrip("-")]
    numerator, _, denominator = last.partition("/")
    if denominator and float(denominator) == 0:
        return None
    value = sign * (sum(map(float, whole)) + float(numerator) / float(denominator or 1))
    return value if abs(value) < float("inf") else None


def read_letter(text: str) -> str | None:
    """The choice from A to E that a solution ends in, upper case.

    In this order: right after the last conclusion ("answer is (B)"), alone in the text, the last in brackets or
    before one, the last capital that stands alone. The article "a" is no choice.
    """
    *_, conclusion = [None, *_CONCLUSION.finditer(text)]
    if conclusion is not None:
        stated = re.sub(
            r"^(?:option|choice|\\boxed|[\s$*({\[:\"'“])+", "", text[conclusion.end() :], flags=re.I
        )
        found = re.match(_ANY_LETTER + r"(?!(?<=a)\s+\w)", stated)
        if found is not None:
            return found["letter"].upper()
    alone = re.fullmatch(rf"[\s\"'$]*{_ANY_LETTER}[\s.:,!\"'$]*", text)
    if alone is not None:
        return alone["letter"].upper()
    for pattern in (r"(?<![\w'’])\(?(?P<letter>[A-Ea-e])\)", _LETTER + _NO_ARTICLE):
        *_, last = [None, *re.finditer(pattern, text)]
        if last is not None:
            return last["letter"].upper()
    return None


def as_llm_adapters(text: str, *, letter: bool) -> float | str | None:
    """What LLM-Adapters (Hu et al. 2023) read: the last number, with its sign and without commas; the first of A to E.

    >>> as_llm_adapters("The answer is 18. He has 5 left.", letter=False), as_llm_adapters("16-3", letter=False)
    (5.0, -3.0)
    """
    if letter:
        choice = re.search("[A-E]", text)
        return None if choice is None else choice[0]
    numbers = re.findall(r"-?\d+\.?\d*", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def read_score(text: str) -> float | None:
    """The first number, clipped to [0, 5] (STS-B)."""
    found = _NUMBER.search(_THOUSANDS.sub("", text.replace("−", "-")))
    value = _value(found) if found is not None else None
    return None if value is None else min(5.0, max(0.0, value))


def read_label(text: str, labels: tuple[str, ...]) -> int | None:
    """The index of the label whose word comes first in the text, whole and in any case; "not positive" is none."""
    words = "|".join(re.escape(label) for label in labels)
    found = re.search(rf"(?<![\w-])(?P<label>{words})(?![\w-])", text, re.IGNORECASE)
    if found is None or re.search(r"(?:\bnot|n['’]t)\s+$", text[: found.start()], re.IGNORECASE):
        return None
    return [label.lower() for label in labels].index(found["label"].lower())
