"""Change the model of a PostgreSQL table: measure, fill a second column, index it, and switch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from tqdm.auto import tqdm

from dualenc.data.readers.beir import has_test_judgements
from dualenc.encoders import DualEncoder
from dualenc.errors import DualencError
from dualenc.evaluation import migration_measures as measures
from dualenc.io.files import locked
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.engines.column_names import TableColumnNames
from dualenc.search.engines.engine import RESUME
from dualenc.search.engines.migration_record import (
    FILLING,
    FINISHED,
    SWITCHED,
    UNKNOWN,
    Migration,
    Whole,
    as_stored,
    resumed,
    reversible,
    switched,
)
from dualenc.search.engines.postgres_columns import (
    check_table,
    check_unread,
    find_columns,
    row_triggers,
)
from dualenc.search.engines.postgres_connection import PostgresConnection
from dualenc.search.engines.postgres_index_copies import check_dim, indexes_of
from dualenc.search.engines.postgres_locks import only_migration
from dualenc.search.engines.postgres_migration import (
    PendingRow,
    TableMigration,
    Vectors,
    own_columns,
)
from dualenc.search.engines.postgres_migrations import read_migrations
from dualenc.search.engines.postgres_names import check_name, parse_name, written_name
from dualenc.search.engines.postgres_sample import PostgresSample
from dualenc.search.engines.postgres_table import PostgresTable, find_schema
from dualenc.search.engines.postgres_url import without_secrets
from dualenc.search.engines.postgres_version import UPDATE, hnsw_problem
from dualenc.search.engines.pushed_folder import is_pushed
from dualenc.search.where import parse_conditions
from dualenc.workflows.measure_table import TableSample, most_retrieved
from dualenc.workflows.row_texts import RowTexts
from dualenc.workflows.session import open_model, recorded_name, start_processes
from dualenc.workflows.table_folder import TableFolder
from dualenc.workflows.table_report import TableReport, TableRolledBack, new_record, report_of
from dualenc.workflows.text_vectors import RowVectors

logger = logging.getLogger("dualenc.workflows")

ROWS_AT_ONCE = 4
"""Rows of a transaction, in batches of the model."""


def migrate_table(
    target: str,
    table: str | None,
    new_model: str,
    *,
    columns: TableColumnNames | None = None,
    old_model: str | None = None,
    where: Sequence[str] = (),
    data: str | None = None,
    queries: str | None = None,
    report_only: bool = False,
    anyway: bool = False,
    batch_size: int = 32,
    device: str | None = None,
    progress: bool = True,
    on_report: Callable[[TableReport], None] | None = None,
) -> TableReport:
    """Start or resume the change of a table's vectors to a new model, while clients use the table.

    A second column is filled and indexed beside the old one, and both are exchanged in a short
    transaction. Afterwards the same call fills rows that clients have written without a vector.
    Same as `dualenc migrate postgresql://…`.

        report = migrate_table("postgresql://me@localhost/db", "docs", "new-model")
        finish_table("postgresql://me@localhost/db", "docs")

    Args:
        target: postgresql://user@host/database, or the folder of a table that `push` wrote. The
            password comes from the URL, PGPASSWORD or ~/.pgpass.
        table: table or schema.table; None for a folder.
        new_model: model folder or name, of kind query-document.
        columns: names of the columns, where their types leave a choice.
        old_model: model of the old vectors, to measure with judged queries and to order by past
            queries; None takes the one that a folder records.
        where: conditions on the rows that get new vectors, such as "year>=2020".
        data: BEIR folder with test judgements of these rows, to measure nDCG@10 with; for a folder
            the whole texts, with or without judgements, by default the recorded ones.
        queries: table of past queries: rows that they find most often are filled first.
        report_only: stop after the measurements.
        anyway: continue even if the new model finds significantly less than the old one.
        batch_size: texts per forward pass.
        device: name of the device; None takes a GPU if there is one.
        progress: show a progress bar.
        on_report: function that gets the report before rows are filled, which may take hours.

    Returns:
        The measurements and the state of the table.

    Raises:
        DualencError: the table cannot migrate, another migration is under way, or the new model
            finds significantly less.
    """
    with _opened(target, table, columns or TableColumnNames()) as opened:
        encoder = open_model(new_model, ("query-document",), start_processes(device))
        texts, judged = opened.texts(data)
        filling = _Filling(opened, encoder, where, batch_size, progress, texts)
        checksum = tower_checksum(encoder.right)
        record = resumed(opened.record, checksum, opened.location)
        if opened.has_model(checksum):
            name = recorded_name(new_model)
            return TableReport(opened.location, "finished", name, name)
        old_model = old_model or opened.old_model()
        if old_model is None and data is None:
            judged = None
        if record is None:
            sample = TableSample(filling.rows, encoder, old_model, judged, batch_size, progress)
            record = filling.new_record(recorded_name(new_model), old_model, sample.measure())
            if texts is not None:
                texts.check(opened.location)
        elif record.state != FILLING:
            filling.fill_missing()
            return report_of(opened.location, record, missing=filling.count_missing())
        report = report_of(opened.location, record, state="measured")
        if on_report is not None:
            on_report(report)
        if report_only:
            return report
        if not anyway:
            measures.check_not_worse(report.systems, new_model)
        first = most_retrieved(filling.rows, encoder, old_model, queries, batch_size, progress)
        record = filling.run(record, first)
        opened.follow(record)
        if texts is not None:
            texts.report(opened.location)
        return report_of(opened.location, record, missing=filling.count_missing())


def finish_table(
    target: str, table: str | None, *, columns: TableColumnNames | None = None
) -> TableReport:
    """Drop the old vectors of a table after the switch; no rollback is left.

    Args:
        target: postgresql://user@host/database, or the folder of a table that `push` wrote.
        table: table or schema.table; None for a folder.
        columns: names of the columns, where their types leave a choice.

    Returns:
        The state of the table.

    Raises:
        DualencError: the table has not been switched.
    """
    with _opened(target, table, columns or TableColumnNames()) as opened:
        record = switched(opened.record, opened.location)
        migration = opened.migration(record)
        if record.state == SWITCHED and not migration.finish(record):
            logger.warning(
                "%s: %s was NOT NULL, and has rows without a vector now: it takes NULL",
                opened.location,
                opened.columns.vector.name,
            )
        missing = migration.count_missing(opened.columns.vector.name)
        return report_of(opened.location, record._replace(state=FINISHED), missing=missing)


def roll_back_table(
    target: str,
    table: str | None,
    *,
    columns: TableColumnNames | None = None,
    discard: bool = False,
) -> TableRolledBack:
    """Put the old vectors of a table back, in a short transaction.

    Args:
        target: postgresql://user@host/database, or the folder of a table that `push` wrote.
        table: table or schema.table; None for a folder.
        columns: names of the columns, where their types leave a choice.
        discard: drop the new vectors; otherwise another migration resumes with them.

    Returns:
        What was changed.

    Raises:
        DualencError: no migration is under way, or its old vectors are gone.
    """
    with _opened(target, table, columns or TableColumnNames()) as opened:
        record = reversible(opened.record, opened.location)
        migration = opened.migration(record)
        is_switched = record.state == SWITCHED
        missing = migration.switch_back(record) if is_switched else 0
        opened.follow(record._replace(state=FILLING))
        if discard:
            migration.discard()
        return TableRolledBack(opened.location, record.new_model, is_switched, discard, missing)


class _Opened:
    """A table whose migration lock is held, its columns, its folder, and its recorded migration."""

    def __init__(
        self, table: PostgresTable, names: TableColumnNames, folder: TableFolder | None
    ) -> None:
        self.table = table
        self.folder = folder
        self.location = table.database.location
        check_table(table, is_pushed=folder is not None and not folder.is_foreign)
        records = read_migrations(table)
        own = [name for vector in records for name in own_columns(vector)]
        self.columns = find_columns(table, names, own)
        self.record = records.get(self.columns.vector.name)
        described = ", ".join(
            f"{role} {column.name} ({column.type})"
            for role, column in zip(("id", "text", "vector"), self.columns[:3])
        )
        logger.info("%s: %s", self.location, described)
        self.follow(self.record)

    def follow(self, record: Migration | None) -> None:
        """Let the folder, if there is one, name the model that the table has now."""
        if self.folder is not None:
            self.folder.follow(record, self.table.read_state())

    def texts(self, data: str | None) -> tuple[RowTexts | None, str | None]:
        """Return the whole texts of a pushed table, and the data to measure with, if any."""
        if self.folder is None or self.folder.is_foreign:
            return None, data
        texts = RowTexts.open(self.folder.path, self.folder.recorded, data)
        source = data or self.folder.recorded.data or ""
        if has_test_judgements(source):
            return texts, source
        logger.info("%s: has no test judgements (qrels/test.tsv); measuring without them", source)
        return texts, None

    def has_model(self, checksum: str) -> bool:
        """Return True if the folder says that the vectors are of a model."""
        if self.folder is None or self.record is not None:
            return False
        return self.folder.recorded.model_checksum == checksum

    def old_model(self) -> str | None:
        """Return the model of the old vectors, if it is recorded."""
        if self.folder is not None and self.record is None:
            return self.folder.old_model()
        old = None if self.record is None else self.record.model
        return None if old == UNKNOWN else old

    def migration(self, record: Migration, where: Sequence[str] = ()) -> TableMigration:
        """Return the recorded migration."""
        conditions = parse_conditions(where, self.columns.kinds)
        return TableMigration(self.table, self.columns, record.notes["dim"], conditions)


@contextmanager
def _opened(target: str, table: str | None, names: TableColumnNames) -> Iterator[_Opened]:
    """Connect, and hold the locks of the folder and of the table's migration."""
    folder = None
    if is_pushed(target):
        if table is not None or names != TableColumnNames():
            raise DualencError(
                "its folder names the table and the columns",
                fix="leave --table, --id, --text and --vector out",
                where=target,
            )
        folder = TableFolder(target)
        target, table, names = folder.recorded.target, folder.table, folder.columns
    if table is None:
        raise DualencError("a database has many tables", fix="name one: --table TABLE")
    parts = parse_name(table)
    for part in parts.values():
        check_name(part)
    schema, name = parts.get("schema", ""), parts["collection"]
    location = f"{without_secrets(target)} {written_name(schema, name)!r}"
    database = PostgresConnection(target, location)
    # A push writes the folder, too.
    writing = nullcontext() if folder is None else locked(folder.path, wait=False, option="folder")
    with writing, database.connection, database.one_line_errors(RESUME):
        opened = PostgresTable(database, schema or find_schema(database, name), name)
        query = "SELECT to_regclass(%s)"
        if database.run(query, values=[opened.quoted]).fetchone() == (None,):
            raise DualencError("there is no such table", fix="name it: --table", where=location)
        with only_migration(opened):
            yield _Opened(opened, names, folder)


