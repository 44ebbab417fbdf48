"""The folder that `dualenc push` writes: where the vectors are, and which ones, in meta.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.data.store.identity import digest_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.files import check_folder_target, is_folder_of
from dualenc.io.provenance import MODEL_ENTRIES, Provenance
from dualenc.io.targets import check_outside
from dualenc.io.terminal import without_credentials
from dualenc.types import StrPath

FORMAT = "dualenc engine"
FORMAT_VERSION = 3
AGAIN = "run `dualenc push` again"
RESULT = "recall.json"
"""Measured recall, in the folder of an engine or an index."""
ENTRIES = (
    "target",
    "collection",
    "fingerprint",
    "count",
    "dim",
    "metric",
    "columns",
    "has_snippets",
)
"""Entries of meta.json that a push adds to those of the embeddings."""

MIGRATED = (*MODEL_ENTRIES, "dim", "fingerprint", "embeddings")
"""Entries that a migration changes; the embeddings of a migrated collection are in no folder."""


def migrated_entries(model: str, checksum: str, dim: int, fingerprint: str) -> dict[str, Any]:
    """Return the entries of documents that were embedded again by a query-document model.

    Args:
        model: name of the model.
        checksum: checksum of its tower of documents.
        dim: D, its dimension.
        fingerprint: identity of the new vectors.
    """
    about = (model, checksum, "right", "text", "embedding", "query-document")
    entries: dict[str, Any] = dict(zip(MODEL_ENTRIES, about, strict=True))
    return entries | {"dim": dim, "fingerprint": fingerprint}


def refuse_url(source: StrPath) -> None:
    """Raise a `DualencError` for a URL in place of a folder."""
    # One slash suffices: `Path` collapses the two of a URL.
    if re.match(r"[A-Za-z][\w+.-]+:/", str(source)) and not Path(source).exists():
        raise DualencError(
            "is a URL",
            fix="name the folder that `dualenc push` wrote, by default EMBEDDINGS-engine",
            where=without_credentials(str(source)),
        )


def is_pushed(folder: StrPath) -> bool:
    """Return True if a folder records pushed embeddings, according to its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_push_target(folder: StrPath) -> None:
    """Raise unless a folder is new, empty, or records pushed embeddings."""
    check_outside(folder)
    check_folder_target(folder, is_pushed, "collection that dualenc pushed")


def read_pushed(folder: StrPath, required: Sequence[str] = ENTRIES) -> Provenance:
    """Read the meta.json of a folder that records pushed embeddings, without connecting."""
    other = "was not written by `dualenc push`; push embeddings first"
    return Provenance.from_folder(Path(folder), FORMAT, FORMAT_VERSION, required, other, AGAIN)


def embeddings_fingerprint(embeddings: Embeddings, metric: str) -> str:
    """Return the checksum of contents and metric that identifies pushed embeddings."""
    # A folder records the checksums of its files; embeddings in memory are hashed here.
    contents = [f"{name} {value}" for name, value in embeddings.provenance.files.items()]
    if contents:
        return digest_of(metric, sorted(contents))
    return digest_of(metric, *(bytes(batch.serialize()) for batch in embeddings.record_batches()))


def sample_embeddings(embeddings: Embeddings, count: int) -> np.ndarray:
    """Return a random sample of the vectors (count, D) float32; they repeat if there are fewer."""
    rows = np.random.default_rng(0).permutation(len(embeddings))
    return np.asarray(embeddings.vectors[np.resize(rows, count)], dtype=np.float32)
