"""The contract of the engines, and the folder in which `dualenc push` remembers one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from dualenc.data.vector_shards import Embeddings, read_head
from dualenc.errors import DualencError
from dualenc.files import check_folder_target, is_folder_of, write_json
from dualenc.search.build import as_queries
from dualenc.search.index import Hit, as_hit, check_recorded
from dualenc.search.where import Condition, Kind

IndexKind = Literal["hnsw", "ivfflat", "none"]
"""The kind of pgvector's index."""
Rows = Iterator[list[tuple[float, dict[str, Any]]]]
"""For each query scores, and columns with id and text."""
Settings = dict[str, Any]
"""Search settings by the engine's own names."""
FORMAT = "dualenc engine"
FORMAT_VERSION = 3
AGAIN = "run `dualenc push` again"
ENTRIES = {"target": str, "collection": str, "fingerprint": str, "count": int, "dim": int, "metric": str}
ENTRIES |= {"columns": dict, "has_snippets": bool}
"""Entries of meta.json that a push adds to those of the embeddings, with their types."""


class Engine(ABC):
    """N vectors in a database; create one with `push_embeddings` or `open_engine` of `dualenc.search.engines`.

    Args:
        meta: the entries of meta.json: `ENTRIES`, those of the embeddings, search `settings`, and the engine's own.

    Attributes:
        location: the database and the collection, for messages.
        batch_rows: rows stored at once; a broken push resumes at a batch.
    """

    batch_rows: int

    def __init__(self, meta: dict[str, Any]) -> None:
        self.meta = {"settings": {}, **meta}
        self.location = f"{meta['target']} {meta['collection']!r}"
        self.dim: int = meta["dim"]
        self.column_kinds: dict[str, Kind] = meta["columns"]
        self.has_snippets: bool = meta["has_snippets"]
        self.items_checksum: str = meta["fingerprint"]

    def __len__(self) -> int:
        return int(self.meta["count"])

    @classmethod
    def new(cls, embeddings: Embeddings, meta: dict[str, Any], index: IndexKind) -> Self:
        """The collection of the embeddings that a meta describes, which need not exist."""
        return cls(meta)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Open the collection that a folder remembers; keys and passwords come from the environment."""
        engine = cls(read_pushed(folder))
        problem = f"is gone, or holds other embeddings than {folder} says"
        state = engine.check_state(engine.stored_state(), problem)
        if state.get("index") != engine.meta.get("index"):
            problem = f"its push was not finished, or its index is not {engine.meta['index']}"
            raise DualencError(f"{engine.location}: {problem}; {AGAIN}")
        return engine

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a meta.json with the place and the description of the vectors, without keys and passwords."""
        check_push_target(folder)
        write_json(Path(folder) / "meta.json", {**self.meta, "format": FORMAT, "version": FORMAT_VERSION})

    def search(
        self,
        queries: np.ndarray,
        k: int = 10,
        filter: str = "",
        where: Sequence[Condition] = (),
        *,
        nprobe: int | None = None,
        ef_search: int | None = None,
        exact: bool = False,
    ) -> list[list[Hit]]:
        """The nearest items of queries (Q, D), best first; fewer than k where fewer meet the filter and conditions.

        With `exact` all rows that meet them are compared, without an index.
        """
        vectors = as_queries(queries, self.dim, self.meta["metric"], k)
        condition = self.condition(filter, where)
        settings = dict(self.meta["settings"])
        for option, value in (("nprobe", nprobe), ("ef_search", ef_search)):
            if value is not None:
                if option not in self.setting_of_option():
                    kind = self.meta.get("index", "hnsw")
                    raise DualencError(f"{option} is {value}, but the index is of kind {kind}; leave it out")
                settings[self.setting_of_option()[option]] = value
        results = []
        for rows in self.nearest(vectors, k, condition, None if exact else settings):
            results.append([as_hit(row.pop("id"), score, row.pop("text", None), row) for score, row in rows])
        return results

    @abstractmethod
    def nearest(self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None) -> Rows:
        """The rows that meet a condition, best first, for each vector; without settings by exact search."""

    @abstractmethod
    def condition(self, filter: str, where: Sequence[Condition]) -> Any:
        """A filter, "" for none, and conditions in the terms of the engine."""

    @abstractmethod
    def setting_of_option(self) -> dict[str, str]:
        """The setting of each option of `search` that applies to the index."""

    @abstractmethod
    def ladder(self) -> Iterator[Settings]:
        """Search settings that compare more and more rows."""

    @abstractmethod
    def check_filter(self, filter: str) -> Any:
        """Raise a `DualencError` for a filter that is not valid in the engine's language."""

    @abstractmethod
    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stored vectors (n, D) float32 of n ids."""

    @abstractmethod
    def texts_by_id(self) -> dict[str, str]:
        """The snippet of each stored item, or ""."""

    @abstractmethod
    def stored_state(self) -> dict[str, Any] | None:
        """The `fingerprint` of the stored embeddings and their number of `rows`; None without a collection."""

    def check_state(self, state: dict[str, Any] | None, problem: str) -> dict[str, Any]:
        """The state of the collection, which must be that of these embeddings."""
        if state is None or state["fingerprint"] != self.items_checksum:
            raise DualencError(f"{self.location}: {problem}; {AGAIN}")
        return state

    @abstractmethod
    def transaction(self) -> AbstractContextManager[dict[str, Any] | None]:
        """A change of the collection, whole or not at all; yields `stored_state`."""

    @abstractmethod
    def create(self, embeddings: Embeddings) -> None:
        """Create the empty collection, in place of one that was pushed."""

    @abstractmethod
    def add(self, batch: pa.RecordBatch, vectors: np.ndarray, stop: int) -> None:
        """Store the rows up to a number, and their vectors (n, D) ready for the metric; on return they are durable."""

    @abstractmethod
    def finish(self, state: dict[str, Any]) -> None:
        """Build the index of the stored rows."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


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
    meta = read_head(path.parent, FORMAT, FORMAT_VERSION, other, ENTRIES)
    check_recorded(path, meta, AGAIN)
    return meta
