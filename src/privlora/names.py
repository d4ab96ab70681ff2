"""Names of models and adapters: of a hub, or of a folder of this machine, whose place is never published. And names of
layers, as settings select them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from unicodedata import category

# With a folder for its owner or without. What is longer, or begins otherwise, is a path.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


UNNAMED = "unnamed"
"""Of a loaded model that does not say where it is from."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What peft writes of an adapter: its configuration and its weights."""

KEYWORD = re.compile(r"[A-Za-z_]\w{0,40}", re.ASCII)
"""A name that a chat template can read."""

PRIVATE_FOLDER, PUBLIC_FOLDERS, SETTINGS_FILE = "private", ("release", "not-private"), "config.resolved.yaml"
"""The parts of a run's folder: what is never published, and what may be seen; and where a run keeps its settings."""

RANDOM, W0_SUBSPACE, SPECTRAL_SPLIT = "random", "w0-subspace", "spectral-split"
PUBLIC_GRADIENT = "public-gradient"
"""Where training starts (`coordinates.starts`), as settings and reports name it; all else is an adapter's folder."""


ALL_LINEAR, FEED_FORWARD = "all-linear", "feed-forward"
"""Words for target_modules: every linear layer but the output, as in peft; those of them that are in no attention, and
do not send tokens to experts."""

KINDS = (ALL_LINEAR, FEED_FORWARD)

UNUSED, MIXED = "not called when the model reads text", "not given one row of tokens a record"
REFUSED, NARROW = "peft does not load them in this model", "narrower than the rank"
LEFT_OUT = (UNUSED, MIXED, REFUSED, NARROW)
"""Why a word for target_modules leaves out layers."""

EITHER = "auto"
"""Feed-forward where that was measured to do better: where names tell it from attention, and no token is routed."""


def is_of(kind: str, name: str) -> bool:
    """Whether a linear layer is of one of `KINDS`, by the modules that it is in.

    >>> is_of("feed-forward", "layers.0.mlp.up_proj"), is_of("feed-forward", "layers.0.self_attn.q_proj")
    (True, False)
    >>> is_of("feed-forward", "h.0.attn.c_proj"), is_of("all-linear", "h.0.attn.c_proj")
    (False, True)
    >>> is_of("feed-forward", "layers.0.mlp.router"), is_of("feed-forward", "layers.0.mlp.gate.wg")
    (False, False)
    """
    parts = name.lower().split(".")
    attends = any("attn" in each or "attention" in each for each in parts)
    return kind == ALL_LINEAR or not (attends or _ROUTERS.intersection(parts))


def kind_for(linear: Sequence[str], modules: Iterable[str]) -> str:
    """Which of `KINDS` auto stands for. linear: names of the linear layers but the output; modules: of all.

    >>> kind_for(["0.attn.q", "0.mlp.up"], ["0", "0.attn", "0.mlp"]), kind_for(["0.attn.q", "0.mlp.up"], ["0.mlp.gate"])
    ('feed-forward', 'all-linear')
    """
    chosen = sum(is_of(FEED_FORWARD, name) for name in linear)
    routed = any(_ROUTERS.intersection(name.lower().split(".")) for name in modules)
    return FEED_FORWARD if 0 < chosen < len(linear) and not routed else ALL_LINEAR


_ROUTERS = frozenset(("router", "gate", "shared_expert_gate"))


def selects(patterns: str | Sequence[str], name: str) -> bool:
    """Whether names of layers select one: a text is a regular expression over whole names, as in peft; a list holds
    ends of names.

    >>> selects(["q_proj"], "layers.0.q_proj"), selects("layers.q_proj", "layers.0.q_proj")
    (True, False)
    """
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in patterns)


def layer_index(name: str) -> int | None:
    """The number in a layer's name."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def is_pattern(text: str) -> bool:
    """Whether it is a regular expression."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def is_local(name: str) -> bool:
    """Whether a model or an adapter of this name is a folder of this machine, as loaders look for it."""
    return HUB_NAME.fullmatch(name) is None or Path(name).is_dir()


def published_name(name: str) -> str:
    """How it is named in what is published: from a hub by its whole name, a local folder without where it lies."""
    return Path(in_full(name)).name if is_local(name) else name


def base_to_load(name: str, *, local: bool) -> str:
    """What a release tells loaders of its base model, ``published_name``: a hub's name; or a path to fill in, which no
    hub takes for one of its names.

    >>> base_to_load("org/model", local=False), base_to_load("model", local=True)
    ('org/model', 'path/to/model')
    """
    return f"path/to/{name}" if local or name == UNNAMED else name


def in_full(name: str) -> str:
    """The name of a folder of this machine from the root on, so that it is the same folder from everywhere."""
    path = os.path.abspath(os.path.expanduser(name))
    return path if os.path.isdir(path) or is_local(name) else name


_HIDDEN: Final = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # kinds of characters
_SEEN: Final = "\n\u200c\u200d"  # a line's end, and what joins letters of some scripts


def is_seen(character: str) -> bool:
    """Whether a reader sees it, and it turns no others round."""
    return character in _SEEN or category(character) not in _HIDDEN
