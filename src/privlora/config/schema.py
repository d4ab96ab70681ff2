"""The JSON Schema of a run's file, by which editors complete and explain settings.

It is wider than what privlora accepts: how settings depend on each other is checked when a file is read.
"""

from __future__ import annotations

import json
from typing import Any, Final

from privlora.config.base import Group, group_in
from privlora.config.federation import RULE_NAMES
from privlora.config.groups import Settings
from privlora.config.reference import groups, meanings, purpose

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
FILE: Final = "privlora.schema.json"
"""Its name in the docs, and where `privlora init` looks for it next to what it writes."""

_ONE_PLACE: Final[dict[str, Any]] = {
    # A federation brings its steps, and its clients their files.
    "if": {"not": {"required": ["federation"]}},
    "then": {
        "required": ["data"],
        "properties": {"data": {"required": ["path"]}, "privacy": {"required": ["steps"]}},
    },
}


def schema() -> dict[str, Any]:
    """JSON-ready, with the meaning of each setting as its description."""
    found = Settings.model_json_schema()
    held = found["$defs"]
    for kind in _all_groups():
        part = held[kind.__name__]
        told = meanings(kind)
        part["description"] = purpose(kind)
        for name, field in part["properties"].items():
            field.pop("title", None)
            if told.get(name):
                field["description"] = told[name]
    for name, kind in groups().items():
        found["properties"][name]["description"] = purpose(kind)
    # They follow where there is a federation.
    held["DataSettings"]["required"].remove("path")
    held["PrivacySettings"]["required"].remove("steps")
    held["FederationSettings"]["properties"]["rule"]["enum"] = list(RULE_NAMES)
    found["required"].remove("data")
    for part in held.values():
        if not part.get("required", True):
            del part["required"]
    return {
        "$schema": DRAFT,
        "title": "Settings of a privlora run",
        **{key: value for key, value in found.items() if key not in ("title", "description")},
        **_ONE_PLACE,
    }


def written() -> str:
    """The schema as a file holds it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _all_groups() -> list[type[Group]]:
    """Also those that a setting of a group holds."""
    found = list(groups().values())
    for kind in found:  # grows as it goes
        found += [inner for field in kind.model_fields.values() if (inner := group_in(field.annotation))]
    return found
