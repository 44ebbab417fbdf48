"""The laws that the scripts of the papers' claims rely on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, pad

from dualenc.batching import RandomBatches, batch_losses
from dualenc.data import open_pairs
from dualenc.objectives import ExactGlobal
from tests.helpers.eval_scripts import load_script

stationary = load_script("claims/stationary.py")
theory = load_script("claims/minibatch_theory.py")
SHARED = {
    "left_id": torch.tensor([0, 0, 1, 2, 3, 4, 5]),
    "right_id": torch.tensor([0, 1, 2, 2, 3, 4, 5]),
    "left_positives": torch.tensor([[0, 1], [0, 1], [2, -1], [2, -1], [3, 5], [4, -1], [5, -1]]),
    "right_positives": torch.tensor([[0, -1], [0, -1], [1, 2], [1, 2], [3, -1], [4, -1], [5, 3]]),
}


@pytest.mark.parametrize("views", [True, False])
def test_gradient_of_the_exact_loss_is_that_of_autograd(views: bool) -> None:
    of_pairs = stationary.FrozenPairs
    make = partial(of_pairs.one_to_one, views=True) if views else partial(of_pairs, **SHARED)
    torch.manual_seed(0)
    towers = torch.nn.ModuleDict({side: torch.nn.Linear(5, 4) for side in ("left", "right")})
    inputs = {side: torch.randn(6, 5) for side in towers}
    encode = lambda side, x: normalize(towers[side](x), dim=1)  # noqa: E731
    left, right = (encode(side, x) for side, x in inputs.items())
    pairs = make(left, right)
    rows = left[pairs.left_id], right[pairs.right_id]
    outside = lambda side, ids: (left if side == "left" else right)[ids]  # noqa: E731
    expected = pairs.build(ExactGlobal, 0.1)(*rows, encode=outside, **pairs.ids).loss
    expected.backward()
    norm = sum(float(weight.grad.square().sum()) for weight in towers.parameters())
    towers.zero_grad()
    chunks = {side: x.split(4) for side, x in inputs.items()}
    loss, squared, _ = stationary.exact_gradient(towers, encode, chunks, make, 0.1)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert squared == pytest.approx(norm, rel=1e-4)
    assert all(weight.grad is None for weight in towers.parameters())


def test_each_item_is_prepared_once_and_keeps_its_positives(tmp_path: Path) -> None:
    texts = [("a", "x"), ("b", "x"), ("b", "y"), ("c", "z")]
    lines = [json.dumps({"query": query, "document": document}) for query, document in texts]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    tower = SimpleNamespace(prepare=list)
    model: Any = SimpleNamespace(tower=lambda side: tower)
    chunks, make = stationary.prepared(model, open_pairs(tmp_path / "pairs.jsonl"), np.arange(4))
    assert chunks == {"left": [["a", "b", "c"]], "right": [["x", "y", "z"]]}
    pairs = make(torch.eye(3), torch.eye(3))
    listed = [sorted(set(row) - {-1}) for row in pairs.left_positives.tolist()]
    assert listed == [[0], [0, 1], [0, 1], [2]]


def test_fixed_statistics_make_an_embedding_a_function_of_its_image() -> None:
    images = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    network = stationary.convolutions(images)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone)


def test_geometry_of_known_spectra() -> None:
    assert stationary.uniformity(torch.eye(4)) == pytest.approx(-4)
    assert stationary.overlap(torch.ones(3), torch.ones(5)) == 1
    assert stationary.overlap(torch.ones(3), torch.zeros(5)) == 0


def test_theory_has_the_packages_loss_and_knows_the_simplex() -> None:
    left, right = theory.random_embeddings(5, seed=0)
    batches = RandomBatches(8, 4).select(0)
    expected = 2 * batch_losses(left.numpy(), right.numpy(), batches, 1.0)
    found = theory.contrastive_losses(left, right, torch.from_numpy(batches))
    np.testing.assert_allclose(found, expected)
    turn, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    simplex = pad(normalize(torch.eye(8) - 1 / 8), (0, 8)) @ turn
    assert theory.distance_to_optimum(simplex, simplex) == pytest.approx(0, abs=1e-5)
