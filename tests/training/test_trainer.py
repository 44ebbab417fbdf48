"""The trainer: equal runs, accumulation, evaluation, precision, what it logs, saves and refuses."""

from __future__ import annotations

import logging
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from dualenc.batching import RandomBatches, SpectralBatches
from dualenc.data import ImageViews, Mixture
from dualenc.errors import DualencError
from dualenc.objectives import (
    EMC2,
    ISIR,
    GlobalCache,
    InfoNCE,
    Matryoshka,
    NegativeCache,
    SogCLR,
    base,
)
from dualenc.training import trainer as trainer_module
from dualenc.training.devices import deterministic_algorithms, place_model, start_accelerator
from dualenc.training.loader import BatchLoader
from dualenc.training.log import read_metrics
from dualenc.training.settings import TrainerSettings
from dualenc.training.trainer import Trainer
from tests.helpers.fakes import (
    TinyEncoder,
    same,
    tiny_objective,
    tiny_pairs,
    vector_encoder,
    vector_pairs,
    weights,
)
from tests.helpers.runs import FixedEvaluator, run_and_die, train, train_and_die


@pytest.mark.slow
def test_same_seed_same_run(tmp_path):
    for name, changes in {"a": {}, "b": {"num_workers": 2}, "c": {"seed": 1}}.items():
        train(tmp_path / name, **changes)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


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
    """Three batches of a group, the second group cut short: against a loop with torch's own
    optimizer."""
    pairs, batches, model = tiny_pairs(), np.arange(24).reshape(4, 6), TinyEncoder()
    settings = {
        "optimizer": "sgd",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "warmup": 0,
        "schedule": "constant",
    }
    settings |= {
        "epochs": 1,
        "gradient_accumulation": 3,
        "max_gradient_norm": None,
        "on_error": "raise",
    }
    trained = tiny_objective(pairs)
    train(tmp_path, model=model, objective=trained, batching=Given(batches), **settings, **changes)
    expected, objective = TinyEncoder(), tiny_objective(pairs)
    optimizer = torch.optim.SGD([*expected.parameters(), *objective.parameters()], lr=0.02)
    loaded = list(
        BatchLoader(pairs, expected.left.prepare, expected.right.prepare).batches(batches)
    )
    for group in (loaded[:3], loaded[3:]):
        optimizer.zero_grad()
        for batch in group:
            left, right = expected("left", batch.left), expected("right", batch.right)
            (
                objective(left, right, batch.pairs.left_id, batch.pairs.right_id).loss / len(group)
            ).backward()
        optimizer.step()
    for ours, theirs in zip(
        [*model.parameters(), *trained.parameters()], optimizer.param_groups[0]["params"]
    ):
        assert torch.allclose(ours, theirs, rtol=1e-10)


@pytest.mark.parametrize("is_fast", [True, False])
def test_auto_is_bf16_where_it_is_fast_and_runs_of_different_precision_may_follow(
    tmp_path, monkeypatch, is_fast
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": is_fast})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_fast)
    for precision, expected in (
        ("no", "no"),
        ("auto", "bf16" if is_fast else "no"),
        ("bf16", "bf16"),
        ("no", "no"),
    ):
        settings = TrainerSettings(output=tmp_path, mixed_precision=precision)
        accelerator = start_accelerator(settings, tmp_path)
        assert accelerator.mixed_precision == expected
        with accelerator.autocast():
            product = torch.ones(2, 2, device=accelerator.device) @ torch.ones(
                2, 2, device=accelerator.device
            )
        assert product.dtype == (torch.bfloat16 if expected == "bf16" else torch.float32)


def test_the_scaler_of_float16_leaves_gradients_as_they_are_and_skips_a_step_that_overflows(
    tmp_path, monkeypatch
):
    """Powers of two scale exactly; a gradient that is not finite changes no weight."""
    scales = iter([2.0**10, math.inf])

    def with_scaler(settings: TrainerSettings, folder: Path) -> Accelerator:
        accelerator = start_accelerator(settings, folder)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=next(scales))
        return accelerator

    train(tmp_path / "plain")
    monkeypatch.setattr(trainer_module, "start_accelerator", with_scaler)
    train(tmp_path / "scaled")
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "scaled"))
    model = TinyEncoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(tmp_path / "overflow", model=model)
    assert same(before, model.state_dict())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it works")
def test_float16_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(DualencError, match="mixed_precision=fp16 needs a CUDA GPU"):
        train(tmp_path, mixed_precision="fp16")


