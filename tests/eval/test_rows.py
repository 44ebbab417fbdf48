"""Rows of the tables: every one can be constructed, and losses from outside by import path."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, arange
from torch.nn.functional import cross_entropy, normalize

from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE, Objective
from tests.helpers.eval_scripts import load_script

rows = load_script("rows.py")
SIZES = {"num_left": 12, "num_right": 12, "views": False, "seed": 3, "temperature": 0.2}


class Contrast:
    """A plain loss that keeps what it is given."""

    def __init__(self, temperature: float, num_left: int, seed: int) -> None:
        self.temperature, self.given = temperature, (num_left, seed)

    def __call__(self, left: Tensor, right: Tensor, right_id: Tensor) -> Tensor:
        self.ids = right_id.tolist()
        logits, target = left @ right.T / self.temperature, arange(len(left))
        return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


class PerPair:
    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(dim=1)


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return six pairs, with right ids in another order."""
    draw = torch.Generator().manual_seed(0)
    left, right = (normalize(torch.randn(6, 8, generator=draw), dim=1) for _ in range(2))
    left_id = torch.randperm(12, generator=draw)[:6]
    return left.requires_grad_(), right.requires_grad_(), left_id, 11 - left_id


def gradients(objective: Objective, left: Tensor, right: Tensor, *ids: Tensor) -> Tensor:
    """Return (2, B, D) gradients."""
    return torch.stack(torch.autograd.grad(objective(left, right, *ids).loss, (left, right)))


def new(path: str) -> Objective:
    return rows.objective_of(path)(**SIZES)


@pytest.mark.parametrize("name", rows.OBJECTIVES)
def test_every_row_is_an_objective(name: str) -> None:
    assert new(name).temperature.item() == pytest.approx(0.2)


def test_a_plain_loss_has_the_gradient_of_the_same_objective_and_gets_what_it_names() -> None:
    inputs = batch()
    theirs, ours = new(f"{__name__}.Contrast"), InfoNCE(temperature=0.2)
    assert theirs(*inputs).loss.item() == pytest.approx(ours(*inputs).loss.item(), rel=1e-5)
    torch.testing.assert_close(gradients(theirs, *inputs), gradients(ours, *inputs))
    assert theirs.loss.given == (12, 3)
    assert theirs.loss.ids == inputs[3].tolist()
    assert type(new("dualenc.objectives.InfoNCE")) is InfoNCE


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_package.Loss", "objective no_such_package.Loss: No module named 'no_such_packag"),
        ("math.Missing", "module 'math' has no attribute 'Missing'; install its"),
        ("math.pi", "objective math.pi: not a class; name an Obj"),
        (f"{__name__}.PerPair", "PerPair: returns torch.Size([6]); return a scalar tensor"),
        ("InfoNSE", "objectives: there is no InfoNSE (did you mean InfoNCE?); give one of"),
    ],
)
def test_a_wrong_class_or_name_is_one_line(path: str, problem: str) -> None:
    with pytest.raises(DualencError, match=re.escape(problem)) as caught:
        new(path)(*batch())
    assert "\n" not in str(caught.value)
