"""Training: one loop for every model and objective, exact resumption, gradient caching, batch selection."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualenc.training.evaluators import Evaluator, ImageTextEvaluator, KNNEvaluator, RetrievalEvaluator
    from dualenc.training.settings import TrainerSettings
    from dualenc.training.trainer import Trainer, TrainingResult

__all__ = [
    "Evaluator",
    "ImageTextEvaluator",
    "KNNEvaluator",
    "RetrievalEvaluator",
    "Trainer",
    "TrainerSettings",
    "TrainingResult",
]

_MODULES = {"Trainer": "trainer", "TrainerSettings": "settings", "TrainingResult": "trainer"}


def __getattr__(name: str) -> Any:
    """Import on first use: the background process of a selection needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'evaluators')}"), name)
