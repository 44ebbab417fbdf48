"""Engine interface, and the folder that records what `dualenc push` uploaded."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from dualenc.data.store.identity import digest_of
from dualenc.data.store.vector_shards import Embeddings, is_embeddings, read_head
from dualenc.errors import DualencError
from dualenc.io.files import check_folder_target, is_folder_of, remove, write_json
from dualenc.io.targets import check_outside
from dualenc.io.terminal import printable, without_credentials
from dualenc.search.index.database import as_queries
from dualenc.search.index.open import Hit, as_hit, check_recorded
from dualenc.search.where import Condition, Kind, parse_conditions

IndexKind = Literal["hnsw", "ivfflat", "none"]
"""Kind of pgvector's index."""
Rows = Iterator[list[tuple[float, dict[str, Any]]]]
"""For each query, scores with columns, id and text."""
Settings = dict[str, Any]
"""Search settings by the engine's own names."""
State = dict[str, Any]
"""The `fingerprint` of stored embeddings, and what else an engine records with them."""
FORMAT = "dualenc engine"
FORMAT_VERSION = 3
AGAIN = "run `dualenc push` again"
RESUME = "the same command again resumes"
REPLACED = "another process has removed or replaced it"
RESULT = "recall.json"
"""Measured recall, in the folder of an engine or an index."""
SWAP_SECONDS = 1.0
"""How long opening waits for a push that has replaced the vectors and has yet to write the
folder."""
VECTORS_AT_ONCE = 1024
"""Vectors requested from an engine at once."""
ENTRIES = {
    "target": str,
    "collection": str,
    "fingerprint": str,
    "count": int,
    "dim": int,
    "metric": str,
    "columns": dict,
    "has_snippets": bool,
}
"""Entries of meta.json that a push adds to those of the embeddings, with their types."""


