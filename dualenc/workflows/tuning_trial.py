"""One training of a tuning: its steps by the clock, its held-out scores, and where it may stop."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.errors import DualencError
from dualenc.recipe.resolve import Recipe
from dualenc.training.callbacks import Callback
from dualenc.training.evaluators import Evaluator, evaluated_data
from dualenc.training.trainer import Trainer

logger = logging.getLogger("dualenc.workflows")

MAX_EVALUATIONS = 4
"""Evaluations of a trial: the first after a quarter, where Hyperband may stop it."""
EVALUATION_SHARE = 0.3
"""Share of a trial that evaluations may take; with slower ones there are fewer."""
PROBE_SHARE = 0.05
"""Share of a trial for which the speed of its steps is measured."""
MIN_PROBED = 4
"""Steps to time at least; the first is left out, as it warms up."""
MIN_STEPS = 10
"""Steps below which a trial says nothing about a training."""
MIN_QUERIES = 20
"""Held-out queries below which halves of them mean nothing."""
HELD_OUT = 600
"""Pairs to hold out if there are enough: 300 to compare by tell four points of nDCG from noise."""


class Halves(Evaluator):
    """The recipe's evaluator, whose primary metric is over the half of queries to choose by.

    Each trial begins with the same model, which is evaluated once for all.

    Args:
        evaluator: the recipe's evaluator.

    Attributes:
        scores: (Q,) primary metric of each query at the last evaluation; a single value if the
            evaluator does not keep those of queries.
        seconds: time of the first evaluation.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.primary = evaluator.primary
        self.data = evaluated_data(evaluator)
        self.modalities = getattr(evaluator, "modalities", {})
        self.scores = np.empty(0)
        self.seconds = 0.0
        self._before: tuple[dict[str, float], np.ndarray] | None = None
        self._is_first = True

    def stop_when(self, stopped: Callable[[], bool] | None) -> None:
        """Let a signal end an evaluation of the recipe's evaluator, too."""
        if isinstance(self.evaluator, Evaluator):
            self.evaluator.stop_when(stopped)

    def forget(self) -> None:
        """Evaluate the next model before training again, and time that."""
        self._before = None

    def begin(self) -> None:
        """Take the next call for that of a model before training."""
        self._is_first = True

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        if self._is_first and self._before is not None:
            metrics, self.scores = self._before
        else:
            started = time.perf_counter()
            metrics = dict(self.evaluator(model))
            own = getattr(self.evaluator, "query_scores", None)
            # Without scores of queries their mean alone is left, which has no halves.
            self.scores = np.array([metrics[self.primary]] if own is None else own, float)
            metrics[self.primary] = chosen_by(self.scores)
            if self._before is None:
                self.seconds = time.perf_counter() - started
                self._before = metrics, self.scores
        self._is_first = False
        return metrics


