"""What other tools call a setting, and what it is called here: asked before names that are spelt alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from privlora.config.foreign_names import EVERYWHERE, Here, Refused

_STEPS_NOT_EPOCHS = (
    "it counts optimizer steps, each of which is a noisy release that epsilon pays for; how many make an epoch depends "
    "on the private number of records"
)
_BANDS = "above 1, or auto: a step's noise takes back a part of that of the steps before it (DP-BandMF)"
_DP_ZO = (
    "of the method dp-zo: how far to both sides of the adapter losses are compared. The epsilon that is promised is "
    "privacy.target_epsilon"
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

_TEXTS = Here(
    "synthesis.samples",
    "how many texts are released; without it as many as a population has, which is seeds x (1 + variations)",
)

OTHER_NAMES: Final[Mapping[str, Mapping[str, Here]]] = {
    **dict.fromkeys(("", "adapter", "data", "run"), _OF_LOADING),
    "model": {name: here for name, here in _OF_LOADING.items() if here.setting != f"model.{name}"},
    "method": {
        **_OF_LOADING,
        **dict.fromkeys(("eps", "mu"), Here("method.perturbation", _DP_ZO)),
    },
    "privacy": {**_OF_LOADING, "mechanism": Here("privacy.bands", _BANDS)},
    "auto": dict.fromkeys(
        ("path", "paths", "files", "records", "public", "public_file", "public_path", "public_records"),
        Here("auto.file", "PUBLIC records of the form of the private ones, never private ones"),
    ),
    "synthesis": dict.fromkeys(
        (
            *("count", "n", "n_samples", "n_texts", "num_samples", "num_texts", "num_records", "num_outputs"),
            *("num_return_sequences", "number_of_texts", "num_synthetic_samples", "size", "texts"),
        ),
        _TEXTS,
    ),
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
    "model.dtype": {
        **dict.fromkeys(
            ("float16", "fp16", "half", "16", "torch.float16"),
            "bfloat16 or float32: in float16 gradients overflow, and clipping would bound the wrong norm",
        ),
        **dict.fromkeys(("bf16", "torch.bfloat16", "bf16-true", "bf16-mixed"), "write bfloat16"),
        **dict.fromkeys(("fp32", "float", "32", "torch.float32", "32-true"), "write float32"),
    },
    "method.name": {
        **dict.fromkeys(
            ("dp-bandmf", "band-mf", "bandmf", "dp-ftrl"),
            "correlated noise is a setting beside a method: set privacy.bands, as bands: auto, and write dp-sgd",
        ),
        **dict.fromkeys(
            ("lora", "dp-lora", "dplora", "plain-lora"),
            "plain DP-LoRA is dp-adamw or dp-sgd; lora+, lora-fa and lora-rite are rules of their own",
        ),
        **dict.fromkeys(("lora-plus", "loraplus"), "write lora+"),
        "adam": "write dp-adamw, or prism; adamw adds no noise and is for comparison",
        "sgd": "write dp-sgd",
        **dict.fromkeys(("zo", "zo-sgd", "mezo", "dp-mezo", "dp-zero"), "write dp-zo"),
    },
    "method.schedule": {
        "constant_with_warmup": "write constant, and how many steps in method.warmup_steps",
        "cosine_with_restarts": "write cosine; no schedule starts again",
        "cosine_with_min_lr": "write cosine; it ends at 0",
        "polynomial": "write linear or cosine",
        "inverse_sqrt": "write constant, linear or cosine",
    },
    "method.clipping": {
        **dict.fromkeys(("ghost", "global"), "write flat, which clips one norm over all modules"),
        **dict.fromkeys(
            ("per_layer", "per-layer", "layerwise", "layer-wise", "group-wise", "group_wise"),
            "write per-module, which bounds each adapted module by clip_norm / sqrt(modules)",
        ),
        **dict.fromkeys(("adaptive", "quantile"), "set privacy.clip_quantile: 0.5"),
        **dict.fromkeys(("auto", "auto-s", "auto-v"), "write automatic"),
    },
    "privacy.unit": {
        **dict.fromkeys(("example", "sample", "sequence", "document", "row", "text"), "write record"),
        **dict.fromkeys(
            ("person", "patient", "client", "author", "group", "household"),
            "write user, and its column in privacy.user_column",
        ),
    },
    "data.loss_on": {
        **dict.fromkeys(("assistant", "response", "answer", "output", "completions"), "write completion"),
        **dict.fromkeys(("full", "everything", "sequence", "text"), "write all"),
    },
}
"""Setting -> a value that belongs elsewhere -> how to write what is meant."""


NO_GROUPS: Final[Mapping[str, str]] = {
    "limits": "remove it: limits are set by each client's owner, where the client runs (the node config of its "
    "SuperNode; in Python, limits=Limits(...) of a Client), since a server could lift what it writes itself",
}
"""Groups that a run's settings cannot have -> where what they mean is set."""


