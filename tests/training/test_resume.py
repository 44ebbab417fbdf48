"""A run that is killed and resumed ends with the same weights, bit for bit."""

import logging
import shutil
import signal
from pathlib import Path

import pytest
import torch

from dualenc.batching import RandomBatches, SpectralBatches
from dualenc.data import Mixture
from dualenc.errors import DualencError
from dualenc.objectives import ISIR, GlobalCache, SogCLR
from dualenc.training import checkpoint
from dualenc.training.evaluators import Evaluator
from dualenc.training.log import read_metrics
from tests.helpers.every import CLASSES, make
from tests.helpers.fakes import (
    TinyEncoder,
    kill_this_process,
    same,
    static_encoder,
    text_pairs,
    tiny_objective,
    tiny_pairs,
    vector_encoder,
    vector_pairs,
    weights,
)
from tests.helpers.runs import FixedEvaluator, run_and_die, train, train_and_die


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder)
    return folder


def mixture(**options):
    pairs = Mixture({"many": tiny_pairs(24), "few": tiny_pairs(14, seed=1)}, **options)
    return {
        "pairs": pairs,
        "objective": SogCLR(num_left=pairs.num_left, num_right=pairs.num_right).double(),
    }


def vectors(folder):
    pairs = vector_pairs(folder)
    return {"model": vector_encoder(), "pairs": pairs, "objective": tiny_objective(pairs).float()}


def table(**settings):
    """Rows that are updated lazily, of sums over batches and chunks that are clipped."""
    pairs = text_pairs()
    objective = GlobalCache(num_left=pairs.num_left, num_right=pairs.num_right)
    settings = {"gradient_accumulation": 2, "chunk_size": 4, "max_gradient_norm": 0.1, **settings}
    return {"model": static_encoder(), "pairs": pairs, "objective": objective, **settings}


MINED = {"mine_every": 1, "mine_negatives": 2, "mine_relative": None}

