"""Bring in the vectors of a FAISS file or a .npy matrix, with the ids, texts and columns of a
table.

They become a folder of embeddings, as `dualenc embed` writes it, from which everything else starts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.data import Corpus
from dualenc.data.readers.id_lists import read_ids
from dualenc.data.readers.sources import open_corpus
from dualenc.data.store.items import rows_of
from dualenc.errors import DualencError
from dualenc.io import files
from dualenc.search.embed.writer import EmbeddingWriter, Skipped
from dualenc.search.vector_files import VectorFile, open_vector_file
from dualenc.types import Metric, Side, StrPath
from dualenc.workflows.embed_beside import MADE_BY, Beside, folder_beside
from dualenc.workflows.recorded_options import ReadOptions, to_record
from dualenc.workflows.session import recorded_name, report_skipped, start_processes, writing

logger = logging.getLogger("dualenc.workflows")


class FileAndData(NamedTuple):
    """A file of vectors, and what is known of them.

    Attributes:
        source: FAISS file or .npy matrix.
        data: table or folder with their texts; None for none.
        ids: list of their ids; None for those of the file or of `data`, or row numbers.
        model: name of the model that made them; None if unknown.
        metric: "cosine" or "ip"; None takes that of the file.
        reading: how `data` is read.
    """

    source: str
    data: str | None
    ids: StrPath | None
    model: str | None
    metric: Metric | None
    reading: ReadOptions


class Items(NamedTuple):
    """The items of N vectors: their ids, and for each the row in a corpus, -1 without a text."""

    ids: list[str]
    corpus: Corpus | None
    rows: list[int]
    finding: str


def check_file(job: FileAndData, side: Side | None, *, has_texts: bool) -> None:
    """Raise if options would be ignored, or need data that is not named."""
    if side is not None:
        raise DualencError("--side is for a model", fix="leave it out", where=job.source)
    if job.data is None and has_texts:
        raise DualencError(
            "a file of vectors holds no texts",
            fix=f"name them: index {job.source} TABLE --texts",
            where=job.source,
        )


@contextmanager
def vectors_of(out: StrPath, job: FileAndData) -> Iterator[Beside]:
    """Write the vectors of a file beside an index that stays locked; at the end they are removed.

        with vectors_of("index", FileAndData("plain.faiss", None, None, None, None, {})) as found:
            Index.build(Embeddings.open(found.folder), folder="index")

    Args:
        out: folder of the index.
        job: the file, and what is known of its vectors.
    """
    start_processes(None)
    with writing(out):
        folder, _ = folder_beside(out)
        if distributed.is_main():
            # Reading the file again takes no longer than checking what a killed process has left.
            files.remove(folder)
            write_vectors(folder, job)
        yield Beside(folder)
        if distributed.is_main():
            files.remove(folder)


def write_vectors(folder: Path, job: FileAndData) -> None:
    """Write the vectors of a file as a folder of embeddings.

    Vectors that are zero, not finite, or without a text where texts are named, are left out and
    counted.

    Args:
        folder: folder to write.
        job: the file, and what is known of its vectors.
    """
    opened = open_vector_file(job.source)
    metric = job.metric or opened.metric()
    items = _items_of(opened, job)
    logger.info("%s; %s", opened.finding(metric), items.finding)
    writer = _writer(folder, opened, items, job, metric)

    def read(number: int) -> tuple[np.ndarray, Skipped]:
        rows = writer.ranges[number]
        skipped = [(row, reason) for row in rows if (reason := _fault(opened, items, row))]
        left_out = [row - rows.start for row, _ in skipped]
        # float64 may exceed float32, and is then left out as not finite.
        with np.errstate(over="ignore"):
            block = np.asarray(opened.vectors[rows.start : rows.stop]).astype(opened.dtype)
        return np.delete(block, left_out, axis=0), skipped

    report_skipped(writer.write_all(read))


def _fault(opened: VectorFile, items: Items, row: int) -> str:
    """Return why a vector is left out; "" if it is not."""
    length = opened.lengths[row]
    if not np.isfinite(length):
        return "its vector is not finite"
    if length == 0:
        return "its vector is zero"
    return "it is not in the data" if items.corpus is not None and items.rows[row] < 0 else ""


def _writer(
    folder: Path, opened: VectorFile, items: Items, job: FileAndData, metric: Metric
) -> EmbeddingWriter:
    """Return the writer of the folder, which takes texts and columns from the corpus."""
    corpus = items.corpus
    notes: dict[str, Any] = {"made_by": MADE_BY, "metric": metric}
    if job.model is not None:
        notes["model"] = recorded_name(job.model)
    options: dict[str, Any] = {}
    if corpus is not None:
        source = recorded_name(os.fspath(job.data or ""))
        notes |= {"data": source, "read": to_record(job.reading), "modality": "text"}
        # Vectors without an item are left out before their text is asked for.
        options["snippet"] = lambda row: corpus.text(items.rows[row])
        options["whole_text"] = lambda row: corpus.items[items.rows[row]]
        if corpus.columns is not None:
            options["columns"] = corpus.columns.take([max(row, 0) for row in items.rows])
    return EmbeddingWriter(
        folder,
        items.ids,
        opened.dim,
        opened.dtype,
        {"side": "right"},
        {**notes, "normalized": opened.is_unit},
        contents=functools.partial(_contents, opened),
        **options,
    )


def _contents(opened: VectorFile, rows: range) -> str:
    """Return a checksum of some vectors."""
    block = np.ascontiguousarray(opened.vectors[rows.start : rows.stop])
    return hashlib.sha256(block.data).hexdigest()


def _items_of(opened: VectorFile, job: FileAndData) -> Items:
    """Return ids and corpus rows of the vectors: by id where they have ids, or else by position."""
    count = len(opened.lengths)
    ids, finding = opened.ids, "ids of the file"
    if job.ids is not None:
        ids, finding = read_ids(job.ids, job.reading.get("id_column")), f"ids of {job.ids}"
        _check_count(len(ids), count, job.ids, job.source)
    if job.data is None:
        if ids is None:
            ids = [str(row) for row in range(count)]
            finding = "ids are row numbers, as none were named (--ids)"
        return Items(ids, None, [], finding)
    options: dict[str, Any] = {**job.reading, "columns": job.reading.get("columns") or ()}
    corpus = open_corpus(job.data, modality="text", **options)
    if ids is None:
        if corpus.skipped:
            raise DualencError(
                f"{corpus.skipped:,} rows cannot be used, so rows and vectors cannot be matched by "
                "their position",
                fix="correct them, or name the ids of the vectors with --ids",
                where=job.data,
            )
        _check_count(len(corpus), count, job.data, job.source)
        return Items(corpus.ids, corpus, list(range(count)), f"row i of {job.data} is vector i")
    rows = rows_of(corpus.ids, ids).tolist()
    if max(rows) < 0:
        raise DualencError(
            f"has none of the vectors' ids; theirs begin with {ids[0][:40]!r}, its own with "
            f"{corpus.ids[0][:40]!r}",
            fix="name the column with --id-column, or the ids of the vectors with --ids",
            where=job.data,
        )
    return Items(ids, corpus, rows, f"{finding}, joined with {job.data}")


def _check_count(given: int, count: int, where: StrPath, source: str) -> None:
    """Raise unless there is one row for each vector."""
    if given != count:
        raise DualencError(
            f"has {given:,} rows for the {count:,} vectors of {source}",
            fix="give one per vector, in the same order, or name their ids with --ids",
            where=where,
        )
