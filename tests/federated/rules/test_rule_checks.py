"""No answer of one client reaches a rule unless it is what public numbers say."""

from __future__ import annotations

import math

import pytest
import torch
from rule_cases import ALL, a_federation, a_start, respond, settings_of
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.rules import RULES, Tensors
from privlora.federated.rules.checks import refuse_unfit

SHAPES = {"0.left": (2, 4, 3), "0.right": (2, 5, 3)}


def fit(value: float = 1.0) -> Tensors:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_honest_answers_pass(name: str, private: bool) -> None:
    rule, client = RULES[name](a_start(), settings_of(private=private)), a_federation(1)[0]
    for number in (1, 2):
        for stage in RULES[name].stages:
            message = respond(rule, client, stage, number, rule.broadcast(stage))
            refuse_unfit(message, type(rule).shapes(stage, number, rule.groups, rule.settings)[1], 1e3)
            rule.add(stage, message, 1.0)
            rule.close(stage)


def test_the_norm_is_that_of_all_tensors() -> None:
    norm = math.sqrt(2 * (4 + 5) * 3)
    refuse_unfit(fit(), SHAPES, norm * (1 + 1e-9))
    with pytest.raises(RunError, match="the norm of an answer is above"):
        refuse_unfit(fit(), SHAPES, norm * (1 - 1e-9))


def with_entry(value: float, dtype: torch.dtype = torch.float32) -> Tensors:
    message = {name: tensor.to(dtype) for name, tensor in fit().items()}
    message["0.right"][1, 4, 2] = value
    return message


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (with_entry(math.nan), "not finite"),
        (with_entry(math.inf), "not finite"),
        (with_entry(-math.inf), "not finite"),
        (with_entry(1e30), "norm"),
        (with_entry(1e300, torch.float64), "norm"),
        ({"0.left": fit()["0.left"]}, "lacks 1 of 2 tensors and has 0 others"),
        (fit() | {"secret": torch.zeros(1)}, "lacks 0 of 2 tensors and has 1 others"),
        ({}, "lacks 2 of 2"),
        (fit() | {"0.left": torch.zeros(2, 4, 2)}, "shape"),
        (fit() | {"0.left": torch.zeros(2, 12)}, "shape"),
        (fit() | {"0.left": torch.zeros(2, 4, 3, 1)}, "shape"),
        (fit() | {"0.left": torch.zeros(2, 4, 3, dtype=torch.int64)}, "floating-point"),
        (fit() | {"0.left": torch.zeros(2, 4, 3, dtype=torch.bool)}, "floating-point"),
        (fit() | {"0.left": torch.zeros(2, 4, 3, dtype=torch.complex64)}, "floating-point"),
        (fit() | {"0.left": torch.zeros(2, 4, 3).to_sparse()}, "plain tensor"),
        (fit() | {"0.left": torch.zeros(2, 4, 3, device="meta")}, "plain tensor"),
        (fit() | {"0.left": [[0.0]]}, "plain tensor"),
    ],
)
def test_unfit_answers_are_refused(message: dict[str, Tensor], said: str) -> None:
    with pytest.raises(RunError, match=said) as caught:
        refuse_unfit(message, SHAPES, 1e3)
    assert "secret" not in str(caught.value)


def test_half_precision_is_measured_without_overflow() -> None:
    message = {name: tensor.to(torch.float16) for name, tensor in fit(300.0).items()}
    refuse_unfit(message, SHAPES, 1e4)
    with pytest.raises(RunError, match="norm"):
        refuse_unfit(message, SHAPES, 1e3)
