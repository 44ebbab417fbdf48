"""Qdrant: push embeddings to a collection, and search it with conditions or Qdrant's filters.

The name of a pushed collection is an alias. New embeddings fill a second collection, and the alias
is then switched to it in one step.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from qdrant_client.models import (
    CreateAlias,
    CreateAliasOperation,
    Datatype,
    DeleteAlias,
    DeleteAliasOperation,
    Distance,
    Filter,
    PointIdsList,
    SearchParams,
    VectorParams,
)

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search.engines.engine import REPLACED, RESUME, Engine, Rows, Settings, State
from dualenc.search.engines.migration_record import FILLING, REVERSIBLE, SWITCHED
from dualenc.search.engines.pushed_folder import AGAIN
from dualenc.search.engines.qdrant_collection import KEY
from dualenc.search.engines.qdrant_connection import connect, one_line_errors
from dualenc.search.engines.qdrant_filters import as_filter, parse_filter
from dualenc.search.where import Condition

POINT_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant identifies points by numbers or UUIDs: an item's point is the UUID 5 of its id in this
namespace."""
PAYLOAD_INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "truth": "bool"}
DISTANCES = {"cosine": Distance.COSINE, "ip": Distance.DOT}


class QdrantIndex(Engine):
    """A Qdrant collection, searched by vectors.

    A folder records it, see `dualenc.search.engines.open_engine`.

        engine, sent = push_embeddings(embeddings, "http://localhost:6333", "papers")
        hits = engine.search(vectors, k=5, where=["year>=2020"])

    Args:
        provenance: see `Engine`.
        replaces: whether a push may replace other embeddings.

    Raises:
        DualencError: the name or the URL is invalid, or the URL contains a key.
    """

    setting_of_option: Mapping[str, str] = {"ef_search": "hnsw_ef"}
    batch_rows = 1024
    name_bytes = 100

    def __init__(self, provenance: Provenance, *, replaces: bool = False) -> None:
        super().__init__(provenance, replaces=replaces)
        target = provenance.target
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", self.name):
            raise DualencError(
                f"collection is {self.name[:40]!r}", fix="give a name of letters, digits, - and _"
            )
        self.client: Any = connect(target, self.location)

    def exclusive(self) -> AbstractContextManager[None]:
        # Qdrant lacks locks. Simultaneous pushes of the same embeddings write the same points, and
        # one of other embeddings fills another collection.
        return self.one_line_errors(RESUME)

    def state_of(self, name: str) -> State | None:
        with self.one_line_errors():
            if not self.client.collection_exists(name):
                return None
            metadata = self.client.get_collection(name).config.metadata or {}
        if "dualenc" not in metadata:
            raise self.not_ours()
        return {"fingerprint": str(metadata["dualenc"])}

    def create(self, embeddings: Embeddings) -> None:
        dtype = Datatype(str(embeddings.vectors.dtype))
        distance = DISTANCES[self.provenance.metric]
        vectors = VectorParams(size=self.dim, distance=distance, datatype=dtype)
        metadata = {"dualenc": self.items_checksum, "dualenc_alias": self.name}
        if self.replaces:
            self._check_no_migration()
            self._delete_abandoned()
        self.client.create_collection(self.filled, vectors, metadata=metadata)
        # Create payload indexes before adding vectors: Qdrant adds the graph links that filtered
        # searches need only for indexes that exist when the graph is built.
        for name, kind in self.column_kinds.items():
            self.client.create_payload_index(self.filled, name, PAYLOAD_INDEXES[kind])

    def _recorded_migration(self) -> dict[str, Any]:
        """Return the record of a migration that has not been finished; {} without one."""
        if not self.client.collection_exists(self.name):
            return {}
        metadata = self.client.get_collection(self.name).config.metadata or {}
        record: dict[str, Any] = metadata.get(KEY) or {}
        return record if record.get("state") in (FILLING, SWITCHED) else {}

    def _check_no_migration(self) -> None:
        """Raise while a migration needs a second collection, which a push would replace."""
        if self._recorded_migration():
            raise DualencError(
                "a migration is under way",
                fix="end it first: dualenc migrate FOLDER --finish, or --rollback --discard",
                where=self.location,
            )

    def _delete_abandoned(self) -> None:
        """Delete what pushes of other embeddings left; one that is still running notices."""
        for name in self.leftovers():
            self._delete_own(name)

    def leftovers(self) -> list[str]:
        with self.one_line_errors():
            names = [each.name for each in self.client.get_collections().collections]
            beside = [name for name in names if name.startswith(f"{self.name}-")]
            notes = self._recorded_migration().get("notes") or {}
            used = {self._collection_of_alias(), notes.get("source"), notes.get("target")}
            return [name for name in beside if name not in used and self._is_made_for_alias(name)]

    def migration(self) -> tuple[bool, str]:
        with self.one_line_errors():
            record = self._recorded_migration()
        if not record:
            return super().migration()
        if record["state"] == SWITCHED:
            return False, f"{record['new_model']} has replaced the old model; {REVERSIBLE}"
        line = f"one to {record['new_model']} is running, was killed, or was rolled back"
        return False, f"{line}; the same `dualenc migrate` resumes it"

    def _is_made_for_alias(self, name: str) -> bool:
        """Return True if a collection exists and was made for this alias."""
        # The beginning of the name is not enough: "items-2" may be another collection.
        if not self.client.collection_exists(name):
            return False
        metadata = self.client.get_collection(name).config.metadata or {}
        return bool(metadata.get("dualenc_alias") == self.name)

    def _delete_own(self, name: str) -> None:
        """Delete a collection if it was made for this alias; leave all others."""
        if self._is_made_for_alias(name):
            self.client.delete_collection(name)

    def _collection_of_alias(self) -> str | None:
        """Return the collection that the name is an alias of, or None."""
        aliases = self.client.get_aliases().aliases
        of_alias = {each.alias_name: each.collection_name for each in aliases}
        return of_alias.get(self.name)

    def stored_ids(self, ids: Sequence[str]) -> set[str]:
        name_of = {_point(name): name for name in ids}
        points = self.client.retrieve(
            self.filled, list(name_of), with_payload=False, with_vectors=False
        )
        return {name_of[str(point.id)] for point in points}

    def add(self, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
        payloads = []
        for row in batch.drop_columns(["vector"]).to_pylist():
            # Drop missing values: Qdrant distinguishes null from absent values.
            payloads.append({name: value for name, value in row.items() if value is not None})
        points = [_point(row["id"]) for row in payloads]
        # A server accepts 32 MiB per request, and a number takes up to 24 bytes of JSON, so 256
        # vectors fit up to 5,000 dimensions.
        try:
            self.client.upload_collection(
                self.filled, vectors, payloads, points, batch_size=256, max_retries=4, wait=True
            )
        except Exception:
            # If another push removed the collection, report that instead.
            self.check_state(self.state_of(self.filled), REPLACED, AGAIN)
            raise

    def count_rows(self) -> int:
        return int(self.client.count(self.filled, exact=True).count)

    def remove_others(self, ids: Sequence[str]) -> None:
        kept = set(map(_point, ids))
        others = [each.id for each in self._points(self.filled, []) if str(each.id) not in kept]
        self.client.delete(self.filled, PointIdsList(points=others), wait=True)

    def build_index(self, state: State) -> None:
        # The server builds the graph by itself; "yellow" means that it has not finished.
        while self.client.get_collection(self.filled).status == "yellow":
            time.sleep(0.2)

    def swap(self) -> None:
        """Point the alias to the filled collection, and delete the one that it pointed to."""
        old = self._collection_of_alias()
        changes: list[Any] = []
        if old is None:
            # Earlier versions gave the name to the collection itself, and an alias cannot have the
            # name of a collection.
            self.client.delete_collection(self.name)
        else:
            delete = DeleteAlias(alias_name=self.name)
            changes.append(DeleteAliasOperation(delete_alias=delete))
        create = CreateAlias(collection_name=self.filled, alias_name=self.name)
        changes.append(CreateAliasOperation(create_alias=create))
        # Both changes in one request, so that no reader finds the name without a collection.
        self.client.update_collection_aliases(changes)
        # A push that is killed here leaves the old collection, which the next replacement deletes.
        if old is not None:
            self._delete_own(old)

    def condition(self, filter: str, where: Sequence[Condition]) -> Any:
        conditions: list[Any] = [as_filter(condition, self.column_kinds) for condition in where]
        if filter:
            conditions.append(self.check_filter(filter))
        return Filter(must=conditions) if conditions else None

    def check_filter(self, filter: str) -> Filter:
        return parse_filter(filter)

    def nearest(
        self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None
    ) -> Rows:
        chosen: Any = {"exact": True} if settings is None else settings
        options = {
            "limit": k,
            "search_params": SearchParams(**chosen),
            "query_filter": condition,
            "with_payload": ["id", "text", *self.column_kinds],
        }
        for vector in vectors.tolist():
            with self.one_line_errors():
                found = self.client.query_points(self.name, vector, **options)
            rows = []
            for point in found.points:
                # Points that others added may lack a payload.
                rows.append((point.score, {"id": str(point.id), **(point.payload or {})}))
            yield rows
        # Afterwards, since Qdrant has no transactions: the alias may have been switched meanwhile.
        self.check_state(self.stored_state())

    def ladder(self) -> Iterator[Settings]:
        for hnsw_ef in (64, 128, 256, 512, 1024):
            yield {"hnsw_ef": hnsw_ef}
        yield {"exact": True}

    def texts_by_id(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for point in self._points(self.name, ["id", "text"]):
            payload = point.payload or {}
            texts[payload.get("id", str(point.id))] = payload.get("text", "")
        self.check_state(self.stored_state())
        return texts

    def _points(self, name: str, payload: list[str]) -> Iterator[Any]:
        """Yield all points of a collection, with some fields of their payload."""
        offset = None
        while True:
            with self.one_line_errors():
                points, offset = self.client.scroll(
                    name, limit=self.batch_rows, offset=offset, with_payload=payload
                )
            yield from points
            if offset is None:
                return

    def vectors_by_id(self, ids: Sequence[str]) -> Mapping[str, Any]:
        with self.one_line_errors():
            points = [_point(name) for name in ids]
            records = self.client.retrieve(self.name, points, ["id"], with_vectors=True)
        self.check_state(self.stored_state())
        return {str((each.payload or {}).get("id")): each.vector for each in records}

    def close(self) -> None:
        self.client.close()

    @contextmanager
    def one_line_errors(self, resume: str = "") -> Iterator[None]:
        """Report the client's errors, of many types, in one line, and hide its warnings.

        Args:
            resume: how to resume after an error that may pass.
        """
        with one_line_errors(self.location, resume):
            yield


def _point(id: str) -> str:
    return str(uuid.uuid5(POINT_NAMESPACE, id))
