"""Connections to PostgreSQL: statements with quoted names, pgvector's schema, one-line errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier

from dualenc.errors import DualencError, first_line
from dualenc.search.engines.postgres_url import libpq_url

Value = TypeVar("Value")
Part = str | Composable
"""A part of a statement: a name, which is quoted, or SQL."""
PASSING = ("08", "40", "53", "55", "57", "58")
"""SQLSTATE classes of temporary errors: lost connection, deadlock, full disk, lock, shutdown."""


def compose(statement: str, *parts: Part) -> Composed:
    """Fill each {} of a statement; a text is quoted as the name of a column, table or schema.

        compose("SELECT {} FROM {}", "it's", table)

    Args:
        statement: SQL, never the user's.
        parts: names or SQL.
    """
    quoted = [Identifier(part) if isinstance(part, str) else part for part in parts]
    return SQL(statement).format(*quoted)


class PostgresConnection:
    """A connection to a database with pgvector, which may be connected again.

    Outside of `connection.transaction()` each statement is a transaction.

        database = PostgresConnection("postgresql://me@localhost/db", "my database")
        database.run("SELECT id FROM {} WHERE year = %s", "papers", values=[2020]).fetchall()

    Args:
        target: URL of the database, with its password if it needs one.
        location: name of the database and table in messages.

    Raises:
        DualencError: the URL is invalid, or the database cannot be reached.
    """

    connection: psycopg.Connection

    def __init__(self, target: str, location: str) -> None:
        self.target = libpq_url(target)
        self.location = location
        self.extension = ""
        with self.one_line_errors():
            self._connect()

    def _connect(self) -> None:
        # A pooler may switch servers between statements, where prepared statements are unknown.
        self.connection = psycopg.connect(
            self.target, autocommit=True, prepare_threshold=None, client_encoding="utf8"
        )
        self.load_extension()

    def load_extension(self) -> str:
        """Find the schema of pgvector and load it; return its version, or "" if it is missing."""
        query = """
            SELECT extversion, nspname FROM pg_extension
            JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'vector'
        """
        version, self.extension = self.run(query).fetchone() or ("", "")
        if version:
            # A cast loads the library, which then rejects wrong settings instead of ignoring them.
            self.run("SELECT '[1]'::{}", self.type("vector"))
        return version

    def type(self, name: str) -> Identifier:
        """Qualify a type or operator class of pgvector, which may be outside of the search path."""
        return Identifier(self.extension, name)

    def run(self, statement: str, *parts: Part, values: Any = None) -> psycopg.Cursor[Any]:
        """Execute a statement; see `compose` for its parts, and psycopg for its values."""
        return self.connection.execute(compose(statement, *parts), values)

    def read(self, function: Callable[[], Value]) -> Value:
        """Call a function that only reads, in a transaction; connect again if necessary."""
        with self.one_line_errors():
            try:
                return self._read_once(function)
            except psycopg.OperationalError:
                # The server has restarted or closed an idle connection. A function that only reads
                # may run twice.
                if not self.connection.closed:
                    raise
                return self._read_once(function)

    def _read_once(self, function: Callable[[], Value]) -> Value:
        if self.connection.closed:
            self._connect()
        with self.connection.transaction():
            return function()

    @contextmanager
    def one_line_errors(self, resume: str = "") -> Iterator[None]:
        """Report errors of PostgreSQL in one line.

        Args:
            resume: how to resume after a temporary error.
        """
        try:
            yield
        except psycopg.Error as error:
            reason = first_line(error)[:300]
            # An error without a SQLSTATE comes from the client: the connection was lost.
            is_temporary = (error.sqlstate or "08")[:2] in PASSING
            is_temporary &= isinstance(error, psycopg.OperationalError)
            remedy = resume if is_temporary else ""
            if "password authentication failed" in reason or "no password supplied" in reason:
                remedy = "give the right one in the URL, in PGPASSWORD or in ~/.pgpass"
            raise DualencError(reason, fix=remedy, where=self.location) from error
