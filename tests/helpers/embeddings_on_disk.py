"""Embeddings as `dualenc embed` writes them, of given vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dualenc.data.store.vector_shards import Embeddings
from dualenc.search.embed.writer import EmbeddingWriter


def on_disk(folder: Path, vectors: np.ndarray, **identity: Any) -> Embeddings:
    """Embeddings with ids "doc 0", … and snippets "text 0", …; `identity` is what they are of."""
    names = [f"doc {i}" for i in range(len(vectors))]
    writer = EmbeddingWriter(
        folder,
        names,
        vectors.shape[1],
        "float32",
        identity,
        {"model": "models/m"},
        snippet="text {}".format,
    )
    for number in writer.unwritten():
        rows = writer.ranges[number]
        writer.write(number, vectors[rows.start : rows.stop])
    return writer.finish()
