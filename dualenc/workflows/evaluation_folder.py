"""The output folder of an evaluation: checked and locked before the work, written at its end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.evaluation.report_page import Table
from dualenc.io.reading import read_json_object
from dualenc.search.embed.encode import tower_checksum
from dualenc.types import StrPath
from dualenc.workflows.result_folder import RESULT, check_result_folder, write_results
from dualenc.workflows.session import (
    embed_into,
    open_model,
    report_skipped,
    short_name,
    start_processes,
    writing,
)

if TYPE_CHECKING:
    import torch

    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.types import Side

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


@contextmanager
def evaluation_of(
    task: str, model: str, data: str, out: StrPath | None, device: str | None, progress: bool
) -> Iterator[EvaluationFolder]:
    """Check and lock the output folder of one task in this context.

        with evaluation_of("retrieval", "model", "data/scifact", None, None, True) as evaluation:
            encoder = evaluation.open("query-document")

    Args:
        task: task of `dualenc evaluate`, such as "retrieval".
        model: model folder or name.
        data: evaluated data; its name is part of the default folder.
        out: folder to write; None takes evaluations/TASK/MODEL-DATA-HASH.
        device: torch device such as "cpu" or "cuda:0"; None takes a GPU if there is one.
        progress: show progress bars.

    Raises:
        DualencError: if the folder holds other files, another task or a run in progress.
    """
    default = f"evaluations/{task}/{short_name(model)}-{_distinct_name(data)}"
    folder = Path(out or default)
    # Everything that can be refused is refused before hours of encoding.
    check_result_folder(folder, task, f"evaluation of {task}", _has_embeddings)
    evaluation = EvaluationFolder(task, model, folder, start_processes(device), progress)
    # Two evaluations in one folder would replace each other's embeddings.
    with writing(folder):
        yield evaluation


@dataclass
class EvaluationFolder:
    """The output folder of one task, which `evaluation_of` has checked and locked.

    Attributes:
        task: task of `dualenc evaluate`, such as "retrieval".
        model: model folder or name.
        folder: folder to write.
        device: device to compute on.
        progress: show progress bars.
        weights: checksums of the evaluated towers.
        num_skipped: number of items that could not be embedded.
    """

    task: str
    model: str
    folder: Path
    device: torch.device
    progress: bool
    weights: Sequence[str] = ()
    num_skipped: int = 0

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
        # One bar per side and data set, which the name of the folder tells apart.
        name = Path(folder).as_posix().replace("embeddings/", "")
        progress = f"embed {name}" if self.progress else False
        embeddings = embed_into(self.folder / folder, tower, corpus, progress=progress, **settings)
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
            facts: settings of the evaluation by name, without the model.
            metrics: measured values by name.
            tables: tables of the report.
        """
        facts = {"model": self.model, **facts}
        # Metrics over fewer items than the data has should say so.
        if self.num_skipped:
            facts["skipped"] = self.num_skipped
        title = f"{task}: {short_name(self.model)} on {on}"
        measured = {"weights": self.weights, **metrics}
        write_results(self.folder, title, self.task, facts, measured, tables)
        return EvaluationResult(self.folder, metrics, tables, facts)


def _has_embeddings(folder: Path) -> bool:
    """Return True if a folder has embeddings of an evaluation, which the same command reuses."""
    return any(any(folder.glob(pattern)) for pattern in UNFINISHED)


def _distinct_name(data: str) -> str:
    """Return the last part of a path or name and a short hash of the whole.

    The hash keeps data sets of the same name apart.
    """
    path = Path(data)
    whole = str(path.resolve()) if path.exists() else data
    digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{path.stem}-{digest[:6]}"
