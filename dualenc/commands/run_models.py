"""The models of a run, one after another: every checkpoint of a training, or every model folder in a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dualenc.errors import DualencError

if TYPE_CHECKING:
    import torch

    from dualenc.encoders import DualEncoder


class Place(NamedTuple):
    """Where one model of a run is.

    Attributes:
        step: optimizer steps done, or the model's number among the folders.
        path: a model folder, or a checkpoint of the trainer.
        base: with a checkpoint: the model folder of the same run, which tells the architecture.
    """

    step: int
    path: Path
    base: Path | None = None

    def contents(self) -> str:
        """Checksum of its files, and of the model folder it needs: another one for other weights. "" for a hub name."""
        from dualenc.data.identity import digest_of, file_identity

        folders = [folder for folder in (self.path, self.base) if folder is not None and folder.is_dir()]
        files = [(folder, file) for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
        names = [file.relative_to(folder).as_posix() for folder, file in files]
        # With a checkpoint the weights of the model folder do not count: they change when the training goes on.
        counted = [(name, file) for name, (folder, file) in zip(names, files) if folder == self.path or ".json" in name]
        return digest_of(*(part for name, file in counted for part in (name, file_identity(file)))) if files else ""


def find_models(run: str) -> list[Place]:
    """The models of a run in order.

    Args:
        run: The output folder of a training (its checkpoints are taken), a folder of model folders (ordered by the
            number in their names, then by name), or one model folder or name.

    Raises:
        DualencError: a training without a model folder yet, or a folder without a model.
    """
    from dualenc.training.checkpoint import Checkpoints

    folder = Path(run)
    if folder.exists() and not folder.is_dir():
        raise DualencError(f"{folder}: is no folder; give a run, a folder of models, or a model")
    if not folder.is_dir() or _is_model(folder):
        return [Place(0, folder)]
    checkpoints = Checkpoints(folder / "checkpoints").complete()
    if checkpoints:
        if not _is_model(folder / "model"):
            raise DualencError(f"{folder}: has checkpoints but no model folder yet; wait until one is written")
        return [Place(step, path, folder / "model") for step, path in checkpoints]
    models = sorted((path for path in folder.iterdir() if _is_model(path)), key=_number_and_name)
    if not models:
        raise DualencError(f"{folder}: no checkpoints and no model folders in it; give a run or a folder of models")
    numbers = [_number_and_name(path)[0] for path in models]
    distinct = len(set(numbers)) == len(numbers)
    return [Place(numbers[place] if distinct else place, path) for place, path in enumerate(models)]


def load_models(places: list[Place], device: torch.device) -> Iterator[tuple[Place, DualEncoder]]:
    """Load one model after another, in evaluation mode; those of one run may be the same object with other weights.

    Raises:
        DualencError: a model cannot be loaded, or a checkpoint does not fit its model folder.
    """
    from dualenc.encoders import load_model

    base: DualEncoder | None = None
    for place in places:
        if place.base is None:
            yield place, load_model(str(place.path), device=str(device)).eval()
            continue
        base = load_model(str(place.base), device=str(device)) if base is None else base
        _load_weights(base, place.path)
        yield place, base.eval()


def _load_weights(model: DualEncoder, checkpoint: Path) -> None:
    import torch

    try:
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise DualencError(f"{checkpoint}: does not fit the model folder of its run ({reason})") from None


def _is_model(folder: Path) -> bool:
    from dualenc.encoders.dual import MODEL_FILES

    return any((folder / name).is_file() for name in MODEL_FILES)


def _number_and_name(folder: Path) -> tuple[int, str]:
    found = re.findall(r"\d+", folder.name)
    return (int(found[-1]) if found else -1), folder.name
