"""What `init` and `plan` show of how a record is read: an invented one, with what is learnt marked."""

from __future__ import annotations

import json
from typing import Any

from privlora.config import DataSettings
from privlora.data.examples import Template
from privlora.data.inventing import invented_example, own_system_prompt
from privlora.errors import DataError


def example_rows(data: DataSettings, tokenizer: Any) -> list[tuple[str, str]]:
    """Rows of a table; none for labels and for a benchmark, whose form is its own. Raises ConfigError."""
    if data.task is not None or data.label is not None:
        return []
    template = Template(**data.columns)
    try:
        text = invented_example(template, tokenizer, loss_on=data.loss_on, add_eos=data.add_eos)
    except DataError as error:  # the template refuses a question and its answer, or drops them
        return [("example", f"none can be shown: {error.what.removeprefix('record 1: ')}")]
    rows = [
        ("example", f"{json.dumps(text, ensure_ascii=False)[1:-1]} (invented; learnt is what stands in « »)")
    ]
    system = own_system_prompt(template, tokenizer)
    if system is not None:
        rows.append(("system", f"the chat template adds a system prompt of its own: {json.dumps(system)}"))
    return rows
