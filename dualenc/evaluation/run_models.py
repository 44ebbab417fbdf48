"""The temperature that a model was trained with."""

from __future__ import annotations

from pathlib import Path

import torch

from dualenc.encoders import DualEncoder
from dualenc.errors import DualencError
from dualenc.training.checkpoint import Checkpoints


def trained_temperature(model: DualEncoder, folder: Path) -> float | None:
    """τ that a model was trained with: as the model records it, or its run's latest checkpoint; None for neither."""
    recorded = getattr(model, "temperature", None)
    if recorded is not None:
        return float(recorded)
    written = folder.parent / "checkpoints"
    checkpoints = Checkpoints(written).finished() if folder.is_dir() and written.is_dir() else []
    if not checkpoints:
        return None
    try:
        state = torch.load(checkpoints[-1][1] / "state.pt", map_location="cpu", weights_only=True, mmap=True)
        return float(state["objective"]["log_temperature"].exp())
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise DualencError(f"{written}: holds no temperature ({reason}); give one with --temperature") from None
