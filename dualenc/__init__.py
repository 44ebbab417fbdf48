"""Train, evaluate and search with dual encoders under the global contrastive loss."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualenc.data import open_corpus, open_pairs
    from dualenc.encoders import ImageEncoder, ImageTextEncoder, TextEncoder, load_model
    from dualenc.objectives import GlobalCache, InfoNCE, SogCLR
    from dualenc.search import Embeddings, Index
    from dualenc.training import ImageTextEvaluator, RetrievalEvaluator, Trainer

__version__ = "0.1.0"

_HOMES = {
    "Embeddings": "search",
    "GlobalCache": "objectives",
    "ImageEncoder": "encoders",
    "ImageTextEncoder": "encoders",
    "ImageTextEvaluator": "training",
    "Index": "search",
    "InfoNCE": "objectives",
    "RetrievalEvaluator": "training",
    "SogCLR": "objectives",
    "TextEncoder": "encoders",
    "Trainer": "training",
    "load_model": "encoders",
    "open_corpus": "data",
    "open_pairs": "data",
}

__all__ = [
    "Embeddings",
    "GlobalCache",
    "ImageEncoder",
    "ImageTextEncoder",
    "ImageTextEvaluator",
    "Index",
    "InfoNCE",
    "RetrievalEvaluator",
    "SogCLR",
    "TextEncoder",
    "Trainer",
    "load_model",
    "open_corpus",
    "open_pairs",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `import dualenc` alone loads neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