def halves(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of queries to choose by, and of those to report; both are all below 20.

    Args:
        count: number of queries.
    """
    rows = np.random.default_rng(0).permutation(count)
    if count < MIN_QUERIES:
        return rows, rows
    return np.sort(rows[: count // 2]), np.sort(rows[count // 2 :])


def chosen_by(scores: np.ndarray | Sequence[float]) -> float:
    """Return the mean score of the queries to choose by."""
    values = np.asarray(scores, float)
    return float(values[halves(len(values))[0]].mean())


class Stop(Exception):
    """Ends a training from a callback; neither a mistake nor a result."""


class _Clock(Callback):
    """Times steps, and stops the training when that is done."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ticks: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.ticks.append(time.perf_counter())
        if len(self.ticks) > MIN_PROBED and self.ticks[-1] - self.ticks[0] > self.seconds:
            raise Stop


class _Watch(Callback):
    """Remembers the evaluations of a trial, and stops it where `stops` says so."""

    def __init__(self, evaluator: Halves, stops: Callable[[int, float], bool]) -> None:
        self.evaluator = evaluator
        self.stops = stops
        self.seen: list[np.ndarray] = []

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        if step == 0:
            return
        self.seen.append(self.evaluator.scores)
        if self.stops(len(self.seen), chosen_by(self.evaluator.scores)):
            raise Stop


class Trial(NamedTuple):
    """What a trial measured.

    Attributes:
        scores: (Q,) scores of queries at the best evaluation by the choosing half, or at the last
            if the recipe keeps the last weights.
        seconds: wall-clock time.
        stopped: True if it was stopped before its last step.
    """

    scores: np.ndarray
    seconds: float
    stopped: bool


@dataclass
class Bench:
    """What the trials of a tuning share: data, evaluator, and how long each may take.

    Attributes:
        pairs: pairs to train on.
        evaluator: evaluator of held-out queries.
        seconds: wall-clock seconds of a trial.
        folder: folder for the model in training.
        evaluations: number of evaluations of a trial.
        overhead: seconds of a trial that are not steps.
        speeds: seconds of a step, by objective and batch.
        tokens: token caches, by side and model.
    """

    pairs: PairDataset
    evaluator: Halves
    seconds: float
    folder: Path
    evaluations: int = MAX_EVALUATIONS
    overhead: float = 0.0
    speeds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe, seconds: float, folder: Path) -> Bench:
        """Read the data, hold out as `dualenc train` does, and evaluate the untrained model.

        Raises:
            DualencError: nothing is held out, or the parts do not fit together.
        """
        parts = recipe.build()
        trainer: Trainer = parts["trainer"]
        pairs, evaluator = parts["data"], parts["evaluator"]
        if evaluator is None:
            count = len(pairs)
            pairs, evaluator = trainer.hold_out(pairs, parts["batching"], True, least=HELD_OUT)
            logger.info(
                "Held out %s of %s pairs to choose by", f"{count - len(pairs):,}", f"{count:,}"
            )
        if evaluator is None:
            raise DualencError(
                "nothing is held out to choose by",
                fix="name an evaluator, or set trainer.held_out",
                where=recipe.source,
            )
        bench = cls(pairs, Halves(evaluator), seconds, folder)
        model: DualEncoder = parts["model"]
        bench._share_tokens(recipe, model)
        with torch.no_grad():
            bench.evaluator(model.eval())
            # Once more: now texts are tokenized, as in every trial.
            bench.evaluator.forget()
            bench.evaluator(model)
        each = bench.evaluator.seconds
        affordable = int(EVALUATION_SHARE * seconds / max(each, 1e-9))
        bench.evaluations = min(max(affordable, 1), MAX_EVALUATIONS)
        # The first training of a process imports libraries. Its steps are timed, the second's start
        # and end.
        bench.step_seconds(recipe)
        started = time.perf_counter()
        bench._fit(recipe, steps=1, callbacks=[], evaluates=False)
        bench.overhead = time.perf_counter() - started + bench.evaluations * each
        return bench

    def take_over(self, evaluations: int, overhead: float) -> None:
        """Set what the first process of a search has measured: all trials are equally long.

        Args:
            evaluations: number of evaluations of a trial.
            overhead: seconds of a trial that are not steps.
        """
        self.evaluations = evaluations
        self.overhead = overhead

    def _share_tokens(self, recipe: Recipe, model: DualEncoder) -> None:
        """Give models with the same settings one token cache, so that no trial pays for it."""
        own = json.dumps(recipe.settings["model"])
        for side in SIDES:
            prepare: Any = model.tower(side).prepare
            prepare.cache_tokens()
            if hasattr(prepare, "token_cache"):
                cache = self.tokens.setdefault(f"{side} {own}", prepare.token_cache)
                prepare.token_cache = cache

    def step_seconds(self, recipe: Recipe) -> float:
        """Return the seconds of a step; time some if no trial of this objective and batch did."""
        key = speed_key(recipe)
        if key not in self.speeds:
            clock = _Clock(PROBE_SHARE * self.seconds)
            self._fit(recipe, steps=10**6, callbacks=[clock], evaluates=False)
            # The mean: batches of long texts count as often as they occur.
            self.speeds[key] = statistics.fmean(np.diff(clock.ticks)[1:])
        return self.speeds[key]

    def steps(self, recipe: Recipe) -> int:
        """Return the number of steps that fit into the seconds of a trial."""
        return max(int((self.seconds - self.overhead) / self.step_seconds(recipe)), 1)

    def check(self, recipe: Recipe) -> None:
        """Raise if a trial is too short for the recipe to learn anything."""
        steps = self.steps(recipe)
        if steps < MIN_STEPS:
            needed = self.overhead + 2 * MIN_STEPS * self.step_seconds(recipe)
            raise DualencError(
                f"a trial of {self.seconds:.0f} s has time for {steps} steps, of at least "
                f"{MIN_STEPS}",
                fix="give more --minutes, or fewer --trials: each should take "
                f"{math.ceil(needed)} s or more",
            )

    def run(self, recipe: Recipe, steps: int, stops: Callable[[int, float], bool]) -> Trial:
        """Train with the steps of a trial.

        Args:
            recipe: recipe with the settings of the trial.
            steps: number of steps, which the schedule spans.
            stops: function of the number of an evaluation and its metric; True ends the trial.
        """
        watch = _Watch(self.evaluator, stops)
        started = time.perf_counter()
        finished = self._fit(recipe, steps, [watch])
        spent = time.perf_counter() - started
        if recipe.settings["trainer"]["keep_best"]:
            return Trial(max(watch.seen, key=chosen_by), spent, not finished)
        return Trial(watch.seen[-1], spent, not finished)

    def _fit(
        self, recipe: Recipe, steps: int, callbacks: list[Callback], evaluates: bool = True
    ) -> bool:
        """Train without checkpoints. Returns False if a callback stopped it."""
        given: dict[str, Any] = {"data": self.pairs}
        given["evaluator"] = self.evaluator if evaluates else None
        parts = recipe.build(**given)
        self._share_tokens(recipe, parts["model"])
        trainer = _short(parts.pop("trainer"), steps, self.evaluations, self.folder)
        self.evaluator.begin()
        try:
            with _quiet():
                trainer.fit(
                    pairs=parts.pop("data"), **parts, recipe=recipe.settings, callbacks=callbacks
                )
        except Stop:
            return False
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            # Cycles would keep weights and optimizer in memory beside those of the next trial.
            del parts, trainer
            gc.collect()
        return True


