"""Malformed and oversized requests: whatever is sent, the answer is not 5xx, and the service goes on."""

from __future__ import annotations

import io
import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dualenc.search.searcher import Searcher
from dualenc.serve.app import create_app
from dualenc.serve.metrics import Metrics
from dualenc.serve.service import Service
from tests.serve.conftest import URL, Serve

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["text", "hybrid", "weight", "ids", "k", "where", "image", "input", "encoding_format", "dimensions", "model"]
)
LIKELY = st.dictionaries(NAMES, JSON | st.sampled_from(["fox", ["d1"], ["d1", ""], 5, 0, -1, 10**30, "5", [], ["a=b"]]))
many = settings(max_examples=150, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def client(image_index: Path) -> Iterator[TestClient]:
    service = Service(lambda before: Searcher.open(image_index, before=before), metrics=Metrics())
    with TestClient(create_app(service, watch=False, max_body=1 << 20), base_url=URL) as made:
        yield made


def check(response: Any) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, (response.status_code, response.text)
    if response.status_code != 200:
        told = response.json()["error"]
        assert told["message"]
        assert told["code"] == response.status_code


@many
@given(path=st.sampled_from(["/search", "/v1/embeddings"]), value=JSON | LIKELY)
def test_any_json(client: TestClient, path: str, value: Any) -> None:
    # With NaN, infinities and halves of characters, as Python's and other writers let pass.
    body = json.dumps(value).encode()
    check(client.post(path, content=body, headers={"content-type": "application/json"}))


@many
@given(
    path=st.sampled_from(["/search", "/v1/embeddings", "/reload", "/"]),
    body=st.binary(max_size=200),
    kind=st.sampled_from(
        ["application/json", "multipart/form-data", "multipart/form-data; boundary=x", "text/plain", "x\xff"]
    ),
)
def test_any_bytes(client: TestClient, path: str, body: bytes, kind: str) -> None:
    check(client.post(path, content=body, headers={"content-type": kind.encode("latin-1")}))


@many
@given(
    fields=st.lists(st.tuples(NAMES, st.binary(max_size=20), st.booleans()), max_size=6),
    tail=st.sampled_from([b"--x--\r\n", b"--x", b"", b"\r\n\r\n--x--"]),
)
def test_any_form(client: TestClient, fields: list[tuple[str, bytes, bool]], tail: bytes) -> None:
    body = b""
    for name, value, is_file in fields:
        file = b'; filename="f"' if is_file else b""
        body += (
            b'--x\r\nContent-Disposition: form-data; name="'
            + name.encode()
            + b'"'
            + file
            + b"\r\n\r\n"
            + value
            + b"\r\n"
        )
    check(client.post("/search", content=body + tail, headers={"content-type": "multipart/form-data; boundary=x"}))


@many
@given(st.lists(st.tuples(st.sampled_from(["text", "id", "k", "where", "x"]), st.text(max_size=20)), max_size=5))
def test_any_link(client: TestClient, words: list[tuple[str, str]]) -> None:
    def sendable(text: str) -> str:
        return text.encode(errors="replace").decode()

    parameters = [(name, sendable(value)) for name, value in words]
    check(client.get("/search", params=parameters))
    check(client.get("/images", params=parameters))


@pytest.mark.parametrize("path", ["/search", "/v1/embeddings"])
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"text":' * 50_000,
        b'{"k":' + b"9" * 10_000 + b"}",
        rb'{"text": "\ud800"}',
        rb'{"input": "\udfff"}',
        b'{"text": "\xff\xfe"}',
        b'{"text": "a", "k": 1e400}',
        b'{"text": "a\\u0000b"}',
        b"\xef\xbb\xbf{}",
        b"",
    ],
)
def test_known_traps(client: TestClient, path: str, body: bytes) -> None:
    check(client.post(path, content=body, headers={"content-type": "application/json"}))


def bomb(side: int) -> bytes:
    """A PNG of side × side black pixels in a few kB: its data is one long run of zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 10_000))
        + chunk(b"IEND", b"")
    )


def test_images_that_are_none_or_too_many_pixels(client: TestClient) -> None:
    whole = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(whole, "PNG")
    refused = {
        "a bomb": bomb(60_000),
        "cut": whole.getvalue()[:-30],
        "text": b"no image",
        "nothing": b"",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }
    for name, data in refused.items():
        response = client.post("/search", files={"image": ("x.png", data)})
        assert response.status_code == 400, (name, response.text)
        assert "the upload: image cannot be decoded" in response.json()["error"]["message"]
    assert "more than 89,478,485" in client.post("/search", files={"image": ("x.png", bomb(10_000))}).text
    assert client.post("/search", files={"image": ("x.png", whole.getvalue())}).status_code == 200


def test_too_large(client: TestClient) -> None:
    assert client.post("/search", content=b"x" * ((1 << 20) + 1)).status_code == 413
    assert client.post("/search", json={"text": "a" * 40_000}).status_code == 400
    assert client.post("/search", json={"text": "a", "k": 1001}).status_code == 400
    assert client.post("/search", json={"ids": [str(i) for i in range(101)]}).status_code == 400
    assert client.post("/v1/embeddings", json={"input": ["a"] * 257}).status_code == 400
    fields = [("where", (None, "a=b"))] * 500
    assert client.post("/search", files=fields).status_code == 400


def test_a_full_queue_and_a_late_answer(serve: Serve, text_index: Path) -> None:
    client = serve(text_index, app={"timeout_s": 0.5}, batch_size=1, queue_size=2, wait_s=0)
    service: Any = client.service  # type: ignore[attr-defined]
    may_go = threading.Event()
    before = service._batcher.work
    service._batcher.work = lambda jobs: may_go.wait(20) and before(jobs)
    late = client.post("/search", json={"text": "fox"})
    assert (late.status_code, late.json()["error"]["type"]) == (504, "server_error")
    held = service.embed(service.searcher, "left", ["a", "b"])
    busy = client.post("/search", json={"text": "fox"})
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert client.post("/v1/embeddings", json={"input": ["a"]}).status_code == 429
    may_go.set()
    assert [future.result(10).tokens > 0 for future in held] == [True, True]
    assert client.post("/search", json={"text": "fox"}).status_code == 200


def test_bodies_together_have_a_bound(serve: Serve, text_index: Path) -> None:
    client = serve(text_index, app={"max_body": 1 << 20})
    gate: Any = client.app.middleware_stack  # type: ignore[attr-defined]
    while not hasattr(gate, "max_held"):
        gate = gate.app
    gate.held = gate.max_held - 10
    assert client.post("/search", json={"text": "fox " * 100}).status_code == 429
    gate.held = 0
    assert client.post("/search", json={"text": "fox " * 100}).status_code == 200
    assert gate.held == 0, "what was held is given back"
