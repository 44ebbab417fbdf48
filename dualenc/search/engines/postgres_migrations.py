"""The table `dualenc_migrations` beside migrated tables: which model each column of vectors has.

table_name, vector_column | model | new_model, new_checksum | state | notes | changed_at
"""

from __future__ import annotations

import json

from psycopg.sql import Literal

from dualenc.errors import DualencError
from dualenc.search.engines.migration_record import STATES, Migration
from dualenc.search.engines.postgres_table import PostgresTable

NAME = "dualenc_migrations"
COMMENT = "dualenc migrations"


def records_of(table: PostgresTable) -> PostgresTable:
    """Return the table of records in the schema of a table."""
    return table._replace(name=NAME)


def create_records(table: PostgresTable) -> None:
    """Create the table of records in the schema of a table, unless it exists."""
    records = records_of(table)
    if _exists(records):
        return
    records.run(
        """
        CREATE TABLE {} (
            table_name text, vector_column text, model text NOT NULL, new_model text NOT NULL,
            new_checksum text NOT NULL, state text NOT NULL, notes jsonb NOT NULL,
            changed_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (table_name, vector_column)
        )
        """
    )
    records.run("COMMENT ON TABLE {} IS {}", Literal(COMMENT))


def _is_own(records: PostgresTable) -> bool | None:
    """Return True if dualenc has made the table of records; None if there is none."""
    # A table of another role could run its triggers as this user.
    query = """
        SELECT relkind = 'r' AND pg_has_role(relowner, 'USAGE')
        AND obj_description(oid, 'pg_class') = %s FROM pg_class WHERE oid = to_regclass(%s)
    """
    row = records.database.run(query, values=[COMMENT, records.quoted]).fetchone()
    return None if row is None else bool(row[0])


def _is_of_owner(records: PostgresTable, table: PostgresTable) -> bool:
    """Return True if the owner of a table made the table of records, and the user may read it."""
    query = """
        SELECT FROM pg_class r, pg_class t WHERE r.oid = to_regclass(%s)
        AND t.oid = to_regclass(%s) AND pg_has_role(r.relowner, t.relowner, 'MEMBER')
        AND r.relkind = 'r' AND obj_description(r.oid, 'pg_class') = %s
        AND has_table_privilege(r.oid, 'SELECT')
    """
    values = [records.quoted, table.quoted, COMMENT]
    return records.database.run(query, values=values).fetchone() is not None


def _exists(records: PostgresTable) -> bool:
    """Return True if the table of records exists; raise if somebody else made it."""
    is_own = _is_own(records)
    if is_own is False:
        raise DualencError(
            f"{NAME} was not made by dualenc, or belongs to another role",
            fix="rename it, or connect as its owner",
            where=records.database.location,
        )
    return bool(is_own)


def read_migrations(table: PostgresTable, *, is_reader: bool = False) -> dict[str, Migration]:
    """Return the recorded migrations of a table by the name of the column of vectors.

    Args:
        table: the table.
        is_reader: whether the user only reads, and need not own the records. Those that the user
            may not read, or of a role that does not own the table, do not count.
    """
    records = records_of(table)
    if not (_is_of_owner(records, table) if is_reader else _exists(records)):
        return {}
    query = """
        SELECT vector_column, model, new_model, new_checksum, state, notes FROM {}
        WHERE table_name = %s
    """
    found = {}
    for column, *entries in records.run(query, values=[table.name]):
        migration = Migration(*entries)
        if migration.state not in STATES or not isinstance(migration.notes.get("dim"), int):
            raise DualencError(
                f"the record of {column!r} in {NAME} is corrupt",
                fix="remove the row and the column of new vectors",
                where=table.database.location,
            )
        found[column] = migration
    return found


def write_migration(table: PostgresTable, column: str, migration: Migration) -> None:
    """Write the record of a migration, in the caller's transaction."""
    query = """
        INSERT INTO {} AS known
        (table_name, vector_column, model, new_model, new_checksum, state, notes)
        VALUES (%s, %s, %s, %s, %s, %s, %s::jsonb)
        ON CONFLICT (table_name, vector_column) DO UPDATE SET
        (model, new_model, new_checksum, state, notes, changed_at) = (excluded.model,
        excluded.new_model, excluded.new_checksum, excluded.state, excluded.notes, now())
    """
    values = [table.name, column, *migration[:-1], json.dumps(migration.notes)]
    records_of(table).run(query, values=values)


def remove_migrations(table: PostgresTable) -> None:
    """Remove what is recorded of a table that was dropped, in the caller's transaction."""
    records = records_of(table)
    # Records of another role are not of this table, which the user owned.
    if _is_own(records):
        records.run("DELETE FROM {} WHERE table_name = %s", values=[table.name])


def remove_migration(table: PostgresTable, column: str) -> None:
    """Remove the record of a migration, in the caller's transaction."""
    query = "DELETE FROM {} WHERE table_name = %s AND vector_column = %s"
    records_of(table).run(query, values=[table.name, column])
