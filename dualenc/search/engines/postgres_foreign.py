"""A table of PostgreSQL that dualenc did not make: found by its columns, searched, never written.

    meta.json    `names` of the columns; everything else is found again whenever it is opened

Clients may change its rows at any time. The identity of its vectors is the number of their column,
which stays when columns are renamed: `dualenc migrate` exchanges the column for another.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import psycopg
from psycopg.sql import SQL, Composed, Literal

from dualenc.data.corpus import SNIPPET_LENGTH, beginning
from dualenc.errors import DualencError, nearest
from dualenc.io.provenance import Provenance
from dualenc.search.engines.column_names import TableColumnNames
from dualenc.search.engines.engine import Rows, Settings, State
from dualenc.search.engines.migration_record import FILLING, UNKNOWN, Migration
from dualenc.search.engines.postgres import PostgresIndex
from dualenc.search.engines.postgres_columns import Column, TableColumns, find_columns
from dualenc.search.engines.postgres_connection import compose
from dualenc.search.engines.postgres_index_copies import VectorIndex, indexes_of_all_rows
from dualenc.search.engines.postgres_migration import own_columns
from dualenc.search.engines.postgres_migrations import read_migrations
from dualenc.search.engines.postgres_settings import default_settings
from dualenc.search.engines.postgres_table import PostgresTable, parse_comment
from dualenc.types import Metric, StrPath

logger = logging.getLogger("dualenc.search")

LISTED_CHARACTERS = 2**29
"""Characters of texts that are listed at most; longer texts are cut."""
DEFAULT_LISTS = "100"
"""pgvector's own number of IVF lists."""
SAMPLED_LENGTHS = 1000
LENGTH_TOLERANCE = 0.01
OWN_NAMES = ("id", "text")
"""Names of a result's id and text, which other columns must not have."""


