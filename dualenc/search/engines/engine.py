"""What an engine does, in the order in which a push, a search and a reader of vectors call it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import pyarrow as pa

from dualenc.data.store.vector_shards import Embeddings, is_embeddings
from dualenc.errors import DualencError
from dualenc.io.files import remove
from dualenc.io.provenance import Provenance, Recorded
from dualenc.io.terminal import printable
from dualenc.search.engines.pushed_folder import (
    AGAIN,
    FORMAT,
    FORMAT_VERSION,
    RESULT,
    check_push_target,
    embeddings_fingerprint,
    is_pushed,
    read_pushed,
    sample_embeddings,
)
from dualenc.search.index.database import as_queries
from dualenc.search.index.open import Hit, as_hit
from dualenc.search.where import Condition, Kind, parse_conditions
from dualenc.types import StrPath, check_several

IndexKind = Literal["hnsw", "ivfflat", "none"]
"""Kind of pgvector's index."""
Rows = Iterator[list[tuple[float, dict[str, Any]]]]
"""For each query, scores with columns, id and text."""
Settings = dict[str, Any]
"""Search settings by the engine's own names."""
State = dict[str, Any]
"""The `fingerprint` of stored embeddings, and what else an engine records with them."""
RESUME = "the same command again resumes"
REPLACED = "another process has removed or replaced it"
STALE = "its embeddings were replaced or removed since it was opened"
SWAP_SECONDS = 1.0
"""How long opening waits for a push that has replaced the vectors and has yet to write the
folder."""
VECTORS_AT_ONCE = 1024
"""Vectors requested from an engine at once."""


