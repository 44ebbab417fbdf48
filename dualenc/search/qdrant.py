"""Qdrant: push embeddings to a collection of a server, and search it with Qdrant's own filters."""

from __future__ import annotations

import os
import re
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from dualenc.data.items import check_ids
from dualenc.data.metadata import check_column_names
from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError, UnknownId, Unsupported
from dualenc.search.build import Database, as_queries
from dualenc.search.index import Hit, as_hit
from dualenc.search.pushed import AGAIN, Engine, default_metric, describe, read_pushed
from dualenc.search.where import Condition
from dualenc.types import Metric

BATCH_ROWS = 1024
"""Vectors sent at once; a broken push resumes at a batch."""
API_KEY = "QDRANT_API_KEY"
"""Environment variable with the key of a server."""
POINT_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant names points by numbers or UUIDs: an item's point is UUID 5 of its id in this namespace."""
PAYLOAD_INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "truth": "bool"}
FILTER_EXAMPLE = '{"must": [{"key": "year", "range": {"gte": 2020}}]}'


class QdrantIndex(Engine):
    """A Qdrant collection searched by vectors: `push_embeddings` returns it, `QdrantIndex.open` finds it again."""

    filter_language = "JSON"
    takes_conditions = False

    def __init__(self, meta: dict[str, Any]) -> None:
        try:
            import qdrant_client  # optional, and slow to import
        except ImportError as error:
            raise DualencError(
                f"Qdrant needs qdrant-client ({error}); pip install 'dualenc[qdrant]'"
            ) from None
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", meta["collection"]):
            raise DualencError(
                f"collection is {meta['collection'][:40]!r}; give a name of letters, digits, - and _"
            )
        super().__init__(meta)
        self.collection: str = meta["collection"]
        self.location = f"{meta['target']} collection {self.collection!r}"
        self.models = qdrant_client.models
        arguments = _client_arguments(meta["target"])
        with self.one_line_errors():
            self.client: Any = qdrant_client.QdrantClient(
                **arguments, timeout=60, check_compatibility=False
            )

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> QdrantIndex:
        """Open the collection that a folder remembers; the key comes from QDRANT_API_KEY."""
        meta = read_pushed(folder)
        index = cls(meta)
        if index.stored_fingerprint() != meta["fingerprint"]:
            raise DualencError(
                f"{index.location}: is gone, or holds other embeddings than {folder} says; {AGAIN}"
            )
        return index

    def close(self) -> None:
        self.client.close()

    def stored_fingerprint(self) -> str | None:
        """The fingerprint in the collection's metadata; None without a collection."""
        with self.one_line_errors():
            if not self.client.collection_exists(self.collection):
                return None
            metadata = self.client.get_collection(self.collection).config.metadata or {}
        if "dualenc" not in metadata:
            raise DualencError(
                f"{self.location}: holds no embeddings that dualenc pushed; name another collection"
            )
        return str(metadata["dualenc"])

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
        if where:
            raise Unsupported("Qdrant filters by its own JSON; give a filter in place of conditions")
        if nprobe is not None:
            raise DualencError(f"nprobe is {nprobe}, but Qdrant searches a graph; give ef_search")
        options: dict[str, Any] = {"limit": k, "with_payload": ["id", "text", *self.column_kinds]}
        if ef_search is not None:
            options["search_params"] = self.models.SearchParams(hnsw_ef=ef_search)
        if filter:
            options["query_filter"] = self.check_filter(filter)
        results = []
        for vector in as_queries(queries, self.dim, self.meta["metric"], k):
            with self.one_line_errors():
                points = self.client.query_points(self.collection, vector.tolist(), **options).points
            hits = []
            for point in points:
                columns = dict(point.payload)
                hits.append(as_hit(columns.pop("id"), point.score, columns.pop("text", None), columns))
            results.append(hits)
        return results

    def check_filter(self, filter: str) -> Any:
        """A filter as the client's own class, which refuses what it does not define."""
        try:
            return self.models.Filter.model_validate_json(filter)
        except ValueError as error:
            raise DualencError(
                f"the filter is no Qdrant filter ({_line(error)}), such as {FILTER_EXAMPLE}"
            ) from None

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        with self.one_line_errors():
            points = [_point(name) for name in ids]
            records = self.client.retrieve(self.collection, points, ["id"], with_vectors=True)
        vector_of = {record.payload["id"]: record.vector for record in records}
        missing = [name for name in ids if name not in vector_of]
        if missing:
            raise UnknownId(
                f"the collection has no item {missing[0][:200]!r}; give an id that it has returned"
            )
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    def texts_by_id(self) -> dict[str, str]:
        payloads: list[dict[str, Any]] = []
        offset = None
        while not payloads or offset is not None:
            with self.one_line_errors():
                points, offset = self.client.scroll(
                    self.collection, limit=BATCH_ROWS, offset=offset, with_payload=["id", "text"]
                )
            payloads += [point.payload for point in points]
        # Qdrant orders by its own names of the points.
        payloads.sort(key=lambda payload: str(payload["id"]))
        return {payload["id"]: payload.get("text", "") for payload in payloads}

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


