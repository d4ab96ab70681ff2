"""A folder that ``flwr run`` takes: two thin modules, the settings, a connection, and how to start."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2

from privlora.config import AT_CLIENTS, Settings
from privlora.errors import ConfigError, RunError, named
from privlora.federated.flower.server_app import APP_NAME, OWN_SETTINGS, Plan, told_to_clients
from privlora.federated.plans import client_plan, federation_of, names_alone, with_local_method
from privlora.training.preflight import refuse_unknown_model

_FILES: Final = {
    "pyproject.toml": "pyproject.toml.j2",
    "README.md": "README.md.j2",
    "flower-home/config.toml": "config.toml.j2",
    "privlora_app/__init__.py": "init.py.j2",
    "privlora_app/server_app.py": "server_app.py.j2",
    "privlora_app/client_app.py": "client_app.py.j2",
}


def _toml_string(text: str) -> str:
    """As a basic string of TOML, which is that of JSON but for the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# Nothing is escaped as HTML: what is written is TOML, Python and Markdown.
_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("privlora.federated.flower"),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
)
_TEMPLATES.filters["toml"] = _toml_string


def write_app(
    folder: str | Path,
    settings: Settings,
    *,
    superlink: str = "127.0.0.1:8000",
    root_certificates: str | Path | None = None,
    timeout: float = 3600.0,
) -> Path:
    """Write a Flower app, all of it or nothing.

    Args:
        folder: does not exist, or is empty. Its name is the app's: lower-case letters, digits, dashes. It stays on the
            SuperLink's machine, where the variable PRIVLORA_APPS names the folder above it.
        settings: of the run. What of them is the server's alone (where its model, its evaluation records and its
            results are) stays in ``folder``/server, and no client gets it.
        superlink: address of the SuperLink, host and port.
        root_certificates: the authority's certificate, to check the SuperLink's; None: no TLS, on one machine only.
        timeout: seconds that a client has for one answer.

    Returns:
        The folder.

    Raises:
        ConfigError: an argument cannot be written, or nothing can be planned under the settings.
        ModelError: model.name is no folder of this machine, and cannot be a name on the hub.
        RunError: the folder holds something, or cannot be written.
    """
    target = Path(folder).resolve()
    if not APP_NAME.fullmatch(target.name):
        what = f"{named(target.name)} cannot name a Flower app"
        raise ConfigError(what, fix="use lower-case letters, digits and dashes")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"{str(target)!r} is there already", fix="give an empty folder, or a new one")
    if not re.fullmatch(r"\S+:\d+", superlink):
        raise ConfigError(f"superlink={named(superlink)} has no port", fix="write host:port")
    if root_certificates is not None and not Path(root_certificates).is_file():
        fix = "make the authority's certificate first: docs/federated-deployment.md, step 1"
        raise ConfigError(f"root_certificates={str(root_certificates)!r} is no file", fix=fix)
    own = _of_server(settings)
    refuse_unknown_model(own.model.name)
    client_plan(own)
    values = {
        "name": target.name,
        "settings": told_to_clients(own).to_yaml(),
        "output": own.run.output,
        "apps": str(target.parent),
        "folder": str(target),
        "clients": federation_of(own).names,
        "timeout": Plan(own, timeout).timeout,
        "superlink": superlink,
        "authority": None if root_certificates is None else str(Path(root_certificates).resolve()),
    }
    contents = {path: _TEMPLATES.get_template(name).render(values) for path, name in _FILES.items()}
    _write(target, {**contents, OWN_SETTINGS: own.to_yaml()})
    return target


def _of_server(settings: Settings) -> Settings:
    """With paths from the root on, since Flower runs apps in a folder of its own, and without those of records."""
    settings = with_local_method(settings.located())
    return settings.changed(
        data={"path": AT_CLIENTS, "limit": None, "evaluation": _in_full(settings.data.evaluation)},
        adapter={"public_text": _in_full(settings.adapter.public_text)},
        run={"output": str(Path(settings.run.output).resolve())},
        federation=names_alone(federation_of(settings).names),
    )


def _in_full(path: Any) -> Any:
    """A path, or several, of this machine from the root on; what is none stays."""
    if isinstance(path, list):
        return [_in_full(one) for one in path]
    return str(Path(path).resolve()) if isinstance(path, str) and Path(path).exists() else path


def _write(target: Path, contents: Mapping[str, str]) -> None:
    """Under another name first: a folder of that name is whole."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        for path, text in contents.items():
            (temporary / path).parent.mkdir(exist_ok=True)
            (temporary / path).write_text(text, encoding="utf-8")
        (temporary / OWN_SETTINGS).parent.chmod(0o700)
        temporary.chmod(0o755)  # mkdtemp lets nobody else in
        os.rename(temporary, target)  # takes the place of an empty folder, and of nothing else
    except OSError as error:
        what = f"cannot write {str(target)!r}: {error.strerror}"
        raise RunError(what, fix="give a writable place") from None
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary)
