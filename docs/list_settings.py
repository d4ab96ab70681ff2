"""Write the section Settings of a group's page from the fields of the group and what stands below each of them.

python docs/list_settings.py
"""

from __future__ import annotations

import ast
import inspect
import sys
from itertools import pairwise
from pathlib import Path

import yaml
from pydantic import BaseModel

from privlora.config.base import Group, group_in
from privlora.config.federation import FederationSettings
from privlora.config.synthesis import SynthesisSettings

DOCS = Path(__file__).parent
PAGES: dict[str, tuple[Path, type[Group], str]] = {
    "federation": (DOCS / "federated.md", FederationSettings, "rule"),
    "synthesis": (DOCS / "synthesis.md", SynthesisSettings, "generator"),
}
"""Group -> its page, its class, and the setting that decides which others are read."""
HEADING = "## Settings\n"
INTRODUCTION = """
All of the group `{group}`. Other names are refused, and so are settings of another {kind}, so that none is ignored.

| setting | default | meaning |
|---|---|---|
"""


def meanings(kind: type[BaseModel]) -> dict[str, str]:
    """What stands below each field of a group, in one line."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
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


def section(group: str) -> str:
    """The whole section of a group, which ends its page."""
    _, kind, chosen_by = PAGES[group]
    return HEADING + INTRODUCTION.format(group=group, kind=chosen_by) + "\n".join(rows(kind)) + "\n"


def main() -> None:
    for group, (page, _, _) in PAGES.items():
        before = page.read_text(encoding="utf-8").partition("\n" + HEADING)[0].rstrip("\n")
        page.write_text(f"{before}\n\n{section(group)}", encoding="utf-8")


if __name__ == "__main__":
    main()
