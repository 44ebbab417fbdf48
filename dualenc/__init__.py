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
    from dualenc.workflows.adapt_queries import adapt
    from dualenc.workflows.build_index import index
    from dualenc.workflows.change_index import append, remove
    from dualenc.workflows.check_vectors import check
    from dualenc.workflows.embed_corpus import embed
    from dualenc.workflows.environment import environment
    from dualenc.workflows.evaluate_corrupted import evaluate_corrupted
    from dualenc.workflows.evaluate_image_text import evaluate_image_text
    from dualenc.workflows.evaluate_probe import evaluate_probe
    from dualenc.workflows.evaluate_retrieval import evaluate_retrieval
    from dualenc.workflows.evaluate_zero_shot import evaluate_zero_shot
    from dualenc.workflows.measure_engine import evaluate_engine
    from dualenc.workflows.migrate_model import migrate
    from dualenc.workflows.mine_negatives import mine
    from dualenc.workflows.push_vectors import push
    from dualenc.workflows.run_quickstart import quickstart
    from dualenc.workflows.training_report import report
    from dualenc.workflows.tune_recipe import tune
    from dualenc.workflows.verify_folder import verify

__version__ = "0.1.0"

_PARTS = {
    "data": ("open_corpus", "open_pairs"),
    "encoders": ("ImageEncoder", "ImageTextEncoder", "TextEncoder", "load_model"),
    "objectives": ("GlobalCache", "InfoNCE", "SogCLR"),
    "search": ("Embeddings", "Index"),
    "training": ("ImageTextEvaluator", "RetrievalEvaluator", "Trainer"),
    "workflows.adapt_queries": ("adapt",),
    "workflows.build_index": ("index",),
    "workflows.change_index": ("append", "remove"),
    "workflows.check_vectors": ("check",),
    "workflows.embed_corpus": ("embed",),
    "workflows.environment": ("environment",),
    "workflows.evaluate_corrupted": ("evaluate_corrupted",),
    "workflows.evaluate_image_text": ("evaluate_image_text",),
    "workflows.evaluate_probe": ("evaluate_probe",),
    "workflows.evaluate_retrieval": ("evaluate_retrieval",),
    "workflows.evaluate_zero_shot": ("evaluate_zero_shot",),
    "workflows.measure_engine": ("evaluate_engine",),
    "workflows.migrate_model": ("migrate",),
    "workflows.mine_negatives": ("mine",),
    "workflows.push_vectors": ("push",),
    "workflows.run_quickstart": ("quickstart",),
    "workflows.training_report": ("report",),
    "workflows.tune_recipe": ("tune",),
    "workflows.verify_folder": ("verify",),
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
    "adapt",
    "append",
    "check",
    "embed",
    "environment",
    "evaluate_corrupted",
    "evaluate_engine",
    "evaluate_image_text",
    "evaluate_probe",
    "evaluate_retrieval",
    "evaluate_zero_shot",
    "index",
    "load_model",
    "migrate",
    "mine",
    "open_corpus",
    "open_pairs",
    "push",
    "quickstart",
    "remove",
    "report",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `import dualenc` alone loads neither torch nor transformers."""
    for part, names in _PARTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{part}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
