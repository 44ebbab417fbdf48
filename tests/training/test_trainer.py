"""The trainer: equal runs, accumulation, evaluation, what it writes and refuses; precision and where weights go."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from dualenc.batching import RandomBatches
from dualenc.errors import DualencError
from dualenc.objectives import ISIR, InfoNCE, SogCLR, base
from dualenc.training.devices import place_model, start_accelerator
from dualenc.training.log import read_metrics
from dualenc.training.trainer import Trainer
from tests.training.fakes import (
    TinyEncoder,
    kill_this_process,
    same,
    tiny_objective,
    tiny_pairs,
    vector_encoder,
    vector_pairs,
    weights,
)
from tests.training.runs import FixedEvaluator, train


@pytest.mark.slow
def test_same_seed_same_run(tmp_path):
    for name, changes in {"a": {}, "b": {"num_workers": 2}, "c": {"seed": 1}}.items():
        train(tmp_path / name, **changes)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.slow
def test_training_lowers_the_loss_and_learns_the_temperature(tmp_path):
    objective = tiny_objective(tiny_pairs())
    result = train(tmp_path, epochs=30, objective=objective, save_every=None)
    assert result.steps == 120
    assert result.loss < 0.5 * read_metrics(tmp_path / "metrics.jsonl")[0]["loss"]
    assert objective.temperature < 0.19


class Given:
    """Batches written down beforehand."""

    needs_embeddings = False

    def __init__(self, batches):
        self.batches, self.num_batches = batches, len(batches)
        self.num_pairs, self.batch_size = batches.size, batches.shape[1]

    def select(self, epoch, left=None, right=None):
        return self.batches


@pytest.mark.parametrize("changes", [{}, {"chunk_size": 4}])
def test_accumulated_batches_make_one_step_with_their_mean_gradient(tmp_path, changes):
    """Three batches of a group, the third group cut short: against a loop with torch's own optimizer."""
    pairs, batches = tiny_pairs(), np.arange(24).reshape(4, 6)
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "warmup": 0, "schedule": "constant"}
    model = TinyEncoder()
    train(
        tmp_path,
        model=model,
        batching=Given(batches),
        epochs=1,
        gradient_accumulation=3,
        max_gradient_norm=None,
        on_error="raise",
        **settings,
        **changes,
    )
    expected, objective = TinyEncoder(), tiny_objective(pairs)
    optimizer = torch.optim.SGD([*expected.parameters(), *objective.parameters()], lr=0.02)
    from dualenc.training.loader import BatchLoader

    loaded = list(BatchLoader(pairs, expected.left.prepare, expected.right.prepare).batches(batches))
    for group in (loaded[:3], loaded[3:]):
        optimizer.zero_grad()
        for batch in group:
            left, right = expected("left", batch.left), expected("right", batch.right)
            (objective(left, right, batch.left_id, batch.right_id).loss / len(group)).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10)


@pytest.mark.slow
def test_gradient_caching_trains_the_same_model(tmp_path):
    for name, chunk_size in (("plain", None), ("cached", 4)):
        train(tmp_path / name, model=TinyEncoder(), chunk_size=chunk_size)
    plain, cached = weights(tmp_path / "plain"), weights(tmp_path / "cached")
    assert all(torch.allclose(plain[k], cached[k], rtol=1e-9) for k in plain)


@pytest.mark.slow
def test_mixed_precision_stays_close(tmp_path):
    losses = {}
    for precision in ("no", "bf16"):
        pairs = tiny_pairs()
        objective = InfoNCE(num_left=pairs.num_left)
        model = TinyEncoder(dtype=torch.float32)
        losses[precision] = train(tmp_path / precision, model=model, objective=objective, mixed_precision=precision)
    assert losses["bf16"].loss == pytest.approx(losses["no"].loss, rel=0.05)
    assert losses["bf16"].loss != losses["no"].loss


@pytest.mark.slow
def test_max_steps_ends_in_the_middle_of_an_epoch(tmp_path):
    assert train(tmp_path, max_steps=5).steps == 5
    assert train(tmp_path / "longer", max_steps=5, epochs=None).steps == 5


@pytest.mark.slow
def test_evaluating_does_not_change_the_training(tmp_path):
    train(tmp_path / "without")
    train(tmp_path / "with", evaluator=FixedEvaluator(), evaluate_every=2, keep_best=False)
    assert same(weights(tmp_path / "without"), weights(tmp_path / "with"))


