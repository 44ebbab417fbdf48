"""NegativeCache: the gradient of one drawn negative per anchor, and a cache that keeps itself fresh."""

from __future__ import annotations

import copy

import pytest
import torch
from dualenc.objectives.feature_cache import FeatureCache
from dualenc.objectives.state import SharedRandom
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives import NegativeCache, feature_cache
from tests.objectives.every import Dispatched
from tests.objectives.slow import Case, GuideTable, gradients, make_case
from tests.objectives.slow_chains import Corpus, Item, _anchors, _barred, _batch, _vector


def drawn_negatives(criterion: NegativeCache, case: Case, corpus: Corpus) -> tuple[torch.Tensor, list[Item | None]]:
    """Run the criterion; the gradient, and for each anchor the item whose similarity it pushes down."""
    drawn: list[Item | None] = []
    original = FeatureCache.draw

    def spy(cache: FeatureCache, *query: Tensor) -> tuple[Tensor, Tensor]:
        items, log_mean = original(cache, *query)
        for item in items.tolist():
            view = ("left", "right")[item % 2]
            side = view if case.views else "left" if cache is criterion.left_cache else "right"
            drawn.append(None if item < 0 else Item(side, item // 2 if case.views else item))
        return items, log_mean

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureCache, "draw", spy)
        loss = criterion(**case.arguments(), encode=corpus.encode).loss
    return gradients(loss, case, corpus), drawn


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 6),
    views=st.booleans(),
    refresh=st.sampled_from([0.0, 0.2, 1.0]),
    guided=st.booleans(),
)
def test_gradient_pulls_the_positive_and_pushes_the_drawn_negative(
    seed: int, size: int, views: bool, refresh: float, guided: bool
) -> None:
    criterion = NegativeCache(num_left=20, temperature=0.2, views=views, refresh=refresh, seed=seed).double()
    guide = GuideTable.make(seed) if guided else None
    for step in range(4):
        case, corpus = make_case(seed * 4 + step, size, views, guide=guide), Corpus.make(seed)
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


N, D, TAU = 300, 8, 0.2


def filled_cache(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[FeatureCache, Tensor]:
    """Two of three slots filled, in several writes, some of them twice: the last write of an item counts."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.nn.functional.normalize(torch.randn(N, D, generator=draw, dtype=dtype), dim=1)
    cache = FeatureCache(N)
    kept = torch.arange(N)[torch.arange(N) % 3 > 0]
    cache.write(kept[:50], torch.zeros(50, D, dtype=dtype))
    for part in kept[torch.randperm(len(kept), generator=draw)].split(70):
        cache.write(part, features[part])
    return cache, features


Query = tuple[Tensor, Tensor]
"""Embeddings over τ, and items never to draw."""


def draw(cache: FeatureCache, query: Query, seed: int = 0) -> tuple[Tensor, Tensor]:
    uniform = SharedRandom(seed).uniform(cache.num_blocks + 1, len(query[0]), like=query[0])
    return cache.draw(*query, -(-uniform[1:].clamp(min=2**-24).log()).log(), uniform[0])


def same_query(num_anchors: int, barred: list[int]) -> Query:
    embedding = torch.nn.functional.normalize(torch.ones(1, D), dim=1).expand(num_anchors, D)
    return embedding / TAU, torch.tensor(barred).expand(num_anchors, -1)


def test_draws_follow_the_softmax_over_the_filled_slots() -> None:
    cache, features = filled_cache()
    barred = [4, 7, -1, 290, 0]
    query = same_query(20_000, barred)
    logits = (features.half().float() @ query[0][0]).double()
    logits[torch.arange(N) % 3 == 0] = -torch.inf
    logits[torch.tensor([4, 7, 290])] = -torch.inf
    expected = torch.softmax(logits, dim=0) * len(query[0])
    items, log_mean = draw(cache, query)
    observed = torch.bincount(items, minlength=N).double()
    assert observed[expected == 0].sum() == 0
    often = expected >= 5
    rest = ~often & (expected > 0)
    counts = [torch.cat([values[often], values[rest].sum()[None]]) for values in (observed, expected)]
    assert chisquare(counts[0].numpy(), counts[1].numpy()).pvalue > 0.001
    exact = torch.logsumexp(logits, dim=0) - torch.isfinite(logits).sum().log()
    torch.testing.assert_close(log_mean.double(), exact.expand(len(items)), atol=1e-5, rtol=0)


def test_embeddings_are_remembered_in_half_precision_but_for_double() -> None:
    for dtype, kept in (
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float64),
    ):
        cache, vectors = FeatureCache(10), torch.nn.functional.normalize(torch.randn(10, 64), dim=1).to(dtype)
        cache.write(torch.arange(10), vectors)
        assert cache.features.dtype == kept
        found, known = cache.recall(torch.arange(10), like=vectors)
        assert found.dtype == dtype
        assert known.all()
        turned = (found - vectors).double().norm(dim=1)
        assert (turned <= (0 if dtype == kept else 5e-4)).all()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, features = filled_cache()
    query = features[:50] / TAU, torch.arange(50)[:, None]
    whole = draw(cache, query)
    monkeypatch.setattr(feature_cache, "MAX_ELEMENTS", 50 * cache.block_size)
    chunked = draw(cache, query)
    assert torch.equal(whole[0], chunked[0])
    torch.testing.assert_close(whole[1], chunked[1])


def test_never_holds_a_similarity_per_item_and_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "MAX_ELEMENTS", 2**12)
    cache = FeatureCache(6400)
    cache.write(torch.arange(6400), torch.ones(6400, 2))
    with Dispatched() as watched:
        draw(cache, (torch.ones(50, 2) / TAU, torch.zeros(50, 1, dtype=torch.long)))
    assert watched.largest <= 2 * 6400  # the cache itself, of dimension 2


def test_an_empty_cache_draws_nothing() -> None:
    cache = FeatureCache(N)
    cache.write(torch.tensor([5]), torch.ones(1, D))
    items, log_mean = draw(cache, same_query(3, [5]))
    assert items.tolist() == [-1, -1, -1]
    assert (log_mean == -torch.inf).all()
    assert draw(cache, same_query(3, [6]))[0].tolist() == [5, 5, 5]


def test_of_an_items_copies_in_one_write_the_first_counts() -> None:
    cache = FeatureCache(N)
    cache.write(torch.tensor([7, 3, 7]), torch.tensor([[1.0], [2.0], [3.0]]))
    assert cache.features[[3, 7], 0].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
def test_every_item_is_due_once_per_round(share: float) -> None:
    cache = FeatureCache(N)
    due = torch.cat([cache.due(share) for _ in range(2000)])
    assert len(due) == round(2000 * share * N)
    counts = torch.bincount(due, minlength=N)
    assert counts.max() - counts.min() <= 1


def test_state_round_trip() -> None:
    fresh = FeatureCache(N)
    assert fresh.load_state_dict(FeatureCache(N).state_dict()).missing_keys == []
    cache, _ = filled_cache()
    fresh.load_state_dict(cache.state_dict())
    query = same_query(100, [4])
    assert torch.equal(draw(cache, query)[0], draw(fresh, query)[0])
    with pytest.raises(DualencError, match="features holds 300 items in the saved state, 10 here"):
        FeatureCache(10).load_state_dict(cache.state_dict())
    with pytest.raises(RuntimeError, match="features"):
        fresh.load_state_dict({"num_steps": torch.tensor(0)})