def test_placing_keeps_the_weights_on_one_process():
    model = TinyEncoder(batchnorm=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert same(before, place_model(model, torch.device("cpu")).state_dict())


def test_batchnorm_in_chunks_is_refused_unless_it_is_frozen(tmp_path):
    """Also where one chunk holds the batch, or a chunk of one item is left over."""
    message = r"^chunk_size does not work with BatchNorm \(left.layers.1 and 1 more\)"
    for chunk_size in (1, 7, 64):
        with pytest.raises(DualencError, match=message):
            train(tmp_path, model=TinyEncoder(batchnorm=True), chunk_size=chunk_size)
    assert not (tmp_path / "metrics.jsonl").exists()
    runs = {}
    for name, chunk_size in (("plain", None), ("cached", 7)):
        parts = {"model": TinyEncoder(batchnorm=True), "objective": NegativeCache(num_left=24)}
        parts["objective"].double()
        settings = {"freeze": ("*.layers.1.*",), "chunk_size": chunk_size, "batch_size": 8}
        train(tmp_path / name, **parts, **settings)
        runs[name] = weights(tmp_path / name)
    for name, weight in runs["plain"].items():
        torch.testing.assert_close(runs["cached"][name], weight, rtol=1e-9, atol=1e-12)


def test_a_batch_of_one_item_is_too_small_for_batchnorm(tmp_path):
    with pytest.raises(DualencError, match="BatchNorm needs more than one value per channel"):
        train(tmp_path, model=TinyEncoder(batchnorm=True), batch_size=1)


@pytest.mark.nightly
def test_compiled_towers_train_to_the_same_weights(tmp_path):
    pairs, runs = vector_pairs(tmp_path), {}
    for compiled in (False, True):
        torch._dynamo.reset()
        model, objective = vector_encoder(), tiny_objective(pairs).float()
        train(
            tmp_path / str(compiled),
            model=model,
            pairs=pairs,
            objective=objective,
            compile=compiled,
        )
        assert (model.left._compiled_call_impl is not None) == compiled
        runs[compiled] = weights(tmp_path / str(compiled))
    assert runs[True].keys() == runs[False].keys(), "compiling changes no name"
    assert all(
        torch.allclose(runs[True][name], runs[False][name], atol=1e-5) for name in runs[True]
    )


@pytest.mark.slow
def test_evaluating_does_not_change_the_training(tmp_path):
    train(tmp_path / "without")
    train(tmp_path / "with", evaluator=FixedEvaluator(), evaluate_every=2, keep_best=False)
    assert same(weights(tmp_path / "without"), weights(tmp_path / "with"))


def test_the_best_weights_are_kept_and_the_card_tells_their_metrics(tmp_path):
    """Evaluations before training and at steps 4, 8 and 12; the best trained ones are those of step
    8."""
    evaluator = FixedEvaluator(0.9, 0.1, 0.5, 0.3)
    evaluator.data = ("mine", "dev")
    result = train(tmp_path / "best", evaluator=evaluator, evaluate_every=4)
    assert (result.before, result.metrics) == ({"score": 0.9}, {"score": 0.5})
    card = (tmp_path / "best" / "model" / "README.md").read_text()
    for line in (
        "| score | 0.9000 | 0.5000 |",
        "InfoNCE, 8 steps with batches of 6.",
        "rate: 0.02",
        "mine, dev",
    ):
        assert line in card
    train(tmp_path / "last", evaluator=FixedEvaluator(), keep_best=False)
    assert not same(weights(tmp_path / "best"), weights(tmp_path / "last"))


def test_it_stops_when_nothing_gets_better_and_stays_stopped(tmp_path):
    scores = (0.1, 0.5, 0.4, 0.6, 0.3, 0.2, 0.9, 0.9, 0.9)
    settings = {"evaluate_every": 1, "patience": 2}
    result = train(tmp_path, evaluator=FixedEvaluator(*scores), **settings)
    again = train(tmp_path, evaluator=FixedEvaluator(0.99), resume=True, **settings)
    assert result.steps == again.steps == 5
    assert result.metrics == again.metrics == {"score": 0.6}
    evaluated = [
        line["step"]
        for line in read_metrics(tmp_path / "metrics.jsonl")
        if "evaluation/score" in line
    ]
    assert evaluated == [0, 1, 2, 3, 4, 5]


def test_a_number_is_better_than_nan_and_nan_is_no_improvement(tmp_path):
    evaluator = FixedEvaluator(0, math.nan, 0.1, math.nan)
    assert train(tmp_path, evaluator=evaluator, evaluate_every=4).metrics == {"score": 0.1}


def test_the_log_tells_loss_rate_and_objective_metrics_and_trackers_get_them(tmp_path, monkeypatch):
    computed, compute, tracked = [], base.batch_metrics, []
    monkeypatch.setattr(base, "batch_metrics", lambda *given: computed.append(1) or compute(*given))
    monkeypatch.setattr(
        Accelerator, "log", lambda _, values, step: tracked.append({"step": step, **values})
    )
    train(tmp_path, evaluator=FixedEvaluator(0.1, 0.2), keep_best=False)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[0] == {"step": 0, "evaluation/score": 0.1}
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12]
    expected = {
        "loss",
        "learning_rate",
        "epoch",
        "samples_per_second",
        "accuracy",
        "temperature",
        "gradient_norm",
    }
    assert expected < lines[1].keys()
    assert lines[-1] == {"step": 12, "evaluation/score": 0.2}
    assert len(computed) == 4, "metrics are computed for the steps that are logged"
    assert tracked == lines