# What is trained, at which batch it is killed, and the arguments of `train`, made anew for each
# part of the run.
CASES = {
    "first step": (1, lambda folder: {}),
    "before a checkpoint": (6, lambda folder: {}),
    "workers": (6, lambda folder: {"num_workers": 2}),
    "vectors": (7, vectors),
    "table": (8, lambda folder: table()),
    "accumulation": (8, lambda folder: {"gradient_accumulation": 3}),
    "chunks": (8, lambda folder: {"optimizer": "lars", "chunk_size": 2}),
    "bf16": (8, lambda folder: {"optimizer": "sgd", "mixed_precision": "bf16"}),
    "averages": (6, lambda folder: {"weight_average": 0.9, "freeze": ["*.bias"]}),
    "half the embeddings seen": (4, lambda folder: {"batching": SpectralBatches(24, 6, seed=3)}),
    "batches selected": (8, lambda folder: {"batching": SpectralBatches(24, 6, seed=3)}),
    "end of an epoch": (8, lambda folder: dict(MINED)),
    "after mining": (9, lambda folder: dict(MINED)),
    "mixture": (8, lambda folder: mixture()),
    "weighted": (8, lambda folder: mixture(weights={"few": 2.5, "many": 0.75})),
    "one source": (8, lambda folder: mixture(weights={"few": 2.0}, batches="one_source")),
    "ISIR in chunks": (8, lambda folder: {"objective": make(ISIR), "epochs": 2, "chunk_size": 4}),
}
for kind in CLASSES:
    CASES[kind.__name__] = (8, lambda folder, kind=kind: {"objective": make(kind), "epochs": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_killed_and_resumed_equals_unbroken(tmp_path, name):
    killed_at, changes = CASES[name]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = train(whole, **changes(tmp_path))
    assert run_and_die(train_and_die, broken, killed_at, changes(tmp_path)) == -signal.SIGKILL
    assert not (broken / "model").exists()
    assert (broken / ".lock").read_text().startswith("process "), (
        "the lock of a killed run is no obstacle"
    )
    assert train(broken, resume=True, **changes(tmp_path)).steps == result.steps
    assert same(weights(broken), weights(whole))
    for ours, theirs in zip(
        *(read_metrics(folder / "metrics.jsonl") for folder in (broken, whole)), strict=True
    ):
        assert ours["step"] == theirs["step"]
        for key in set(theirs) & {"loss", "learning_rate", "mined/mean_rank", "selection/loss"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12)


def die_while_writing(output: Path, at_save: int) -> None:
    """Be killed after half of a checkpoint's first file is written."""
    save, calls = checkpoint.save_tensors, 0

    def half_save(path, state):
        nonlocal calls
        calls += path.name == "state.pt"
        save(path, state)
        if calls == at_save and path.name == "state.pt":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            kill_this_process()

    checkpoint.save_tensors = half_save
    train(output)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_writing_leaves_the_checkpoint_before(tmp_path, unbroken):
    assert run_and_die(die_while_writing, tmp_path, 3) == -signal.SIGKILL
    names = sorted(
        path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".")
    )
    assert names == ["step-00000002", "step-00000004"]
    train(tmp_path, resume=True)
    assert same(weights(tmp_path), weights(unbroken))
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing_and_nothing_starts_from_the_beginning(
    tmp_path, unbroken
):
    for _ in range(2):
        assert train(tmp_path, resume=True).steps == 12
        assert same(weights(tmp_path), weights(unbroken))


@pytest.mark.parametrize("keep_best", [True, False])
def test_a_finished_run_whose_model_folder_is_gone_saves_the_last_weights(
    tmp_path, caplog, keep_best
):
    caplog.set_level(logging.INFO, "dualenc")
    settings = {"evaluate_every": 4, "save_every": 4, "keep_best": keep_best}
    train(tmp_path, evaluator=FixedEvaluator(0, 0.9, 0.1, 0.2), **settings)
    shutil.rmtree(tmp_path / "model")
    model = TinyEncoder(dropout=0.2)
    result = train(tmp_path, evaluator=FixedEvaluator(), resume=True, model=model, **settings)
    message = "model was removed, and with it the weights of the best step (4)"
    assert (message in caplog.text) is keep_best
    assert same(weights(tmp_path), dict(model.state_dict()))
    assert result.metrics == {"score": 0.2}


def changed(name):
    """The pairs of the other runs, but for the first two items or ids."""
    pairs = tiny_pairs()
    values = getattr(pairs, name)
    values[0], values[1] = values[1], values[0]
    return pairs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.03}, "trainer.learning_rate was 0.02 and is now 0.03"),
        ({"batch_size": 8}, "trainer.batch_size was 6 and is now 8"),
        ({"model": TinyEncoder(shared=True)}, r"model.weights was .* and is now"),
        (
            {"objective": tiny_objective(tiny_pairs(), seed=1)},
            r"objective\.seed was 0 and is now 1",
        ),
        ({"objective": make(SogCLR)}, r"objective was 'InfoNCE' and is now 'SogCLR'"),
        (
            {"pairs": changed("left_items")},
            r"other data: data.left_items was '\w+' and is now '\w+'",
        ),
        ({"pairs": changed("right_id")}, "other data: data.pairs was"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_in_one_line(unbroken, changes, message):
    with pytest.raises(DualencError, match=message) as raised:
        train(unbroken, resume=True, **changes)
    assert "\n" not in str(raised.value)


def test_frozen_weights_are_not_in_checkpoints_and_others_are_refused(tmp_path):
    model = TinyEncoder()
    train(tmp_path, model=model, freeze=("left.*",), max_steps=5)
    saved = torch.load(tmp_path / "checkpoints/step-00000005/state.pt", weights_only=True)["model"]
    assert set(saved) == {name for name in model.state_dict() if not name.startswith("left.")}
    other = TinyEncoder()
    with torch.no_grad():
        next(other.left.parameters()).neg_()
    with pytest.raises(DualencError, match=r"model.weights was .* and is now"):
        train(tmp_path, model=other, freeze=("left.*",), max_steps=5, resume=True)


def test_other_evaluations_are_no_other_run(tmp_path, unbroken):
    first = train(tmp_path, evaluator=FixedEvaluator(0, 1, 0.5), evaluate_every=3, patience=1)
    rest = train(
        tmp_path, evaluator=FixedEvaluator(0.5, 2), evaluate_every=4, patience=3, resume=True
    )
    assert (first.steps, rest.steps, rest.metrics) == (6, 12, {"score": 2})
    assert same(weights(tmp_path), weights(unbroken))


class OnCollection(FixedEvaluator, Evaluator):
    """One that says what its numbers are of."""

    def __init__(self, *scores, primary="score", data="large"):
        super().__init__(*scores, primary=primary)
        self.data = (data, "dev")

    def __call__(self, model):
        return {self.primary: super().__call__(model)["score"]}


@pytest.mark.parametrize("change", [{"primary": "other"}, {"data": "small"}])
def test_the_best_of_another_evaluator_is_found_anew(tmp_path, change):
    train(tmp_path, evaluator=OnCollection(0, 9, 8), evaluate_every=3, patience=1)
    rest = train(
        tmp_path, evaluator=OnCollection(2, 1, **change), evaluate_every=3, resume=True, patience=3
    )
    assert rest.metrics == {change.get("primary", "score"): 2}


class FailsOnce(FixedEvaluator):
    """Runs out of memory after training, the first time."""

    failed = False

    def __call__(self, model):
        if len(self.scores) == 1 and not FailsOnce.failed:
            FailsOnce.failed = True
            raise DualencError("out of memory")
        return super().__call__(model)


def test_a_failed_evaluation_at_the_end_loses_no_training(tmp_path):
    with pytest.raises(DualencError, match="out of memory"):
        train(tmp_path / "a", evaluator=FailsOnce(0.1, 0.5), save_every=100)
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000012"]
    result = train(tmp_path / "a", evaluator=FailsOnce(0.5), save_every=100, resume=True)
    train(tmp_path / "b", evaluator=FixedEvaluator(0.1, 0.5))
    assert result.metrics == {"score": 0.5}
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_other_batches_are_not_resumed(tmp_path):
    pairs = tiny_pairs()
    train(tmp_path, pairs=pairs, batching=RandomBatches(24, 6), max_steps=3)
    with pytest.raises(DualencError, match=r"batching\.seed was 0 and is now 7"):
        train(
            tmp_path, pairs=pairs, batching=RandomBatches(24, 6, seed=7), max_steps=3, resume=True
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"few": 3.0}}, "data.few.weight was '2' and is now '3'"),
        (
            {"weights": {"few": 2.0}, "batches": "one_source"},
            "data.batches was 'mixed' and is now 'one_source'",
        ),
    ],
)
def test_a_changed_mixture_is_not_resumed(tmp_path, options, message):
    train(tmp_path, max_steps=3, **mixture(weights={"few": 2.0}))
    with pytest.raises(DualencError, match=message):
        train(tmp_path, max_steps=3, resume=True, **mixture(**options))
