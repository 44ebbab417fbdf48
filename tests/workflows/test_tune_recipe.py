"""Tuning a recipe on small vectors, by a clock that only steps move on."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import dualenc
from dualenc.cli import main
from dualenc.errors import DualencError
from dualenc.evaluation.image_text_retrieval import both_ways_recall, recall_of_queries
from dualenc.objectives import Objective
from dualenc.recipe.resolve import read_recipe
from dualenc.training import Trainer
from dualenc.workflows import tune_recipe, tuning_trial
from dualenc.workflows.tune_recipe import TuneResult, tune
from dualenc.workflows.tuning_report import Tried, judge, tuning_table
from dualenc.workflows.tuning_space import (
    BATCH,
    OBJECTIVE,
    RATE,
    TEMPERATURE,
    Choice,
    Range,
    check_space,
    default_space,
    parse_space,
    with_values,
)
from dualenc.workflows.tuning_trial import Bench
from tests.helpers.fakes import kill_this_process
from tests.helpers.in_process import failure, run
from tests.helpers.runs import run_and_die

STEP = {"InfoNCE": 0.01, "SogCLR": 0.02, "GlobalCache": 0.01}
SPACE = [f"{RATE}=1e-3..1e-1", f"{TEMPERATURE}=0.05,0.2"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that pass by the call of an objective, as many as its name says."""
    yield from ticking(monkeypatch)


