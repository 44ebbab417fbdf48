"""Embed a corpus; build, save, open and search FAISS indexes."""

from dualenc.data.store.vector_shards import Embeddings
from dualenc.search.index.kinds import choose_factory
from dualenc.search.index.open import Hit, Index, is_index

__all__ = ["Embeddings", "Hit", "Index", "choose_factory", "is_index"]
