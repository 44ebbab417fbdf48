"""Build, save, open and search FAISS indexes."""

from dualenc.index.factory import choose_factory
from dualenc.index.index import Index, is_index

__all__ = ["Index", "choose_factory", "is_index"]
