"""`dualenc push`: embeddings into PostgreSQL or Qdrant; `dualenc evaluate engine`: recall under
filters."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NormFloat

from dualenc.errors import BelowTarget, DualencError
from dualenc.io.files import check_writable, locked
from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from dualenc.search.engines.filter_recall import Searched


@dataclass(frozen=True)
class RecallOptions:
    """Recall under filters.

    Args:
        recall: recall@10 that the search must reach under --filters, such as 0.95, by the lower end
            of its interval of 95 %.
        filters: file of your own filters, one {"filter": "year >= 2020"} on each line, to choose
            settings by: SQL for PostgreSQL, JSON for Qdrant, conditions for an index.
        queries: embeddings of real queries to measure with; by default a sample of the documents.
    """

    recall: NormFloat | None = None
    filters: str | None = None
    queries: str | None = None


def push(
    embeddings: str,
    target: str,
    *,
    out: str | None = None,
    table: Annotated[str | None, Parameter(alias="--collection")] = None,
    index: Literal["hnsw", "ivfflat", "none"] = "hnsw",
    metric: Literal["cosine", "ip"] | None = None,
    replace: bool = False,
    options: RecallOptions,
) -> None:
    """Send embeddings to a table of PostgreSQL with pgvector, or to a collection of Qdrant.

    The same command resumes an interrupted push, and sends what is missing. OUT remembers where the
    vectors are, for `dualenc search OUT …`, but no key: PostgreSQL's password comes from the URL,
    PGPASSWORD or ~/.pgpass, and the key of a Qdrant server from the environment variable
    QDRANT_API_KEY.

    Args:
        embeddings: folder that `dualenc embed` wrote.
        target: postgresql://user@host/database, or the URL of a Qdrant server.
        out: folder to write, with where the vectors are; by default EMBEDDINGS-engine.
        table: of PostgreSQL, as table or schema.table, with double quotes around a name with a dot
            ('"a.b"'); or the collection of Qdrant. By default named as the folder of embeddings.
        index: of PostgreSQL: hnsw, ivfflat, or none for exact search.
        metric: cosine, or ip for the inner product; by default cosine for embeddings of length one,
            ip for others.
        replace: put the embeddings in the place of others, which are found until all new ones are
            stored; and remove rows that are not of the embeddings.
    """
    from dualenc.data.store.vector_shards import Embeddings
    from dualenc.search.engines.engine import check_push_target, is_pushed, read_pushed
    from dualenc.search.engines.factory import is_postgres, push_embeddings

    source = Path(embeddings).resolve()
    # A dot in the name of a folder is no schema.
    name = table or '"{}"'.format(source.name.replace('"', '""'))
    if not is_postgres(target):
        if index != "hnsw":
            raise DualencError("--index is of PostgreSQL; leave it out")
        name = table or re.sub(r"[^A-Za-z0-9_-]+", "-", source.name).strip("-_") or "embeddings"
    if options.recall is not None and options.filters is None:
        raise DualencError("--recall is measured under filters; name them by --filters")
    filters = _checked_filters(options)
    folder = Path(out or f"{embeddings.rstrip('/')}-engine")
    check_push_target(folder)
    check_writable(folder)
    opened = Embeddings.open(embeddings)
    with locked(folder, wait=False):
        engine, sent = push_embeddings(
            opened, target, name, metric=metric, index=index, replace=replace, progress=True
        )
        engine.meta["embeddings"] = str(source)
        earlier = read_pushed(folder) if is_pushed(folder) else {}
        if earlier and engine.is_remembered(earlier):
            # A second push keeps the settings that were measured.
            engine.meta["settings"] = earlier.get("settings", {})
        engine.save(folder)
        vectors = f"{len(engine):,} vectors of dimension {engine.dim} ({engine.meta['metric']})"
        print(printable(f"{vectors} → {engine.location}; {sent:,} sent"))
        if filters is not None:
            _measure(folder, engine, options, filters)
    engine.close()
    print(printable(f'next: dualenc search {shlex.quote(str(folder))} "…"'))


def evaluate_engine(folder: str, options: RecallOptions) -> None:
    """Measure recall under the recorded filters again, or under new ones, with settings that keep
    it."""
    from dualenc.search.engines.filter_recall import open_searched

    filters = _checked_filters(options)
    searched = open_searched(Path(folder))
    with locked(folder, wait=False):
        _measure(Path(folder), searched, options, filters)
    searched.close()


def _checked_filters(options: RecallOptions) -> list[str] | None:
    from dualenc.search.engines.filter_recall import read_filters

    if options.queries is not None and options.filters is None:
        raise DualencError("--queries are for --filters; leave them out")
    return None if options.filters is None else read_filters(options.filters)


def _measure(
    folder: Path, searched: Searched, options: RecallOptions, filters: list[str] | None
) -> None:
    """Print the recall of each filter, and raise `BelowTarget` where their mean is too low."""
    from dualenc.evaluation.report_page import Table, print_table
    from dualenc.search.engines.filter_recall import measure_again, sample_queries, tune_folder

    if filters is None:
        measured, promised = measure_again(folder, searched)
        target = promised if options.recall is None else options.recall
    else:
        target = 0.95 if options.recall is None else options.recall
        queries = sample_queries(searched, options.queries, len(filters))
        measured = tune_folder(folder, searched, queries, filters, target)
    print_table(Table("recall@10 under filters", measured.filters))
    interval = f"{measured.recall:.3f} (95 %: {measured.low:.3f} to {measured.high:.3f})"
    named = ", ".join(
        f"{name} {value}" for name, value in searched.meta.get("settings", {}).items()
    )
    print(printable(f"recall@10 {interval} in {measured.searches:,} searches; {named or 'exact'}"))
    if measured.low < target:
        remedy = (
            "index the columns of the filters, or search exactly (--index none, --factory Flat)"
        )
        raise BelowTarget(f"recall@10 may be {measured.low:.3f}, below {target:g}; {remedy}")
