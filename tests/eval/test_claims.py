"""The laws that the scripts of the papers' claims rely on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, pad

from dualenc.batching import RandomBatches, batch_losses
from tests.helpers.eval_scripts import load_script

stationary = load_script("claims/stationary.py")
theory = load_script("claims/minibatch_theory.py")


def test_gradient_of_the_exact_loss_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    towers = torch.nn.ModuleDict({side: torch.nn.Linear(5, 4) for side in ("left", "right")})
    inputs = {side: torch.randn(6, 5) for side in towers}
    encode = lambda side, x: normalize(towers[side](x), dim=1)  # noqa: E731
    scores = encode("left", inputs["left"]) @ encode("right", inputs["right"]).T / 0.1
    others = scores.masked_fill(torch.eye(6, dtype=torch.bool), -torch.inf)
    normalizers = others.logsumexp(dim=1) + others.logsumexp(dim=0)
    expected = (normalizers / 2 - scores.diagonal()).mean()
    expected.backward()
    norm = sum(float(weight.grad.square().sum()) for weight in towers.parameters())
    towers.zero_grad()
    chunks = {side: x.split(4) for side, x in inputs.items()}
    loss, squared = stationary.exact_gradient(towers, encode, chunks, 0.1)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert squared == pytest.approx(norm, rel=1e-4)
    assert all(weight.grad is None for weight in towers.parameters())


def test_theory_has_the_packages_loss_and_knows_the_simplex() -> None:
    left, right = theory.random_embeddings(5, seed=0)
    batches = RandomBatches(8, 4).select(0)
    expected = 2 * batch_losses(left.numpy(), right.numpy(), batches, 1.0)
    found = theory.contrastive_losses(left, right, torch.from_numpy(batches))
    np.testing.assert_allclose(found, expected)
    turn, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    simplex = pad(normalize(torch.eye(8) - 1 / 8), (0, 8)) @ turn
    assert theory.distance_to_optimum(simplex, simplex) == pytest.approx(0, abs=1e-5)
