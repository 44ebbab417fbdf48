"""Shared steps of workflows: device and processes, locked outputs, models and embeddings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualenc import distributed
from dualenc.data.store.identity import digest_of
from dualenc.data.store.vector_shards import Embeddings, read_provenance
from dualenc.errors import DualencError, first_line
from dualenc.io.files import locked, remove
from dualenc.search.embed.encode import embed, tower_checksum
from dualenc.search.embed.writer import check_embeddings_target
from dualenc.types import StrPath

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.types import Side

logger = logging.getLogger("dualenc.workflows")

EVALUATIONS = {
    "query-document": ("retrieval",),
    "image-text": ("image-text", "zero-shot"),
    "image": ("probe", "corrupted"),
    "vector": ("retrieval",),
    "query-index": ("retrieval",),
}
"""Tasks of `dualenc evaluate` by kind of model."""


def short_name(source: str) -> str:
    """Return the name of a model or of data in tables.

    RUN/model is named after the run; anything else by the last part of its path or name.
    """
    path = Path(source)
    if path.is_dir() and path.resolve().name == "model":
        path = path.resolve().parent
    return path.name or source


def recorded_name(source: str) -> str:
    """Return how meta.json names a model or data.

    A path is recorded as absolute, so that it can be found from any folder.
    """
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def start_processes(device: str | None = None) -> torch.device:
    """Join the other processes of `accelerate launch`, if any, and return the device to use.

    Args:
        device: name of a device; None takes the GPU of this process, or the CPU without one.

    Raises:
        DualencError: the device does not exist or cannot compute.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(default if device is None else device)
        # Only use shows whether a device exists; "meta" lacks values to copy.
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DualencError(
            first_line(error),
            fix="choose another, such as cpu or cuda:0",
            where=f"device {device!r}",
        ) from None
    if distributed.launched() > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return state.device if device is None else chosen
    return chosen


@contextmanager
def writing(out: StrPath, wait: bool = False) -> Iterator[None]:
    """Lock an output in the main process (`dualenc.io.files.locked`).

    If the lock is refused, every process raises.
    """
    problem = ""
    with ExitStack() as stack:
        if distributed.is_main():
            try:
                stack.enter_context(locked(out, wait))
            except DualencError as error:
                problem = str(error)
        # Without this, the other processes would wait for the main one forever.
        if problem := distributed.broadcast_object(problem):
            raise DualencError(problem)
        yield


def open_model(model: str, kinds: Sequence[str], device: torch.device) -> DualEncoder:
    """Load a model, and raise unless it is of one of these kinds."""
    from dualenc.encoders import load_model

    encoder = load_model(model, device=str(device))
    if encoder.kind not in kinds:
        needed = " or ".join(kinds)
        other = " or ".join(f"`dualenc evaluate {task}`" for task in EVALUATIONS[encoder.kind])
        raise DualencError(
            f"is {encoder.kind}, but this task needs kind {needed}", fix=f"use {other}", where=model
        )
    return encoder


def describe_embeddings(embeddings: Embeddings, folder: StrPath | None = None) -> str:
    """Return a line with the number, size and side of embeddings, and their folder if it stays."""
    count = f"{len(embeddings):,} embeddings of dimension {embeddings.dim}"
    place = "" if folder is None else f" → {folder}"
    return f"{count} ({embeddings.provenance.side} side){place}"


def report_skipped(embeddings: Embeddings) -> None:
    """Log how many items could not be embedded and why the first failed, on the main process."""
    skipped = embeddings.provenance.skipped
    if skipped and distributed.is_main():
        first = embeddings.provenance.first_skipped[0]
        logger.warning(
            "left out %s of %s items; the first, %s: %s",
            f"{skipped:,}",
            f"{skipped + len(embeddings):,}",
            first["id"],
            first["reason"],
        )


def embed_into(
    folder: Path,
    tower: Tower,
    corpus: Corpus,
    *,
    side: Side | None = None,
    progress: bool | str = True,
    **options: Any,
) -> Embeddings:
    """Embed into a folder below an output.

    Embeddings of another model, other data or another `dim` are replaced. Finished shards are
    reused if the checksums of weights and items are the same.

    Args:
        folder: where to write the embeddings.
        tower: the side of a model to encode with.
        corpus: N items of the tower's modality.
        side: name of the side, recorded with the embeddings.
        progress: show a progress bar; a string is its description, and makes it disappear at the
            end.
        options: further options of `dualenc.search.embed.encode.embed`.
    """
    # `embed` itself notices changed items under the same ids.
    identity = ({} if side is None else {"side": side}) | {"ids": digest_of(corpus.ids)}
    if distributed.is_main():
        expected: dict[str, Any] = {**identity, "model_checksum": tower_checksum(tower)}
        if "dim" in options:
            expected["dim"] = options["dim"] or tower.dim
        if check_embeddings_target(folder) and read_provenance(folder).difference(expected):
            remove(folder)
    # The others must not see embeddings that the main process is about to remove.
    distributed.barrier()
    return embed(tower, corpus, folder, progress=progress, identity=identity, **options)
