"""FAISS indexes: choose, build, tune, open, filter and update."""

from dualenc.search.index.open import Hit, Index, is_index

__all__ = ["Hit", "Index", "is_index"]