def push_embeddings(
    embeddings: Embeddings,
    target: str,
    collection: str,
    *,
    metric: Metric | None = None,
    replace: bool = False,
    progress: bool = False,
) -> tuple[QdrantIndex, int]:
    """Send the items that a collection does not hold yet; returns the index, and the number of vectors sent.

    Batches arrive in order: an interrupted push resumes behind the stored vectors, from any machine.

    Args:
        embeddings: N vectors.
        target: URL of a server, whose key is in the environment variable QDRANT_API_KEY.
        metric: by default cosine for embeddings that are normalized, and ip for others.
        replace: first remove a collection that holds other embeddings.
    """
    check_ids(embeddings.ids)
    if embeddings.columns is not None:
        check_column_names(embeddings.columns.column_names)
    database = Database(embeddings, metric or default_metric(embeddings))
    meta = describe(embeddings, target, collection, database.metric)
    index = QdrantIndex(meta)
    existing = index.stored_fingerprint()
    if existing is not None and existing != meta["fingerprint"] and not replace:
        remedy = "push with --replace to remove them first, or name another --collection"
        raise DualencError(f"{index.location}: holds other embeddings, or with another metric; {remedy}")
    if existing != meta["fingerprint"]:
        _create(index, str(embeddings.vectors.dtype))
    with index.one_line_errors():
        stored = index.client.count(collection, exact=True).count
    sent = 0
    start = 0
    with tqdm(total=len(embeddings), desc="push", unit=" vectors", disable=not progress) as bar:
        for batch in embeddings.record_batches(BATCH_ROWS):
            rows = np.arange(start, start + len(batch))
            start += len(batch)
            # Batches arrive in order: the stored rows are the first ones.
            if start > stored:
                _add(index, batch, database.rows(rows))
                sent += len(batch)
            bar.update(len(batch))
    return index, sent


def _create(index: QdrantIndex, dtype: str) -> None:
    distance = "Cosine" if index.meta["metric"] == "cosine" else "Dot"
    vectors = index.models.VectorParams(size=index.dim, distance=distance, datatype=dtype)
    metadata = {"dualenc": index.meta["fingerprint"]}
    with index.one_line_errors():
        index.client.delete_collection(index.collection)
        index.client.create_collection(index.collection, vectors, metadata=metadata)
        # Before the vectors arrive: the graph then gets links for filtered searches, too.
        for name, kind in index.column_kinds.items():
            index.client.create_payload_index(index.collection, name, PAYLOAD_INDEXES[kind])


def _add(index: QdrantIndex, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
    """Store a batch; returns once it is durable. Storing an item again changes nothing."""
    payloads = []
    for row in batch.drop_columns(["vector"]).to_pylist():
        # Filters of Qdrant tell a null from an absent value.
        payloads.append({name: value for name, value in row.items() if value is not None})
    points = [_point(row["id"]) for row in payloads]
    with index.one_line_errors():
        # A server takes 32 MiB at once, and a number is up to 24 bytes of JSON: enough for 5,000 dimensions.
        options: dict[str, Any] = {"batch_size": 256, "max_retries": 4, "wait": True}
        index.client.upload_collection(index.collection, vectors, payloads, points, **options)


def _client_arguments(target: str) -> dict[str, Any]:
    # The client would unpickle what a folder holds, which can run code.
    if not target.startswith(("http://", "https://")):
        raise DualencError(f"{target}: no URL of a Qdrant server, such as http://localhost:6333")
    parts = urlsplit(target)
    if parts.username or parts.password or parts.query:
        raise DualencError(f"the URL of {parts.hostname} carries a key or query; set {API_KEY} instead")
    return {"url": target, "api_key": os.environ.get(API_KEY) or None}


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _point(id: str) -> str:
    return str(uuid.uuid5(POINT_NAMESPACE, id))
