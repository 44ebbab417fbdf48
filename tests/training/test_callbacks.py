"""Callbacks: when they are called and with what, and that they change nothing."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives import EMC2
from dualenc.training import Callback
from dualenc.training.log import read_metrics
from tests.helpers.fakes import same, weights
from tests.helpers.launched import launch, small_run
from tests.helpers.runs import FixedEvaluator, run_and_die, train, train_and_die


class Recorder(Callback):
    """Records its calls, and does everything that must not matter: draws, and changes metrics."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append((step, dict(metrics)))
        self._interfere(metrics)

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self.evaluations.append((step, dict(metrics)))
        self._interfere(metrics)

    def _interfere(self, metrics: dict[str, float]) -> None:
        torch.rand(3)
        np.random.rand()  # noqa: NPY002
        random.random()
        for name in metrics:
            metrics[name] = -1.0


class Failing(Callback):
    """Raises in the given step or evaluation."""

    def __init__(self, step: int = -1, evaluation: int = -1) -> None:
        self.step = step
        self.evaluation = evaluation

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            raise KeyError("of the user")

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.evaluation:
            raise KeyError("of the user")


class Writer(Callback):
    """Writes a line per call to a file of its rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._write(f"step {step}")

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self._write(f"evaluate {step}")

    def _write(self, line: str) -> None:
        with open(self.folder / f"rank-{distributed.rank()}.txt", "a") as stream:
            stream.write(f"{line}\n")


def evaluated(**changes: Any) -> dict[str, Any]:
    evaluator = FixedEvaluator(0.1, 0.2, 0.5, 0.3)
    return {"evaluate_every": 5, "evaluator": evaluator, **changes}


def without_speed(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{**line, "samples_per_second": 0} for line in lines]


def test_a_callback_gets_every_step_and_evaluation(tmp_path):
    first, second = Recorder(), Recorder()
    train(tmp_path, callbacks=[first, second], log_every=1, **evaluated())
    assert [step for step, _ in first.steps] == list(range(1, 13))
    assert first.evaluations == [
        (0, {"score": 0.1}),
        (5, {"score": 0.2}),
        (10, {"score": 0.5}),
        (12, {"score": 0.3}),
    ]
    assert second.steps == first.steps
    assert second.evaluations == first.evaluations
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    for (step, metrics), line in zip(first.steps, lines, strict=True):
        assert line.pop("samples_per_second") > 0
        assert {"step": step, **metrics} == line


def test_steps_between_lines_of_the_log_have_the_loss(tmp_path):
    recorder = Recorder()
    train(tmp_path, callbacks=[recorder])
    always = {"loss", "learning_rate", "epoch", "gradient_norm"}
    for step, metrics in recorder.steps:
        assert always <= metrics.keys()
        assert (metrics.keys() > always) == (step % 3 == 0)
        assert all(type(value) in (int, float) for value in metrics.values())


@pytest.mark.parametrize(
    "changes",
    [{}, {"chunk_size": 2, "gradient_accumulation": 2}, {"objective": None}],
    ids=["plain", "chunked", "sampling objective"],
)
def test_a_run_with_callbacks_is_bitwise_the_run_without(tmp_path, changes):
    for name, callbacks in (("without", []), ("with", [Recorder(), Recorder()])):
        if "objective" in changes:
            changes = {"objective": EMC2(num_left=24, proposals=7).double()}
        train(tmp_path / name, callbacks=callbacks, **evaluated(**changes))
    assert same(weights(tmp_path / "without"), weights(tmp_path / "with"))
    assert without_speed(tmp_path / "without") == without_speed(tmp_path / "with")


def test_a_resumed_run_calls_from_the_step_after_its_checkpoint(tmp_path):
    unbroken, resumed = Recorder(), Recorder()
    train(tmp_path / "unbroken", callbacks=[unbroken], **evaluated())
    run_and_die(train_and_die, tmp_path / "killed", 8, {})
    train(tmp_path / "killed", resume=True, callbacks=[resumed], **evaluated())
    # The kill came in step 8, after the checkpoint of step 6.
    assert resumed.steps == unbroken.steps[6:]
    assert [step for step, _ in resumed.evaluations] == [10, 12]


def test_an_exception_ends_the_run_as_it_is_and_the_run_resumes(tmp_path):
    train(tmp_path / "unbroken", **evaluated())
    with pytest.raises(KeyError, match="of the user"):
        train(tmp_path / "run", callbacks=[Failing(step=8)], **evaluated())
    with pytest.raises(KeyError, match="of the user"):
        train(tmp_path / "run", resume=True, callbacks=[Failing(evaluation=12)], **evaluated())
    recorder = Recorder()
    evaluator = FixedEvaluator(0.3)
    train(tmp_path / "run", resume=True, callbacks=[recorder], **evaluated(evaluator=evaluator))
    # The checkpoint of the last step is from before its evaluation, which is repeated.
    assert recorder.steps == []
    assert recorder.evaluations == [(12, {"score": 0.3})]
    logged = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    unbroken = [line["step"] for line in read_metrics(tmp_path / "unbroken" / "metrics.jsonl")]
    assert logged == unbroken


def test_an_exception_before_training_leaves_no_trace(tmp_path):
    with pytest.raises(KeyError, match="of the user"):
        train(tmp_path / "run", callbacks=[Failing(evaluation=0)], **evaluated())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("callback", "kind"), [(Recorder, "Recorder"), (print, "builtin_function_or_method")]
)
def test_anything_but_a_callback_is_refused(tmp_path, callback, kind):
    message = rf"^callbacks\[1\]: {kind} is not an instance of .*; derive a class from Callback"
    with pytest.raises(DualencError, match=message):
        train(tmp_path / "run", callbacks=[Callback(), callback])
    assert not (tmp_path / "run").exists()


def test_the_script_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[2] / "docs" / "trackers.md"
    (script,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(script, {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("after step 0: nDCG@10 0.")
    assert [line.split(":")[0] for line in lines[1:4]] == ["step 10", "step 20", "after step 20"]
    assert float(lines[-1].split()[-1]) > float(lines[0].split()[-1])


@pytest.mark.slow
def test_only_the_main_process_of_two_calls(tmp_path):
    for name, callbacks in (("without", []), ("with", [Writer(tmp_path)])):
        ranks = launch(
            tmp_path,
            small_run,
            tmp_path / name,
            ranks=2,
            callbacks=callbacks,
            evaluation=0.0,
            evaluate_every=6,
        )
        assert [process.end()[0] for process in ranks] == [0, 0]
    steps = [f"step {step}" for step in range(1, 13)]
    lines = (tmp_path / "rank-0.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("step")] == steps
    assert [line for line in lines if line not in steps] == [
        "evaluate 0",
        "evaluate 6",
        "evaluate 12",
    ]
    assert not (tmp_path / "rank-1.txt").exists()
    assert same(weights(tmp_path / "without"), weights(tmp_path / "with"))