class ForeignTable(PostgresIndex):
    """A table of others, searched like a pushed one.

        table = ForeignTable(provenance)
        table.find()
        hits = table.search(vectors, k=5, where=["year>=2020"])

    Args:
        provenance: record with `target`, `collection`, `schema` and `names`; those that are
            missing are found by the types of the columns.
        target: URL of the database with a password; by default the recorded one.
    """

    def _describe(self, provenance: Provenance) -> None:
        super()._describe(provenance)
        names = {"id": "id", "text": "text", "vector": "embedding", **provenance.names}
        self.id = compose("{}", names["id"])
        self.text = compose("{}", names["text"])
        # Twice the length, since spaces are removed from what is shown.
        self.shown_text = compose("left({}, {})", self.text, Literal(2 * SNIPPET_LENGTH))
        self.vector_column = self.vector_column._replace(name=names["vector"])

    def find(self, metric: Metric | None = None) -> None:
        """Find the columns, the index and the model in the database.

        Args:
            metric: "cosine" or "ip"; None takes that of the index, or the cosine without one.

        Raises:
            DualencError: there is no such table, a column or index is one of several that would
                fit, or nobody knows the model any more.
        """
        self.database.read(lambda: self._find(metric))

    def _find(self, metric: Metric | None) -> None:
        """Read the catalog, under a lock that a migration's switch waits for."""
        query = "SELECT relkind FROM pg_class WHERE oid = to_regclass(%s)"
        row = self.database.run(query, values=[self.table.quoted]).fetchone()
        if row is None or row[0] not in ("r", "p"):
            problem = "there is no such table" if row is None else "is not a table"
            raise DualencError(problem, fix="name one: --table", where=self.location)
        self.table.run("LOCK TABLE {} IN ACCESS SHARE MODE")
        self._check_version(self.database.load_extension())
        records = read_migrations(self.table, is_reader=True)
        own = [name for vector in records for name in own_columns(vector)]
        roles = ("id", "text", "vector")
        names = TableColumnNames(*map(self.provenance.names.get, roles))
        filtered = self.provenance.columns
        columns = find_columns(self.table, names, own, needs_text=False, filtered=filtered)
        vector = columns.vector
        model = self._model(records.get(vector.name), vector)
        named = {role: column.name for role, column in zip(roles, columns[:3])}
        if columns.text == columns.id:
            # Nothing is shown; a later column of texts is found by its type.
            del named["text"]
        self._describe(
            self.provenance.updated(
                names=named,
                fingerprint=f"column {vector.number}",
                columns=self._kinds(columns),
                has_snippets=columns.text != columns.id,
                type=vector.type,
                dim=vector.dim if vector.dim > 0 else self._first_dim(vector),
                **model,
            )
        )
        self._use_index(indexes_of_all_rows(self.table, vector), metric)
        self.id_type = columns.id.type

    def _kinds(self, columns: TableColumns) -> dict[str, str]:
        """Return the kinds of the recorded columns, which searches show and filter by."""
        roles = {columns.id.name, columns.text.name}
        kinds = {
            name: kind
            for name, kind in columns.kinds.items()
            if name not in roles and name not in OWN_NAMES and "%" not in name
        }
        for name in self.provenance.columns:
            if name not in kinds:
                raise DualencError(
                    f"there is no column {name!r} to filter by{nearest(name, list(kinds))}",
                    fix=f"--columns can be: {', '.join(kinds) or 'none'}",
                    where=self.location,
                )
        return {name: kinds[name] for name in self.provenance.columns}

    def _first_dim(self, vector: Column) -> int:
        """Return the dimension of the vectors of a column that does not say it."""
        query = "SELECT {ext}.vector_dims({name}) FROM {table} WHERE {name} IS NOT NULL LIMIT 1"
        row = self._one(query, vector.name)
        if row is None:
            raise DualencError("has no vectors yet", fix="fill it first", where=self.location)
        return int(row[0])

    def _one(self, query: str, vector: str) -> Any:
        names = {"table": self.table.sql, "name": compose("{}", vector)}
        statement = SQL(query).format(ext=compose("{}", self.database.extension), **names)
        return self.database.connection.execute(statement).fetchone()

    def _model(self, record: Migration | None, vector: Column) -> dict[str, Any]:
        """Return what has changed of the recorded model, by a migration since then."""
        recorded = self.provenance
        is_same = recorded.fingerprint in ("", f"column {vector.number}")
        checksum = None
        if record is None or record.state == FILLING:
            if is_same:
                return {}
            if record is None:
                raise DualencError(
                    "its vectors are in another column now, and nothing names their model",
                    fix="GRANT SELECT ON dualenc_migrations to this user, or write the folder "
                    "again (dualenc index)",
                    where=self.location,
                )
        elif recorded.model_checksum == record.checksum:
            return {}
        else:
            checksum = record.checksum
        name = None if record.model == UNKNOWN else record.model
        logger.warning("%s: its vectors are of %s now", self.location, record.model)
        return {"model": name, "model_checksum": checksum, "kind": "query-document"}

    def _use_index(self, indexes: list[VectorIndex], metric: Metric | None) -> None:
        """Search with the index of a metric; without one, compare all rows."""
        usable = {index.distance: index for index in indexes if index.distance in ("cosine", "ip")}
        by_l2 = [index for index in indexes if index.distance == "l2"]
        if by_l2 and metric != "ip":
            shortest, longest = self._lengths()
            if abs(shortest - 1) <= LENGTH_TOLERANCE and abs(longest - 1) <= LENGTH_TOLERANCE:
                # Both rank vectors of length one alike.
                usable.setdefault("cosine", by_l2[0])
            elif metric is None and not usable:
                raise DualencError(
                    f"index {by_l2[0].name!r} compares by L2 distance, and lengths are "
                    f"{shortest:.3g} to {longest:.3g}",
                    fix="choose --metric cosine or --metric ip, which compare all rows",
                    where=self.location,
                )
        if metric is None and len(usable) > 1:
            described = " and ".join(f"{each.name} ({by})" for by, each in usable.items())
            raise DualencError(
                f"its indexes compare differently: {described}",
                fix="choose --metric cosine or --metric ip",
                where=self.location,
            )
        metric = metric or next(iter(usable), "cosine")  # type: ignore[arg-type]
        index = usable.get(str(metric))
        kind: Any = "none" if index is None else index.kind
        lists = 0 if index is None else int(dict(index.options).get("lists", DEFAULT_LISTS))
        settings = default_settings(kind, len(self), lists)
        # Those that `evaluate engine` has chosen stay.
        if self.provenance.index == kind and set(self.provenance.settings) == set(settings):
            settings = dict(self.provenance.settings)
        self._describe(self.provenance.updated(metric=metric, index=kind, settings=settings))
        if index is not None:
            self.vector_column = self.vector_column._replace(
                metric=index.distance, indexed_type=index.compared
            )

    def _lengths(self) -> tuple[float, float]:
        """Return the smallest and the largest length of a sample of the vectors."""
        query = "SELECT {}::real[] FROM {} WHERE {} IS NOT NULL LIMIT {}"
        name = self.vector_column.name
        statement = compose(query, name, self.table.sql, name, Literal(SAMPLED_LENGTHS))
        rows = [row for (row,) in self.database.connection.execute(statement)]
        lengths = np.linalg.norm(np.array(rows or [[0.0]], np.float64), axis=1)
        return float(lengths.min()), float(lengths.max())

    def _check_opened(self, folder: StrPath) -> None:
        self.find(self.provenance.metric)
        super()._check_opened(folder)

    def _state_query(self, table: PostgresTable) -> Composed:
        query = """
            SELECT attnum, obj_description(c.oid, 'pg_class') FROM pg_class c
            JOIN pg_namespace n ON n.oid = relnamespace JOIN pg_attribute ON attrelid = c.oid
            WHERE nspname = {} AND relname = {} AND attname = {} AND NOT attisdropped
        """
        names = (table.schema, table.name, self.vector_column.name)
        return compose(query, *map(Literal, names))

    def _fetch_state(self, cursor: psycopg.Cursor[Any]) -> State | None:
        row = cursor.fetchone()
        if row is None:
            return None
        # A push may have made a table of this name meanwhile.
        pushed = parse_comment(row[1])
        return pushed or {"fingerprint": f"column {row[0]}", "index": self.index}

    def nearest(
        self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None
    ) -> Rows:
        for rows in super().nearest(vectors, k, condition, settings):
            for _, row in rows:
                row["text"] = beginning(row.get("text") or "")
            yield rows

    def texts_by_id(self) -> dict[str, str]:
        """Return the text of each row, whole unless the table is large."""
        limit = max(LISTED_CHARACTERS // max(len(self), 1), SNIPPET_LENGTH)
        # A cut text ends like a pushed one, so that nobody takes it for a whole one.
        cut = "CASE WHEN length({0}) > {1} THEN left({0}, {1}) || '…' ELSE {0} END"
        whole = self.text
        self.text = compose(cut, whole, Literal(limit))
        try:
            return super().texts_by_id()
        finally:
            self.text = whole
