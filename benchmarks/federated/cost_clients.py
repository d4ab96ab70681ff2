"""Rounds of one rule over many clients in one process: seconds of a round, and the peak of memory.

    python benchmarks/federated/cost_clients.py tan 1000 3

2,000 short texts are cut into so many clients, and a round takes 160 of them in expectation. Prints JSON. A process of
its own for each number, so that the peak of memory is that number's.
"""

from __future__ import annotations

import json
import sys

import torch
from cost_rounds import Job, of_many

from privlora.config import ModelSettings
from privlora.demo import model_path
from privlora.training.models import load_model


def main() -> None:
    rule, clients, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    model, tokenizer = load_model(ModelSettings(name=str(model_path())))
    job = Job(model=model, tokenizer=tokenizer, clients=clients, records=2000, batch=160.0, tokens=32)
    print(json.dumps(of_many(job, rule, turns)))


if __name__ == "__main__":
    main()
