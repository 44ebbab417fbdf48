"""The contract of the engines, and the folder in which `dualenc push` remembers one."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from dualenc.data.store.vector_shards import Embeddings, read_head
from dualenc.errors import DualencError
from dualenc.io.files import check_folder_target, is_folder_of, remove, write_json
from dualenc.io.targets import check_outside
from dualenc.io.terminal import printable, without_credentials
from dualenc.search.index.build import as_queries
from dualenc.search.index.open import Hit, as_hit, check_recorded
from dualenc.search.where import Condition, Kind

IndexKind = Literal["hnsw", "ivfflat", "none"]
"""The kind of pgvector's index."""
Rows = Iterator[list[tuple[float, dict[str, Any]]]]
"""For each query scores, and columns with id and text."""
Settings = dict[str, Any]
"""Search settings by the engine's own names."""
State = dict[str, Any]
"""The `fingerprint` of stored embeddings, and what else an engine notes with them."""
FORMAT = "dualenc engine"
FORMAT_VERSION = 3
AGAIN = "run `dualenc push` again"
REPLACED = "another process has removed or replaced it"
RESULT = "recall.json"
"""The recall that was measured, in the folder of an engine or an index."""
SWAP_SECONDS = 1.0
"""How long opening waits for a push that has replaced the vectors and will write the folder."""
ENTRIES = {
    "target": str,
    "collection": str,
    "fingerprint": str,
    "count": int,
    "dim": int,
    "metric": str,
}
ENTRIES |= {"columns": dict, "has_snippets": bool}
"""Entries of meta.json that a push adds to those of the embeddings, with their types."""


