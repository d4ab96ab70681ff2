"""The golden runs: four steps of the embedded model for each way of training, with noise that can be repeated."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from privlora.api import Result, federate, fine_tune, resume_run
from privlora.demo import model_path, private_records
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer

NOTES = private_records(64, seed=1)
HELD_OUT = private_records(8, seed=2)


def asked(notes: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each note in two parts."""
    return [{"prompt": note["text"][:30], "completion": note["text"][30:]} for note in notes]


def labelled(notes: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"text": note["text"], "label": str(len(note["text"]) % 2)} for note in notes]


def preferred(notes: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": one["prompt"], "chosen": one["completion"], "rejected": "no"} for one in asked(notes)]


CLIENTS = {name: private_records(32, seed=10 + k) for k, name in enumerate(("north", "south", "west"))}
PRIVACY = {
    "noise_multiplier": 0.9,
    "delta": 1e-3,
    "steps": 4,
    "expected_batch_size": 16,
    "public_dataset_size": 64,
    "clip_norm": 0.5,
    "insecure_noise_seed": 7,
}

Run = Callable[[Path], Any]


def run(records: Any = NOTES, **groups: Any) -> Run:
    """A run of `fine_tune` that differs from the usual one by these groups."""
    privacy = {**PRIVACY, **groups.pop("privacy", {})}
    return partial(_run, records, privacy={k: v for k, v in privacy.items() if v is not None}, **groups)


def _run(records: Any, output: Path, **groups: Any) -> Result:
    usual: dict[str, Any] = {
        "evaluation": HELD_OUT,
        "adapter": {"r": 4},
        "data": {"max_length": 48},
        "loading": {"dtype": "float32"},
    }
    return fine_tune(model_path(), records, output=output, show_progress=False, **{**usual, **groups})


def _interrupted(output: Path) -> Result:
    class Stop(Observer):
        def on_step(self, report: Any) -> None:
            if report.step == 2:
                signal.raise_signal(signal.SIGINT)

        def on_evaluation(self, step: int, loss: float) -> None:
            pass

    with suppress(Interrupted):
        run(observer=Stop())(output)
    return resume_run(output, records=NOTES, evaluation=HELD_OUT)


def together(rule: str, **federation: Any) -> Run:
    """A federation of three clients, two rounds of two steps."""
    privacy = {k: v for k, v in PRIVACY.items() if k != "steps"} | {"public_dataset_size": 96}
    joint = rule == "joint"
    rounds = {"rule": rule, "rounds": 4 if joint else 2, "local_steps": 1 if joint else 2} | federation

    def start(output: Path) -> Any:
        return federate(
            model_path(),
            CLIENTS,
            federation=rounds,
            privacy=privacy,
            evaluation=HELD_OUT,
            adapter={"r": 4},
            data={"max_length": 48},
            loading={"dtype": "float32"},
            output=output,
        )

    return start


def _texts(**more: Any) -> dict[str, Any]:
    return {"file": str(Path(__file__).with_name("public.jsonl")), "seeds": 24, **more}


USER = {
    "public_dataset_size": 25,
    "expected_batch_size": 8,
    "unit": "user",
    "user_column": "patient",
    "max_records_per_user": 2,
}
PLAIN = {"private": False, "noise_multiplier": None, "clip_norm": None}
_METHODS = [
    "prism",
    "prism-paper",
    "dp-adamw",
    "dp-sgd",
    "dp-adambc",
    "lora+",
    "ffa",
    "lora-fa",
    "lamb",
    "lora-rite",
    "riemannian",
    "projected",
    "wishart-m2",
    "dp-zo",
]
_SPANNING = ["pe-sgd", "pe-sgd-fix", "span-prism", "guided-prism", "pdp-sgd", "gep", "b-gep"]
_RULES = [
    "fedavg",
    "fedprox",
    "scaffold",
    "ffa",
    "fedsa",
    "flora",
    "fedex",
    "flexlora",
    "fedsvd",
    "rolora",
    "fedask",
    "tan",
    "alt",
    "joint",
]
_CLIPPINGS = {
    "prism": ("flat", "automatic", "per-module"),
    "dp-sgd": ("automatic", "spectral", "per-module"),
}

CASES: dict[str, Run] = {
    **{name: run(method=name) for name in _METHODS},
    **{
        name: run(method=name, synthesis=_texts(), data={"max_length": 48, "text": "text"})
        for name in _SPANNING
    },
    **{f"rule {name}": together(name) for name in _RULES},
    **{
        f"{method}, clipping {clipping}": run(method={"name": method, "clipping": clipping})
        for method, kinds in _CLIPPINGS.items()
        for clipping in kinds
    },
    **{
        f"prism, start {init}": run(method="prism", adapter={"r": 4, "init": init})
        for init in ("random", "w0-subspace", "spectral-split")
    },
    "prism, start public-gradient": run(
        method="prism",
        adapter={
            "r": 4,
            "init": "public-gradient",
            "public_text": str(Path(__file__).with_name("few_public.jsonl")),
        },
    ),
    **{
        f"prism, optimizer {name}": run(method={"name": "prism", "optimizer": name})
        for name in ("scalar", "sgd")
    },
    "prism, metric": run(method={"name": "prism", "metric_power": 1, "right_weight": 0.5}),
    "prism, rates in entries": run(method={"name": "prism", "relative_rate": False, "averaging": 0.0}),
    "prism, linear schedule": run(method={"name": "prism", "schedule": "linear", "warmup_steps": 1}),
    "dp-sgd with every free ingredient": run(
        method={"name": "dp-sgd", "clipping": "spectral", "averaging": 0.5, "beta1": 0.0}
    ),
    "users": run(privacy=USER),
    "users, dp-adamw": run(method="dp-adamw", privacy=USER),
    "truncated": run(privacy={"max_batch_size": 20}),
    "bands": run(privacy={"bands": 3, "expected_batch_size": 8}),
    "bands, dp-sgd": run(method="dp-sgd", privacy={"bands": 3, "expected_batch_size": 8}),
    "balls in bins": run(privacy={"sampling": "balls-in-bins"}),
    "clip quantile": run(privacy={"clip_quantile": 0.5}),
    "target epsilon": run(privacy={"noise_multiplier": None, "target_epsilon": 8.0}),
    "bfloat16": run(loading={"dtype": "bfloat16"}),
    "checkpointing": run(loading={"dtype": "float32", "gradient_checkpointing": "non-reentrant"}),
    "feed-forward": run(adapter={"r": 4, "target_modules": "feed-forward"}),
    "answers": run(
        asked(NOTES),
        data={"max_length": 48, "prompt": "prompt", "completion": "completion"},
        evaluation=asked(HELD_OUT),
    ),
    "classes": run(
        labelled(NOTES),
        data={"max_length": 48, "text": "text", "label": "label", "labels": ["0", "1"]},
        evaluation=labelled(HELD_OUT),
    ),
    "preferences": run(
        preferred(NOTES),
        data={"max_length": 48, "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        evaluation=preferred(HELD_OUT),
    ),
    "auto on its own texts": run(
        privacy={"clip_norm": "auto"},
        method={"name": "prism", "learning_rate": "auto", "right_weight": "auto"},
    ),
    "resumed": _interrupted,
    "adamw, not private": run(method="adamw", privacy=PLAIN),
    "prism, not private": run(method="prism", privacy=PLAIN),
}
QUICK = ("prism", "dp-adamw", "rule fedavg", "users", "bands", "resumed", "answers")
"""Part of the usual tests."""
