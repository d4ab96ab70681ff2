"""Draw docs/rooms.svg from the source: the private step above, and below it the floors that the layer test holds.

python docs/draw_rooms.py
"""

from __future__ import annotations

import ast
import sys
import textwrap
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from test_layers import LAYERS, SOURCE, imported_rooms  # noqa: E402

WIDTH, MARGIN, GAP = 1180, 24, 12
FLOOR, TOP = 78, 250
# Where records and gradients are seen, and where nothing is but releases.
PRIVATE = {"data", "adapters", "coordinates", "mechanisms", "training", "stacked"}
PUBLIC = {"optimizers", "accounting", "reporting", "geometry"}
# What the street's stations are, and whether what leaves them is private.
STREET = (
    ("records", "data/", True),
    ("sampler", "draws units, states the event", True),
    ("micro-batches", "training/ step.py", True),
    ("unit gradients", "adapters/, coordinates/", True),
    ("clip and sum", "mechanisms/ gaussian.py", True),
    ("charge, noise", "mechanisms/ noising.py", False),
    ("optimizer", "sees releases alone", False),
    ("adapter", "release/, with its report", False),
)


def first_line(room: str) -> str:
    """What a room says of itself."""
    path = SOURCE / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else SOURCE / f"{room}.py").read_text())) or ""
    return text.split("\n")[0].replace("``", "").removesuffix(".")


def box(x: float, y: float, width: float, height: float, kind: str, name: str, words: str) -> list[str]:
    lines = textwrap.wrap(words, int((width - 20) / 6.1))[:3]
    return [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="7" class="room {kind}"/>',
        f'<text x="{x + 10:.0f}" y="{y + 19:.0f}" class="name">{escape(name)}</text>',
        *(
            f'<text x="{x + 10:.0f}" y="{y + 35 + 14 * k:.0f}" class="what">{escape(line)}</text>'
            for k, line in enumerate(lines)
        ),
    ]


def street() -> list[str]:
    width = (WIDTH - 2 * MARGIN - (len(STREET) - 1) * 26) / len(STREET)
    drawn = []
    for k, (name, words, private) in enumerate(STREET):
        x = MARGIN + k * (width + 26)
        drawn += box(x, 84, width, 62, "private" if private else "public", name, words)
        if k:
            kind = "in" if STREET[k - 1][2] else "out"
            drawn.append(
                f'<path d="M{x - 24:.0f} 115H{x - 3:.0f}" class="{kind}" marker-end="url(#{kind})"/>'
            )
    noise = MARGIN + 5 * (width + 26) + width / 2
    drawn.append(f'<path d="M{noise:.0f} 178V150" class="ledger" marker-end="url(#ledger)"/>')
    words = "the ledger (accounting/) has the charge on disk before noise is drawn"
    drawn.append(f'<text x="{noise:.0f}" y="194" class="what" text-anchor="middle">{words}</text>')
    return drawn


def floors() -> list[str]:
    drawn = []
    for k, rooms in enumerate(reversed(LAYERS)):
        width = (WIDTH - 2 * MARGIN - (len(rooms) - 1) * GAP) / len(rooms)
        for n, room in enumerate(sorted(rooms)):
            kind = "private" if room in PRIVATE else "public" if room in PUBLIC else "plain"
            drawn += box(
                MARGIN + n * (width + GAP), TOP + k * FLOOR, width, FLOOR - 10, kind, room, first_line(room)
            )
    return drawn


def arrows() -> int:
    """How many pairs of rooms import one another, one way."""
    used = {
        (p.relative_to(SOURCE).parts[0], room) for p in SOURCE.rglob("*.py") for room in imported_rooms(p)
    }
    return len({(user.removesuffix(".py"), room) for user, room in used if user.removesuffix(".py") != room})


def picture() -> str:
    height = TOP + len(LAYERS) * FLOOR + 14
    heads = "".join(
        f'<marker id="{name}" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" class="head-{name}"/></marker>'
        for name in ("in", "out", "ledger")
    )
    style = (
        "text{font-family:system-ui,sans-serif}.paper{fill:#fffdf9}.title{font-size:19px;font-weight:650;fill:#2b2926}"
        ".name{font-size:13.5px;font-weight:620;fill:#2b2926}.what{font-size:11.5px;fill:#55504a}"
        ".room{stroke:#a39b8d;stroke-width:1.1;fill:#f6f3ec}.private{fill:#f6dfd6;stroke:#b0573a}"
        ".public{fill:#dcebe2;stroke:#3f7d58}.in{stroke:#b0573a;stroke-width:2}.out{stroke:#3f7d58;stroke-width:2}"
        ".ledger{stroke:#55504a;stroke-width:1.6;stroke-dasharray:4 3}.head-in{fill:#b0573a}.head-out{fill:#3f7d58}"
        ".head-ledger{fill:#55504a}"
    )
    rooms = sum(map(len, LAYERS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{style}</style><defs>{heads}</defs>",
        f'<rect width="{WIDTH}" height="{height}" class="paper"/>',
        f'<text x="{MARGIN}" y="36" class="title">The one-way street: one private step</text>',
        f'<text x="{MARGIN}" y="60" class="what">red: records or gradients are seen here · green: nothing but releases '
        "and public numbers · data cross once, where the ledger is charged and noise is added</text>",
        *street(),
        f'<text x="{MARGIN}" y="{TOP - 14}" class="title">The house: {rooms} rooms on {len(LAYERS)} floors, '
        f"{arrows()} arrows, all downwards</text>",
        *floors(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (DOCS / "rooms.svg").write_text(picture(), encoding="utf-8")
    print(DOCS / "rooms.svg")
