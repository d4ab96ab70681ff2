"""One thread (the models are tiny), and a seed for whatever a test does not seed itself."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
