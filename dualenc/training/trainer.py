"""The trainer: checks the parts of a training run and puts them together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualenc.batching.mixture_batches import MixtureBatches
from dualenc.batching.selector import BatchSelector, RandomBatches
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.encoders.batchnorm import waits_for_others
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.encoders.text import TextEncoder
from dualenc.errors import DualencError
from dualenc.objectives.base import Objective
from dualenc.training.checkpoint import locked_run
from dualenc.training.devices import deterministic_algorithms, place_model, start_accelerator
from dualenc.training.evaluators import Evaluator, ImageTextEvaluator, RetrievalEvaluator
from dualenc.training.log import last_loss
from dualenc.training.loop import Loop
from dualenc.training.mined_negatives import check_minable
from dualenc.training.optim import frozen
from dualenc.training.settings import TrainerSettings
from dualenc.training.signals import StopSignals

MAX_HELD_OUT = 1000
"""More pairs would make evaluation slow and not much more precise."""
MIN_PAIRS = 100
"""Of fewer pairs a recipe holds none out: too few would be left for training and for a meaningful
number."""
DEFAULT_SHARE = 0.1


class TrainingResult(NamedTuple):
    """The outcome of `Trainer.fit`.

    Attributes:
        loss: mean training loss in the last line of the log; NaN where the objective does not know
            it.
        before: the evaluator's metrics of the untrained model; empty without an evaluator.
        metrics: the evaluator's metrics of the model in `model_folder`.
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
    """Trains any dual encoder with any objective, on one process or many.

        Trainer(output="run", epochs=3).fit(model, pairs, objective)

    N processes train the model that one process trains with the same global batches, up to
    rounding, except for dropout and for BatchNorm with out-of-batch items (docs/design.md).

    SIGTERM and SIGUSR1 (what schedulers send) and Ctrl-C end the run with a checkpoint after the
    current step, or between two batches of an evaluation, which a resumed run makes up for.
    Resuming gives the model of an uninterrupted run, bit for bit. A second Ctrl-C, and the first
    where save_every is None, ends it at once.

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
    ) -> TrainingResult:
        """Train, and leave the model in `output/model`.

        Args:
            model: trained in place; ends with the weights of the last step.
            pairs: the training pairs.
            objective: the loss; its learnable parameters are trained too.
            batching: chooses the batches; by default random batches, of a `Mixture` as its weights
                and `batches` say.
            evaluator: measures the model before, during and after training.
            resume: continue, exactly, from the latest checkpoint in `output`; from the start if
                there is none.
            recipe: the resolved recipe, for the model card and to recognise checkpoints of other
                recipes.

        Raises:
            Stopped: a SystemExit with code 128 + the signal, after SIGTERM or SIGUSR1.
            Interrupted: a KeyboardInterrupt, after Ctrl-C.
        """
        start = time.perf_counter()
        output = Path(self.output)
        if evaluator is None:
            pairs, evaluator = self._hold_out(pairs, batching, is_recipe=recipe is not None)
        batching = self._batching(pairs, batching)
        self._check_parts(model, pairs, objective, batching, evaluator)
        # Not after the last step.
        model.check_savable()
        accelerator = start_accelerator(self, output)
        with (
            StopSignals(saves=self.save_every is not None) as signals,
            locked_run(output, resume=resume, overwrite=self.overwrite),
            deterministic_algorithms(self.deterministic, accelerator.device),
            frozen(model, self.freeze),
        ):
            model = self._prepare_model(model, pairs, accelerator.device)
            counts = [
                torch.from_numpy(pairs.pair_counts(side)).to(accelerator.device) for side in SIDES
            ]
            objective.to(accelerator.device).set_counts(*counts)
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

    def _hold_out(
        self, pairs: PairDataset, batching: BatchSelector | None, is_recipe: bool
    ) -> tuple[PairDataset, Evaluator | None]:
        """The pairs to train on, with the same items and ids, and an evaluator of those that are
        held out, if any."""
        share = self.held_out
        can_split = not pairs.views and not isinstance(pairs, Mixture)
        if share is None:
            # A recipe's run ends with a number.
            by_default = is_recipe and batching is None and can_split and len(pairs) >= MIN_PAIRS
            share = DEFAULT_SHARE if by_default else 0.0
        if share == 0:
            return pairs, None
        if batching is not None:
            raise DualencError(
                "batching is for all pairs, and held_out leaves some out; name an evaluator"
            )
        if not can_split:
            raise DualencError(
                "held_out does not apply to views of images or a mixture; name an evaluator"
            )
        rest, held_out = pairs.split(min(share, MAX_HELD_OUT / len(pairs)), self.seed)
        if pairs.left_modality == "image" and pairs.right_modality == "text":
            return rest, ImageTextEvaluator(held_out)
        return rest, RetrievalEvaluator(pairs=held_out)

    def _batching(self, pairs: PairDataset, batching: BatchSelector | None) -> BatchSelector:
        """The batch selector: the given one, or the default for the data."""
        if self.batch_size > len(pairs):
            raise DualencError(
                f"batch_size is {self.batch_size} but there are {len(pairs)} pairs; make it smaller"
            )
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

    def _prepare_model(
        self, model: DualEncoder, pairs: PairDataset, device: torch.device
    ) -> DualEncoder:
        """Place and compile a model."""
        if isinstance(pairs, Mixture) and isinstance(model, TextEncoder):
            model.name_prompts(pairs.prompts)
        model = place_model(model, device)
        if self.compile:
            # A set, as both sides may be one tower.
            for tower in {model.left, model.right}:
                tower.compile(dynamic=True)
        has_mined = pairs.negatives is not None or self.mine_every is not None
        if has_mined and waits_for_others(model):
            raise DualencError(
                "mined negatives do not go with BatchNorm on several processes, some of which may have none of "
                "them; use one process, or freeze BatchNorm (freeze=…)"
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
        if evaluator is not None and not hasattr(evaluator, "primary"):
            problem = (
                "evaluator: has no `primary`, the name of the metric to keep the best weights by"
            )
            raise DualencError(f"{problem}; set it, as in measure.primary = 'accuracy'")
        if self.patience is not None and evaluator is None:
            raise DualencError("patience counts evaluations, and there is no evaluator; give one")
        if (batching.batch_size, batching.num_pairs) != (self.batch_size, len(pairs)):
            raise DualencError(
                f"batching is for batches of {batching.batch_size} of {batching.num_pairs} pairs, but batch_size is "
                f"{self.batch_size} and the data has {len(pairs)} pairs; give both the same"
            )
        remedy = objective.remedy_for_other_batches
        if remedy and not batching.uniform:
            raise DualencError(
                f"{type(batching).__name__} chooses the batches, but {objective.name} as set assumes random ones; give "
                f"it {remedy}, or leave batching out and weigh all sources of a mixture 1"
            )
        _check_modalities(model, pairs, evaluator)
        _check_views(pairs, objective)
        if self.mine_every is not None:
            check_minable(pairs, objective)


def _check_views(pairs: PairDataset, objective: Objective) -> None:
    """Refuse an objective that would compare the two views of images as items of two towers."""
    if pairs.views and not objective.views:
        raise DualencError(
            f"the data is two views of each image, but {objective.name} compares left with right "
            "items only; give it views=True"
        )


def _check_modalities(model: DualEncoder, pairs: PairDataset, evaluator: Evaluator | None) -> None:
    """Refuse images for a tower that encodes text, and the like."""
    of_pairs = {"left": pairs.left_modality, "right": pairs.right_modality}
    of_evaluator = getattr(evaluator, "modalities", {})
    for source, modalities in (("the pairs", of_pairs), ("the evaluator", of_evaluator)):
        for side in SIDES:
            modality = modalities.get(side)
            encoded = model.tower(side).modality
            if modality is not None and modality != encoded:
                raise DualencError(
                    f"the {side} side of {source} is {modality}, but that of the model encodes {encoded}; choose a "
                    f"model for {modality} or other data"
                )
