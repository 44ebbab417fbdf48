"""Vector search engines: push embeddings to one, search it with its own filters, compare it with exact search."""

from dualenc.search.engines.connection import CollectionInfo
from dualenc.search.engines.index import Engine, EngineIndex, is_engine, open_engine, push

__all__ = ["CollectionInfo", "Engine", "EngineIndex", "is_engine", "open_engine", "push"]
