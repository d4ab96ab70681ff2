"""``privlora federate --list-rules``."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from privlora.cli.console import emit, out, quiet_libraries

_WIDTH = 132  # where there is no terminal


def show_rules(as_json: bool) -> None:
    """Print the table of rules, or all that is known of them as JSON."""
    with quiet_libraries():
        from privlora.federated.rule_facts import EXAMPLE, rule_facts

        rows = rule_facts()
    if as_json:
        emit({"example": vars(EXAMPLE), "rules": rows})
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rule", "exact", "two-sided", "secure sums", "hides", "trips", "down", "up", "local method"):
        table.add_column(name, no_wrap=name != "local method", justify="right" if name == "trips" else "left")
    for row in rows:
        table.add_row(*_cells(row))
    terminal = sys.stdout.isatty()
    Console(file=sys.stdout, highlight=False, markup=False, width=None if terminal else _WIDTH).print(table)
    for line in (
        f"down, up: MB of float32 that a client is sent and answers in round 2, for {EXAMPLE.describe()}.",
        "exact: the server's update is the mean of the clients', before it is cut to rank r; private: only where",
        "clients add noise, or r + p reaches K r for K clients in a round.",
        "two-sided: under privacy both subspaces can move.",
        "hides: what federation.privacy_model can be, records of a client or whole clients.",
        "local method: the default, and in brackets what method.name can be besides.",
        "",
        "Numbers of each adapted m x n module, with K clients:",
        "",
    ):
        out().print(line)
    for row in rows:
        out().print(
            f"{row['name']}: {row['summary']}\n  down  {row['down']} a module\n  up    {row['up']} a module"
        )
        out().print(f"  from  {row['reference']}")


def _cells(row: dict[str, Any]) -> list[str]:
    others = [name for name in row["methods"] if name != row["method"]]
    return [
        row["name"],
        _yes(row["exact"]) if row["exact"] == row["exact_without_privacy"] else "private",
        _yes(row["two_sided"]),
        row["secure_sums"],
        ", ".join(f"{model}s" for model in row["privacy_models"]),
        str(len(row["stages"])),
        f"{4 * row['floats_down'] / 1e6:.3g}",
        f"{4 * row['floats_up'] / 1e6:.3g}",
        " ".join([row["method"], f"({', '.join(others)})" if others else ""]).strip(),
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
