"""The cache of features: its draws follow the softmax over what it holds."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dualenc.errors import DualencError
from dualenc.objectives import negative_cache as feature_cache
from dualenc.objectives.negative_cache import FeatureCache, Query
from dualenc.objectives.state import SharedRandom

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


def draw(cache: FeatureCache, query: Query, seed: int = 0) -> feature_cache.Draws:
    random = SharedRandom(seed)
    uniform = random.uniform(cache.num_blocks + 1, len(query.embeddings), like=query.embeddings)
    return cache.draw(query, -(-uniform[1:].log()).log(), uniform[0])


def same_query(cache: FeatureCache, num_anchors: int, barred: list[int]) -> Query:
    embedding = torch.nn.functional.normalize(torch.ones(1, D), dim=1).expand(num_anchors, D)
    return Query(embedding, torch.tensor(barred).expand(num_anchors, -1), torch.tensor(TAU))


def test_draws_follow_the_softmax_over_the_filled_slots() -> None:
    cache, features = filled_cache()
    barred = [4, 7, -1, 290, 0]
    query = same_query(cache, 20_000, barred)
    logits = (features @ query.embeddings[0]).double() / TAU
    logits[torch.arange(N) % 3 == 0] = -torch.inf
    logits[torch.tensor([4, 7, 290])] = -torch.inf
    expected = torch.softmax(logits, dim=0) * len(query.embeddings)
    found = draw(cache, query)
    observed = torch.bincount(found.items, minlength=N).double()
    assert observed[expected == 0].sum() == 0
    often = expected >= 5
    rest = ~often & (expected > 0)
    counts = [torch.cat([values[often], values[rest].sum()[None]]) for values in (observed, expected)]
    assert chisquare(counts[0].numpy(), counts[1].numpy()).pvalue > 0.001
    log_mean = torch.logsumexp(logits, dim=0) - torch.isfinite(logits).sum().log()
    torch.testing.assert_close(found.log_mean.double(), log_mean.expand(len(found.items)), atol=1e-5, rtol=0)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, features = filled_cache()
    query = Query(features[:50], torch.arange(50)[:, None], torch.tensor(TAU))
    whole = draw(cache, query)
    monkeypatch.setattr(feature_cache, "MAX_ELEMENTS", 50 * cache.block_size)
    chunked = draw(cache, query)
    assert torch.equal(whole.items, chunked.items)
    torch.testing.assert_close(whole.log_mean, chunked.log_mean)


class Largest(TorchDispatchMode):
    """The number of elements of the largest result."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_never_holds_a_similarity_per_item_and_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "MAX_ELEMENTS", 2**12)
    cache = FeatureCache(6400)
    cache.write(torch.arange(6400), torch.ones(6400, 2))
    with Largest() as largest:
        draw(cache, Query(torch.ones(50, 2), torch.zeros(50, 1, dtype=torch.long), torch.tensor(TAU)))
    assert largest.size <= 2 * 6400  # the cache itself, of dimension 2


def test_an_empty_cache_draws_nothing() -> None:
    cache = FeatureCache(N)
    cache.write(torch.tensor([5]), torch.ones(1, D))
    found = draw(cache, same_query(cache, 3, [5]))
    assert found.items.tolist() == [-1, -1, -1]
    assert (found.log_mean == -torch.inf).all()
    assert draw(cache, same_query(cache, 3, [6])).items.tolist() == [5, 5, 5]


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
    query = same_query(cache, 100, [4])
    assert torch.equal(draw(cache, query).items, draw(fresh, query).items)
    with pytest.raises(DualencError, match="features holds 300 items in the saved state, 10 here"):
        FeatureCache(10).load_state_dict(cache.state_dict())
    with pytest.raises(RuntimeError, match="features"):
        fresh.load_state_dict({"num_steps": torch.tensor(0)})
