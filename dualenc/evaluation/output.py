"""Shared parts of the evaluation tasks: output folder and report, processes, models."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation.ledger import read_part
from dualenc.evaluation.report import Figure, Table, print_table, write_report
from dualenc.files import check_file_target, check_folder_target, check_writable, locked, write_json
from dualenc.reading import read_json_object
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.evaluation.options import OutputOptions

# For the error message when a model is of another kind.
_COMMAND_OF = {
    "query-document": "`dualenc evaluate retrieval`",
    "image-text": "`dualenc evaluate image-text` or `zero-shot`",
    "image": "`dualenc evaluate probe` or `corrupted`",
    "vector": "`dualenc evaluate retrieval`",
}

RESULT = "metrics.json"
PAGE = "report.html"
RUNS = ("run.trec", "per_query.ndjson")
UNFINISHED = {"embeddings", "features", "finished", *RUNS}
UNFINISHED |= {"bm25", "hybrid", "reranked", "engine", "image_to_text", "text_to_image"}
"""Files of an evaluation that was interrupted before its results."""
KEPT_EMBEDDINGS = [f"{place}/*/meta.json" for place in ("embeddings", "*/embeddings", "features", "finished")]


class Evaluation:
    """The output of a task, such as "retrieval", of a model on data: checked before any work, written at the end.

    Raises:
        DualencError: a folder that cannot be written or holds something else, or a device that is not there.
    """

    def __init__(self, task: str, model: str, data: str, output: OutputOptions) -> None:
        self.task = task
        self.model = model
        self.folder = Path(output.out or f"evaluations/{task}/{display_name(model)}-{_distinct_name(data)}")
        self.weights: list[str] = []
        check_writable(self.folder)
        check_folder_target(self.folder, self._is_own_folder, f"evaluation of {task}")
        check_file_target(self.folder / RESULT)
        check_file_target(self.folder / PAGE)
        self.device = start_processes(output.device)
        self._lock = ExitStack()
        self._lock.enter_context(writing(self.folder))

    def _is_own_folder(self, folder: Path) -> bool:
        """Whether a folder holds the results of the task, or nothing but unfinished work of an evaluation."""
        if (folder / RESULT).is_file():
            return read_json_object(folder / RESULT).get("task") == self.task
        return _is_unfinished(folder) or all(child.is_dir() and _is_unfinished(child) for child in folder.iterdir())

    def check_weights(self, *towers: Tower) -> None:
        """Record the checksums of the evaluated towers; an error if the folder holds an evaluation of other weights."""
        from dualenc.search.embed import tower_checksum

        self.weights = sorted({tower_checksum(tower) for tower in towers})
        if not evaluated_weights(self.folder) <= set(self.weights):
            problem = f"holds an evaluation of other weights than {self.model} has now"
            raise DualencError(f"{self.folder}: {problem}; choose another --out, or remove the folder")

    def conclude(
        self,
        title: str,
        facts: Mapping[str, object],
        results: Mapping[str, object],
        tables: Sequence[Table],
        *,
        printed: int | None = None,
        figures: Sequence[Figure] = (),
        files: str = "metrics and report.html",
    ) -> None:
        """Write metrics.json (facts and results) and report.html; print the first tables and where the files are."""
        weights = {"weights": self.weights} if self.weights else {}
        write_json(self.folder / RESULT, {"task": self.task, **facts, **weights, **results})
        write_report(self.folder / PAGE, title, facts=facts, figures=figures, tables=tables)
        self._lock.close()
        for table in tables[:printed]:
            print_table(table)
        print(printable(f"{files} are in {self.folder}"))


def _distinct_name(data: str) -> str:
    """The last part of a path or name, with a short hash that keeps data sets of the same name apart."""
    path = Path(data)
    whole = str(path.resolve()) if path.exists() else data
    return f"{path.stem}-{hashlib.sha256(whole.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


def _is_unfinished(folder: Path) -> bool:
    """Whether a folder holds unfinished work; runs alone may be those of another program."""
    if not all(name in UNFINISHED or name.startswith(".") for name in os.listdir(folder)):
        return False
    has_work = any(True for pattern in ("finished", *KEPT_EMBEDDINGS) for _ in folder.glob(pattern))
    return has_work or not any(path.is_file() for name in RUNS for path in folder.rglob(name))


def evaluated_weights(folder: Path) -> set[str]:
    """Checksums of the towers whose results or unfinished work a folder holds."""
    if (folder / RESULT).is_file():
        recorded = read_json_object(folder / RESULT).get("weights")
        if isinstance(recorded, list):  # earlier versions did not write them down
            return set(map(str, recorded))
    paths = [path for pattern in KEPT_EMBEDDINGS for path in folder.glob(pattern)]
    checksums = {str(read_json_object(path).get("model_checksum")) for path in paths}
    for part in folder.glob("finished/**/part-*.ndjson"):
        models = (read_part(part)[0] or {}).get("model", [])
        checksums |= {models} if isinstance(models, str) else set(map(str, models))
    return checksums


def start_processes(device: str | None = None) -> torch.device:
    """Join the other processes of `accelerate launch`, if there are any. Returns the device to work on.

    By default it is this process's GPU, or the CPU where there is none. A device that is not there is an error.
    """
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(usual if device is None else device)
        # Only use shows whether a device is there; "meta" has no values.
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DualencError(f"device {device!r}: {reason}; choose another, such as cpu or cuda:0") from None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return state.device if device is None else chosen
    return chosen


@contextmanager
def writing(out: str | os.PathLike[str], wait: bool = False, option: str = "--out") -> Iterator[None]:
    """Lock an output for a command (`dualenc.files.locked`): the main process holds the lock, a refusal ends all."""
    problem = ""
    with ExitStack() as stack:
        if distributed.is_main():
            try:
                stack.enter_context(locked(out, wait, option))
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
        other = _COMMAND_OF[encoder.kind]
        raise DualencError(f"{model}: is of kind {encoder.kind}, but this task needs kind {needed}; use {other}")
    return encoder


def display_name(model: str) -> str:
    """Short name of a model in tables: its run if it is RUN/model, otherwise the last part of its path or name."""
    path = Path(model)
    if path.is_dir() and path.resolve().name == "model":
        path = path.resolve().parent
    return path.name or model
