"""The trainings of an adaptation: of queries against an index, on folds and on all pairs."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.data.document_splits import DocumentSplit
from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.load import load_model
from dualenc.objectives import FrozenCorpus
from dualenc.search.index.open import Index, is_index
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.training.log import read_metrics
from dualenc.training.trainer import Trainer, TrainingResult
from dualenc.workflows.adapting import TOWERS, QuerySide

PATIENCE = 3
EPOCHS = {"perceptron": 12, "linear": 12, "lora": 3, "all": 3}
LEARNING_RATES = {"perceptron": 1e-3, "linear": 1e-3, "lora": 2e-4, "all": 2e-5}


class TrainingSettings(NamedTuple):
    """How the queries are trained; see `adapt`."""

    epochs: int | None
    batch_size: int
    learning_rate: float | None
    temperature: float
    seed: int


@dataclass(frozen=True)
class Trainings:
    """Trains the query side of an index; a finished training is only read.

        trainings = Trainings(Path("run/training"), side, settings, resume=False)
        model, steps = trainings.on_all("all", original, pairs, alpha=0.1, steps=100)

    Args:
        folder: folder with a subfolder for each training.
        side: the query side of the index.
        settings: how it is trained.
        resume: continue trainings that were interrupted.
    """

    folder: Path
    side: QuerySide
    settings: TrainingSettings
    resume: bool

    def on_fold(
        self,
        name: str,
        original: DualEncoder,
        fold: DocumentSplit,
        alpha: float,
        stops_early: bool,
    ) -> tuple[DualEncoder, int]:
        """Train on a fold; return the model, and the number of its steps.

        Args:
            name: beginning of the folder's name.
            original: model before training; not changed.
            fold: pairs to train on, and held-out queries.
            alpha: clicks that are added to those of every document; inf weighs all alike.
            stops_early: train until held-out queries do not improve, and take the best weights.
        """
        assert fold.held_out is not None
        pairs = fold.train
        name = f"{name}-{_name_of(alpha)}"
        steps = self._steps(pairs)
        if not stops_early:
            training = self._fit(self._trainer(pairs, name, steps), original, pairs, alpha)
            return load_model(training.model_folder, self.side.device), steps
        trainer = self._trainer(pairs, name, steps, stops_early=True)
        evaluator = IndexEvaluator.of_pairs(fold.held_out, self.side.documents)
        training = self._fit(trainer, original, pairs, alpha, evaluator)
        best = distributed.from_main(partial(_best_step, Path(trainer.output), evaluator.primary))
        return load_model(training.model_folder, self.side.device), best

    def on_all(
        self,
        name: str,
        original: DualEncoder,
        pairs: PairDataset,
        alpha: float,
        steps: int | None,
    ) -> tuple[DualEncoder, int]:
        """Train on all pairs for as many steps as the folds; return the model and its steps.

        More steps, as the larger number of pairs suggests, would go further from the original than
        what was measured.

        Args:
            name: beginning of the folder's name.
            original: model before training; not changed.
            pairs: pairs to train on.
            alpha: as for `on_fold`.
            steps: number of steps; None takes those of the maximum number of epochs.
        """
        steps = self._steps(pairs) if steps is None else steps
        # Another choice is another training.
        trainer = self._trainer(pairs, f"{name}-{_name_of(alpha)}-{steps}", steps)
        training = self._fit(trainer, original, pairs, alpha)
        return load_model(training.model_folder, self.side.device), training.steps

    def _steps(self, pairs: PairDataset) -> int:
        """Return the number of steps of the maximum number of passes over pairs."""
        given = self.settings.epochs
        epochs = EPOCHS[self.side.trained] if given is None else given
        # An epoch leaves out what fills no batch, which of few pairs may be half of them.
        return max(1, round(epochs * len(pairs) / self._batch_size(pairs)))

    def _batch_size(self, pairs: PairDataset) -> int:
        """Return the batch size: one larger than the data would leave no step."""
        return min(self.settings.batch_size, len(pairs))

    def _trainer(
        self, pairs: PairDataset, name: str, steps: int, stops_early: bool = False
    ) -> Trainer:
        """Return a trainer of pairs, which may stop when held-out queries do not improve."""
        trained, rate = self.side.trained, self.settings.learning_rate
        batch_size = self._batch_size(pairs)
        return Trainer(
            output=self.folder / name,
            batch_size=batch_size,
            max_steps=steps,
            # Once per epoch.
            evaluate_every=max(1, len(pairs) // batch_size) if stops_early else None,
            patience=PATIENCE if stops_early else None,
            # Not `or`: the trainer should refuse 0.
            learning_rate=LEARNING_RATES[trained] if rate is None else rate,
            # Maps are too small to gain from half precision.
            mixed_precision="no" if trained in TOWERS else "auto",
            seed=self.settings.seed,
            progress=self.side.progress,
        )

    def _fit(
        self,
        trainer: Trainer,
        original: DualEncoder,
        pairs: PairDataset,
        alpha: float,
        evaluator: IndexEvaluator | None = None,
    ) -> TrainingResult:
        """Train a copy of the original."""
        weights = None
        if not math.isinf(alpha):
            weights = np.bincount(pairs.right_id, pairs.weights, len(self.side.documents)) + alpha
        return trainer.fit(
            # The original is needed afterwards, to interpolate between both.
            copy.deepcopy(original),
            pairs,
            _objective(self.side, pairs.num_left, self.settings.temperature, weights),
            evaluator=evaluator,
            resume=self.resume,
        )


def _name_of(alpha: float) -> str:
    """Return how folders name a value of α."""
    return "alike" if math.isinf(alpha) else f"alpha-{alpha:g}"


def _best_step(folder: Path, metric: str) -> int:
    """Return the step of a training after which it was best, by its log."""
    name = f"evaluation/{metric}"
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if name in line]
    after = [line for line in lines if line["step"] > 0]
    return int(max(after, key=itemgetter(name))["step"])


def _objective(
    side: QuerySide, num_left: int, temperature: float, weights: np.ndarray | None
) -> FrozenCorpus:
    """Return the softmax over all documents, weighted by (N,) weights.

    With more documents than can be summed exactly, it uses those that the index finds and a sample.
    """
    # Only an index can find the nearest documents; without one, all of them are summed.
    search = None
    if is_index(side.source):
        opened = Index.open(side.source)

        def search(queries: np.ndarray, nearest: int) -> np.ndarray:
            return opened.search_rows(queries, nearest)[1]

    return FrozenCorpus(
        side.documents.vectors,
        weights=weights,
        search=search,
        num_left=num_left,
        temperature=temperature,
        # Include the positive in the sum, as a softmax does.
        positive_in_softmax=True,
    )
