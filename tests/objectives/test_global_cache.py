"""GlobalCache: the formula with its draws, their law, what it costs, and that old memories bias
nothing."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import GlobalCache, global_cache
from dualenc.objectives.global_cache import mean_shares
from dualenc.objectives.memory import EmbeddingMemory, sample
from tests.helpers.slow import (
    Case,
    Corpus,
    Item,
    batch_items,
    gradients,
    is_hidden,
    item_anchors,
    make_case,
    vector_of,
)

NUM_ITEMS, TAU = 20, 0.2


class Slow:
    """The same as loops over single anchors and items, given what was looked at and drawn."""

    def __init__(self, stride: int, temperature: float, counts: dict[str, list[int]]) -> None:
        self.stride, self.temperature, self.counts = stride, temperature, counts
        self.memory: dict[Item, Tensor] = {}

    def direction(
        self, case: Case, corpus: Corpus, side: str, pool: list[Item], drawn: list[Item]
    ) -> Tensor:
        """Mean surrogate of one direction; remembers what it has seen."""
        anchors, batch = item_anchors(case, side), batch_items(case, side)
        other = "views" if case.views else "right" if side == "left" else "left"
        count = self.counts[other]

        def mass(anchor: Any, item: Item, vector: Tensor) -> float:
            """c_z·exp(s/τ), 0 for what is no negative."""
            if is_hidden(case, anchor, item):
                return 0.0
            return count[item.id] * math.exp(
                float(anchor.vector.detach() @ vector.detach()) / self.temperature
            )

        sides = ("left", "right") if case.views else (other,)
        remembered = {item: vector for item, vector in self.memory.items() if item.side in sides}
        looked_at = {item: remembered[item] for item in pool if item in remembered}
        sums = [
            sum(mass(anchor, item, vector) for item, vector in looked_at.items())
            for anchor in anchors
        ]
        seeing = [
            (anchor, self.stride * total) for anchor, total in zip(anchors, sums) if total > 0
        ]
        num_pairs = len(case.left_id)

        def expected(item: Item) -> float:
            """How often a copy of the item was to be expected in this batch and among the draws."""
            share = 0.0
            if item in remembered and seeing:
                for anchor, total in seeing:
                    own = mass(anchor, item, remembered[item]) / count[item.id]
                    share += (
                        own
                        / (total + (0 if item in looked_at else self.stride * own))
                        / len(seeing)
                    )
            return (num_pairs - 1) / (sum(count) - 1) + len(drawn) * share

        present = [*batch, *((item, vector_of(case, corpus, side, item)) for item in drawn)]
        losses = []
        for anchor, total in zip(anchors, sums):
            weights = [
                mass(anchor, item, vector) / count[item.id] / expected(item)
                for item, vector in present
            ]
            # What is looked at and the batch stand for the whole corpus.
            own = [item for item, _ in batch if not is_hidden(case, anchor, item)]
            known = total + sum(
                mass(anchor, item, vector) / count[item.id] for item, vector in batch
            )
            seen = [count[item.id] for item in remembered if not is_hidden(case, anchor, item)]
            corpus_items = [Item(s, i) for s in sides for i in range(len(count))]
            negatives = [
                count[item.id] for item in corpus_items if not is_hidden(case, anchor, item)
            ]
            number = len(own) + sum(seen) / self.stride
            partition = max(
                sum(weights), 1e-300, known * sum(negatives) / number if number else 0.0
            )
            pushed = sum(
                weight / partition * (anchor.vector @ vector)
                for weight, (_, vector) in zip(weights, present)
            )
            mean = torch.zeros(5, dtype=torch.float64)
            if total > 0:
                mean = sum(
                    mass(anchor, item, vector) / total * vector
                    for item, vector in looked_at.items()
                )
            missed = (1 - sum(weights) / partition) * mean
            losses.append((pushed + anchor.vector @ missed - anchor.positive) / self.temperature)
        for item, vector in reversed(present):
            self.memory[item] = vector.detach().clone()
        return torch.stack(losses).mean()


def loss_and_draws(
    criterion: GlobalCache, case: Case, corpus: Corpus
) -> tuple[Tensor, list[tuple[list[Item], ...]]]:
    """Its loss, and what each direction looked at and drew."""
    pools: list[Tensor] = []
    drawn: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, holder, found in (("_pool", criterion, pools), ("sample", global_cache, drawn)):
            original = getattr(holder, name)
            patch.setattr(
                holder, name, lambda *given, o=original, f=found: f.append(o(*given)) or f[-1]
            )
        loss = criterion(**case.arguments(), encode=corpus.encode).loss
    by_direction = []
    for side, pool, items in zip(("right", "left"), pools, drawn, strict=False):
        numbers = pool.tolist(), [i for i in items.tolist() if i >= 0]
        by_direction.append(
            tuple([Item.of_number(i, side, case.views) for i in each] for each in numbers)
        )
    return loss, by_direction


@pytest.mark.slow
@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(2, 6),
    views=st.booleans(),
    extra_encodes=st.sampled_from([0.0, 1.0, 3.0]),
    pool=st.sampled_from([2048, 20, 7]),
    counted=st.booleans(),
)
def test_gradient_is_that_of_the_formula(
    seed: int, size: int, views: bool, extra_encodes: float, pool: int, counted: bool
) -> None:
    arguments = {"extra_encodes": extra_encodes, "seed": seed, "pool": pool}
    criterion = GlobalCache(num_left=NUM_ITEMS, temperature=TAU, views=views, **arguments).double()
    draw = torch.Generator().manual_seed(seed)
    counts = {side: torch.ones(NUM_ITEMS, dtype=torch.long) for side in ("left", "right")}
    if counted and not views:
        counts = {side: 1 + torch.randperm(NUM_ITEMS, generator=draw) % 3 for side in counts}
        criterion.set_counts(counts["left"], counts["right"])
    by_side = {
        side: values.tolist() for side, values in [*counts.items(), ("views", counts["left"])]
    }
    stride = math.ceil((2 if views else 1) * NUM_ITEMS / pool)
    slow = Slow(stride, float(criterion.temperature), by_side)
    for step in range(3):
        # Another corpus in every step: what is remembered is old.
        case, corpus = make_case(seed * 4 + step, size, views), Corpus.make(seed * 4 + step)
        loss, drawn = loss_and_draws(criterion, case, corpus)
        sides = ["views"] if views else ["left", "right"]
        expected = [
            slow.direction(case, corpus, side, *items)
            for side, items in zip(sides, drawn, strict=True)
        ]
        torch.testing.assert_close(
            gradients(loss, case, corpus), gradients(torch.stack(expected).mean(), case, corpus)
        )


def mean_of_sum(
    left: Tensor, right: Tensor, remembered: Tensor, batch_size: int, num_draws: int, tau: float
) -> Tensor:
    """(N,) of each left anchor the mean, over all batches with it and all draws, of the weighed sum
    over batch and draws, over the true sum."""
    num_items = len(left)
    masses = (left @ right.T / tau).exp().fill_diagonal_(0)
    memory, items = EmbeddingMemory(num_items), torch.arange(num_items)
    memory.write(items, remembered)
    total, count = torch.zeros(num_items).double(), torch.zeros(num_items)
    for batch in itertools.combinations(range(num_items), batch_size):
        rows = torch.tensor(batch)
        queries, hidden = left[rows] / tau, rows[:, None]
        seen = memory.attend(queries, hidden)
        given = (
            queries,
            hidden,
            seen.log_sum,
            items,
            remembered,
            torch.ones(num_items, dtype=torch.bool),
        )
        shares = mean_shares(*(tensor[None] for tensor in given), torch.zeros(1, 1))[0]
        expected = (batch_size - 1) / (num_items - 1) + num_draws * shares
        # One number u places all draws, at (k + u)/R along the cumulative shares: what is drawn
        # changes at these u.
        cuts = sorted({0.0, 1.0, *(num_draws * shares.cumsum(dim=0) % 1).tolist()})
        for low, high in itertools.pairwise(cuts):
            if high - low > 1e-12:
                drawn = sample(
                    seen, num_draws, torch.tensor([(low + high) / 2], dtype=torch.float64)
                )
                number = torch.bincount(torch.cat([rows, drawn]), minlength=num_items)
                total[rows] += (high - low) * (
                    masses[rows] * number / expected.clamp(min=1e-300)
                ).sum(dim=1)
        count[rows] += 1
    return total / count / masses.sum(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "tau", "is_old", "low", "high"),
    [
        (1, 0.2, False, 1 - 1e-9, 1 + 1e-9),
        (1, 0.2, True, 1 - 1e-9, 1 + 1e-9),
        (2, 0.07, False, 1.02, 1.04),
        (2, 1.0, False, 1.11, 1.13),
        (3, 1.0, False, 1.05, 1.065),
        (3, 1.0, True, 1.03, 1.07),
    ],
)
def test_mean_of_the_sum_over_all_batches_and_draws(
    batch_size: int, tau: float, is_old: bool, low: float, high: float
) -> None:
    """Exact for a batch of one, whatever is remembered: draws do not depend on who else is in it;
    else a few percent too large."""
    found = []
    for seed in range(10):
        draws = torch.randn(
            3, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        left, right, old = normalize(draws, dim=2)
        remembered = old if is_old else right
        found.append(
            mean_of_sum(left, right, remembered, batch_size, max(1, round(batch_size / 2)), tau)
        )
    assert low < float(torch.stack(found).mean()) < high


def encodes_of_last_epoch(criterion: GlobalCache) -> float:
    """Items encoded per pair in the last of three epochs, with embeddings that stay."""
    corpus = Corpus.make(0, 60)
    for epoch in range(3):
        corpus.asked.clear()
        for ids in torch.randperm(60, generator=torch.Generator().manual_seed(epoch)).split(12):
            criterion(**corpus.batch(ids.tolist()))
    return len(corpus.asked) / 60


@pytest.mark.parametrize("extra_encodes", [0.0, 0.5, 2.0])
def test_no_more_is_encoded_than_wished(extra_encodes: float) -> None:
    criterion = GlobalCache(num_left=60, temperature=TAU, extra_encodes=extra_encodes).double()
    per_pair = encodes_of_last_epoch(criterion)
    assert per_pair <= extra_encodes
    assert per_pair > extra_encodes / 2 or not extra_encodes


@pytest.mark.parametrize("extra_encodes", [1.0, 0.1, 0.0])
def test_a_batch_of_one_pair_draws_at_least_one_item(extra_encodes: float) -> None:
    corpus = Corpus.make(0, 6)
    criterion = GlobalCache(num_left=6, temperature=TAU, extra_encodes=extra_encodes).double()
    for step in range(12):
        corpus.asked.clear()
        criterion(**corpus.batch([step % 6]))
        # Before the second step nothing is remembered that could be drawn.
        assert len(corpus.asked) == (2 if extra_encodes and step else 0)


def filled(num_items: int, **arguments: Any) -> tuple[GlobalCache, Corpus]:
    corpus = Corpus.make(0, num_items)
    criterion = GlobalCache(num_left=num_items, temperature=TAU, **arguments).double()
    for memory, table in zip(criterion.memories, (corpus.right, corpus.left)):
        memory.write(torch.arange(num_items), table.detach())
    return criterion, corpus


def test_mined_negatives_of_no_pair_are_remembered_and_drawn() -> None:
    """As in training, where the counts are those of pairs: 0 of what was mined alone."""
    pairs, mined = NUM_ITEMS - 4, torch.arange(NUM_ITEMS - 4, NUM_ITEMS)
    corpus = Corpus.make(0, NUM_ITEMS)
    criterion = GlobalCache(
        num_left=pairs, num_right=NUM_ITEMS, temperature=TAU, extra_encodes=4.0
    ).double()
    counts = torch.ones(NUM_ITEMS)
    counts[mined] = 0
    criterion.set_counts(torch.ones(pairs), counts)
    for step in range(6):
        corpus.right.grad = None
        batch = corpus.batch([step, step + 6])
        criterion(**batch, negatives=corpus.right[mined], negative_id=mined).loss.backward()
    assert corpus.right.grad[mined].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("num_items", "pool", "stride"),
    [(1000, 100, 10), (1000, 300, 4), (1000, 2048, 1), (7, 1, 7), (192, 5, 39)],
)
def test_every_item_is_in_as_many_pools(num_items: int, pool: int, stride: int) -> None:
    criterion, _ = filled(num_items, pool=pool)
    times = torch.zeros(num_items + stride)
    for _ in range(2000 if stride > 1 else 1):
        items = criterion._pool(0, times)
        assert len(items) <= pool
        assert torch.equal(items // stride, torch.arange(len(items)))
        times[items] += 1
    shares = times[:num_items] / (2000 if stride > 1 else 1)
    assert (
        float((shares - 1 / stride).abs().max())
        <= 5 * (1 / stride * (1 - 1 / stride) / 2000) ** 0.5
    )


def test_a_pool_may_end_beyond_the_corpus() -> None:
    """Of 192 items, which fill whole blocks: three times of five the last stretch looks at none."""
    criterion, corpus = filled(192, pool=40)
    for first in range(0, 20, 2):
        assert criterion(**corpus.batch([first, first + 1])).loss.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_items", "pool"), [(1000, 256), (1024, 400)], ids=["even", "a last stretch beyond N"]
)
def test_the_partition_function_of_a_pool_is_unbiased(num_items: int, pool: int) -> None:
    criterion, corpus = filled(num_items, pool=pool)
    criterion.eval()
    exact = (corpus.left[:4] @ corpus.right.T / TAU).detach().exp()
    exact[torch.arange(4), torch.arange(4)] = 0
    sums = []
    for position in range(150):
        criterion.draws.position = position
        loss = criterion(**corpus.batch([0, 1, 2, 3])).per_anchor[:4]
        positive = (corpus.left[:4] * corpus.right[:4]).sum(dim=1).detach() / TAU
        sums.append((loss + positive).exp())
    ratios = torch.stack(sums) / exact.sum(dim=1)
    error = ratios.std(dim=0) / 150**0.5
    assert bool(((ratios.mean(dim=0) - 1).abs() < 4 * error).all())
    assert float(error.max()) < 0.03


def test_what_lies_outside_a_pool_may_be_nearer_than_all_inside_it() -> None:
    """At small τ by more than float32 can hold; an item counts as expected at most once per
    draw."""
    far, near = torch.eye(4)[0], torch.eye(4)[1]
    nobody, items = torch.tensor([[-1]]), torch.arange(2)
    given = (near[None] / 0.005, nobody, torch.zeros(1), items, torch.stack([far, near]), items < 1)
    shares = mean_shares(*(tensor[None] for tensor in given), torch.tensor([[10.0]]).log())
    assert shares.tolist() == [pytest.approx([1.0, 0.1], rel=1e-5)]


NUM_PAIRS, BATCH_SIZE = 320, 16


def clustered() -> tuple[Tensor, Tensor]:
    """(N, D) pairs: of each anchor a few negatives weigh most. Neighbouring ids, so blocks of a
    cache, are not near."""
    draw = torch.Generator().manual_seed(0)
    centres = normalize(torch.randn(NUM_PAIRS // 20, 16, generator=draw), dim=1)
    left = normalize(
        centres.repeat(20, 1) + 0.12 * torch.randn(NUM_PAIRS, 16, generator=draw), dim=1
    )
    return left, normalize(left + 0.1 * torch.randn(NUM_PAIRS, 16, generator=draw), dim=1)


def exact(left: Tensor, right: Tensor, tau: float) -> Tensor:
    """(2, N) losses of left and right anchors over the whole corpus."""
    scores = (left @ right.T / tau).double()
    masked = scores.clone().fill_diagonal_(-torch.inf)
    return torch.stack([torch.logsumexp(masked, dim=dim) - scores.diagonal() for dim in (1, 0)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tau", "pool", "low"),
    [
        (0.02, 64, -2.0),
        (0.07, 64, -0.4),
        (0.07, 160, -0.1),
        (0.05, 2048, -0.01),
        (0.02, 320, -0.01),
    ],
)
def test_a_loss_is_reported_once_it_is_near_the_true_one(tau: float, pool: int, low: float) -> None:
    """With the epoch that fills the cache, where a step looks at all of it: the log of a random
    part's sum is too low where few negatives weigh most."""
    left, right = clustered()
    true, draw = exact(left, right, tau), torch.Generator().manual_seed(0)
    criterion = GlobalCache(num_left=NUM_PAIRS, temperature=tau, pool=pool)
    encode = lambda side, ids: (left if side == "left" else right)[ids]  # noqa: E731
    reported, errors = [], []
    for _ in range(4):
        for ids in torch.randperm(NUM_PAIRS, generator=draw).split(BATCH_SIZE):
            out = criterion(
                left[ids].requires_grad_(), right[ids].requires_grad_(), ids, encode=encode
            )
            reported.append(criterion.reports_loss)
            if all(memory.holds_corpus for memory in criterion.memories):
                errors.append(float((out.per_anchor.view(2, -1).double() - true[:, ids]).mean()))
    steps = NUM_PAIRS // BATCH_SIZE
    is_known = pool >= NUM_PAIRS
    assert reported == [False] * (steps - 1) + [is_known] * (3 * steps + 1)
    assert len(errors) == 3 * steps + 1
    assert low < statistics.mean(errors) < 0.01
    resumed = GlobalCache(num_left=NUM_PAIRS, temperature=tau, pool=pool)
    resumed.load_state_dict(criterion.state_dict())
    assert resumed.reports_loss == is_known