@pytest.mark.slow
def test_the_best_weights_are_kept(tmp_path):
    """Evaluations before training and at steps 4, 8 and 12; the best trained ones are those of step 8."""
    result = train(tmp_path / "best", evaluator=FixedEvaluator(0.9, 0.1, 0.5, 0.3), evaluate_every=4)
    assert (result.before, result.metrics) == ({"score": 0.9}, {"score": 0.5})
    card = (tmp_path / "best" / "model" / "README.md").read_text()
    assert "| metric | untrained | trained |" in card
    assert "| score | 0.9000 | 0.5000 |" in card
    assert "InfoNCE, 8 steps with batches of 6." in card
    assert "learning_rate: 0.02" in card
    train(tmp_path / "last", evaluator=FixedEvaluator(), keep_best=False)
    assert not same(weights(tmp_path / "best"), weights(tmp_path / "last"))


def test_the_log_tells_loss_rate_and_objective_metrics(tmp_path):
    train(tmp_path, evaluator=FixedEvaluator(0.1, 0.2), keep_best=False)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[0] == {"step": 0, "evaluation/score": 0.1}
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12]
    expected = {"loss", "learning_rate", "epoch", "samples_per_second", "accuracy", "temperature", "gradient_norm"}
    assert expected < lines[1].keys()
    assert lines[-1] == {"step": 12, "evaluation/score": 0.2}


def test_a_loss_that_the_objective_does_not_know_is_not_logged(tmp_path):
    result = train(tmp_path, objective=ISIR(num_left=24, recent=5))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(result.loss)
    assert not any("loss" in line for line in lines)
    assert [line["step"] for line in lines if "batch_estimate" in line] == [3, 6, 9, 12]


def test_an_objective_is_trained_whatever_mode_it_came_in(tmp_path):
    objective = SogCLR(num_left=24).double().eval()
    train(tmp_path, objective=objective)
    assert objective.training
    assert torch.isfinite(objective.log_u).all()


def test_metrics_are_computed_for_the_steps_that_are_logged(tmp_path, monkeypatch):
    computed, compute = [], base.batch_metrics
    monkeypatch.setattr(base, "batch_metrics", lambda *given: computed.append(1) or compute(*given))
    train(tmp_path, log_every=5)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "accuracy" in line] == [5, 10, 12]
    assert len(computed) == 3


@pytest.mark.slow
def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, tracker="tensorboard", project="mine")
    events = EventAccumulator(str(tmp_path / "trackers" / "mine"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    written = {line["step"]: line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")}
    assert logged == pytest.approx(written, rel=1e-6)


def test_bad_samples_are_counted(tmp_path):
    result = train(tmp_path, pairs=tiny_pairs(bad=(3, 5)))
    assert result.skipped == 2
    with pytest.raises(DualencError, match="pair 3: row 3: not readable"):
        train(tmp_path / "strict", pairs=tiny_pairs(bad=(3,)), on_error="raise")


class ExplodesAt(InfoNCE):
    """Multiplies the loss by NaN at one call."""

    calls, at = 0, 7

    def forward(self, *arguments, **named):
        out = super().forward(*arguments, **named)
        self.calls += 1
        return out._replace(loss=out.loss * float("nan")) if self.calls == self.at else out


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(tmp_path):
    objective = ExplodesAt(num_left=24).double()
    with pytest.raises(
        DualencError, match=r"step 7: the loss is not finite; lower learning_rate \(now 0.02\)"
    ) as raised:
        train(tmp_path, objective=objective)
    assert "step-00000006" in str(raised.value)
    assert "\n" not in str(raised.value)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000004", "step-00000006"]
    assert not (tmp_path / "model").exists()


def test_a_run_is_not_overwritten_by_accident(tmp_path):
    train(tmp_path, max_steps=1)
    with pytest.raises(DualencError, match=r"holds a run already .*--resume"):
        train(tmp_path, max_steps=1)
    train(tmp_path, max_steps=2, overwrite=True)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 25}, "batch_size is 25 but there are 24 pairs"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm is 0.0; it must be above 0; null leaves it out"),
        ({"max_gradient_norm": float("nan")}, "max_gradient_norm is nan; it must be above 0"),
        ({"seed": -1}, "seed is -1"),
        ({"momentum": -1.0}, "momentum is -1.0"),
        ({"betas": (2.0, 3.0)}, "betas are"),
        ({"warmup": -0.1}, "warmup is -0.1"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"mixed_precision": "fp16"}, "fp16 does not work on cpu; use bf16 or no"),
        ({"mixed_precision": "half"}, "mixed_precision=half"),
        ({"tracker": "tensorbord"}, "tracker 'tensorbord' is not installed or unknown"),
        ({"on_error": "stop"}, "on_error is 'stop'"),
    ],
)
def test_mistakes_are_explained_in_one_line(tmp_path, changes, message):
    if torch.cuda.is_available() and "fp16" in changes.values():
        pytest.skip("this machine has a GPU, where fp16 works")
    with pytest.raises(DualencError, match=message) as raised:
        train(tmp_path, **changes)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "checkpoints").exists()


