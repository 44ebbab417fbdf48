"""FAISS indexes: choose, build, tune, open, change and filter."""

from dualenc.search.index.open import Hit, Index, is_index

__all__ = ["Hit", "Index", "is_index"]
