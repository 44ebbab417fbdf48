"""Embed a corpus; build, save, open and search FAISS indexes."""

from dualenc.search.build import choose_factory
from dualenc.search.embeddings import Embeddings
from dualenc.search.index import Index, is_index

__all__ = ["Embeddings", "Index", "choose_factory", "is_index"]
