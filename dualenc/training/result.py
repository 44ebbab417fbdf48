"""What a training run ended with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class TrainingResult(NamedTuple):
    """The outcome of `Trainer.fit`.

    Attributes:
        model_folder: where the model is.
        steps: optimizer steps done.
        loss: mean training loss in the last line of the log.
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
