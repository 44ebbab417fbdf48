"""The exact loss and gradient are those of a loop written from the formula, whatever the chunks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dualenc.errors import DualencError
from dualenc.evaluation import convergence
from dualenc.evaluation.convergence import FiniteSet, exact_gradient, exact_loss, squared_norm
from dualenc.objectives import ExactGlobal


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "_ANCHORS_AT_ONCE", 3)


def unit(count: int, seed: int, dim: int = 4) -> Tensor:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dim)))
    return nn.functional.normalize(rows, dim=1)


def slow_pairs(left: Tensor, right: Tensor, pairs: FiniteSet, tau: float) -> Tensor:
    """The two-tower loss, one anchor and one negative at a time."""
    losses = []
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


def slow_views(left: Tensor, right: Tensor, pairs: FiniteSet, tau: float) -> Tensor:
    views, ids = torch.cat([left, right]), torch.cat([pairs.left_id, pairs.left_id])
    count, losses = len(pairs), []
    for i in range(2 * count):
        scores = [views[i] @ views[j] / tau for j in range(2 * count) if ids[j] != ids[i]]
        losses.append(-views[i] @ views[(i + count) % (2 * count)] / tau + torch.logsumexp(torch.stack(scores), 0))
    return torch.stack(losses).mean()


def shared_pairs() -> FiniteSet:
    """Items in several pairs, and positives that are in no pair together."""
    return FiniteSet(
        torch.tensor([0, 0, 1, 2, 3, 4, 5]),
        torch.tensor([0, 1, 2, 2, 3, 4, 5]),
        left_positives=torch.tensor([[0, 1], [0, 1], [2, -1], [2, -1], [3, 5], [4, -1], [5, -1]]),
        right_positives=torch.tensor([[0, -1], [0, -1], [1, 2], [1, 2], [3, -1], [4, -1], [5, 3]]),
    )


@given(seed=st.integers(0, 99), tau=st.sampled_from([0.02, 0.07, 1.0]), views=st.booleans())
def test_loss_and_embedding_gradients_are_the_slow_loops(seed: int, tau: float, views: bool) -> None:
    pairs = FiniteSet(torch.arange(7), torch.arange(7), views=True) if views else shared_pairs()
    left, right = unit(7, seed).requires_grad_(), unit(7, seed + 1).requires_grad_()
    expected = (slow_views if views else slow_pairs)(left, right, pairs, tau)
    expected.backward()
    loss, left_gradient, right_gradient = exact_loss(left, right, pairs, tau)
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(left_gradient, left.grad)
    torch.testing.assert_close(right_gradient, right.grad)


@pytest.mark.parametrize("views", [True, False])
def test_the_oracle_objective_agrees(views: bool) -> None:
    left, right, ids = unit(8, 0), unit(8, 1), torch.arange(8)
    oracle = ExactGlobal(num_left=8, temperature=0.1, views=views)
    oracle.set_counts(torch.ones(8), torch.ones(8))
    expected = oracle(left, right, ids, encode=lambda side, wanted: (left if side == "left" else right)[wanted])
    loss, *_ = exact_loss(left, right, FiniteSet(ids, ids, views=views), 0.1)
    assert loss == pytest.approx(expected.loss.item(), rel=1e-6)


def test_known_values() -> None:
    pairs = FiniteSet(torch.arange(2), torch.arange(2))
    loss, *_ = exact_loss(torch.eye(2), torch.eye(2), pairs, 0.5)
    assert loss == pytest.approx(-2.0), "−1/τ + log exp(0)"
    viewed = FiniteSet(torch.arange(2), torch.arange(2), views=True)
    loss, *_ = exact_loss(torch.eye(2), torch.eye(2), viewed, 0.5)
    assert loss == pytest.approx(-2.0 + math.log(2)), "two views of the other image"


class Towers(nn.Module):
    """Two towers (or one), each with dropout, which evaluation mode must silence."""

    def __init__(self, shared: bool):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4)).double()
        self.right = self.left if shared else nn.Sequential(nn.Linear(5, 4)).double()
        self.unused = nn.Parameter(torch.ones(3))

    def encode(self, side: str, inputs: dict[str, Tensor]) -> Tensor:
        return nn.functional.normalize((self.left if side == "left" else self.right)(inputs["x"]), dim=1)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("sizes", [[7], [2, 2, 3], [1] * 7])
def test_the_models_gradient_norm_is_that_of_plain_autograd(sizes: list[int], views: bool) -> None:
    pairs = FiniteSet(torch.arange(7), torch.arange(7), views=True) if views else shared_pairs()
    model = Towers(shared=views).eval()
    inputs = [unit(7, seed, dim=5) for seed in (3, 4)]
    left, right = (model.encode(side, {"x": x}) for side, x in zip(("left", "right"), inputs, strict=True))
    expected = (slow_views if views else slow_pairs)(left, right, pairs, 0.1)
    expected.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    chunks = [[{"x": part} for part in x.split(sizes)] for x in inputs]
    found = exact_gradient(model, model.encode, *chunks, pairs, 0.1)
    assert found.loss == pytest.approx(expected.item(), rel=1e-10)
    assert found.squared_gradient_norm == pytest.approx(norm, rel=1e-9)
    assert norm > 1e-6
    assert np.allclose(found.left, left.detach().numpy(), atol=1e-6)
    assert all(p.grad is None for p in model.parameters()), "no gradients are left behind"


def test_a_tower_with_fixed_weights_adds_nothing() -> None:
    model = Towers(shared=False).eval()
    model.right.requires_grad_(False)
    chunks = [{"x": unit(4, 0, dim=5)}], [{"x": unit(4, 1, dim=5)}]
    pairs = FiniteSet(torch.arange(4), torch.arange(4))
    found = exact_gradient(model, model.encode, *chunks, pairs, 0.1)
    model.right.requires_grad_(True)
    assert (
        0 < found.squared_gradient_norm < exact_gradient(model, model.encode, *chunks, pairs, 0.1).squared_gradient_norm
    )


def test_squared_norm_counts_a_missing_gradient_as_zero() -> None:
    assert squared_norm([torch.tensor([3.0, 4.0]), None]) == 25.0


def test_mistakes_are_one_line() -> None:
    ids, rows = torch.arange(3), unit(3, 0)
    with pytest.raises(DualencError, match="pair 0 has no negative"):
        exact_loss(rows, rows, FiniteSet(torch.zeros(3, dtype=torch.int64), ids), 0.1)
    with pytest.raises(DualencError, match=r"\(3, 4\) and \(2, 4\); both must be \(3, dimension\)"):
        exact_loss(rows, rows[:2], FiniteSet(ids, ids), 0.1)
    with pytest.raises(DualencError, match="not finite"):
        exact_loss(rows * math.nan, rows, FiniteSet(ids, ids), 0.1)
    with pytest.raises(DualencError, match="temperature=0"):
        exact_loss(rows, rows, FiniteSet(ids, ids), 0)
    with pytest.raises(DualencError, match="give one id of each side"):
        FiniteSet(ids, ids[:2])
    with pytest.raises(DualencError, match="both views of an image"):
        FiniteSet(ids, ids + 1, views=True)
