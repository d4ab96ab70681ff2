"""Imports point downwards: a room may use the rooms below it, and nothing else of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "privlora"

# From the bottom to the top; rooms of one layer do not know each other.
LAYERS = (
    {
        "consoles",
        "disk",
        "errors",
        "names",
        "precision",
        "randomness",
        "rounding",
        "stages",
        "version",
    },
    {"ranges", "schedules"},
    {"accounting", "adapters", "geometry", "pages"},
    {"coordinates", "data"},
    {"config", "losses", "mechanisms"},
    {"evaluation", "optimizers"},
    {"methods", "synthesis"},
    {"training"},
    {"rehearsals", "starting"},
    {"profiling", "reporting", "stacked"},
    {"federated"},
    {"auditing", "calling", "result"},
    {"running"},
    {"api"},
    {"demo", "trainer"},
    {"cli"},
    {"lab"},
)
FRONT_DOOR = (
    "__version__",
    "PrivateConfig",
    "PrivateTrainer",
    "Result",
    "SynthesisResult",
    "federate",
    "fine_tune",
    "resume_federation",
    "resume_run",
    "synthesize",
    "train_run",
)
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
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms == set(LEVEL)


def test_imports_point_downwards() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {used}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path not in (SOURCE / "__init__.py", SOURCE / "__main__.py")  # the front door
        for used in sorted(imported_rooms(path))
        if used != room_of(path) and LEVEL.get(used, len(LAYERS)) >= LEVEL[room_of(path)]
    ]
    assert wrong == []


def test_the_product_never_imports_the_lab() -> None:
    """One line loads it by name: the command line, when a command of the lab is asked for."""
    product = [path for path in SOURCE.rglob("*.py") if room_of(path) != "lab"]
    assert [path for path in product if "lab" in imported_rooms(path)] == []
    named = {path.relative_to(SOURCE).as_posix() for path in product if "privlora.lab" in path.read_text()}
    assert named == {"cli/commands.py"}


def asks_for_a_space(path: Path) -> list[int]:
    """Lines that ask of which class coordinates are, or what a space is called, in place of asking the coordinates."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = "Coordinates" in ast.unparse(node.args[1])
        elif isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            asked = any(side == "space" or side.endswith((".space", "['space']")) for side in sides)
            # But whether a space is registered may be asked of the table.
            asked = (asked and "SPACES" not in sides) or any(
                "type(" in s and "oordinates" in s for s in sides
            )
        elif isinstance(node, ast.MatchClass):
            asked = "Coordinates" in ast.unparse(node.cls)
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            asked = len(keys & {"tangent", "factors", "one-factor", "projected", "wishart"}) > 1
            asked = asked and path not in (SOURCE / "methods.py", SOURCE / "config" / "methods.py")
        else:
            continue
        if asked:
            found.append(node.lineno)
    return found


def test_coordinates_answer_for_their_space() -> None:
    """Else a new space would train, and fail where nobody had asked for it: diagnostics alone are of some spaces."""
    files = [path for path in SOURCE.rglob("*.py") if SOURCE / "lab" / "diagnostics" not in path.parents]
    asking = {str(path.relative_to(SOURCE)): lines for path in files if (lines := asks_for_a_space(path))}
    assert asking == {}
    pages = [
        path for path in SOURCE.rglob("*.j2") if re.search(r"coordinates *(==|!=|in\b)", path.read_text())
    ]
    assert pages == []


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(self.inner, TangentCoordinates)",
        "row.space == 'wishart'",
        "'projected' == space",
        "self.space in ('projected', 'wishart')",
        "type(coordinates) is FactorCoordinates",
        "{'tangent': 1, 'factors': 2}[name]",
        "match c:\n  case FactorCoordinates(): pass",
    ],
)
def test_asking_is_seen(line: str, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(line)
    assert asks_for_a_space(tmp_path / "asks.py")
