"""Engines: the contract between the searcher and a database, and the folder in which `dualenc push` remembers one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dualenc.data.identity import digest_of
from dualenc.data.vector_shards import Embeddings, read_head
from dualenc.files import check_folder_target, is_folder_of, write_json
from dualenc.reading import read_json_object
from dualenc.search.index import EMBEDDINGS_META, Hit, check_recorded
from dualenc.search.where import Condition, Kind, column_kinds
from dualenc.types import Metric

FORMAT = "dualenc engine"
FORMAT_VERSION = 3
AGAIN = "run `dualenc push` again"
ENTRIES = {"target": str, "collection": str, "fingerprint": str, "count": int, "dim": int, "metric": str}
ENTRIES |= {"columns": dict, "has_snippets": bool}
"""Entries of meta.json that a push adds to those of the embeddings, with their types."""


class Engine(ABC):
    """N pushed vectors in a database.

    Args:
        meta: the entries of `describe`, and the engine's own ones.

    Attributes:
        location: the database and the collection, for messages; without credentials.
    """

    filter_language: ClassVar[str]
    """The language of the argument `filter` of `search`."""
    takes_conditions: ClassVar[bool]
    """Whether `search` takes conditions (`where`)."""
    location: str

    def __init__(self, meta: dict[str, Any]) -> None:
        self.meta = dict(meta)
        self.dim: int = meta["dim"]
        self.column_kinds: dict[str, Kind] = meta["columns"]
        self.has_snippets: bool = meta["has_snippets"]
        self.items_checksum: str = meta["fingerprint"]

    def __len__(self) -> int:
        return int(self.meta["count"])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a meta.json with the place and the description of the vectors, without keys and passwords."""
        check_push_target(folder)
        write_json(Path(folder) / "meta.json", {**self.meta, "format": FORMAT, "version": FORMAT_VERSION})

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def search(
        self,
        queries: np.ndarray,
        k: int = 10,
        filter: str = "",
        where: Sequence[Condition] = (),
        *,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> list[list[Hit]]:
        """The nearest items of queries (Q, D), best first; fewer than k where fewer meet the filter and conditions."""

    @abstractmethod
    def check_filter(self, filter: str) -> Any:
        """Raise a `DualencError` for a filter that is not valid in the engine's language."""

    @abstractmethod
    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stored vectors of n ids: (n, D) float32; `UnknownId` for one that the engine does not have."""

    @abstractmethod
    def texts_by_id(self) -> dict[str, str]:
        """The snippet of each stored item, or "", in the order of the ids."""


def describe(embeddings: Embeddings, target: str, collection: str, metric: Metric) -> dict[str, Any]:
    """The entries of meta.json for embeddings that are pushed to a collection or table of an engine."""
    meta = {key: embeddings.meta[key] for key in EMBEDDINGS_META if key in embeddings.meta}
    return meta | {
        "target": target,
        "collection": collection,
        "fingerprint": _fingerprint(embeddings, metric),
        "count": len(embeddings),
        "dim": embeddings.dim,
        "metric": metric,
        "columns": column_kinds(embeddings.columns),
        "has_snippets": embeddings.snippets is not None,
    }


def _fingerprint(embeddings: Embeddings, metric: Metric) -> str:
    """Checksum of ids, vectors, texts and columns, by their files if they are in a folder, and of the metric."""
    files = embeddings.meta.get("files")
    if files is None:
        return digest_of(metric, *(bytes(batch.serialize()) for batch in embeddings.record_batches()))
    return digest_of(metric, sorted(f"{name} {value}" for name, value in files.items()))


def default_metric(embeddings: Embeddings) -> Metric:
    """Cosine for embeddings that are normalized, the inner product for others."""
    return "cosine" if embeddings.meta.get("normalized") else "ip"


def is_pushed(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder remembers pushed embeddings, by its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_push_target(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is not new, not empty, and remembers no pushed embeddings."""
    check_folder_target(folder, is_pushed, "collection that dualenc pushed")


def read_pushed(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The meta.json of a folder that remembers pushed embeddings; the engine is not asked."""
    path = Path(folder) / "meta.json"
    other = "was not written by `dualenc push`; push embeddings first"
    read_head(path.parent, FORMAT, FORMAT_VERSION, other)
    meta = read_json_object(path, ENTRIES)
    check_recorded(path, meta, AGAIN)
    return meta
