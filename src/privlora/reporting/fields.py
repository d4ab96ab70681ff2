"""What a report may hold: the schema of privacy_report.json, as each name's kind.

Whoever adds a line states that it is public: no count, length, clock or path of what is private. What a ledger, a table
or the release's rows decide is `HELD`, since it is made again and compared. What is left are numbers, words of a list,
and names and quoted texts, which are the publisher's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from privlora.config.groups import PACKINGS
from privlora.config.methods import CLIPPINGS
from privlora.names import KEYWORD, LEFT_OUT, is_seen
from privlora.ranges import SLACKS

_HASH: Final = re.compile("[0-9a-f]{64}")
_LONGEST: Final = 4000  # characters
_WORD: Final = re.compile(r"[A-Za-z][\w+-]{0,30}", re.ASCII)


def HELD(value: object) -> bool:
    """Whatever it is: it is made again."""
    return True


def NUMBER(value: object) -> bool:
    """A number, yes or no, or null."""
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def TEXT(value: object) -> bool:
    """A name or a quoted text, or null: without characters that no reader sees, or that turn others round."""
    if not isinstance(value, str):
        return value is None
    return len(value) <= _LONGEST and all(map(is_seen, value))


def WORD(value: object) -> bool:
    """A name in a table of privlora, or of who extends it: no blank is in it."""
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def QUOTED(value: object) -> bool:
    """A text that pages show with quotation marks and escapes, or null."""
    return value is None or isinstance(value, str)


def TEXTS(value: object) -> bool:
    """A quoted text, or a list of them."""
    return all(map(QUOTED, value)) if isinstance(value, list) else QUOTED(value)


def KWARGS(value: object) -> bool:
    """Of a chat template: names as in Python, and numbers, texts or null."""
    return isinstance(value, dict) and all(
        KEYWORD.fullmatch(name) and (NUMBER(each) or QUOTED(each)) for name, each in value.items()
    )


def HASH(value: object) -> bool:
    """A SHA-256, or null."""
    return value is None or (isinstance(value, str) and _HASH.fullmatch(value) is not None)


def one_of(*words: str | float | None) -> Callable[[object], bool]:
    """One of these words."""
    return lambda value: value in words


def numbers(names: str, *lists: str) -> dict[str, Any]:
    """Names with spaces between, each of a number; and names, each of a list of numbers."""
    return {**dict.fromkeys(names.split(), NUMBER), **{key: [NUMBER] for key in lists}}


_FAULT: Final = one_of(None, "ends at once", "says nothing", "repeats itself", "repeats the prompt")
_ANSWER: Final = {"text": TEXT, "fault": _FAULT}
_OF_SETTINGS: Final = (
    "beta1 beta2 weight_decay floor learning_rate_ratio error_feedback right_weight metric_power perturbation alpha "
    "ridge top_k hold_out beside"
)
_OF_CHOICE: Final = (
    "aim of_its_own untrained in_place_of_records held_out drawn equal_from equal_to turning right_weight median_norm "
    "clip_norm private_runs private_epsilon"
)
_VOTES: Final = "epochs keep requests answers dpo_learning_rate"

FIELDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(
        ("schema_version", "stamp", "statement", "means", "epsilon_over_steps", "target_epsilon"), HELD
    ),
    **dict.fromkeys(("evaluation", "not_protected", "files", "sha256"), HELD),
    "versions": dict.fromkeys(("privlora", "dp-accounting", "torch", "transformers", "peft", "python"), HELD),
    "noise": {
        **numbers("noise_std clip_quantile last_clip_norm intrinsic draws"),
        "clipping_slack": one_of(*SLACKS),
        "law": TEXT,
        "bands": numbers("noise_std_of_first_step", "coefficients"),
        "modules": [{"name": TEXT, **numbers("m n r closed_form measured")}],
    },
    "adapter": {
        **dict.fromkeys(("base_model", "base_revision", "init"), QUOTED),
        **dict.fromkeys(("target_modules", "exclude_modules"), TEXTS),
        **numbers("base_is_local rank lora_alpha use_rslora public_seed"),
        "base_sha256": HASH,
        "base_quantization": one_of(*PACKINGS),
        "coverage": {**numbers("share experts"), "left_out": {key: [TEXT] for key in LEFT_OUT}},
        "exported": one_of("last iterate", "average of the iterates"),
        "modules": [{"name": TEXT, **numbers("m n", "singular_values")}],
    },
    "method": {
        **dict.fromkeys(("name", "summary", "reference", "coordinates", "described"), TEXT),
        **dict.fromkeys(("compares", "releases"), HELD),
        **numbers(
            "learning_rate relative_rate warmup_steps averaging steps max_length dropout lora_dropout unchecked"
        ),
        **numbers(_OF_SETTINGS),
        "choice": {
            "row": WORD,
            **numbers(_OF_CHOICE),
            "rows": [{"name": WORD, **numbers("learning_rate loss spread draws")}],
        },
        "optimizer": QUOTED,
        "schedule": one_of("constant", "linear", "cosine"),
        "clipping": one_of("none", *CLIPPINGS),
        "loss_on": one_of("all", "completion"),
        "form": {"prompt": QUOTED, "completion": QUOTED, "template": one_of("auto", "chat", "none")},
        "chat_template_sha256": HASH,
        "chat_template_kwargs": KWARGS,
        "span": numbers("", "alpha", "ridge", "directions", "texts", "cosine", "kappa"),
        "public_texts": {
            "generator": one_of("model", "file", "endpoint", "callable"),
            **numbers("count evolves warm_start_epochs distinct"),
            "votes": {"embedding": TEXT, **numbers(_VOTES)},
        },
    },
    "federation": {
        "rule": {"name": TEXT, **numbers("exact common")},
        **dict.fromkeys(("noise_by", "statement_of"), TEXT),
        **numbers("secure_sums threshold ring_bits share_noise_std clients_per_round local_steps"),
        "lattice": numbers("entries width"),
        "update_noise": numbers("to_clip_norm clients_needed"),
        "colluding": [numbers("clients noise_multiplier epsilon")],
        "clients": [
            {
                "name": TEXT,
                **numbers("weight rounds_asked rounds_answered steps_charged steps_planned"),
                **numbers("epsilon epsilon_planned delta"),
            }
        ],
        "rounds": {
            **numbers("planned done void"),
            "log": [{"dropped": [TEXT], **numbers("round asked answered bytes_down bytes_up void")}],
        },
        "bytes": numbers("down up formula_down formula_up"),
    },
    "answers": {
        "asked": one_of("own", "data.evaluation"),
        **numbers("max_new_tokens begun"),
        "ends_at_once": numbers("base adapter"),
        "shown": [{"prompt": TEXT, "base": _ANSWER, "adapter": _ANSWER}],
    },
    "classes": {"num_labels": NUMBER, "names": [QUOTED]},
    "preferences": {"loss": one_of("dpo"), "beta": NUMBER},
    "texts": {
        "column": QUOTED,
        **numbers("count asked_for temperature of_a_finished_run"),
        "from": one_of("adapter", "population"),
        "generator": one_of("model", "file", "endpoint", "callable"),
        "words": QUOTED,
    },
    "quality": {
        **numbers("perplexity near_copies", "tokens_per_text", "perplexity_per_text"),
        "distinct": numbers("1 2 3"),
        "near_public": numbers("synthesis.file adapter.public_text data.evaluation"),
    },
}


def strange(value: object, kind: Any = FIELDS, place: str = "") -> Iterator[str]:
    """Where a report holds what no report does. null is of any group's kind."""
    if isinstance(kind, list) and isinstance(value, list):
        for each in value:
            yield from strange(each, kind[0], place)
    elif isinstance(kind, Mapping):
        if isinstance(value, Mapping):
            for name, inner in value.items():
                where = f"{place}.{name}" if place else name
                if name in kind:
                    yield from strange(inner, kind[name], where)
                else:
                    yield where
        elif value is not None:
            yield place
    elif isinstance(kind, list) or not kind(value):
        yield place
