"""Open the engine that a folder remembers, whichever it is."""

from __future__ import annotations

import os
from types import ModuleType

from dualenc.errors import DualencError
from dualenc.search.pushed import Engine, read_pushed
from dualenc.search.qdrant import QdrantIndex

SCHEMES = ("postgresql://", "postgres://")


def open_engine(folder: str | os.PathLike[str]) -> Engine:
    """Open the database that a folder remembers, which `dualenc push` wrote."""
    if is_postgres(read_pushed(folder)["target"]):
        return postgres_module().PostgresIndex.open(folder)
    return QdrantIndex.open(folder)


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
