"""Vectors of the new model that searches embed during a migration, in an SQLite file.

Several processes read and write it at once, and may be killed at any moment: SQLite stores all
vectors of a call or none, and undoes what a killed process has begun.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from dualenc.types import StrPath

logger = logging.getLogger("dualenc.search")

LOCK_SECONDS = 10.0
"""Time to wait for another process that writes."""
_MAX_NAMES = 10_000
"""Number of ids per SQL statement; SQLite takes 32,766 parameters."""
_UNIT_TOLERANCE = 1e-3


class VectorCache:
    """Unit vectors (D,) by document id, on disk.

    A file that is missing or cannot be used is an empty cache: searches then embed again, and a
    warning says so once. `create` makes the file; `put` never does, so that a search that outlives
    its migration leaves nothing behind.

        cache = VectorCache("index.migration/candidates-0f3a.sqlite", dim=384)
        cache.put(["d1"], vectors)
        cache.get(["d1", "d2"])  # {"d1": …}

    Args:
        path: the file.
        dim: D.
    """

    def __init__(self, path: StrPath, dim: int) -> None:
        self.path = Path(path)
        self.dim = dim
        self._has_warned = False

    def create(self) -> None:
        """Create the file unless it exists; replace a corrupt one."""
        with self._tolerated():
            try:
                self._create()
            except sqlite3.OperationalError:  # locked, or the disk is full or read-only
                raise
            except sqlite3.DatabaseError:
                self.path.unlink()
                self._create()

    def _create(self) -> None:
        with self._transaction("rwc") as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS vectors (id TEXT PRIMARY KEY, vector BLOB NOT NULL)"
            )

    def get(self, ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the stored vectors (D,) float32 of those ids that have one."""
        rows: list[tuple[str, bytes]] = []
        with self._tolerated(), closing(self._connect()) as connection:
            for start in range(0, len(ids), _MAX_NAMES):
                names = ids[start : start + _MAX_NAMES]
                marks = ",".join("?" * len(names))
                query = f"SELECT id, vector FROM vectors WHERE id IN ({marks})"
                rows += connection.execute(query, tuple(names)).fetchall()
        vectors = ((name, self._vector(stored)) for name, stored in rows)
        return {name: vector for name, vector in vectors if vector is not None}

    def ids(self) -> set[str]:
        """Return the ids that have a vector."""
        names: set[str] = set()
        with self._tolerated(), closing(self._connect()) as connection:
            names.update(name for (name,) in connection.execute("SELECT id FROM vectors"))
        return names

    def put(self, ids: Iterable[str], vectors: np.ndarray) -> None:
        """Store vectors (n, D); those that are stored already stay."""
        rows = [
            (name, vector.astype("<f4").tobytes())
            for name, vector in zip(ids, vectors, strict=True)
        ]
        with self._tolerated(), self._transaction() as connection:
            connection.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", rows)

    def remove(self) -> None:
        """Remove the file, after writers have finished; those that come later find none."""
        if self.path.exists():
            # SQLite refuses to write to a file that was removed, so a writer that waits for this
            # transaction leaves no journal in the folder.
            with self._tolerated(), self._transaction():
                self.path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _vector(self, stored: object) -> np.ndarray | None:
        """Return a stored vector (D,); None if it is damaged."""
        if not isinstance(stored, bytes) or len(stored) != 4 * self.dim:
            return None
        vector = np.frombuffer(stored, "<f4")
        return vector if abs(float(vector @ vector) - 1) < _UNIT_TOLERANCE else None

    def _connect(self, mode: str = "rw") -> sqlite3.Connection:
        # A connection per call: SQLite's must not cross threads or forks, and opening is cheap.
        address = f"{self.path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(address, LOCK_SECONDS, isolation_level=None, uri=True)
        # The file may come from elsewhere: its schema must not run functions.
        connection.execute("PRAGMA trusted_schema = OFF")
        return connection

    @contextmanager
    def _transaction(self, mode: str = "rw") -> Iterator[sqlite3.Connection]:
        """Yield a connection that no other process writes beside; commit at the end."""
        with closing(self._connect(mode)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Log the first error of SQLite; none if the file is gone, as after a migration."""
        try:
            yield
        except sqlite3.Error as error:
            if self.path.exists() and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: cannot be used (%s); candidates are embedded again", self.path, error
                )
