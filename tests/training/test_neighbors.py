"""Objectives that want neighbours are told the nearest items by the model as it is at the start of every epoch."""

import signal

import numpy as np
import pytest
import torch

from dualenc.data.pairs import PairDataset
from dualenc.objectives import EMC2, InfoNCE
from dualenc.training import embedding_table as neighbors
from dualenc.training.embedding_table import tell_neighbors
from tests.training.fakes import kill_this_process, same, tiny_pairs, weights
from tests.training.runs import run_and_die, train


def shared_pairs():
    """Seven pairs of left items 0, 2 and 4 with right items 1, 3 and 5: the others are in no pair."""
    items = [f"{number} 0 0 0 0 0" for number in range(6)]
    return PairDataset(items, items, left_id=[0, 0, 2, 2, 4, 4, 4], right_id=[1, 3, 3, 5, 5, 1, 1])


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def emc2(num_left=24, **arguments):
    settings = {"proposals": 6, "neighbor_share": 0.5, "neighbors": 3, "temperature": 0.2, **arguments}
    return EMC2(num_left=num_left, **settings).double()


def test_neighbours_are_the_items_with_the_largest_cosine():
    pairs = shared_pairs()
    draw = np.random.default_rng(0)
    left_of, right_of = unit(draw.normal(size=(6, 4))), unit(draw.normal(size=(6, 4)))
    objective = emc2(num_left=6, num_right=6, neighbors=2)
    tell_neighbors(objective, pairs, lambda: (left_of[pairs.left_id], right_of[pairs.right_id]))
    for told, ours, theirs, paired, others in (
        (objective.left_neighbors.ids, left_of, right_of, [0, 2, 4], np.array([1, 3, 5])),
        (objective.right_neighbors.ids, right_of, left_of, [1, 3, 5], np.array([0, 2, 4])),
    ):
        for item in range(6):
            nearest = others[np.argsort(-theirs[others] @ ours[item])[:2]] if item in paired else [-1, -1]
            assert told[item].tolist() == list(nearest)


def test_missing_neighbours_are_padding():
    pairs = shared_pairs()
    objective = emc2(num_left=6, num_right=6, neighbors=5)
    rows = unit(np.random.default_rng(0).normal(size=(7, 4)))
    tell_neighbors(objective, pairs, lambda: (rows, rows))
    assert objective.left_neighbors.ids[0].sort().values.tolist() == [-1, -1, 1, 3, 5]


def test_an_index_with_lists_is_used_for_many_items(monkeypatch):
    monkeypatch.setattr(neighbors, "choose_factory", lambda count, dim: "IVF8,Flat")
    monkeypatch.setattr(neighbors, "training_rows", lambda index, count: count)
    pairs = tiny_pairs(400)
    rows = unit(np.random.default_rng(0).normal(size=(400, 8)))
    objective = emc2(num_left=400)
    tell_neighbors(objective, pairs, lambda: (rows, rows))
    exact = np.argsort(-rows @ rows.T, axis=1)[:, :3]
    assert (objective.left_neighbors.ids.numpy() == exact).mean() > 0.95, "all lists are probed"


def test_two_views_have_one_list():
    pairs = tiny_pairs()
    pairs.views = True
    objective = emc2(views=True)
    rows = unit(np.random.default_rng(0).normal(size=(24, 8)))
    tell_neighbors(objective, pairs, lambda: (rows, rows))
    assert objective.left_neighbors.ids.shape == (24, 3)
    assert len(objective.right_neighbors.ids) == 0


@pytest.mark.parametrize("objective", [InfoNCE(num_left=24), emc2(neighbor_share=0.0)], ids=["InfoNCE", "share of 0"])
def test_others_cost_no_pass(objective):
    tell_neighbors(objective, tiny_pairs(), lambda: pytest.fail("nobody asked for it"))


def test_the_trainer_tells_them_in_every_epoch(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(EMC2, "set_neighbors", lambda self, side, ids: told.append((side, ids.clone())))
    train(tmp_path, objective=emc2(), epochs=3)
    assert [side for side, _ in told] == ["left", "right"] * 3
    assert not torch.equal(told[0][1], told[4][1]), "the model has changed"


def test_killed_and_resumed_equals_unbroken(tmp_path):
    train(tmp_path / "whole", objective=emc2())

    def until_batch_eight(output):
        objective, calls = emc2(), []
        objective.register_forward_pre_hook(lambda *_: kill_this_process() if len(calls) == 7 else calls.append(1))
        train(output, objective=objective)

    assert run_and_die(until_batch_eight, tmp_path / "broken") == -signal.SIGKILL
    train(tmp_path / "broken", objective=emc2(), resume=True)
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
