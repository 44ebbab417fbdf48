"""Qdrant: push embeddings to a collection of a server, and search it with conditions and Qdrant's own filters."""

from __future__ import annotations

import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import qdrant_client
from qdrant_client import models

from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search.pushed import Engine, Rows, Settings
from dualenc.search.where import Condition

API_KEY = "QDRANT_API_KEY"
"""Environment variable with the key of a server."""
POINT_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant names points by numbers or UUIDs: an item's point is UUID 5 of its id in this namespace."""
PAYLOAD_INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "truth": "bool"}
RANGES = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
FILTER_EXAMPLE = '{"must": [{"key": "year", "range": {"gte": 2020}}]}'


class QdrantIndex(Engine):
    """A Qdrant collection searched by vectors."""

    batch_rows = 1024

    def __init__(self, meta: dict[str, Any]) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", meta["collection"]):
            name = meta["collection"][:40]
            raise DualencError(f"collection is {name!r}; give a name of letters, digits, - and _")
        super().__init__(meta)
        self.collection: str = meta["collection"]
        # The client would unpickle what a folder holds, which can run code.
        if not meta["target"].startswith(("http://", "https://")):
            raise DualencError(f"{meta['target']}: no URL of a Qdrant server, such as http://localhost:6333")
        parts = urlsplit(meta["target"])
        if parts.username or parts.password or parts.query:
            problem = f"the URL of {parts.hostname} carries a key or query"
            raise DualencError(f"{problem}; set {API_KEY} instead")
        key = os.environ.get(API_KEY) or None
        with self.one_line_errors():
            self.client: Any = qdrant_client.QdrantClient(
                url=meta["target"], api_key=key, timeout=60, check_compatibility=False
            )

    def close(self) -> None:
        self.client.close()

    def stored_state(self) -> dict[str, Any] | None:
        with self.one_line_errors():
            if not self.client.collection_exists(self.collection):
                return None
            metadata = self.client.get_collection(self.collection).config.metadata or {}
            rows = self.client.count(self.collection, exact=True).count
        if "dualenc" not in metadata:
            problem = "holds no embeddings that dualenc pushed; name another --table"
            raise DualencError(f"{self.location}: {problem}")
        return {"fingerprint": str(metadata["dualenc"]), "rows": rows}

    def nearest(self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None) -> Rows:
        chosen: Any = {"exact": True} if settings is None else settings
        parameters = models.SearchParams(**chosen)
        options = {"limit": k, "search_params": parameters, "query_filter": condition}
        payload = ["id", "text", *self.column_kinds]
        for vector in vectors.tolist():
            with self.one_line_errors():
                points = self.client.query_points(self.collection, vector, with_payload=payload, **options).points
            yield [(point.score, dict(point.payload)) for point in points]

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
            return {"key": key, "range": {RANGES[condition.operator]: condition.values[0]}}
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
            return models.Filter.model_validate_json(filter)
        except ValueError as error:
            problem = f"the filter is no Qdrant filter ({_line(error)}), such as {FILTER_EXAMPLE}"
            raise DualencError(problem) from None

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        with self.one_line_errors():
            points = [_point(name) for name in ids]
            records = self.client.retrieve(self.collection, points, ["id"], with_vectors=True)
        vector_of = {record.payload["id"]: record.vector for record in records}
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    def texts_by_id(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        options = {"limit": self.batch_rows, "with_payload": ["id", "text"]}
        offset = None
        while True:
            with self.one_line_errors():
                points, offset = self.client.scroll(self.collection, offset=offset, **options)
            texts |= {point.payload["id"]: point.payload.get("text", "") for point in points}
            if offset is None:
                return texts

    def ladder(self) -> Iterator[Settings]:
        for hnsw_ef in (64, 128, 256, 512, 1024):
            yield {"hnsw_ef": hnsw_ef}
        yield {"exact": True}

    def transaction(self) -> AbstractContextManager[dict[str, Any] | None]:
        # Qdrant has none: pushes at the same time store the same points, in the same order.
        return nullcontext(self.stored_state())

    def create(self, embeddings: Embeddings) -> None:
        distance = models.Distance.COSINE if self.meta["metric"] == "cosine" else models.Distance.DOT
        dtype = models.Datatype(str(embeddings.vectors.dtype))
        vectors = models.VectorParams(size=self.dim, distance=distance, datatype=dtype)
        metadata = {"dualenc": self.items_checksum}
        with self.one_line_errors():
            self.client.delete_collection(self.collection)
            self.client.create_collection(self.collection, vectors, metadata=metadata)
            # Before the vectors: only a graph that is built after it has links for filtered searches.
            for name, kind in self.column_kinds.items():
                self.client.create_payload_index(self.collection, name, PAYLOAD_INDEXES[kind])

    def add(self, batch: pa.RecordBatch, vectors: np.ndarray, stop: int) -> None:
        payloads = []
        for row in batch.drop_columns(["vector"]).to_pylist():
            # Filters of Qdrant tell a null from an absent value.
            payloads.append({name: value for name, value in row.items() if value is not None})
        points = [_point(row["id"]) for row in payloads]
        with self.one_line_errors():
            # A server takes 32 MiB at once, and a number is up to 24 bytes of JSON: enough for 5,000 dimensions.
            options: dict[str, Any] = {"batch_size": 256, "max_retries": 4, "wait": True}
            self.client.upload_collection(self.collection, vectors, payloads, points, **options)

    def finish(self, state: dict[str, Any]) -> None:
        """Wait until the server has built the graph."""
        with self.one_line_errors():
            while self.client.get_collection(self.collection).status == "yellow":
                time.sleep(0.2)

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn the client's errors, of many types, into one line; its warnings are for developers."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            reason = _line(error)
            if getattr(error, "status_code", None) in (401, 403):
                reason = f"Qdrant refuses the key; set {API_KEY} to one that may do it"
            raise DualencError(f"{self.location}: {reason}; the same command again resumes") from error


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _point(id: str) -> str:
    return str(uuid.uuid5(POINT_NAMESPACE, id))
