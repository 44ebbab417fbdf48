"""Replace a table by another one in a transaction, so that readers find the old or the new one."""

from __future__ import annotations

import logging

import psycopg
from psycopg.sql import SQL, Identifier

from dualenc.search.engines.postgres_table import COMMENT, PostgresTable, parse_comment

logger = logging.getLogger("dualenc.search")


def replace_table(old: PostgresTable, new: PostgresTable) -> None:
    """Drop the old table, if it exists, and give its name and the grants on it to the new one."""
    # A table that is dropped takes its grants and indexes along, so read them first.
    _copy_grants(old, new)
    if indexes := _column_indexes(old):
        problem = f"the indexes on columns of the replaced table are gone: {', '.join(indexes)}"
        logger.warning("%s: %s; create them again", old.database.location, problem)
    old.run("DROP TABLE IF EXISTS {}")
    new.run("ALTER TABLE {} RENAME TO {}", old.name)


def _copy_grants(old: PostgresTable, new: PostgresTable) -> None:
    """Grant the privileges on a table to the new one; the owner has them anyway."""
    query = """
        SELECT privilege_type, is_grantable,
        CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE grantee::regrole::text END
        FROM pg_class, aclexplode(relacl) WHERE oid = to_regclass(%s) AND grantee <> relowner
    """
    for privilege, is_grantable, role in old.database.run(query, values=[old.quoted]).fetchall():
        option = SQL("WITH GRANT OPTION" if is_grantable else "")
        # `regrole` has quoted the role already, and PUBLIC must not be quoted.
        new.run("GRANT {1} ON {0} TO {2} {3}", SQL(privilege), SQL(role), option)


def _column_indexes(table: PostgresTable) -> list[str]:
    """Return the quoted names of indexes that somebody made on other columns than the vectors."""
    query = """
        SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class c ON c.oid = indexrelid
        JOIN pg_am a ON a.oid = relam
        WHERE indrelid = to_regclass(%s) AND NOT indisprimary
        AND amname NOT IN ('hnsw', 'ivfflat')
    """
    return [name for (name,) in table.database.run(query, values=[table.quoted])]


def check_droppable(table: PostgresTable) -> None:
    """Drop a table and roll back, so that a dependent view fails before rows are sent."""
    with table.database.connection.transaction() as attempt:
        table.run("DROP TABLE IF EXISTS {}")
        raise psycopg.Rollback(attempt)


def abandoned_tables(table: PostgresTable) -> list[str]:
    """Return the names of tables that pushes of other embeddings left, or are filling.

    Args:
        table: the table that they would have replaced, by their comments.
    """
    query = """
        SELECT relname, description FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
        JOIN pg_description
        ON objoid = c.oid AND objsubid = 0 AND classoid = 'pg_class'::regclass
        WHERE nspname = %s AND relkind = 'r' AND starts_with(description, %s) ORDER BY 1
    """
    found = []
    for name, comment in table.database.run(query, values=[table.schema, COMMENT]).fetchall():
        state = parse_comment(comment)
        if state is not None and state.get("for") == table.name and name != table.name:
            found.append(name)
    return found


def drop_abandoned(table: PostgresTable) -> None:
    """Drop tables that pushes of other embeddings left; one that is still running notices."""
    for name in abandoned_tables(table):
        table.database.run("DROP TABLE {}", Identifier(table.schema, name))
