"""Push embeddings into PostgreSQL or Qdrant."""

from __future__ import annotations

import logging
import re
from contextlib import closing
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Literal

from dualenc.data.readers.vectors import refuse_vector_file
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.files import check_writable, locked
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.factory import is_postgres, push_embeddings
from dualenc.search.engines.pushed_folder import check_push_target, is_pushed, read_pushed
from dualenc.types import Metric, StrPath
from dualenc.workflows.measure_engine import EngineRecall, checked_filters, measure_recall

logger = logging.getLogger("dualenc.workflows")


@dataclass(frozen=True)
class PushResult:
    """Location of pushed vectors, and how many were sent.

        result = push("embeddings", "postgresql://me@localhost/papers")
        print(result.sent, result.location)

    Attributes:
        folder: folder that records the location, for `dualenc search`.
        location: server and table or collection, without credentials.
        count: number of stored vectors.
        dim: their dimension.
        metric: "cosine", or "ip" for the inner product.
        sent: number of rows that were sent now; the others were stored already.
        recall: recall under filters, if filters were given.
    """

    folder: Path
    location: str
    count: int
    dim: int
    metric: Metric
    sent: int
    recall: EngineRecall | None = None


def push(
    embeddings: StrPath,
    target: str,
    *,
    out: StrPath | None = None,
    table: str | None = None,
    index: Literal["hnsw", "ivfflat", "none"] = "hnsw",
    metric: Metric | None = None,
    replace: bool = False,
    filters: str | None = None,
    queries: str | None = None,
    recall: float | None = None,
    progress: bool = True,
) -> PushResult:
    """Send embeddings to a table of PostgreSQL with pgvector, or to a collection of Qdrant.

    The same call resumes an interrupted push and sends what is missing. Same as `dualenc push`,
    except that a recall below the target is returned: call `result.recall.check()`.

        result = dualenc.push("embeddings", "postgresql://me@localhost/papers")
        result.sent

    Args:
        embeddings: folder that `dualenc embed` wrote.
        target: postgresql://user@host/database, or the URL of a Qdrant server. The password comes
            from the URL, PGPASSWORD or ~/.pgpass, the key of Qdrant from QDRANT_API_KEY.
        out: folder to write, with the location of the vectors; by default EMBEDDINGS-engine.
        table: table of PostgreSQL, as table or schema.table, or collection of Qdrant; by default
            named after the folder of embeddings.
        index: index of PostgreSQL; "none" for exact search.
        metric: "cosine", or "ip" for the inner product; by default "cosine" for unit vectors and
            "ip" for others.
        replace: replace other embeddings in the table. They are found until all new ones are
            stored.
        filters: file with one {"filter": …} per line, to choose search settings for.
        queries: embeddings of real queries to measure with; by default a sample of the documents.
        recall: recall@10 that the search must reach under the filters, by the lower end of its 95%
            interval; by default 0.95.
        progress: show a progress bar.

    Returns:
        Where the vectors are, how many were sent, and the recall under filters.

    Raises:
        DualencError: if the target cannot be reached or holds something else.
    """
    refuse_vector_file(embeddings)
    source = Path(embeddings).resolve()
    name = table or _default_name(source, target)
    # Everything that can be refused is refused before the first row is sent.
    if not is_postgres(target) and index != "hnsw":
        raise DualencError("--index is of PostgreSQL", fix="leave it out")
    if recall is not None and filters is None:
        raise DualencError("--recall is measured under filters", fix="name them by --filters")
    checked = checked_filters(filters, queries)
    folder = Path(out or f"{str(embeddings).rstrip('/')}-engine")
    check_push_target(folder)
    check_writable(folder)
    opened = Embeddings.open(embeddings)
    # The folder records one engine: a second push would overwrite the settings of the first.
    with locked(folder, wait=False):
        engine, sent = push_embeddings(
            opened, target, name, metric=metric, index=index, replace=replace, progress=progress
        )
        with closing(engine):
            _record(engine, source, folder)
            metric = engine.provenance.metric
            result = PushResult(folder, engine.location, len(engine), engine.dim, metric, sent)
            # Logged before the measurement, which may fail after hours of sending.
            logger.info(
                "%s vectors of dimension %d (%s) → %s; %s sent",
                f"{result.count:,}",
                result.dim,
                result.metric,
                result.location,
                f"{result.sent:,}",
            )
            if checked is None:
                return result
            return replaced(result, recall=measure_recall(folder, engine, checked, queries, recall))


def _default_name(embeddings: Path, target: str) -> str:
    """Return the table or collection of an engine that is named after a folder."""
    if is_postgres(target):
        # Quoted: a dot in the name of a folder does not separate a schema from a table.
        return '"{}"'.format(embeddings.name.replace('"', '""'))
    # Names of collections are parts of URLs.
    return re.sub(r"[^A-Za-z0-9_-]+", "-", embeddings.name).strip("-_") or "embeddings"


def _record(engine: Engine, embeddings: Path, folder: Path) -> None:
    """Write where the vectors are, and keep the settings that an earlier push has measured."""
    engine.record(embeddings=str(embeddings))
    earlier = read_pushed(folder) if is_pushed(folder) else None
    # Settings of another collection do not hold for this one.
    if earlier is not None and engine.is_remembered(earlier):
        engine.record(settings=earlier.settings)
    engine.save(folder)
