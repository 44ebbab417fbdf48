"""What the evaluation commands share: arguments in range, processes, the model of the right kind, kept embeddings."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import read_json, remove

if TYPE_CHECKING:
    import torch

    from dualenc.data import Corpus
    from dualenc.embeddings import Embeddings
    from dualenc.encoders import DualEncoder, Tower
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

    Raises:
        DualencError: there is no such device here, or one that cannot compute.
    """
    import torch

    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        # Only use tells whether a device is there; "meta" has no values.
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DualencError(f"device {device!r}: {reason}; choose another, such as cpu or cuda:0") from None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return state.device if device is None else chosen
    return chosen


def check_range(least: float, most: float, **values: float | None) -> None:
    """Make sure that numeric options lie in a range, before any work.

    Args:
        least: The smallest number allowed.
        most: The largest one.
        values: Numbers by the name of their option; None is not given and fine.

    Raises:
        DualencError: one is out of range, or NaN; tells which.
    """
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            allowed = f"be at least {least:,}" if most == math.inf else f"lie between {least:,} and {most:,}"
            raise DualencError(f"--{name.replace('_', '-')} is {value}; it must {allowed}")


MOST_WORKERS = 1024
MOST_ITEMS = 1 << 20
"""In a batch."""
HIGHEST_SEED = (1 << 32) - 1


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
    folder: Path, encoder: DualEncoder, side: Side, corpus: Corpus, model: str, batch_size: int
) -> Embeddings:
    """Embed one side into a folder of the evaluation, as `keep_embeddings` does.

    Args:
        folder: Where to keep the embeddings.
        encoder: The model.
        side: Which tower encodes.
        corpus: What to encode.
        model: What the user called the model.
        batch_size: Items encoded at once.
    """
    tower = encoder.tower(side)
    return keep_embeddings(folder, tower, corpus, {"side": side}, batch_size=batch_size, notes={"model": model})


def keep_embeddings(folder: Path, tower: Tower, corpus: Corpus, identity: dict[str, str], **how: Any) -> Embeddings:
    """Embed into a folder below an evaluation's output; what another model or other data left there is replaced.

    Finished shards of an interrupted run are kept where weights and items are the same, by their contents: equal names
    do not make equal data.

    Args:
        folder: Where to keep the embeddings.
        tower: The side of a model that encodes.
        corpus: What to encode.
        identity: Further entries that must be the same.
        how: What else `dualenc.embed.embed` takes.
    """
    from dualenc.data.identity import digest_of
    from dualenc.embed import embed, tower_checksum

    # Changed items under the same ids are noticed by `embed` itself; of other ids it would keep nothing either.
    identity = {**identity, "ids": digest_of(corpus.ids)}
    if distributed.is_main() and not _holds(folder, {**identity, "model_checksum": tower_checksum(tower)}):
        remove(folder)
    distributed.barrier()
    return embed(tower, corpus, folder, identity=identity, progress=distributed.is_main(), **how)


def _holds(folder: Path, identity: dict[str, str]) -> bool:
    """Whether a folder holds embeddings of an identity, or something that is not ours to replace."""
    if not (folder / "meta.json").is_file():
        return True
    try:
        meta = read_json(folder / "meta.json")
    except DualencError:
        return False
    return isinstance(meta, dict) and all(meta.get(name) == value for name, value in identity.items())


def output_folder(out: str | None, task: str, model: str, data: str) -> Path:
    """Where an evaluation writes: as the user says, or a folder named after task, model and data.

    Raises:
        DualencError: it cannot be written there; found out before any work.
    """
    folder = Path(out or f"evaluations/{task}/{display_name(model)}-{Path(data).stem}")
    check_writable(folder)
    return folder


def check_writable(folder: Path) -> None:
    """Make sure that a folder is there, or can be made, and takes files; nothing is left behind.

    Raises:
        DualencError: it is a file, or the system refuses.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise DualencError(f"{folder}: cannot be written, {there} is a file; choose another --out")
        with tempfile.TemporaryFile(dir=there):
            pass
    except (OSError, ValueError) as error:
        if isinstance(error, DualencError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DualencError(f"{folder}: cannot be written ({reason}); choose another --out") from None


def display_name(model: str) -> str:
    """What tables call a model: the last part of its path or name."""
    return Path(model).name or model
