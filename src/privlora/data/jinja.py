"""Chat templates as programs: a text must be a function of its own record and of the settings, and of nothing else."""

from __future__ import annotations

from typing import Final

DATE: Final = "26 Jul 2024"
"""What `strftime_now` gives, whatever the day and the format: no clock reaches a text. Llama's own say it
where there is no clock."""


def without_clock(text: str) -> str:
    """The template with a date that stands still, if it asks for today's."""
    if "strftime_now" not in text:
        return text
    return f"{{%- macro strftime_now(form='') -%}}{DATE}{{%- endmacro -%}}{text}"
