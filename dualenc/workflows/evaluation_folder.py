"""The output folder of an evaluation: checked and locked before the work, written at its end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.evaluation.report_page import Table, check_report_target, write_report
from dualenc.io.files import (
    check_file_target,
    check_folder_target,
    check_writable,
    write_json,
)
from dualenc.io.reading import read_json_object
from dualenc.io.targets import check_outside
from dualenc.search.embed.encode import tower_checksum
from dualenc.types import StrPath
from dualenc.workflows.session import (
    embed_into,
    open_model,
    report_skipped,
    short_name,
    start_processes,
    writing,
)

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.types import Side

RESULT = "metrics.json"
PAGE = "report.html"
UNFINISHED = (
    "embeddings/*/meta.json",
    "*/embeddings/*/meta.json",
    "features/*/meta.json",
    "documents.json",
)
"""Files that identify an evaluation without results, which was interrupted."""


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of an evaluation and where they were written. The same on every process.

        result = evaluate_retrieval("runs/first/model", "data/scifact")
        result.metrics["systems"]["first"]["mean"]["ndcg@10"]

    Attributes:
        folder: output folder, with metrics.json, report.html and the embeddings.
        metrics: the measured values, as metrics.json has them.
        tables: the tables of the report; the first is the summary.
        facts: the settings of the evaluation, as metrics.json has them.
    """

    folder: Path
    metrics: Mapping[str, Any]
    tables: Sequence[Table]
    facts: Mapping[str, Any]


class EvaluationFolder:
    """The output folder of one task, such as "retrieval". It is locked inside a `with` block.

        with EvaluationFolder("retrieval", "runs/first/model", "data/scifact") as evaluation:
            encoder = evaluation.open("query-document")

    Args:
        task: task of `dualenc evaluate`, such as "retrieval".
        model: model folder or name.
        data: evaluated data; its name is part of the default folder.
        out: folder to write; by default evaluations/TASK/MODEL-DATA-HASH.
        device: torch device such as "cpu" or "cuda:0"; by default a GPU if there is one.
        progress: show progress bars.

    Raises:
        DualencError: if the folder holds other files, another task or a run in progress.
    """

    def __init__(
        self,
        task: str,
        model: str,
        data: str,
        *,
        out: StrPath | None = None,
        device: str | None = None,
        progress: bool = True,
    ) -> None:
        default = f"evaluations/{task}/{short_name(model)}-{_distinct_name(data)}"
        self.task = task
        self.model = model
        self.folder = Path(out or default)
        self.progress = progress
        self.weights: list[str] = []
        self.num_skipped = 0
        # Everything that can be refused is refused before hours of encoding.
        check_outside(self.folder)
        check_writable(self.folder)
        check_folder_target(self.folder, self._is_own_folder, f"evaluation of {task}")
        check_file_target(self.folder / RESULT)
        check_report_target(self.folder / PAGE)
        self.device = start_processes(device)
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        self._lock.enter_context(writing(self.folder))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # With the error, so that folders that were made for a refused evaluation are removed.
        self._lock.__exit__(kind, error, traceback)

    def _is_own_folder(self, folder: Path) -> bool:
        """Return True if the folder holds this task's results, or an interrupted evaluation."""
        if (folder / RESULT).is_file():
            return read_json_object(folder / RESULT).get("task") == self.task
        # An interrupted evaluation has embeddings, which the same command reuses.
        return any(True for pattern in UNFINISHED for _ in folder.glob(pattern))

    def check_weights(self, *towers: Tower) -> None:
        """Record the checksums of the evaluated towers.

        Raises:
            DualencError: if the folder holds the results of other weights.
        """
        self.weights = sorted({tower_checksum(tower) for tower in towers})
        # A run that was trained again in place has the same model name and other weights.
        result = self.folder / RESULT
        if result.is_file() and read_json_object(result).get("weights") != self.weights:
            raise DualencError(
                f"holds an evaluation of other weights than {self.model} has now",
                fix="choose another --out, or remove the folder",
                where=self.folder,
            )

    def open(self, *kinds: str) -> DualEncoder:
        """Load the model, which must be of one of these kinds, and check its weights."""
        encoder = open_model(self.model, kinds, self.device)
        self.check_weights(encoder.left, encoder.right)
        return encoder

    def embed(
        self, folder: StrPath, encoder: DualEncoder, side: Side, corpus: Corpus, batch_size: int
    ) -> Embeddings:
        """Embed a corpus into a folder below the output, or reuse matching embeddings there."""
        return self.embed_items(
            folder,
            encoder.tower(side),
            corpus,
            side=side,
            notes={"model": self.model},
            batch_size=batch_size,
        )

    def embed_items(
        self, folder: StrPath, tower: Tower, corpus: Corpus, **settings: Any
    ) -> Embeddings:
        """Embed with one tower; `settings` are those of `embed_into`. Skipped items are counted."""
        target = self.folder / folder
        embeddings = embed_into(target, tower, corpus, progress=self.progress, **settings)
        report_skipped(embeddings)
        self.num_skipped += embeddings.provenance.skipped
        return embeddings

    def conclude(
        self,
        task: str,
        on: str,
        facts: Mapping[str, object],
        metrics: Mapping[str, object],
        tables: Sequence[Table],
    ) -> EvaluationResult:
        """Write metrics.json and report.html. Called on the main process only.

        Args:
            task: readable name of the task, for the heading of the report.
            on: name of the data, for the heading.
            facts: settings of the evaluation by name.
            metrics: measured values by name.
            tables: tables of the report.
        """
        if self.num_skipped:
            facts = {**facts, "skipped": self.num_skipped}
        title = f"{task}: {short_name(self.model)} on {on}"
        contents = {"task": self.task, **facts, "weights": self.weights, **metrics}
        write_json(self.folder / RESULT, contents)
        write_report(self.folder / PAGE, title, facts=facts, tables=tables)
        return EvaluationResult(self.folder, metrics, tables, facts)


def _distinct_name(data: str) -> str:
    """Return the last part of a path or name and a short hash of the whole.

    The hash keeps data sets of the same name apart.
    """
    path = Path(data)
    whole = str(path.resolve()) if path.exists() else data
    digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{path.stem}-{digest[:6]}"
