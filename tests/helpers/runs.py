"""Small training runs for the tests, in this process or in one that may be killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dualenc.training.trainer import Trainer, TrainingResult
from tests.helpers.fakes import TinyEncoder, kill_this_process, tiny_objective, tiny_pairs

SETTINGS: dict[str, Any] = {
    "batch_size": 6,
    "epochs": 3,
    "learning_rate": 0.02,
    "save_every": 2,
    "log_every": 3,
    "progress": False,
}


class FixedEvaluator:
    """Metrics that follow a script by call; draws random numbers, as evaluations may."""

    source = ""

    def __init__(self, *scores: float, primary: str = "score") -> None:
        self.scores = list(scores)
        self.primary = primary

    def __call__(self, model: TinyEncoder) -> dict[str, float]:
        assert not model.training
        torch.rand(3)
        return {"score": self.scores.pop(0) if self.scores else 0.0}


def train(output: Path, *, resume: bool = False, **changes: Any) -> TrainingResult:
    """12 steps of a tiny encoder with dropout; `changes` go to the trainer, or to `fit` where it
    knows them."""
    parts = {
        name: changes.pop(name, None)
        for name in ("model", "pairs", "objective", "batching", "evaluator")
    }
    pairs = parts["pairs"] or tiny_pairs()
    model = parts["model"] or TinyEncoder(dropout=0.2)
    objective = parts["objective"] or tiny_objective(pairs)
    callbacks = changes.pop("callbacks", ())
    trainer = Trainer(output=output, **{**SETTINGS, **changes})
    return trainer.fit(
        model,
        pairs,
        objective,
        parts["batching"],
        parts["evaluator"],
        resume,
        callbacks=callbacks,
    )


def run_and_die(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Run in a child process that does not come back; its exit code, minus the signal."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    # Given a time limit it would wait for the data workers too, orphans who notice that after 5 s.
    process.join()
    return process.exitcode


def train_and_die(output: Path, at_batch: int, changes: dict[str, Any]) -> None:
    """Be killed with SIGKILL while the objective looks at a batch."""
    objective = changes.get("objective") or tiny_objective(tiny_pairs())
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at_batch:
            kill_this_process()

    objective.register_forward_pre_hook(count)
    train(output, **{**changes, "objective": objective})
