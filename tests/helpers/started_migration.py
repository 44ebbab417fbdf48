"""A migration of a small index, at the point where documents are embedded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dualenc.search import Index
from dualenc.search.migration.maps import fit
from dualenc.search.migration.stages import Migration
from tests.helpers.clusters import clustered
from tests.helpers.embeddings_on_disk import on_disk

COUNT = 700
ABOUT = {"model": "new model", "model_checksum": "new", "side": "right", "kind": "query-document"}
INPUTS = {"texts": "t", "queries": "q"}


def old_vectors() -> np.ndarray:
    """(N, 16) vectors of the old model."""
    return clustered(COUNT)


def new_vectors() -> np.ndarray:
    """Unit vectors of another dimension that a linear map gives up to noise."""
    random = np.random.default_rng(5)
    vectors = old_vectors() @ random.normal(size=(16, 8)) + 0.3 * random.normal(size=(COUNT, 8))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def started(
    folder: Path, factory: str, metric: Any = "cosine", memory: int | None = None
) -> Migration:
    """A migration of an index at the point where documents are embedded: the order is 699, 698,
    …"""
    identity = {
        "side": "right",
        "model_checksum": "old",
        "normalized": True,
        "output": "embedding",
        "data": "d",
    }
    embeddings = on_disk(folder / "emb", old_vectors(), **identity)
    Index.build(embeddings, None, factory, metric=metric, memory=memory, folder=folder / "index")
    migration = Migration(folder / "index", ABOUT, INPUTS)
    migration.save_order(np.arange(COUNT)[::-1])
    fit(old_vectors(), new_vectors()).save(migration.work / "map.safetensors")
    return migration
