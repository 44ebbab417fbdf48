"""The training loop: one for every model and objective."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector
from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.errors import DualencError
from dualenc.io.files import atomic_path
from dualenc.objectives.base import Objective
from dualenc.recipe.yaml_files import dump_recipe
from dualenc.search.embed.encode import EmbeddingStopped
from dualenc.seeds import seed_everything
from dualenc.training.best import BestModel
from dualenc.training.checkpoint import Checkpoints, clear, fingerprint, flatten
from dualenc.training.evaluators import Evaluator, evaluated_data
from dualenc.training.loader import Batch, BatchLoader
from dualenc.training.log import Meter, RunLog, training_card
from dualenc.training.mined_negatives import NegativeMiner
from dualenc.training.plan import BatchPlan
from dualenc.training.settings import FREE_SETTINGS, TrainerSettings
from dualenc.training.signals import Interrupted, Stopped, StopSignals
from dualenc.training.step import TrainStep

_POSITION = ("steps", "epoch", "batch", "batches_done", "evaluation_due")
_STATEFUL = ("objective", "plan", "best", "meter")


class Loop:
    """Steps through the batches; logs, evaluates and saves on the way; resumes anywhere.

    Nothing is written before the first step is done.
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
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.signals = signals
        self.recipe = recipe
        self.model = model
        # Mining sets the copy's negatives: the caller's pairs stay as they are.
        self.pairs = copy.copy(pairs)
        if not objective.takes_mined:
            self.pairs.negatives = None  # else they would be read and encoded
        self.objective = objective
        self.device = torch.device(accelerator.device.type, accelerator.device.index)
        self.output = Path(settings.output)

        # In the order in which they need one another: the plan gives the number of steps, which the
        # schedule needs.
        self.plan = BatchPlan(batching, len(pairs), settings.seed, self.device)
        self.total_steps = self._count_steps()
        self.loader = self._new_loader()
        self.train_step = TrainStep(
            settings, accelerator, model, objective, self.pairs, self.total_steps, self.device
        )
        self.miner = None
        if settings.mine_every is not None:
            if (
                self.plan.num_steps(settings.mine_every, settings.gradient_accumulation)
                >= self.total_steps
            ):
                raise DualencError(
                    f"mine_every is {settings.mine_every}, and training ends before so many epochs are over; give more "
                    "epochs, or mine beforehand (dualenc mine)"
                )
            precision = accelerator.mixed_precision
            self.miner = NegativeMiner(model, self.pairs, settings, precision, self.device)
        self.best = BestModel(
            model,
            objective,
            evaluator,
            self.output / "model",
            keep_best=settings.keep_best,
            patience=settings.patience,
            card=self._card,
            progress=settings.progress,
        )
        self.log = RunLog(
            self.output / "metrics.jsonl", accelerator, self.total_steps, settings.progress
        )
        if settings.max_steps is not None and settings.epochs is not None:
            self.log.info(f"max_steps={settings.max_steps} overrides epochs={settings.epochs}")
        if pairs.negatives is not None and not objective.takes_mined:
            name = objective.name
            self.log.info(f"{name} takes no mined negatives: those of the data are left out")
        self.meter = Meter(self.device)
        # Last, as it reads all the data: a mistake in the settings is reported before that.
        described = fingerprint(self._described(), model, objective, pairs, batching)
        self.checkpoints = Checkpoints(
            self.output / "checkpoints", settings.keep_checkpoints, described
        )

        self.bad: dict[int, str] = {}
        self.steps = 0
        self.epoch = 0
        self.batch = 0
        self.batches_done = 0
        self.evaluation_due = False
        # The step of the checkpoint; -1 without one.
        self.resumed_at = -1
        self.is_begun = False
        # Whether this rank could read a pair of the epoch; unknown, so taken for granted, of one
        # begun before a resume.
        self.has_read = True
        # Since the last line of the log, for its throughput; and the learning rate of the latest
        # step.
        self._seconds = 0.0
        self._samples = 0
        self._rate = 0.0

    def _count_steps(self) -> int:
        """Optimizer steps of the whole training."""
        settings = self.settings
        if settings.max_steps is not None:
            return settings.max_steps
        epochs = 1 if settings.epochs is None else settings.epochs
        return self.plan.num_steps(epochs, settings.gradient_accumulation)

    def _new_loader(self) -> BatchLoader:
        for side in SIDES:
            self.model.tower(side).prepare.cache_tokens()
        return BatchLoader(
            self.pairs,
            self.model.left.prepare,
            self.model.right.prepare,
            seed=self.settings.seed,
            num_workers=self.settings.num_workers,
            on_error=self.settings.on_error,
            pin_memory=self.device.type == "cuda",
        )

    def _described(self) -> dict[str, Any]:
        """The settings that must be the same for a resumed run to be the same run."""
        settings = asdict(self.settings)
        # What "auto" means depends on the machine.
        settings["mixed_precision"] = self.accelerator.mixed_precision
        # The evaluator may change between two parts of a run: it does not change what is trained.
        parts = {
            name: part for name, part in self.recipe.items() if name not in ("trainer", "evaluator")
        }
        parts["trainer"] = {
            name: value for name, value in settings.items() if name not in FREE_SETTINGS
        }
        # The data may have moved: the fingerprint holds its contents.
        return parts | {"data": _without_paths(parts.get("data"))}

    def run(self, resume: bool) -> dict[str, float]:
        """Train to the last step, from scratch or the latest checkpoint. Returns the metrics of the
        saved model."""
        try:
            return self._run(resume)
        finally:
            self.train_step.items.close()
            self.log.close()

    def _run(self, resume: bool) -> dict[str, float]:
        # Before the checkpoint, which restores the generators that it knows.
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
            self.log.info("evaluate_every has no effect: there is no evaluator")
        # The one before training, or one that was due at the checkpoint's step when a signal came.
        if self.evaluation_due and not self._evaluate():
            self._end(self.signals.agree(self.device))
        while not self.is_finished:
            self._run_epoch()
            if not self.is_finished:
                self.epoch += 1
                self.batch = 0
        # A run that was finished before, or has no steps, has not begun yet.
        self._begin()
        if self.best.out_of_patience:
            if self.epoch == 0:
                self._fail_if_unread()
            self.log.info(
                f"stopped at step {self.steps}: {self.settings.patience} evaluations in a row were not better than "
                f"that of step {self.best.best_step}"
            )
        with self.train_step.averaged():
            return self.best.finish(self.steps, self.log.info)

    @property
    def is_finished(self) -> bool:
        """Whether no step follows."""
        return self.steps >= self.total_steps or self.best.out_of_patience

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on; all ranks call it together."""
        state: dict[str, Any] = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        state |= self.train_step.state_dict()
        if self.miner is not None:
            state["mined"] = self.miner.state_dict()
        state["position"] = {name: getattr(self, name) for name in _POSITION}
        state["bad"] = self.all_bad()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, whatever the number of processes was then."""
        for name in _POSITION:
            setattr(self, name, state["position"][name])
        self.train_step.load_state_dict(state)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        if self.miner is not None:
            self.miner.load_state_dict(state["mined"])
        # A table whose size only the checkpoint knows comes from the CPU.
        self.objective.to(self.device)
        self.bad = dict(state["bad"])
        self.resumed_at = self.steps
        self.log.bar.update(self.steps)

    def all_bad(self) -> dict[int, str]:
        """Reason by pair index of all samples left out so far, on any rank; all ranks call it
        together."""
        reasons: dict[int, str] = {}
        # Ranks read different pairs in each epoch, so several may have met the same one.
        for bad in distributed.gather_objects(self.bad):
            reasons |= bad
        return reasons

    def _card(self, *results: Any) -> dict[str, Any]:
        """`training_card` of the run, by its last three arguments; all ranks call it together."""
        settings = asdict(self.settings)
        card = training_card(
            self.pairs, self.objective, settings, self.recipe, self.best.evaluator, *results
        )
        if skipped := self.pairs.skipped + len(self.all_bad()):
            card["data"] += f" {skipped} bad samples were left out."
        return card

    def _begin(self) -> None:
        """Open the log and write the recipe: after the first step the folder belongs to this
        run."""
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
        """Step through what is left of an epoch."""
        if self.batch == 0:
            self._begin_epoch()
        batches = self.plan.batches(self.epoch)
        clock = time.perf_counter()
        group: list[Batch] = []
        for batch in self.loader.batches(batches, self.epoch, start=self.batch):
            group.append(batch)
            self._note_bad(batch)
            is_last_batch = self.batch + len(group) == len(batches)
            if len(group) < self.settings.gradient_accumulation and not is_last_batch:
                continue
            if is_last_batch or (self.epoch == 0 and self.steps + 1 == self.total_steps):
                self._fail_if_unread()
            try:
                loss, values = self._step(group)
            except DualencError as error:
                # The objective may fail on what an earlier step did; and not every rank fails.
                self._fail_if_bad(self.meter.bad_step(all_ranks=False))
                raise DualencError(f"step {self.steps + 1}: {error}") from error
            self.steps += 1
            self.batch += len(group)
            self.batches_done += len(group)
            self._begin()
            self.meter.add(self.steps, loss, values)
            self.log.bar.update()
            self._seconds += time.perf_counter() - clock
            self._samples += len(group) * batches.shape[1]
            self._after_step()
            clock = time.perf_counter()
            group = []
            if self.is_finished:
                return

    def _begin_epoch(self) -> None:
        """Select the batches of an epoch and mine its negatives, where the settings ask for
        that."""
        self.has_read = False
        self._report("selection", self.plan.start_epoch(self.epoch), self.steps)
        if self.miner is not None and self.miner.is_due(self.epoch):
            # At the first step that they serve: a run resumed before it mines them again, and logs
            # them once.
            self._report("mined", self.miner.mine(), self.steps + 1)

    def _report(self, work: str, report: Mapping[str, float], step: int) -> None:
        """Log what was done for an epoch."""
        if report:
            self.log.write(step, {f"{work}/{name}": value for name, value in report.items()})
            values = ", ".join(f"{name} {value:.3g}" for name, value in report.items())
            self.log.info(f"epoch {self.epoch + 1}, {work}: {values}")

    def _note_bad(self, batch: Batch) -> None:
        self.has_read |= len(batch.indices) > 0
        for index, reason in batch.bad:
            # One line is enough to look into it; a broken folder would print thousands.
            if not self.bad:
                self.log.info(f"pair {index} is left out: {reason} (further ones are counted)")
            self.bad[index] = reason

    def _fail_if_unread(self) -> None:
        """Raise if no pair of the epoch could be read, on any rank; all ranks call it together."""
        if not any(distributed.gather_objects(self.has_read)):
            index, reason = min(self.all_bad().items())
            raise DualencError(
                f"no pair could be read; the first: pair {index}: {reason}; check the data"
            )

    def _step(self, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor | float]]:
        """One optimizer step with the mean gradient of several global batches: this rank's loss,
        and scalars to log."""
        step = self.train_step
        encoded_before = step.items.num_encoded
        # Read before the schedule moves on: the log shows the rate of this step.
        self._rate = step.learning_rate
        outputs = []
        for place, batch in enumerate(batches):
            output, left, right = step.accumulate(batch, self.batches_done + place, len(batches))
            self.plan.observe(batch.indices, left, right, self.steps + 1)
            outputs.append(output)
        loss = torch.stack([output.loss.detach() for output in outputs]).mean()
        values: dict[str, Tensor | float] = {}
        if self._logs_at(self.steps + 1):
            for name in outputs[0].metrics:
                values[name] = torch.stack([output.metrics[name] for output in outputs]).mean()
            values |= {
                f"state/{name}": value for name, value in self.objective.diagnostics().items()
            }
        if self.objective.reports_loss:
            values["loss"] = loss
        if self.objective.needs_encode:
            num_encoded = step.items.num_encoded - encoded_before
            values["items_encoded"] = float(num_encoded * distributed.world_size())
        if (norm := step.update()) is not None:
            values["gradient_norm"] = norm
        return loss, values

    def _after_step(self) -> None:
        """Log, evaluate, save, stop: whatever is due after a step."""
        settings = self.settings
        is_last = self.steps == self.total_steps
        stop = self.signals.agree(self.device)
        if self._logs_at(self.steps):
            self._write_log()
        self.evaluation_due = is_last or _is_due(self.steps, settings.evaluate_every)
        saves = is_last or bool(stop) or _is_due(self.steps, settings.save_every)
        if self.evaluation_due or saves:
            self._fail_if_bad(self.meter.bad_step())
        if saves:
            # Before an evaluation, too, which may fail: a resumed run begins with it.
            self._save()
        # After a signal there is little time.
        if self.evaluation_due and not stop:
            self._evaluate()
            # A signal that came meanwhile counts now; the evaluation that it ended is still due.
            stop = self.signals.agree(self.device)
            if saves or stop or self.best.out_of_patience:
                self._save()
        if stop:
            self._end(stop)

    def _end(self, stop: int) -> NoReturn:
        """Say what a signal has stopped and what is saved, and end the run."""
        saved = f"its checkpoint is in {self.checkpoints.folder}; resume with --resume"
        if self.steps == 0:
            saved = "nothing is saved yet; start it again"
        elif self.settings.save_every is None:
            saved = "nothing is saved, as save_every is null"
        self.log.info(f"stopped by {signal.Signals(stop).name} after step {self.steps}: {saved}")
        raise Interrupted if stop == signal.SIGINT else Stopped(stop)

    def _save(self) -> None:
        """Write a checkpoint, unless the settings want none."""
        if self.settings.save_every is not None:
            self.checkpoints.save(self.steps, self.state_dict())

    def _write_log(self) -> None:
        self._fail_if_bad(self.meter.bad_step())
        values = {**self.meter.average(), "epoch": self.epoch + 1, "learning_rate": self._rate}
        values["samples_per_second"] = self._samples / max(self._seconds, 1e-9)
        self._seconds = 0.0
        self._samples = 0
        self.log.write(self.steps, values)

    def _logs_at(self, step: int) -> bool:
        return step == self.total_steps or step % self.settings.log_every == 0

    def _evaluate(self) -> bool:
        """Measure the model as it is, and log that; False if a signal came, and it remains due."""
        try:
            with self.train_step.averaged():
                metrics = self.best.evaluate(self.steps, stopped=lambda: bool(self.signals.noted))
        except EmbeddingStopped:
            return False
        if metrics:
            self.log.write(
                self.steps, {f"evaluation/{name}": value for name, value in metrics.items()}
            )
            value = f"{self.best.primary} {metrics[self.best.primary]:.4f}"
            data, _ = evaluated_data(self.best.evaluator)
            self.log.info(f"step {self.steps}: {value} on {data}")
        self.evaluation_due = False
        return True

    def _fail_if_bad(self, step: int | None) -> None:
        """Raise if the loss of a step was not finite."""
        if step is None:
            return
        raise DualencError(
            f"step {step}: the loss is not finite; lower learning_rate (now {self.settings.learning_rate:g}), lengthen "
            "warmup, set max_gradient_norm, or use mixed_precision=no; checkpoints are from before"
        )


def _without_paths(part: Any) -> Any:
    """A part of a recipe without its values called path, those of inner parts included."""
    if not isinstance(part, Mapping):
        return part
    return {name: _without_paths(value) for name, value in part.items() if name != "path"}


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