class Engine(ABC):
    """N vectors in a database, searched like an `Index`.

    Create one with `push_embeddings` or `open_engine` of `dualenc.search.engines.factory`.

        engine = open_engine("embeddings-engine")
        hits = engine.search(vectors, k=5, where=["year>=2020"])

    Args:
        meta: entries of meta.json: `ENTRIES`, those of the embeddings, search `settings`, and the
            engine's own.

    Attributes:
        location: database and collection, for messages.
        batch_rows: rows stored at once; an interrupted push resumes at a batch.
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
        """Return the collection for embeddings; it need not exist in the database yet.

        Args:
            embeddings: the vectors to push.
            meta: entries of meta.json that describe them.
            index: kind of pgvector's index.
        """
        return cls(meta)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Read and check the meta.json of a folder, without connecting to the engine."""
        return read_pushed(folder)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Open the collection that a folder records; credentials come from the environment.

        Raises:
            DualencError: the engine cannot be reached, or holds other embeddings.
        """
        deadline = time.monotonic() + SWAP_SECONDS
        while True:
            engine = cls(cls.read(folder))
            try:
                engine._check_opened(folder)
            except DualencError:
                engine.close()
                # A push replaces the vectors first and writes the folder afterwards.
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
        """Write a meta.json with the place and the description of the vectors, without credentials.

        A recall that was measured for other vectors, or with another index, is removed.
        """
        check_push_target(folder)
        if is_pushed(folder) and not self.is_remembered(read_pushed(folder)):
            remove(Path(folder) / RESULT)
        head = {"format": FORMAT, "version": FORMAT_VERSION}
        write_json(Path(folder) / "meta.json", {**self.meta, **head})

    def is_remembered(self, meta: dict[str, Any]) -> bool:
        """Return True if a meta.json records the same vectors and index at the same place."""
        return self._identity(self.meta) == self._identity(meta)

    def _identity(self, meta: dict[str, Any]) -> list[Any]:
        return [meta.get(name) for name in ("fingerprint", "index", "target", "collection")]

    def search(
        self,
        queries: np.ndarray,
        k: int = 10,
        *,
        where: str | Sequence[str | Condition] = (),
        filter: str = "",
        exact: bool = False,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> list[list[Hit]]:
        """Return the nearest items (Q, ≤ k) of queries, best first, like `Index.search`.

        Args:
            queries: (Q, D) vectors, or (D,) for a single query.
            k: number of results per query.
            where: conditions on columns such as "year>=2020", all of which must hold
                (`dualenc.search.where.parse_conditions`).
            filter: a filter in the engine's own language; "" for none.
            exact: compare all rows that meet the conditions and the filter, without an index.
            nprobe: inverted lists to visit, in place of the setting (IVF).
            ef_search: candidates of the graph search, in place of the setting (HNSW).

        Raises:
            DualencError: an argument is invalid, or the engine refuses or has lost the collection.
        """
        vectors = as_queries(queries, self.dim, self.meta["metric"], k)
        condition = self.condition(filter, parse_conditions(where, self.column_kinds))
        settings = dict(self.meta["settings"])
        for option, value in (("nprobe", nprobe), ("ef_search", ef_search)):
            if value is None:
                continue
            name = self.setting_of_option().get(option)
            if name is None:
                kind = self.meta.get("index", "hnsw")
                raise DualencError(
                    f"{option} is {value}, but the index is of kind {kind}", fix="leave it out"
                )
            settings[name] = value
        results = []
        for rows in self.nearest(vectors, k, condition, None if exact else settings):
            hits = [as_hit(row.pop("id"), score, row.pop("text", None), row) for score, row in rows]
            results.append(hits)
        return results

    def workload_filter(self, text: str) -> dict[str, Any]:
        """Return the arguments of `search` for a filter of a workload, here the engine's own."""
        return {"filter": text}

    def sample_vectors(self, count: int) -> np.ndarray:
        """Return a random sample of the vectors (count, D); they repeat if there are fewer.

        They are read from the embeddings that were pushed if these still exist, because requesting
        them from the engine is slow.
        """
        embeddings = self._pushed_embeddings()
        if embeddings is not None:
            return sample_embeddings(embeddings, count)
        # Sorted, because engines return rows in no particular order.
        ids = sorted(self.texts_by_id())
        rows = np.random.default_rng(0).permutation(len(ids))[:count]
        vectors = self.vectors_in_batches([ids[row] for row in rows])
        return vectors[np.resize(np.arange(len(vectors)), count)]

    def vectors_in_batches(self, ids: Sequence[str]) -> np.ndarray:
        """Return the stored vectors (n, D) float32 of n ids, for any number of ids."""
        starts = range(0, len(ids), VECTORS_AT_ONCE)
        parts = [self.vectors(ids[start : start + VECTORS_AT_ONCE]) for start in starts]
        return np.concatenate(parts)

    def _pushed_embeddings(self) -> Embeddings | None:
        """Return the pushed embeddings if their folder is recorded and unchanged."""
        recorded = self.meta.get("embeddings")
        if not isinstance(recorded, str) or not is_embeddings(recorded):
            return None
        with suppress(DualencError):
            embeddings = Embeddings.open(recorded)
            fingerprint = embeddings_fingerprint(embeddings, self.meta["metric"])
            return embeddings if fingerprint == self.items_checksum else None
        return None

    @abstractmethod
    def nearest(
        self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None
    ) -> Rows:
        """Yield the rows that meet a condition, best first, for each vector.

        Args:
            vectors: (Q, D), ready for the metric.
            k: number of results per query.
            condition: returned by `condition`.
            settings: search settings; None searches exactly.
        """

    @abstractmethod
    def condition(self, filter: str, where: Sequence[Condition]) -> Any:
        """Translate a filter ("" for none) and conditions for the engine."""

    @abstractmethod
    def setting_of_option(self) -> dict[str, str]:
        """Return the setting that each option of `search` stands for, if it applies."""

    @abstractmethod
    def ladder(self) -> Iterator[Settings]:
        """Yield search settings that compare more and more rows."""

    @abstractmethod
    def check_filter(self, filter: str) -> Any:
        """Raise a `DualencError` for a filter that is not valid in the engine's language."""

    @abstractmethod
    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """Return the stored vectors (n, D) float32 of n ids, in one request."""

    @abstractmethod
    def texts_by_id(self) -> dict[str, str]:
        """Return the snippet of each stored item, or ""."""

    @abstractmethod
    def stored_state(self) -> State | None:
        """Return the state of the collection; None if it does not exist."""

    def check_state(self, state: State | None, problem: str) -> State:
        """Return the state of the collection if it is that of these embeddings; else raise."""
        if state is None or state["fingerprint"] != self.items_checksum:
            raise DualencError(problem, fix=AGAIN, where=self.location)
        return state

    def check_current(self, state: State | None) -> None:
        """Raise if the vectors were replaced: results of another model would mislead."""
        if state is None or state["fingerprint"] != self.items_checksum:
            raise DualencError(
                "its embeddings were replaced or removed since it was opened",
                fix="open it again",
                where=self.location,
            )

    def check_all_stored(self, ids: Sequence[str], vector_of: Mapping[str, Any]) -> None:
        """Raise if the vector of an id is no longer stored."""
        for name in ids:
            if name not in vector_of:
                raise DualencError(
                    f"no vector of {printable(name)[:80]!r} is stored any more",
                    fix=AGAIN,
                    where=self.location,
                )

    @contextmanager
    def transaction(self) -> Iterator[State | None]:
        """Lock the collection for a change by a push, and yield the state of what it fills.

        The state is None if what it fills must be created. A push fills the collection itself if
        that already holds these embeddings. Otherwise it fills a second one, which `finish` swaps
        in, so that readers always find either the old or the new embeddings, complete.

        Raises:
            DualencError: the collection holds other embeddings, which may not be replaced.
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
        """Make the change in this context atomic and exclusive, if the engine supports that."""

    @abstractmethod
    def fill(self, *, beside: bool) -> State | None:
        """Select what a push fills: the collection, or a second one beside it. Return its state."""

    @abstractmethod
    def create(self, embeddings: Embeddings) -> None:
        """Create the empty collection to fill, and remove what abandoned pushes left."""

    @abstractmethod
    def stored_ids(self, ids: Sequence[str]) -> set[str]:
        """Return those of the ids that are stored in what is filled."""

    @abstractmethod
    def add(self, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
        """Store rows with their vectors (n, D), ready for the metric; durable on return."""

    @abstractmethod
    def count_rows(self) -> int:
        """Return the number of rows in what is filled."""

    @abstractmethod
    def remove_others(self, ids: Sequence[str]) -> None:
        """Remove all rows with other ids than these from what is filled."""

    @abstractmethod
    def finish(self, state: State) -> None:
        """Build the index; if a second collection was filled, swap it in."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