class Engine(Recorded, ABC):
    """N vectors in a database, searched like an `Index`.

    Create one with `push_embeddings` or `open_engine` of `dualenc.search.engines.factory`.

        engine = open_engine("embeddings-engine")
        hits = engine.search(vectors, k=5, where=["year>=2020"])

    Args:
        provenance: record of the embeddings, with the entries that `pushed_folder` lists, search
            `settings`, and the engine's own entries.
        replaces: whether a push may replace other embeddings.

    Attributes:
        location: database and collection, for messages.
        filled: name of the collection that a push fills: `name`, or `beside` until it is complete.
        setting_of_option: setting that each option of `search` stands for, if it applies.
        batch_rows: rows stored at once; an interrupted push resumes at a batch.
        name_bytes: bytes of the name that the name of the second collection begins with.
    """

    setting_of_option: Mapping[str, str]
    batch_rows: int
    name_bytes: int

    def __init__(self, provenance: Provenance, *, replaces: bool = False) -> None:
        self.provenance = Provenance.from_entries({"settings": {}, **provenance.entries()})
        self.replaces = replaces
        self.name = provenance.collection
        self.location = f"{provenance.target} {self.name!r}"
        self.dim = provenance.dim
        self.column_kinds = cast("dict[str, Kind]", provenance.columns)
        self.has_snippets = provenance.has_snippets
        self.items_checksum = provenance.fingerprint
        # Derived from the embeddings, so that a repeated push resumes a killed one.
        beginning = self.name.encode()[: self.name_bytes].decode(errors="ignore")
        self.beside = f"{beginning}-{self.items_checksum[:12]}"
        self.filled = self.name

    def __len__(self) -> int:
        return self.provenance.count

    # A push: `new`; `create` in a transaction; `stored_ids` and `add` in a transaction per batch;
    # `count_rows`, `remove_others` and `finish` in a last one; `save`.

    @classmethod
    def new(
        cls, embeddings: Embeddings, provenance: Provenance, index: IndexKind, *, replaces: bool
    ) -> Self:
        """Return the collection for embeddings; it need not exist in the database yet.

        Args:
            embeddings: the vectors to push.
            provenance: record of the vectors, their target and their collection.
            index: kind of pgvector's index.
            replaces: whether the push may replace other embeddings.
        """
        return cls(provenance, replaces=replaces)

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
            if state is not None and not self._is_own(state) and not self.replaces:
                raise DualencError(
                    "holds other embeddings, or with another metric",
                    fix="push with --replace to remove them first, or name another --table",
                    where=self.location,
                )
            if state is not None and (model := state.get("migrates")):
                raise DualencError(
                    f"its model is being changed to {model}",
                    fix="end that first: dualenc migrate FOLDER --finish, or --rollback --discard",
                    where=self.location,
                )
            # Decided anew in each transaction: another push may have swapped in the meantime.
            self.filled = self.name if self._is_own(state) else self.beside
            yield self.state_of(self.filled)

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """Make the change in this context atomic and exclusive, if the engine supports that."""

    def stored_state(self) -> State | None:
        """Return the state of the collection that is searched; None if it does not exist."""
        return self.state_of(self.name)

    @abstractmethod
    def state_of(self, name: str) -> State | None:
        """Return the state of a collection; None if it does not exist. Raise if it is not ours."""

    def not_ours(self) -> DualencError:
        """Return the error for a collection that exists without a state."""
        return DualencError(
            "was not made by `dualenc push`", fix="name another --table", where=self.location
        )

    def _is_own(self, state: State | None) -> bool:
        return state is not None and state["fingerprint"] == self.items_checksum

    def check_state(
        self, state: State | None, problem: str = STALE, fix: str = "open it again"
    ) -> State:
        """Return the state of the collection if it is that of these embeddings; else raise.

        Vectors of another model would fit the dimension, and give wrong results without an error.
        """
        if state is None or not self._is_own(state):
            raise DualencError(problem, fix=fix, where=self.location)
        return state

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

    def finish(self, state: State) -> None:
        """Build the index; if a second collection was filled, swap it in."""
        self.build_index(state)
        if self.filled == self.beside:
            self.swap()
            self.filled = self.name

    @abstractmethod
    def build_index(self, state: State) -> None:
        """Build the vector index of what is filled, unless its state says that it is built."""

    @abstractmethod
    def swap(self) -> None:
        """Give the second collection the name of the first one, which is removed."""

    def save(self, folder: StrPath) -> None:
        """Write a meta.json with the place and the description of the vectors, without credentials.

        A recall that was measured for other vectors, or with another index, is removed.
        """
        check_push_target(folder)
        if is_pushed(folder) and not self.is_remembered(read_pushed(folder)):
            remove(Path(folder) / RESULT)
        self.provenance.updated(format=FORMAT, version=FORMAT_VERSION).write(folder)

    def is_remembered(self, recorded: Provenance) -> bool:
        """Return True if a folder records the same vectors and index at the same place."""
        return self._identity(self.provenance) == self._identity(recorded)

    def _identity(self, recorded: Provenance) -> list[Any]:
        return [recorded.fingerprint, recorded.index, recorded.target, recorded.collection]

    # A search: `open`; `condition` and `nearest` for each call of `search`.

    @classmethod
    def read(cls, folder: StrPath) -> Provenance:
        """Read and check the meta.json of a folder, without connecting to the engine."""
        return read_pushed(folder)

    @classmethod
    def open(cls, folder: StrPath) -> Self:
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

    def _check_opened(self, folder: StrPath) -> None:
        problem = f"is gone, or holds other embeddings than {folder} says"
        stored = self.stored_state()
        is_migrated = stored is not None and "migrates" in stored
        again = "run the same `dualenc migrate` again" if is_migrated else AGAIN
        state = self.check_state(stored, problem, again)
        kind = self.provenance.index
        if state.get("index") != kind:
            raise DualencError(
                f"its push was not finished, or its index is not {kind}",
                fix=AGAIN,
                where=self.location,
            )

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
        vectors = as_queries(queries, self.dim, self.provenance.metric, k)
        condition = self.condition(filter, parse_conditions(where, self.column_kinds))
        settings = self._settings(nprobe=nprobe, ef_search=ef_search)
        results = []
        for rows in self.nearest(vectors, k, condition, None if exact else settings):
            hits = [as_hit(row.pop("id"), score, row.pop("text", None), row) for score, row in rows]
            results.append(hits)
        return results

    def _settings(self, **options: int | None) -> Settings:
        """Return a copy of the settings with the given options of `search`."""
        settings = dict(self.provenance.settings)
        for option, value in options.items():
            if value is None:
                continue
            name = self.setting_of_option.get(option)
            if name is None:
                kind = self.provenance.index or "hnsw"
                raise DualencError(
                    f"{option} is {value}, but the index is of kind {kind}", fix="leave it out"
                )
            settings[name] = value
        return settings

    @abstractmethod
    def condition(self, filter: str, where: Sequence[Condition]) -> Any:
        """Translate a filter ("" for none) and conditions for the engine."""

    @abstractmethod
    def check_filter(self, filter: str) -> Any:
        """Raise a `DualencError` for a filter that is not valid in the engine's language."""

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

    # Measuring recall: `record` and `search` with one after the other of `ladder`.

    def workload_filter(self, text: str) -> dict[str, Any]:
        """Return the arguments of `search` for a filter of a workload, here the engine's own."""
        return {"filter": text}

    @abstractmethod
    def ladder(self) -> Iterator[Settings]:
        """Yield search settings that compare more and more rows."""

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
        return np.resize(vectors, (count, self.dim))

    def _pushed_embeddings(self) -> Embeddings | None:
        """Return the pushed embeddings if their folder is recorded and unchanged."""
        recorded = self.provenance.embeddings
        if recorded is None or not is_embeddings(recorded):
            return None
        # Not an error: the folder may have been corrupted or written again since.
        with suppress(DualencError):
            embeddings = Embeddings.open(recorded)
            fingerprint = embeddings_fingerprint(embeddings, self.provenance.metric)
            return embeddings if fingerprint == self.items_checksum else None
        return None

    # Reading what is stored, to train or evaluate with it.

    def hold_snapshot(self) -> None:
        """Read from now on what is stored at this moment, if the engine supports that."""
        return

    def checksum(self) -> str:
        """Return a checksum of the stored vectors with their ids."""
        return self.items_checksum

    def count_missing(self) -> int:
        """Return the number of rows that have a text and no vector."""
        return 0

    @abstractmethod
    def texts_by_id(self) -> dict[str, str]:
        """Return the snippet of each stored item, or ""."""

    def vectors_in_batches(self, ids: Sequence[str]) -> np.ndarray:
        """Return the stored vectors (n, D) float32 of n ids, for any number of ids."""
        starts = range(0, len(ids), VECTORS_AT_ONCE)
        parts = [self.vectors(ids[start : start + VECTORS_AT_ONCE]) for start in starts]
        return np.concatenate(parts)

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """Return the stored vectors (n, D) float32 of n ids, in one request."""
        check_several("ids", ids)
        vector_of = self.vectors_by_id(ids)
        for name in ids:
            if name not in vector_of:
                raise DualencError(
                    f"no vector of {printable(name)[:80]!r} is stored any more",
                    fix=AGAIN,
                    where=self.location,
                )
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    @abstractmethod
    def vectors_by_id(self, ids: Sequence[str]) -> Mapping[str, Any]:
        """Return the vector (D,) of each of the ids that is stored."""

    # Checking what killed commands have left.

    def leftovers(self) -> list[str]:
        """Return the names of what unfinished pushes of other embeddings have filled."""
        return []

    def migration(self) -> tuple[bool, str]:
        """Return whether a change of the model stopped halfway, and how far it has come."""
        return False, "none is under way"

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""
