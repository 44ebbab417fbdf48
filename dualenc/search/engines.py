"""Open the engine that a folder remembers, whichever it is."""

from __future__ import annotations

import os
from types import ModuleType

from dualenc.errors import DualencError
from dualenc.search.pushed import Engine, read_pushed
from dualenc.search.qdrant import QdrantIndex

SCHEMES = ("postgresql://", "postgres://")


def open_engine(folder: str | os.PathLike[str], qdrant_path: str | None = None) -> Engine:
    """Open the database that a folder remembers, which `dualenc push` wrote.

    Args:
        folder: the folder.
        qdrant_path: the store of an embedded Qdrant, see `QdrantIndex.open`.
    """
    if not is_postgres(read_pushed(folder)["target"]):
        return QdrantIndex.open(folder, qdrant_path)
    if qdrant_path is not None:
        raise DualencError(f"{folder}: its vectors are in PostgreSQL; leave --qdrant-path out")
    return postgres_module().PostgresIndex.open(folder)


def is_postgres(target: str) -> bool:
    """Whether a target is the URL of a PostgreSQL database."""
    return target.startswith(SCHEMES)


def postgres_module() -> ModuleType:
    """`dualenc.search.postgres`, which needs an extra."""
    try:
        from dualenc.search import postgres  # imports psycopg, which is optional
    except ImportError as error:
        raise DualencError(
            f"PostgreSQL needs psycopg ({error}); pip install 'dualenc[postgres]'"
        ) from None
    return postgres
