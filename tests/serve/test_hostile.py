"""Malformed and oversized requests: whatever is sent, the answer is not 5xx, and the service goes on."""

from __future__ import annotations

import io
import json
import re
import shutil
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

from dualenc import decoding
from dualenc.errors import DualencError
from dualenc.search.rerank import open_cross_encoder
from dualenc.search.searcher import Searcher
from dualenc.serve.app import Settings, create_app
from dualenc.serve.metrics import Metrics
from dualenc.serve.service import Service
from tests.commands import toy
from tests.commands.in_process import run
from tests.serve.conftest import URL, Serve

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    [
        "text",
        "hybrid",
        "weight",
        "rerank",
        "ids",
        "k",
        "where",
        "filter",
        "image",
        "input",
        "encoding_format",
        "dimensions",
        "model",
    ]
)
LIKELY = st.dictionaries(NAMES, JSON | st.sampled_from(["fox", ["d1"], ["d1", ""], 5, 0, -1, 10**30, "5", [], ["a=b"]]))
many = settings(max_examples=150, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def client(image_index: Path) -> Iterator[TestClient]:
    service = Service(lambda before: Searcher.open(image_index, before=before), metrics=Metrics())
    with TestClient(create_app(service, Settings(watch=False, max_body=1 << 20)), base_url=URL) as made:
        yield made


def check(response: Any) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, (response.status_code, response.text)
    if response.status_code != 200:
        told = response.json()["error"]
        assert told["message"]
        assert told["code"] == response.status_code


@pytest.mark.slow
@many
@given(path=st.sampled_from(["/search", "/v1/embeddings"]), value=JSON | LIKELY)
def test_any_json(client: TestClient, path: str, value: Any) -> None:
    # With NaN, infinities and halves of characters, as Python's and other writers let pass.
    body = json.dumps(value).encode()
    check(client.post(path, content=body, headers={"content-type": "application/json"}))


@pytest.mark.slow
@many
@given(
    path=st.sampled_from(["/search", "/search/image", "/v1/embeddings", "/reload", "/"]),
    body=st.binary(max_size=200),
    kind=st.sampled_from(["application/json", "multipart/form-data", "text/plain", "x\xff"]),
)
def test_any_bytes(client: TestClient, path: str, body: bytes, kind: str) -> None:
    check(client.post(path, content=body, headers={"content-type": kind.encode("latin-1")}))


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Iterator[TestClient]:
    """All that may be asked for: texts, BM25, a column, and a cross-encoder for the best five."""
    folder = tmp_path_factory.mktemp("judging")
    rows = [{"_id": f"d{i}", "text": text, "year": 2000 + i} for i, text in enumerate(toy.texts(20))]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--texts", "--bm25", "--columns", "year")
    run("index", text_model, folder / "docs.jsonl", "--out", folder / "index", *words)
    judge = open_cross_encoder(str(toy.cross_encoder(folder / "judge")))[0]
    service = Service(lambda before: Searcher.open(folder / "index", before=before, judge=judge), metrics=Metrics())
    with TestClient(create_app(service, Settings(watch=False, rerank_top=5)), base_url=URL) as made:
        yield made


SEARCH: list[tuple[Any, str]] = [
    ({}, "search with one of text, image and ids"),
    ([], "Input should be a valid dictionary"),
    ("fox", "Input should be a valid dictionary"),
    (None, "Input should be a valid dictionary"),
    ({"text": ""}, "the text is empty"),
    ({"text": " \n"}, "the text is empty"),
    ({"text": 3}, "text: Input should be a valid string"),
    ({"text": ["fox"]}, "text: Input should be a valid string"),
    ({"text": "fox", "ids": ["d1"]}, "search with one of text, image and ids"),
    ({"text": "fox" * 20_000}, "text: String should have at most 32768 characters"),
    ({"text": "fox", "k": 0}, "k: Input should be greater than or equal to 1"),
    ({"text": "fox", "k": -1}, "k: Input should be greater than or equal to 1"),
    ({"text": "fox", "k": 1001}, "k: Input should be less than or equal to 1000"),
    ({"text": "fox", "k": 10**30}, "k: "),
    ({"text": "fox", "k": 1.5}, "k: Input should be a valid integer"),
    ({"text": "fox", "k": "many"}, "k: Input should be a valid integer"),
    ({"text": "fox", "k": None}, "k: Input should be a valid integer"),
    ({"text": "fox", "k": 6}, "k is 6, and 5 are reranked; ask for fewer"),
    ({"text": "fox", "rerank": "perhaps"}, "rerank: Input should be a valid boolean"),
    ({"text": "fox", "rerank": [True]}, "rerank: Input should be a valid boolean"),
    ({"ids": ["d1"], "rerank": True}, "reranking needs a text"),
    ({"text": "fox", "hybrid": "bm25"}, "hybrid: Input should be 'rrf' or 'weighted'"),
    ({"text": "fox", "hybrid": True}, "hybrid: Input should be 'rrf' or 'weighted'"),
    ({"ids": ["d1"], "hybrid": "rrf"}, "hybrid search needs a text"),
    ({"text": "fox", "hybrid": "rrf", "weight": 1.01}, "weight: Input should be less than or equal to 1"),
    ({"text": "fox", "hybrid": "rrf", "weight": -1}, "weight: Input should be greater than or equal to 0"),
    ({"text": "fox", "hybrid": "rrf", "weight": float("nan")}, "weight: "),
    ({"text": "fox", "hybrid": "rrf", "weight": "half"}, "weight: Input should be a valid number"),
    ({"ids": "d1"}, "ids: Input should be a valid"),
    ({"ids": [1]}, "ids.0: Input should be a valid string"),
    ({"ids": ["d1"] * 101}, "ids: List should have at most 100 items"),
    ({"ids": ["x" * 5000]}, "ids.0: String should have at most 4096 characters"),
    ({"text": "fox", "where": "year>1"}, "where: Input should be a valid"),
    ({"text": "fox", "where": ["recent"]}, "'recent' is no condition; write for example year>=2020"),
    ({"text": "fox", "where": ["yaer>1"]}, "no column 'yaer'; there are year"),
    ({"text": "fox", "where": ["year>soon"]}, "give a whole number"),
    ({"text": "fox", "where": ["year>=99999999999999999999"]}, "give a whole number of 64 bits"),
    ({"text": "fox", "where": ["year!=1,-9223372036854775808"]}, "give a whole number of 64 bits"),
    ({"text": "fox", "where": [{"year": 1}]}, "where.0: Input should be a valid string"),
    ({"text": "fox", "where": ["year>1"] * 33}, "where: List should have at most 32 items"),
    ({"text": "fox", "top": 5}, "top: Extra inputs are not permitted"),
    ({"image": "AAAA"}, "image: Extra inputs are not permitted"),
]
EMBED: list[tuple[Any, str]] = [
    ({}, "input: Field required"),
    ([], "valid dictionary"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": [1, 2, 3]}, "input"),
    ({"input": []}, "input has 0 texts; send 1 to 256"),
    ({"input": ["a"] * 257}, "input has 257 texts; send 1 to 256"),
    ({"input": ["a", " "]}, "input[1] is empty or has more than 32,768 characters"),
    ({"input": "a" * 32_769}, "input[0] is empty or has more than 32,768 characters"),
    ({"input": "\ud800"}, "is not valid Unicode"),
    ({"input": ["a", "b \udfff"]}, "the text 'b \\udfff' is not valid Unicode"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format: Input should be 'float' or 'base64'"),
    ({"input": "a", "dimensions": 7}, "dimensions is 7; the model gives 32"),
    ({"input": "a", "dimensions": "all"}, "dimensions: Input should be a valid integer"),
    ({"input": "a", "input_type": "passage"}, "input_type: Input should be 'query' or 'document'"),
    ({"input": "a", "model": 3}, "model: Input should be a valid string"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "wanted", "message"),
    [("/search", *case) for case in SEARCH] + [("/v1/embeddings", *case) for case in EMBED],
    ids=lambda value: str(value)[:40] if isinstance(value, (dict, list)) else None,
)
def test_what_is_wrong_is_told_in_one_line(judging: TestClient, path: str, wanted: Any, message: str) -> None:
    response = judging.post(path, content=json.dumps(wanted), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    told = response.json()["error"]["message"]
    assert message in told
    assert "\n" not in told
    assert len(told) < 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("text=fox&k=0", "k: "),
        ("text=fox&k=many", "k: "),
        ("text=fox&k=", "k: "),
        ("text=fox&weight=2&hybrid=rrf", "weight: "),
        ("text=fox&weight=nan&hybrid=rrf", "weight: "),
        ("text=fox&rerank=perhaps", "rerank: "),
        ("text=fox&k=6&rerank=true", "5 are reranked"),
        ("text=fox&hybrid=both", "hybrid: "),
        ("text=fox&where=", "is no condition"),
        ("text=fox&id=d1", "search with one of text"),
        ("", "search with one of text"),
    ],
)
def test_what_is_wrong_in_a_link_is_told_likewise(judging: TestClient, parameters: str, message: str) -> None:
    response = judging.get(f"/search?{parameters}")
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    # With what was wrong put right, the same service answers.
    assert judging.get("/search?text=fox&k=5&hybrid=rrf&weight=1&where=year>=2003").status_code == 200


@pytest.mark.parametrize(
    "body", [b"{", b'{"text": "fox"', b"{'text': 'fox'}", b'{"text": fox}', b"\xff", b"", b"null,"]
)
def test_what_is_no_json(judging: TestClient, body: bytes) -> None:
    for path in ("/search", "/v1/embeddings"):
        response = judging.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert re.search("JSON|required|parsing the body", response.json()["error"]["message"])


@pytest.mark.slow
@many
@given(
    value=LIKELY
    | st.fixed_dictionaries(
        {"text": st.just("fox")},
        optional={
            "k": JSON | st.integers(-1, 7),
            "rerank": JSON,
            "hybrid": JSON | st.just("rrf"),
            "weight": JSON | st.floats(),
            "where": st.lists(
                st.sampled_from(["year>=2003", "year", "=", "year=x", "a=b"]) | st.text(max_size=9), max_size=3
            ),
        },
    )
)
def test_any_json_where_everything_can_be_asked_for(judging: TestClient, value: Any) -> None:
    check(judging.post("/search", content=json.dumps(value), headers={"content-type": "application/json"}))


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


@pytest.mark.slow
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
        response = client.post("/search/image", content=data)
        assert response.status_code == 400, (name, response.text)
        assert "the upload: image cannot be decoded" in response.json()["error"]["message"]
    assert "more than 89,478,485" in client.post("/search/image", content=bomb(10_000)).text
    assert client.post("/search/image", content=whole.getvalue()).status_code == 200


@pytest.mark.slow
def test_thumbnails_are_decoded_in_a_process_of_their_own(
    tmp_path: Path, serve: Serve, image_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    shutil.copytree(image_index.parent / "pictures", folder)
    (folder / "03.png").write_bytes(bomb(60_000))
    client = serve(image_index, images=folder)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a foreign file was decoded by the server")

    decode = decoding._decode
    monkeypatch.setattr(decoding, "_decode", lambda data, *how: (decode if data[:2] == b"P6" else refuse)(data, *how))
    shown = client.get("/images", params={"id": "05.png"})
    assert Image.open(io.BytesIO(shown.content)).size == (40, 40)
    assert client.get("/images", params={"id": "03.png"}).status_code == 404
    monkeypatch.setattr(decoding, "UPLOAD_SECONDS", 0.01)
    assert client.get("/images", params={"id": "06.png"}).status_code == 404
    assert client.get("/images", params={"id": "05.png"}).content == shown.content, "kept"


def test_every_response_has_security_headers(serve: Serve, text_index: Path) -> None:
    client = serve(text_index, app={"hosts": ["127.0.0.1"], "max_body": 100})
    plain = TestClient(client.app, base_url=URL, raise_server_exceptions=False)
    service: Any = client.service  # type: ignore[attr-defined]
    responses = [
        plain.get("/"),
        plain.get("/no/such"),
        plain.get("/health", headers={"host": "evil.example"}),
        plain.post("/search", content=b"x" * 101),
    ]
    service.searcher = None
    responses.append(plain.get("/info"))
    service.searcher = Searcher.open(text_index)
    assert [response.status_code for response in responses] == [200, 404, 400, 413, 500]
    for response in responses:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["x-frame-options"] == "DENY"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["JPEG2000", "ICO", "TIFF", "BMP", "PPM", "AVIF"])
def test_uploads_are_of_formats_whose_size_is_known_before_they_are_decoded(client: TestClient, kind: str) -> None:
    data = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(data, kind)
    response = client.post("/search/image", content=data.getvalue())
    assert response.status_code == 400
    assert "no image of a known format: GIF, JPEG, PNG, WEBP" in response.json()["error"]["message"]


def test_too_large(client: TestClient) -> None:
    assert client.post("/search", content=b"x" * ((1 << 20) + 1)).status_code == 413
    assert client.post("/search", json={"text": "a" * 40_000}).status_code == 400
    assert client.post("/search", json={"text": "a", "k": 1001}).status_code == 400
    assert client.post("/search", json={"ids": [str(i) for i in range(101)]}).status_code == 400
    assert client.post("/v1/embeddings", json={"input": ["a"] * 257}).status_code == 400
    assert client.post("/search/image?" + "where=a=b&" * 500, content=b"x").status_code == 400


@pytest.mark.slow
def test_a_full_queue_and_a_late_answer(serve: Serve, text_index: Path) -> None:
    client = serve(text_index, app={"timeout_s": 0.5}, batch_size=1, queue_size=2, wait_s=0)
    service: Any = client.service  # type: ignore[attr-defined]
    may_go = threading.Event()
    before = service.batcher.work
    service.batcher.work = lambda jobs: may_go.wait(20) and before(jobs)
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


def test_a_panic_of_the_tokenizer_costs_one_answer(serve: Serve, text_index: Path) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it for a panic of Rust."""

    def panic(*arguments: Any) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    client = serve(text_index)
    plain = TestClient(client.app, base_url=URL, raise_server_exceptions=False)
    service: Any = client.service  # type: ignore[attr-defined]
    encode, service.searcher.encode = service.searcher.encode, panic
    response = plain.post("/search", json={"text": "fox"})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "Option" not in response.text
    service.searcher.encode = encode
    assert plain.get("/health").status_code == plain.post("/search", json={"text": "fox"}).status_code == 200
    service.close()
    assert plain.get("/health").status_code == 503


@pytest.mark.slow
def test_no_error_names_a_path_of_the_server(
    tmp_path: Path, serve: Serve, text_index: Path, engine_index: Path
) -> None:
    home = str(text_index.parent.parent)
    no_columns = serve(text_index).post("/search", json={"text": "fox", "where": ["year>=2000"]})
    assert (no_columns.status_code, "built without --columns" in no_columns.text) == (400, True)
    unknown = serve(engine_index).post("/search", json={"ids": ["nobody"]})
    assert (unknown.status_code, "'nobody'" in unknown.text) == (404, True)
    for name in ("lake", "pushed"):
        shutil.copytree(engine_index.parent / name, tmp_path / name)
    meta = (tmp_path / "pushed" / "meta.json").read_text()
    (tmp_path / "pushed" / "meta.json").write_text(meta.replace(str(engine_index.parent), str(tmp_path)))
    client = serve(tmp_path / "pushed", app={"token": "a-token-of-some-length"})
    client.headers["authorization"] = "Bearer a-token-of-some-length"
    shutil.rmtree(tmp_path / "lake")
    filtered = client.post("/search", json={"text": "fox", "filter": "year > 1"})
    vanished, reload = client.post("/search", json={"text": "fox"}), client.post("/reload")
    assert (vanished.status_code, reload.status_code) == (503, 409)
    for response in (no_columns, unknown, filtered, vanished, reload):
        assert response.json()["error"]["code"] == response.status_code
        assert home not in response.text
        assert str(tmp_path) not in response.text


@pytest.mark.slow
@pytest.mark.parametrize("filter", ["length(repeat(id, 100000000)) > 3", "yaer > 1", "year >", "x" * 5000, "'"])
def test_a_filter_that_harms_or_cannot_be_evaluated(serve: Serve, engine_index: Path, filter: str) -> None:
    client = serve(engine_index)
    response = client.post("/search", json={"text": "fox", "filter": filter})
    assert (response.status_code, "the filter" in response.text) == (400, True)
    assert client.post("/search", json={"text": "fox", "filter": "year > 1"}).status_code == 200


def test_a_reload_that_panics_is_a_failed_one(serve: Serve, text_index: Path) -> None:
    service: Any = serve(text_index).service  # type: ignore[attr-defined]

    def panic(before: Any) -> None:
        raise SystemError("no DualencError")

    service._open = panic
    with pytest.raises(DualencError, match="SystemError"):
        service.reload()
