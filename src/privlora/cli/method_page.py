"""What ``privlora methods`` shows of one method, and of all rules of federations."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from privlora.cli.console import quiet_libraries, show
from privlora.config import MethodSettings
from privlora.config.methods import SPACES as FACTS
from privlora.config.reference import meanings
from privlora.methods import RATE_STEPS, SPACES, Method, uses_lora_alpha

_TEXTS: Final = {
    None: "none",
    "fixed": "PUBLIC texts (the group synthesis), which stay as they are",
    "evolving": "PUBLIC texts (the group synthesis), which evolve from step to step",
}


def facts_of_row(row: Method) -> dict[str, Any]:
    """JSON-ready: what it is, all that may be set of it with its default and meaning, and where to read on."""
    said = meanings(MethodSettings)
    of_run = {
        "learning_rate": row.rate_of(RATE_STEPS),
        "relative_rate": row.relative_rate,
        "schedule": row.schedule,
        "warmup_fraction": row.warmup_fraction,
        "averaging": row.averaging,
        "clipping": row.clipping if row.private and row.releases == "gradients" else "none",
    }
    own = {
        optimizer: {
            name: {"default": value, "meaning": said[name]}
            for name, value in _of_optimizer(row, optimizer).items()
        }
        for optimizer in row.optimizers
    }
    return {
        "name": row.name,
        "summary": row.summary,
        "private": row.private,
        "releases": row.releases,
        "space": row.space,
        "described": FACTS[row.space].described,
        "public_data": _TEXTS[row.public_texts],
        "needs_public_data": row.public_texts is not None,
        "start": row.init,
        "defaults": of_run,
        "may_be_relative": SPACES[row.space].weight_unit is not None,
        "rate_steps": RATE_STEPS if row.rate_falls else None,
        "clippings": list(row.clippings),
        "optimizers": own,
        "reference": row.reference,
        "docs": _docs_of_row(row),
    }


def _of_optimizer(row: Method, optimizer: str) -> dict[str, float | None]:
    """Its settings in such a row; None for those that hold_out chooses before each step."""
    complete = row.optimizer_settings(optimizer, {})
    every = row.optimizer_settings(optimizer, {"hold_out": 0.0}) if complete.get("hold_out") else complete
    return {name: complete.get(name) for name in every}


def _docs_of_row(row: Method) -> list[str]:
    """Pages and sections that speak of it."""
    page = "docs/methods.md"
    if row.releases == "votes":
        return ["docs/popri.md" if row.tunes_writer else "docs/synthesis.md", "docs/settings.md#method"]
    if row.public_texts is not None:
        found = [f"{page}#methods-that-lean-on-public-texts", "docs/few-records.md"]
    elif row.coordinates.forward_only:
        found = [f"{page}#without-gradients-dp-zo"]
    elif row.coordinates.dense:
        found = [f"{page}#dense-updates-through-random-projections", "docs/projection.md"]
    elif row.name == "prism":
        found = [f"{page}#prism-as-built-here"]
    else:  # a row of somebody's own may move no factors
        found = [f"{page}#the-baselines-as-built-here" if uses_lora_alpha(row.name) else page]
    return [*found, "docs/settings.md#method"]


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts of a method, for a terminal."""
    rows = _of_method(facts)
    last = [("reference", facts["reference"]), ("read", ", ".join(facts["docs"]))]
    yield f"{facts['name']}: {facts['summary']}"
    yield from (text if name is None else f"  {name:<12}{text}" for name, text in (*rows, *last))


_Rows = Iterator[tuple[str | None, str]]
"""A name and what it is; without a name a line as it stands."""


def _of_method(facts: Mapping[str, Any]) -> _Rows:
    given, steps = facts["defaults"], facts["rate_steps"]
    falls = "" if steps is None else f" in {steps} steps (falls with their root)"
    unit = " (relative)" if given["relative_rate"] else ""
    relative = ", relative_rate" if facts["may_be_relative"] else ""
    yield "private", "yes" if facts["private"] else "NO"
    yield "releases", facts["releases"]
    yield "space", f"{facts['space']}: {facts['described']}"
    yield "public data", facts["public_data"]
    yield "start", f"{facts['start']} (adapter.init)"
    rate = f"{given['learning_rate']:g}{unit}{falls}, {given['schedule']}"
    yield "rate", f"{rate} (method.learning_rate{relative}, schedule)"
    yield "warm-up", f"{given['warmup_fraction']:.0%} of the steps (method.warmup_steps)"
    yield "averaging", f"{given['averaging']:g} (method.averaging)"
    if given["clipping"] != "none":
        yield "clipping", f"{given['clipping']}, of {', '.join(facts['clippings'])} (method.clipping)"
    default, *others = facts["optimizers"]
    yield "optimizer", f"{default}, the default (method.optimizer)"
    for name, setting in facts["optimizers"][default].items():
        yield None, f"    method.{name}  default {_value(setting)}"
        indent = " " * 8
        yield None, textwrap.fill(setting["meaning"], 100, initial_indent=indent, subsequent_indent=indent)
    for optimizer in others:
        settings = facts["optimizers"][optimizer].items()
        yield "or", f"{optimizer}, with {', '.join(f'{name} {_value(s)}' for name, s in settings)}"


def _value(setting: Mapping[str, Any]) -> str:
    default = setting["default"]
    return "chosen before each step" if default is None else f"{default:g}"


_NOTES = """\
exact: the server's update is the mean of the clients', before it is cut to rank r; private: only where
clients add noise, or r + p reaches K r for K clients in a round.
two-sided: under privacy both subspaces can move.
hides: what federation.privacy_model can be, records of a client or whole clients.
method: of local steps; the default, and in brackets what method.name can be besides.

Numbers of each adapted m x n module, with K clients:
"""


def show_rules(as_json: bool) -> None:
    """Print the table of rules, or all that is known of them as JSON."""
    with quiet_libraries():
        from privlora.federated.rule_facts import EXAMPLE, EXAMPLE_IN_WORDS, rule_facts

        rows = rule_facts()
    table = [
        ("rule", "exact", "two-sided", "secure sums", "hides", "trips", "down", "up"),
        *map(_cells, rows),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    lines.append(
        f"\ndown, up: MB of float32 that a client is sent and answers in round 2, for {EXAMPLE_IN_WORDS}."
    )
    lines.append(_NOTES)
    for row in rows:
        others = ", ".join(name for name in row["methods"] if name != row["method"])
        method = f"{row['method'] or ''} {f'({others})' if others else ''}".strip()
        lines.append(
            f"{row['name']}: {row['summary']}\n  down    {row['down']} a module\n  up      {row['up']} a module\n"
            f"  method  {method}\n  from    {row['reference']}"
        )
    show({"example": EXAMPLE, "rules": rows}, lines, as_json)


def _cells(row: dict[str, Any]) -> list[str]:
    said = {True: "yes", False: "no"}
    return [
        row["name"],
        said[row["exact"]] if row["exact"] == row["exact_without_privacy"] else "private",
        said[row["two_sided"]],
        row["secure_sums"],
        ", ".join(f"{model}s" for model in row["privacy_models"]),
        str(len(row["stages"])),
        f"{4 * row['floats_down'] / 1e6:.3g}",
        f"{4 * row['floats_up'] / 1e6:.3g}",
    ]
