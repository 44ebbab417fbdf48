"""Selection of batches between two epochs: from which embeddings, and what of it is restored."""

import numpy as np
import pytest
import torch

from dualenc.batching import RandomBatches, SpectralBatches, batch_losses
from dualenc.errors import DualencError
from dualenc.training.plan import BatchPlan


def embeddings(num_pairs=24, seed=0):
    rows = np.random.default_rng(seed).normal(size=(2, num_pairs, 4)).astype(np.float32)
    left, right = rows / np.linalg.norm(rows, axis=2, keepdims=True)
    return left, right


def observe(plan, left, right, step):
    order = torch.from_numpy(np.random.default_rng(step).permutation(len(left)))
    for rows in order.split(6):
        plan.observe(rows, torch.from_numpy(left)[rows], torch.from_numpy(right)[rows], step)


def test_embeddings_of_an_epoch_select_the_next_ones_batches():
    selector = SpectralBatches(24, 6, seed=1)
    plan = BatchPlan(selector, 24)
    left, right = embeddings()
    assert plan.start_epoch(0) == {}
    assert plan.selected is None
    observe(plan, left, right, step=4)
    report = plan.start_epoch(1)
    expected = selector.select(1, left.astype(np.float16), right.astype(np.float16))
    assert np.array_equal(plan.selected, expected)
    losses = batch_losses(
        *(side.astype(np.float16).astype(np.float32) for side in (left, right)), expected, 0.1
    )
    assert report["loss"] == pytest.approx(losses.mean())
    assert report["loss"] > report["random_loss"]
    assert report.keys() == {"loss", "random_loss", "seconds"}
    restored = BatchPlan(selector, 24)
    restored.load_state_dict(plan.state_dict())
    assert np.array_equal(restored.selected, expected)
    assert restored.start_epoch(2)["loss"] == plan.start_epoch(2)["loss"]


class FirstBatch(SpectralBatches):
    """Of the selected batches the first alone: the other pairs are left out of the epoch."""

    num_batches = 1

    def select(self, epoch, left=None, right=None):
        return super().select(epoch, left, right)[: None if left is None else 1]


def test_the_number_of_batches_is_known_beforehand():
    plan = BatchPlan(FirstBatch(24, 6), 24)
    assert plan.num_steps(epochs=3) == 4 + 1 + 1
    assert plan.num_steps(epochs=3, gradient_accumulation=3) == 2 + 1 + 1
    random = BatchPlan(RandomBatches(24, 5), 24)
    assert random.num_steps(epochs=3) == 12
    observe(random, *embeddings(), step=1)
    assert random.start_epoch(1) == random.state_dict() == {}, (
        "without embeddings there is no table"
    )


def test_the_table_holds_the_latest_row_of_each_pair():
    plan = BatchPlan(SpectralBatches(5, 2), 5, seed=1)
    for step, rows in ((1, [0, 1, 2]), (2, [2, 3])):
        values = torch.full((len(rows), 3), float(step))
        plan.observe(torch.tensor(rows), values, -values, step)
    plan.state_dict()
    assert plan.left[:4, 0].tolist() == [1, 1, 2, 2]
    assert plan.right[:4, 0].tolist() == [-1, -1, -2, -2]
    assert np.linalg.norm(plan.left[4].astype(np.float32)) == pytest.approx(1, abs=1e-3)


def test_a_failing_selection_names_its_epoch():
    left, right = embeddings()
    left[3] = np.nan
    plan = BatchPlan(SpectralBatches(24, 6), 24)
    observe(plan, left, right, step=4)
    with pytest.raises(DualencError, match=r"epoch 2 failed: .*row 3"):
        plan.start_epoch(2)
