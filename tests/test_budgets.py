"""No package grows beyond its budget of lines of code: what is added somewhere goes elsewhere.

Lower a number after each step that makes a package smaller: `python tests/test_budgets.py` writes what is there.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "privlora"
BUDGETS = Path(__file__).parent / "budgets.json"
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)
_WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """Lines that hold a token: no blank line, comment or docstring."""
    prose = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    used = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - prose)


def sizes() -> dict[str, int]:
    """Package, or file beside packages -> its lines of code."""
    found = Counter[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        found[path.relative_to(SOURCE).parts[0]] += code_lines(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def test_each_package_keeps_its_budget() -> None:
    budgets = json.loads(BUDGETS.read_text(encoding="utf-8"))
    assert {name: size for name, size in sizes().items() if size > budgets.get(name, 0)} == {}


def test_what_is_counted() -> None:
    assert code_lines('"""Words."""\n\n# more\nx = (\n    1,\n)\ndef f():\n    "words"\n    return x\n') == 5


if __name__ == "__main__":
    BUDGETS.write_text(json.dumps(sizes(), indent=1) + "\n", encoding="utf-8")
