"""What the evaluation commands share: processes, the model of the right kind, embedding into the output folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dualenc import distributed
from dualenc.errors import DualencError

if TYPE_CHECKING:
    import torch

    from dualenc.data import Corpus
    from dualenc.embeddings import Embeddings
    from dualenc.encoders import DualEncoder
    from dualenc.encoders.tower import Side

# Which command takes which kind of model, for the mistake of mixing them up.
_COMMAND_OF = {
    "query-document": "`dualenc evaluate retrieval`",
    "image-text": "`dualenc evaluate image-text` or `zero-shot`",
    "image": "`dualenc evaluate probe` or `corrupted`",
}


def start_processes(device: str | None = None) -> torch.device:
    """Join the other processes of `accelerate launch`, if there are any, and tell the device to work on.

    Args:
        device: Device by name; None takes this process's GPU, or the CPU where there is none.
    """
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return state.device if device is None else torch.device(device)
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def open_model(model: str, kind: str, device: torch.device) -> DualEncoder:
    """Load a model and make sure that it is of the kind the task needs.

    Args:
        model: Folder or name, as `load_model` takes it.
        kind: "query-document", "image-text" or "image".
        device: Where to put it.

    Raises:
        DualencError: it cannot be loaded, or is of another kind.
    """
    from dualenc.encoders import load_model

    encoder = load_model(model, device=str(device))
    if encoder.kind != kind:
        raise DualencError(
            f"{model}: is of kind {encoder.kind}, but this task needs kind {kind}; use {_COMMAND_OF[encoder.kind]}"
        )
    return encoder


def embed_into(
    folder: Path, encoder: DualEncoder, side: Side, corpus: Corpus, model: str, batch_size: int, source: str = ""
) -> Embeddings:
    """Embed one side into a folder; finished shards of an interrupted run of the same model and data are kept.

    Args:
        folder: Where to keep the embeddings.
        encoder: The model.
        side: Which tower encodes.
        corpus: What to encode.
        model: What the user called the model.
        batch_size: Items encoded at once.
        source: Where images come from; texts are told apart by their content, images by this.

    Raises:
        DualencError: the folder holds embeddings of another model or of other data.
    """
    from dualenc.embed import embed

    return embed(
        encoder.tower(side),
        corpus,
        folder,
        batch_size=batch_size,
        identity={"side": side, "source": source},
        notes={"model": model},
        progress=distributed.is_main(),
    )


def output_folder(out: str | None, task: str, model: str, data: str) -> Path:
    """Where an evaluation writes: as the user says, or a folder named after task, model and data."""
    return Path(out or f"evaluations/{task}/{display_name(model)}-{Path(data).stem}")


def display_name(model: str) -> str:
    """What tables call a model: the last part of its path or name."""
    return Path(model).name or model
