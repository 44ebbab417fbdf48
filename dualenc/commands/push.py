"""`dualenc push`: send embeddings to PostgreSQL or Qdrant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NormFloat

from dualenc.commands.output import QUERY, print_line, print_next

if TYPE_CHECKING:
    from dualenc.workflows.measure_engine import EngineRecall


@dataclass(frozen=True)
class RecallOptions:
    """Recall under filters.

    Args:
        recall: recall@10 that the search must reach under --filters, such as 0.95, by the lower end
            of its 95% interval.
        filters: file with filters of your data, one {"filter": "year >= 2020"} on each line, to
            choose settings by: SQL for PostgreSQL, JSON for Qdrant, conditions for an index.
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

    The same command resumes an interrupted push, and sends what is missing. OUT records where the
    vectors are, for `dualenc search OUT …`, but never a key: PostgreSQL's password comes from the
    URL, PGPASSWORD or ~/.pgpass, and the key of a Qdrant server from the environment variable
    QDRANT_API_KEY.

    Args:
        embeddings: folder that `dualenc embed` wrote.
        target: postgresql://user@host/database, or the URL of a Qdrant server.
        out: folder to write, which records where the vectors are; by default EMBEDDINGS-engine.
        table: table of PostgreSQL, as table or schema.table, with double quotes around a name with
            a dot ('"a.b"'); or the collection of Qdrant. By default named after the folder of
            embeddings.
        index: index of PostgreSQL: hnsw, ivfflat, or none for exact search.
        metric: cosine, or ip for the inner product; by default cosine for unit vectors, ip for
            others.
        replace: replace other embeddings in the table, which are found until all new ones are
            stored; and remove rows that do not belong to the embeddings.
    """
    from dualenc.workflows.push_vectors import push as push_vectors

    result = push_vectors(
        embeddings,
        target,
        out=out,
        table=table,
        index=index,
        metric=metric,
        replace=replace,
        **vars(options),
    )
    # The workflow has logged what was sent before it measured.
    if result.recall is not None:
        print_recall(result.recall)
        # After the table, which shows the filters that lose results.
        result.recall.check()
    print_next(["search", str(result.folder)], QUERY)


def print_recall(measured: EngineRecall) -> None:
    """Print the recall of each filter, and their mean."""
    from dualenc.evaluation.report_page import Table, print_table

    print_table(Table("recall@10 under filters", measured.filters))
    interval = f"{measured.recall:.3f} (95 %: {measured.low:.3f} to {measured.high:.3f})"
    settings = ", ".join(f"{name} {value}" for name, value in measured.settings.items())
    summary = f"recall@10 {interval} in {measured.searches:,} searches; {settings or 'exact'}"
    print_line(summary)
