"""Qdrant: a server, given by its URL, or the client's embedded mode, given by a path."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from dualenc.errors import DualencError
from dualenc.files import check_folder_target, explain_full_disk
from dualenc.search.engines.contract import About, Engine, Hit, import_extra, in_order, persist
from dualenc.search.engines.where import Condition
from dualenc.terminal import printable

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "QDRANT_API_KEY"
"""Environment variable with the key of a server."""
IDS = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant names points by numbers or UUIDs: that of an item is UUID 5 of its id in this namespace."""
REQUEST_BYTES = 8 << 20
"""A server takes requests of 32 MiB; a number is up to 24 bytes of JSON."""
TIMEOUT_S = 60
LONGEST_BUILD_S = 600
QUERIES_PER_REQUEST = 64
OVERSAMPLING = {"scalar": 2.0, "binary": 4.0}
"""How many times k candidates of the compressed vectors are scored again with the vectors themselves."""
LOCAL_POINTS = 20_000
"""The embedded mode compares a query with every vector, in Python: beyond that many its authors advise a server."""


class Qdrant(Engine):
    """A collection in Qdrant.

    Args:
        target: http:// or https:// URL, or the path of a folder for the embedded mode, for one process at a time. The
            client unpickles every point of such a folder, which can run code: take the path from the user alone.
        collection: its name.

    Raises:
        DualencError: the client is not installed, the folder holds something else or is in use, or the URL carries
            a key, which belongs into the environment variable QDRANT_API_KEY.
    """

    kind = "qdrant"

    def __init__(self, target: str, collection: str) -> None:
        super().__init__(target, collection)
        self.is_remote = is_server(target)
        qdrant = import_extra("qdrant_client", "qdrant-client", "qdrant")
        self.models = qdrant.models
        with self._told(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.is_remote:
                where: dict[str, Any] = {"url": target, "api_key": _key_for(target)}
                where |= {"timeout": TIMEOUT_S, "check_compatibility": False}
            else:
                where = {"path": str(_checked_folder(target))}
            self.client = qdrant.QdrantClient(**where)
        # At the latest before Python ends: the client's own destructor fails by then, with a traceback.
        self._closing = weakref.finalize(self, self.client.close)

    def about(self) -> About | None:
        with self._told():
            if not self.client.collection_exists(self.collection):
                return None
            written = self.client.get_collection(self.collection).config.metadata or {}
        return About.from_dict(written.get("dualenc"), self.place)

    def create(self, about: About) -> None:
        m = self.models
        vectors = m.VectorParams(
            size=about.dim,
            distance=m.Distance.COSINE if about.metric == "cosine" else m.Distance.DOT,
            datatype=m.Datatype.FLOAT16 if about.dtype == "float16" else m.Datatype.FLOAT32,
            on_disk=about.quantization != "none",
        )
        quantized: Any = None
        if about.quantization == "scalar":
            int8 = m.ScalarQuantizationConfig(type=m.ScalarType.INT8, quantile=0.99, always_ram=True)
            quantized = m.ScalarQuantization(scalar=int8)
        elif about.quantization == "binary":
            quantized = m.BinaryQuantization(binary=m.BinaryQuantizationConfig(always_ram=True))
        with self._told():
            self.client.create_collection(
                self.collection,
                vectors_config=vectors,
                quantization_config=quantized,
                metadata={"dualenc": about.as_dict()},
            )
            # Before the vectors arrive: the graph then gets links for filtered searches, too.
            kinds = {"text": "keyword", "integer": "integer", "number": "float", "truth": "bool"}
            for name, kind in about.columns.items() if self.is_remote else ():
                self.client.create_payload_index(self.collection, name, field_schema=kinds[kind])
            if not self.client.get_collection(self.collection).config.metadata:
                self.client.delete_collection(self.collection)
                raise DualencError(f"{self.target}: keeps no metadata of collections; update Qdrant to 1.16 or later")

    def drop(self) -> None:
        with self._told():
            self.client.delete_collection(self.collection)

    def batch_rows(self, about: About) -> int:
        return max(1, min(1000, REQUEST_BYTES // (24 * about.dim)))

    def present(self, ids: Sequence[str]) -> np.ndarray:
        names = [_point(name) for name in ids]
        with self._told():
            found = self.client.retrieve(self.collection, names, with_payload=False, with_vectors=False)
        there = {str(record.id) for record in found}
        return np.array([name in there for name in names], dtype=bool)

    def add(self, ids: Sequence[str], vectors: np.ndarray, snippets: Sequence[str] | None, columns: pa.Table) -> None:
        payloads: list[dict[str, Any]] = [{"id": name} for name in ids]
        for payload, snippet in zip(payloads, snippets or ()):
            payload["snippet"] = snippet
        for payload, row in zip(payloads, columns.to_pylist() if columns.num_columns else ()):
            payload |= {name: value for name, value in row.items() if value is not None}
        points = self.models.Batch(ids=[_point(name) for name in ids], vectors=vectors.tolist(), payloads=payloads)
        with self._told():
            persist(lambda: self.client.upsert(self.collection, points, wait=True), self._may_pass)

    def finish(self, about: About) -> None:
        """Wait until the server has built its graph; the embedded mode has none."""
        deadline = time.monotonic() + LONGEST_BUILD_S
        while self.is_remote:
            with self._told():
                status = self.client.get_collection(self.collection).status
            if status == self.models.CollectionStatus.GREEN:
                return
            if time.monotonic() > deadline:
                raise DualencError(f"{self.place}: still builds its index ({status}); run the same command again later")
            time.sleep(1)

    def count(self, where: Sequence[Condition] = ()) -> int:
        with self._told():
            return int(self.client.count(self.collection, self._filter(where), exact=True).count)

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        names = {_point(name): name for name in ids}
        with self._told():
            records = self.client.retrieve(self.collection, list(names), with_payload=False, with_vectors=True)
        return in_order(ids, {names[str(record.id)]: record.vector for record in records})

    def query(
        self,
        vectors: np.ndarray,
        k: int,
        where: Sequence[Condition] = (),
        *,
        payload: bool = True,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> list[list[Hit]]:
        if nprobe is not None:
            raise DualencError(f"--nprobe is {nprobe}, but Qdrant searches a graph; give --ef-search")
        m = self.models
        params: Any = None
        if self.is_remote:  # the embedded mode is exact, and warns of any
            again: Any = None
            if (factor := OVERSAMPLING.get(self.known.quantization)) is not None:
                again = m.QuantizationSearchParams(rescore=True, oversampling=factor)
            params = m.SearchParams(hnsw_ef=ef_search, quantization=again)
        how = {"filter": self._filter(where), "limit": k, "with_payload": True if payload else ["id"], "params": params}
        results: list[list[Hit]] = []
        for start in range(0, len(vectors), QUERIES_PER_REQUEST):
            block = vectors[start : start + QUERIES_PER_REQUEST]
            with self._told():
                requests = [m.QueryRequest(query=vector.tolist(), **how) for vector in block]
                answers = self.client.query_batch_points(self.collection, requests)
            results += [[_hit(point.score, point.payload) for point in answer.points] for answer in answers]
        return results

    def close(self) -> None:
        self._closing()

    def _filter(self, where: Sequence[Condition]) -> Any:
        m = self.models
        must: list[Any] = []
        must_not: list[Any] = []
        for name, sign, values in where:
            if sign in ("=", "!="):
                any_of = [self._equals(name, value) for value in values]
                (must if sign == "=" else must_not).append(m.Filter(should=any_of))
                if sign == "!=":  # an item without a value meets no condition
                    must_not.append(m.IsEmptyCondition(is_empty=m.PayloadField(key=name)))
            else:
                bound = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}[sign]
                must.append(m.FieldCondition(key=name, range=m.Range(**{bound: values[0]})))
        return m.Filter(must=must, must_not=must_not) if where else None

    def _equals(self, name: str, value: Any) -> Any:
        m = self.models
        if isinstance(value, float):  # which Qdrant does not match
            return m.FieldCondition(key=name, range=m.Range(gte=value, lte=value))
        return m.FieldCondition(key=name, match=m.MatchValue(value=value))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the client as one line, without what was sent; its warnings are for programmers."""
        exceptions = import_extra("qdrant_client.http.exceptions", "qdrant-client", "qdrant")
        try:
            with warnings.catch_warnings(), nullcontext() if "://" in self.target else explain_full_disk(self.target):
                warnings.simplefilter("ignore")
                yield
        except exceptions.ResponseHandlingException as error:
            why = " ".join(str(error).split())[:200] or type(error.source).__name__
            raise DualencError(
                f"{self.target}: no answer from Qdrant ({why}); see that it runs there, then run the same command again"
            ) from None
        except exceptions.UnexpectedResponse as error:
            if error.status_code in (401, 403):
                raise DualencError(
                    f"{self.target}: Qdrant refuses this (HTTP {error.status_code}); set {KEY} to a key that may do it"
                ) from None
            raise DualencError(
                f"{self.place}: Qdrant answers HTTP {error.status_code} ({_reason(error.content)})"
            ) from None
        except DualencError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            why = " ".join(str(error).split())[:200]
            if "already accessed" in why:
                raise DualencError(f"{self.target}: another process uses this folder; wait, or run a server") from None
            raise DualencError(f"{self.place}: {why}") from None

    def _may_pass(self, error: Exception) -> bool:
        exceptions = import_extra("qdrant_client.http.exceptions", "qdrant-client", "qdrant")
        busy = import_extra("qdrant_client.common.client_exceptions", "qdrant-client", "qdrant")
        if isinstance(error, exceptions.UnexpectedResponse):
            return error.status_code in (408, 429, 500, 502, 503, 504)
        return isinstance(error, (exceptions.ResponseHandlingException, busy.ResourceExhaustedResponse))


def is_server(target: str) -> bool:
    """Whether a target is the URL of a server, and not a folder for the embedded mode."""
    return target.startswith(("http://", "https://"))


def _point(name: str) -> str:
    return str(uuid.uuid5(IDS, name))


def _hit(score: float, payload: dict[str, Any] | None) -> Hit:
    kept = dict(payload or {})
    return Hit(str(kept.pop("id", "")), float(score), str(kept.pop("snippet", "")), kept)


def _reason(content: bytes) -> str:
    """What a server says is wrong."""
    try:
        status = json.loads(content)["status"]
        why = str(status["error"] if isinstance(status, dict) else status)
    except (ValueError, KeyError, TypeError):
        why = content.decode(errors="replace")
    return " ".join(why.split())[:200]


def _key_for(url: str) -> str | None:
    """The key from the environment; a URL with a key or password in it is refused, since it would be written down."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise DualencError(f"{url!r} is no URL ({error}); give one such as http://localhost:6333") from None
    if parts.username or parts.password or parts.query:
        raise DualencError(f"the URL of {parts.hostname}:{port or 6333} carries a key or query; set {KEY} instead")
    key = os.environ.get(KEY) or None
    if key and parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        print(printable(f"note: {KEY} goes to {parts.hostname} unencrypted; https:// would hide it"), file=sys.stderr)
    return key


def _checked_folder(target: str) -> Path:
    """The folder of the embedded mode: new, empty, or one that it has written."""
    folder = Path(target)

    def is_qdrant(folder: Path) -> bool:
        return (folder / "meta.json").is_file() and (folder / ".lock").exists()

    check_folder_target(folder, is_qdrant, "Qdrant collections")
    if is_qdrant(folder):
        told = "Qdrant's embedded mode unpickles what it holds, which can run code; open only what you trust"
        print(printable(f"note: {folder}: {told}"), file=sys.stderr)
    return folder
