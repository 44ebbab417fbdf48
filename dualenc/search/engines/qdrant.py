"""Qdrant: push embeddings to a collection, and search it with conditions or Qdrant's filters.

The name of a pushed collection is an alias. New embeddings fill a second collection, and the alias
is then switched to it in one step.
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
from dualenc.search.engines.engine import REPLACED, RESUME, Engine, Rows, Settings, State
from dualenc.search.where import Condition
from dualenc.types import check_several

API_KEY = "QDRANT_API_KEY"
"""Environment variable with the API key of a server."""
POINT_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant identifies points by numbers or UUIDs: an item's point is the UUID 5 of its id in this
namespace."""
PAYLOAD_INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "truth": "bool"}
RANGES = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
MAX_EXACT = 1 << 53
"""Qdrant compares numbers as doubles, which represent all integers up to here."""
INTEGERS = range(-(1 << 63), 1 << 63)
FILTER_EXAMPLE = '{"must": [{"key": "year", "range": {"gte": 2020}}]}'


class QdrantIndex(Engine):
    """A Qdrant collection, searched by vectors.

    A folder records it, see `dualenc.search.engines.open_engine`.

        engine, sent = push_embeddings(embeddings, "http://localhost:6333", "papers")
        hits = engine.search(vectors, k=5, where=["year>=2020"])

    Args:
        meta: entries of meta.json, see `Engine`.

    Raises:
        DualencError: the name or the URL is invalid, or the URL contains a key.
    """

    batch_rows = 1024

    def __init__(self, meta: dict[str, Any]) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", meta["collection"]):
            name = meta["collection"][:40]
            raise DualencError(
                f"collection is {name!r}", fix="give a name of letters, digits, - and _"
            )
        super().__init__(meta)
        self.collection: str = meta["collection"]
        # The client would unpickle the contents of a local folder, which can run code.
        if not meta["target"].startswith(("http://", "https://")):
            raise DualencError(
                "is not the URL of PostgreSQL or a Qdrant server",
                fix="write postgresql://user@host/database or http://localhost:6333",
                where=without_credentials(meta["target"]),
            )
        if "@" in meta["target"] or urlsplit(meta["target"]).query:
            raise DualencError(
                "the URL of the server contains a key or query", fix=f"set {API_KEY} instead"
            )
        # Derived from the embeddings, so that a repeated push resumes a killed one.
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
            # Points that others added may lack a payload.
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
            # Qdrant's match only takes integers, texts and booleans, so use a range of one number.
            tests = [{"range": {"gte": value, "lte": value}} for value in condition.values]
        equal = [{"key": key, **test} for test in tests]
        if condition.operator == "=":
            return {"should": equal}
        # `must_not` alone would also return points without a value.
        return {"must_not": [*equal, {"is_empty": {"key": key}}]}

    def check_filter(self, filter: str) -> Any:
        """Parse a filter with the client's own class, which rejects unknown fields."""
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
        """Yield all points of a collection in batches, with some fields of their payload."""
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
        # Qdrant lacks locks. Simultaneous pushes of the same embeddings write the same points.
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
        with self.one_line_errors(RESUME):
            self.client.create_collection(self.filled, vectors, metadata=metadata)
            # Create payload indexes before adding vectors: Qdrant adds the graph links that
            # filtered searches need only for indexes that exist when the graph is built.
            for name, kind in self.column_kinds.items():
                self.client.create_payload_index(self.filled, name, PAYLOAD_INDEXES[kind])

    def _delete_abandoned(self) -> None:
        """Delete what pushes of other embeddings left; one that is still running notices."""
        with self.one_line_errors():
            names = [each.name for each in self.client.get_collections().collections]
        for name in names:
            if name.startswith(f"{self.collection}-") and name != self._collection_of_alias():
                self._delete_own(name)

    def _delete_own(self, name: str) -> None:
        """Delete a collection if it was made for this alias; leave all others."""
        with self.one_line_errors():
            if not self.client.collection_exists(name):
                return
            metadata = self.client.get_collection(name).config.metadata or {}
            if metadata.get("dualenc_alias") == self.collection:
                self.client.delete_collection(name)

    def _collection_of_alias(self) -> str | None:
        """Return the collection that the name is an alias of, or None."""
        with self.one_line_errors():
            aliases = self.client.get_aliases().aliases
        of_alias = {each.alias_name: each.collection_name for each in aliases}
        return of_alias.get(self.collection)

    def stored_ids(self, ids: Sequence[str]) -> set[str]:
        name_of = {_point(name): name for name in ids}
        with self.one_line_errors(RESUME):
            points = self.client.retrieve(
                self.filled, list(name_of), with_payload=False, with_vectors=False
            )
        return {name_of[str(point.id)] for point in points}

    def count_rows(self) -> int:
        with self.one_line_errors(RESUME):
            return int(self.client.count(self.filled, exact=True).count)

    def remove_others(self, ids: Sequence[str]) -> None:
        kept = set(map(_point, ids))
        others = []
        for points in self._scroll(self.filled, []):
            others += [point.id for point in points if str(point.id) not in kept]
        with self.one_line_errors(RESUME):
            self.client.delete(self.filled, models.PointIdsList(points=others), wait=True)

    def add(self, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
        payloads = []
        for row in batch.drop_columns(["vector"]).to_pylist():
            # Drop missing values: Qdrant distinguishes null from absent values.
            payloads.append({name: value for name, value in row.items() if value is not None})
        points = [_point(row["id"]) for row in payloads]
        try:
            with self.one_line_errors(RESUME):
                # A server accepts 32 MiB per request, and a number takes up to 24 bytes of JSON:
                # 256 vectors fit up to 5,000 dimensions.
                options: dict[str, Any] = {"batch_size": 256, "max_retries": 4, "wait": True}
                self.client.upload_collection(self.filled, vectors, payloads, points, **options)
        except DualencError:
            # If another push removed the collection, report that instead.
            self.check_state(self._state_of(self.filled), REPLACED)
            raise

    def finish(self, state: State) -> None:
        """Wait until the server has built the graph, then switch the alias."""
        with self.one_line_errors(RESUME):
            while self.client.get_collection(self.filled).status == "yellow":
                time.sleep(0.2)
        if self.filled == self.beside:
            self._swap()

    def _swap(self) -> None:
        """Point the alias to the filled collection, and delete the one that it pointed to."""
        old = self._collection_of_alias()
        create = models.CreateAlias(collection_name=self.filled, alias_name=self.collection)
        changes: list[Any] = [models.CreateAliasOperation(create_alias=create)]
        if old is not None:
            delete = models.DeleteAlias(alias_name=self.collection)
            changes.insert(0, models.DeleteAliasOperation(delete_alias=delete))
        with self.one_line_errors(RESUME):
            if old is None:
                # Earlier versions gave the name to the collection itself, and an alias cannot have
                # the name of a collection.
                self.client.delete_collection(self.collection)
            self.client.update_collection_aliases(changes)
        if old is not None:
            self._delete_own(old)
        self.filled = self.collection

    @contextmanager
    def one_line_errors(self, resume: str = "") -> Iterator[None]:
        """Report the client's errors, of many types, in one line, and hide its warnings.

        Args:
            resume: how to resume after an error that may pass.
        """
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
            # Retrying may help without a response, or with one that does not blame the request.
            is_lost = isinstance(error, ResponseHandlingException)
            is_temporary = is_lost or status == 429 or (status or 0) >= 500
            remedy = resume if is_temporary else ""
            raise DualencError(_line(error), fix=remedy, where=self.location) from error


def _large_range(key: str, operator: str, value: int) -> dict[str, Any]:
    """Return a filter that orders integers beyond 2^53 exactly, although Qdrant rounds them.

    Integers near the value are matched one by one. All others are compared with a double that is
    two rounding steps away, so that rounding cannot move them across it.
    """
    sign = 1 if operator in (">", ">=") else -1
    # ulp: distance between neighboring doubles at this magnitude.
    step = int(math.ulp(float(value)))
    far = int(float(value)) + sign * 2 * step
    first = value if operator in (">=", "<=") else value + sign
    near = [each for each in range(first, far, sign) if each in INTEGERS]
    tests = [{"key": key, "match": {"any": near}}]
    # Qdrant would clip a bound outside of int64 to the last integer, which may match.
    if far in INTEGERS:
        tests.append({"key": key, "range": {RANGES[">=" if sign > 0 else "<="]: float(far)}})
    return {"should": tests}


def _check_ranges(part: Any) -> None:
    """Raise for bounds in a filter that the client would round to doubles."""
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
