"""What the settings of a run in one place lack of a federation, all of it at once, with a group to copy."""

from __future__ import annotations

from pathlib import Path

from privlora.config import Settings
from privlora.config.one_place import misplaced, of_mapping
from privlora.config.reading import read_yaml
from privlora.errors import ConfigError

_LOCAL_STEPS = 4


def no_federation(config: Path, settings: Settings) -> ConfigError:
    """settings: those of ``config``, which have no group federation."""
    content = read_yaml(config)
    given = of_mapping({**content, "federation": {"rule": "tan"}})  # that of the group which is advised
    rounds = max(1, -(-settings.privacy.steps // _LOCAL_STEPS))
    fixes = [
        "add the group, with one name and path for each owner: federation: {clients: [{name: north, path: "
        f"north.jsonl}}, {{name: south, path: south.jsonl}}], rounds: {rounds}, local_steps: {_LOCAL_STEPS}, "
        "rule: tan}"
    ]
    if given("data", "path") is not None:
        fixes.append(
            "remove data.path: each client has its own (with `clients: 3` it stays, and is cut in three)"
        )
    for each in misplaced(given):
        sized = each.place == "privacy.expected_batch_size"
        of_all = f", such as {settings.privacy.b:g}; it is of all clients together" if sized else ""
        fixes.append(each.named_fix + of_all)
    fixes.append(
        "or let `privlora init north.jsonl south.jsonl --clients --model NAME` write such a YAML, which runs as it is"
    )
    fixes.append(f"or, to train in one place, `privlora train {config}`")
    return ConfigError(f"{config} has no group federation, so nothing says who its clients are", fix=fixes)
