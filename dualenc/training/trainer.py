"""The trainer: checks the parts of a training run and puts them together."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualenc.batching.mixture import MixtureBatches
from dualenc.batching.selector import BatchSelector, RandomBatches
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.encoders.batchnorm import waits_for_others
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.encoders.text import TextEncoder
from dualenc.errors import DualencError, nearest
from dualenc.objectives.base import Objective
from dualenc.training.checkpoint import locked_run
from dualenc.training.devices import deterministic_algorithms, place, start_accelerator
from dualenc.training.evaluators import Evaluator
from dualenc.training.hold_out import hold_out
from dualenc.training.loader import explain_killed_worker
from dualenc.training.log import read_metrics
from dualenc.training.loop import Loop
from dualenc.training.mining import check_minable
from dualenc.training.optim import freeze
from dualenc.training.settings import TrainerSettings
from dualenc.training.signals import StopSignals

__all__ = ["Trainer", "TrainingResult", "place", "start_accelerator"]


class TrainingResult(NamedTuple):
    """The outcome of `Trainer.fit`.

    Attributes:
        model_folder: where the model is.
        steps: optimizer steps done.
        loss: mean training loss in the last line of the log; NaN where the objective does not know it.
        before: the evaluator's metrics of the untrained model; empty without an evaluator.
        metrics: the evaluator's metrics of the model in `model_folder`; empty without an evaluator.
        seconds: of this call.
        skipped: how many samples were left out because they could not be read.
    """

    model_folder: Path
    steps: int
    loss: float
    before: dict[str, float]
    metrics: dict[str, float]
    seconds: float
    skipped: int


class Trainer(TrainerSettings):
    """Trains any dual encoder with any objective, on one process or many; its arguments are those of `TrainerSettings`.

        Trainer(output="run", epochs=3).fit(model, pairs, objective)

    N processes train the model that one process trains with the same global batches, up to rounding: gradients,
    the objective's state, batches, augmentation and BatchNorm's statistics are functions of the global batch, on
    GPUs and CPUs. Three things are not: dropout (stochastic depth too), which each process draws for its own part
    of a batch; BatchNorm with chunk_size, over chunks; and, in models with BatchNorm, the gradient of out-of-batch
    items through the batch's statistics, which reaches the own part of it only.

    SIGTERM and SIGUSR1 (what schedulers send) and Ctrl-C end the run after the current step or evaluation, with a
    checkpoint; resuming gives the model of an uninterrupted run, bit for bit. A second Ctrl-C, and the first where
    save_every is None, ends it at once.
    """

    def fit(
        self,
        model: DualEncoder,
        pairs: PairDataset,
        objective: Objective,
        batching: BatchSelector | None = None,
        evaluator: Evaluator | None = None,
        resume: bool = False,
        recipe: Mapping[str, Any] | None = None,
    ) -> TrainingResult:
        """Train, and leave the model in `output/model`.

        Args:
            model: trained in place; ends with the weights of the last step.
            pairs: the training pairs.
            objective: the loss; its learnable parameters are trained too.
            batching: chooses the batches; by default random batches, of a `Mixture` as its weights and `batches` say.
            evaluator: measures the model before, during and after training.
            resume: continue, exactly, from the latest checkpoint in `output`; from the start if there is none.
            recipe: the resolved recipe, for the model card and to recognise checkpoints of other recipes.

        Until the first step is done nothing is written, and a run that is to be overwritten stays.

        Raises:
            DualencError: the folder holds a run already or another run is using it, the checkpoint is of another
                recipe or damaged, the loss is not finite, another process or a data worker is gone, or the arguments
                do not fit one another.
            Stopped: a SystemExit with code 128 + the signal, after SIGTERM or SIGUSR1.
            Interrupted: a KeyboardInterrupt, after Ctrl-C.
        """
        start = time.perf_counter()
        if self.held_out and evaluator is None:
            if batching is not None:
                raise DualencError("batching is for all pairs, and held_out leaves some out; name an evaluator instead")
            pairs, evaluator = hold_out(pairs, self.held_out, self.seed)
        batching = self._batching(pairs, batching)
        self._check_parts(model, pairs, objective, batching, evaluator)
        trackers = [name.strip() for name in (self.tracker or "").split(",") if name.strip()]
        accelerator = start_accelerator(self.mixed_precision, trackers, Path(self.output), self.timeout_minutes)
        with (
            StopSignals(saves=self.save_every is not None) as signals,
            locked_run(self.output, resume=resume, overwrite=self.overwrite),
            deterministic_algorithms(self.deterministic, accelerator.device),
            explain_killed_worker(self.num_workers),
        ):
            model = self._prepare_model(model, pairs, accelerator.device)
            counts = [torch.from_numpy(pairs.pair_counts(side)).to(accelerator.device) for side in SIDES]
            objective.to(accelerator.device).set_counts(*counts)
            loop = Loop(self, accelerator, model, pairs, objective, batching, evaluator, signals, recipe or {})
            try:
                metrics = loop.run(resume)
            finally:
                loop.close()
        loss = _last_loss(Path(self.output) / "metrics.jsonl")
        seconds = time.perf_counter() - start
        return TrainingResult(
            loop.best.folder, loop.steps, loss, loop.best.before, metrics, seconds, skipped=len(loop.all_bad())
        )

    def _batching(self, pairs: PairDataset, batching: BatchSelector | None) -> BatchSelector:
        """The batch selector: the given one, or the default for the data."""
        if self.batch_size > len(pairs):
            raise DualencError(f"batch_size is {self.batch_size} but there are {len(pairs)} pairs; make it smaller")
        if not isinstance(pairs, Mixture) or pairs.is_plain:
            return batching or RandomBatches(len(pairs), self.batch_size, seed=self.seed)
        if batching is not None and not isinstance(batching, MixtureBatches):
            raise DualencError(
                f"data.weights and data.batches say what a batch is made of, which {type(batching).__name__} does not "
                "know; leave batching out, or weigh all sources 1 in mixed batches"
            )
        return batching or MixtureBatches(
            pairs.sizes,
            list(pairs.source_weights.values()),
            self.batch_size,
            self.seed,
            one_source=pairs.batches == "one_source",
            names=list(pairs.sources),
        )

    def _prepare_model(self, model: DualEncoder, pairs: PairDataset, device: torch.device) -> DualEncoder:
        """Freeze, place and compile a model."""
        freeze(model, self.freeze)
        if isinstance(pairs, Mixture) and isinstance(model, TextEncoder):
            model.name_prompts(pairs.prompts)
        model = place(model, device, self.chunk_size)
        if self.compile:
            # A set, as both sides may be one tower.
            for tower in {model.left, model.right}:
                tower.compile(dynamic=True)
        has_mined = pairs.negatives is not None or self.mine_every is not None
        if has_mined and self.chunk_size is None and waits_for_others(model):
            raise DualencError(
                "mined negatives do not go with BatchNorm on several processes, some of which may have none of "
                "them; use one process, or set chunk_size"
            )
        return model

    def _check_parts(
        self,
        model: DualEncoder,
        pairs: PairDataset,
        objective: Objective,
        batching: BatchSelector,
        evaluator: Evaluator | None,
    ) -> None:
        """Refuse parts that do not fit one another, before any work."""
        self._check_evaluator(evaluator)
        self._check_batching(pairs, objective, batching)
        _check_modalities(model, pairs, evaluator)
        if objective.needs_teacher and getattr(pairs, "scores", None) is None:
            raise DualencError(
                f"{objective.name} learns from a teacher, but the data holds no scores; give it mined negatives with "
                "scores (MinedPairs with scores: true), or leave Distilled out"
            )
        if self.mine_every is not None:
            check_minable(pairs, objective)

    def _check_evaluator(self, evaluator: Evaluator | None) -> None:
        if evaluator is None:
            if self.patience is not None:
                raise DualencError("patience counts evaluations, and there is no evaluator; give one, or leave it out")
            return
        # Any callable with a `primary` may be an evaluator.
        names = getattr(evaluator, "metric_names", ())
        if names and evaluator.primary not in names:
            raise DualencError(
                f"evaluator.primary is {evaluator.primary!r}{nearest(evaluator.primary, names)}; choose one of "
                f"{', '.join(names)}"
            )

    def _check_batching(self, pairs: PairDataset, objective: Objective, batching: BatchSelector) -> None:
        if self.batch_size != batching.batch_size:
            raise DualencError(
                f"batch_size is {self.batch_size} for the trainer but {batching.batch_size} for batching; give both "
                "the same"
            )
        if len(pairs) != batching.num_pairs:
            raise DualencError(
                f"num_pairs is {len(pairs)} for the data but {batching.num_pairs} for batching; give both the same"
            )
        remedy = objective.needs_uniform_batches
        if remedy and not batching.uniform:
            chooser = type(batching).__name__
            alternative = "leave batching out"
            if isinstance(batching, MixtureBatches):
                chooser = "the mixture"
                alternative = "weigh all sources 1 in mixed batches"
            raise DualencError(
                f"{chooser} chooses the batches, but {objective.name} as set assumes random ones; give it "
                f"{remedy}, or {alternative}"
            )


def _check_modalities(model: DualEncoder, pairs: PairDataset, evaluator: Evaluator | None) -> None:
    """Refuse images for a tower that encodes text, and the like."""
    of_pairs = {"left": pairs.left_modality, "right": pairs.right_modality}
    of_evaluator = getattr(evaluator, "modalities", {})
    for owner, modalities in (("the pairs", of_pairs), ("the evaluator", of_evaluator)):
        for side in SIDES:
            given = modalities.get(side)
            encoded = model.tower(side).modality
            if given is not None and given != encoded:
                raise DualencError(
                    f"the {side} side of {owner} is {given}, but that of the model encodes {encoded}; choose a model "
                    f"for {given} or other data"
                )


def _last_loss(log: Path) -> float:
    """The loss in the last line of a log that has one; NaN without any."""
    # Objectives that do not know their loss log none, and evaluations have lines of their own.
    for line in reversed(read_metrics(log)):
        if line.get("loss") is not None:
            return float(line["loss"])
    return math.nan
