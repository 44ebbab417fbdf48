"""Embed into a temporary folder beside an index, before the index is built or changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dualenc import distributed
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings, read_provenance
from dualenc.errors import DualencError
from dualenc.io import files
from dualenc.io.provenance import Provenance
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.embed.writer import check_embeddings_target
from dualenc.search.index.change import check_addition
from dualenc.search.index.open import Index
from dualenc.search.migration.migration_folder import check_unmigrated
from dualenc.types import Side, StrPath
from dualenc.workflows.embed_corpus import EmbeddingJob, open_job
from dualenc.workflows.recorded_options import ReadOptions
from dualenc.workflows.session import (
    describe_embeddings,
    embed_into,
    report_skipped,
    start_processes,
    writing,
)

logger = logging.getLogger("dualenc.workflows")

MADE_BY = "dualenc index"
"""Recorded with the embeddings beside an index, to distinguish them from a user's."""


class ModelAndData(NamedTuple):
    """A model and what it embeds; without `data`, `source` is a folder of embeddings."""

    source: str
    data: str | None
    side: Side | None
    reading: ReadOptions
    batch_size: int
    dim: int | None
    device: str | None


class Beside(NamedTuple):
    """A folder of embeddings for an index; `is_appended` if the index already holds them."""

    folder: Path
    is_appended: bool = False


@contextmanager
def vectors_for(
    out: StrPath, job: ModelAndData, grown: Index | None = None, *, progress: bool
) -> Iterator[Beside]:
    """Embed beside an index that stays locked in this context; at its end they are removed.

    A folder of embeddings is returned as such, without a lock.

        with vectors_for("index", job, progress=True) as found:
            Index.build(Embeddings.open(found.folder), folder="index")

    Args:
        out: folder of the index.
        job: the model and the data.
        grown: the index to append to; None before a build.
        progress: show a progress bar.
    """
    if job.data is None:
        yield Beside(Path(job.source))
        return
    start_processes(job.device)
    # Asked before the lock, with which the marks of the killed process disappear.
    was_killed = files.was_replaced_by_killed(out)
    # The lock covers embedding and build, so that no other process changes the index in between.
    with writing(out, wait=grown is not None):
        # After the lock: a migration cannot begin any more.
        check_unmigrated(out)
        settings = {"batch_size": job.batch_size, "dim": job.dim, "output": "embedding"}
        opened = open_job(job.source, job.data, job.side, job.device, job.reading, **settings)
        found = _embed_beside(out, opened, grown, was_killed, progress)
        yield found
        if distributed.is_main():
            files.remove(found.folder)


def _embed_beside(
    out: StrPath, job: EmbeddingJob, grown: Index | None, was_killed: bool, progress: bool
) -> Beside:
    """Embed into a folder beside an index.

    The folder stays after a failed build: a factory string that FAISS refuses does not cost the
    embedding.
    """
    folder, left = folder_beside(out)
    if was_killed and grown is not None and _are_last(grown, job):
        return Beside(folder, is_appended=True)
    # The killed process may have skipped items, so compare with the rows that it wrote.
    count = 0 if left is None else sum(left.shard_rows)
    last = [] if grown is None else grown.ids[max(0, len(grown) - count) :]
    has_grown = left is not None and bool(last) and set(last) <= set(job.corpus.ids)
    if grown is not None and not has_grown:
        _check_growth(grown, job, out)
    job.settings["notes"]["made_by"] = MADE_BY
    # Only builds write this folder, so `embed_into` may replace what a failed one has left.
    embedded = embed_into(
        folder, job.tower, job.corpus, side=job.side, progress=progress, **job.settings
    )
    report_skipped(embedded)
    if distributed.is_main():
        logger.info(describe_embeddings(embedded, os.path.relpath(folder)))
    is_same = left is not None and embedded.provenance.files == left.files
    return Beside(folder, has_grown and is_same)


def folder_beside(out: StrPath) -> tuple[Path, Provenance | None]:
    """Return the folder of embeddings beside an index, and the record of those left in it.

    Args:
        out: folder of the index.

    Raises:
        DualencError: it holds anything but what a build of the index has left.
    """
    target = Path(os.path.abspath(out))
    folder = target.with_name(f".{target.name}.embeddings")
    left = read_provenance(folder) if check_embeddings_target(folder) else None
    if left is not None and left.made_by != MADE_BY:
        raise DualencError(
            "holds embeddings that were not left by a build of the index",
            fix="move the folder away, or remove it",
            where=folder,
        )
    return folder, left


def _are_last(grown: Index, job: EmbeddingJob) -> bool:
    """Return True if the last rows of an index are those items of the job that it holds."""
    rows = rows_of(grown.ids, job.corpus.ids)
    rows = rows[rows >= 0]
    return len(rows) > 0 and rows.tolist() == list(range(len(grown) - len(rows), len(grown)))


def _check_growth(grown: Index, job: EmbeddingJob, out: StrPath) -> None:
    """Raise before the embedding if the index would refuse its result."""
    about = Provenance(
        dim=job.settings["dim"] or job.tower.dim,
        model_checksum=tower_checksum(job.tower),
        side=job.side,
        output=job.settings["output"],
    )
    check_addition(grown, about, job.corpus.ids, out)


def first_components(embeddings: Embeddings, dim: int | None) -> Embeddings:
    """Return embeddings cut to their first `dim` components, if they have more."""
    return embeddings if dim is None or embeddings.dim == dim else embeddings.first(dim)
