"""What commands share: the device and the processes, locked outputs, models, embeddings, an
evaluation's folder."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualenc import distributed
from dualenc.data.store.identity import digest_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, first_line
from dualenc.evaluation.report_page import Table, check_report_target, print_table, write_report
from dualenc.io.files import (
    check_file_target,
    check_folder_target,
    check_writable,
    locked,
    remove,
    write_json,
)
from dualenc.io.reading import read_json_object
from dualenc.io.targets import check_outside
from dualenc.io.terminal import printable
from dualenc.search.embed.encode import embed, tower_checksum
from dualenc.search.embed.writer import check_embeddings_target
from dualenc.types import StrPath

if TYPE_CHECKING:
    from dualenc.commands.options import OutputOptions
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

RESULT = "metrics.json"
PAGE = "report.html"
EMBEDDINGS = [f"{folder}/*/meta.json" for folder in ("embeddings", "*/embeddings", "features")]
EMBEDDINGS += ["documents.json"]
"""Files by which an evaluation without results is known: it was interrupted."""


class Evaluation:
    """The output of a task, such as "retrieval", of a model on data: checked before any work,
    written at the end."""

    def __init__(self, task: str, model: str, data: str, output: OutputOptions) -> None:
        self.task = task
        self.model = model
        self.folder = Path(
            output.out or f"evaluations/{task}/{short_name(model)}-{_distinct_name(data)}"
        )
        self.weights: list[str] = []
        self.num_skipped = 0
        check_outside(self.folder)
        check_writable(self.folder)
        check_folder_target(self.folder, self._is_own_folder, f"evaluation of {task}")
        check_file_target(self.folder / RESULT)
        check_report_target(self.folder / PAGE)
        self.device = start_processes(output.device)
        self._lock = ExitStack()
        self._lock.enter_context(writing(self.folder))

    def _is_own_folder(self, folder: Path) -> bool:
        if (folder / RESULT).is_file():
            return read_json_object(folder / RESULT).get("task") == self.task
        return any(True for pattern in EMBEDDINGS for _ in folder.glob(pattern))

    def check_weights(self, *towers: Tower) -> None:
        """Record the checksums of the evaluated towers; refuse a folder with the results of other
        weights."""
        self.weights = sorted({tower_checksum(tower) for tower in towers})
        result = self.folder / RESULT
        if result.is_file() and read_json_object(result).get("weights") != self.weights:
            problem = f"holds an evaluation of other weights than {self.model} has now"
            raise DualencError(
                f"{self.folder}: {problem}; choose another --out, or remove the folder"
            )

    def open(self, *kinds: str) -> DualEncoder:
        """Load the model, which must be of one of these kinds, and check its weights."""
        encoder = open_model(self.model, kinds, self.device)
        self.check_weights(encoder.left, encoder.right)
        return encoder

    def embed(
        self, folder: StrPath, encoder: DualEncoder, side: Side, corpus: Corpus, batch_size: int
    ) -> Embeddings:
        """Embed into a folder below the output, or reuse what is there: `embed_into`."""
        settings: dict[str, Any] = {
            "side": side,
            "notes": {"model": self.model},
            "batch_size": batch_size,
        }
        return self.noted(embed_into(self.folder / folder, encoder.tower(side), corpus, **settings))

    def noted(self, embeddings: Embeddings) -> Embeddings:
        """The embeddings, once what was left out of them is printed and counted for the report."""
        report_skipped(embeddings)
        self.num_skipped += embeddings.meta["skipped"]
        return embeddings

    def conclude(
        self,
        task: str,
        on: str,
        facts: Mapping[str, object],
        results: Mapping[str, object],
        tables: Sequence[Table],
        *,
        printed: int | None = None,
        files: str = "metrics and report.html",
    ) -> None:
        """Write metrics.json (facts and results) and report.html, headed by task and data; print
        the first tables."""
        title = f"{task}: {short_name(self.model)} on {on}"
        if self.num_skipped:
            facts = {**facts, "skipped": self.num_skipped}
        write_json(
            self.folder / RESULT, {"task": self.task, **facts, "weights": self.weights, **results}
        )
        write_report(self.folder / PAGE, title, facts=facts, tables=tables)
        self._lock.close()
        for table in tables[:printed]:
            print_table(table)
        print(printable(f"{files} are in {self.folder}"))


def short_name(source: str) -> str:
    """Name of a model or of data in tables: the run of RUN/model, otherwise the last part of a path
    or name."""
    path = Path(source)
    if path.is_dir() and path.resolve().name == "model":
        path = path.resolve().parent
    return path.name or source


def _distinct_name(data: str) -> str:
    """The last part of a path or name, with a short hash that keeps data sets of the same name
    apart."""
    path = Path(data)
    whole = str(path.resolve()) if path.exists() else data
    return f"{path.stem}-{hashlib.sha256(whole.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


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
