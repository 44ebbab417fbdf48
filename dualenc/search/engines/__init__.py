"""Vectors in PostgreSQL and Qdrant: push, open, search, and measure recall under filters."""

from dualenc.search.engines.factory import open_engine, push_embeddings

__all__ = ["open_engine", "push_embeddings"]
