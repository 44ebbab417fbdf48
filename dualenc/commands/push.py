"""`dualenc push`: embeddings into PostgreSQL or Qdrant; `dualenc evaluate engine`: recall of what was pushed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dualenc.commands.checks import check_options
from dualenc.errors import BelowTarget, DualencError
from dualenc.files import check_writable, locked, remove
from dualenc.terminal import printable

if TYPE_CHECKING:
    import numpy as np

    from dualenc.data.vector_shards import Embeddings
    from dualenc.search.filter_recall import Measurement
    from dualenc.search.postgres import PostgresIndex
    from dualenc.search.pushed import Engine


@dataclass(frozen=True)
class PostgresOptions:
    """A table of PostgreSQL.

    Args:
        table: of PostgreSQL; by default named as the folder of embeddings.
        index: of PostgreSQL: hnsw, ivfflat, or none for exact search.
        recall: of PostgreSQL: set the search so that recall@10 under --filters is at least this, such as 0.95, by the
            lower end of its interval of 95 %.
        filters: file of your own filters to measure with, one {"filter": "year >= 2020"} on each line.
        queries: embeddings of real queries to measure with; by default a sample of the pushed ones.
    """

    table: str | None = None
    index: Literal["hnsw", "ivfflat", "none"] = "hnsw"
    recall: float | None = None
    filters: str | None = None
    queries: str | None = None


def push(
    embeddings: str,
    target: str,
    *,
    out: str | None = None,
    collection: str | None = None,
    metric: Literal["cosine", "ip"] | None = None,
    replace: bool = False,
    postgres: PostgresOptions,
) -> None:
    """Send embeddings to a table of PostgreSQL with pgvector, or to a collection of Qdrant.

    The same command resumes an interrupted push, and sends only what is missing. OUT remembers where the
    vectors are, for `dualenc search OUT …`, but no key: PostgreSQL's password comes from the URL, PGPASSWORD or
    ~/.pgpass, and the key of a Qdrant server from the environment variable QDRANT_API_KEY.

    Args:
        embeddings: folder that `dualenc embed` wrote.
        target: postgresql://user@host/database, or the URL of a Qdrant server.
        out: folder to write, with where the vectors are; by default EMBEDDINGS-engine.
        collection: of Qdrant; by default named as the folder of embeddings.
        metric: cosine, or ip for the inner product; by default cosine for embeddings of length one, ip for others.
        replace: first remove a table or collection that holds other embeddings.
    """
    from dualenc.data.vector_shards import Embeddings
    from dualenc.search.engines import is_postgres
    from dualenc.search.pushed import check_push_target
    from dualenc.search.qdrant import push_embeddings

    to_postgres = is_postgres(target)
    folder = Path(out or f"{embeddings.rstrip('/')}-engine")
    _check(to_postgres, collection, postgres)
    check_push_target(folder)
    check_writable(folder)
    source = Path(embeddings).resolve()
    opened = Embeddings.open(embeddings)
    if to_postgres:
        return _push_to_postgres(opened, target, folder, source, postgres, metric=metric, replace=replace)
    name = collection or re.sub(r"[^A-Za-z0-9_-]+", "-", source.name).strip("-_") or "embeddings"
    with locked(folder, wait=False):
        index, sent = push_embeddings(opened, target, name, metric=metric, replace=replace, progress=True)
        index.close()
        index.meta["embeddings"] = str(source)
        index.save(folder)
    _print_sent(index, sent)
    print(printable(f'next: dualenc search {folder} "…"'))
    return None


def _print_sent(index: Engine, sent: int) -> None:
    """Say where the vectors are, and how many were missing there."""
    vectors = f"{len(index):,} vectors of dimension {index.dim} ({index.meta['metric']})"
    print(printable(f"{vectors} → {index.location}; {sent:,} sent"))


def _check(to_postgres: bool, collection: str | None, options: PostgresOptions) -> None:
    """Refuse options of the other engine, and those that need each other."""
    if to_postgres and collection is not None:
        raise DualencError("--collection is of Qdrant; name the table of PostgreSQL by --table")
    if not to_postgres and options != PostgresOptions():
        names = "--table, --index, --recall, --filters and --queries"
        raise DualencError(f"{names} are of PostgreSQL; leave them out")
    check_options(0, 1, recall=options.recall)
    if (options.recall is None) != (options.filters is None):
        raise DualencError("--recall and --filters need each other; give both")
    if options.queries is not None and options.recall is None:
        raise DualencError("--queries are for --recall; leave them out")


def _push_to_postgres(
    embeddings: Embeddings,
    target: str,
    folder: Path,
    source: Path,
    options: PostgresOptions,
    *,
    metric: Literal["cosine", "ip"] | None,
    replace: bool,
) -> None:
    """Send embeddings to a table, tune the search where a recall is asked for, and write the folder."""
    from dualenc.search.engines import postgres_module
    from dualenc.search.pushed import is_pushed, read_pushed

    postgres_module()
    from dualenc.search.filter_recall import RESULT, read_filters, save_measurement, tune
    from dualenc.search.postgres_push import push_embeddings

    filters = None if options.filters is None else read_filters(options.filters)
    with locked(folder, wait=False):
        index, sent = push_embeddings(
            embeddings,
            target,
            options.table or source.name,
            metric=metric,
            index=options.index,
            replace=replace,
            progress=True,
        )
        index.meta["embeddings"] = str(source)
        earlier = read_pushed(folder) if is_pushed(folder) else {}
        identity = ("fingerprint", "index", "target", "collection")
        if all(earlier.get(name) == index.meta[name] for name in identity):
            # A second push keeps the settings that were measured.
            index.meta["settings"] = earlier["settings"]
        else:
            remove(folder / RESULT)
        measured = None
        target_recall = options.recall or 0.0
        if filters is not None:
            queries = _queries(embeddings, len(filters), options)
            measured = tune(index, queries, filters, target_recall)
        index.save(folder)
        if measured is not None:
            # The half of the queries that `tune` measures with.
            save_measurement(folder, index, queries[1::2], measured, target_recall)
        index.close()
    _print_sent(index, sent)
    if measured is not None:
        _report(measured, target_recall, index)
    print(printable(f'next: dualenc search {folder} "…"'))


def _queries(embeddings: Embeddings, num_filters: int, options: PostgresOptions) -> np.ndarray:
    """Vectors (Q, D) of real queries, or else of the documents."""
    from dualenc.data.vector_shards import Embeddings
    from dualenc.search.filter_recall import sample_queries

    vectors = embeddings.vectors
    if options.queries is not None:
        vectors = Embeddings.open(options.queries).vectors
    return sample_queries(vectors, num_filters)


def _report(measured: Measurement, target: float, index: PostgresIndex) -> None:
    """Print the recall of each filter, and raise `BelowTarget` where their mean is too low."""
    from dualenc.evaluation.report import Table, print_table

    rows = []
    for result in measured.filters:
        row = {"filter": result.filter or "(all rows)", "recall@10": result.recall, "rows": result.rows}
        row |= {"rows of exact search": result.exact_rows, "ms": result.milliseconds}
        rows.append(row | {"ms of exact search": result.exact_milliseconds})
    print_table(Table("recall under filters", rows))
    interval = f"{measured.recall:.3f} (95 %: {measured.low:.3f} to {measured.high:.3f})"
    settings = ", ".join(f"{name} {value}" for name, value in index.meta["settings"].items())
    print(printable(f"recall@10 {interval} in {measured.searches:,} searches; {settings or 'exact'}"))
    if measured.low < target:
        remedy = "index the columns of the filters, or push with --index none"
        raise BelowTarget(f"recall@10 may be {measured.low:.3f}, below {target:g}; {remedy}")


def evaluate_engine(folder: str, recall: float | None) -> None:
    """Measure the recall under filters again, and compare it with a target."""
    from dualenc.search.engines import is_postgres, open_engine, postgres_module
    from dualenc.search.pushed import read_pushed

    if not is_postgres(read_pushed(folder)["target"]):
        raise DualencError(f"{folder}: recall under filters is measured of PostgreSQL only")
    PostgresIndex = postgres_module().PostgresIndex
    from dualenc.search.filter_recall import measure_again

    index = open_engine(folder)
    assert isinstance(index, PostgresIndex)
    measured, promised = measure_again(Path(folder), index)
    index.close()
    _report(measured, promised if recall is None else recall, index)
