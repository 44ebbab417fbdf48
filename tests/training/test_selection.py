"""Selection of batches while training continues: when it takes effect, from what, and exactly again after a kill."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.batching import OSGDBatches, RandomBatches, SpectralBatches, batch_losses
from dualenc.errors import DualencError
from dualenc.objectives import EMC2, NegativeCache
from dualenc.training.log import read_metrics
from dualenc.training.plan import BatchPlan, EmbeddingTable
from dualenc.training.selection import SelectionJob, select
from tests.training.fakes import TinyEncoder, same, weights
from tests.training.runs import run_and_die, train, train_and_die

CPU = torch.device("cpu")


def embeddings(num_pairs=24, seed=0):
    rows = np.random.default_rng(seed).normal(size=(2, num_pairs, 4)).astype(np.float32)
    left, right = rows / np.linalg.norm(rows, axis=2, keepdims=True)
    return left, right


class Instant(SelectionJob):
    """The job done on the spot, for tests of the order of things."""

    def _start(self):
        from dualenc.training.selection import main

        main(self.folder)


@pytest.fixture
def instant(monkeypatch):
    monkeypatch.setattr("dualenc.training.plan.SelectionJob", Instant)
    monkeypatch.setattr("os.nice", lambda by: 0)


def never():
    raise AssertionError("no fresh pass is wanted here")


def observe(plan, left, right, step):
    order = torch.from_numpy(np.random.default_rng(step).permutation(len(left)))
    for rows in order.split(6):
        plan.observe(rows, torch.from_numpy(left)[rows], torch.from_numpy(right)[rows], step)


def test_embeddings_of_an_epoch_rule_the_second_epoch_after_it(instant, tmp_path):
    selector = SpectralBatches(24, 6, seed=1)
    plan = BatchPlan(selector, 24, tmp_path)
    left, right = embeddings()
    assert plan.start_epoch(0, 0, never) == {}
    assert np.array_equal(plan.batches(0), selector.select(0))
    observe(plan, left, right, step=4)
    assert plan.start_epoch(1, 4, never) == {}
    assert np.array_equal(plan.batches(1), selector.select(1))
    report = plan.start_epoch(2, 8, never)
    expected = selector.select(2, left.astype(np.float16), right.astype(np.float16))
    assert np.array_equal(plan.batches(2), expected)
    assert report["staleness"] == 4
    found = batch_losses(*(e.astype(np.float16).astype(np.float32) for e in (left, right)), expected, 0.1).mean()
    assert report["loss"] == pytest.approx(found)
    assert report.keys() == {"loss", "random_loss", "seconds", "staleness"}


def test_waiting_uses_them_one_epoch_earlier(instant, tmp_path):
    selector = SpectralBatches(24, 6, seed=1)
    plan = BatchPlan(selector, 24, tmp_path, background=False)
    left, right = embeddings()
    plan.start_epoch(0, 0, never)
    observe(plan, left, right, step=4)
    plan.start_epoch(1, 4, never)
    expected = selector.select(1, left.astype(np.float16), right.astype(np.float16))
    assert np.array_equal(plan.batches(1), expected)


def test_a_fresh_pass_is_asked_for_at_every_epoch_but_the_last(instant, tmp_path):
    selector = SpectralBatches(24, 6, seed=1)
    plan = BatchPlan(selector, 24, tmp_path, embeddings="fresh")
    plan.start_epoch(0, 0, embeddings)
    report = plan.start_epoch(1, 4, embeddings)
    assert np.array_equal(plan.batches(1), selector.select(1, *embeddings()))
    assert report["staleness"] == 4
    plan.start_epoch(2, 8, never, last=True)
    assert np.array_equal(plan.batches(2), selector.select(2, *embeddings()))


def test_the_number_of_batches_is_known_beforehand(instant, tmp_path):
    plan = BatchPlan(OSGDBatches(24, 6, k=4, q=1), 24, tmp_path)
    assert [plan.num_batches(epoch) for epoch in range(4)] == [4, 4, 1, 1]
    assert BatchPlan(RandomBatches(24, 5), 24, tmp_path).num_batches(3) == 4


def test_a_finished_selection_survives_in_the_state(instant, tmp_path):
    first, second = (BatchPlan(SpectralBatches(24, 6, seed=1), 24, tmp_path) for _ in range(2))
    first.start_epoch(0, 0, never)
    observe(first, *embeddings(), step=4)
    first.start_epoch(1, 4, never)
    second.load_state_dict(first.state_dict())
    reports = [plan.start_epoch(2, 8, never) for plan in (first, second)]
    assert reports[0] == reports[1]
    assert np.array_equal(first.batches(2), second.batches(2))


def test_a_selector_without_embeddings_needs_no_table(tmp_path):
    plan = BatchPlan(RandomBatches(24, 6), 24, tmp_path)
    observe(plan, *embeddings(), step=1)
    assert plan.start_epoch(1, 4, never) == {}
    assert plan.state_dict() == {}


def test_the_table_holds_the_latest_row_of_each_pair():
    table = EmbeddingTable(5, seed=1)
    for step, rows in ((1, [0, 1, 2]), (2, [2, 3])):
        values = torch.full((len(rows), 3), float(step))
        table.add(torch.tensor(rows), values, -values, step)
    table.flush(CPU)
    assert table.left[:4, 0].tolist() == [1, 1, 2, 2]
    assert table.right[:4, 0].tolist() == [-1, -1, -2, -2]
    assert table.seen_at.tolist() == [1, 1, 2, 2, -1]
    assert np.linalg.norm(table.left[4].astype(np.float32)) == pytest.approx(1, abs=1e-3)


def test_hard_batches_are_reported_as_harder_than_random_ones():
    centres = np.repeat(np.eye(4, dtype=np.float32), 6, axis=0)
    batches, report = select(SpectralBatches(24, 6), 2, centres, centres, seed=0)
    assert sorted(batches.ravel().tolist()) == list(range(24))
    assert report["loss"] > report["random_loss"]


@pytest.mark.slow
def test_a_failing_selection_is_explained_in_one_line(tmp_path):
    left, right = embeddings()
    left[3] = np.nan
    job = SelectionJob(SpectralBatches(24, 6), 2, 0.0, tmp_path, embeddings=(left, right))
    with pytest.raises(DualencError, match=r"selecting batches for epoch 2 failed: .*row 3") as raised:
        job.result()
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def make_selector() -> SpectralBatches:
    return SpectralBatches(24, 6, seed=3)


def die_with_selection(output: Path, at_batch: int) -> None:
    train_and_die(output, at_batch, {"batching": make_selector()})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "whole"
    train(folder, batching=make_selector())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [4, 8])
def test_a_run_killed_before_or_while_batches_are_selected_ends_the_same(tmp_path, unbroken, killed_at):
    """4 batches per epoch: half the embeddings are in the checkpoint of step 2, the selection in that of step 6."""
    (tmp_path / "whole").symlink_to(unbroken)
    assert run_and_die(die_with_selection, tmp_path / "broken", killed_at) == -signal.SIGKILL
    train(tmp_path / "broken", batching=make_selector(), resume=True)
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    reports = [
        [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "selection/loss" in line]
        for name in ("whole", "broken")
    ]
    assert [[line["step"] for line in report] for report in reports] == [[8], [8]]
    assert reports[0][0]["selection/loss"] == reports[1][0]["selection/loss"]


class AskingBatches(RandomBatches):
    """Random batches that claim to need embeddings."""

    needs_embeddings = True


@pytest.mark.slow
def test_a_fresh_pass_leaves_the_training_as_it_is(instant, tmp_path):
    """The batches do not depend on it, so nothing may: not dropout, not BatchNorm's statistics."""
    for name, selector in (("asking", AskingBatches(24, 6)), ("random", RandomBatches(24, 6))):
        model = TinyEncoder(dropout=0.2, batchnorm=True)
        train(tmp_path / name, model=model, batching=selector, selection_embeddings="fresh")
    assert same(weights(tmp_path / "asking"), weights(tmp_path / "random"))


@pytest.mark.slow
def test_chains_refuse_selected_batches_before_the_folder_is_touched(tmp_path):
    """Their law assumes that any pairs may meet; proposals from the corpus do not depend on the batches."""
    selected, random = OSGDBatches(24, 6, seed=1), RandomBatches(24, 6, seed=1)
    with pytest.raises(DualencError, match=r"OSGDBatches chooses the batches.*proposals=64") as raised:
        train(tmp_path / "refused", objective=EMC2(num_left=24).double(), batching=selected)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "refused").exists()
    train(tmp_path / "drawn", objective=EMC2(num_left=24, proposals=6).double(), batching=selected, max_steps=2)
    train(tmp_path / "random", objective=EMC2(num_left=24).double(), batching=random, max_steps=2)
    train(tmp_path / "others", objective=NegativeCache(num_left=24).double(), batching=selected, max_steps=2)
