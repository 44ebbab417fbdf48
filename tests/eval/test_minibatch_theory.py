"""The cheap parts of eval/minibatch_theory.py."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch

from dualenc.batching import RandomBatches, batch_losses
from tests.helpers.eval_scripts import load_script


@pytest.fixture(scope="module")
def theory() -> ModuleType:
    return load_script("minibatch_theory.py")


def test_the_loss_is_twice_that_of_the_package(theory: ModuleType) -> None:
    left, right = theory.random_embeddings(5, seed=0)
    batches = RandomBatches(8, 4).select(0)
    expected = 2 * batch_losses(left.numpy(), right.numpy(), batches, 1.0)
    np.testing.assert_allclose(
        theory.contrastive_losses(left, right, torch.from_numpy(batches)), expected
    )


def test_the_simplex_is_at_distance_zero_however_it_is_turned(theory: ModuleType) -> None:
    simplex = torch.nn.functional.normalize(torch.eye(8).double() - 1 / 8)
    turn, _ = torch.linalg.qr(
        torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).double()
    )
    turned = torch.nn.functional.pad(simplex, (0, 8)) @ turn
    assert theory.distance_to_optimum(turned, turned) == pytest.approx(0, abs=1e-9)


def test_all_batches_reach_the_simplex_and_disjoint_ones_do_not(theory: ModuleType) -> None:
    every, disjoint = (
        theory.PROBLEMS[name] for name in ("all C(8, 2) batches", "4 disjoint batches")
    )
    assert theory.distance_to_optimum(*theory.minimise(16, every, 200, 5.0, seed=0)) < 0.05
    assert theory.distance_to_optimum(*theory.minimise(16, disjoint, 200, 5.0, seed=0)) > 1


def test_ordered_sgd_reaches_the_optimum_of_the_toy_example_first(theory: ModuleType) -> None:
    optimum = 4 * math.log(1 + math.exp(-1))
    assert optimum == pytest.approx(1.253, abs=5e-4)
    draw = torch.Generator().manual_seed(0)
    hardest = theory.toy_curve(lambda losses: losses.argmax()[None], 150, 0.05, 0.1)
    random = theory.toy_curve(lambda losses: torch.randint(6, (1,), generator=draw), 150, 0.05, 0.1)
    assert hardest[-1] == pytest.approx(optimum, abs=0.002)
    assert random[-1] > optimum + 0.02
