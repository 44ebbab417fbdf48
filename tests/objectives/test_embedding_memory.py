"""The memory of embeddings: what it holds, and that draws and sums are those of the softmax over
it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import memory
from dualenc.objectives.global_cache import mean_shares
from dualenc.objectives.memory import Attention, EmbeddingMemory, MemoryDraws, inverse_cdf, sample

N, D, TAU = 300, 8, 0.2
EMPTY = torch.arange(N) % 3 == 0


def filled_memory(dtype: torch.dtype = torch.float32) -> tuple[EmbeddingMemory, Tensor]:
    """Two of three slots filled, in several writes, some of them twice: the last write of an item
    counts."""
    draw = torch.Generator().manual_seed(0)
    vectors = normalize(torch.randn(N, D, generator=draw, dtype=dtype), dim=1)
    found, items = EmbeddingMemory(N), torch.arange(N)[~EMPTY]
    found.write(items[:50], torch.zeros(50, D, dtype=dtype))
    for part in items[torch.randperm(len(items), generator=draw)].split(70):
        found.write(part, vectors[part])
    return found, vectors


def draw_for(found: EmbeddingMemory, queries: Tensor, hidden: Tensor) -> MemoryDraws:
    uniform = torch.rand(
        2, len(queries), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return found.draw(queries, hidden, uniform)


@pytest.mark.parametrize("counted", [False, True])
def test_draws_follow_the_softmax_over_the_filled_slots(counted: bool) -> None:
    found, vectors = filled_memory()
    counts = torch.arange(N) % 4 + 1 if counted else None
    found.expect(N, counts)
    query = normalize(torch.ones(1, D), dim=1) / TAU
    logits = (vectors @ query[0]).double() + (0 if counts is None else counts.double().log())
    logits[EMPTY] = -torch.inf
    logits[[4, 7, 290]] = -torch.inf
    expected = torch.softmax(logits, dim=0) * 20_000
    hidden = torch.tensor([4, 7, -1, 290, 0]).expand(20_000, -1)
    draws = draw_for(found, query.expand(20_000, -1), hidden)
    observed = torch.bincount(draws.keys, minlength=N).double()
    assert observed[expected == 0].sum() == 0
    often = expected >= 5
    both = [
        torch.cat([values[often], values[~often].sum()[None]]) for values in (observed, expected)
    ]
    assert chisquare(both[0].numpy(), both[1].numpy()).pvalue > 0.001
    number = (torch.ones(N) if counts is None else counts)[logits.isfinite()].sum()
    log_mean = logits.logsumexp(0) - number.log()
    torch.testing.assert_close(draws.log_mean.double(), log_mean.expand(20_000), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        draws.scores.double(), (vectors.double() @ query[0].double())[draws.keys], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("some", [False, True])
def test_attention_is_the_softmax_over_the_slots_looked_at(some: bool) -> None:
    found, vectors = filled_memory(torch.float64)
    draw = torch.Generator().manual_seed(1)
    queries, hidden = vectors[:7] / TAU, torch.tensor([[-1, i, 200 + i] for i in range(7)])
    counts = torch.randint(1, 4, (N,), generator=draw)
    found.expect(N, counts)
    logits = queries @ vectors.T + counts.log()
    logits[:, EMPTY] = -torch.inf
    logits[torch.arange(7)[:, None], hidden[:, 1:]] = -torch.inf
    slots = torch.arange(20, 220, 2) if some else None
    is_looked_at = torch.zeros(N, dtype=torch.bool).index_fill(
        0, torch.arange(N) if slots is None else slots, True
    )
    logits[:, ~is_looked_at] = -torch.inf
    softmax, seen = torch.softmax(logits, dim=1), found.attend(queries, hidden, slots)
    is_item = seen.items >= 0
    shares = torch.zeros(N, dtype=torch.float64).index_add(
        0, seen.items[is_item], seen.shares[is_item]
    )
    torch.testing.assert_close(shares, softmax.mean(dim=0))
    torch.testing.assert_close(seen.mean, softmax @ vectors)
    torch.testing.assert_close(seen.log_sum, torch.logsumexp(logits, dim=1))
    remembered, is_known = found.recall(torch.arange(N), queries)
    assert torch.equal(is_known, ~EMPTY)
    known = (queries, hidden, seen.log_sum, torch.arange(N), remembered, is_looked_at)
    alike = mean_shares(*(tensor[None] for tensor in known), torch.zeros(1, 1))[0] * (
        is_known & is_looked_at
    )
    torch.testing.assert_close(alike * counts, softmax.mean(dim=0))


def test_runs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, vectors = filled_memory(torch.float64)
    query = vectors[:9] / TAU, torch.arange(9)[:, None]
    results = []
    for entries in (memory.PART_ENTRIES, 9 * found.block_size):
        monkeypatch.setattr(memory, "PART_ENTRIES", entries)
        results.append((*found.attend(*query), *draw_for(found, *query)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_memory_with_nothing_to_see_draws_nothing() -> None:
    found, queries = EmbeddingMemory(N), torch.ones(3, D)
    found.write(torch.tensor([5]), torch.ones(1, D))
    draws = draw_for(found, queries, torch.full((3, 1), 5))
    assert draws.keys.tolist() == [-1, -1, -1]
    assert (draws.log_mean == -torch.inf).all()
    seen = found.attend(queries, torch.full((3, 1), 5))
    assert not seen.mean.any()
    assert not seen.shares.any()
    assert (sample(seen, 4, torch.rand(1)) == -1).all()
    assert draw_for(found, queries, torch.full((3, 1), 6)).keys.tolist() == [5, 5, 5]


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), num_draws=st.integers(0, 40), size=st.integers(1, 30))
def test_an_item_is_drawn_as_often_as_its_share_says_up_to_rounding(
    seed: int, num_draws: int, size: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    shares = torch.rand(size, generator=draw, dtype=torch.float64).pow(4)
    shares = shares / shares.sum()
    nothing = torch.zeros(0)
    drawn = sample(
        Attention(torch.arange(size), shares, nothing, nothing),
        num_draws,
        torch.rand(1, generator=draw, dtype=torch.float64),
    )
    times = torch.bincount(drawn, minlength=size)
    assert times.sum() == num_draws
    assert bool((times >= (num_draws * shares - 1e-9).floor()).all())
    assert bool((times <= (num_draws * shares + 1e-9).ceil()).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_gives_a_column_of_weight_zero(dtype: torch.dtype) -> None:
    """Not even for the least and the greatest draw, whatever the sum of the weights."""
    ends, draw = (
        torch.tensor([0.0, 2.0**-24, 0.5, 1 - 2.0**-53], dtype=torch.float64),
        torch.Generator().manual_seed(0),
    )
    for _ in range(300):
        scale = 10 ** (torch.rand(4, 1, generator=draw, dtype=dtype) * 8 - 4)
        weights = torch.rand(4, 17, generator=draw, dtype=dtype) * scale
        weights[:, (torch.rand(17, generator=draw) < 0.5).nonzero()[:, 0]] = 0
        weights[:, [0, 16]], weights[:, 8] = 0, 1
        assert bool((weights.gather(1, inverse_cdf(weights, ends)[:, None]) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embeddings_keep_their_precision_and_come_back_from_the_state(dtype: torch.dtype) -> None:
    found, resumed = EmbeddingMemory(10), EmbeddingMemory(10)
    vectors = torch.randn(10, 64, dtype=dtype)
    found.write(torch.arange(10), vectors)
    found.count(7)
    resumed.load_state_dict(found.state_dict())
    remembered, is_known = resumed.recall(torch.arange(10), vectors)
    assert is_known.all()
    assert torch.equal(remembered, vectors)
    assert resumed.num_seen == 7


def test_of_an_items_copies_in_one_write_the_first_counts() -> None:
    found = EmbeddingMemory(N)
    found.write(torch.tensor([7, 3, 7]), torch.tensor([[1.0], [2.0], [3.0]]))
    assert found.embeddings[[3, 7], 0].tolist() == [2.0, 1.0]


def test_with_fewer_slots_than_items_each_slot_holds_the_latest() -> None:
    found = EmbeddingMemory(10, num_slots=4)
    for item in (1, 2, 5, 9):
        found.write(torch.tensor([item]), torch.full((1, 2), float(item)))
    remembered, is_known = found.recall(torch.arange(10), torch.zeros(1, 2))
    assert is_known.nonzero().flatten().tolist() == [2, 9]
    assert remembered[:, 0].tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 0, 9]


@settings(max_examples=40)
@given(
    writes=st.lists(st.lists(st.integers(-1, 19), max_size=12), max_size=8),
    num_slots=st.sampled_from([7, 20]),
)
def test_it_keeps_count_of_what_anchors_see(writes: list[list[int]], num_slots: int) -> None:
    found, resumed = EmbeddingMemory(20, num_slots), EmbeddingMemory(20, num_slots)
    counts, hidden = torch.arange(20) % 3 + 1, torch.tensor([[3, 11], [19, -1]])
    for one in (found, resumed):
        one.expect(20, counts)
    for items in writes:
        found.write(torch.tensor(items, dtype=torch.long), torch.ones(len(items), 2))
    resumed.load_state_dict(found.state_dict())
    _, is_known = found.recall(torch.arange(20), torch.ones(1, 2))
    known = set(is_known.nonzero()[:, 0].tolist())
    expected = [sum(counts[item].item() for item in known - set(row)) for row in hidden.tolist()]
    for one in (found, resumed):
        assert one.num_negatives(hidden).tolist() == expected


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_every_item_is_due_once_per_round(share: float) -> None:
    found = EmbeddingMemory(N)
    due = torch.cat([found.due(share) for _ in range(500)])
    assert len(due) == round(500 * share * N)
    counts = torch.bincount(due, minlength=N)
    assert counts.max() - counts.min() <= 1
