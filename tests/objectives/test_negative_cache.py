"""NegativeCache: the gradient of one drawn negative per anchor, and a cache that keeps itself fresh."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.objectives import NegativeCache
from tests.objectives.slow import Case, make_case
from tests.objectives.slow_chains import Corpus, Item, _anchors, _barred, _batch, _vector


def drawn_negatives(criterion: NegativeCache, case: Case, corpus: Corpus) -> tuple[torch.Tensor, list[Item | None]]:
    """Run the criterion; the gradient, and for each anchor the item whose similarity it pushes down."""
    drawn: list[Item | None] = []
    original = criterion._draw

    def spy(cache, anchors):  # type: ignore[no-untyped-def]
        items, log_mean = original(cache, anchors)
        for item in items.tolist():
            side = ("left", "right")[item % 2] if case.views else anchors.candidate_side
            drawn.append(None if item < 0 else Item(side, item // 2 if case.views else item))
        return items, log_mean

    criterion._draw = spy  # type: ignore[method-assign]
    loss = criterion(**case.arguments(), encode=corpus.encode).loss
    criterion._draw = original  # type: ignore[method-assign]
    return gradients(loss, case, corpus), drawn


def gradients(loss: torch.Tensor, case: Case, corpus: Corpus) -> torch.Tensor:
    inputs = [case.left, case.right, corpus.left, corpus.right]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return torch.cat([torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs)])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), size=st.integers(1, 6), views=st.booleans(), refresh=st.sampled_from([0.0, 0.2, 1.0]))
def test_gradient_pulls_the_positive_and_pushes_the_drawn_negative(
    seed: int, size: int, views: bool, refresh: float
) -> None:
    criterion = NegativeCache(num_left=20, temperature=0.2, views=views, refresh=refresh, seed=seed).double()
    for step in range(4):
        case, corpus = make_case(seed * 4 + step, size, views), Corpus.make(seed)
        found, drawn = drawn_negatives(criterion, case, corpus)
        losses = []
        sides = ["views"] if views else ["left", "right"]
        for side in sides:
            terms = []
            for anchor in _anchors(case, side):
                item = drawn.pop(0)
                pushed = torch.zeros(())
                if item is not None:
                    assert not _barred(case, anchor, item)
                    columns = [vector for other, vector in _batch(case, side) if other == item]
                    pushed = anchor.vector @ (columns[0] if columns else _vector(corpus, item))
                terms.append((pushed - anchor.positive) / 0.2)
            losses.append(torch.stack(terms).mean())
        torch.testing.assert_close(found, gradients(torch.stack(losses).mean(), case, corpus))


@pytest.mark.parametrize("views", [False, True])
def test_value_of_a_full_cache_is_the_loss_itself(views: bool) -> None:
    corpus = Corpus.make(0)
    ids = torch.tensor([3, 8, 11])
    out = NegativeCache(num_left=20, refresh=1.0, temperature=0.3, views=views).double()(
        corpus.left[ids], corpus.right[ids], ids, encode=corpus.encode
    )
    exact = []
    everything = torch.cat([corpus.left, corpus.right]) if views else corpus.right
    for i in ids.tolist():
        for own, candidates in ((corpus.left, everything), (corpus.right, everything if views else corpus.left)):
            others = (own[i] @ candidates.T / 0.3)[torch.arange(len(candidates)) % 20 != i]
            exact.append(torch.logsumexp(others, dim=0) - corpus.left[i] @ corpus.right[i] / 0.3)
    torch.testing.assert_close(out.loss, torch.stack(exact).mean())


def test_refresh_encodes_the_share_in_turn_and_without_gradient() -> None:
    corpus, with_gradient = Corpus.make(0), []

    def encode(side: str, ids: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            with_gradient.extend(ids.tolist())
        elif side == "right":
            refreshed.extend(ids.tolist())
        return corpus.encode(side, ids)

    criterion = NegativeCache(num_left=20, refresh=0.15).double()
    refreshed: list[int] = []
    for _ in range(10):
        ids = torch.tensor([0, 1])
        criterion(corpus.left[ids], corpus.right[ids], ids, encode=encode)
    assert sorted(refreshed) == sorted(i % 20 for i in range(30))
    assert len(with_gradient) <= 2 * 2 * 10


def test_remembers_batch_mined_and_drawn_items() -> None:
    corpus, ids = Corpus.make(0), torch.tensor([0, 1])
    criterion = NegativeCache(num_left=20, refresh=0.0, temperature=0.05).double()
    mined = {"negatives": corpus.right[[15, 16]], "negative_id": torch.tensor([15, 16])}
    criterion(corpus.left[ids], corpus.right[ids], ids, encode=corpus.encode, **mined)
    assert criterion.right_cache.filled.nonzero().flatten().tolist() == [0, 1, 15, 16]
    assert criterion.left_cache.filled.nonzero().flatten().tolist() == [0, 1]
    # Move the model under the cache: what is drawn is encoded anew, and remembered as it is now.
    newer = Corpus.make(1)
    before = criterion.right_cache.features.clone()
    criterion(newer.left[ids + 4], newer.right[ids + 4], ids + 4, encode=newer.encode)
    renewed = (criterion.right_cache.features != before).any(dim=1).nonzero().flatten().tolist()
    asked = {i for side, i in newer.asked if side == "right"}
    assert asked <= {0, 1, 15, 16}
    assert set(renewed) == asked | {4, 5}
    for i in renewed:
        torch.testing.assert_close(criterion.right_cache.features[i], newer.right[i].detach())


@pytest.mark.parametrize("tau", [0.005, 0.07, 1.0])
@pytest.mark.parametrize("views", [False, True])
def test_single_precision_and_bf16_agree_with_double(views: bool, tau: float) -> None:
    found = {}
    start = NegativeCache(num_left=20, temperature=tau, views=views, refresh=1.0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        corpus, criterion = Corpus.make(5), copy.deepcopy(start)
        with torch.no_grad():
            corpus.left.copy_(corpus.left.bfloat16())
            corpus.right.copy_(corpus.right.bfloat16())
        ids = torch.arange(9)
        out = criterion(
            corpus.left[ids].to(dtype),
            corpus.right[ids].to(dtype),
            ids,
            encode=lambda side, ids, c=corpus, d=dtype: c.encode(side, ids).to(d),
        )
        found[dtype] = torch.cat(torch.autograd.grad(out.loss, [corpus.left, corpus.right]))
    exact = found[torch.float64]
    assert torch.isfinite(exact).all()
    assert (found[torch.float32] - exact).norm() <= 1e-4 * exact.norm()
    assert (found[torch.bfloat16] - exact).norm() <= 2e-2 * exact.norm()


def test_bad_refresh_is_told() -> None:
    for refresh in (-0.1, 1.5):
        with pytest.raises(DualencError, match="refresh is"):
            NegativeCache(num_left=5, refresh=refresh)
