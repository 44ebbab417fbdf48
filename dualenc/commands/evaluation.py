"""What the evaluation commands share: arguments in range, processes, the model of the right kind, kept embeddings."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation.convergence import SimilarityHistogram
from dualenc.evaluation.plots import COLOURS, literal
from dualenc.evaluation.report import Figure
from dualenc.files import read_json, remove

if TYPE_CHECKING:
    import torch

    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.search.embeddings import Embeddings
    from dualenc.types import Side

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
        how: What else `dualenc.search.embed.embed` takes.
    """
    from dualenc.data.identity import digest_of
    from dualenc.search.embed import embed, tower_checksum

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


_MOST_NUMBERS = 120


def similarity_figure(found: SimilarityHistogram, positives: str, negatives: str, caption: str) -> Figure:
    """Histograms of similarities of positive and negative pairs over one another, each of total height 1.

    Args:
        found: The counts.
        positives: What the positive pairs are.
        negatives: What the negative pairs are.
        caption: What is shown; the overlap is added.
    """
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(6.4, 3.6), layout="constrained")
    axes = plot.add_subplot()
    for name, counts, colour in ((positives, found.positives, COLOURS[0]), (negatives, found.negatives, COLOURS[1])):
        axes.stairs(counts / counts.sum(), found.edges, fill=True, alpha=0.55, label=name, color=colour)
    filled = np.flatnonzero(found.positives + found.negatives)
    axes.set_xlim(found.edges[filled[0]], found.edges[filled[-1] + 1])
    axes.set_xlabel("cosine")
    axes.set_ylabel("share of pairs")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return Figure(f"{caption}; overlap {found.overlap:.3f}", plot)


def heat_figure(
    values: npt.NDArray[np.floating], rows: Sequence[str], columns: Sequence[str], caption: str, xlabel: str = ""
) -> Figure:
    """A matrix of numbers from 0 as colours, darker for higher, with the numbers in it where there is room.

    Args:
        values: (R, C).
        rows: R names.
        columns: C names.
        caption: What is shown.
        xlabel: What the columns are.
    """
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(6.4, max(1.5, 0.26 * len(rows) + 1.2)), layout="constrained")
    axes = plot.add_subplot()
    image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    axes.set_yticks(range(len(rows)), [literal(row) for row in rows], fontsize=8)
    axes.set_xticks(
        range(len(columns)), [literal(column) for column in columns], fontsize=8, rotation=90 if len(columns) > 6 else 0
    )
    axes.set_xlabel(xlabel)
    if values.size <= _MOST_NUMBERS:
        middle = np.nanmax(values, initial=0) / 2
        for (row, column), value in np.ndenumerate(values):
            shade = "white" if value > middle else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
    plot.colorbar(image, ax=axes)
    return Figure(caption, plot)
