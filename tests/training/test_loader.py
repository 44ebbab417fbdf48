"""Batches: this rank's slice, the same whatever the number of workers, startable anywhere."""

import numpy as np
import pytest
import torch

from dualenc import distributed
from dualenc.errors import BadSample
from dualenc.training.loader import BatchLoader, augmentation_seeds, derive_seed
from tests.training.fakes import NumbersPrepare, tiny_pairs

PLAN = np.random.default_rng(0).permutation(24).reshape(4, 6)


def make_loader(pairs=None, **arguments):
    return BatchLoader(pairs or tiny_pairs(), NumbersPrepare(), NumbersPrepare(), **arguments)


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
        assert batch.left_id.tolist() == pairs.left_id[row].tolist()
        assert batch.right_id.tolist() == pairs.right_id[row].tolist()
        expected = [[float(x) for x in pairs.item("left", i).split()] for i in pairs.left_id[row]]
        assert batch.left["rows"].tolist() == expected


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_number_of_workers_changes_nothing(num_workers):
    alone = list(make_loader(seed=3).batches(PLAN, epoch=2))
    shared = list(make_loader(seed=3, num_workers=num_workers).batches(PLAN, epoch=2))
    assert all_equal(alone, shared)


def test_starting_later_gives_the_rest():
    loader = make_loader(seed=3)
    assert all_equal(list(loader.batches(PLAN, epoch=1))[3:], list(loader.batches(PLAN, epoch=1, start=3)))


def test_augmentation_depends_on_seed_epoch_pair_and_side_alone():
    first = next(make_loader(seed=3).batches(PLAN, epoch=1))
    elsewhere = list(make_loader(seed=3).batches(PLAN[::-1].copy(), epoch=1))[-1]
    assert torch.equal(first.left["rows"], elsewhere.left["rows"])
    for other in (make_loader(seed=4).batches(PLAN, epoch=1), make_loader(seed=3).batches(PLAN, epoch=2)):
        assert not torch.equal(first.left["rows"], next(other).left["rows"])
    left, right = (augmentation_seeds(3, 1, range(100), side) for side in ("left", "right"))
    assert len({*left, *right}) == 200


def test_streams_of_seeds_differ():
    assert derive_seed("batch", 1, 2, 3) != derive_seed("item", 1, 2, 3)


def test_evaluation_is_without_augmentation():
    loader = make_loader(seed=3).for_evaluation()
    first, again = (next(loader.batches(PLAN, epoch=epoch)) for epoch in (0, 1))
    assert torch.equal(first.left["rows"], again.left["rows"])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_together_hold_the_global_batch(world, monkeypatch):
    whole = list(make_loader(seed=1).batches(PLAN))
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    parts = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(list(make_loader(seed=1).batches(PLAN)))
    for number, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[number].left["rows"] for part in parts]), batch.left["rows"])


def test_bad_samples_are_left_out_and_named():
    pairs = tiny_pairs(bad=(int(PLAN[1, 2]),))
    for num_workers in (0, 1):
        batches = list(make_loader(pairs, num_workers=num_workers).batches(PLAN))
        assert [batch.size for batch in batches] == [6, 5, 6, 6]
        assert [index for index, _ in batches[1].bad] == [PLAN[1, 2]]
        assert "not readable" in batches[1].bad[0][1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples_stop_the_run_if_wanted_in_one_line(num_workers):
    loader = make_loader(tiny_pairs(bad=(int(PLAN[0, 0]),)), on_error="raise", num_workers=num_workers)
    with pytest.raises(BadSample, match=f"pair {PLAN[0, 0]}: row .* not readable") as raised:
        list(loader.batches(PLAN))
    assert "\n" not in str(raised.value)


def test_a_batch_of_bad_samples_only_is_empty():
    pairs = tiny_pairs(bad=tuple(PLAN[2].tolist()))
    batch = list(make_loader(pairs).batches(PLAN))[2]
    assert (batch.size, batch.left, batch.right) == (0, {}, {})


def test_positives_are_listed_only_where_an_item_has_several():
    pairs = tiny_pairs(right_id=np.arange(24) // 2)
    batch = next(make_loader(pairs).batches(PLAN))
    assert batch.left_positives is None
    for right_id, listed in zip(batch.right_id.tolist(), batch.right_positives.tolist(), strict=True):
        assert listed == [2 * right_id, 2 * right_id + 1]


def test_mined_negatives_come_with_the_batch():
    negatives = [[(i + 1) % 24, (i + 2) % 24][: i % 3] for i in range(24)]
    batch = next(make_loader(tiny_pairs(negatives=negatives), augment=False).batches(PLAN))
    expected = [n for i in PLAN[0] for n in negatives[i]]
    assert batch.negative_id.tolist() == expected
    assert batch.negatives["rows"].shape == (len(expected), 6)


def test_making_batches_leaves_the_global_generators_alone():
    before = torch.get_rng_state()
    list(make_loader(num_workers=1).batches(PLAN))
    assert torch.equal(before, torch.get_rng_state())
