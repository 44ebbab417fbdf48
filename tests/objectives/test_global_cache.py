"""GlobalCache: the mean over all of its draws, what it costs, and when its loss is known."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import GlobalCache
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.global_cache import CachePlan, mean_shares
from tests.helpers.slow import Corpus

NUM_ITEMS, TAU = 20, 0.2
DIM = 5


def step_with_draws(
    criterion: GlobalCache, offsets: list[int], place: float, **batch: Any
) -> tuple[Tensor, CachePlan]:
    """(X, A) the losses of a batch and its plan, with given offsets of the pool and place of the
    draws."""
    steps = []

    def losses(anchors: Anchors, plan: CachePlan, outside: Tensor) -> Tensor:
        steps.append((GlobalCache.losses(criterion, anchors, plan, outside), plan))
        return steps[-1][0]

    def integers(high: int, number: int, device: torch.device) -> Tensor:
        return torch.tensor([*offsets, 0, 0, 0][:number])

    def uniform(*shape: int, like: Tensor) -> Tensor:
        return torch.full(shape, place, dtype=torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criterion, "losses", losses)
        patch.setattr(criterion.draws, "integers", integers)
        patch.setattr(criterion.draws, "uniform", uniform)
        criterion(**batch)
    return steps[0]


@dataclass
class Trial:
    """Six pairs, of which the left items are anchors: what they see, and what is remembered of it.

    Two pairs share the last right item if `shared`; each anchor has a second positive if `listed`.
    """

    seed: int
    tau: float = 0.2
    is_old: bool = False
    extra_encodes: float = 1.0
    pool: int = 6
    shared: bool = False
    listed: bool = False

    def __post_init__(self) -> None:
        self.right_id = [0, 1, 2, 3, 4, 4] if self.shared else list(range(6))
        num_right = max(self.right_id) + 1
        draw = torch.Generator().manual_seed(self.seed)
        tables = torch.randn(3, 6, DIM, generator=draw, dtype=torch.float64)
        left, right, old = normalize(tables, dim=2)
        self.left, self.right = left.requires_grad_(), right[:num_right].clone().requires_grad_()
        self.remembered = old[:num_right] if self.is_old else self.right.detach()
        self.counts = [self.right_id.count(item) for item in range(num_right)]
        self.positives = [
            {own, (own + 1) % num_right} if self.listed else {own} for own in self.right_id
        ]
        self.criterion = GlobalCache(
            num_left=6,
            num_right=num_right,
            temperature=self.tau,
            extra_encodes=self.extra_encodes,
            pool=self.pool,
        ).double()
        self.tau = float(self.criterion.temperature)  # rounded
        self.criterion.set_counts(torch.ones(6), torch.tensor(self.counts))
        self.criterion.eval()  # the memory stays as it is written here
        for memory, vectors in zip(self.criterion.memories, (self.remembered, self.left.detach())):
            memory.write(torch.arange(len(vectors)), vectors)
            memory.count(6)

    @property
    def stride(self) -> int:
        """Of how many items a pool holds one."""
        return -(-len(self.right) // self.pool)

    def kernel(self, anchor: int, vector: Tensor) -> float:
        return math.exp(float(self.left[anchor].detach() @ vector.detach()) / self.tau)

    def exact_sum(self, anchor: int) -> float:
        """Σ c_z·exp(s/τ) over all negatives."""
        return sum(
            self.counts[item] * self.kernel(anchor, self.right[item])
            for item in range(len(self.right))
            if item not in self.positives[anchor]
        )

    def pools(self) -> Iterator[list[int]]:
        """Offsets of one item in each stretch of ids: all of them are equally probable."""
        num_stretches = -(-len(self.right) // self.stride)
        yield from map(list, itertools.product(range(self.stride), repeat=num_stretches))

    def pool_masses(self, anchor: int, offsets: list[int]) -> dict[int, float]:
        """c_z·exp(s/τ) of the remembered items of a pool, without the anchor's positives."""
        pool = [number * self.stride + offset for number, offset in enumerate(offsets)]
        return {
            item: self.counts[item] * self.kernel(anchor, self.remembered[item])
            for item in pool
            if item < len(self.right) and item not in self.positives[anchor]
        }

    def pool_sum(self, anchor: int, offsets: list[int]) -> float:
        return sum(self.pool_masses(anchor, offsets).values())

    def draw_probabilities(self, batch: tuple[int, ...], offsets: list[int]) -> list[float]:
        """Of each right item: the mean over the batch's anchors of the softmax over the pool."""
        probabilities = [0.0] * len(self.right)
        for anchor in batch:
            for item, mass in self.pool_masses(anchor, offsets).items():
                share = mass / self.pool_sum(anchor, offsets)
                probabilities[item] += share / len(batch)
        return probabilities

    def outcomes(self, batch: tuple[int, ...]) -> Iterator[tuple[float, list[int], float]]:
        """Every pool with every interval of the random number u that places the draws.

        Yields the probability, the offsets of the pool and a place u in the interval. The k-th of R
        draws is the item at (k + u)/R of the cumulative probabilities.
        """
        num_draws = max(round(self.extra_encodes * len(batch) / 2), 1)
        pools = list(self.pools())
        for offsets in pools:
            ends = itertools.accumulate(self.draw_probabilities(batch, offsets))
            cuts = sorted({0.0, 1.0, *(num_draws * end % 1 for end in ends)})
            for low, high in itertools.pairwise(cuts):
                if high - low > 1e-12:
                    yield (high - low) / len(pools), offsets, (low + high) / 2

    def step(
        self, batch: tuple[int, ...], offsets: list[int], place: float
    ) -> tuple[Tensor, CachePlan]:
        """(B,) the losses of the batch's left anchors with given draws, and the step's plan."""
        rows, right_id = torch.tensor(batch), torch.tensor([self.right_id[row] for row in batch])
        losses, plan = step_with_draws(
            self.criterion,
            offsets,
            place,
            left=self.left[rows],
            right=self.right[right_id],
            left_id=rows,
            right_id=right_id,
            left_positives=torch.tensor([sorted(self.positives[row]) for row in batch]),
            encode=lambda side, ids: (self.left if side == "left" else self.right)[ids],
        )
        return losses[0], plan

    def weighed_sum(self, anchor: int, plan: CachePlan) -> float:
        """Σ exp(s/τ)·n_z/E[n_z] over the batch and the draws of a step."""
        return sum(
            math.exp(log_weight) * self.kernel(anchor, self.right[item])
            for item, log_weight in zip(plan.items[0].tolist(), plan.log_weights[0].tolist())
            if item >= 0 and item not in self.positives[anchor]
        )


