"""Qdrant: push embeddings to a collection of a server, and search it with conditions and Qdrant's
own filters.

The name of a pushed collection is an alias. Other embeddings fill a collection beside the one that
it stands for, until the alias is given to it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import qdrant_client
from qdrant_client import models
from qdrant_client.http.exceptions import ResponseHandlingException

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.terminal import without_credentials
from dualenc.search.engines.engine import REPLACED, Engine, Rows, Settings, State
from dualenc.search.where import Condition
from dualenc.types import check_several

API_KEY = "QDRANT_API_KEY"
"""Environment variable with the key of a server."""
POINT_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant names points by numbers or UUIDs: an item's point is UUID 5 of its id in this
namespace."""
PAYLOAD_INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "truth": "bool"}
RANGES = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
MAX_EXACT = 1 << 53
"""Qdrant orders numbers as doubles, which are exact up to here."""
INTEGERS = range(-(1 << 63), 1 << 63)
FILTER_EXAMPLE = '{"must": [{"key": "year", "range": {"gte": 2020}}]}'


class QdrantIndex(Engine):
    """A Qdrant collection searched by vectors."""

    batch_rows = 1024

    def __init__(self, meta: dict[str, Any]) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", meta["collection"]):
            name = meta["collection"][:40]
            raise DualencError(
                f"collection is {name!r}", fix="give a name of letters, digits, - and _"
            )
        super().__init__(meta)
        self.collection: str = meta["collection"]
        # The client would unpickle what a folder holds, which can run code.
        if not meta["target"].startswith(("http://", "https://")):
            examples = "postgresql://user@host/database or http://localhost:6333"
            shown = without_credentials(meta["target"])
            raise DualencError(
                "is not the URL of PostgreSQL or a Qdrant server",
                fix=f"write {examples}",
                where=shown,
            )
        if "@" in meta["target"] or urlsplit(meta["target"]).query:
            raise DualencError(
                "the URL of the server carries a key or query", fix=f"set {API_KEY} instead"
            )
        # The same for all pushes of the same embeddings, so that a killed one resumes.
        self.beside = f"{self.collection}-{self.items_checksum[:12]}"
        self.filled = self.collection
        key = os.environ.get(API_KEY) or None
        with self.one_line_errors():
            self.client: Any = qdrant_client.QdrantClient(
                url=meta["target"], api_key=key, timeout=60, check_compatibility=False
            )

    def close(self) -> None:
        self.client.close()

    def stored_state(self) -> State | None:
        return self._state_of(self.collection)

    def _state_of(self, name: str) -> State | None:
        with self.one_line_errors():
            if not self.client.collection_exists(name):
                return None
            metadata = self.client.get_collection(name).config.metadata or {}
        if "dualenc" not in metadata:
            raise DualencError(
                "was not made by `dualenc push`", fix="name another --table", where=self.location
            )
        return {"fingerprint": str(metadata["dualenc"]), "for": metadata.get("dualenc_alias")}

    def nearest(
        self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None
    ) -> Rows:
        chosen: Any = {"exact": True} if settings is None else settings
        parameters = models.SearchParams(**chosen)
        options = {"limit": k, "search_params": parameters, "query_filter": condition}
        payload = ["id", "text", *self.column_kinds]
        for vector in vectors.tolist():
            with self.one_line_errors():
                points = self.client.query_points(
                    self.collection, vector, with_payload=payload, **options
                ).points
            # Points of others may have no payload.
            yield [
                (point.score, {"id": str(point.id), **(point.payload or {})}) for point in points
            ]
        self.check_current(self.stored_state())

    def setting_of_option(self) -> dict[str, str]:
        return {"ef_search": "hnsw_ef"}

    def condition(self, filter: str, where: Sequence[Condition]) -> Any:
        conditions: list[Any] = [self._as_filter(condition) for condition in where]
        if filter:
            conditions.append(self.check_filter(filter))
        return models.Filter(must=conditions) if conditions else None

    def _as_filter(self, condition: Condition) -> dict[str, Any]:
        key = condition.column
        if condition.operator in RANGES:
            value = condition.values[0]
            if isinstance(value, int) and abs(value) > MAX_EXACT:
                return _large_range(key, condition.operator, value)
            return {"key": key, "range": {RANGES[condition.operator]: value}}
        tests: list[Any] = [{"match": {"value": value}} for value in condition.values]
        if self.column_kinds[key] == "number":
            # Qdrant matches no fractions.
            tests = [{"range": {"gte": value, "lte": value}} for value in condition.values]
        equal = [{"key": key, **test} for test in tests]
        if condition.operator == "=":
            return {"should": equal}
        return {"must_not": [*equal, {"is_empty": {"key": key}}]}

    def check_filter(self, filter: str) -> Any:
        """A filter as the client's own class, which refuses what it does not define."""
        try:
            _check_ranges(json.loads(filter))
            return models.Filter.model_validate_json(filter)
        except DualencError:
            raise
        except (ValueError, RecursionError) as error:
            raise DualencError(
                f"the filter is not a Qdrant filter ({_line(error)})",
                fix=f"write for example {FILTER_EXAMPLE}",
            ) from None

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        check_several("ids", ids)
        with self.one_line_errors():
            points = [_point(name) for name in ids]
            records = self.client.retrieve(self.collection, points, ["id"], with_vectors=True)
        self.check_current(self.stored_state())
        vector_of = {str((each.payload or {}).get("id")): each.vector for each in records}
        self.check_all_stored(ids, vector_of)
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    def texts_by_id(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for points in self._scroll(self.collection, ["id", "text"]):
            for point in points:
                payload = point.payload or {}
                texts[payload.get("id", str(point.id))] = payload.get("text", "")
        self.check_current(self.stored_state())
        return texts

    def _scroll(self, name: str, payload: list[str]) -> Iterator[list[Any]]:
        """All points of a collection, in batches."""
        offset = None
        while True:
            with self.one_line_errors():
                options = {"limit": self.batch_rows, "with_payload": payload}
                points, offset = self.client.scroll(name, offset=offset, **options)
            yield points
            if offset is None:
                return

    def ladder(self) -> Iterator[Settings]:
        for hnsw_ef in (64, 128, 256, 512, 1024):
            yield {"hnsw_ef": hnsw_ef}
        yield {"exact": True}

    def exclusive(self) -> AbstractContextManager[None]:
        # Qdrant has none: pushes at the same time store the same points.
        return nullcontext()

    def fill(self, *, beside: bool) -> State | None:
        self.filled = self.beside if beside else self.collection
        return self._state_of(self.filled)

    def create(self, embeddings: Embeddings) -> None:
        distance = (
            models.Distance.COSINE if self.meta["metric"] == "cosine" else models.Distance.DOT
        )
        dtype = models.Datatype(str(embeddings.vectors.dtype))
        vectors = models.VectorParams(size=self.dim, distance=distance, datatype=dtype)
        metadata = {"dualenc": self.items_checksum, "dualenc_alias": self.collection}
        if self.replaces:
            self._delete_abandoned()
        with self.one_line_errors("the same command again resumes"):
            self.client.create_collection(self.filled, vectors, metadata=metadata)
            # Before the vectors: only a graph that is built after it has links for filtered
            # searches.
            for name, kind in self.column_kinds.items():
                self.client.create_payload_index(self.filled, name, PAYLOAD_INDEXES[kind])

    def _delete_abandoned(self) -> None:
        """Delete what pushes of other embeddings left beside the collection; a living one
        notices."""
        with self.one_line_errors():
            names = [each.name for each in self.client.get_collections().collections]
        for name in names:
            if name.startswith(f"{self.collection}-") and name != self._collection_of_alias():
                self._delete_own(name)

    def _delete_own(self, name: str) -> None:
        """Delete a collection that was made for this alias, and no other."""
        with self.one_line_errors():
            if not self.client.collection_exists(name):
                return
            metadata = self.client.get_collection(name).config.metadata or {}
            if metadata.get("dualenc_alias") == self.collection:
                self.client.delete_collection(name)

    def _collection_of_alias(self) -> str | None:
        """The collection that the name stands for; None if it is no alias."""
        with self.one_line_errors():
            aliases = self.client.get_aliases().aliases
        of_alias = {each.alias_name: each.collection_name for each in aliases}
        return of_alias.get(self.collection)

    def stored_ids(self, ids: Sequence[str]) -> set[str]:
        name_of = {_point(name): name for name in ids}
        with self.one_line_errors("the same command again resumes"):
            points = self.client.retrieve(
                self.filled, list(name_of), with_payload=False, with_vectors=False
            )
        return {name_of[str(point.id)] for point in points}

    def count_rows(self) -> int:
        with self.one_line_errors("the same command again resumes"):
            return int(self.client.count(self.filled, exact=True).count)

    def remove_others(self, ids: Sequence[str]) -> None:
        kept = set(map(_point, ids))
        others = []
        for points in self._scroll(self.filled, []):
            others += [point.id for point in points if str(point.id) not in kept]
        with self.one_line_errors("the same command again resumes"):
            self.client.delete(self.filled, models.PointIdsList(points=others), wait=True)

    def add(self, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
        payloads = []
        for row in batch.drop_columns(["vector"]).to_pylist():
            # Filters of Qdrant tell a null from an absent value.
            payloads.append({name: value for name, value in row.items() if value is not None})
        points = [_point(row["id"]) for row in payloads]
        try:
            with self.one_line_errors("the same command again resumes"):
                # A server takes 32 MiB at once, and a number is up to 24 bytes of JSON: enough for
                # 5,000 dimensions.
                options: dict[str, Any] = {"batch_size": 256, "max_retries": 4, "wait": True}
                self.client.upload_collection(self.filled, vectors, payloads, points, **options)
        except DualencError:
            self.check_state(self._state_of(self.filled), REPLACED)
            raise

    def finish(self, state: State) -> None:
        """Wait until the server has built the graph, and give the collection its name."""
        with self.one_line_errors("the same command again resumes"):
            while self.client.get_collection(self.filled).status == "yellow":
                time.sleep(0.2)
        if self.filled == self.beside:
            self._swap()

    def _swap(self) -> None:
        """Let the name stand for the filled collection, and delete the one that it stood for."""
        old = self._collection_of_alias()
        create = models.CreateAlias(collection_name=self.filled, alias_name=self.collection)
        changes: list[Any] = [models.CreateAliasOperation(create_alias=create)]
        if old is not None:
            delete = models.DeleteAlias(alias_name=self.collection)
            changes.insert(0, models.DeleteAliasOperation(delete_alias=delete))
        with self.one_line_errors("the same command again resumes"):
            if old is None:
                # Of an earlier version: an alias cannot have the name of a collection.
                self.client.delete_collection(self.collection)
            self.client.update_collection_aliases(changes)
        if old is not None:
            self._delete_own(old)
        self.filled = self.collection

    @contextmanager
    def one_line_errors(self, resume: str = "") -> Iterator[None]:
        """Turn the client's errors, of many types, into one line; its warnings are for
        developers."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except DualencError:
            raise
        except Exception as error:
            status = getattr(error, "status_code", None)
            if status in (401, 403):
                raise DualencError(
                    "Qdrant refuses the key",
                    fix=f"set {API_KEY} to one that may do it",
                    where=self.location,
                ) from error
            # Without an answer, or with one that does not blame the request, another try may do.
            passes = (
                isinstance(error, ResponseHandlingException)
                or status == 429
                or (status or 0) >= 500
            )
            remedy = resume if passes else ""
            raise DualencError(_line(error), fix=remedy, where=self.location) from error


def _large_range(key: str, operator: str, value: int) -> dict[str, Any]:
    """A filter for integers beyond 2^53: those near the value one by one, others by a double.

    It is two steps of doubles away: what is beyond it is so after rounding, too.
    """
    sign = 1 if operator in (">", ">=") else -1
    step = int(math.ulp(float(value)))
    far = int(float(value)) + sign * 2 * step
    first = value if operator in (">=", "<=") else value + sign
    near = [each for each in range(first, far, sign) if each in INTEGERS]
    tests = [{"key": key, "match": {"any": near}}]
    # A bound outside would be taken for the last integer.
    if far in INTEGERS:
        tests.append({"key": key, "range": {RANGES[">=" if sign > 0 else "<="]: float(far)}})
    return {"should": tests}


def _check_ranges(part: Any) -> None:
    """Refuse bounds of a filter that the client would round to doubles."""
    children: Iterable[Any] = part if isinstance(part, list) else ()
    if isinstance(part, dict):
        bounds = part.get("range")
        for value in bounds.values() if isinstance(bounds, dict) else ():
            if isinstance(value, int) and abs(value) > MAX_EXACT:
                raise DualencError(
                    f"the filter compares with {value}, and Qdrant rounds numbers beyond 2^53",
                    fix="write --where for that, which compares exactly",
                )
        children = part.values()
    for child in children:
        _check_ranges(child)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _point(id: str) -> str:
    return str(uuid.uuid5(POINT_NAMESPACE, id))
