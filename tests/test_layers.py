"""Imports point downwards: a room may use the rooms below it, and nothing else of the package."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "privlora"

# From the bottom to the top; rooms of one layer do not know each other.
LAYERS = (
    {"errors", "names", "randomness", "version"},
    {"accounting", "adapters", "geometry", "pages"},
    {"coordinates", "data"},
    {"config", "losses", "mechanisms"},
    {"evaluation", "optimizers", "wishart"},
    {"methods"},
    {"training"},
    {"reporting", "stacked"},
    {"auditing"},
    {"api", "diagnostics", "studies"},
    {"demo"},
    {"cli"},
)
FRONT_DOOR = ("__version__", "Result", "fine_tune", "resume_run", "train_run")
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        for package, *inner in parts:
            if package == "privlora":
                # A bare `import privlora` is the front door, and with it the whole house.
                found.add(inner[0] if inner and inner[0] not in FRONT_DOOR else "the front door")
    return found


def test_every_room_has_a_place() -> None:
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert rooms == set(LEVEL)


def test_imports_point_downwards() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {used}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "__init__.py"  # the front door
        for used in sorted(imported_rooms(path))
        if used != room_of(path) and LEVEL.get(used, len(LAYERS)) >= LEVEL[room_of(path)]
    ]
    assert wrong == []