def test_a_loss_that_the_objective_does_not_know_is_not_logged(tmp_path):
    result = train(tmp_path, objective=ISIR(num_left=24, recent=5).eval(), max_steps=5, epochs=None)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(result.loss)
    assert not any("loss" in line for line in lines)
    assert [line["step"] for line in lines if "batch_estimate" in line] == [3, 5]


def test_a_missing_value_in_memory_is_a_bad_sample(tmp_path):
    pairs = tiny_pairs()
    pairs.left_items = [*pairs.left_items[:7], float("nan"), *pairs.left_items[8:]]
    assert train(tmp_path, pairs=pairs).skipped == 1
    objective = ISIR(num_left=24, recent=5)
    pairs.left_items[9] = None
    assert train(tmp_path / "by_id", pairs=pairs, objective=objective).skipped == 2
    with pytest.raises(DualencError, match="pair 7: left is nan, but a"):
        train(tmp_path / "strict", pairs=pairs, on_error="raise")


def test_weights_are_frozen_for_one_training(tmp_path):
    model = TinyEncoder(shared=False)
    train(tmp_path, model=model, freeze="left.*")
    assert all(weight.requires_grad for weight in model.parameters())


def test_an_evaluator_without_a_primary_metric_is_refused(tmp_path):
    with pytest.raises(DualencError, match="evaluator: `primary` is missing"):
        train(tmp_path, evaluator=lambda model: {"accuracy": 1.0})
    assert not list(tmp_path.iterdir())