def mean_weights(trial: Trial, batch: tuple[int, ...]) -> list[float]:
    """Of each right item the mean weight n_z/E[n_z] over all pools and draws."""
    weights = [0.0] * len(trial.right)
    for probability, offsets, place in trial.outcomes(batch):
        _, plan = trial.step(batch, offsets, place)
        for item, log_weight in zip(plan.items[0].tolist(), plan.log_weights[0].tolist()):
            if item >= 0:
                weights[item] += probability * math.exp(log_weight)
    return weights


def expected_weights(trial: Trial, batch: tuple[int, ...]) -> list[float]:
    """The same by its definition: the mean of n_z given the batch, over what n_z is divided by.

    That is (B − 1)/(M − 1) for the batch, and for each draw the mean over anchors of the item's
    softmax weight in the corpus, as if it were in the pool.
    """
    num_draws = max(round(trial.extra_encodes * len(batch) / 2), 1)
    stride = trial.stride
    pools = list(trial.pools())
    weights = [0.0] * len(trial.right)
    for offsets in pools:
        drawn = trial.draw_probabilities(batch, offsets)
        for item in range(len(weights)):
            in_pool = offsets[item // stride] == item % stride
            share = 0.0
            for anchor in batch:
                if item in trial.positives[anchor]:
                    continue
                kernel = trial.kernel(anchor, trial.remembered[item])
                total = trial.pool_sum(anchor, offsets) + (0.0 if in_pool else kernel)
                share += kernel / (stride * total) / len(batch)
            divisor = (len(batch) - 1) / 5 + num_draws * share
            number = sum(trial.right_id[row] == item for row in batch) + num_draws * drawn[item]
            weights[item] += number / divisor / len(pools) if number else 0.0
    return weights


@pytest.mark.parametrize("batch", [(0, 3), (0, 2, 5)], ids=len)
@pytest.mark.parametrize(
    "arguments", [{"is_old": True}, {"is_old": True, "listed": True}, {"pool": 3}], ids=str
)
def test_an_item_counts_as_often_as_it_is_there_over_how_often_it_is_expected(
    arguments: dict[str, Any], batch: tuple[int, ...]
) -> None:
    trial = Trial(seed=0, **arguments)
    expected = expected_weights(trial, batch)
    assert mean_weights(trial, batch) == pytest.approx(expected, rel=1e-9)


def mean_ratio(trial: Trial, batch_size: int) -> float:
    """The mean over all batches, pools, draws and anchors of the weighed sum over the true one."""
    ratios = []
    for batch in itertools.combinations(range(6), batch_size):
        means = dict.fromkeys(batch, 0.0)
        for probability, offsets, place in trial.outcomes(batch):
            _, plan = trial.step(batch, offsets, place)
            for anchor in batch:
                means[anchor] += probability * trial.weighed_sum(anchor, plan)
        ratios += [mean / trial.exact_sum(anchor) for anchor, mean in means.items()]
    return statistics.mean(ratios)


EXACT = {
    "plain": {},
    "old memory": {"is_old": True},
    "four draws": {"extra_encodes": 8.0, "is_old": True},
    "pool": {"pool": 3, "is_old": True},
    "two pairs share an item": {"shared": True, "is_old": True},
    "listed positives": {"listed": True, "is_old": True},
    "all at once": {"pool": 3, "shared": True, "listed": True, "is_old": True},
}


@pytest.mark.parametrize("arguments", EXACT.values(), ids=EXACT)
def test_the_mean_of_the_sum_is_exact_for_a_batch_of_one(arguments: dict[str, Any]) -> None:
    """The mean over all pools and draws: draws do not depend on who else is in the batch."""
    trial = Trial(seed=0, **arguments)
    for anchor in (0, 2, 5):
        mean = sum(
            probability * trial.weighed_sum(anchor, trial.step((anchor,), offsets, place)[1])
            for probability, offsets, place in trial.outcomes((anchor,))
        )
        assert mean == pytest.approx(trial.exact_sum(anchor), rel=1e-9)


def test_the_mean_of_the_sum_is_exact_for_one_image_in_two_views() -> None:
    """Views share the draws, and see no view of their own image; item 2i + v is view v of i."""
    draw = torch.Generator().manual_seed(0)
    tables = torch.randn(2, 6, DIM, generator=draw, dtype=torch.float64)
    vectors, old = normalize(tables, dim=2)
    criterion = GlobalCache(num_left=3, temperature=TAU, views=True).double().eval()
    criterion.memories[0].write(torch.arange(6), old)
    criterion.memories[0].count(6)
    tau = float(criterion.temperature)
    for image in range(3):
        views = (2 * image, 2 * image + 1)
        others = [item for item in range(6) if item not in views]
        masses = [[math.exp(float(vectors[v] @ old[z]) / tau) for z in others] for v in views]
        drawn = [sum(row[i] / sum(row) / 2 for row in masses) for i in range(4)]
        means = [0.0, 0.0]
        for item, probability, end in zip(others, drawn, itertools.accumulate(drawn)):
            _, plan = step_with_draws(
                criterion,
                [0] * 6,
                end - probability / 2,
                left=vectors[views[:1],],
                right=vectors[views[1:],],
                left_id=torch.tensor([image]),
                encode=lambda side, ids: vectors[2 * ids + (side == "right")],
            )
            column = plan.items[0].tolist().index(item)
            for number, view in enumerate(views):
                score = float(vectors[view] @ vectors[item]) / tau
                weight = math.exp(float(plan.log_weights[0, column]) + score)
                means[number] += probability * weight
        exact = [sum(math.exp(float(vectors[v] @ vectors[z]) / tau) for z in others) for v in views]
        assert means == pytest.approx(exact, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "arguments", "low", "high"),
    [
        (2, {"tau": 0.07}, 1.02, 1.04),
        (2, {"tau": 1.0}, 1.11, 1.13),
        (3, {"tau": 1.0}, 1.05, 1.065),
        (3, {"tau": 1.0, "is_old": True}, 1.03, 1.07),
    ],
)
def test_the_mean_of_the_sum_is_a_few_percent_too_large_for_larger_batches(
    batch_size: int, arguments: dict[str, Any], low: float, high: float
) -> None:
    ratios = [mean_ratio(Trial(seed, **arguments), batch_size) for seed in range(3)]
    assert low < statistics.mean(ratios) < high