class _Filling:
    """The steps that give a table its new vectors."""

    def __init__(
        self,
        opened: _Opened,
        encoder: DualEncoder,
        where: Sequence[str],
        batch_size: int,
        progress: bool,
        texts: RowTexts | None,
    ) -> None:
        self.opened = opened
        self.whole: Whole = as_stored if texts is None else texts.whole
        self.encoder = encoder
        self.batch_size = batch_size
        self.progress = progress
        self.vectors = RowVectors(encoder.right, batch_size)
        conditions = parse_conditions(where, opened.columns.kinds)
        self.migration = TableMigration(opened.table, opened.columns, encoder.right.dim, conditions)
        self.rows = PostgresSample(self.migration, self.whole)
        if opened.record is None or opened.record.state == FINISHED:
            self.migration.check_names()
        if opened.record is None or opened.record.state != SWITCHED:
            self._check()

    def _check(self) -> None:
        """Raise unless the table, its indexes and the installed pgvector allow a migration."""
        table, columns = self.opened.table, self.opened.columns
        check_unread(table, columns.vector)
        indexes = indexes_of(table, columns.vector)
        check_dim(table, columns.vector.type, self.migration.dim, indexes)
        problem = hnsw_problem(table.database.load_extension())
        if problem and any(index.kind == "hnsw" for index in indexes):
            raise DualencError(problem, fix=UPDATE, where=self.opened.location)
        if triggers := row_triggers(table):
            logger.warning(
                "%s: its triggers run for each filled row: %s",
                self.opened.location,
                ", ".join(triggers),
            )

    def new_record(self, name: str, old: str | None, measured: dict[str, Any]) -> Migration:
        """Return the record of a migration that begins."""
        notes = {
            "dim": self.migration.dim,
            "is_required": self.opened.columns.vector.is_required,
            **measured,
        }
        checksum = tower_checksum(self.encoder.right)
        if self.opened.folder is not None:
            notes |= self.opened.folder.notes(checksum)
        return new_record(name, checksum, old, notes)

    def run(self, record: Migration, first: Sequence[str]) -> Migration:
        """Fill, index and switch; each step continues what a killed run has left."""
        self.migration.start(record)
        with self._bar() as bar:
            size = ROWS_AT_ONCE * self.batch_size
            for start in range(0, len(first), size):
                self._store(self.migration.pending(size, ids=first[start : start + size]), bar)
            self._fill(bar)
            self.migration.build_indexes()
            limit = self.batch_size
            self._fill(bar)
            # Rows that become pending between a pass and the lock are embedded under it; ever more
            # of them are allowed, so that a busy table gets there too.
            while not self.migration.switch(self._embed, limit, record):
                limit *= 2
                self._fill(bar)
                self.migration.build_indexes()
        self.vectors.report()
        return record._replace(state=SWITCHED, model=record.new_model)

    def _bar(self) -> tqdm:
        total = self.migration.count_pending()
        return tqdm(total=total, desc="migrate", unit=" rows", disable=not self.progress)

    def _fill(self, bar: tqdm) -> None:
        """Store the vectors of pending rows until passes over the table find no fewer of them."""
        before = None
        while True:
            found = stored = 0
            after = None
            while rows := self.migration.pending(ROWS_AT_ONCE * self.batch_size, after):
                found += len(rows)
                stored += self._store(rows, bar)
                after = rows[-1].id
            if found <= self.batch_size or (stored and before is not None and found >= before):
                return
            before = found
            if not stored:
                # Clients hold all of them: give way.
                time.sleep(0.2)

    def _store(self, rows: Sequence[PendingRow], bar: tqdm) -> int:
        # Embedded outside of a transaction, which must be short.
        stored = self.migration.store(rows, self._embed(rows)) if rows else 0
        bar.update(stored)
        return stored

    def _embed(self, rows: Sequence[PendingRow]) -> Vectors:
        """Return the vectors of rows, None for texts without one."""
        texts = [self.whole(row.id, row.text) for row in rows]
        return self.vectors.embed([row.id for row in rows], texts)

    def fill_missing(self) -> None:
        """Fill rows that clients have written after the switch without a vector."""
        stored, after = 0, None
        size = ROWS_AT_ONCE * self.batch_size
        while rows := self.migration.pending(size, after, is_switched=True):
            found = zip(rows, self._embed(rows))
            kept = [(row, vector) for row, vector in found if vector is not None]
            if kept:
                stored += self.migration.store(*zip(*kept), is_switched=True)
            after = rows[-1].id
        if stored:
            message = "%s: %s rows without a vector are filled"
            logger.info(message, self.opened.location, f"{stored:,}")

    def count_missing(self) -> int:
        """Return the number of rows without a vector."""
        return self.migration.count_missing(self.opened.columns.vector.name)
