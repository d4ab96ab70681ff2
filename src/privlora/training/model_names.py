"""Which names of models may be asked for over the network, and which can only be local folders."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from privlora.config import ModelSettings
from privlora.data.records import is_data_file_name
from privlora.errors import ConfigError, ModelError, named
from privlora.names import HUB_NAME
from privlora.training.files import RunFolder
from privlora.training.ranks import own_device


def device_of(settings: ModelSettings) -> str:
    """Where the model lies; of several processes each has a GPU of its own. Raises ConfigError if there is none."""
    name = settings.device
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return own_device("cuda") if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"model.device={named(name)} is not available here", fix="use auto or cpu"
        ) from None
    return name


def refuse_no_device(settings: ModelSettings) -> None:
    """Raise ConfigError for a device that is asked for by its name and is not there."""
    if settings.device != "auto":
        device_of(settings)


# Where runs lie unless run.output says otherwise, and where base models do; no owner on the hub is called so.
_FOLDERS = ("runs/", "models/")


def refuse_no_model(settings: ModelSettings) -> None:
    """Raise ModelError for a name under which no base model lies here nor can be fetched. The hub is not asked."""
    refuse_unknown_model(settings.name)
    _refuse_out_of_reach_of_the_hub(settings)


def refuse_unknown_model(name: str, *, owner: bool = False) -> None:
    """Raise ModelError for a name that is no base model's local folder and no name on the hub. Only the local disk is
    asked.

    What looks like a path, or lies in a folder that exists, is a path. owner: a hub name must be owner/name.
    """
    try:
        place = Path(name).expanduser()
        exists, is_folder, in_folder = place.exists(), place.is_dir(), "/" in name and place.parent.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, no such home: no name of a folder
        exists = is_folder = in_folder = False
    if is_folder:
        _refuse_other_folder(place, name)
        return
    hub = HUB_NAME.fullmatch(name) and not is_data_file_name(name) and not name.startswith(_FOLDERS)
    if hub and not exists and not in_folder and ("/" in name or not owner):
        return
    # A text may stand in the wrong place, and be a record.
    shown = "(not shown: it is a text)" if re.search(r"\s", name) else repr(name)
    packed = exists and place.suffix.lower() == ".gguf"
    raise ModelError(
        f"cannot load model {shown}: it is {'a GGUF file' if packed else 'a file' if exists else 'no local folder'}",
        fix=_unpacked(place) if packed else or_near_folder(name, _GIVE),
    )


def _refuse_other_folder(folder: Path, name: str) -> None:
    """Raise ModelError for a local folder that is no base model's: a run's, an adapter's, or without config.json."""
    if (folder / "config.json").is_file():
        return
    adapter, run = folder / "adapter_config.json", RunFolder(folder)
    packed = sorted(folder.glob("*.gguf"))
    if run.settings.exists() or run.ledger.exists():
        what, fix = (
            "it is a run of privlora",
            f"name its base model; to train on top of what it learnt, `privlora export {name} NEW --merge` and name "
            f"NEW; to go on with it, `privlora resume {name}`",
        )
    elif adapter.is_file():
        base = _base_of(adapter)
        what = f"the folder holds an adapter already{f', of {base}' if base else ''}, and no base model"
        fix = f"name the base model; to start from the adapter, set adapter.init={name}"
    elif packed:
        what, fix = "there is no config.json in it, but a GGUF file", _unpacked(packed[0])
    else:
        what, fix = "there is no config.json in it", _inside(folder) + _GIVE
    raise ModelError(f"cannot load model {name!r}: {what}", fix=fix)


def _unpacked(file: Path) -> str:
    """How to make a model's folder of a GGUF file."""
    new = str(file.parent / "unpacked")
    held = f"{json.dumps(str(file.parent))}, gguf_file={json.dumps(file.name)}"
    lines = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig",
        f"AutoModelForCausalLM.from_pretrained({held}, quantization_config=GgufConfig(dequantize=True), "
        f'dtype="bfloat16").save_pretrained({json.dumps(new)})',
        f"AutoTokenizer.from_pretrained({held}).save_pretrained({json.dumps(new)})",
    )
    return (
        f"name the model's original folder, or make one of this file, {new!r}: `pip install gguf`, then "
        f"`python -c {shlex.quote('; '.join(lines))}`"
    )


def _base_of(adapter: Path) -> str | None:
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return named(base.removeprefix("path/to/"), longest=200) if isinstance(base, str) and base else None


_GIVE = "give a local folder with config.json and safetensors, or a model of the hub as owner/name"


def near_folder(name: str) -> str | None:
    """The model's folder next to it whose name is nearest; None where none is near, and of a folder that is there."""
    try:
        place = Path(name).expanduser()
        if place.is_dir():
            return None
        known = {
            each.parent.name: each.parent
            for below in ("*", "*/*")
            for each in place.parent.glob(f"{below}/config.json")
        }
    except (OSError, ValueError, RuntimeError):
        return None
    near = difflib.get_close_matches(place.name, known, n=1, cutoff=_NEAR)
    return str(known[near[0]]) if near else None


def or_near_folder(name: str, fix: str) -> str:
    """How to mend a model's name: by the folder whose name is nearest, if one is near, or else by ``fix``."""
    near = near_folder(name)
    return fix if near is None else f"did you mean the folder {near!r}? Else {fix}"


def told_to_be_of_the_hub(name: str) -> str | None:
    """For who proposes settings: that a name is that of no folder here; None for a folder's. Only the local disk is
    asked."""
    if Path(name).expanduser().is_dir():
        return None
    told = f"model {name!r} is no folder here, so the hub will be asked for it by that name"
    near = near_folder(name)
    return told if near is None else f"{told}. Did you mean the folder {near!r}?"


_NEAR: Final = 0.7


def _inside(folder: Path) -> str:
    """The same of the only model's folder in a folder."""
    found = sorted(each.parent for each in folder.glob("*/config.json"))
    return f"did you mean {str(found[0])!r}? Else " if len(found) == 1 else ""


def _refuse_out_of_reach_of_the_hub(settings: ModelSettings) -> None:
    """Raise ModelError where a model is neither here nor could be fetched, which loaders find out in a minute.

    The hub is not asked: the system looks up its address.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(settings.name).expanduser().is_dir():
        return
    kept = try_to_load_from_cache(settings.name, "config.json", revision=settings.revision)
    host = urlsplit(constants.ENDPOINT).hostname
    if isinstance(kept, str) or host is None:
        return
    why = f"the hub ({host}) cannot be reached"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set, so that the hub is not asked"
    elif getproxies():
        return
    else:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, None)
            return
    raise ModelError(
        f"cannot load model {settings.name!r}: it is no local folder, the hub's cache here does not have it, and {why}",
        fix=or_near_folder(settings.name, "give a local folder, or fetch the model where there is a network"),
    )


def model_source(settings: ModelSettings) -> dict[str, Any]:
    """Where transformers' loaders find the model. Raises ModelError for what they cannot find."""
    refuse_no_model(settings)
    folder = Path(settings.name).expanduser()
    is_local = folder.is_dir()
    return {
        "pretrained_model_name_or_path": str(folder) if is_local else settings.name,
        "revision": settings.revision,
        "local_files_only": is_local,  # what a folder lacks is not sought elsewhere
    }