def test_a_folder_below_home(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert TrainerSettings(output="~/runs").output == "/somewhere/runs"


def test_bad_samples_are_counted(tmp_path):
    pairs = tiny_pairs(bad=(3, 5))
    pairs.skipped = 4  # by the reader of their file
    assert train(tmp_path, pairs=pairs).skipped == 6
    assert "6 bad samples were left out" in (tmp_path / "model" / "README.md").read_text()
    with pytest.raises(DualencError, match="pair 3: row 3: not readable"):
        train(tmp_path / "strict", pairs=tiny_pairs(bad=(3,)), on_error="raise")


@pytest.mark.parametrize(
    "changes", [{}, {"max_steps": 2}, {"evaluate_every": 1, "patience": 1}], ids=str
)
def test_a_training_in_which_no_pair_can_be_read_is_refused(tmp_path, changes):
    with pytest.raises(
        DualencError, match=r"no pair could be read; the first: pair (\d+): row \1: not"
    ):
        train(
            tmp_path, pairs=tiny_pairs(bad=tuple(range(24))), evaluator=FixedEvaluator(), **changes
        )
    assert "patience" in changes or not (tmp_path / "model").exists()


class ExplodesAt(InfoNCE):
    """Multiplies the loss by NaN at one call."""

    calls, at = 0, 7

    def forward(self, *arguments, **named):
        out = super().forward(*arguments, **named)
        self.calls += 1
        return replace(out, loss=out.loss * float("nan")) if self.calls == self.at else out


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(tmp_path):
    with pytest.raises(DualencError, match=r"step 7: the loss is not finite; .*now 0.02"):
        train(tmp_path, objective=ExplodesAt(num_left=24).double())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "changes",
    [
        *({name: 0} for name in ("batch_size", "epochs", "patience", "mine_negatives")),
        {"mine_every": 0},
        *({"max_gradient_norm": norm} for norm in (0.0, math.nan)),
        *({"timeout_minutes": minutes} for minutes in (0, -1, math.inf, math.nan)),
        *({"weight_average": decay} for decay in (0.0, 1.0)),
        *({"learning_rate": rate} for rate in (0.0, -1.0, math.nan)),
        *({"weight_decay": decay} for decay in (-1.0, math.inf)),
        *({"momentum": momentum} for momentum in (-1.0, 1.0, math.nan)),
        *({"warmup": warmup} for warmup in (-1, -0.5, 1.5, math.nan, math.inf)),
        {"seed": -1},
        {"num_workers": -1},
        {"held_out": 1},
        {"on_error": "stop"},
        {"mine_relative": -1.0},
        {"seed": 2**65},
        {"optimizer": "adamv"},
        {"schedule": "cosin"},
        {"patience": 2, "evaluate_every": None},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named_in_one_line(changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(DualencError, match=rf"^{name} .*") as raised:
        Trainer(**{"output": "run", "epochs": 3, "evaluate_every": 1, **changes})
    assert name == "patience" or repr(value) in str(raised.value)
    assert "\n" not in str(raised.value)


class Declared(FixedEvaluator):
    """Says that it measures images on the left, and must not be asked to."""

    modalities: ClassVar[dict[str, str]] = {"left": "image"}

    def __call__(self, model):
        raise AssertionError("an evaluation before the modalities were checked")


def views() -> Any:
    pairs = tiny_pairs()
    pairs.views, pairs.right_items = True, pairs.left_items
    return pairs


WEIGHED = Mixture({"many": tiny_pairs(24), "few": tiny_pairs(14, seed=1)}, weights={"few": 2.0})
SIZES = {"num_left": 38, "num_right": 38}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 25},
            "batch_size 25 exceeds num_pairs 24; choose a batch_size of at most 24",
        ),
        ({"batching": RandomBatches(24, 8)}, "batches of 8 of 24 pairs, but batch_size is 6"),
        ({"batching": RandomBatches(30, 6)}, "batches of 6 of 30 pairs"),
        ({"batching": RandomBatches(24, 6), "held_out": 0.1}, "batching is for all pairs"),
        (
            {"pairs": Mixture({"a": tiny_pairs(), "b": tiny_pairs()}), "held_out": 0.1},
            "held_out does not apply to a mixture",
        ),
        ({"mixed_precision": "half"}, "mixed_precision is 'half'; .*'bf16'"),
        ({"tracker": "tensorbord"}, "tracker 'tensorbord'"),
        ({"freeze": ["left.*", "right.nothing*"]}, r"'right\.nothing\*' matches no weight"),
        ({"freeze": ["*"], "objective": InfoNCE(num_left=24)}, "nothing to train"),
        ({"patience": 2, "evaluate_every": 1}, "the evaluator is missing"),
        (
            {"evaluator": FixedEvaluator(primary="scor")},
            r"evaluator.primary is 'scor' \(did you mean score\?\)",
        ),
        ({"evaluator": Declared()}, "the left side of the evaluator is image"),
        ({"pairs": tiny_pairs(right_modality="image")}, "the right side of the pairs is image"),
        (
            {"objective": EMC2(num_left=24), "batching": SpectralBatches(24, 6)},
            r"SpectralBatches .*proposals=64",
        ),
        (
            {"pairs": WEIGHED, "objective": ISIR(**SIZES)},
            "MixtureBatches chooses the batches, but ISIR .*proposals=64",
        ),
        (
            {"pairs": WEIGHED, "objective": GlobalCache(**SIZES)},
            "GlobalCache with these settings assumes random ones",
        ),
        (
            {"pairs": WEIGHED, "batching": SpectralBatches(38, 6)},
            "SpectralBatches ignores them",
        ),
        ({"mine_every": 3}, "mine_every is 3, and training ends before"),
        ({"mine_every": 1, "epochs": 1}, "mine_every is 1, and training ends before"),
        (
            {"mine_every": 1, "epochs": 9, "max_steps": 4},
            "mine_every is 1, and training ends before",
        ),
        (
            {"mine_every": 2, "epochs": None, "max_steps": 8},
            "mine_every is 2, and training ends before",
        ),
        (
            {"mine_every": 1, "pairs": views(), "objective": SogCLR(num_left=24, views=True)},
            "two views of images",
        ),
        ({"mine_every": 1, "objective": ISIR(num_left=24)}, "ISIR takes none"),
        (
            {"pairs": views(), "objective": SogCLR(num_left=24)},
            "SogCLR compares left .*; give it views=True",
        ),
        (
            {"pairs": views(), "objective": Matryoshka(InfoNCE(), [5])},
            "data is two views of each image",
        ),
        (
            {"mine_every": 1, "pairs": Mixture({"one": tiny_pairs()}, batches="one_source")},
            "one_source keeps apart",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_any_work(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(DualencError, match=message) as raised:
        train(tmp_path / "run", **changes)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("epochs", "max_steps"), [(3, 18), (1, 18), (3, 7)])
def test_max_steps_overrides_epochs(tmp_path: Path, caplog, epochs: int, max_steps: int):
    """The schedule ends with the last step."""
    caplog.set_level(logging.INFO, "dualenc")
    trained = train(tmp_path / "alone", epochs=None, max_steps=max_steps)
    assert train(tmp_path / "both", epochs=epochs, max_steps=max_steps).steps == max_steps
    assert f"max_steps={max_steps} overrides epochs={epochs}" in caplog.messages
    assert trained.steps == max_steps
    assert same(weights(tmp_path / "alone"), weights(tmp_path / "both"))
    lines = read_metrics(tmp_path / "both" / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert 0 < rates[-1] < rates[0] / 10


@pytest.mark.slow
def test_a_run_resumes_beyond_its_epochs(tmp_path: Path):
    settings = {"epochs": 1, "max_steps": 12}
    assert run_and_die(train_and_die, tmp_path / "killed", 9, settings) == -signal.SIGKILL
    assert train(tmp_path / "killed", resume=True, **settings).steps == 12
    train(tmp_path / "whole", **settings)
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("progress", [True, False])
def test_lines_are_always_logged_and_printed_only_with_progress(
    tmp_path: Path, capfd, caplog, progress: bool
):
    line = "max_steps=2 overrides epochs=1"
    caplog.set_level(logging.INFO, "dualenc")
    train(tmp_path, epochs=1, max_steps=2, progress=progress)
    assert caplog.messages.count(line) == 1
    printed = capfd.readouterr()
    assert printed.err.splitlines().count(line) == progress
    assert printed.out == ""
    assert progress or printed.err == ""


def test_a_handler_of_the_training_logger_replaces_the_printing(tmp_path: Path, capsys):
    logger = logging.getLogger("dualenc.training")
    logger.addHandler(handler := logging.NullHandler())
    try:
        train(tmp_path, epochs=1, max_steps=2, progress=True)
    finally:
        logger.removeHandler(handler)
    assert "overrides" not in capsys.readouterr().err


def test_mined_negatives_that_an_objective_does_not_take_are_told(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO, "dualenc")
    pairs = tiny_pairs(negatives=[[(i + 3) % 24] for i in range(24)])
    for objective, expected in ((ISIR(num_left=24), True), (InfoNCE(num_left=24), False)):
        train(tmp_path / objective.name, pairs=pairs, objective=objective.double(), epochs=1)
        said = f"{objective.name} takes no mined negatives: those of the data are left out"
        assert (said in caplog.messages) == expected


@pytest.mark.slow
def test_held_out_pairs_are_evaluated_and_not_trained_on(tmp_path):
    pairs = tiny_pairs(left_id=np.arange(24) // 2)
    result = train(tmp_path, pairs=pairs, held_out=0.25, batch_size=4, epochs=2)
    assert 0 < result.metrics["ndcg@10"] <= 1
    assert result.before
    trainer = Trainer(output=tmp_path, held_out=0.25)
    rest, evaluator = trainer.hold_out(pairs, None, is_recipe=False)
    held_out = {f"left-{left_id}" for left_id in set(range(12)) - set(rest.left_id.tolist())}
    assert set(evaluator.collection.queries.ids) == held_out
    assert (len(rest), len(held_out)) == (18, 3)


def test_recipes_hold_a_tenth_out_of_a_hundred_pairs_or_more():
    trainer = Trainer(output="run")
    for pairs, is_recipe, expected in (
        (tiny_pairs(120), True, 108),
        (tiny_pairs(120), False, 120),
        (tiny_pairs(99), True, 99),
        (ImageViews([None] * 120), True, 108),
    ):
        rest, evaluator = trainer.hold_out(pairs, None, is_recipe)
        assert len(rest) == expected
        assert (evaluator is None) == (len(rest) == len(pairs))


def test_deterministic_algorithms_hold_for_the_training_alone() -> None:
    with deterministic_algorithms(True, torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_a_model_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Unsavable(TinyEncoder):
        def write(self, folder: Path) -> None:
            raise ValueError("a setting that the library refuses")

    evaluator = FixedEvaluator()
    evaluator.scores = [1.0]
    with pytest.raises(
        DualencError,
        match=r"the model cannot be saved \(a setting that the library refuses\); corr",
    ):
        train(tmp_path / "run", model=Unsavable(), evaluator=evaluator)
    assert evaluator.scores == [1.0]
    assert not (tmp_path / "run").exists()