def refuse_url(source: str | os.PathLike[str]) -> None:
    """Raise a `DualencError` for a URL in place of a folder."""
    # One slash suffices: `Path` collapses the two of a URL.
    if re.match(r"[A-Za-z][\w+.-]+:/", str(source)) and not Path(source).exists():
        raise DualencError(
            "is a URL",
            fix="name the folder that `dualenc push` wrote, by default EMBEDDINGS-engine",
            where=without_credentials(str(source)),
        )


def is_pushed(folder: str | os.PathLike[str]) -> bool:
    """Return True if a folder records pushed embeddings, according to its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_push_target(folder: str | os.PathLike[str]) -> None:
    """Raise unless a folder is new, empty, or records pushed embeddings."""
    check_outside(folder)
    check_folder_target(folder, is_pushed, "collection that dualenc pushed")


def read_pushed(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the meta.json of a folder that records pushed embeddings, without connecting."""
    path = Path(folder) / "meta.json"
    other = "was not written by `dualenc push`; push embeddings first"
    meta = read_head(path.parent, FORMAT, FORMAT_VERSION, other, ENTRIES)
    check_recorded(path, meta, AGAIN)
    return meta


def embeddings_fingerprint(embeddings: Embeddings, metric: str) -> str:
    """Return the checksum of contents and metric that identifies pushed embeddings."""
    contents = [f"{name} {value}" for name, value in embeddings.meta.get("files", {}).items()]
    if contents:
        return digest_of(metric, sorted(contents))
    return digest_of(metric, *(bytes(batch.serialize()) for batch in embeddings.record_batches()))


def sample_embeddings(embeddings: Embeddings, count: int) -> np.ndarray:
    """Return a random sample of the vectors (count, D) float32; they repeat if there are fewer."""
    rows = np.random.default_rng(0).permutation(len(embeddings))
    return np.asarray(embeddings.vectors[np.resize(rows, count)], dtype=np.float32)
