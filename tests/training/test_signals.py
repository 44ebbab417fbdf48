"""Kills for real: signals and Ctrl-C save and stop, on one process and on two; lost and hung ranks
are reported."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dualenc.errors import DualencError
from dualenc.training.evaluators import RetrievalEvaluator
from dualenc.training.log import read_metrics
from dualenc.training.signals import StopSignals
from tests.helpers.fakes import (
    TinyEncoder,
    assert_same_model,
    same,
    tiny_objective,
    tiny_pairs,
    weights,
)
from tests.helpers.launched import SlowEvaluator, launch, slowly_evaluated_run, small_run
from tests.helpers.runs import train
from tests.helpers.waiting import wait_for


def saved_step(output: Path) -> int:
    return max(
        int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*")
    )


def assert_made_up_for(folder: Path, **settings) -> None:
    """Resumed, `run` ends as a run that was never stopped, with the same evaluations."""
    found = []
    for name, resume in (("run", True), ("whole", False)):
        evaluator = SlowEvaluator(0, folder / "evaluating")
        train(folder / name, model=TinyEncoder(), evaluator=evaluator, resume=resume, **settings)
        found.append(
            [
                line
                for line in read_metrics(folder / name / "metrics.jsonl")
                if "evaluation/score" in line
            ]
        )
    assert same(weights(folder / "run"), weights(folder / "whole"))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "to_group", "settings"),
    [
        (signal.SIGTERM, 143, False, {"gradient_accumulation": 2, "dropout": 0.2}),
        (signal.SIGUSR1, 128 + signal.SIGUSR1, False, {}),
        (signal.SIGINT, 130, False, {}),
        # As SLURM sends it, and `timeout` and a terminal; data workers must live until the
        # checkpoint.
        (signal.SIGTERM, 143, True, {"num_workers": 2}),
        (signal.SIGINT, 130, True, {"num_workers": 2}),
    ],
)
def test_a_signal_saves_and_ends_the_run_which_resumes_bit_for_bit(
    tmp_path, number, code, to_group, settings
):
    run = tmp_path / "run"
    shown = {"delay": 0.1, "save_every": 1000, "progress": True}
    (process,) = launch(tmp_path, small_run, run, **shown, **settings)
    wait_for((run / "metrics.jsonl").exists)
    (os.killpg if to_group else os.kill)(process.pid, number)
    returncode, errors = process.end()
    assert returncode == code, errors
    step = saved_step(run)
    assert (
        f"stopped by {number.name} after step {step}: its checkpoint is in {run / 'checkpoints'}"
        in errors
    )
    assert "Traceback" not in errors
    assert not (run / "model").exists()
    assert not (run / ".lock").exists()
    dropout = settings.pop("dropout", 0.0)
    train(run, model=TinyEncoder(dropout=dropout), resume=True, save_every=1000, **settings)
    train(tmp_path / "whole", model=TinyEncoder(dropout=dropout), save_every=1000, **settings)
    assert same(weights(run), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_a_signal_in_an_evaluation_ends_the_run_after_it(tmp_path):
    run, settings = tmp_path / "run", {"evaluate_every": 5, "save_every": 1000}
    (process,) = launch(tmp_path, small_run, run, evaluation=0.5, **settings)
    wait_for((tmp_path / "evaluating").exists)
    os.kill(process.pid, signal.SIGTERM)
    returncode, errors = process.end()
    assert returncode == 143, errors
    assert saved_step(run) == 5
    assert_made_up_for(tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 12])
def test_an_evaluation_that_was_due_when_the_run_was_stopped_is_made_up_for(tmp_path, at):
    """Who is asked to stop may have seconds left, and an evaluation takes minutes: it comes after
    resuming."""
    settings = {"evaluate_every": 2, "save_every": 1000}
    evaluator = SlowEvaluator(0, tmp_path / "evaluating")
    with pytest.raises(SystemExit) as stopped:
        objective = signalled(signal.SIGTERM, at)
        train(
            tmp_path / "run",
            model=TinyEncoder(),
            objective=objective,
            evaluator=evaluator,
            **settings,
        )
    assert stopped.value.code == 143
    assert evaluator.calls == at // 2  # one before the training, none at the last step
    assert_made_up_for(tmp_path, **settings)


def interrupting(number: int, at: int):
    """A model that sends its process a signal while it encodes a batch of an evaluation.

    Returns it, and a list with an entry for each such batch.
    """
    model = TinyEncoder()
    batches: list[int] = []

    def count(tower, *_):
        if not tower.training:
            batches.append(len(batches))
            if len(batches) == at:
                signal.raise_signal(number)

    for tower in (model.left, model.right):
        tower.register_forward_pre_hook(count)
    return model, batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "step"),
    [(5, 0), (20, 0), (30, 4), (50, 8), (80, 12)],
    ids=["before training", "its documents", "first", "second", "last"],
)
def test_a_signal_ends_an_evaluation_between_two_batches(tmp_path, at, step, capfd):
    """What is saved resumes to the same content, and the evaluation is made up for."""
    settings = {"evaluate_every": 4, "save_every": 1000, "progress": True}
    run = tmp_path / "run"
    # 12 queries and 12 documents, one at a time.
    evaluator = RetrievalEvaluator(pairs=tiny_pairs(12), batch_size=1)
    model, batches = interrupting(signal.SIGTERM, at)
    with pytest.raises(SystemExit) as stopped:
        train(run, model=model, evaluator=evaluator, **settings)
    assert stopped.value.code == 143
    assert len(batches) == at
    message = "nothing is saved yet; start it again" if step == 0 else "its checkpoint is in"
    assert f"stopped by SIGTERM after step {step}: {message}" in capfd.readouterr().err
    assert run.exists() == (step > 0)
    logged = []
    for name, resume in (("run", True), ("whole", False)):
        train(tmp_path / name, model=TinyEncoder(), evaluator=evaluator, resume=resume, **settings)
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        logged.append([line for line in lines if "evaluation/ndcg@10" in line])
    assert same(weights(run), weights(tmp_path / "whole"))
    assert logged[0] == logged[1]


@pytest.mark.slow
def test_all_ranks_end_an_evaluation_though_one_alone_gets_the_signal(tmp_path):
    run = tmp_path / "run"
    settings = {"evaluate_every": 4, "save_every": 1000, "progress": True}
    ranks = launch(tmp_path, slowly_evaluated_run, run, ranks=2, **settings)
    wait_for((tmp_path / "evaluating").exists)
    os.kill(ranks[1].pid, signal.SIGTERM)
    began = time.monotonic()
    ended = [process.end() for process in ranks]
    assert time.monotonic() - began < 40
    assert [returncode for returncode, _ in ended] == [143, 143], ended
    assert "stopped by SIGTERM after step 4" in ended[0][1]
    assert saved_step(run) == 4


def signalled(number: int, at: int):
    """An objective in whose call the process sends itself a signal."""
    objective = tiny_objective(tiny_pairs())
    steps = iter(range(1, 100))
    objective.register_forward_pre_hook(
        lambda *_: signal.raise_signal(number) if next(steps) == at else None
    )
    return objective


@pytest.fixture
def ctrl_c():
    """Ctrl-C works, which tests that run in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_the_first_ctrl_c_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, ctrl_c, capfd):
    with pytest.raises(KeyboardInterrupt):
        objective = signalled(signal.SIGINT, at=5)
        train(tmp_path / "run", objective=objective, save_every=1000, progress=True)
    printed = capfd.readouterr().err
    assert printed.count("finishing this step; press Ctrl-C again to stop at once\n") == 1
    assert "stopped by SIGINT after step 5: its checkpoint is in" in printed
    assert saved_step(tmp_path / "run") == 5