def ticking(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    passed = [0.0]
    forward = Objective.forward

    def counted(self: Objective, *args: Any, **named: Any) -> Any:
        passed[0] += STEP[type(self).__name__]
        return forward(self, *args, **named)

    monkeypatch.setattr(Objective, "forward", counted)
    watch = SimpleNamespace(perf_counter=lambda: passed[0])
    for module in (tune_recipe, tuning_trial):
        monkeypatch.setattr(module, "time", watch)
    yield passed


def recipe_in(folder: Path, *, noise: bool = False, **trainer: Any) -> Path:
    """Pairs of vectors, the right one the left one rotated; or of two unrelated vectors."""
    draw = np.random.default_rng(0)
    left = draw.normal(size=(300, 8)).astype(np.float32)
    turned = left @ np.linalg.qr(draw.normal(size=(8, 8)))[0]
    right = draw.normal(size=(300, 8)) if noise else turned + 0.1 * draw.normal(size=(300, 8))
    folder.mkdir(exist_ok=True)
    np.save(folder / "left.npy", left)
    np.save(folder / "right.npy", right.astype(np.float32))
    settings = {
        "model": {"class_path": "VectorEncoder", "init_args": {"tower": "mlp", "shared": False}},
        "data": {
            "class_path": "VectorPairs",
            "init_args": {name: str(folder / f"{name}.npy") for name in ("left", "right")},
        },
        "objective": {"class_path": "InfoNCE", "init_args": {"temperature": 0.1}},
        "trainer": {
            "output": str(folder / "run"),
            "batch_size": 32,
            "learning_rate": 0.01,
            "held_out": 0.4,
            "progress": False,
            **trainer,
        },
    }
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def searched(folder: Path, **changes: Any) -> TuneResult:
    named: dict[str, Any] = {"minutes": 0.1, "trials": 8, "space": SPACE, "progress": False}
    return tune(folder / "mine.yaml", **{**named, **changes})


def test_a_space_is_ranges_and_choices(tmp_path: Path) -> None:
    recipe = read_recipe(recipe_in(tmp_path))
    space = parse_space(
        [f"{RATE}=1e-5..5e-4", f"{BATCH}=16..64", f"{TEMPERATURE}=0.02, 0.05", "objective=DCL"],
        recipe,
    )
    assert space[RATE] == Range(1e-5, 5e-4)
    assert space[BATCH] == Range(16, 64)
    # The recipe's own value is always one of the choices.
    assert space[TEMPERATURE] == Choice((0.1, 0.02, 0.05))
    assert space[OBJECTIVE] == Choice(("InfoNCE", "DCL"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("trainer.learning_rate", "is not a setting with values"),
        ("trainer.learning_rate=", "is not a setting with values"),
        ("trainer.learning_rate=0..1", "is not a range 0 < low..high"),
        ("trainer.learning_rate=1e-3..1e-4", "is not a range 0 < low..high"),
        ("trainer.learning_rate=a..b", "is not a range 0 < low..high"),
        ("trainer.learning_rat=1e-3..1e-2", "learning_rat is not a key of Trainer"),
        ("trainer.batch_size=big,32", "batch_size is 'big'"),
        ("data.path=pairs.csv", "all trials have the same data; write it before --set"),
        ("objective=SogCRL", "did you mean SogCLR"),
        ("objective.gamma=0.1,0.5", "gamma is not a key of InfoNCE"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str, message: str
) -> None:
    file = recipe_in(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert message in failure(capsys, "tune", file, "--set", entry)
    assert sorted(tmp_path.iterdir()) == before


MODELS: dict[str, tuple[dict[str, Any], Range]] = {
    "published": (
        {"class_path": "TextEncoder", "init_args": {"name": "all-MiniLM"}},
        Range(1e-5, 5e-4),
    ),
    "lora": (
        {"class_path": "TextEncoder", "init_args": {"name": "all-MiniLM", "lora_rank": 8}},
        Range(1e-4, 5e-3),
    ),
    "scratch": (
        {"class_path": "TextEncoder", "init_args": {"config": {}, "tokenizer": "t"}},
        Range(2e-4, 1e-2),
    ),
    "static": ({"class_path": "StaticEncoder", "init_args": {"words": "w"}}, Range(2e-3, 1e-1)),
    "vectors": ({"class_path": "VectorEncoder"}, Range(2e-4, 2e-2)),
    "images": ({"class_path": "ImageEncoder", "init_args": {"backbone": "r"}}, Range(1e-3, 1e-1)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_default_space_follows_the_kind_of_model_and_fits(tmp_path: Path, kind: str) -> None:
    file = recipe_in(tmp_path)
    settings = yaml.safe_load(file.read_text())
    settings["model"], expected = MODELS[kind]
    file.write_text(yaml.safe_dump(settings))
    recipe = read_recipe(file)
    space = default_space(recipe)
    check_space(recipe, space)
    found = space[RATE]
    assert isinstance(found, Range)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert "InfoNCE" in space[OBJECTIVE]


def test_values_become_a_recipe_with_the_temperature_carried_over(tmp_path: Path) -> None:
    recipe = read_recipe(recipe_in(tmp_path))
    other = with_values(recipe, {OBJECTIVE: "SogCLR+", RATE: 0.5}).settings
    given = other["objective"]["init_args"]
    assert other["objective"]["class_path"] == "dualenc.objectives.SogCLR"
    assert (given["positive_in_softmax"], given["gamma"], given["temperature"]) == (True, 0.5, 0.1)
    assert other["trainer"]["learning_rate"] == 0.5
    chosen = with_values(recipe, {TEMPERATURE: 0.3, OBJECTIVE: "SogCLR"}).settings["objective"]
    assert (chosen["init_args"]["temperature"], chosen["init_args"]["gamma"]) == (0.3, 0.9)
    # Nothing changed is the recipe.
    assert with_values(recipe, {OBJECTIVE: "InfoNCE", RATE: 0.01}).settings == recipe.settings


@pytest.mark.slow
def test_an_absurd_rate_is_found_out_and_best_yaml_trains(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_in(tmp_path, learning_rate=1e-9)
    words = ["tune", tmp_path / "mine.yaml", "--minutes", 0.2, "--trials", 8, "--set", *SPACE]
    run(*words)
    shown = capsys.readouterr().out
    assert "take trial" in shown
    assert f"dualenc train {tmp_path}/run-tuned/best.yaml" in shown
    assert max(map(len, shown[shown.index(" trial") :].split("take")[0].splitlines())) <= 80
    found = json.loads((tmp_path / "run-tuned" / "metrics.json").read_text())
    assert found["trials"][0][RATE] == 1e-9
    assert found["gain"][1] > 0
    # By the clock of steps, all of a trial is steps, and all of the minutes are trials.
    assert 0.9 * 12 <= clock[0] <= 1.1 * 12
    best = read_recipe(tmp_path / "run-tuned" / "best.yaml").settings
    own = read_recipe(tmp_path / "mine.yaml").settings
    assert best["trainer"]["learning_rate"] == found["trials"][found["take"]][RATE]
    assert best["trainer"] == own["trainer"] | {
        "learning_rate": best["trainer"]["learning_rate"],
    }
    run("train", tmp_path / "run-tuned" / "best.yaml")
    assert (tmp_path / "run" / "model").is_dir()
    assert "svg" in (tmp_path / "run-tuned" / "report.html").read_text()


@pytest.mark.parametrize(
    ("share", "least", "expected"),
    [(0.1, 0, 30), (0.1, 60, 60), (0.1, 600, 90), (0.4, 60, 120), (None, 60, 60)],
)
def test_a_tuning_holds_out_more_than_a_training(
    tmp_path: Path, share: float | None, least: int, expected: int
) -> None:
    parts = read_recipe(recipe_in(tmp_path, held_out=share)).build()
    rest, _ = parts["trainer"].hold_out(parts["data"], None, True, least=least)
    assert len(parts["data"]) - len(rest) == expected


def test_a_trial_leaves_no_model_in_memory(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[Any]] = []
    fit = Trainer.fit

    def watched(self: Trainer, model: Any, *args: Any, **named: Any) -> Any:
        models.append(weakref.ref(model))
        return fit(self, model, *args, **named)

    monkeypatch.setattr(Trainer, "fit", watched)
    recipe = read_recipe(recipe_in(tmp_path))
    bench = Bench.of(recipe, 1.0, tmp_path / "trial")
    bench.run(recipe, 10, lambda *_: False)
    bench.run(recipe, 10, lambda *_: True)
    assert len(models) == 4
    assert not [model for model in models if model() is not None]


def test_nothing_is_held_out_where_that_is_asked_for(tmp_path: Path) -> None:
    parts = read_recipe(recipe_in(tmp_path, held_out=0.0)).build()
    rest, evaluator = parts["trainer"].hold_out(parts["data"], None, True, least=600)
    assert len(rest) == len(parts["data"])
    assert evaluator is None


@pytest.mark.slow
def test_where_nothing_matters_the_first_is_taken(tmp_path: Path, clock: list[float]) -> None:
    recipe_in(tmp_path, noise=True)
    result = searched(tmp_path)
    assert result.verdict.take == 0
    assert "take the first" in result.verdict.text or "as it is" in result.verdict.text
    assert result.values == {RATE: 0.01, TEMPERATURE: 0.1}


def test_the_best_of_many_noisy_trials_is_not_taken() -> None:
    """By the choosing half alone, the luckiest of 40 looks better than the first."""
    draw = np.random.default_rng(1)
    tried = [
        Tried(number, {RATE: 0.1}, "", 10, 1.0, draw.normal(0.5, 0.2, 100)) for number in range(40)
    ]
    verdict = judge(tried, "ndcg@10")
    best = tried[verdict.best]
    assert verdict.best != 0
    assert best.score is not None
    assert best.score > tried[0].score + 0.03  # type: ignore[operator]
    assert verdict.take == 0
    assert verdict.text.startswith("cannot tell")
    assert verdict.text.endswith("take the first")


def test_the_difference_is_over_the_queries_that_did_not_choose() -> None:
    chooses, reports = tuning_trial.halves(100)
    assert sorted([*chooses, *reports]) == list(range(100))
    first, other = np.zeros(100), np.zeros(100)
    other[chooses] = 1
    tried = [Tried(0, {}, "", 1, 1.0, first), Tried(1, {}, "", 1, 1.0, other)]
    assert tuning_table(tried, "m").rows[1]["from the first"] == "+0.000 [+0.000, +0.000]"
    assert judge(tried, "m").take == 0
    other[reports] = 0.5
    gain = judge(tried, "m").gain
    assert gain is not None
    assert gain.difference == pytest.approx(0.5)
    assert judge(tried, "m").take == 1


@pytest.mark.slow
def test_trials_take_equal_seconds_whatever_a_step_takes(
    tmp_path: Path, clock: list[float]
) -> None:
    recipe_in(tmp_path)
    result = searched(tmp_path, minutes=0.2, space=["objective=InfoNCE,SogCLR"])
    steps = {each.values[OBJECTIVE]: each.steps for each in result.trials}
    assert steps["InfoNCE"] == pytest.approx(2 * steps["SogCLR"], rel=0.05)
    spent = [each.seconds for each in result.trials[1:] if not each.state]
    # The first trial with an objective also times its steps.
    assert max(spent) <= 1.1 * 60 * 0.2 / 8
    assert min(spent) >= 0.85 * 60 * 0.2 / 8


def tune_and_die(folder: Path, at: int) -> None:
    """Search, and be killed at an evaluation of the third trial."""
    with pytest.MonkeyPatch.context() as patch:
        passed = ticking(patch)
        next(passed)
        evaluations = iter(range(10**6))
        original = tuning_trial._Watch.on_evaluate

        def counted(self: Any, step: int, metrics: dict[str, float]) -> None:
            original(self, step, metrics)
            if step and next(evaluations) == at:
                kill_this_process()

        patch.setattr(tuning_trial._Watch, "on_evaluate", counted)
        searched(folder)


@pytest.mark.slow
def test_a_killed_search_continues_with_the_trial_that_it_was_in(
    tmp_path: Path, clock: list[float]
) -> None:
    for name in ("whole", "killed"):
        recipe_in(tmp_path / name)
    whole = searched(tmp_path / "whole").trials
    assert len(whole) > 3
    run_and_die(tune_and_die, tmp_path / "killed", 5)
    study = tmp_path / "killed" / "run-tuned"
    assert not (study / "metrics.json").exists()
    resumed = searched(tmp_path / "killed").trials
    for one, other in zip(whole, resumed, strict=False):
        assert (one.number, one.values, one.state) == (other.number, other.values, other.state)
        assert one.scores == pytest.approx(other.scores, abs=1e-6)
    assert [each.number for each in resumed] == list(range(len(resumed)))
    assert len(resumed) >= len(whole) - 1
    assert len({json.dumps(each.values) for each in resumed}) > len(resumed) - 2
    # Once the minutes are over, the same call trains nothing more; more minutes do.
    again = searched(tmp_path / "killed").trials
    assert [each.seconds for each in again] == [each.seconds for each in resumed]
    assert len(searched(tmp_path / "killed", minutes=0.15).trials) > len(again)


@pytest.mark.slow
def test_an_interrupted_search_says_how_it_continues(
    tmp_path: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe_in(tmp_path)
    run_trial, begun = tune_recipe.Search._run_trial, []

    def third_is_interrupted(self: tune_recipe.Search, *args: Any) -> None:
        begun.append(args)
        if len(begun) == 3:
            raise KeyboardInterrupt
        run_trial(self, *args)

    monkeypatch.setattr(tune_recipe.Search, "_run_trial", third_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path)
    kept = f"2 trials finished, kept in {tmp_path / 'run-tuned'}; the same command continues"
    assert caplog.messages[-1] == kept


@pytest.mark.slow
def test_a_folder_of_another_search_is_refused(tmp_path: Path, clock: list[float]) -> None:
    file = recipe_in(tmp_path)
    searched(tmp_path)
    other = [f"{RATE}=1e-3..1e-2"]
    with pytest.raises(
        DualencError, match=r"holds another search \(not the same settings to try\)"
    ):
        searched(tmp_path, space=other)
    with pytest.raises(DualencError, match="not the same seed"):
        searched(tmp_path, seed=1)
    file.write_text(file.read_text().replace("batch_size: 32", "batch_size: 16"))
    with pytest.raises(DualencError, match="not the same recipe"):
        searched(tmp_path)
    recipe_in(tmp_path, noise=True)
    with pytest.raises(DualencError, match="not the same data"):
        searched(tmp_path)


def test_a_trial_without_time_for_steps_is_refused_and_leaves_nothing(
    tmp_path: Path, clock: list[float]
) -> None:
    recipe_in(tmp_path)
    with pytest.raises(DualencError, match=r"has time for \d steps, of at least 10; give more"):
        searched(tmp_path, minutes=0.01)
    assert not (tmp_path / "run-tuned").exists()


def test_nothing_held_out_and_too_few_trials_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe_in(tmp_path, held_out=0.0)
    assert "nothing is held out to choose by" in failure(capsys, "tune", file)
    assert main(["tune", str(file), "--trials", "1"]) == 2
    with pytest.raises(DualencError, match="minutes is inf"):
        dualenc.tune(file, minutes=float("inf"))


def test_without_optuna_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    message = failure(capsys, "tune", recipe_in(tmp_path))
    assert message == "tuning needs the package optuna; pip install 'dualenc[tune]'"


def test_several_processes_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = failure(capsys, "tune", recipe_in(tmp_path))
    assert message == "a tuning runs on one process; run it without accelerate, on one GPU"
    assert not (tmp_path / "run-tuned").exists()


@pytest.mark.slow
def test_a_trial_that_cannot_be_trained_is_named_and_the_search_goes_on(
    tmp_path: Path, clock: list[float]
) -> None:
    recipe_in(tmp_path, max_gradient_norm=None, optimizer="sgd")
    result = searched(tmp_path, space=[f"{RATE}=1e30,1e36", f"{TEMPERATURE}=0.001,0.1"])
    states = {each.state for each in result.trials if each.values[RATE] > 1}
    assert "failed" in states
    assert result.verdict.take == 0


@pytest.mark.parametrize("name", ["mean_recall", "image_to_text_recall@5"])
def test_scores_of_queries_have_the_mean_that_is_reported(name: str) -> None:
    draw = np.random.default_rng(0)
    ranks = {"image_to_text": draw.integers(1, 20, 30), "text_to_image": draw.integers(1, 20, 80)}
    assert np.mean(recall_of_queries(ranks, name)) == pytest.approx(both_ways_recall(ranks)[name])
