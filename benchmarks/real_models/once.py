"""Each half of the product once on SmolLM2-135M-Instruct, by the commands that a user types; a line each.

    python benchmarks/real_models/once.py --models MODELS --assets ASSETS --work FOLDER
    python benchmarks/real_models/once.py --show

Every case writes a YAML next to its records in FOLDER, plans it, trains it and verifies the release. A case whose line
is there is left out. Losses are means over held-out records, in nats a token; one run each, so no spread is known.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

RESULTS = Path(__file__).parents[1] / "results" / "once.jsonl"
MODEL = "smollm2-135m-instruct"
NOTES = {"path": "few.jsonl", "text": "text", "evaluation": "few_eval.jsonl", "max_length": 96}
FEW = {"delta": 1e-4, "target_epsilon": 3, "steps": 5, "expected_batch_size": 50, "public_dataset_size": 200}
TEXTS = {
    "preset": "medical-abstract",
    "seeds": 24,
    "variations": 1,
    "max_new_tokens": 64,
}
CLASSES = {
    "path": "cls.jsonl",
    "text": "text",
    "label": "label",
    "labels": {0: "negative", 1: "positive"},
    "evaluation": "cls_eval.jsonl",
    "max_length": 64,
}
OF_CLASSES = {
    **FEW,
    "delta": 1e-5,
    "steps": 10,
    "expected_batch_size": 96,
    "public_dataset_size": 1500,
}
PAIRS = {
    "path": "prefs.jsonl",
    "prompt": "question",
    "chosen": "better",
    "rejected": "worse",
    "evaluation": "prefs_eval.jsonl",
    "max_length": 192,
}
OF_PAIRS = {**FEW, "target_epsilon": 8, "steps": 4, "expected_batch_size": 40, "public_dataset_size": 400}


def _few(method: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"data": NOTES, "privacy": FEW, "method": dict(method), **more}


def _clinics(rule: str, **timetable: int) -> dict[str, Any]:
    data = {name: value for name, value in NOTES.items() if name != "path"}
    privacy = {name: value for name, value in FEW.items() if name != "steps"}
    clients = [{"name": f"clinic{i}", "path": f"clinic{i}.jsonl"} for i in range(5)]
    return {
        "data": data,
        "privacy": {**privacy, "expected_batch_size": 60, "public_dataset_size": 1000},
        "adapter": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
        "federation": {"clients": clients, "rule": rule, **timetable},
    }


AUTO = {"name": "prism", "learning_rate": "auto"}
CASES: dict[str, dict[str, Any]] = {
    "few-prism": _few({"name": "prism"}),
    "few-prism-high": _few({"name": "prism", "learning_rate": 0.635}),  # defaults of before: of toys
    "few-prism-auto": _few(AUTO),
    "few-pe": _few({"name": "pe-sgd"}, synthesis=TEXTS),
    "few-span": _few({"name": "span-prism"}, synthesis=TEXTS),
    "few-span-high": _few({"name": "span-prism", "learning_rate": 4.68}, synthesis=TEXTS),
    "few-span-low": _few({"name": "span-prism", "learning_rate": 0.468}, synthesis=TEXTS),
    "few-aug": _few({"name": "aug-pe"}, synthesis={**TEXTS, "epochs": 2})
    | {"privacy": {**FEW, "expected_batch_size": 200}},
    "few-4bit": _few(AUTO) | {"model": {"quantization": "4bit"}},
    "few-checkpointing": _few(AUTO) | {"model": {"gradient_checkpointing": "non-reentrant"}},
    "cls": {"data": CLASSES, "privacy": OF_CLASSES, "method": {"name": "prism"}},
    "prefs": {"data": PAIRS, "privacy": OF_PAIRS, "method": {"name": "prism"}},
    "prefs-high": {"data": PAIRS, "privacy": OF_PAIRS, "method": {"name": "prism", "learning_rate": 0.71}},
    "prefs-auto": {"data": PAIRS, "privacy": OF_PAIRS, "method": AUTO},
    "fed-joint": _clinics("joint", rounds=4),
    "fed-fedask": _clinics("fedask", rounds=2, local_steps=2),
    "fed-fedavg": _clinics("fedavg", rounds=2, local_steps=2),
}


def write_records(assets: Path, folder: Path) -> None:
    def rows(name: str, part: str) -> list[dict[str, Any]]:
        with gzip.open(assets / "data" / name / f"{part}.jsonl.gz", "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def write(name: str, records: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")

    notes = [{"text": row["text"]} for row in rows("pubmed", "train")]
    write("few.jsonl", notes[:200])
    write("few_eval.jsonl", [{"text": row["text"]} for row in rows("pubmed", "validation")[:40]])
    for i in range(5):
        write(f"clinic{i}.jsonl", notes[300 + 200 * i :][: 160 + 20 * i])
    for name, part, count in (("cls", "train", 1500), ("cls_eval", "validation", 150)):
        found = [{"text": row["sentence1"], "label": row["label"]} for row in rows("glue/sst2", part)[:count]]
        write(f"{name}.jsonl", found)
    others = random.Random(3)
    for name, part, count in (("prefs", "train", 400), ("prefs_eval", "validation", 40)):
        known = rows("e2e_nlg", part)[:count]
        found = [
            {"question": row["mr"], "better": row["ref"], "worse": others.choice(known)["ref"]}
            for row in known
        ]
        write(f"{name}.jsonl", found)


def run(name: str, models: Path, work: Path) -> dict[str, Any]:
    case = CASES[name]
    settings = {"adapter": {"r": 8}, **case, "run": {"output": f"runs/{name}"}}
    settings["model"] = {"name": str((models / MODEL).resolve()), **case.get("model", {})}
    (work / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    release = f"runs/{name}/release"
    seconds = {}
    for command, *of in (
        ("plan", f"{name}.yaml"),
        ("train", f"{name}.yaml"),
        ("verify", release),
    ):
        began = time.perf_counter()
        with (work / f"{name}-{command}.txt").open("w", encoding="utf-8") as shown:
            subprocess.run(
                [sys.executable, "-m", "privlora", command, *of],
                cwd=work,
                stdout=shown,
                stderr=subprocess.STDOUT,
                check=True,
            )
        seconds[command] = round(time.perf_counter() - began)
    return line_of(name, work / release, seconds)


def line_of(name: str, release: Path, seconds: Mapping[str, int]) -> dict[str, Any]:
    report = json.loads((release / "privacy_report.json").read_text(encoding="utf-8"))
    first, *_, last = report["evaluation"]
    method, federation = report["method"], report.get("federation")
    found = {
        "case": name,
        "method": method["name"],
        "rule": None if federation is None else federation["rule"]["name"],
        "epsilon": round(report["statement"]["epsilon"], 4),
        "steps": report["statement"]["steps_charged"],
        "learning_rate": method["learning_rate"],
        "untrained": round(first["loss_per_example"], 4),
        "trained": round(last["loss_per_example"], 4),
        "score": [round(each["accuracy"], 4) for each in (first, last)],
        "seconds": dict(seconds),
    }
    return found


def table(lines: list[dict[str, Any]]) -> str:
    rows = ["| case | method | ε | steps | learning rate | loss | accuracy | seconds |", "|---" * 8 + "|"]
    for line in lines:
        trains = sum(line["seconds"].get(name, 0) for name in ("train", "federate"))
        what = line["method"] if line["rule"] is None else f"{line['method']}, rule {line['rule']}"
        rows.append(
            f"| {line['case']} | {what} | {line['epsilon']:g} | {line['steps']} | {line['learning_rate']:.3g} "
            f"| {line['untrained']:.3f} to {line['trained']:.3f} | {line['score'][0]:.3f} to "
            f"{line['score'][1]:.3f} | {trains} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--work", type=Path, default=Path("once"))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--show", action="store_true", help="print the table of what is there; run nothing")
    args = parser.parse_args()
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if args.show:
        print(table(lines))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    write_records(args.assets, args.work)
    os.environ["HF_HUB_OFFLINE"] = "1"
    machine = describe_machine()
    for name in args.only:
        if any(line["case"] == name for line in lines):
            continue
        lines.append({**run(name, args.models, args.work), "machine": machine})
        with RESULTS.open("a", encoding="utf-8") as out:
            out.write(json.dumps(lines[-1]) + "\n")
        print(table(lines[-1:]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
