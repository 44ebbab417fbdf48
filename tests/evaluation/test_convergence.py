"""The exact loss and its gradient, alignment, uniformity, rank and histograms, against slow loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dualenc.errors import DualencError
from dualenc.evaluation import convergence
from dualenc.evaluation.convergence import (
    alignment,
    effective_rank,
    exact_gradient,
    label_similarities,
    pair_similarities,
    uniformity,
)
from dualenc.evaluation.objectives import FrozenPairs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "_BLOCK", 4)


def unit(count: int, seed: int, dim: int = 4) -> Tensor:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dim)))
    return nn.functional.normalize(rows, dim=1)


def slow_pairs(pairs: FrozenPairs, tau: float) -> Tensor:
    """The two-tower loss, one anchor and one negative at a time."""
    losses = []
    left, right = pairs.left[pairs.left_id], pairs.right[pairs.right_id]
    ids = ((pairs.left_id, pairs.right_id), (pairs.right_id, pairs.left_id))
    listed = (pairs.left_positives, pairs.right_positives)
    for (x, y), (own, other), positives in zip(((left, right), (right, left)), ids, listed, strict=True):
        for i in range(len(pairs)):
            known = set() if positives is None else set(positives[i].tolist())
            scores = [
                x[i] @ y[j] / tau
                for j in range(len(pairs))
                if own[j] != own[i] and other[j] != other[i] and int(other[j]) not in known
            ]
            losses.append(-x[i] @ y[i] / tau + torch.logsumexp(torch.stack(scores), 0))
    return torch.stack(losses).mean()


def slow_views(pairs: FrozenPairs, tau: float) -> Tensor:
    views, ids = torch.cat([pairs.left, pairs.right]), torch.cat([pairs.left_id, pairs.left_id])
    count, losses = len(pairs), []
    for i in range(2 * count):
        scores = [views[i] @ views[j] / tau for j in range(2 * count) if ids[j] != ids[i]]
        losses.append(-views[i] @ views[(i + count) % (2 * count)] / tau + torch.logsumexp(torch.stack(scores), 0))
    return torch.stack(losses).mean()


def shared_pairs(left: Tensor, right: Tensor) -> FrozenPairs:
    """Items in several pairs, and positives that are in no pair together."""
    return FrozenPairs(
        left,
        right,
        torch.tensor([0, 0, 1, 2, 3, 4, 5]),
        torch.tensor([0, 1, 2, 2, 3, 4, 5]),
        left_positives=torch.tensor([[0, 1], [0, 1], [2, -1], [2, -1], [3, 5], [4, -1], [5, -1]]),
        right_positives=torch.tensor([[0, -1], [0, -1], [1, 2], [1, 2], [3, -1], [4, -1], [5, 3]]),
    )


viewed = partial(FrozenPairs.one_to_one, views=True)


@pytest.mark.slow
@given(seed=st.integers(0, 99), tau=st.sampled_from([0.02, 0.07, 1.0]), views=st.booleans())
def test_loss_and_embedding_gradients_are_the_slow_loops(seed: int, tau: float, views: bool) -> None:
    pairs = (viewed if views else shared_pairs)(unit(6, seed), unit(6, seed + 1))
    expected = (slow_views if views else slow_pairs)(pairs, tau)
    expected.backward()
    gradient, loss = pairs.exact(tau)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, torch.cat([pairs.left.grad, pairs.right.grad]), rtol=1e-5, atol=1e-6)


def test_known_values() -> None:
    assert FrozenPairs.one_to_one(torch.eye(2), torch.eye(2)).exact(0.5)[1] == pytest.approx(-2.0), "−1/τ + log exp(0)"
    expected = pytest.approx(-2.0 + math.log(2))
    assert viewed(torch.eye(2), torch.eye(2)).exact(0.5)[1] == expected, "two views of the other image"


class Towers(nn.Module):
    """Two towers (or one), each with dropout, which evaluation mode must silence."""

    def __init__(self, shared: bool):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4)).double()
        self.right = self.left if shared else nn.Sequential(nn.Linear(5, 4)).double()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, side: str, inputs: dict[str, Tensor]) -> Tensor:
        return nn.functional.normalize((self.left if side == "left" else self.right)(inputs["x"]), dim=1)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("sizes", [[6], [2, 2, 2], [1] * 6])
def test_the_models_gradient_norm_is_that_of_plain_autograd(sizes: list[int], views: bool) -> None:
    make: Callable[..., FrozenPairs] = viewed if views else shared_pairs
    model = Towers(shared=views).eval()
    inputs = {side: unit(6, seed, dim=5) for side, seed in (("left", 3), ("right", 4))}
    left, right = (model(side, {"x": x}) for side, x in inputs.items())
    pairs = make(left, right)
    # The embeddings with their graph.
    pairs.left, pairs.right = left, right
    expected = (slow_views if views else slow_pairs)(pairs, 0.1)
    expected.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    chunks = {side: [{"x": part} for part in x.split(sizes)] for side, x in inputs.items()}
    found = exact_gradient(model, model, chunks, make, 0.1)
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
    assert found.squared_gradient_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 1e-6
    assert torch.allclose(found.pairs.left, left)
    assert all(p.grad is None for p in model.parameters()), "no gradients are left behind"


def test_a_tower_with_fixed_weights_adds_nothing() -> None:
    model = Towers(shared=False).eval()
    model.right.requires_grad_(False)
    chunks = {"left": [{"x": unit(4, 0, dim=5)}], "right": [{"x": unit(4, 1, dim=5)}]}
    found = exact_gradient(model, model, chunks, FrozenPairs.one_to_one, 0.1)
    model.right.requires_grad_(True)
    both = exact_gradient(model, model, chunks, FrozenPairs.one_to_one, 0.1)
    assert 0 < found.squared_gradient_norm < both.squared_gradient_norm


def vectors(count: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


def unit_row(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@given(seed=st.integers(0, 999), power=st.sampled_from([1, 2, 3]))
def test_alignment_is_the_loop(seed: int, power: float) -> None:
    left, right = vectors(9, 4, seed), vectors(9, 4, seed + 1)
    expected = np.mean([np.linalg.norm(unit_row(x) - unit_row(y)) ** power for x, y in zip(left, right, strict=True)])
    assert alignment(left, right, power) == pytest.approx(expected, rel=1e-5)


@given(seed=st.integers(0, 999), count=st.integers(2, 11))
def test_uniformity_is_the_loop_over_different_rows(seed: int, count: int) -> None:
    rows = vectors(count, 3, seed)
    pairs = itertools.combinations([unit_row(row) for row in rows], 2)
    expected = math.log(np.mean([np.exp(-2 * np.sum((x - y) ** 2)) for x, y in pairs]))
    assert uniformity(rows) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_collapsed_embedding_is_aligned_and_not_uniform() -> None:
    rows = np.ones((10, 4))
    assert alignment(rows, rows) == 0.0
    assert uniformity(rows) == pytest.approx(0.0, abs=1e-5)
    assert uniformity(np.eye(4)) == pytest.approx(-4.0), "orthogonal rows are √2 apart: −t·2"


def test_effective_rank_of_known_spectra() -> None:
    assert effective_rank(np.eye(7)) == pytest.approx(7)
    assert effective_rank(np.outer(np.arange(1, 6), np.arange(1, 4))) == pytest.approx(1)
    assert effective_rank(np.zeros((3, 2))) == 0.0
    half = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(np.diag([3.0, 1.0])) == pytest.approx(half)


@given(seed=st.integers(0, 99), rows=st.integers(1, 30), dim=st.integers(1, 30))
def test_effective_rank_is_the_entropy_of_singular_values(seed: int, rows: int, dim: int) -> None:
    matrix = vectors(rows, dim, seed)
    shares = np.linalg.svd(matrix, compute_uv=False)
    shares = shares / shares.sum()
    assert effective_rank(matrix) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert effective_rank(matrix) == pytest.approx(effective_rank(matrix.T))


def test_label_histograms_count_every_pair_once() -> None:
    rows, labels = vectors(13, 3, 0), np.arange(13) % 3
    found = label_similarities(rows, labels)
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for (x, a), (y, b) in itertools.combinations(zip(rows, labels, strict=True), 2):
        cosines[bool(a == b)].append(float(unit_row(x) @ unit_row(y)))
    assert found.positives.tolist() == np.histogram(cosines[True], found.edges)[0].tolist()
    assert found.negatives.tolist() == np.histogram(cosines[False], found.edges)[0].tolist()
    assert found.positive_mean == pytest.approx(np.mean(cosines[True]), abs=1e-6)
    assert found.negative_mean == pytest.approx(np.mean(cosines[False]), abs=1e-6)


@pytest.mark.parametrize("listed", [False, True])
def test_pair_histograms_leave_out_positives_by_id(listed: bool) -> None:
    left, right = vectors(9, 3, 0), vectors(9, 3, 1)
    left_id, right_id = np.array([0, 0, 1, 2, 3, 4, 5, 6, 7]), np.array([0, 1, 2, 2, 3, 4, 5, 6, 7])
    positives = np.full((9, 2), -1)
    positives[:, 0], positives[4, 1] = right_id, 7
    found = pair_similarities(left, right, left_id, right_id, positives if listed else None)
    negatives = [
        unit_row(left[i]) @ unit_row(right[j])
        for i, j in itertools.product(range(9), range(9))
        if left_id[i] != left_id[j] and right_id[i] != right_id[j] and not (listed and right_id[j] in positives[i])
    ]
    assert len(negatives) == 81 - 9 - 4 - listed
    assert found.negatives.tolist() == np.histogram(negatives, found.edges)[0].tolist()
    expected = [unit_row(x) @ unit_row(y) for x, y in zip(left, right, strict=True)]
    assert found.positives.tolist() == np.histogram(expected, found.edges)[0].tolist()


def test_overlap_runs_from_apart_to_alike() -> None:
    apart = label_similarities(np.repeat(np.eye(2), 3, axis=0), np.repeat([0, 1], 3))
    assert apart.overlap == 0.0
    assert (apart.positive_mean, apart.negative_mean) == (pytest.approx(1.0), pytest.approx(0.0))
    alike = label_similarities(np.ones((6, 2)), np.repeat([0, 1], 3))
    assert alike.overlap == pytest.approx(1.0)


def test_mistakes_are_one_line_in_geometry() -> None:
    rows = vectors(4, 3, 0)
    with pytest.raises(DualencError, match="1 embedding"):
        uniformity(rows[:1])
    with pytest.raises(DualencError, match="no negative pair"):
        label_similarities(rows, np.zeros(4, int))
    with pytest.raises(DualencError, match="no negative pair"):
        pair_similarities(rows, rows, np.zeros(4, int))
    with pytest.raises(DualencError, match="row 2 of the embeddings is not finite"):
        uniformity(np.where(np.arange(4)[:, None] == 2, np.nan, rows))
