"""GlobalCache: the formula with its draws, their law, what it costs, and that old memories bias nothing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives import ExactGlobal, GlobalCache, Objective
from dualenc.objectives.feature_cache import Attention, FeatureCache, Sample
from dualenc.objectives.global_cache import mean_shares
from tests.objectives.slow import Case, GuideTable, gradients, make_case
from tests.objectives.slow_chains import Corpus, Item, _anchors, _barred, _batch, _vector

NUM_ITEMS = 20
TAU = 0.2


class Slow:
    """The same as loops over single anchors and items; draws are those of the criterion under test."""

    def __init__(self, control: float, temperature: float, counts: dict[str, list[int]]) -> None:
        self.control, self.temperature, self.counts = control, temperature, counts
        self.memory: dict[Item, Tensor] = {}

    def direction(self, case: Case, corpus: Corpus, side: str, drawn: list[Item]) -> Tensor:
        """Mean loss, but for its value, of one direction; remembers what it has seen."""
        anchors, batch = _anchors(case, side), _batch(case, side)
        other = "views" if case.views else "right" if side == "left" else "left"
        count = self.counts[other]

        def mass(anchor: object, item: Item, vector: Tensor) -> float:
            """c_z·exp(s/τ), 0 for what is no negative."""
            if _barred(case, anchor, item):
                return 0.0
            return count[item.id] * math.exp(float(anchor.vector.detach() @ vector.detach()) / self.temperature)  # type: ignore[attr-defined]

        sides = ("left", "right") if case.views else (other,)
        remembered = {item: vector for item, vector in self.memory.items() if item.side in sides}
        sums = [sum(mass(anchor, item, vector) for item, vector in remembered.items()) for anchor in anchors]
        seeing = [(anchor, total) for anchor, total in zip(anchors, sums) if total > 0]
        of_batch, num_pairs = len(case.left_id), sum(count)

        def expected(item: Item) -> float:
            """How often a copy of the item was to be expected in this batch and among the draws."""
            vector = remembered.get(item)
            share = 0.0
            if vector is not None and seeing:
                share = sum(mass(a, item, vector) / total for a, total in seeing) / len(seeing)
            return (of_batch - 1) / (num_pairs - 1) + len(drawn) * share / count[item.id]

        column = {}
        for item, vector in batch:
            column.setdefault(item, vector)
        present = [*((item, vector) for item, vector in batch), *((z, column.get(z)) for z in drawn)]
        present = [(item, _vector(corpus, item) if vector is None else vector) for item, vector in present]
        losses = []
        for anchor, total in zip(anchors, sums):
            weights = [mass(anchor, item, vector) / count[item.id] / expected(item) for item, vector in present]
            pushed = torch.zeros((), dtype=torch.float64)
            for weight, (_, vector) in zip(weights, present):
                pushed = pushed + weight / max(sum(weights), 1e-300) * (anchor.vector @ vector)
            missed = torch.zeros(5, dtype=torch.float64)
            if total > 0:
                for item, vector in remembered.items():
                    missed += mass(anchor, item, vector) / total * vector
                old = [(item, remembered[item]) for item, _ in present if item in remembered]
                weights = [mass(anchor, item, vector) / count[item.id] / expected(item) for item, vector in old]
                for weight, (_, vector) in zip(weights, old):
                    missed -= weight / max(sum(weights), 1e-300) * vector
            losses.append((pushed + self.control * (anchor.vector @ missed) - anchor.positive) / self.temperature)
        for item, vector in reversed(present):
            self.memory[item] = vector.detach().clone()
        return torch.stack(losses).mean()


def run_with_draws(criterion: GlobalCache, case: Case, corpus: Corpus) -> tuple[Tensor, list[list[Item]]]:
    """Its loss, and what each direction drew."""
    drawn: list[list[Item]] = []
    original = FeatureCache.sample

    def spy(cache: FeatureCache, attention: Attention, num_draws: int, uniform: Tensor) -> Tensor:
        items = original(cache, attention, num_draws, uniform)
        side = "left" if cache is criterion.left_cache else "right"
        there = [i for i in items.tolist() if i >= 0]
        drawn.append([Item(("left", "right")[i % 2], i // 2) if case.views else Item(side, i) for i in there])
        return items

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureCache, "sample", spy)
        return criterion(**case.arguments(), encode=corpus.encode).loss, drawn


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(2, 6),
    views=st.booleans(),
    extra_encodes=st.sampled_from([0.0, 1.0, 3.0]),
    control=st.sampled_from([0.0, 0.5, 1.0]),
    counted=st.booleans(),
    guided=st.booleans(),
)
def test_gradient_is_that_of_the_formula(
    seed: int, size: int, views: bool, extra_encodes: float, control: float, counted: bool, guided: bool
) -> None:
    how = {"extra_encodes": extra_encodes, "control": control}
    criterion = GlobalCache(num_left=NUM_ITEMS, temperature=TAU, views=views, seed=seed, **how).double()
    draw = torch.Generator().manual_seed(seed)
    counts = {side: torch.ones(NUM_ITEMS, dtype=torch.long) for side in ("left", "right")}
    if counted and not views:
        # The same number of pairs on both sides.
        counts = {side: 1 + torch.randperm(NUM_ITEMS, generator=draw) % 3 for side in counts}
        criterion.set_counts(counts["left"], counts["right"])
    of_sides = {side: of.tolist() for side, of in [*counts.items(), ("views", counts["left"])]}
    slow = Slow(control, float(criterion.temperature), of_sides)
    guide = GuideTable.make(seed) if guided else None
    for step in range(4):
        # Another corpus in every step: what is remembered is old.
        case, corpus = make_case(seed * 4 + step, size, views, guide=guide), Corpus.make(seed * 4 + step)
        loss, drawn = run_with_draws(criterion, case, corpus)
        found = gradients(loss, case, corpus)
        sides = ["views"] if views else ["left", "right"]
        expected = [slow.direction(case, corpus, side, items) for side, items in zip(sides, drawn)]
        torch.testing.assert_close(found, gradients(torch.stack(expected).mean(), case, corpus))


def test_sums_over_batch_and_draws_are_unbiased_whatever_is_remembered() -> None:
    """With memories of another model, and one item that was never seen; up to what q knows of the batch, O(1/B)."""
    size, tau, num_batch, num_draws = 30, 0.3, 10, 5
    old, now = (Corpus.make(seed, size) for seed in (1, 2))
    cache = FeatureCache(size)
    cache.write(torch.arange(1, size), old.right[1:].detach())
    contributions = (now.left @ now.right.T / tau).detach().exp().fill_diagonal_(0)
    remembered, known = cache.recall(torch.arange(size), like=old.right)
    found: list[list[float]] = [[] for _ in range(size)]
    draw = torch.Generator().manual_seed(0)
    for _ in range(4000):
        ids = torch.randperm(size, generator=draw)[:num_batch]
        asking, barred = now.left[ids].detach() / tau, ids[:, None]
        seen = cache.attend(asking, barred)
        drawn = cache.sample(seen, num_draws, torch.rand(1, generator=draw, dtype=torch.float64))
        shares = mean_shares(asking, barred, seen.log_sum, torch.arange(size), remembered) * known
        number = torch.bincount(torch.cat([ids, drawn]), minlength=size)
        weights = number / ((num_batch - 1) / (size - 1) + num_draws * shares)
        for anchor, value in zip(ids.tolist(), (contributions[ids] @ weights).tolist()):
            found[anchor].append(value)
    ratios = torch.tensor([statistics.mean(values) for values in found]) / contributions.sum(dim=1)
    spreads = torch.tensor([statistics.stdev(of) / len(of) ** 0.5 for of in found]) / contributions.sum(dim=1)
    assert float(spreads.max()) < 0.02
    assert float((ratios - 1).abs().max()) < 0.02 + 4 * float(spreads.max())
    assert abs(float(ratios.mean()) - 1) < 0.02


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), num_draws=st.integers(0, 40), size=st.integers(1, 30))
def test_an_item_is_drawn_as_often_as_its_share_says_up_to_rounding(seed: int, num_draws: int, size: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    shares = torch.rand(size, generator=draw, dtype=torch.float64).pow(4)
    shares = shares / shares.sum()
    nothing = torch.zeros(0)
    attention = Attention(torch.arange(size), shares, nothing, nothing, nothing)
    drawn = FeatureCache(size).sample(attention, num_draws, torch.rand(1, generator=draw, dtype=torch.float64))
    assert len(drawn) == num_draws
    times = torch.bincount(drawn, minlength=size)
    assert bool((times >= (num_draws * shares - 1e-9).floor()).all())
    assert bool((times <= (num_draws * shares + 1e-9).ceil()).all())


def test_what_is_looked_at_is_the_softmax_over_the_filled_slots() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(300, 6, generator=draw, dtype=torch.float64), dim=1)
    anchors, barred = features[:7] / TAU, torch.tensor([[i, 200 + i, -1] for i in range(7)])
    counts = torch.randint(1, 4, (300,), generator=draw)
    cache, filled = FeatureCache(300), torch.arange(300) % 3 != 0
    cache.write(filled.nonzero()[:, 0], features[filled])
    for blocks in (None, [0, 3]):
        logits = anchors @ features.T + counts.log()
        logits[:, ~filled] = -torch.inf
        logits[torch.arange(7)[:, None], barred[:, :2]] = -torch.inf
        if blocks is not None:
            logits[:, 64:192] = logits[:, 256:] = -torch.inf
        sample = None if blocks is None else Sample(blocks, 1.0, torch.zeros(0, dtype=torch.long))
        softmax, attention = torch.softmax(logits, dim=1), cache.attend(anchors, barred, counts, sample)
        shares = torch.zeros(cache.num_blocks * cache.block_size, dtype=torch.float64)
        shares[attention.items] = attention.shares
        torch.testing.assert_close(shares[:300], softmax.mean(dim=0))
        torch.testing.assert_close(attention.mean, softmax @ features)
        torch.testing.assert_close(attention.log_sum, torch.logsumexp(logits, dim=1))
        number = torch.where(torch.isfinite(logits), counts.double(), 0.0).sum(dim=1)
        torch.testing.assert_close(attention.log_mean, attention.log_sum - number.log())


def test_runs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.nn.functional.normalize(torch.randn(500, 6, dtype=torch.float64), dim=1)
    cache, query = FeatureCache(500), (features[:9] / TAU, torch.arange(9)[:, None])
    cache.write(torch.arange(500), features)
    whole = cache.attend(*query)
    monkeypatch.setattr("dualenc.objectives.feature_cache.MAX_ELEMENTS", 2 * 9 * cache.block_size)
    for one, other in zip(whole, cache.attend(*query)):
        torch.testing.assert_close(one, other)
    items = torch.arange(100, 200)
    shares = mean_shares(*query, whole.log_sum, items, features[items])
    torch.testing.assert_close(shares, whole.shares[items])
    monkeypatch.setattr("dualenc.objectives.global_cache.MAX_ELEMENTS", 9 * 7)
    torch.testing.assert_close(mean_shares(*query, whole.log_sum, items, features[items]), shares)


@contextmanager
def one_direction(criterion: Objective) -> Iterator[None]:
    """Left anchors alone."""
    both = criterion._anchors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criterion, "_anchors", lambda *of: itertools.islice(both(*of), 1))
        yield


def run_frozen(**how: float) -> tuple[Tensor, Tensor, float]:
    """With embeddings that stay, of the last step: gradient into its anchors alone, the same of the oracle; and the
    items encoded per pair."""
    corpus = Corpus.make(0, 60)
    criterion = GlobalCache(num_left=60, temperature=TAU, **how).double()  # type: ignore[arg-type]
    for epoch in range(3):
        corpus.asked.clear()
        for ids in torch.randperm(60, generator=torch.Generator().manual_seed(epoch)).split(12):
            left, right = corpus.left[ids].detach(), corpus.right[ids].detach()
            # Into the left items of pairs whose right items have no gradient: as anchors, and as candidates of these.
            alone = left.requires_grad_(), right
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    criterion, "_anchors", lambda *of: itertools.islice(Objective._anchors(criterion, *of), 1)
                )
                found = torch.autograd.grad(criterion(*alone, ids, encode=corpus.encode).loss, left)[0]
    oracle = ExactGlobal(num_left=60, temperature=TAU).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "_anchors", lambda *of: itertools.islice(Objective._anchors(oracle, *of), 1))
        exact = torch.autograd.grad(oracle(*alone, ids, encode=Corpus.make(0, 60).encode).loss, left)[0]
    return found, exact, len(corpus.asked) / 60


def test_full_control_is_exact_for_anchors_whose_embeddings_stay() -> None:
    found, exact, _ = run_frozen(control=1.0)
    torch.testing.assert_close(found, exact)
    found, exact, _ = run_frozen(control=0.0)
    assert float((found - exact).norm()) > 0.05 * float(exact.norm())


@pytest.mark.parametrize("extra_encodes", [0.0, 0.5, 1.0, 2.0])
def test_no_more_is_encoded_than_told(extra_encodes: float) -> None:
    *_, asked = run_frozen(extra_encodes=extra_encodes)
    # Of one direction.
    assert asked <= extra_encodes / 2
    assert (asked > extra_encodes / 4) or not extra_encodes


def test_a_pool_is_all_that_a_step_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1000
    corpus = Corpus.make(0, size)
    criterion = GlobalCache(num_left=size, temperature=TAU, pool=100).double()
    criterion.left_cache.write(torch.arange(size), corpus.left.detach())
    criterion.right_cache.write(torch.arange(size), corpus.right.detach())
    looked_at = []
    original = FeatureCache.attend

    def spy(cache: FeatureCache, *query: object) -> Attention:
        found = original(cache, *query)  # type: ignore[arg-type]
        looked_at.append(found.items)
        return found

    monkeypatch.setattr(FeatureCache, "attend", spy)
    for _ in range(40):
        ids = torch.arange(4)
        criterion(corpus.left[ids], corpus.right[ids], ids, encode=corpus.encode)
    # And what anchors keep, at most eight each, and those near their partners.
    assert all(len(items) == 128 + 4 * (8 + 5 * 5) and int(items[-128:].min()) >= 0 for items in looked_at)
    # Other blocks in every step.
    assert len(torch.cat([items[-128:] for items in looked_at[::2]]).unique()) >= size


def test_what_lies_outside_a_pool_may_be_nearer_than_all_inside_it() -> None:
    """At small τ by more than any float32 can tell; the item counts as expected at most once per draw."""
    draw = torch.Generator().manual_seed(0)
    far, near = torch.eye(4)[0], torch.eye(4)[1]
    shares = mean_shares(
        near[None] / 0.005, torch.tensor([[-1]]), torch.zeros(1), torch.arange(2), torch.stack([far, near])
    )
    assert shares.tolist() == [1.0, 1.0]
    corpus = Corpus.make(0, 1000)
    criterion = GlobalCache(num_left=1000, temperature=0.005, pool=64)
    for _ in range(5):
        ids = torch.randperm(1000, generator=draw)[:8]
        left, right = (table[ids].detach().float().requires_grad_() for table in (corpus.left, corpus.right))
        loss = criterion(left, right, ids, encode=lambda side, ids: corpus.encode(side, ids).float()).loss
        assert all(bool(torch.isfinite(of).all()) for of in (loss, *torch.autograd.grad(loss, [left, right])))


def test_bad_arguments_are_told() -> None:
    for given_, told in (
        ({"extra_encodes": -1}, "extra_encodes is"),
        ({"control": 2}, "control is"),
        ({"pool": 0}, "pool"),
    ):
        with pytest.raises(DualencError, match=told):
            GlobalCache(num_left=5, **given_)
