"""Losses from outside: by import path, with what their constructors take, as rows of the tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE, SogCLR
from tests.helpers.eval_scripts import load_script

NUM_PAIRS = 12
TAU = 0.2

TOY = '''
import torch
from torch.nn.functional import cross_entropy

from dualenc.objectives import InfoNCE


class Contrast:
    """InfoNCE of both directions."""

    def __init__(self, temperature):
        self.temperature = temperature

    def __call__(self, left, right):
        logits = left @ right.T / self.temperature
        target = torch.arange(len(left))
        return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


class Sizes(torch.nn.Module):
    """Remembers what it was given."""

    def __init__(self, num_left, num_right, seed):
        super().__init__()
        self.given = (num_left, num_right, seed)
        self.progress = []

    def set_progress(self, fraction):
        self.progress.append(fraction)

    def forward(self, left, right, left_id, right_id):
        self.ids = (left_id.tolist(), right_id.tolist())
        return -(left * right).sum(dim=1).mean()


class PerPair:
    def __call__(self, left, right):
        return (left * right).sum(dim=1)


class Ours(InfoNCE):
    pass


not_a_class = 3
'''


@pytest.fixture(autouse=True)
def toy_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of TOY, importable as toy_losses."""
    (tmp_path / "toy_losses.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_losses", raising=False)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Six pairs in double precision, right ids in another order."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        normalize(torch.randn(6, 8, generator=draw, dtype=torch.float64), dim=1) for _ in range(2)
    )
    left_id = torch.randperm(NUM_PAIRS, generator=draw)[:6]
    return left.requires_grad_(), right.requires_grad_(), left_id, NUM_PAIRS - 1 - left_id


def gradients(objective: torch.nn.Module, left: Tensor, right: Tensor, *ids: Tensor) -> Tensor:
    """(2, B, D) gradients of the loss in the directions of embeddings: LibAUC normalises them once
    more."""
    along = torch.stack(
        torch.autograd.grad(objective(left, right, *ids).loss, (left, right))
    ).double()
    embeddings = torch.stack([left, right]).detach().double()
    return along - (along * embeddings).sum(dim=-1, keepdim=True) * embeddings


def single(embeddings: Tensor) -> Tensor:
    """In the precision of the tables of other libraries."""
    return embeddings.detach().float().requires_grad_()


def new(path: str, **common: object) -> torch.nn.Module:
    sizes = {
        "num_left": NUM_PAIRS,
        "num_right": NUM_PAIRS,
        "views": False,
        "seed": 3,
        "temperature": TAU,
    }
    return load_script("outside.py").import_objective(path)(**{**sizes, **common})


def test_a_plain_loss_has_the_value_and_gradient_of_the_same_objective() -> None:
    inputs = batch()
    theirs, ours = new("toy_losses.Contrast"), InfoNCE(temperature=TAU)
    assert theirs(*inputs).loss.item() == pytest.approx(ours(*inputs).loss.item(), rel=1e-6)
    torch.testing.assert_close(gradients(theirs, *inputs), gradients(ours, *inputs))


def test_a_loss_gets_the_settings_and_ids_that_it_names() -> None:
    objective = new("toy_losses.Sizes", num_right=NUM_PAIRS + 1)
    inputs = batch()
    objective(*inputs)
    objective.set_progress(0.25)
    assert objective.loss.given == (NUM_PAIRS, NUM_PAIRS + 1, 3)
    assert objective.loss.ids == (inputs[2].tolist(), inputs[3].tolist())
    assert objective.loss.progress == [0.25]


def test_batches_of_training_alone_are_progress() -> None:
    objective = new("toy_losses.Sizes")
    load_script("outside.py").report_progress(objective, 4)
    for _ in range(4):
        objective(*batch())
        objective.eval()(*batch())
        with torch.no_grad():
            objective.train()(*batch())
    assert objective.loss.progress == [0.0, 0.25, 0.5, 0.75]


def test_an_objective_is_taken_as_it_is() -> None:
    assert type(new("toy_losses.Ours")).__mro__[1] is InfoNCE


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "no_such_package.Loss",
            "objective no_such_package.Loss: No module named 'no_such_package'; install",
        ),
        (
            "toy_losses.Missing",
            "objective toy_losses.Missing: module 'toy_losses' has no attribute 'Missing'; install",
        ),
        (
            "toy_losses.not_a_class",
            "objective toy_losses.not_a_class is no class; name an Objective",
        ),
        (".Loss", "objective .Loss: Empty module name; install"),
    ],
)
def test_a_wrong_path_is_one_line(path: str, problem: str) -> None:
    with pytest.raises(DualencError, match=re.escape(problem)) as caught:
        new(path)
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(
        DualencError, match=r"PerPair returns a tensor of shape \(6,\); it must return a scalar"
    ):
        new("toy_losses.PerPair")(*batch())


def test_a_name_that_is_unknown_names_the_nearest() -> None:
    script = load_script("small_batch.py")
    with pytest.raises(DualencError, match=r"there is no InfoNSE; did you mean InfoNCE\?"):
        script.objective_of("InfoNSE")
    assert script.objective_of("GlobalCache 0.5") is script.OBJECTIVES["GlobalCache 0.5"]


@pytest.mark.parametrize(
    ("path", "package"), [("outside.LibAUCPairs", "libauc"), ("outside.FastCLIP", "fast_clip")]
)
def test_an_anchors_first_visit_has_the_gradient_of_sogclr(path: str, package: str) -> None:
    pytest.importorskip(package)
    left, right, *ids = batch()
    theirs = gradients(new(path), single(left), single(right), *ids)
    ours = gradients(SogCLR(num_left=NUM_PAIRS, temperature=TAU), left, right, *ids)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


def test_libauc_of_two_views_has_the_gradients_of_sogclr() -> None:
    pytest.importorskip("libauc")
    theirs = new("outside.LibAUCViews", views=True)
    ours = SogCLR(num_left=NUM_PAIRS, temperature=TAU, gamma=0.5, views=True)
    for seed in range(3):
        left, right, _, _ = batch(seed)
        ids = torch.arange(6)  # the same images in other views
        found = gradients(theirs, single(left), single(right), ids)
        torch.testing.assert_close(found, gradients(ours, left, right, ids), rtol=1e-5, atol=1e-6)
