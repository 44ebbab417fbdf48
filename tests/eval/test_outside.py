"""Losses from outside: named by import path, with what they take, as rows of the tables."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, arange
from torch.nn.functional import cross_entropy, normalize

from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE, Objective, SogCLR
from tests.helpers.eval_scripts import load_script

SIZES = {"num_left": 12, "num_right": 12, "views": False, "seed": 3, "temperature": 0.2}


class Contrast:
    """A plain loss that keeps what it is given."""

    def __init__(self, temperature: float, num_left: int, seed: int) -> None:
        self.temperature, self.given = temperature, (num_left, seed)
        self.progress: list[float] = []
        self.set_progress = self.progress.append

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
    """Return (2, B, D) gradients along the sphere: LibAUC normalizes embeddings once more."""
    along = torch.stack(torch.autograd.grad(objective(left, right, *ids).loss, (left, right)))
    embeddings = torch.stack([left, right]).detach()
    return along - (along * embeddings).sum(dim=-1, keepdim=True) * embeddings


def new(path: str) -> Objective:
    return load_script("rows.py").objective_of(path)(**SIZES)


def test_a_plain_loss_has_the_gradient_of_the_same_objective_and_gets_what_it_names() -> None:
    inputs = batch()
    theirs, ours = new(f"{__name__}.Contrast"), InfoNCE(temperature=0.2)
    assert theirs(*inputs).loss.item() == pytest.approx(ours(*inputs).loss.item(), rel=1e-5)
    torch.testing.assert_close(gradients(theirs, *inputs), gradients(ours, *inputs))
    assert theirs.loss.given == (12, 3)
    assert theirs.loss.ids == inputs[3].tolist()
    assert type(new("dualenc.objectives.InfoNCE")) is InfoNCE


def test_batches_of_training_alone_are_progress() -> None:
    objective = new(f"{__name__}.Contrast")
    load_script("outside.py").report_progress(objective, 4)
    for _ in range(4):
        objective(*batch())
        objective.eval()(*batch())
        with torch.no_grad():
            objective.train()(*batch())
    assert objective.loss.progress == [0.0, 0.25, 0.5, 0.75]


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


@pytest.mark.parametrize(
    ("package", "path"), [("libauc", "LibAUCPairs"), ("fast_clip", "FastCLIP")]
)
def test_an_anchors_first_visit_has_the_gradient_of_sogclr(package: str, path: str) -> None:
    pytest.importorskip(package)
    ours = SogCLR(num_left=12, num_right=12, temperature=0.2, gamma=0.5)
    found, expected = (gradients(each, *batch()) for each in (new(f"outside.{path}"), ours))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
