"""The training loop, shared by all models and objectives."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector
from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.errors import DualencError
from dualenc.io.cpus import usable_workers
from dualenc.io.files import atomic_path
from dualenc.objectives.base import Objective
from dualenc.recipe.yaml_files import dump_recipe
from dualenc.search.embed.encode import EmbeddingStopped
from dualenc.seeds import seed_everything
from dualenc.training.best import BestModel
from dualenc.training.callbacks import Callback, CallbackRunner
from dualenc.training.checkpoint import Checkpoints, clear, fingerprint, flatten
from dualenc.training.evaluators import Evaluator, evaluated_data
from dualenc.training.loader import BatchLoader, LoadedBatch
from dualenc.training.log import Meter, RunLog, training_card
from dualenc.training.mined_negatives import NegativeMiner
from dualenc.training.plan import BatchPlan
from dualenc.training.settings import FREE_SETTINGS, TrainerSettings
from dualenc.training.signals import Interrupted, Stopped, StopSignals
from dualenc.training.step import TrainStep

_POSITION = ("steps", "epoch", "batch", "batches_done", "evaluation_due")
_STATEFUL = ("objective", "plan", "best", "meter")


class Loop:
    """Steps through the batches, and logs, evaluates and saves checkpoints on the way.

    A run can be resumed after any step. Nothing is written before the first step is done.

    Args:
        settings: settings of the run.
        accelerator: accelerator of the run.
        model: the model in training, on the device of this rank.
        pairs: the training pairs.
        objective: the objective, on the device of this rank.
        batching: the batch selector.
        evaluator: the evaluator, or None.
        signals: the signal handlers of the run.
        recipe: the resolved recipe; empty without one.
        callbacks: callbacks to call after steps and evaluations.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        accelerator: Accelerator,
        model: DualEncoder,
        pairs: PairDataset,
        objective: Objective,
        batching: BatchSelector,
        evaluator: Evaluator | None,
        signals: StopSignals,
        recipe: Mapping[str, Any],
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.signals = signals
        self.recipe = recipe
        self.callbacks = CallbackRunner(callbacks)
        self.model = model
        # A copy, because mining replaces its negatives and must not change the caller's pairs.
        self.pairs = copy.copy(pairs)
        if not objective.takes_mined:
            # Otherwise they would be read and encoded for nothing.
            self.pairs.negatives = None
        self.objective = objective
        self.batching = batching
        self.device = torch.device(accelerator.device.type, accelerator.device.index)
        self.output = Path(settings.output)
        self._set_start()
        self._build_parts(evaluator)
        self._log_ignored(pairs)
        # Last, because it reads all the data: mistakes in the settings are reported before that.
        described = fingerprint(self._described(), model, objective, pairs, batching)
        folder = self.output / "checkpoints"
        self.checkpoints = Checkpoints(folder, settings.keep_checkpoints, described)

    def _set_start(self) -> None:
        """Set the position and counters of a run that has not begun."""
        self.steps = 0
        self.epoch = 0
        self.batch = 0
        self.batches_done = 0
        self.evaluation_due = False
        self.bad: dict[int, str] = {}
        # The step of the checkpoint; -1 without one.
        self.resumed_at = -1
        self.is_begun = False
        # True once this rank has read a pair in this epoch. After a resume in the middle of an
        # epoch that is unknown, so assume True.
        self.has_read = True
        # Since the last line of the log, for the throughput.
        self._seconds = 0.0
        self._samples = 0
        # Learning rate of the latest step.
        self._rate = 0.0

    def _build_parts(self, evaluator: Evaluator | None) -> None:
        """Create plan, loader, step, miner, evaluation and log, each from the ones before it."""
        settings = self.settings
        self.plan = BatchPlan(self.batching, len(self.pairs), settings.seed, self.device)
        # The learning rate schedule depends on the number of steps, and that on the plan.
        self.total_steps = self._count_steps()
        self.loader = self._new_loader()
        self.train_step = TrainStep(
            settings,
            self.accelerator,
            self.model,
            self.objective,
            self.pairs,
            self.total_steps,
            self.device,
        )
        self.miner = self._new_miner()
        self.best = BestModel(
            self.model,
            self.objective,
            evaluator,
            self.output / "model",
            keep_best=settings.keep_best,
            patience=settings.patience,
            card=self._card,
            progress=settings.progress,
        )
        path = self.output / "metrics.jsonl"
        self.log = RunLog(path, self.accelerator, self.total_steps, settings.progress)
        self.meter = Meter(self.device)

    def _count_steps(self) -> int:
        """Return the number of optimizer steps of the whole training."""
        settings = self.settings
        if settings.max_steps is not None:
            return settings.max_steps
        epochs = 1 if settings.epochs is None else settings.epochs
        return self.plan.num_steps(epochs, settings.gradient_accumulation)

    def _new_loader(self) -> BatchLoader:
        for side in SIDES:
            # Texts come again in every epoch. The cache must exist before workers are forked.
            self.model.tower(side).prepare.cache_tokens()
        return BatchLoader(
            self.pairs,
            self.model.left.prepare,
            self.model.right.prepare,
            seed=self.settings.seed,
            num_workers=usable_workers(self.settings.num_workers),
            on_error=self.settings.on_error,
            pin_memory=self.device.type == "cuda",
        )

    def _new_miner(self) -> NegativeMiner | None:
        """Return the miner of hard negatives, if the settings ask for one."""
        settings = self.settings
        if settings.mine_every is None:
            return None
        # A run that never gets to mine is a mistake, not a preference.
        steps_before = self.plan.num_steps(settings.mine_every, settings.gradient_accumulation)
        if steps_before >= self.total_steps:
            raise DualencError(
                f"mine_every is {settings.mine_every}, and training ends before that many epochs "
                "are over",
                fix="give more epochs, or mine beforehand (dualenc mine)",
            )
        precision = self.accelerator.mixed_precision
        return NegativeMiner(self.model, self.pairs, settings, precision, self.device)

    def _log_ignored(self, pairs: PairDataset) -> None:
        """Log settings and data that this run does not use."""
        settings = self.settings
        if settings.max_steps is not None and settings.epochs is not None:
            self.log.info(f"max_steps={settings.max_steps} overrides epochs={settings.epochs}")
        if pairs.negatives is not None and not self.objective.takes_mined:
            self.log.info(
                f"{self.objective.name} takes no mined negatives: those of the data are left out"
            )

    def _described(self) -> dict[str, Any]:
        """Return the settings that must stay the same when the run is resumed."""
        settings = asdict(self.settings)
        # "auto" resolves differently per machine, so record the resolved value.
        settings["mixed_precision"] = self.accelerator.mixed_precision
        # Another evaluator does not change the weights after a step, so it is left out.
        parts = {
            name: part for name, part in self.recipe.items() if name not in ("trainer", "evaluator")
        }
        parts["trainer"] = {
            name: value for name, value in settings.items() if name not in FREE_SETTINGS
        }
        # The data may have moved. The fingerprint covers its contents.
        parts["data"] = _without_paths(parts.get("data"))
        return parts

    def run(self, resume: bool) -> dict[str, float]:
        """Train to the last step.

        Args:
            resume: True to continue from the latest checkpoint, if there is one.

        Returns:
            The metrics of the saved model.
        """
        try:
            return self._run(resume)
        finally:
            self.train_step.items.close()
            self.log.close()

    def _run(self, resume: bool) -> dict[str, float]:
        # Before the checkpoint is loaded, which restores the generators of its ranks.
        seed_everything(self.settings.seed, distributed.rank())
        state = self.checkpoints.load_latest(self.settings.seed) if resume else None
        if state is not None:
            self.load_state_dict(state)
            self.log.info(f"resuming at step {self.steps} of {self.total_steps}")
        else:
            if resume:
                self.log.info(
                    f"{self.checkpoints.folder}: no checkpoint to resume; starting at step 0"
                )
            self.evaluation_due = True
        self.model.train()
        self.objective.train()
        if self.best.evaluator is None and self.settings.evaluate_every is not None:
            self.log.info("evaluate_every is ignored without an evaluator")
        # Either the evaluation before training, or the one that a signal interrupted.
        if self.evaluation_due and not self._evaluate():
            self._end(self.signals.agree(self.device))
        while not self.is_finished:
            self._run_epoch()
            if not self.is_finished:
                self.epoch += 1
                self.batch = 0
        # Also for a run without steps, or one that was finished before.
        self._begin()
        if self.best.out_of_patience:
            # An early stop may come before the end of the first epoch, where this is checked.
            if self.epoch == 0:
                self._fail_if_unread()
            self.log.info(
                f"stopped at step {self.steps}: {self.settings.patience} evaluations in a row were "
                f"not better than that of step {self.best.best_step}"
            )
        with self.train_step.averaged():
            return self.best.finish(self.steps, self.log.info)

    @property
    def is_finished(self) -> bool:
        """True if no step follows."""
        return self.steps >= self.total_steps or self.best.out_of_patience

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rest of the run depends on. All ranks call it together."""
        state: dict[str, Any] = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        state |= self.train_step.state_dict()
        if self.miner is not None:
            state["mined"] = self.miner.state_dict()
        state["position"] = {name: getattr(self, name) for name in _POSITION}
        state["bad"] = self.all_bad()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, on any number of processes."""
        for name in _POSITION:
            setattr(self, name, state["position"][name])
        self.train_step.load_state_dict(state)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        if self.miner is not None:
            self.miner.load_state_dict(state["mined"])
        # The objective may have replaced a table by one of the checkpoint's size, on the CPU.
        self.objective.to(self.device)
        self.bad = dict(state["bad"])
        self.resumed_at = self.steps
        # Not by `update`, which would count them as steps of this process.
        self.log.bar.initial = self.log.bar.n = self.steps

    def all_bad(self) -> dict[int, str]:
        """Return the reason for each pair skipped so far, by index. All ranks call it together."""
        reasons: dict[int, str] = {}
        # Merged by index: each epoch divides the pairs differently, so ranks may share some.
        for bad in distributed.gather_objects(self.bad):
            reasons |= bad
        return reasons

    def _card(self, *results: Any) -> dict[str, Any]:
        """Return the `training_card` for (before, metrics, step). All ranks call it together."""
        settings = asdict(self.settings)
        card = training_card(
            self.pairs, self.objective, settings, self.recipe, self.best.evaluator, *results
        )
        skipped = self.pairs.skipped + len(self.all_bad())
        if skipped:
            card["data"] += f" {skipped} bad samples were left out."
        return card

    def _begin(self) -> None:
        """Open the log and write the recipe, if not done yet."""
        # Called after the first step, not before: from then on the folder belongs to this run.
        if self.is_begun:
            return
        self.is_begun = True
        if self.settings.overwrite and self.resumed_at < 0:
            clear(self.output)
        self.log.open(self.settings.project, flatten(asdict(self.settings)), self.resumed_at)
        if self.recipe and distributed.is_main():
            with atomic_path(self.output / "recipe.yaml") as part:
                part.write_text(dump_recipe(self.recipe), encoding="utf-8")

    def _run_epoch(self) -> None:
        """Step through the rest of an epoch."""
        if self.batch == 0:
            self._begin_epoch()
        batches = self.plan.selected
        if batches is None:
            batches = np.asarray(self.batching.select(self.epoch), dtype=np.int64)
        if not self.is_begun:
            # What came before the first step, such as an evaluation, says nothing about the others.
            self.log.bar.unpause()
        clock = time.perf_counter()
        group: list[LoadedBatch] = []
        for batch in self.loader.batches(batches, self.epoch, start=self.batch):
            group.append(batch)
            self._note_bad(batch)
            is_last_batch = self.batch + len(group) == len(batches)
            if len(group) < self.settings.gradient_accumulation and not is_last_batch:
                continue
            if is_last_batch or (self.epoch == 0 and self.steps + 1 == self.total_steps):
                self._fail_if_unread()
            loss, values = self._step(group)
            self.steps += 1
            self.batch += len(group)
            self.batches_done += len(group)
            self._begin()
            self.meter.add(self.steps, loss, values)
            self.log.bar.update()
            # Evaluations, checkpoints and callbacks do not count as training time.
            self._seconds += time.perf_counter() - clock
            self._samples += len(group) * batches.shape[1]
            position = {"epoch": self.epoch + 1, "learning_rate": self._rate}
            self.callbacks.after_step(self.steps, {**values, **position})
            self._after_step()
            clock = time.perf_counter()
            group = []
            if self.is_finished:
                return

    def _begin_epoch(self) -> None:
        """Select the batches of an epoch, and mine negatives for it if that is due."""
        self.has_read = False
        self._report("selection", self.plan.start_epoch(self.epoch), self.steps)
        if self.miner is not None and self.miner.is_due(self.epoch):
            # Logged at the first step that uses them. A run that resumes before that step mines
            # again, and its log drops the later lines.
            self._report("mined", self.miner.mine(), self.steps + 1)

    def _report(self, work: str, report: Mapping[str, float], step: int) -> None:
        """Log the work done for an epoch.

        Args:
            work: kind of work, which prefixes the names in the log.
            report: numbers by name; empty if nothing was done.
            step: number of the step to log them at.
        """
        if not report:
            return
        self.log.write(step, {f"{work}/{name}": value for name, value in report.items()})
        values = ", ".join(f"{name} {value:.3g}" for name, value in report.items())
        self.log.info(f"epoch {self.epoch + 1}, {work}: {values}")

    def _note_bad(self, batch: LoadedBatch) -> None:
        """Remember the unreadable pairs of a batch."""
        self.has_read |= len(batch.indices) > 0
        for index, reason in batch.bad:
            # Only the first is logged: a broken folder would print thousands of lines.
            if not self.bad:
                self.log.info(f"pair {index} is left out: {reason} (further ones are counted)")
            self.bad[index] = reason

    def _fail_if_unread(self) -> None:
        """Raise if no rank could read a pair of the epoch. All ranks call it together."""
        if any(distributed.gather_objects(self.has_read)):
            return
        index, reason = min(self.all_bad().items())
        raise DualencError(
            f"no pair could be read; the first: pair {index}: {reason}",
            fix="check the data",
        )

    def _step(self, batches: list[LoadedBatch]) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Take an optimizer step. Returns the loss of this rank, and scalars to log."""
        try:
            return self._update(batches)
        except DualencError as error:
            # An objective may fail because an earlier loss was not finite; report that instead.
            # Not every rank may have failed, so ask only this one.
            self._fail_if_bad(self.meter.bad_step(all_ranks=False))
            raise DualencError(str(error), where=f"step {self.steps + 1}") from error

    def _update(self, batches: list[LoadedBatch]) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Update the weights with the mean gradient of several global batches."""
        step = self.train_step
        encoded_before = step.items.num_encoded
        # Read before the schedule moves on, so that the log shows the rate of this step.
        self._rate = step.learning_rate
        outputs = []
        for place, batch in enumerate(batches):
            output, left, right = step.accumulate(batch, self.batches_done + place, len(batches))
            if self.batching.needs_embeddings:
                self.plan.observe(batch.indices, left, right, self.steps + 1)
            outputs.append(output)
        loss = torch.stack([output.loss.detach() for output in outputs]).mean()
        values: dict[str, Tensor | float] = {}
        # Diagnostics cost kernels, so they are computed only for lines of the log.
        if self._logs_at(self.steps + 1):
            for name in outputs[0].metrics:
                values[name] = torch.stack([output.metrics[name] for output in outputs]).mean()
            for name, value in self.objective.diagnostics().items():
                values[f"state/{name}"] = value
        if self.objective.reports_loss:
            values["loss"] = loss
        if self.objective.needs_encode:
            num_encoded = step.items.num_encoded - encoded_before
            # The log averages over ranks, and this should be a total.
            values["items_encoded"] = float(num_encoded * distributed.world_size())
        norm = step.update()
        if norm is not None:
            values["gradient_norm"] = norm
        return loss, values

    def _after_step(self) -> None:
        """Log, evaluate, save a checkpoint or stop, whichever is due after a step."""
        settings = self.settings
        is_last = self.steps == self.total_steps
        stop = self.signals.agree(self.device)
        if self._logs_at(self.steps):
            self._write_log()
        self.evaluation_due = is_last or _is_due(self.steps, settings.evaluate_every)
        saves = is_last or bool(stop) or _is_due(self.steps, settings.save_every)
        if self.evaluation_due or saves:
            # Never evaluate or save weights that a bad loss has ruined.
            self._fail_if_bad(self.meter.bad_step())
        if saves:
            # Also before an evaluation, which may fail. A resumed run then starts with it.
            self._save()
        # After a signal time is short: skip the evaluation.
        if self.evaluation_due and not stop:
            self._evaluate()
            # A signal may have interrupted the evaluation, which then remains due.
            stop = self.signals.agree(self.device)
            if saves or stop or self.best.out_of_patience:
                self._save()
        if stop:
            self._end(stop)

    def _end(self, stop: int) -> NoReturn:
        """Log that a signal stopped the run and what was saved, and end the run."""
        saved = f"its checkpoint is in {self.checkpoints.folder}; resume with --resume"
        if self.steps == 0:
            saved = "nothing is saved yet; start it again"
        elif self.settings.save_every is None:
            saved = "nothing is saved, as save_every is null"
        self.log.info(f"stopped by {signal.Signals(stop).name} after step {self.steps}: {saved}")
        raise Interrupted if stop == signal.SIGINT else Stopped(stop)

    def _save(self) -> None:
        """Write a checkpoint, unless checkpoints are disabled."""
        if self.settings.save_every is not None:
            self.checkpoints.save(self.steps, self.state_dict())

    def _write_log(self) -> None:
        """Write a line of the log."""
        # Losses are checked here, where the host waits for the device anyway.
        self._fail_if_bad(self.meter.bad_step())
        values = self.meter.average()
        values["epoch"] = self.epoch + 1
        values["learning_rate"] = self._rate
        values["samples_per_second"] = self._samples / max(self._seconds, 1e-9)
        self._seconds = 0.0
        self._samples = 0
        self.log.write(self.steps, values)

    def _logs_at(self, step: int) -> bool:
        return step == self.total_steps or step % self.settings.log_every == 0

    def _evaluate(self) -> bool:
        """Evaluate the current model. Returns False if a signal interrupted the evaluation."""
        try:
            with self.train_step.averaged():
                metrics = self.best.evaluate(self.steps, stopped=lambda: bool(self.signals.noted))
        except EmbeddingStopped:
            return False
        self.evaluation_due = False
        if metrics:
            # Before the line in the log: a resumed run repeats an evaluation whose callback failed.
            self.callbacks.after_evaluation(self.steps, metrics)
            logged = {f"evaluation/{name}": value for name, value in metrics.items()}
            self.log.write(self.steps, logged)
            value = f"{self.best.primary} {metrics[self.best.primary]:.4f}"
            name, _ = evaluated_data(self.best.evaluator)
            data = getattr(self.best.evaluator, "source", "") or name
            self.log.info(f"step {self.steps}: {value} on {data}")
        return True

    def _fail_if_bad(self, step: int | None) -> None:
        """Raise an error if the loss of a step was not finite.

        Args:
            step: number of the first such step, or None.
        """
        if step is None:
            return
        raise DualencError(
            "the loss is not finite",
            fix=f"lower learning_rate (now {self.settings.learning_rate:g}), lengthen warmup, set "
            "max_gradient_norm, or use mixed_precision=no; checkpoints are from before",
            where=f"step {step}",
        )


def _without_paths(part: Any) -> Any:
    """Return a part of a recipe without any values named path, also in nested parts."""
    if not isinstance(part, Mapping):
        return part
    return {name: _without_paths(value) for name, value in part.items() if name != "path"}


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
