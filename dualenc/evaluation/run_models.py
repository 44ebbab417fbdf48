"""The models of a training run in order: checkpoints, or a folder of models; the temperature of a trained model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualenc.data.identity import digest_of, file_identity
from dualenc.encoders import DualEncoder, load_model
from dualenc.encoders.dual import MODEL_FILES
from dualenc.errors import DualencError
from dualenc.training.checkpoint import Checkpoints


class RunModel(NamedTuple):
    """One model of a run, not yet loaded.

    Attributes:
        step: optimizer steps done, or the model's number among the folders.
        path: a model folder, or a checkpoint of the trainer.
        base: with a checkpoint, the model folder of the same run, for the architecture.
    """

    step: int
    path: Path
    base: Path | None = None

    def contents(self) -> str:
        """Checksum of the weights' files and of the architecture; "" for a hub name."""
        parts: list[Any] = []
        for folder in filter(None, (self.path, self.base)):
            for file in sorted(folder.rglob("*")):
                name = file.relative_to(folder).as_posix()
                # With a checkpoint the weights of the model folder do not count: they change when the training resumes.
                if file.is_file() and (folder == self.path or ".json" in name):
                    parts += [name, file_identity(file)]
        return digest_of(*parts) if parts else ""


def find_models(run: str) -> list[RunModel]:
    """The models of a run in order: a training's checkpoints, a folder's models, or the one model (or hub name).

    Folders are ordered by the number in their names, then by name.
    """
    folder = Path(run)
    if folder.exists() and not folder.is_dir():
        raise DualencError(f"{folder}: is no folder; give a run, a folder of models, or a model")
    if not folder.is_dir() or _is_model(folder):
        return [RunModel(0, folder)]
    checkpoints = Checkpoints(folder / "checkpoints").finished()
    if checkpoints:
        if not _is_model(folder / "model"):
            raise DualencError(f"{folder}: has checkpoints but no model folder yet; wait until one is written")
        return [RunModel(step, path, folder / "model") for step, path in checkpoints]
    models = sorted((path for path in folder.iterdir() if _is_model(path)), key=_number_and_name)
    if not models:
        raise DualencError(f"{folder}: no checkpoints and no model folders in it; give a run or a folder of models")
    numbers = [_number_and_name(path)[0] for path in models]
    distinct = len(set(numbers)) == len(numbers)
    return [RunModel(numbers[place] if distinct else place, path) for place, path in enumerate(models)]


def load_models(places: list[RunModel], device: torch.device) -> Iterator[tuple[RunModel, DualEncoder]]:
    """Load one model after another, in evaluation mode. Checkpoints of a run share one object, with other weights."""
    base: DualEncoder | None = None
    for place in places:
        if place.base is None:
            yield place, load_model(str(place.path), device=str(device)).eval()
            continue
        base = load_model(str(place.base), device=str(device)) if base is None else base
        try:
            state = torch.load(place.path / "state.pt", map_location="cpu", weights_only=True)
            base.load_state_dict(state["model"])
        except Exception as error:
            reason = " ".join(str(error).split())[:120]
            raise DualencError(f"{place.path}: does not fit the model folder of its run ({reason})") from None
        yield place, base.eval()


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


def _number_and_name(folder: Path) -> tuple[int, str]:
    """The last number in a folder's name, -1 without one, and the name."""
    return int(([-1, *re.findall(r"\d+", folder.name)])[-1]), folder.name


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
