"""Whether the files that settings name are there, without what reads them: it can be asked before slow imports."""

from __future__ import annotations

from typing import Any

from privlora.config import Settings
from privlora.data.records import refuse_missing
from privlora.errors import DataError


def check_sources(settings: Settings, records: Any = None, evaluation: Any = None) -> None:
    """Refuse settings that name a file which is not there, before a model is loaded. Raises DataError.

    records, evaluation: what stands for the files, in memory.
    """
    data = settings.data
    read = {
        "adapter.public_text": (settings.adapter.public_text, data.format),
        "data.path": (data.path if records is None else None, data.format),
        "data.evaluation": (data.evaluation if evaluation is None else None, data.format),
        "synthesis.file": (None if settings.synthesis is None else settings.synthesis.file, "auto"),
    }
    for setting, (path, form) in read.items():
        if path is None:
            continue
        try:
            refuse_missing(path, format=form)
        except DataError as error:
            raise error.of(setting) from None