class Engine(ABC):
    """N vectors in a database; create one with `push_embeddings` or `open_engine` of
    `dualenc.search.engines.factory`.

    Args:
        meta: the entries of meta.json: `ENTRIES`, those of the embeddings, search `settings`, and
            the engine's own.

    Attributes:
        location: the database and the collection, for messages.
        batch_rows: rows stored at once; a broken push resumes at a batch.
    """

    batch_rows: int
    replaces = False
    """True while a push may replace other embeddings."""

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
    def read(cls, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Read and check the meta.json of a folder; the engine is not asked."""
        return read_pushed(folder)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Open the collection that a folder remembers; keys and passwords come from the
        environment."""
        deadline = time.monotonic() + SWAP_SECONDS
        while True:
            engine = cls(cls.read(folder))
            try:
                engine._check_opened(folder)
            except DualencError:
                engine.close()
                # A push replaces the vectors first and then writes the folder.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return engine

    def _check_opened(self, folder: str | os.PathLike[str]) -> None:
        problem = f"is gone, or holds other embeddings than {folder} says"
        state = self.check_state(self.stored_state(), problem)
        if state.get("index") != self.meta.get("index"):
            raise DualencError(
                f"its push was not finished, or its index is not {self.meta['index']}",
                fix=AGAIN,
                where=self.location,
            )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a meta.json with the place and the description of the vectors, without keys and
        passwords.

        A recall that was measured of other vectors, or by another index, is removed.
        """
        check_push_target(folder)
        if is_pushed(folder) and not self.is_remembered(read_pushed(folder)):
            remove(Path(folder) / RESULT)
        write_json(
            Path(folder) / "meta.json", {**self.meta, "format": FORMAT, "version": FORMAT_VERSION}
        )

    def is_remembered(self, meta: dict[str, Any]) -> bool:
        """True if a folder's meta.json remembers the same vectors and index at the same place."""
        return self._identity(self.meta) == self._identity(meta)

    def _identity(self, meta: dict[str, Any]) -> list[Any]:
        return [meta.get(name) for name in ("fingerprint", "index", "target", "collection")]

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
        """The nearest items of queries (Q, D), best first; fewer than k where fewer meet the filter
        and conditions.

        With `exact` all rows that meet them are compared, without an index.
        """
        vectors = as_queries(queries, self.dim, self.meta["metric"], k)
        condition = self.condition(filter, where)
        settings = dict(self.meta["settings"])
        for option, value in (("nprobe", nprobe), ("ef_search", ef_search)):
            if value is not None:
                if option not in self.setting_of_option():
                    kind = self.meta.get("index", "hnsw")
                    raise DualencError(
                        f"{option} is {value}, but the index is of kind {kind}", fix="leave it out"
                    )
                settings[self.setting_of_option()[option]] = value
        results = []
        for rows in self.nearest(vectors, k, condition, None if exact else settings):
            results.append(
                [as_hit(row.pop("id"), score, row.pop("text", None), row) for score, row in rows]
            )
        return results

    @abstractmethod
    def nearest(
        self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None
    ) -> Rows:
        """The rows that meet a condition, best first, for each vector; without settings by exact
        search."""

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
    def stored_state(self) -> State | None:
        """The state of the collection; None without one."""

    def check_state(self, state: State | None, problem: str) -> State:
        """The state of the collection, which must be that of these embeddings."""
        if state is None or state["fingerprint"] != self.items_checksum:
            raise DualencError(problem, fix=AGAIN, where=self.location)
        return state

    def check_current(self, state: State | None) -> None:
        """Refuse a collection whose vectors were replaced: those of another model mislead."""
        if state is None or state["fingerprint"] != self.items_checksum:
            raise DualencError(
                "its embeddings were replaced or removed since it was opened",
                fix="open it again",
                where=self.location,
            )

    def check_all_stored(self, ids: Sequence[str], vector_of: Mapping[str, Any]) -> None:
        """Refuse ids whose vectors are not stored any more."""
        for name in ids:
            if name not in vector_of:
                raise DualencError(
                    f"no vector of {printable(name)[:80]!r} is stored any more",
                    fix=AGAIN,
                    where=self.location,
                )

    @contextmanager
    def transaction(self) -> Iterator[State | None]:
        """A change by a push; yields the state of what it fills, None where that must be created.

        It fills the collection itself if that holds these embeddings. Otherwise it fills one beside
        it, which `finish` puts in its place: readers find the old or the new embeddings, whole.
        """
        with self.exclusive():
            state = self.stored_state()
            is_same = state is not None and state["fingerprint"] == self.items_checksum
            if state is not None and not is_same and not self.replaces:
                raise DualencError(
                    "holds other embeddings, or with another metric",
                    fix="push with --replace to remove them first, or name another --table",
                    where=self.location,
                )
            yield self.fill(beside=not is_same)

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """A change that is whole and the only one at a time, where the engine has such."""

    @abstractmethod
    def fill(self, *, beside: bool) -> State | None:
        """Choose what a push fills, the collection or the one beside it; returns its state."""

    @abstractmethod
    def create(self, embeddings: Embeddings) -> None:
        """Create the empty collection that is filled, and remove what abandoned pushes left."""

    @abstractmethod
    def stored_ids(self, ids: Sequence[str]) -> set[str]:
        """Those of some ids that are stored in what is filled."""

    @abstractmethod
    def add(self, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
        """Store rows, and their vectors (n, D) ready for the metric; on return they are durable."""

    @abstractmethod
    def count_rows(self) -> int:
        """The number of rows in what is filled."""

    @abstractmethod
    def remove_others(self, ids: Sequence[str]) -> None:
        """Remove all rows with other ids than these from what is filled."""

    @abstractmethod
    def finish(self, state: State) -> None:
        """Build the index, and put what was filled beside the collection in its place."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


def refuse_url(source: str | os.PathLike[str]) -> None:
    """Raise a `DualencError` for a URL in place of a folder; a `Path` writes it with one slash."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(source)) and not Path(source).exists():
        raise DualencError(
            "is a URL",
            fix="name the folder that `dualenc push` wrote, by default EMBEDDINGS-engine",
            where=without_credentials(str(source)),
        )


def is_pushed(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder remembers pushed embeddings, by its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_push_target(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is not new, not empty, and remembers no pushed embeddings."""
    check_outside(folder)
    check_folder_target(folder, is_pushed, "collection that dualenc pushed")


def read_pushed(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The meta.json of a folder that remembers pushed embeddings; the engine is not asked."""
    path = Path(folder) / "meta.json"
    other = "was not written by `dualenc push`; push embeddings first"
    meta = read_head(path.parent, FORMAT, FORMAT_VERSION, other, ENTRIES)
    check_recorded(path, meta, AGAIN)
    return meta
