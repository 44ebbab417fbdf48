"""The service's answers are those of `dualenc search`; hostile requests are answered with 4xx."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from dualenc.errors import DualencError
from dualenc.serve.app import MAX_BODY, Service, create_app
from tests.commands import toy
from tests.commands.in_process import found
from tests.serve.conftest import URL

HEADERS = {"content-type": "application/json"}


def ids(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [result["id"] for result in response.json()["results"]]


def check_refused(response: Any, message: str = "", status: int = 400) -> None:
    assert response.status_code == status, response.text
    detail = response.json()["detail"]
    assert message in detail
    assert "\n" not in detail
    assert len(detail) < 600


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        ((), {"rerank": False}),
        (("--where", "year>=2010"), {"rerank": False, "where": ["year>=2010"]}),
        (("--hybrid", "rrf"), {"rerank": False, "hybrid": "rrf"}),
        (("--hybrid", "weighted", "--weight", 0.2), {"rerank": False, "hybrid": "weighted", "weight": 0.2}),
        (("--rerank", "judge", "--rerank-top", 5), {}),
    ],
    ids=["text", "where", "rrf", "weighted", "rerank"],
)
def test_results_are_those_of_the_command(
    client: TestClient, text_index: Path, capsys: pytest.CaptureFixture[str], words: tuple[Any, ...], request_: Any
) -> None:
    command = [text_index.parent / "judge" if word == "judge" else word for word in words]
    expected = found(capsys, text_index, "fox hen", "-k", 5, *command)
    body = {"text": "fox hen", "k": 5, **request_}
    for response in (client.post("/search", json=body), client.get("/search", params=body)):
        assert ids(response) == [row["id"] for row in expected]
        results = response.json()["results"]
        assert [row["score"] for row in results] == pytest.approx([row["score"] for row in expected], abs=1e-5)
        assert results[0]["snippet"] == expected[0]["snippet"]
        assert results[0]["columns"] == {"year": expected[0]["year"]}


def test_similar_items_texts_and_health(client: TestClient) -> None:
    similar = ids(client.post("/search", json={"ids": ["d3", "d8", "d3"], "k": 4}))
    assert similar == ids(client.get("/search", params={"id": ["d3", "d8"], "k": 4}))
    assert len(similar) == 4
    assert not {"d3", "d8"} & set(similar)
    assert client.get("/texts", params={"id": "d3"}).json() == {"id": "d3", "text": toy.texts(20)[3]}
    health = client.get("/health").json()
    assert (health["status"], health["vectors"], health["rerank"]) == ("ok", 20, 5)
    assert health["columns"] == {"year": "integer"}
    assert set(client.get("/openapi.json").json()["paths"]) == {"/health", "/search", "/search/image", "/texts"}


def test_images_and_texts_search_images(
    image_client: TestClient, image_index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = image_index.parent / "pictures" / "05.png"
    by_text = image_client.post("/search", json={"text": "red", "k": 4})
    by_image = image_client.post("/search/image?k=4", content=picture.read_bytes())
    for query, response in (("red", by_text), (picture, by_image)):
        assert ids(response) == [row["id"] for row in found(capsys, image_index, query, "-k", 4)]
    assert image_client.get("/health").json()["takes"] == ["image", "text"]


def test_no_path_from_a_request_is_opened(
    client: TestClient, image_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a file was opened")

    for path in (__file__, "../model/meta.json", "/etc/passwd", "https://example.org/a.png"):
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", refuse)
            patch.setattr("os.open", refuse)
            patch.setattr("io.open", refuse)
            check_refused(client.get("/texts", params={"id": path}), "no text of that id", 404)
            check_refused(client.post("/search", json={"ids": [path]}), path, 404)
            assert client.post("/search", json={"text": path, "k": 5}).status_code == 200
            assert image_client.post("/search", json={"text": path}).status_code == 200, "a text, and no image's path"
            check_refused(image_client.post("/search/image", content=path.encode()), "image cannot be decoded")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "search with one of text, image and ids"),
        ([], "valid dictionary"),
        ({"text": " \n"}, "the text is empty"),
        ({"text": "fox" * 20_000}, "text: String should have at most 32768 characters"),
        ({"text": "\ud800"}, "unicode"),
        ({"text": "fox", "k": 0}, "k: "),
        ({"text": "fox", "k": 1001}, "k: "),
        ({"text": "fox", "k": 6}, "k is 6, and 5 are reranked"),
        ({"ids": ["d1"], "rerank": True}, "reranking needs a text"),
        ({"text": "fox", "hybrid": "bm25"}, "hybrid: Input should be 'rrf' or 'weighted'"),
        ({"text": "fox", "where": ["yaer>1"]}, "no column 'yaer'"),
        ({"text": "fox", "where": ["year>1"] * 33}, "where: List should have at most 32 items"),
        ({"text": "fox", "k": 5, "filter": "year > 1"}, "only an engine takes a filter"),
        ({"text": "fox", "top": 5}, "top: Extra inputs"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, (dict, list)) else "",
)
def test_what_is_refused(client: TestClient, body: Any, message: str) -> None:
    check_refused(client.post("/search", content=json.dumps(body), headers=HEADERS), message)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"text": "\xff\xfe"}', b'{"text": "a", "k": 1e400}'])
def test_what_is_no_json(client: TestClient, body: bytes) -> None:
    check_refused(client.post("/search", content=body, headers=HEADERS))


def test_large_bodies_other_hosts_and_methods(client: TestClient) -> None:
    check_refused(client.post("/search", content=b"x" * (MAX_BODY + 1)), "bytes", 413)
    check_refused(client.post("/search/image?k=3", content=(b"x" * MAX_BODY for _ in range(2))), "bytes", 413)
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 400
    assert client.delete("/search").status_code == 405


def bomb(side: int) -> bytes:
    """A PNG of side × side black pixels in a few kB: its data is one long run of zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    data = zlib.compress(b"\0" * 10_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_uploads_that_are_no_images(image_client: TestClient) -> None:
    files = {}
    for kind in ("PNG", "TIFF"):
        file = io.BytesIO()
        Image.new("RGB", (64, 64), "red").save(file, kind)
        files[kind] = file.getvalue()
    for upload in (bomb(60_000), bomb(10_000), files["PNG"][:-30], files["TIFF"], b"no image", b"%!PS-Adobe-3.0"):
        check_refused(image_client.post("/search/image", content=upload), "the upload: image cannot be decoded")
    assert image_client.post("/search/image", content=files["PNG"]).status_code == 200


def test_a_damaged_index_is_not_the_requests_fault(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise DualencError("/home/someone/index: damaged")

    monkeypatch.setattr(service.searcher, "search", fail)
    response = TestClient(create_app(service), base_url=URL).post("/search", json={"text": "fox", "k": 5})
    check_refused(response, "the server's log says why", 503)
    assert "/home" not in response.text
