"""What other tools call a setting, and what it is called here: asked before names that are spelt alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Here(NamedTuple):
    """setting: in full, as ``group.name``. but: what is different about it here."""

    setting: str
    but: str | None = None


_STEPS_NOT_EPOCHS = (
    "it counts optimizer steps, each of which is a noisy release that epsilon pays for; how many make an epoch depends "
    "on the private number of records"
)
_NUMBER_NOT_SHARE = "a number of clients, not a share of them"

_WITHIN = "write it inside, as `quantization: {{{0}: …}}` of the group model"
_PACKED = {
    name: Here("model.quantization", _WITHIN.format(name))
    for name in (
        "load_in_4bit",
        "load_in_8bit",
        "bnb_4bit_quant_type",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant",
        "llm_int8_threshold",
        "llm_int8_skip_modules",
    )
}
# What transformers' from_pretrained is given, at a place where privlora does not look for it.
_OF_LOADING = _PACKED | {
    "quantization": Here("model.quantization"),
    "quantization_config": Here("model.quantization"),
    "bnb_config": Here("model.quantization"),
    "torch_dtype": Here("model.dtype"),
    "attn_implementation": Here("model.attn_implementation"),
    "attention_implementation": Here("model.attn_implementation"),
    "use_flash_attention_2": Here("model.attn_implementation", "its value flash_attention_2"),
    "device_map": Here("model.device_map"),
}

OTHER_NAMES: Final[Mapping[str, Mapping[str, Here]]] = {
    **dict.fromkeys(("", "adapter", "data", "method", "privacy", "run"), _OF_LOADING),
    "model": {name: here for name, here in _OF_LOADING.items() if here.setting != f"model.{name}"},
    "federation": {
        "aggregation": Here("federation.rule"),
        "strategy": Here("federation.rule"),
        "num_clients": Here("federation.clients"),
        "min_fit_clients": Here("federation.clients_per_round"),
        "min_available_clients": Here("federation.clients_per_round"),
        "fraction_fit": Here("federation.clients_per_round", _NUMBER_NOT_SHARE),
        "client_fraction": Here("federation.clients_per_round", _NUMBER_NOT_SHARE),
        "num_rounds": Here("federation.rounds"),
        "server_rounds": Here("federation.rounds"),
        "local_epochs": Here("federation.local_steps", _STEPS_NOT_EPOCHS),
        "proximal_mu": Here("federation.proximal", "it belongs to rule: fedprox"),
        "secagg": Here("federation.secure_aggregation"),
        "secure_agg": Here("federation.secure_aggregation"),
        "threshold": Here("federation.survivors"),
    },
    "federation.clients": {
        "id": Here("name"),
        "data": Here("path"),
        "file": Here("path"),
    },
}
"""Group -> name elsewhere, in small letters with underscores -> name here. The group "" holds names of groups."""

OTHER_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "federation.privacy_model": {
        "user": "privacy.unit: user with privacy.user_column hides all records of a user; privacy_model: record goes "
        "with it",
    },
}
"""Setting -> a value that belongs elsewhere -> how to write what is meant."""


NO_GROUPS: Final[Mapping[str, str]] = {
    "limits": "remove it: limits are set by each client's owner, where the client runs (the node config of its "
    "SuperNode; in Python, limits=Limits(...) of a Client), since a server could lift what it writes itself",
}
"""Groups that a run's settings cannot have -> where what they mean is set."""


def called_here(group: str, name: object) -> str | None:
    """How to mend a setting's name from another tool; None for a name that is not in the table.

    >>> called_here("federation", "num-rounds")
    'it is called federation.rounds here'
    """
    found = OTHER_NAMES.get(group, {}).get(str(name).lower().replace("-", "_"))
    if found is None:
        return None
    return f"it is called {found.setting} here" + (f": {found.but}" if found.but else "")
