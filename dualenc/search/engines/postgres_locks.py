"""Locks of a migration: one at a time for each table, and short exclusive locks of the table."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psycopg

from dualenc.errors import DualencError
from dualenc.search.engines.engine import RESUME
from dualenc.search.engines.postgres_table import PostgresTable

Value = TypeVar("Value")
WAIT = "2s"
"""How long a change waits for other transactions while new ones queue behind it."""
ATTEMPTS = 100
SECONDS_BETWEEN = 3.0
LOCK_SECONDS = 5.0
"""How long to wait for the server to notice that a killed migration is gone."""


@contextmanager
def only_migration(table: PostgresTable) -> Iterator[None]:
    """Hold the advisory lock of a table's migration, for as long as the connection lives.

    Raises:
        DualencError: another session holds it.
    """
    database = table.database
    # The server notes within a second that a killed client is gone, even while it builds an index.
    query = """
        SELECT set_config(name, CASE name WHEN 'client_connection_check_interval' THEN '1s'
        ELSE '0' END, false) FROM pg_settings WHERE name IN
        ('client_connection_check_interval', 'statement_timeout', 'idle_session_timeout',
        'transaction_timeout', 'idle_in_transaction_session_timeout')
    """
    database.run(query)
    key = _key(table)
    deadline = time.monotonic() + LOCK_SECONDS
    while database.run("SELECT pg_try_advisory_lock(%s)", values=[key]).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise DualencError(
                "another migration of this table is running",
                fix="wait for its end, or stop it first",
                where=database.location,
            )
        time.sleep(0.2)
    try:
        yield
    finally:
        # The lock of a lost connection is gone.
        with suppress(psycopg.Error):
            database.run("SELECT pg_advisory_unlock(%s)", values=[key])


def _key(table: PostgresTable) -> int:
    name = f"dualenc migrate {table.quoted}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], signed=True)


def is_migrating(table: PostgresTable) -> bool:
    """Return True if a session holds the lock of a table's migration."""
    # `pg_locks` shows the two halves of the key.
    query = """
        SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
        AND (classid::bigint << 32) | objid::bigint = %s
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """
    return table.database.run(query, values=[_key(table)]).fetchone() is not None


def exclusively(table: PostgresTable, change: Callable[[], Value]) -> Value:
    """Change a table in a transaction that has it alone, without letting readers wait long.

    A transaction that holds the table delays the change, and is never waited for longer than `WAIT`
    at a time, since all that come later queue behind the change.

    Args:
        table: the table to lock.
        change: what to do; it may be called again.

    Raises:
        DualencError: other transactions have held the table for minutes.
    """
    connection = table.database.connection
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(SECONDS_BETWEEN)
        try:
            with connection.transaction():
                table.database.run("SELECT set_config('lock_timeout', %s, true)", values=[WAIT])
                # Before the table, in the order of a push, and like the table's own lock.
                table.lock_pushes()
                # Taken at once and not raised later, which could end in a deadlock with a client.
                table.run("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE")
                return change()
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            continue
    raise DualencError(
        "other transactions have held it for minutes",
        fix=f"end them (pg_stat_activity); {RESUME}",
        where=table.database.location,
    )