def test_batching_and_trainer_must_agree(tmp_path):
    with pytest.raises(DualencError, match="batches of 8 of 24 pairs, but batch_size is 6"):
        train(tmp_path, batching=RandomBatches(24, 8))
    with pytest.raises(DualencError, match="batches of 6 of 30 pairs"):
        train(tmp_path, batching=RandomBatches(30, 6))


class Declared(FixedEvaluator):
    """Says what it measures, and must not be asked to."""

    metric_names = ("score", "other")
    modalities: ClassVar[dict[str, str]] = {"left": "text"}

    def __call__(self, model):
        raise AssertionError("an evaluation before the names were checked")


def test_a_wrong_metric_is_refused_before_any_work(tmp_path):
    evaluator = Declared()
    evaluator.primary = "othr"
    with pytest.raises(
        DualencError, match=r"evaluator.primary is 'othr' \(did you mean other\?\); choose one of score"
    ):
        train(tmp_path / "run", evaluator=evaluator)
    assert not (tmp_path / "run").exists()


def test_model_data_and_evaluator_must_be_of_one_modality(tmp_path):
    message = "the right side of the pairs is image, but that of the model encodes text; choose a model for image"
    with pytest.raises(DualencError, match=message):
        train(tmp_path / "run", pairs=tiny_pairs(right_modality="image"))
    evaluator = Declared()
    evaluator.modalities = {"left": "image"}
    with pytest.raises(DualencError, match="the left side of the evaluator is image, but that of the model"):
        train(tmp_path / "run", evaluator=evaluator)
    assert not (tmp_path / "run").exists()


class Deadly(list):
    """Items one of which kills the worker that reads it, as the system does when memory is used up."""

    def __getitem__(self, index):
        if index == 20 and torch.utils.data.get_worker_info() is not None:
            kill_this_process()
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_killed_data_worker_is_explained_in_one_line(tmp_path):
    pairs = tiny_pairs()
    pairs.left_items = Deadly(pairs.left_items)
    message = (
        r"a data worker was killed \(process \d+ .*\), mostly for want of memory; lower trainer.num_workers \(now 1\)"
    )
    with pytest.raises(DualencError, match=message) as raised:
        train(tmp_path, pairs=pairs, num_workers=1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("minutes", [0, -1, float("inf"), float("nan")])
def test_the_time_limit_of_processes_must_be_a_time(tmp_path, minutes):
    with pytest.raises(DualencError, match=r"timeout_minutes is .*; it must be more than 0"):
        train(tmp_path, timeout_minutes=minutes)


def test_batchnorm_with_chunks_warns_in_one_line(tmp_path):
    with pytest.warns(UserWarning, match="BatchNorm with chunk_size takes its statistics over 4 items"):
        train(tmp_path, model=TinyEncoder(batchnorm=True), chunk_size=4, max_steps=1)


def test_five_lines_are_enough(tmp_path):
    pairs = tiny_pairs()
    result = Trainer(output=tmp_path, batch_size=8, progress=False).fit(
        TinyEncoder(dtype=torch.float32), pairs, InfoNCE(num_left=len(pairs))
    )
    assert result.steps == 3
    assert (result.model_folder / "weights.pt").exists()


@pytest.mark.parametrize("is_fast", [True, False])
def test_auto_is_bf16_where_it_is_fast(tmp_path, monkeypatch, is_fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": is_fast})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_fast)
    assert start_accelerator("auto", [], tmp_path).mixed_precision == ("bf16" if is_fast else "no")


def test_runs_of_different_precision_may_follow_one_another(tmp_path):
    for precision in ("no", "bf16", "no"):
        accelerator = start_accelerator(precision, [], tmp_path)
        assert AcceleratorState().mixed_precision == precision
        with accelerator.autocast():
            product = torch.ones(2, 2, device=accelerator.device) @ torch.ones(2, 2, device=accelerator.device)
        assert product.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(DualencError, match="tracker 'wanndb' is not installed or unknown"):
        start_accelerator("no", ["wanndb"], tmp_path)


def test_placing_keeps_the_weights_on_one_process():
    model = TinyEncoder(batchnorm=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    placed = place_model(model, torch.device("cpu"), chunk_size=None)
    assert all(torch.equal(before[name], tensor) for name, tensor in placed.state_dict().items())


@pytest.mark.nightly
def test_compiled_towers_train_to_the_same_weights(tmp_path):
    pairs = vector_pairs(tmp_path)
    runs = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        model, objective = vector_encoder(), tiny_objective(pairs).float()
        train(tmp_path / str(compiled), model=model, pairs=pairs, objective=objective, compile=compiled)
        assert (model.left._compiled_call_impl is not None) == compiled
        runs[compiled] = weights(tmp_path / str(compiled))
    assert runs[True].keys() == runs[False].keys(), "compiling changes no name"
    assert all(torch.allclose(runs[True][name], runs[False][name], atol=1e-5) for name in runs[True])
