"""The training loop: the only one, and without a word about any particular objective."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.training.checkpoint import Checkpoints
from dualenc.training.embedding_table import fresh_embeddings, tell_neighbors
from dualenc.training.evaluators import BestModel
from dualenc.training.loader import Batch, BatchLoader
from dualenc.training.log import Meter, RunLog
from dualenc.training.selection import BatchPlan
from dualenc.training.signals import Stopped
from dualenc.training.step import Step


class Loop:
    """Steps through the batches; logs, evaluates and saves on the way; starts again anywhere.

    Args:
        step: one optimizer step.
        loader: makes this rank's batches.
        plan: says which pairs form them.
        best: evaluates and keeps the best model.
        log: what the user sees.
        checkpoints: where the state of the run goes.
        total_steps: optimizer steps of the whole training.
        accumulation: global batches per optimizer step.
        evaluate_every: steps between evaluations; None evaluates only at the end.
        save_every: steps between checkpoints; None writes none.
        log_every: steps between logs.
        begin: called once, after the first step: from there on the run writes into its folder.
    """

    def __init__(
        self,
        step: Step,
        loader: BatchLoader,
        plan: BatchPlan,
        best: BestModel,
        log: RunLog,
        checkpoints: Checkpoints,
        *,
        total_steps: int,
        accumulation: int = 1,
        evaluate_every: int | None = None,
        save_every: int | None = None,
        log_every: int = 10,
        begin: Callable[[Loop], None] = lambda _: None,
    ) -> None:
        self.update, self.loader, self.plan, self.best = step, loader, plan, best
        self.log, self.checkpoints = log, checkpoints
        self.total_steps, self.accumulation = total_steps, accumulation
        self.evaluate_every, self.save_every, self.log_every = evaluate_every, save_every, log_every
        self.meter = Meter(step.device)
        self.bad: dict[int, str] = {}
        self.steps = self.epoch = self.batch = self.batches_done = 0
        self.evaluation_due = self.resumed = False
        self._begin: Callable[[Loop], None] | None = begin
        self._seconds, self._samples, self._clock, self._rate = 0.0, 0, 0.0, 0.0

    def run(self) -> None:
        """Train to the last step, from wherever the loop stands.

        Raises:
            Stopped: a signal has asked for it; after a checkpoint of the step that was going on.
        """
        self.update.model.train()
        self.update.objective.train()
        if self.evaluation_due:
            self._evaluate_when_due()
        while self.steps < self.total_steps:
            if self.batch == 0:
                self._start_epoch()
            self._run_epoch(self.plan.batches(self.epoch))
            if self.steps < self.total_steps:
                self.epoch, self.batch = self.epoch + 1, 0

    def finish(self) -> dict[str, float]:
        """Make sure that the model folder holds what it should; returns the metrics of what it holds."""
        self._begin_once()
        step = self.best.missing_step()
        if step is not None:
            self._save_again(step)
        return self.best.finish(self.steps)

    def close(self) -> None:
        """Finish what runs beside the loop: progress bar, trackers, a selection of batches."""
        self.plan.close()
        self.log.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on; all ranks call it together."""
        scaler = self.update.accelerator.scaler
        return {
            "position": {name: getattr(self, name) for name in _POSITION},
            "model": self.update.model.state_dict(),
            "objective": self.update.objective.state_dict(),
            "optimizer": self.update.optimizer.state_dict(),
            "schedule": self.update.schedule.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "plan": self.plan.state_dict(),
            "best": self.best.state_dict(),
            "meter": self.meter.state_dict(),
            "bad": self.all_bad(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, whatever the number of processes was then."""
        for name in _POSITION:
            setattr(self, name, state["position"][name])
        parts: dict[str, Any] = {
            "model": self.update.model,
            "objective": self.update.objective,
            "optimizer": self.update.optimizer,
            "schedule": self.update.schedule,
            "plan": self.plan,
            "best": self.best,
            "meter": self.meter,
        }
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self.update.objective.to(self.update.device)  # a table whose size only the checkpoint knows comes from the CPU
        if self.update.accelerator.scaler is not None:
            self.update.accelerator.scaler.load_state_dict(state["scaler"])
        self.bad = dict(state["bad"])
        self.resumed = True
        self.log.restart_at(self.steps)

    def all_bad(self) -> dict[int, str]:
        """Reason by pair index of all samples left out so far, on any rank; all ranks call it together."""
        return {index: why for bad in distributed.gather_objects(self.bad) for index, why in bad.items()}

    def evaluate(self) -> None:
        """Measure the model as it is, and log that."""
        metrics = self.best.evaluate(self.steps)
        if metrics:
            self.log.write(self.steps, {f"evaluation/{name}": value for name, value in metrics.items()})
            primary = self.best.primary
            self.log.say(f"step {self.steps}: {primary} {metrics[primary]:.4f}")

    def _evaluate_when_due(self) -> None:
        self.evaluate()
        self.evaluation_due = False

    def _save_again(self, step: int) -> None:
        """The model folder is gone: write the weights of a step again, if a checkpoint has them."""
        state = self.checkpoints.load_step(step)
        if state is None:
            self.log.say(f"{self.best.folder} is gone, and no checkpoint has the best weights, those of step {step}")
            return self.best.forget()
        model, objective = self.update.model, self.update.objective
        latest = [{k: v.clone() for k, v in part.state_dict().items()} for part in (model, objective)]
        model.load_state_dict(state["model"])
        objective.load_state_dict(state["objective"])
        self.best.save_best()
        model.load_state_dict(latest[0])
        objective.load_state_dict(latest[1])
        return None

    def _begin_once(self) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin(self)

    def _start_epoch(self) -> None:
        to_come = self.accumulation * (self.total_steps - self.steps)
        last = to_come <= self.plan.num_batches(self.epoch)
        tell_neighbors(self.update.objective, self.loader.builder.pairs, self._fresh_pass)
        report = self.plan.start_epoch(self.epoch, self.steps, self._fresh_pass, last)
        if report:
            self.log.write(self.steps, {f"selection/{name}": value for name, value in report.items()})
            self.log.say(
                f"epoch {self.epoch + 1}: batches selected in {report['seconds']:.1f} s from embeddings "
                f"{report['staleness']:.0f} steps old; loss {report['loss']:.3f}, random {report['random_loss']:.3f}"
            )

    def _fresh_pass(self) -> tuple[np.ndarray, np.ndarray]:
        return fresh_embeddings(self.update, self.loader)

    def _run_epoch(self, batches: np.ndarray) -> None:
        self._clock = time.perf_counter()
        stream = self.loader.batches(batches, self.epoch, start=self.batch)
        for group in _grouped(stream, self.accumulation):
            self._note_bad(group)
            self._one_step(group)
            self._seconds += time.perf_counter() - self._clock
            self._samples += len(group) * batches.shape[1]
            self._between_steps()
            self._clock = time.perf_counter()
            if self.steps == self.total_steps:
                return

    def _one_step(self, group: list[Batch]) -> None:
        self.update.objective.set_progress(self.steps / self.total_steps)
        self._rate = self.update.optimizer.param_groups[0]["lr"]
        step = self.steps + 1
        try:
            values = self.update(
                group,
                self.batches_done,
                lambda i, left, right: self.plan.observe(i, left, right, step),
                with_metrics=self._logs_at(step),
            )
        except DualencError as error:
            # What the objective stumbles over may be the work of an earlier step; and not every rank comes here.
            self._fail_if_bad(self.meter.bad_step(all_ranks=False))
            raise DualencError(f"step {step}: {error}") from error
        self.steps, self.batch = step, self.batch + len(group)
        self.batches_done += len(group)
        self._begin_once()
        self.meter.add(step, values)
        self.log.step()

    def _between_steps(self) -> None:
        last, stop = self.steps == self.total_steps, self.update.signals.agreed
        if self._logs_at(self.steps):
            self._check_finite()
            self._write_log()
        if last or _due(self.steps, self.evaluate_every):
            self._check_finite()
            self.evaluation_due = True
            if not stop:  # who is asked to stop has little time: the resumed run evaluates
                self._evaluate_when_due()
                stop = self.update.signals.agree(self.update.device)
        if self.save_every is not None and (last or stop or _due(self.steps, self.save_every)):
            self._check_finite()
            self.checkpoints.save(self.steps, self.state_dict())
        if stop:
            saved = f"its checkpoint is in {self.checkpoints.folder}; go on with --resume"
            if self.save_every is None:
                saved = "nothing is saved, as save_every is null"
            self.log.say(f"stopped by {signal.Signals(stop).name} after step {self.steps}: {saved}")
            raise Stopped(stop)

    def _logs_at(self, step: int) -> bool:
        return step == self.total_steps or step % self.log_every == 0

    def _write_log(self) -> None:
        values = self.meter.average()
        values["epoch"] = self.epoch + 1
        values["learning_rate"] = self._rate
        values["samples_per_second"] = self._samples / max(self._seconds, 1e-9)
        self._seconds, self._samples = 0.0, 0
        self.log.write(self.steps, values)

    def _note_bad(self, group: list[Batch]) -> None:
        for index, reason in (bad for batch in group for bad in batch.bad):
            if not self.bad:
                self.log.say(f"pair {index} is left out: {reason} (further ones are counted)")
            self.bad[index] = reason

    def _check_finite(self) -> None:
        self._fail_if_bad(self.meter.bad_step())

    def _fail_if_bad(self, step: int | None) -> None:
        if step is None:
            return
        rate = self.update.optimizer.param_groups[0]["initial_lr"]
        kept = [] if self._begin else self.checkpoints.complete()  # not those of the run that this one replaces
        raise DualencError(
            f"step {step}: the loss is not finite; lower learning_rate (now {rate:g}), lengthen warmup, set "
            f"max_gradient_norm, or use mixed_precision=no; "
            + (f"the checkpoint {kept[-1][1]} is from before" if kept else "nothing was saved")
        )


_POSITION = ("steps", "epoch", "batch", "batches_done", "evaluation_due")


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _grouped(stream: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Consecutive batches, `size` at a time; the last group of an epoch may be smaller."""
    group: list[Batch] = []
    for batch in stream:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