def mean_gradient(trial: Trial, batch_size: int) -> Tensor:
    """(12, D) the mean over all batches and draws of the gradient in both tables."""
    batches = list(itertools.combinations(range(6), batch_size))
    total = torch.zeros(12, DIM, dtype=torch.float64)
    for batch in batches:
        for probability, offsets, place in trial.outcomes(batch):
            losses, _ = trial.step(batch, offsets, place)
            gradients = torch.autograd.grad(losses.mean(), [trial.left, trial.right])
            total += probability / len(batches) * torch.cat(gradients)
    return total


def exact_gradient(trial: Trial) -> Tensor:
    """(12, D) the gradient of the mean loss over the corpus, in both tables."""
    losses = []
    for anchor in range(6):
        scores = trial.right @ trial.left[anchor] / trial.tau
        negatives = [scores[item] for item in range(6) if item != anchor]
        losses.append(torch.stack(negatives).logsumexp(dim=0) - scores[anchor])
    gradients = torch.autograd.grad(torch.stack(losses).mean(), [trial.left, trial.right])
    return torch.cat(gradients)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("extra_encodes", [1.0, 4.0])
@pytest.mark.parametrize("tau", [0.07, 1.0])
def test_the_mean_gradient_is_exact_for_a_batch_of_one(extra_encodes: float, tau: float) -> None:
    trial = Trial(seed=0, extra_encodes=extra_encodes, tau=tau)
    assert relative_error(mean_gradient(trial, 1), exact_gradient(trial)) < 1e-9


