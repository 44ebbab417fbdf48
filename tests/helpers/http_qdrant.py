"""Qdrant's routes over HTTP, answered by the client's local mode: what a request says is parsed by
the client's own models, which refuse unknown fields."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import TypeAdapter
from qdrant_client import models

from tests.helpers.served_qdrant import ServedClient

OPERATIONS = TypeAdapter(models.UpdateOperations)
UPSERTS = TypeAdapter(models.PointInsertOperations)
SELECTORS = TypeAdapter(models.PointsSelector)
VECTORS = TypeAdapter(models.VectorNameConfig)


def answer(client: ServedClient, method: str, path: str, body: Any) -> Any:
    """The result of a request."""
    if path == "/aliases":
        return client.get_aliases()
    if path == "/collections":
        return client.get_collections()
    if path == "/collections/aliases":
        changes = models.ChangeAliasesOperation.model_validate(body).actions
        return client.update_collection_aliases(changes)
    name, _, rest = path.removeprefix("/collections/").partition("/")
    if rest.startswith("vectors/"):
        vector = unquote(rest.removeprefix("vectors/"))
        if method == "DELETE":
            return client.delete_vector_name(name, vector)
        return client.create_vector_name(name, vector, VECTORS.validate_python(body))
    return ROUTES[method, rest](client, name, body)


def create(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.CreateCollection.model_validate(body)
    return client.create_collection(
        name, asked.vectors, sparse_vectors_config=asked.sparse_vectors, metadata=asked.metadata
    )


def change(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.UpdateCollection.model_validate(body)
    options = {"vectors_config": asked.vectors, "metadata": asked.metadata}
    return client.update_collection(name, **options)


def scroll(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.ScrollRequest.model_validate(body)
    points, offset = client.scroll(
        name,
        asked.filter,
        asked.limit,
        offset=asked.offset,
        with_payload=asked.with_payload,
        with_vectors=asked.with_vector,
    )
    return models.ScrollResult(points=points, next_page_offset=offset)


def retrieve(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.PointRequest.model_validate(body)
    return client.retrieve(name, asked.ids, asked.with_payload, asked.with_vector)


def count(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.CountRequest.model_validate(body)
    return client.count(name, asked.filter, exact=asked.exact)


def upsert(client: ServedClient, name: str, body: Any) -> Any:
    asked = UPSERTS.validate_python(body)
    return client.upsert(name, asked.points, update_filter=asked.update_filter)


def batch(client: ServedClient, name: str, body: Any) -> Any:
    return client.batch_update_points(name, OPERATIONS.validate_python(body).operations)


def delete(client: ServedClient, name: str, body: Any) -> Any:
    return client.delete(name, SELECTORS.validate_python(body))


def delete_payload(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.DeletePayload.model_validate(body)
    return client.delete_payload(name, asked.keys, asked.points or asked.filter)


def overwrite_payload(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.SetPayload.model_validate(body)
    return client.overwrite_payload(name, asked.payload, asked.points or asked.filter)


def query(client: ServedClient, name: str, body: Any) -> Any:
    asked = models.QueryRequest.model_validate(body)
    return client.query_points(name, asked.query, using=asked.using, limit=asked.limit)


ROUTES: dict[tuple[str, str], Any] = {
    ("GET", ""): lambda client, name, _: client.get_collection(name),
    ("GET", "exists"): lambda client, name, _: {"exists": client.collection_exists(name)},
    ("DELETE", ""): lambda client, name, _: client.delete_collection(name),
    ("PUT", ""): create,
    ("PATCH", ""): change,
    ("POST", "points/scroll"): scroll,
    ("POST", "points"): retrieve,
    ("POST", "points/count"): count,
    ("PUT", "points"): upsert,
    ("POST", "points/batch"): batch,
    ("POST", "points/delete"): delete,
    ("POST", "points/payload/delete"): delete_payload,
    ("PUT", "points/payload"): overwrite_payload,
    ("POST", "points/query"): query,
}


class Handler(BaseHTTPRequestHandler):
    """A request; errors are Qdrant's."""

    client: ServedClient

    def handle_request(self) -> None:
        path = urlsplit(self.path).path
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        status, found = 200, None
        try:
            found = (
                self.client.info() if path == "/" else answer(self.client, self.command, path, body)
            )
        except Exception as error:
            status = 404 if isinstance(error, KeyError) else 400
            found = {"status": {"error": str(error)}}
        else:
            if path != "/":
                found = {"result": found, "status": "ok", "time": 0.0}
        text = TypeAdapter(Any).dump_json(found, exclude_none=False)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = handle_request

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


@contextmanager
def http_server(client: ServedClient) -> Iterator[str]:
    """Serve a client; yields the URL."""
    handler = type("Served", (Handler,), {"client": client})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
