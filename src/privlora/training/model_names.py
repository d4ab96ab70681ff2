"""Which names of models may be asked for over the network, and which can only be local folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from privlora.config import ModelSettings
from privlora.data.records import is_data_file_name
from privlora.errors import ModelError
from privlora.names import HUB_NAME

# Where runs lie unless run.output says otherwise, and where base models do; no owner on the hub is called so.
_FOLDERS = ("runs/", "models/")


def refuse_unknown_model(name: str, *, owner: bool = False) -> None:
    """Raise ModelError for a name that is no local folder and no name on the hub. Only the local disk is asked.

    What looks like a path, or lies in a folder that exists, is a path. owner: a hub name must be owner/name.
    """
    try:
        place = Path(name).expanduser()
        exists, is_folder, in_folder = place.exists(), place.is_dir(), "/" in name and place.parent.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, no such home: no name of a folder
        exists = is_folder = in_folder = False
    hub = HUB_NAME.fullmatch(name) and not is_data_file_name(name) and not name.startswith(_FOLDERS)
    if is_folder or (hub and not exists and not in_folder and ("/" in name or not owner)):
        return
    # A text may stand in the wrong place, and be a record.
    shown = "(not shown: it is a text)" if re.search(r"\s", name) else repr(name)
    raise ModelError(
        f"cannot load model {shown}: it is {'a file' if exists else 'no local folder'}",
        fix="give a local folder with config.json and safetensors, or a model of the hub as owner/name",
    )


def model_source(settings: ModelSettings) -> dict[str, Any]:
    """Where transformers' loaders find the model. Raises ModelError as ``refuse_unknown_model``."""
    refuse_unknown_model(settings.name)
    folder = Path(settings.name).expanduser()
    is_local = folder.is_dir()
    return {
        "pretrained_model_name_or_path": str(folder) if is_local else settings.name,
        "revision": settings.revision,
        "local_files_only": is_local,  # what a folder lacks is not sought elsewhere
    }
