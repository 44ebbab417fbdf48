"""Batches: this rank's slice, the same whatever the number of workers; the seeds of
augmentation."""

import itertools

import numpy as np
import pytest
import torch

from dualenc import distributed
from dualenc.errors import BadSample
from dualenc.objectives import ISIR, InfoNCE
from dualenc.training.loader import BatchLoader, augmentation_seeds
from tests.helpers.fakes import NumbersPrepare, tiny_pairs
from tests.helpers.runs import train

CPU = torch.device("cpu")
PLAN = np.random.default_rng(0).permutation(24).reshape(4, 6)


def make_loader(pairs=None, augment=True, **arguments):
    prepare = NumbersPrepare() if augment else lambda items, _: NumbersPrepare()(items)
    return BatchLoader(pairs or tiny_pairs(), prepare, prepare, **arguments)


def all_equal(first, second):
    return all(
        torch.equal(a.left["rows"], b.left["rows"])
        and torch.equal(a.right["rows"], b.right["rows"])
        and torch.equal(a.indices, b.indices)
        for a, b in zip(first, second, strict=True)
    )


def test_a_batch_holds_the_planned_pairs_with_ids_and_prepared_inputs():
    pairs = tiny_pairs(left_id=np.arange(24) // 2, right_id=np.arange(24)[::-1].copy())
    batches = list(make_loader(pairs, augment=False).batches(PLAN))
    for row, batch in zip(PLAN, batches, strict=True):
        assert batch.indices.tolist() == row.tolist()
        assert batch.pairs.left_id.tolist() == pairs.left_id[row].tolist()
        assert batch.pairs.right_id.tolist() == pairs.right_id[row].tolist()
        expected = [[float(x) for x in pairs.item("left", i).split()] for i in pairs.left_id[row]]
        assert batch.left["rows"].tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_the_number_of_workers_and_the_first_batch_change_nothing(num_workers):
    alone = list(make_loader(seed=3).batches(PLAN, epoch=2))
    before = torch.get_rng_state()
    loader = make_loader(seed=3, num_workers=num_workers)
    assert all_equal(alone, list(loader.batches(PLAN, epoch=2)))
    assert all_equal(alone[3:], list(loader.batches(PLAN, epoch=2, start=3)))
    assert torch.equal(before, torch.get_rng_state()), "the global generators are left alone"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples_are_left_out_and_named_or_stop_the_run(num_workers):
    pairs = tiny_pairs(bad=(int(PLAN[1, 2]), *PLAN[2].tolist()))
    batches = list(make_loader(pairs, num_workers=num_workers).batches(PLAN))
    assert [len(batch.indices) for batch in batches] == [6, 5, 0, 6]
    assert (batches[2].left, batches[2].right) == ({}, {})
    ((index, reason),) = batches[1].bad
    assert index == PLAN[1, 2]
    assert "not readable" in reason
    with pytest.raises(BadSample, match=f"^pair {PLAN[1, 2]}: row .* not readable$"):
        list(make_loader(pairs, on_error="raise", num_workers=num_workers).batches(PLAN))


def test_augmentation_depends_on_seed_epoch_pair_and_side_alone():
    first = next(make_loader(seed=3).batches(PLAN, epoch=1))
    elsewhere = list(make_loader(seed=3).batches(PLAN[::-1].copy(), epoch=1))[-1]
    assert torch.equal(first.left["rows"], elsewhere.left["rows"])
    for other in (
        make_loader(seed=4).batches(PLAN, epoch=1),
        make_loader(seed=3).batches(PLAN, epoch=2),
    ):
        assert not torch.equal(first.left["rows"], next(other).left["rows"])
    seeds = set()
    for side, stream in itertools.product(("left", "right"), ("batch", "item")):
        seeds |= set(augmentation_seeds(3, 1, range(500), side, stream))
    assert len(seeds) == 2000
    torch.Generator().manual_seed(max(seeds))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_together_hold_the_global_batch(world, monkeypatch):
    whole = list(make_loader(seed=1).batches(PLAN))
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    parts = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(list(make_loader(seed=1).batches(PLAN)))
    for number, batch in enumerate(whole):
        assert torch.equal(
            torch.cat([part[number].left["rows"] for part in parts]), batch.left["rows"]
        )


def test_positives_are_listed_only_where_an_item_has_several():
    pairs = tiny_pairs(right_id=np.arange(24) // 2)
    batch = next(make_loader(pairs).batches(PLAN))
    assert batch.pairs.left_positives is None
    for right_id, listed in zip(
        batch.pairs.right_id.tolist(), batch.pairs.right_positives.tolist(), strict=True
    ):
        assert listed == [2 * right_id, 2 * right_id + 1]


def test_weights_and_mined_negatives_come_with_their_pairs():
    negatives = [[(i + 1 + k) % 24 for k in range(i % 3)] for i in range(24)]
    pairs = tiny_pairs(negatives=negatives, weights=np.arange(24) / 4, bad=(7,))
    for batch in make_loader(pairs, augment=False).batches(PLAN):
        indices = batch.indices.tolist()
        assert batch.pairs.weights.tolist() == [i / 4 for i in indices]
        assert batch.pairs.negative_id.tolist() == [n for pair in indices for n in negatives[pair]]
    plain = next(make_loader().batches(PLAN))
    assert plain.pairs.weights is plain.pairs.negative_id is None


def test_mined_negatives_are_augmented_by_the_seeds_after_those_of_their_pairs():
    pairs = tiny_pairs(negatives=[[(i + 1) % 24, (i + 2) % 24] for i in range(24)])
    batch = next(make_loader(pairs, seed=3).batches(PLAN))
    seeds = [
        seed + number for seed in augmentation_seeds(3, 0, PLAN[0], "right") for number in (1, 2)
    ]
    items = [pairs.item("right", item_id) for item_id in batch.pairs.negative_id.tolist()]
    assert torch.equal(batch.negatives["rows"], NumbersPrepare()(items, seeds)["rows"])


@pytest.mark.parametrize(("kind", "is_read"), [(InfoNCE, True), (ISIR, False)])
def test_negatives_that_an_objective_does_not_take_are_not_read(
    tmp_path, monkeypatch, kind, is_read
):
    batches = []
    build = BatchLoader.build
    monkeypatch.setattr(
        BatchLoader, "build", lambda *arguments: batches.append(build(*arguments)) or batches[-1]
    )
    pairs = tiny_pairs(12, negatives=[[(row + 1) % 12] for row in range(12)])
    objective = kind(num_left=12, num_right=12, temperature=0.2).double()
    train(tmp_path, pairs=pairs, objective=objective, max_steps=2, save_every=None)
    assert pairs.negatives is not None
    assert [batch.pairs.negative_id is not None for batch in batches] == [is_read] * 2
