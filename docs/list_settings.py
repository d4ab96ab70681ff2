"""Write the section Settings of docs/federated.md from the fields of the group and what stands below each of them.

python docs/list_settings.py
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path

import yaml
from pydantic import BaseModel

from privlora.config import federation
from privlora.config.base import group_in
from privlora.config.federation import FederationSettings

PAGE = Path(__file__).parent / "federated.md"
HEADING = "## Settings\n"
INTRODUCTION = """
All of the group `federation`. Other names are refused, and so are settings of another rule, so that none is ignored.

| setting | default | meaning |
|---|---|---|
"""


def meanings(kind: type[BaseModel]) -> dict[str, str]:
    """What stands below each field of a group, in one line."""
    tree = ast.parse(inspect.getsource(federation))
    body = next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    found: dict[str, str] = {}
    for field, below in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        text = (
            below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        )
        found[field.target.id] = " ".join(str(text).replace("``", "`").split())
    return found


def rows(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Of the table, one for each field."""
    found, lines = meanings(kind), []
    for name, field in kind.model_fields.items():
        default = yaml.safe_dump(field.default).splitlines()[0] if not field.is_required() else None
        cells = (f"`{prefix}{name}`", "required" if default is None else f"`{default}`", found[name])
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        inner = group_in(field.annotation)
        if inner is not None:
            lines += rows(inner, f"{name}: ")
    return lines


def section() -> str:
    """The whole section, which ends the page."""
    return HEADING + INTRODUCTION + "\n".join(rows(FederationSettings)) + "\n"


def main() -> None:
    before = PAGE.read_text(encoding="utf-8").partition("\n" + HEADING)[0].rstrip("\n")
    PAGE.write_text(f"{before}\n\n{section()}", encoding="utf-8")


if __name__ == "__main__":
    main()
