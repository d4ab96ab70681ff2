"""Write what is generated from the groups of settings: settings.md and privlora.schema.json.

python docs/list_settings.py
"""

from __future__ import annotations

from pathlib import Path

from privlora.config.base import Group
from privlora.config.reference import groups, purpose, settings_in
from privlora.config.schema import FILE, written

DOCS = Path(__file__).parent
PAGES = {"federation": "federated.md", "synthesis": "synthesis.md"}
"""Group -> the page that says more of it."""
SETTINGS, SCHEMA = DOCS / "settings.md", DOCS / FILE
TOP = f"""# Settings

Every setting of a run's YAML. The same in a terminal: `privlora settings`, `privlora settings privacy`,
`privlora settings privacy.delta`; by words, `privlora settings gradient checkpointing`.

Names that are not listed here and aliases (`*name`) are refused; a name of another tool is answered with the one
here. `null` leaves a setting to the method. All that is wrong with a file and with `group.name=value` on the command
line is reported at once, with its place. So is what is not there of the model, its layers, the files and their
columns, and lines without a usable record.

Editors complete and explain them by [{FILE}]({FILE}) (JSON Schema). Put it next to your YAML, as
`privlora settings --schema > {FILE}` does, and begin the YAML with
`# yaml-language-server: $schema={FILE}`. `privlora init` writes that line where the file is there.
"""


def rows(kind: type[Group], group: str) -> list[str]:
    """Of a table, one for each setting, without the group's name."""
    lines = []
    for each in settings_in(kind, group):
        # Inside a setting that holds groups, as "clients: name".
        name = ": ".join(each.place.removeprefix(f"{group}.").split("."))
        default = "required" if each.default is None else f"`{each.default}`"
        cells = (f"`{name}`", each.kind, default, each.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


def page() -> str:
    """settings.md."""
    parts = [TOP]
    for group, kind in groups().items():
        more = f" More on its [page]({PAGES[group]})." if group in PAGES else ""
        parts.append(
            f"\n## {group}\n\n{purpose(kind)}{more}\n\n| setting | may be | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows(kind, group))
            + "\n"
        )
    return "".join(parts)


def main() -> None:
    SETTINGS.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
