"""What commands share: the device and the processes, locked outputs, models, embeddings, an
evaluation's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.evaluation.report_page import Table, check_report_target, print_table, write_report
from dualenc.io.files import (
    check_file_target,
    check_folder_target,
    check_writable,
    write_json,
)
from dualenc.io.reading import read_json_object
from dualenc.io.targets import check_outside
from dualenc.io.terminal import printable
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
    from dualenc.commands.options import OutputOptions
    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.types import Side


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


def _distinct_name(data: str) -> str:
    """The last part of a path or name, with a short hash that keeps data sets of the same name
    apart."""
    path = Path(data)
    whole = str(path.resolve()) if path.exists() else data
    return f"{path.stem}-{hashlib.sha256(whole.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"