TRUTHS: Final[Mapping[str, str]] = {
    "gradient_checkpointing": "write non-reentrant (or reentrant) for true, none for false",
    "quantization": "write 4bit or 8bit for true, and leave it out for false",
    "init": "write random, w0-subspace or spectral-split; leave it out for the method's own start",
    "attn_implementation": "write sdpa or flash_attention_2; leave it out for what transformers takes",
    "clipping": "write flat, automatic, spectral or per-module",
    "averaging": "write a decay such as 0.9, or 0 for none",
    "tokens_per_micro_batch": "write auto, or a number of tokens",
}
"""Setting that other tools switch on and off -> how to write what is meant."""


def plain(name: object) -> str:
    """As names stand in these tables.

    >>> plain("Max-Grad-Norm")
    'max_grad_norm'
    """
    return str(name).lower().replace("-", "_")


def called_here(
    group: str, name: object, value: object = None, content: Mapping[str, Any] | None = None
) -> str | None:
    """How to mend a setting's name from another tool; None for a name that is not in the table.

    value: what it was set to; content: all groups as given. From both, numbers are worked out where they can be.

    >>> called_here("federation", "num-rounds")
    'it is called federation.rounds here'
    >>> called_here("method", "epochs", 3, {"privacy": {"public_dataset_size": 10000, "expected_batch_size": 64}})[-31:]
    'says how many; here steps = 469'
    """
    found: Here | Refused | None = OTHER_NAMES.get(group, {}).get(plain(name))
    if found is None and "." not in group and group != "federation":
        found = EVERYWHERE.get(plain(name))
    if found is None:
        return None
    if isinstance(found, Refused):
        instead = "" if found.instead is None else f"; instead: {found.instead}"
        return f"remove it: {found.why}{instead}"
    number = _NUMBERS[found.setting](plain(name), value, content or {}) if found.setting in _NUMBERS else None
    return (
        f"it is called {found.setting} here"
        + (f": {found.but}" if found.but else "")
        + (f"; here {number}" if number else "")
    )


def _number(value: object) -> float | None:
    """Above 0; YAML's 2e-4 is a text to PyYAML."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if 0 < found < math.inf else None


def _of_privacy(content: Mapping[str, Any], name: str) -> float | None:
    privacy = content.get("privacy")
    return _number(privacy.get(name)) if isinstance(privacy, Mapping) else None


def _steps_of_epochs(name: str, value: object, content: Mapping[str, Any]) -> str | None:
    epochs, n = _number(value), _of_privacy(content, "public_dataset_size")
    b = _of_privacy(content, "expected_batch_size")
    if "epoch" not in name or epochs is None or n is None or b is None:
        return None
    return f"steps = {max(1, round(epochs * n / b))}"


def _warmup_of_share(name: str, value: object, content: Mapping[str, Any]) -> str | None:
    share, steps = _number(value), _of_privacy(content, "steps")
    if not name.endswith(("ratio", "fraction")) or share is None or steps is None or share >= 1:
        return None
    return f"warmup_steps = {round(share * steps)}"


_NUMBERS: Final[Mapping[str, Callable[[str, object, Mapping[str, Any]], str | None]]] = {
    "privacy.steps": _steps_of_epochs,
    "method.warmup_steps": _warmup_of_share,
}
"""Setting -> what it would be, where the file says enough."""
