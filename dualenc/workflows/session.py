"""What workflows share: device and processes, locked outputs, models, and embeddings below an output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualenc import distributed
from dualenc.data.store.identity import digest_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, first_line
from dualenc.io.files import (
    locked,
    remove,
)
from dualenc.io.reading import read_json_object
from dualenc.io.terminal import printable
from dualenc.search.embed.encode import embed, tower_checksum
from dualenc.search.embed.writer import check_embeddings_target
from dualenc.types import StrPath

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.types import Side

EVALUATIONS = {
    "query-document": ("retrieval",),
    "image-text": ("image-text", "zero-shot"),
    "image": ("probe", "corrupted"),
    "vector": ("retrieval",),
    "query-index": ("retrieval",),
}
"""Tasks of `dualenc evaluate` by kind of model."""


def short_name(source: str) -> str:
    """Name of a model or of data in tables: the run of RUN/model, otherwise the last part of a path
    or name."""
    path = Path(source)
    if path.is_dir() and path.resolve().name == "model":
        path = path.resolve().parent
    return path.name or source


def recorded_name(source: str) -> str:
    """What meta.json calls a model or data: the absolute path, by which it is found from anywhere,
    or the name."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def start_processes(device: str | None = None) -> torch.device:
    """Join the other processes of `accelerate launch`, if there are any. Returns the device to work
    on.

    By default it is this process's GPU, or the CPU where there is none. A device that is not there
    is an error.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(default if device is None else device)
        # Only use shows whether a device is there; "meta" has no values.
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        advice = "choose another, such as cpu or cuda:0"
        raise DualencError(f"device {device!r}: {first_line(error)}; {advice}") from None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return state.device if device is None else chosen
    return chosen


@contextmanager
def writing(out: StrPath, wait: bool = False) -> Iterator[None]:
    """Lock an output for a command (`dualenc.io.files.locked`): the main process holds the lock, a
    refusal ends all."""
    problem = ""
    with ExitStack() as stack:
        if distributed.is_main():
            try:
                stack.enter_context(locked(out, wait))
            except DualencError as error:
                problem = str(error)
        if problem := distributed.broadcast_object(problem):
            raise DualencError(problem)
        yield


def open_model(model: str, kinds: Sequence[str], device: torch.device) -> DualEncoder:
    """Load a model and make sure that it is of a kind that the task can use."""
    from dualenc.encoders import load_model

    encoder = load_model(model, device=str(device))
    if encoder.kind not in kinds:
        needed = " or ".join(kinds)
        other = " or ".join(f"`dualenc evaluate {task}`" for task in EVALUATIONS[encoder.kind])
        raise DualencError(
            f"{model}: is {encoder.kind}, but this task needs kind {needed}; use {other}"
        )
    return encoder


def report_skipped(embeddings: Embeddings) -> None:
    """Print how many items could not be embedded, and why the first of them, on the main
    process."""
    skipped = embeddings.meta["skipped"]
    if skipped and distributed.is_main():
        first = embeddings.meta["first_skipped"][0]
        summary = f"left out {skipped:,} of {skipped + len(embeddings):,} items"
        print(printable(f"{summary}; the first, {first['id']}: {first['reason']}"), file=sys.stderr)


def embed_into(
    folder: Path, tower: Tower, corpus: Corpus, *, side: Side | None = None, **options: Any
) -> Embeddings:
    """Embed into a folder below an output; embeddings of another model, other data or another `dim`
    are replaced.

    Finished shards stay where the checksums of weights and items are the same. The side is recorded
    with the embeddings; `options` are those of `dualenc.search.embed.encode.embed`.
    """
    # Changed items under the same ids are noticed by `embed` itself.
    identity = ({} if side is None else {"side": side}) | {"ids": digest_of(corpus.ids)}
    if distributed.is_main():
        check_embeddings_target(folder)
        meta = read_json_object(folder / "meta.json") if (folder / "meta.json").is_file() else {}
        expected: dict[str, Any] = {**identity, "model_checksum": tower_checksum(tower)}
        if "dim" in options:
            expected["dim"] = options["dim"] or tower.dim
        if any(meta.get(name) != value for name, value in expected.items()):
            remove(folder)
    distributed.barrier()
    return embed(
        tower, corpus, folder, progress=distributed.is_main(), identity=identity, **options
    )