@pytest.mark.parametrize("save_every", [1000, None])
def test_a_second_ctrl_c_ends_the_run_at_once_and_so_does_the_first_where_nothing_would_be_saved(
    tmp_path, ctrl_c, monkeypatch, save_every
):
    objective = tiny_objective(tiny_pairs())
    reached = []

    def press(*_):
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)  # sent twice by a launcher
        reached.append("same")
        monkeypatch.setattr("dualenc.training.signals.SAME_PRESS", 0)
        signal.raise_signal(signal.SIGINT)

    objective.register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", objective=objective, save_every=save_every)
    assert reached == (["first", "same"] if save_every else [])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_all_ranks_stop_at_one_step_though_one_alone_gets_the_signal(tmp_path):
    run = tmp_path / "run"
    settings = {"delay": 0.1, "save_every": 1000, "progress": True}
    ranks = launch(tmp_path, small_run, run, ranks=2, **settings)
    wait_for((run / "metrics.jsonl").exists)
    os.kill(ranks[1].pid, signal.SIGTERM)
    ended = [process.end() for process in ranks]
    assert [returncode for returncode, _ in ended] == [143, 143], ended
    assert f"after step {saved_step(run)}" in ended[0][1]
    assert saved_step(run) < 12
    train(run, model=TinyEncoder(), resume=True, save_every=1000)
    train(tmp_path / "whole", model=TinyEncoder(), save_every=1000)
    assert_same_model(run, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_killed", "message"),
    [(True, "is lost: it has ended or was killed"), (False, "did not answer in time")],
)
def test_a_lost_or_hung_rank_is_explained_in_one_line_and_ends_the_others(
    tmp_path, is_killed, message
):
    run = tmp_path / "run"
    settings = {"delay": 0.1} if is_killed else {"hang": (1, 4, 60), "timeout_minutes": 0.05}
    ranks = launch(tmp_path, small_run, run, ranks=2, save_every=2, **settings)
    wait_for((run / "metrics.jsonl").exists)
    if is_killed:
        os.kill(ranks[1].pid, signal.SIGKILL)
    began = time.monotonic()
    code, errors = ranks[0].end()
    assert time.monotonic() - began < 40
    ranks[1].process.kill()
    assert code == 2, errors
    (report,) = (line for line in errors.splitlines() if line.startswith("dualenc: error:"))
    assert message in report
    assert "Traceback" not in errors
    assert not (run / ".lock").exists()


def fail_after(number: int) -> None:
    signal.raise_signal(number)
    raise DualencError("something else")


def test_handlers_are_those_of_before_and_a_late_signal_is_sent_again():
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            assert (signals.noted, got) == (signal.SIGTERM, [])
        assert got == [signal.SIGTERM]
        with pytest.raises(DualencError, match="something else"), StopSignals():
            fail_after(signal.SIGTERM)
        assert got == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            assert signals.noted == 0, "ignored signals stay ignored"
    finally:
        signal.signal(signal.SIGTERM, before)
