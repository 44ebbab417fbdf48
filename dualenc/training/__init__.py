"""Training: one loop for every model and objective, exact resumption, gradient caching, batch
selection."""

from dualenc.training.evaluators import (
    Evaluator,
    ImageTextEvaluator,
    KNNEvaluator,
    RetrievalEvaluator,
)
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.training.settings import TrainerSettings
from dualenc.training.trainer import Trainer, TrainingResult

__all__ = [
    "Evaluator",
    "ImageTextEvaluator",
    "IndexEvaluator",
    "KNNEvaluator",
    "RetrievalEvaluator",
    "Trainer",
    "TrainerSettings",
    "TrainingResult",
]
