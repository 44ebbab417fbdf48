"""Embed a corpus; build, save, open and search FAISS indexes."""

from dualenc.search.embeddings import Embeddings
from dualenc.search.index import Index, is_index
from dualenc.search.kinds import choose_factory

__all__ = ["Embeddings", "Index", "choose_factory", "is_index"]