def _short(trainer: Trainer, steps: int, evaluations: int, folder: Path) -> Trainer:
    """Return the trainer of a trial: without checkpoints, trackers and bars."""
    changes: Mapping[str, Any] = {
        "output": folder,
        "epochs": None,
        "max_steps": steps,
        "evaluate_every": math.ceil(steps / evaluations),
        "held_out": 0.0,
        "patience": None,
        # The scores of the best evaluation are kept, not its weights.
        "keep_best": False,
        "save_every": None,
        "tracker": None,
        "overwrite": True,
        "progress": False,
    }
    short = copy.copy(trainer)
    for name, value in changes.items():
        setattr(short, name, value)
    return short


def speed_key(recipe: Recipe) -> str:
    """Return what the speed of a step depends on, among what is tuned."""
    objective = dict(recipe.settings["objective"])
    inner = dict(objective.get("init_args") or {})
    inner.pop("temperature", None)
    trainer = recipe.settings["trainer"]
    own = [trainer[name] for name in ("batch_size", "chunk_size", "gradient_accumulation")]
    return f"{objective['class_path']} {sorted(inner.items(), key=str)} {own}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the notices of trainings in this context: they are of every trial the same."""
    training = logging.getLogger("dualenc.training")
    before = training.level
    training.setLevel(logging.WARNING)
    try:
        yield
    finally:
        training.setLevel(before)


def is_out_of_reach(error: Exception) -> bool:
    """Return True if a trial's own settings made it fail: a loss of NaN, or no memory left."""
    return isinstance(error, DualencError | torch.OutOfMemoryError)
