"""The training loop: the only one, and without a word about any particular objective."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.encoders.batchnorm import waits_for_others
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.files import atomic_path
from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.seeds import seed_everything
from dualenc.training.averages import AveragedWeights
from dualenc.training.checkpoint import Checkpoints, clear, fingerprint, flatten
from dualenc.training.encoding import CachedEncoding, PlainEncoding
from dualenc.training.evaluators import BestModel, Evaluator
from dualenc.training.loader import Batch, BatchLoader, Guide, ItemEncoder
from dualenc.training.log import Meter, RunLog, training_card
from dualenc.training.optim import build_optimizer, build_schedule, trainable_parameters
from dualenc.training.plan import BatchPlan, fresh_embeddings
from dualenc.training.sharding import join_state, split_state
from dualenc.training.signals import StopSignals
from dualenc.types import Inputs, Side

if TYPE_CHECKING:
    from dualenc.training.trainer import Trainer

_POSITION = ("steps", "epoch", "batch", "batches_done", "evaluation_due")
_STATEFUL = ("model", "objective", "optimizer", "schedule", "plan", "best", "meter")
# Settings that the weights do not depend on: a run may be resumed with others.
_FREE = (
    *("output", "num_workers", "save_every", "keep_checkpoints", "log_every"),
    *("tracker", "project", "timeout_minutes", "overwrite", "progress"),
)


class Loop:
    """Steps through the batches; logs, evaluates and saves on the way; resumes anywhere.

    Nothing is written before the first step is done. The arguments are those of `Trainer.fit`, with the trainer itself
    as settings, the accelerator, and what a scheduler has sent, on which every step agrees with the other ranks.
    """

    def __init__(
        self,
        settings: Trainer,
        accelerator: Accelerator,
        model: DualEncoder,
        pairs: PairDataset,
        objective: Objective,
        batching: BatchSelector,
        evaluator: Evaluator | None,
        signals: StopSignals,
        recipe: Mapping[str, Any],
        skeleton: DualEncoder | None = None,
    ) -> None:
        self.settings, self.accelerator, self.signals, self.recipe = settings, accelerator, signals, recipe
        self.model, self.pairs, self.objective = model, pairs, objective
        self.device = torch.device(accelerator.device.type, accelerator.device.index)
        self.output = Path(settings.output)
        self.plan = BatchPlan(
            batching,
            len(pairs),
            self.output / "selection",
            embeddings=settings.selection_embeddings,
            background=settings.selection_background,
            seed=settings.seed,
            device=self.device,
        )
        self.total_steps = settings.max_steps or 0
        if settings.max_steps is None or settings.epochs is not None:
            batches = [self.plan.num_batches(epoch) for epoch in range(settings.epochs or 1)]
            steps = sum(-(-count // settings.gradient_accumulation) for count in batches)
            self.total_steps = min(steps, settings.max_steps or steps)
        self.parameters = trainable_parameters([model, objective])
        self.gradients = distributed.GradientAverage(self.parameters)
        # Gradient caching and sharding make many backward passes, and layers that exchange statistics do so within one.
        several = settings.chunk_size is not None or skeleton is not None
        self.one_backward = not several and not waits_for_others(model)
        self.optimizer = build_optimizer(
            [model, objective],
            settings.optimizer,
            settings.learning_rate,
            settings.weight_decay,
            settings.momentum,
            settings.betas,
            [p for p in model.parameters() if p.dim()] if settings.shard_model else (),
            settings.layer_decay,
        )
        self.averages = None if settings.weight_average is None else AveragedWeights(model, settings.weight_average)
        self.schedule = build_schedule(
            self.optimizer, settings.schedule, self.total_steps, settings.warmup, settings.final_fraction
        )
        self.items = ItemEncoder(model, pairs, seed=settings.seed, on_error=settings.on_error)
        guide = None
        if settings.guide_left is not None and settings.guide_right is not None:
            guide = Guide(pairs, settings.guide_left, settings.guide_right)
        guides = {} if guide is None else guide.identities()
        self.loader = BatchLoader(
            pairs,
            model.left.prepare,
            model.right.prepare,
            seed=settings.seed,
            num_workers=settings.num_workers,
            on_error=settings.on_error,
            pin_memory=self.device.type == "cuda",
            guide=guide,
        )
        card = partial(training_card, pairs, objective, asdict(settings), recipe, evaluator)
        self.best = BestModel(
            model,
            objective,
            evaluator,
            self.output / "model",
            keep_best=settings.keep_best,
            card=card,
            skeleton=skeleton,
        )
        self.log = RunLog(self.output / "metrics.jsonl", accelerator, self.total_steps, settings.progress)
        sources = pairs.sources if isinstance(pairs, Mixture) else {}
        self.meter = Meter(self.device, [f"{kind}/{name}" for kind in ("loss", "batch_estimate") for name in sources])
        described = {name: part for name, part in recipe.items() if name not in ("trainer", "evaluator")}
        described["trainer"] = {name: value for name, value in asdict(settings).items() if name not in _FREE}
        # Checkpoints from before there were these options are still good.
        later: dict[str, Any] = {
            "shard_model": False,
            "layer_decay": 1.0,
            "freeze": (),
            "weight_average": None,
            "patience": None,
        }
        later |= {"guide_left": None, "guide_right": None}
        for name, default in later.items():
            if getattr(settings, name) == default:
                del described["trainer"][name]
        described = fingerprint(described, model, objective, pairs, batching) | guides
        self.checkpoints = Checkpoints(self.output / "checkpoints", settings.keep_checkpoints, described)
        self.bad: dict[int, str] = {}
        self.steps = self.epoch = self.batch = self.batches_done = 0
        self.evaluation_due = self.resumed = self.begun = False
        self._seconds, self._samples, self._rate = 0.0, 0, 0.0

    def run(self, resume: bool) -> dict[str, float]:
        """Train to the last step, from the start or the latest checkpoint; the metrics of what the model folder holds.

        Raises:
            Stopped, Interrupted: a signal has asked for it; after a checkpoint of the step that was under way.
        """
        seed_everything(self.settings.seed, distributed.rank())
        state = self.checkpoints.load_latest(self.settings.seed) if resume else None
        if state is not None:
            self.load_state_dict(state)
            self.log.say(f"resuming at step {self.steps} of {self.total_steps}")
        else:
            if resume:
                self.log.say(f"{self.checkpoints.folder}: no checkpoint to resume from; starting at step 0")
            self._evaluate()
        self.model.train()
        self.objective.train()
        if self.evaluation_due:
            self._evaluate()
        while self.steps < self.total_steps and not self.gave_up:
            self._run_epoch()
            if self.steps < self.total_steps and not self.gave_up:
                self.epoch, self.batch = self.epoch + 1, 0
        self._begin()
        if self.gave_up:
            self.log.say(
                f"stopped at step {self.steps}: {self.best.worse} evaluations in a row were not better than that of "
                f"step {self.best.best_step}"
            )
        with self._averaged():
            return self.best.finish(self.steps, self.checkpoints, self.log.say)

    @property
    def gave_up(self) -> bool:
        """Whether as many evaluations as there is patience for were no better than the best one."""
        patience = self.settings.patience
        return patience is not None and bool(self.best.best) and self.best.worse >= patience

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.averages is None else self.averages.applied()

    def close(self) -> None:
        """Finish what runs in the background: progress bar, trackers, a selection of batches."""
        self.plan.close()
        self.log.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on; all ranks call it together."""
        scaler = self.accelerator.scaler
        divided: dict[str, Any] = {}
        if self.settings.shard_model:
            divided, divided["shards"] = split_state(self.model, self.optimizer, self.averages)
        elif self.averages is not None:
            divided["averages"] = self.averages.state_dict()
        return {
            "position": {name: getattr(self, name) for name in _POSITION},
            **{name: getattr(self, name).state_dict() for name in _STATEFUL if name not in divided},
            **divided,
            "scaler": None if scaler is None else scaler.state_dict(),
            "bad": self.all_bad(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, whatever the number of processes was then."""
        for name in _POSITION:
            setattr(self, name, state["position"][name])
        if "shards" in state:
            join_state(self.model, self.optimizer, self.averages, state, state["shards"])
        elif self.averages is not None:
            self.averages.load_state_dict(state["averages"])
        for name in _STATEFUL:
            if "shards" not in state or name not in ("model", "optimizer"):
                getattr(self, name).load_state_dict(state[name])
        self.objective.to(self.device)  # a table whose size only the checkpoint knows comes from the CPU
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.bad = dict(state["bad"])
        self.resumed = True
        self.log.restart_at(self.steps)

    def all_bad(self) -> dict[int, str]:
        """Reason by pair index of all samples left out so far, on any rank; all ranks call it together."""
        return {index: why for bad in distributed.gather_objects(self.bad) for index, why in bad.items()}

    def _begin(self) -> None:
        """The first step is done: now the folder is this run's, and what it has to tell is written."""
        if self.begun:
            return
        self.begun = True
        if self.settings.overwrite and not self.resumed:
            clear(self.output)
        self.plan.remove_leftovers()
        self.log.open(self.settings.project, flatten(asdict(self.settings)))
        if self.recipe and distributed.is_main():
            with atomic_path(self.output / "recipe.yaml") as part:
                text = yaml.safe_dump(dict(self.recipe), sort_keys=False, allow_unicode=True)
                part.write_text(text, encoding="utf-8")

    def _run_epoch(self) -> None:
        """Have batches and neighbours selected where an epoch begins, and step through what is left of it."""
        accumulation = self.settings.gradient_accumulation
        if self.batch == 0:

            def fresh() -> tuple[np.ndarray, np.ndarray]:
                return fresh_embeddings(self.model, self.loader, self.device, self.accelerator.autocast)

            last = accumulation * (self.total_steps - self.steps) <= self.plan.num_batches(self.epoch)
            report = self.plan.start_epoch(self.epoch, self.steps, fresh, last)
            if report:
                self.log.write(self.steps, {f"selection/{name}": value for name, value in report.items()})
                self.log.say(
                    f"epoch {self.epoch + 1}: batches selected in {report['seconds']:.1f} s from embeddings "
                    f"{report['staleness']:.0f} steps old; loss {report['loss']:.3f}, random "
                    f"{report['random_loss']:.3f}"
                )
        batches = self.plan.batches(self.epoch)
        clock = time.perf_counter()
        group: list[Batch] = []
        for batch in self.loader.batches(batches, self.epoch, start=self.batch):
            group.append(batch)
            for index, reason in batch.bad:
                if not self.bad:
                    self.log.say(f"pair {index} is left out: {reason} (further ones are counted)")
                self.bad[index] = reason
            if len(group) < accumulation and self.batch + len(group) < len(batches):
                continue
            try:
                loss, values = self._step(group)
            except DualencError as error:
                # What the objective stumbles over may be the work of an earlier step; and not every rank comes here.
                self._fail_if_bad(self.meter.bad_step(all_ranks=False))
                raise DualencError(f"step {self.steps + 1}: {error}") from error
            self.steps, self.batch = self.steps + 1, self.batch + len(group)
            self.batches_done += len(group)
            self._begin()
            self.meter.add(self.steps, loss, values)
            self.log.step()
            self._seconds += time.perf_counter() - clock
            self._samples += len(group) * batches.shape[1]
            self._between_steps()
            clock, group = time.perf_counter(), []
            if self.steps == self.total_steps or self.gave_up:
                return

    def _step(self, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor | float]]:
        """One optimizer step with the mean gradient of some global batches, of which these are this rank's parts.

        Returns:
            This rank's loss, and scalars to log: that loss, if the objective knows its value; at steps that are logged
            the objective's metrics (they cost a look at all similarities); gradient_norm when clipped; and for
            objectives that ask for items items_encoded, so that its mean over ranks is their sum.
        """
        scaler, limit = self.accelerator.scaler, self.settings.max_gradient_norm
        encoded_before, common = self.items.num_encoded, (self.model, self.device, self.accelerator.autocast)
        keep, chunk_size = self.objective.needs_encode, self.settings.chunk_size
        self._rate = self.optimizer.param_groups[0]["lr"]
        self.objective.set_progress(self.steps / self.total_steps)
        outputs: list[ObjectiveOutput] = []
        for number, batch in enumerate(batches, start=self.batches_done):
            encoding = PlainEncoding(*common, keep) if chunk_size is None else CachedEncoding(*common, keep, chunk_size)
            parts: list[tuple[Side, Inputs]] = [("left", batch.left), ("right", batch.right)]
            if batch.negatives is not None or (encoding.in_step and self.pairs.negatives is not None):
                parts.append(("right", batch.negatives or {}))
            left, right, *mined = encoding.encode_batch(*parts)
            output = self.objective(
                left,
                right,
                batch.left_id.to(self.device),
                batch.right_id.to(self.device),
                self.items.bind(encoding, number),
                negatives=None if batch.negatives is None else mined[0],
                **batch.arguments(self.device, self.objective.needs_teacher),
            )
            loss = output.loss / len(batches)
            if self.one_backward and len(outputs) + 1 == len(batches):
                self.gradients.expect()
            encoding.backward(loss if scaler is None else scaler.scale(loss))
            self.plan.observe(batch.indices, left, right, self.steps + 1)
            self._note_sources(batch, output)
            outputs.append(output)

        values: dict[str, Tensor | float] = {}
        if self._logs_at(self.steps + 1):
            for name in outputs[0].metrics:
                values[name] = torch.stack([output.metrics[name] for output in outputs]).mean()
        loss = torch.stack([output.loss.detach() for output in outputs]).mean()
        if self.objective.reports_loss:
            values["loss"] = loss
        if self._logs_at(self.steps + 1):
            values |= {f"state/{name}": value for name, value in self.objective.diagnostics().items()}
        if self.objective.needs_encode:
            values["items_encoded"] = float(self.items.num_encoded - encoded_before) * distributed.world_size()

        # Averaged before unscaling: an overflow on one rank is then an overflow on all, and all skip the step.
        self.signals.agreed = self.gradients.finish(self.signals.noted)
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if limit is not None:
            values["gradient_norm"] = distributed.clip_gradients(self.parameters, limit)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        with warnings.catch_warnings():  # a step skipped by the scaler still advances the schedule
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.averages is not None:
            self.averages.update()
        return loss, values

    def _note_sources(self, batch: Batch, output: ObjectiveOutput) -> None:
        """Of a mixture: the losses of each source's pairs; of an objective that does not know them its batches'
        estimates, at steps that are logged."""
        if not isinstance(self.pairs, Mixture):
            return
        numbers = torch.from_numpy(self.pairs.source_of(batch.indices.numpy()))
        per_anchor: Tensor | None = output.per_anchor
        if not self.objective.reports_loss:
            numbers, per_anchor = numbers + len(self.pairs.sources), None
            if self._logs_at(self.steps + 1):
                per_anchor = getattr(output.metrics, "per_anchor", None)
        if per_anchor is not None:
            self.meter.add_pairs(numbers, per_anchor)

    def _between_steps(self) -> None:
        """Log, evaluate, save, stop: whatever is due after a step."""
        settings, last, stop = self.settings, self.steps == self.total_steps, self.signals.agreed
        if self._logs_at(self.steps):
            self._fail_if_bad(self.meter.bad_step())
            values = {**self.meter.average(), "epoch": self.epoch + 1, "learning_rate": self._rate}
            values["samples_per_second"] = self._samples / max(self._seconds, 1e-9)
            self._seconds, self._samples = 0.0, 0
            self.log.write(self.steps, values)
        if last or _due(self.steps, settings.evaluate_every):
            self._fail_if_bad(self.meter.bad_step())
            self.evaluation_due = True
            if not stop:  # who is asked to stop has little time: the resumed run evaluates
                self._evaluate()
                stop = self.signals.agree(self.device)
        if settings.save_every is not None and (last or stop or self.gave_up or _due(self.steps, settings.save_every)):
            self._fail_if_bad(self.meter.bad_step())
            self.checkpoints.save(self.steps, self.state_dict())
        if stop:
            saved = f"its checkpoint is in {self.checkpoints.folder}; go on with --resume"
            if settings.save_every is None:
                saved = "nothing is saved, as save_every is null"
            self.log.say(f"stopped by {signal.Signals(stop).name} after step {self.steps}: {saved}")
            raise self.signals.stop()

    def _logs_at(self, step: int) -> bool:
        return step == self.total_steps or step % self.settings.log_every == 0

    def _evaluate(self) -> None:
        """Measure the model as it is, and log that."""
        with self._averaged():
            metrics = self.best.evaluate(self.steps)
        if metrics:
            self.log.write(self.steps, {f"evaluation/{name}": value for name, value in metrics.items()})
            self.log.say(f"step {self.steps}: {self.best.primary} {metrics[self.best.primary]:.4f}")
        observed = getattr(self.best.evaluator, "observed", None)
        if observed is not None:
            self.log.write_observed(self.steps, observed.to_plain())
        self.evaluation_due = False

    def _fail_if_bad(self, step: int | None) -> None:
        if step is None:
            return
        rate = self.optimizer.param_groups[0]["initial_lr"]
        kept = self.checkpoints.complete() if self.begun else []  # not those of the run that this one replaces
        raise DualencError(
            f"step {step}: the loss is not finite; lower learning_rate (now {rate:g}), lengthen warmup, set "
            f"max_gradient_norm, or use mixed_precision=no; "
            + (f"the checkpoint {kept[-1][1]} is from before" if kept else "nothing was saved")
        )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
