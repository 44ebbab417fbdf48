"""The trainer: checks the parts of a training run, and runs the training loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualenc.batching.mixture_batches import MixtureBatches
from dualenc.batching.selector import BatchSelector, RandomBatches
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.image_views import ImageViews
from dualenc.encoders.batchnorm import waits_for_others
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.encoders.text import TextEncoder
from dualenc.errors import DualencError
from dualenc.objectives.base import Objective
from dualenc.training.callbacks import Callback
from dualenc.training.checkpoint import locked_run
from dualenc.training.devices import deterministic_algorithms, place_model, start_accelerator
from dualenc.training.evaluators import Evaluator, ImageTextEvaluator, RetrievalEvaluator
from dualenc.training.log import last_loss
from dualenc.training.loop import Loop
from dualenc.training.mined_negatives import check_minable
from dualenc.training.optim import frozen
from dualenc.training.settings import TrainerSettings
from dualenc.training.signals import StopSignals
from dualenc.training.view_evaluator import held_out_images_evaluator

MAX_HELD_OUT = 1000
"""Maximum number of held-out pairs. More would make evaluations slow, and hardly more precise."""
MIN_PAIRS = 100
"""Minimum number of pairs from which a recipe holds some out. Scores on fewer mean little."""
DEFAULT_SHARE = 0.1
"""Share of the pairs that a recipe holds out by default."""
MAX_SHARE_AT_LEAST = 0.3
"""Share of the pairs up to which a caller of `hold_out` may ask for a number of them."""


class TrainingResult(NamedTuple):
    """The result of `Trainer.fit`.

    It unpacks like a tuple.

    Example:
        result = Trainer(output="run").fit(model, pairs, objective)
        result.model_folder  # Path("run/model")

    Attributes:
        model_folder: folder with the saved model.
        steps: number of optimizer steps.
        loss: mean training loss in the last line of the log; NaN if the objective reports none.
        before: metrics of the untrained model; empty without an evaluator.
        metrics: metrics of the saved model; empty without an evaluator.
        seconds: wall-clock time.
        skipped: number of samples skipped as unreadable.
    """

    model_folder: Path
    steps: int
    loss: float
    before: dict[str, float]
    metrics: dict[str, float]
    seconds: float
    skipped: int


class Trainer(TrainerSettings):
    """Trains any dual encoder with any objective, on one process or many.

    Several processes train the same model as one process with the same global batches, up to
    rounding, except for dropout and for BatchNorm with out-of-batch items (docs/design.md).

    SIGTERM, SIGUSR1 (which job schedulers send) and Ctrl-C end the run with a checkpoint, after the
    current step or between two batches of an evaluation, which a resumed run repeats. A resumed run
    gives the model of an uninterrupted one, bit for bit. A second Ctrl-C ends the run at once, as
    does the first one if save_every is None.

    Example:
        trainer = Trainer(output="run", epochs=3)
        result = trainer.fit(model, pairs, InfoNCE())

    The arguments are those of `TrainerSettings`.
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
        callbacks: Sequence[Callback] = (),
    ) -> TrainingResult:
        """Train a model, and save it in `output/model`.

        Args:
            model: model to train in place; it ends with the weights of the last step.
            pairs: the training pairs.
            objective: the objective; its learnable parameters are trained, too.
            batching: batch selector. The default is random batches, which follow the weights and
                `batches` of a `Mixture`.
            evaluator: evaluator of the model before, during and after training.
            resume: True to continue exactly from the latest checkpoint in `output`, or from the
                start if there is none.
            recipe: the resolved recipe, for the model card and to refuse checkpoints of other
                recipes.
            callbacks: callbacks to call after each step and evaluation, see `Callback`.

        Raises:
            DualencError: the parts do not fit together, the data cannot be read, or training fails.
            Stopped: SIGTERM or SIGUSR1 stopped the run. A SystemExit with code 128 + the signal.
            Interrupted: Ctrl-C stopped the run. A KeyboardInterrupt.
        """
        start = time.perf_counter()
        output = Path(self.output)
        if evaluator is None:
            pairs, evaluator = self.hold_out(pairs, batching, is_recipe=recipe is not None)
        batching = self._batching(pairs, batching)
        self._check_parts(model, pairs, objective, batching, evaluator)
        # Better now than after the last step.
        model.check_savable()
        accelerator = start_accelerator(self, output)
        with (
            StopSignals(saves=self.save_every is not None) as signals,
            locked_run(output, resume=resume, overwrite=self.overwrite),
            deterministic_algorithms(self.deterministic, accelerator.device),
            frozen(model, self.freeze),
        ):
            model = self._prepare_model(model, pairs, accelerator.device)
            self._prepare_objective(objective, pairs, accelerator.device)
            loop = Loop(
                self,
                accelerator,
                model,
                pairs,
                objective,
                batching,
                evaluator,
                signals,
                recipe or {},
                callbacks,
            )
            metrics = loop.run(resume)
        return TrainingResult(
            model_folder=loop.best.folder,
            steps=loop.steps,
            loss=last_loss(output / "metrics.jsonl"),
            before=loop.best.before,
            metrics=metrics,
            seconds=time.perf_counter() - start,
            skipped=pairs.skipped + len(loop.all_bad()),
        )

    def hold_out(
        self,
        pairs: PairDataset,
        batching: BatchSelector | None,
        is_recipe: bool,
        least: int = 0,
    ) -> tuple[PairDataset, Evaluator | None]:
        """Return the pairs to train on, and an evaluator of the held-out pairs, if any.

        The pairs to train on keep all items and ids.

        Args:
            pairs: all pairs.
            batching: batch selector of the run, or None.
            is_recipe: True to hold out pairs by default.
            least: number of pairs to hold out where that is more than `held_out`, if it is not more
                than three tenths of all; for a comparison, which needs more than a score.

        Raises:
            DualencError: the settings hold out pairs that cannot be.
        """
        share = self.held_out
        can_split = not isinstance(pairs, Mixture)
        if share is None:
            # A training from a recipe should end with a score.
            by_default = is_recipe and batching is None and can_split and len(pairs) >= MIN_PAIRS
            share = DEFAULT_SHARE if by_default else 0.0
        if share == 0:
            return pairs, None
        if batching is not None:
            raise DualencError(
                "batching is for all pairs, and held_out leaves some out",
                fix="name an evaluator",
            )
        if not can_split:
            raise DualencError(
                "held_out does not apply to a mixture",
                fix="name an evaluator",
            )
        share = max(share, min(least / len(pairs), MAX_SHARE_AT_LEAST))
        rest, held_out = pairs.split(min(share, MAX_HELD_OUT / len(pairs)), self.seed)
        if isinstance(pairs, ImageViews):
            return rest, held_out_images_evaluator(pairs, rest.left_id, held_out.left_id)
        if pairs.left_modality == "image" and pairs.right_modality == "text":
            return rest, ImageTextEvaluator(held_out)
        return rest, RetrievalEvaluator(pairs=held_out)

    def _batching(self, pairs: PairDataset, batching: BatchSelector | None) -> BatchSelector:
        """Return the given batch selector, or the default for the data."""
        if not isinstance(pairs, Mixture) or pairs.is_plain:
            return batching or RandomBatches(len(pairs), self.batch_size, seed=self.seed)
        if batching is not None and not isinstance(batching, MixtureBatches):
            raise DualencError(
                "data.weights and data.batches determine the batches, and "
                f"{type(batching).__name__} ignores them",
                fix="leave batching out, or weight all sources 1 in mixed batches",
            )
        return batching or MixtureBatches(
            pairs.sizes,
            list(pairs.source_weights.values()),
            self.batch_size,
            self.seed,
            one_source=pairs.batches == "one_source",
            names=list(pairs.sources),
        )

    def _prepare_model(
        self, model: DualEncoder, pairs: PairDataset, device: torch.device
    ) -> DualEncoder:
        """Place a model on a device, and compile it if the settings ask for that."""
        if isinstance(pairs, Mixture) and isinstance(model, TextEncoder):
            model.name_prompts(pairs.prompts)
        model = place_model(model, device)
        if self.compile:
            # A set, because both sides may share one tower.
            for tower in {model.left, model.right}:
                tower.compile(dynamic=True)
        has_mined = pairs.negatives is not None or self.mine_every is not None
        if has_mined and waits_for_others(model):
            # Its synchronization would wait for a process whose pairs lack negatives.
            raise DualencError(
                "mined negatives do not work with BatchNorm on several processes",
                fix="use one process, or freeze BatchNorm (freeze=…)",
            )
        return model

    def _prepare_objective(
        self, objective: Objective, pairs: PairDataset, device: torch.device
    ) -> None:
        """Place an objective on a device, and set the number of pairs each item occurs in."""
        left_counts, right_counts = (
            torch.from_numpy(pairs.pair_counts(side)).to(device) for side in SIDES
        )
        objective.to(device).set_counts(left_counts, right_counts)

    def _check_parts(
        self,
        model: DualEncoder,
        pairs: PairDataset,
        objective: Objective,
        batching: BatchSelector,
        evaluator: Evaluator | None,
    ) -> None:
        """Refuse parts that do not fit together, before any work is done."""
        if evaluator is not None and not hasattr(evaluator, "primary"):
            raise DualencError(
                "`primary` is missing, the name of the metric that selects the best weights",
                fix="set it, as in measure.primary = 'accuracy'",
                where="evaluator",
            )
        if self.patience is not None and evaluator is None:
            raise DualencError(
                "patience counts evaluations, and the evaluator is missing",
                fix="give one",
            )
        if (batching.batch_size, batching.num_pairs) != (self.batch_size, len(pairs)):
            raise DualencError(
                f"batching is for batches of {batching.batch_size} of {batching.num_pairs} pairs, "
                f"but batch_size is {self.batch_size} and the data has {len(pairs)} pairs",
                fix="give both the same",
            )
        remedy = objective.remedy_for_other_batches
        if remedy and not batching.uniform:
            raise DualencError(
                f"{type(batching).__name__} chooses the batches, but {objective.name} with these "
                "settings assumes random ones",
                fix=f"give it {remedy}, or leave batching out and weight all sources of a "
                "mixture 1",
            )
        _check_modalities(model, pairs, evaluator)
        _check_views(pairs, objective)
        if self.mine_every is not None:
            check_minable(pairs, objective)


def _check_views(pairs: PairDataset, objective: Objective) -> None:
    """Refuse an objective that would treat the two views of an image as items of two towers."""
    if pairs.views and not objective.views:
        raise DualencError(
            f"the data is two views of each image, but {objective.name} compares left with right "
            "items only",
            fix="give it views=True",
        )


def _check_modalities(model: DualEncoder, pairs: PairDataset, evaluator: Evaluator | None) -> None:
    """Refuse data of another modality than the towers encode, such as images for text."""
    modalities_by_source = {
        "the pairs": {"left": pairs.left_modality, "right": pairs.right_modality},
        "the evaluator": getattr(evaluator, "modalities", {}),
    }
    for source, modalities in modalities_by_source.items():
        for side in SIDES:
            modality = modalities.get(side)
            encoded = model.tower(side).modality
            if modality is not None and modality != encoded:
                raise DualencError(
                    f"the {side} side of {source} is {modality}, but that of the model encodes "
                    f"{encoded}",
                    fix=f"choose a model for {modality} or other data",
                )
