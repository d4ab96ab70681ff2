"""A folder that ``flwr run`` takes: two thin modules, the settings, a connection, and how to start."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jinja2

from privlora.errors import ConfigError, RunError, named
from privlora.federated.flower.records import check_name
from privlora.federated.flower.server_app import Plan

_FILES: Final = {
    "pyproject.toml": "pyproject.toml.j2",
    "README.md": "README.md.j2",
    "flower-home/config.toml": "config.toml.j2",
    "privlora_app/__init__.py": "init.py.j2",
    "privlora_app/server_app.py": "server_app.py.j2",
    "privlora_app/client_app.py": "client_app.py.j2",
}


def write_app(
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    output: str | Path,
    clients: Sequence[str],
    superlink: str = "127.0.0.1:8000",
    root_certificates: str | Path | None = None,
    timeout: float = 3600.0,
) -> Path:
    """Write a Flower app, all of it or nothing.

    Args:
        folder: does not exist, or is empty. Its name is the app's: lower-case letters, digits, dashes.
        settings: of the core; public, since every client gets them.
        output: where the server puts results, on the server's machine.
        clients: public names of those who take part.
        superlink: address of the SuperLink, host and port.
        root_certificates: the authority's certificate, to check the SuperLink's; None: no TLS, on one machine only.
        timeout: seconds that a client has for one answer.

    Returns:
        The folder.

    Raises:
        ConfigError: an argument cannot be written.
        RunError: the folder holds something, or cannot be written.
    """
    target = Path(folder).resolve()
    if not re.fullmatch(r"[a-z][a-z0-9-]*", target.name):
        raise ConfigError(
            f"{named(target.name)} cannot name a Flower app", fix="use lower-case letters, digits and dashes"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"{str(target)!r} is there already", fix="give an empty folder, or a new one")
    if not re.fullmatch(r"\S+:\d+", superlink):
        raise ConfigError(f"superlink={named(superlink)} has no port", fix="write host:port")
    for client in clients:
        check_name(client)
    values = {
        "name": target.name,
        "settings": _as_text(settings),
        "output": str(Path(output).resolve()),
        "clients": ",".join(clients),
        "timeout": float(timeout),
        "superlink": superlink,
        "authority": None if root_certificates is None else str(Path(root_certificates).resolve()),
    }
    contents = {path: _render(template, values) for path, template in _FILES.items()}
    as_read = tomllib.loads(contents["pyproject.toml"])
    Plan.read(as_read["tool"]["flwr"]["app"]["config"])  # raises what would stop the server
    _write(target, contents)
    return target


def toml_string(text: str) -> str:
    """As a basic string of TOML, which is that of JSON but for the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _as_text(settings: Mapping[str, Any]) -> str:
    try:
        return json.dumps(settings, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"settings cannot be written: {error}", fix="use texts, numbers, lists and tables"
        ) from None


def _render(template: str, values: Mapping[str, Any]) -> str:
    source = files("privlora.federated.flower").joinpath("templates", template).read_text(encoding="utf-8")
    # Nothing is escaped as HTML: what is written is TOML, Python and Markdown.
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters["toml"] = toml_string
    return environment.from_string(source).render(values)


def _write(target: Path, contents: Mapping[str, str]) -> None:
    """Under another name first: a folder of that name is whole."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        for path, text in contents.items():
            (temporary / path).parent.mkdir(exist_ok=True)
            (temporary / path).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp lets nobody else in
        os.rename(temporary, target)  # takes the place of an empty folder, and of nothing else
    except OSError as error:
        raise RunError(
            f"cannot write {str(target)!r}: {error.strerror}", fix="give a writable place"
        ) from None
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary)
