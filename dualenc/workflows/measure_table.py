"""Measure a new model on a sample of a table's rows, and order its rows by past queries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from psycopg.sql import SQL, Composable, Identifier

from dualenc.data import Corpus
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.beir import read_judged_queries
from dualenc.data.readers.sources import open_corpus
from dualenc.encoders import DualEncoder, Tower, load_model
from dualenc.errors import DualencError
from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.metrics import Qrels
from dualenc.search.embed.encode import embed
from dualenc.search.engines.postgres_connection import compose
from dualenc.search.engines.postgres_index_copies import indexes_of
from dualenc.search.engines.postgres_migration import TableMigration
from dualenc.search.engines.postgres_vectors import OPERATORS
from dualenc.search.migration.maps import NEIGHBORS
from dualenc.search.migration.stages import sample_size
from dualenc.types import Vectors
from dualenc.workflows.migration_documents import MAX_JUDGED, MAX_QUERIES
from dualenc.workflows.row_texts import RowTexts
from dualenc.workflows.text_vectors import text_vectors

MIN_ROWS = 2
"""Fewer rows have no neighbors to compare."""


class TableSample:
    """A sample of the rows of a table, with the vectors of both models.

    Args:
        migration: the migration of the table.
        encoder: the new model.
        old_model: name of the old model, for judged queries; None if it is unknown.
        data: BEIR folder with judgements of the rows; None compares results.
        batch_size: texts per forward pass.
        texts: whole texts of the rows; None if the table stores them.

    Raises:
        DualencError: judgements are given without the old model, or none fits the rows.
    """

    def __init__(
        self,
        migration: TableMigration,
        encoder: DualEncoder,
        old_model: str | None,
        data: str | None,
        batch_size: int,
        texts: RowTexts | None = None,
    ) -> None:
        self.migration = migration
        self.texts = texts
        self.encoder = encoder
        self.old_model = old_model
        self.batch_size = batch_size
        self.judged: tuple[Corpus, Qrels] | None = None
        if data is not None:
            self.judged = self._open_judged(Path(data))
        if self.judged is not None and old_model is None:
            raise DualencError(
                "judged queries need the model of the old vectors", fix="name it: --old-model"
            )

    def _open_judged(self, folder: Path) -> tuple[Corpus, Qrels]:
        """Return test queries with judgements of rows of the table."""
        if not (folder / "qrels" / "test.tsv").is_file():
            raise DualencError(
                "has no test judgements (qrels/test.tsv)",
                fix="name a BEIR folder, or leave --data out",
                where=folder,
            )
        bad_rows = BadRows(folder)
        ids = [id for (id,) in self._select("SELECT {id}::text FROM {table}")]
        queries, qrels = read_judged_queries(folder, "test", ids, bad_rows)
        bad_rows.report()
        known = set(ids)
        judged = {}
        for query, grades in qrels.items():
            own = {name: grade for name, grade in grades.items() if name in known}
            if max(own.values(), default=0) > 0:
                judged[query] = own
        rows = [row for row, name in enumerate(queries.ids) if name in judged]
        if not rows:
            raise DualencError(
                "none of its judgements is of a row of the table",
                fix="name a BEIR folder whose document ids are those of --id",
                where=folder,
            )
        kept = np.random.default_rng(0).permutation(rows)[:MAX_JUDGED]
        chosen = queries.take(np.sort(kept))
        return chosen, {name: judged[name] for name in chosen.ids}

    def _select(self, query: str, values: Any = None, **parts: Composable) -> list[Any]:
        """Execute a query that names its parts, and return its rows."""
        columns = self.migration.columns
        known = {
            "id": Identifier(columns.id.name),
            "text": Identifier(columns.text.name),
            "vector": Identifier(columns.vector.name),
            "table": self.migration.table.sql,
            "where": self.migration.condition,
        }
        statement = SQL(query).format(**{**known, **parts})
        connection = self.migration.table.database.connection
        return connection.execute(statement, values).fetchall()

    def measure(self) -> dict[str, Any]:
        """Return `facts` and `systems` of the report."""
        [(count,)] = self._select("SELECT count(*) FROM {table}")
        ids, texts, old = self._rows(int(count))
        found = text_vectors(self.encoder.right, texts, self.batch_size)
        kept = [row for row, vector in enumerate(found) if not isinstance(vector, str)]
        facts = {"rows": int(count), "sample": len(kept), "old model": self.old_model or "unknown"}
        if len(kept) < MIN_ROWS:
            # Nothing can be compared, and filling takes no time.
            return {"facts": facts, "systems": []}
        new = np.array([found[row] for row in kept])
        if self.judged is not None:
            systems = self._judged_systems(old[kept], new)
            names = [ids[row] for row in kept]
            scores = measures.judged_scores(systems, self.judged[0].ids, names, self.judged[1])
            facts |= {"queries": len(self.judged[0]), "relevant are": "judged rows"}
        else:
            rows = np.arange(len(kept))[:MAX_JUDGED]
            systems = {measures.OLD: (old[kept][rows], old[kept]), measures.NEW: (new[rows], new)}
            scores = measures.neighbour_scores(systems, rows)
            facts |= {"queries": len(rows), "relevant are": "the new model's neighbours of rows"}
        return {"facts": facts, "systems": measures.summarize(scores)}

    def _rows(self, count: int) -> tuple[list[str], list[str], Vectors]:
        """Return ids, texts and old vectors of the sample, and of the judged rows."""
        query = """
            SELECT {id}::text, {text}, {vector}::real[] FROM {table}
            WHERE {where} AND {vector} IS NOT NULL AND {text} IS NOT NULL
        """
        values = {**self.migration.values, "size": sample_size(count)}
        # An order that does not depend on how rows are stored.
        drawn = self._select(f"{query} ORDER BY md5({{id}}::text) LIMIT %(size)s", values)
        if self.judged is not None:
            known = {row[0] for row in drawn}
            names = {name for grades in self.judged[1].values() for name in grades}
            values["ids"] = sorted(names - known)
            drawn += self._select(f"{query} AND {{id}}::text = ANY(%(ids)s)", values)
        vectors: Vectors = np.array([row[2] for row in drawn], np.float32)
        if not _is_inner_product(self.migration) and len(vectors):
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.where(lengths == 0, 1, lengths)
        texts = [row[1] for row in drawn]
        if self.texts is not None:
            texts = [str(self.texts.whole(row[0], row[1])) for row in drawn]
        return [row[0] for row in drawn], texts, vectors

    def _judged_systems(self, old: np.ndarray, new: np.ndarray) -> dict[str, measures.System]:
        """Return the queries and rows of both models."""
        assert self.judged is not None
        queries = self.judged[0]
        encoder = _load_old(str(self.old_model), self.encoder, old.shape[1])
        old_queries = _embed(encoder.left, queries, self.batch_size)
        new_queries = _embed(self.encoder.left, queries, self.batch_size)
        return {measures.OLD: (old_queries, old), measures.NEW: (new_queries, new)}


def most_retrieved(
    migration: TableMigration,
    encoder: DualEncoder,
    old_model: str | None,
    queries: str | None,
    batch_size: int,
) -> list[str]:
    """Return the ids that past queries find, the most often found first.

    Args:
        migration: the migration of the table, before its switch.
        encoder: the new model, whose device is used.
        old_model: name of the old model, which embeds the queries.
        queries: table of past queries; None returns no ids.
        batch_size: texts per forward pass.

    Raises:
        DualencError: the old model is unknown, or its vectors have another dimension.
    """
    if queries is None:
        return []
    if old_model is None:
        raise DualencError(
            "past queries are searched with the model of the old vectors",
            fix="name it: --old-model",
        )
    column = migration.columns.vector
    texts = open_corpus(queries, part="queries", modality="text")
    rows = np.random.default_rng(0).permutation(len(texts))[:MAX_QUERIES]
    database = migration.table.database
    indexes = indexes_of(migration.table, column)
    operator = OPERATORS[indexes[0].distance if indexes else "cosine"]
    statement = compose(
        "SELECT {}::text FROM {} ORDER BY {} OPERATOR({}.{}) %s::{} LIMIT %s",
        migration.columns.id.name,
        migration.table.sql,
        column.name,
        database.extension,
        SQL(operator),
        database.type(column.type),
    )
    old = _load_old(old_model, encoder, column.dim)
    counts: Counter[str] = Counter()
    for vector in _embed(old.left, texts.take(np.sort(rows)), batch_size):
        found = database.connection.execute(statement, [str(vector.tolist()), NEIGHBORS])
        counts.update(id for (id,) in found)
    return [id for id, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _is_inner_product(migration: TableMigration) -> bool:
    """Return True if the vectors are compared by their inner product."""
    indexes = indexes_of(migration.table, migration.columns.vector)
    return bool(indexes) and indexes[0].distance == "ip"


def _load_old(name: str, encoder: DualEncoder, dim: int) -> DualEncoder:
    """Load the old model, and raise unless its vectors have this dimension."""
    loaded = load_model(name, str(next(encoder.parameters()).device))
    if dim > 0 and loaded.left.dim != dim:
        raise DualencError(
            f"has vectors of dimension {loaded.left.dim}, and the table {dim}",
            fix="name the model of the old vectors by --old-model",
            where=name,
        )
    return loaded


def _embed(tower: Tower, queries: Corpus, batch_size: int) -> np.ndarray:
    """Return the vectors (Q, D) of queries."""
    options: dict[str, Any] = {"on_error": "raise", "progress": False}
    return np.asarray(embed(tower, queries, None, batch_size=batch_size, **options).vectors)
