"""Versions of pgvector whose HNSW indexes stay whole."""

from __future__ import annotations

import re

SAFE_HNSW = (0, 8, 4)
"""Before 0.8.3, vacuum may corrupt an HNSW index; 0.8.4 corrects errors of inserts and vacuums."""
UPDATE = "install 0.8.4 or later, then ALTER EXTENSION vector UPDATE and REINDEX"


def hnsw_problem(version: str) -> str:
    """Return what is wrong with the HNSW indexes of a version of pgvector; "" for nothing.

    Source: the changelog of pgvector, 0.8.3 and 0.8.4.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers >= SAFE_HNSW:
        return ""
    return f"has pgvector {version}, and before 0.8.4 vacuum may corrupt an HNSW index"
