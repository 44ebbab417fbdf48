"""Training: the trainer, its settings, evaluators and callbacks."""

from dualenc.training.callbacks import Callback
from dualenc.training.evaluators import (
    Evaluator,
    ImageTextEvaluator,
    KNNEvaluator,
    RetrievalEvaluator,
)
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.training.settings import TrainerSettings
from dualenc.training.trainer import Trainer, TrainingResult
from dualenc.training.view_evaluator import ViewEvaluator

__all__ = [
    "Callback",
    "Evaluator",
    "ImageTextEvaluator",
    "IndexEvaluator",
    "KNNEvaluator",
    "RetrievalEvaluator",
    "Trainer",
    "TrainerSettings",
    "TrainingResult",
    "ViewEvaluator",
]
