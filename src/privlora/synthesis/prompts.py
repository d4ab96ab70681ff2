"""In which words texts are asked for: presets, a user's own prompts, and beginnings to go on from.

All of it is public and written by people who have not seen the private records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TEXT, TONE = "{text}", "{tone}"
"""Where a variation's prompt holds the text that is varied, and the tone."""

_GENERAL_TONES: Final = (
    *("plain", "formal", "concise", "detailed", "vivid"),
    *("matter-of-fact", "lively", "careful", "reflective"),
)


@dataclass(frozen=True)
class Prompts:
    """One kind of text."""

    random: str
    """What a chat model is asked for a fresh text."""
    variation: str
    """What it is asked for a variation; holds {text}, and may hold {tone}."""
    lead_in: str = ""
    """What stands before a text that a model without chat goes on with; empty: nothing but the text's beginning."""
    tones: tuple[str, ...] = _GENERAL_TONES
    """Of which each variation draws one."""

    def variation_of(self, text: str, tone: str) -> str:
        """The prompt for a variation; braces inside ``text`` stay as they are."""
        return self.variation.replace(TONE, tone).replace(TEXT, text)

    def fresh(self, count: int, *, chat: bool) -> list[str]:
        """``count`` requests for fresh texts: of a chat in one tone after another, else the words before a text."""
        if not chat:
            return [self.lead_in] * count
        return [f"{self.random} Write in a {self.tones[i % len(self.tones)]} tone." for i in range(count)]


def _kind(noun: str, *, asked: str, lead_in: str, tones: tuple[str, ...]) -> Prompts:
    return Prompts(
        random=f"{asked} Answer with the {noun} and nothing else.",
        variation=f"{TEXT}\n\nThe {noun} above is an example. Take it as inspiration for a new one about another case "
        f"of the same kind, in a {TONE} tone. Answer with the new {noun} and nothing else.",
        lead_in=lead_in,
        tones=tones,
    )


PRESETS: Final[Mapping[str, Prompts]] = {
    "text": Prompts(
        random="Write one short text that stands by itself, on any subject. Answer with the text and nothing else.",
        variation=f"{TEXT}\n\nWrite another text of the same kind, length and language as the one above, in a {TONE} "
        "tone. Answer with the new text and nothing else.",
    ),
    "medical-abstract": _kind(
        "abstract",
        asked="Invent the abstract of an article in a medical journal: a question, how it was studied, what was found "
        "and what follows. Vary how sentences begin and how long they are.",
        lead_in="Abstract of a medical research article:\n\n",
        tones=(
            *("scholarly", "precise", "cautious", "confident", "narrative"),
            *("condensed", "explanatory", "clinical", "critical"),
        ),
    ),
    "life-science-preprint": _kind(
        "abstract",
        asked="Invent the abstract of a preprint in the life sciences, as laboratories post them before peer review: "
        "an organism or a system, a method, a result and why it matters.",
        lead_in="Abstract of a preprint in the life sciences:\n\n",
        tones=(
            *("technical", "exploratory", "rigorous", "enthusiastic", "sober"),
            *("accessible", "compact", "descriptive", "argumentative", "quantitative"),
        ),
    ),
    "parliamentary-speech": _kind(
        "speech",
        asked="Invent what one member says in a debate of a national parliament, for example of the United States, the "
        "United Kingdom or Canada. Begin by addressing the chair as that chamber does.",
        lead_in="From the official record of a debate in parliament:\n\n",
        tones=(
            *("solemn", "combative", "conciliatory", "ironic", "urgent", "dry", "personal", "statesmanlike"),
            *("procedural", "indignant", "hopeful", "sceptical", "folksy", "legalistic", "commemorative"),
        ),
    ),
    "clinical-note": _kind(
        "note",
        asked="Invent a note that a clinician writes after seeing a patient: complaint, findings, assessment and plan. "
        "Make up every person, date and number.",
        lead_in="Clinical note:\n\n",
        tones=("telegraphic", "thorough", "neutral", "hurried", "careful", "friendly", "strictly factual"),
    ),
    "support-chat": _kind(
        "conversation",
        asked="Invent a conversation in which a customer asks a company's support for help and an agent answers, one "
        "turn a line, each with who is speaking.",
        lead_in="Customer support conversation:\n\n",
        tones=("polite", "impatient", "confused", "cheerful", "terse", "worried", "grateful", "annoyed"),
    ),
    "product-review": _kind(
        "review",
        asked="Invent a review that a customer writes of something bought online: what it is, how it was used, what is "
        "good or bad about it.",
        lead_in="Customer review:\n\n",
        tones=(
            *("delighted", "disappointed", "balanced", "humorous", "blunt"),
            *("meticulous", "casual", "sarcastic", "warm"),
        ),
    ),
}


def own_prompts(random: str, variation: str | None) -> Prompts:
    """A user's own kind of text; None takes what the preset ``text`` has.

    random: what a chat model is asked; a model without chat is given it as the words before a text.
    """
    general = PRESETS["text"]
    return Prompts(random, variation or general.variation, lead_in=random)


def beginning(text: str) -> str:
    """About the first half of a text's characters, cut between words where there are several."""
    end = len(text) // 2
    kept = text[:end]
    if end < len(text) and not text[end].isspace():
        kept = re.sub(r"(\s)\S*$", r"\1", kept)
    return kept.rstrip()
