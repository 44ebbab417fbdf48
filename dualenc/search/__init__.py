"""Embed a corpus; build, save, open and search FAISS indexes."""

from dualenc.data.vector_shards import Embeddings
from dualenc.search.index import Hit, Index, is_index
from dualenc.search.kinds import choose_factory

__all__ = ["Embeddings", "Hit", "Index", "choose_factory", "is_index"]
