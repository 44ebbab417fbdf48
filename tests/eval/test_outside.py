"""Losses from outside: named by import path, with what they take, as rows of the tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE, Objective, SogCLR
from tests.helpers.eval_scripts import load_script

SIZES = {"num_left": 12, "num_right": 12, "views": False, "seed": 3, "temperature": 0.2}
TOY = """
from torch import arange
from torch.nn.functional import cross_entropy
from dualenc.objectives import InfoNCE

class Contrast:
    def __init__(self, temperature, num_left, seed):
        self.temperature, self.given, self.progress = temperature, (num_left, seed), []

    def set_progress(self, fraction):
        self.progress.append(fraction)

    def __call__(self, left, right, right_id):
        self.ids = right_id.tolist()
        logits, target = left @ right.T / self.temperature, arange(len(left))
        return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2

class PerPair:
    def __call__(self, left, right):
        return (left * right).sum(dim=1)

class Ours(InfoNCE):
    pass

not_a_class = 3
"""


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return six pairs, with right ids in another order."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (normalize(torch.randn(6, 8, generator=draw), dim=1) for _ in range(2))
    left_id = torch.randperm(12, generator=draw)[:6]
    return left.requires_grad_(), right.requires_grad_(), left_id, 11 - left_id


def gradients(objective: Objective, left: Tensor, right: Tensor, *ids: Tensor) -> Tensor:
    """Return (2, B, D) gradients along the sphere: LibAUC normalizes embeddings once more."""
    along = torch.stack(torch.autograd.grad(objective(left, right, *ids).loss, (left, right)))
    embeddings = torch.stack([left, right]).detach()
    return along - (along * embeddings).sum(dim=-1, keepdim=True) * embeddings


@pytest.fixture(autouse=True)
def toy_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the classes of TOY importable."""
    (tmp_path / "toy_losses.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_losses", raising=False)


def new(path: str, **changes: object) -> Objective:
    return load_script("rows.py").objective_of(path)(**{**SIZES, **changes})


def test_a_plain_loss_has_the_gradient_of_the_same_objective_and_gets_what_it_names() -> None:
    inputs = batch()
    theirs, ours = new("toy_losses.Contrast"), InfoNCE(temperature=0.2)
    assert theirs(*inputs).loss.item() == pytest.approx(ours(*inputs).loss.item(), rel=1e-5)
    torch.testing.assert_close(gradients(theirs, *inputs), gradients(ours, *inputs))
    assert theirs.loss.given == (12, 3)
    assert theirs.loss.ids == inputs[3].tolist()
    assert type(new("toy_losses.Ours")).__mro__[1] is InfoNCE


def test_batches_of_training_alone_are_progress() -> None:
    objective = new("toy_losses.Contrast")
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
        ("toy_losses.Missing", "module 'toy_losses' has no attribute 'Missing'; install its"),
        ("toy_losses.not_a_class", "objective toy_losses.not_a_class: not a class; name an Obj"),
        ("toy_losses.PerPair", "PerPair: returns torch.Size([6]); return a scalar tensor"),
        ("InfoNSE", "objectives: there is no InfoNSE (did you mean InfoNCE?); give one of"),
    ],
)
def test_a_wrong_class_or_name_is_one_line(path: str, problem: str) -> None:
    with pytest.raises(DualencError, match=re.escape(problem)) as caught:
        new(path)(*batch())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["LibAUCPairs", "LibAUCViews", "FastCLIP"])
def test_an_anchors_first_visit_has_the_gradient_of_sogclr(path: str) -> None:
    pytest.importorskip("fast_clip" if path == "FastCLIP" else "libauc")
    views = path == "LibAUCViews"
    theirs = new(f"outside.{path}", views=views)
    ours = SogCLR(num_left=12, num_right=12, temperature=0.2, gamma=0.5, views=views)
    for seed in range(3 if views else 1):
        left, right, *ids = batch(seed)
        ids = [torch.arange(6)] if views else ids  # the same images in other views
        found, expected = (gradients(each, left, right, *ids) for each in (theirs, ours))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