def test_without_draws_the_memory_gives_the_gradient_of_the_anchors() -> None:
    trial = Trial(seed=0, extra_encodes=0.0)
    found, expected = mean_gradient(trial, 1), exact_gradient(trial)
    assert relative_error(found[:6], expected[:6]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "arguments", "high"),
    [
        (2, {}, 0.17),
        (3, {}, 0.1),
        (2, {"tau": 1.0}, 0.075),
        (3, {"tau": 1.0}, 0.04),
        (2, {"extra_encodes": 4.0}, 0.046),
        (3, {"extra_encodes": 4.0}, 0.04),
    ],
)
def test_the_bias_of_the_gradient_falls_with_batch_and_draws(
    batch_size: int, arguments: dict[str, Any], high: float
) -> None:
    """The norm of the mean over all batches and draws less the exact one, over that of the exact
    one."""
    trial = Trial(seed=0, **arguments)
    error = relative_error(mean_gradient(trial, batch_size), exact_gradient(trial))
    assert 0.8 * high < error < high


def test_a_step_remembers_its_batch_and_its_draws() -> None:
    trial = Trial(seed=0, is_old=True)
    trial.criterion.train()
    _, plan = trial.step((1, 4), [0] * 6, 0.5)
    met = sorted({1, 4, *plan.items[0].tolist()} - {-1})
    assert len(met) == 3
    expected = trial.remembered.clone()
    expected[met] = trial.right.detach()[met]
    found, is_known = trial.criterion.memories[0].recall(torch.arange(6), like=expected)
    assert is_known.all()
    assert torch.equal(found, expected)


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
