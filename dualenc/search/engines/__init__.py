"""Engines: push vectors to PostgreSQL or Qdrant, search them, and measure filtered recall."""

from dualenc.search.engines.factory import open_engine, push_embeddings

__all__ = ["open_engine", "push_embeddings"]
