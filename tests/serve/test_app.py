"""The service as its clients see it, against the model and the index themselves."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sentence_transformers import CrossEncoder

from dualenc.encoders import load_model
from dualenc.search import Index
from dualenc.serve.service import _manifest
from tests.commands import toy
from tests.commands.in_process import run
from tests.serve.conftest import Serve

TOKEN = "a-token-of-some-length"


@torch.inference_mode()
def encoded(model: Path, side: Any, items: list[Any]) -> np.ndarray:
    tower = load_model(model).tower(side)
    return torch.cat([tower(tower.prepare([item])) for item in items]).numpy()


def model_of(index: Path) -> Path:
    return Path(Index.open(index).meta["model"])


def ids(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [result["id"] for result in response.json()["results"]]


@pytest.mark.slow
def test_a_text_finds_what_exact_search_finds(serve: Serve, text_index: Path, text_model: Path) -> None:
    client = serve(text_index)
    scores = encoded(text_model, "left", ["fox dog"]) @ encoded(text_model, "right", toy.texts(60)).T
    best = np.argsort(-scores[0])[:5]
    for response in (
        client.post("/search", json={"text": "fox dog", "k": 5}),
        client.get("/search", params={"text": "fox dog", "k": 5}),
    ):
        found = response.json()["results"]
        assert [r["id"] for r in found] == [f"d{row}" for row in best]
        assert [r["rank"] for r in found] == [1, 2, 3, 4, 5]
        np.testing.assert_allclose([r["score"] for r in found], scores[0, best], atol=1e-5)
        assert found[0]["snippet"] == toy.texts(60)[best[0]]


def test_the_command_line_and_the_service_agree(
    serve: Serve, text_index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("search", text_index, "cat hen", "-k", 7, "--json")
    told = json.loads(capsys.readouterr().out)["results"]
    assert [r["id"] for r in told] == ids(serve(text_index).post("/search", json={"text": "cat hen", "k": 7}))


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW8"])
def test_more_like_known_items(tmp_path: Path, serve: Serve, text_model: Path, factory: str) -> None:
    toy.save_documents(tmp_path / "docs.jsonl", 60)
    words = ("--factory", factory, "--nprobe", 4) if "IVF" in factory else ("--factory", factory)
    run("index", text_model, tmp_path / "docs.jsonl", "--out", tmp_path / "index", *words)
    client = serve(tmp_path / "index")
    vectors = encoded(text_model, "right", toy.texts(60))
    scores = vectors @ vectors[[3, 8]].mean(axis=0)
    scores[[3, 8]] = -np.inf
    wanted = [f"d{row}" for row in np.argsort(-scores)[:4]]
    assert ids(client.post("/search", json={"ids": ["d3", "d8", "d3"], "k": 4})) == wanted
    assert ids(client.get("/search", params={"id": ["d3", "d8"], "k": 4})) == wanted
    missing = client.post("/search", json={"ids": ["d3", "nobody"]})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert "'nobody'" in missing.json()["error"]["message"]


@pytest.mark.slow
def test_images_and_texts_search_images(serve: Serve, image_index: Path) -> None:
    client = serve(image_index, images=image_index.parent / "pictures")
    assert client.get("/info").json()["takes"] == ["image", "text"]
    image = (image_index.parent / "pictures" / "05.png").read_bytes()
    assert ids(client.post("/search/image?k=3", content=image))[0] == "05.png"
    pictures = [Image.open(path) for path in sorted((image_index.parent / "pictures").iterdir())]
    scores = encoded(model_of(image_index), "right", ["red"]) @ encoded(model_of(image_index), "left", pictures).T
    expected = [f"{row:02d}.png" for row in np.argsort(-scores[0])[:4]]
    assert ids(client.post("/search", json={"text": "red", "k": 4})) == expected
    shown = client.get("/images", params={"id": "05.png"})
    assert shown.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(shown.content)).size == (40, 40)
    for name in ("../model/open_clip_config.json", "nobody.png", "/etc/passwd"):
        assert client.get("/images", params={"id": name}).status_code == 404


@pytest.mark.slow
def test_filters_where_columns_are_kept(
    tmp_path: Path, serve: Serve, text_model: Path, engine_index: Path, text_index: Path
) -> None:
    client = serve(engine_index)
    assert client.get("/info").json()["columns"] == {"year": "integer", "lang": "text"}
    wanted = {"text": "fox", "k": 30, "filter": "year >= 2010 AND lang = 'en'"}
    assert set(ids(client.post("/search", json=wanted))) == {f"d{i}" for i in range(10, 30, 2)}
    assert set(ids(client.get("/search", params=wanted))) == {f"d{i}" for i in range(10, 30, 2)}
    like = client.post("/search", json={"ids": ["d4"], "k": 3, "filter": "lang = 'en'"})
    assert "d4" not in ids(like)
    assert all(result["columns"]["lang"] == "en" for result in like.json()["results"])
    assert client.post("/search", json={"ids": ["nobody"]}).status_code == 404
    assert client.post("/search", json={"text": "fox", "filter": "year>='soon'"}).status_code == 400
    assert "give a filter" in client.post("/search", json={"text": "fox", "where": ["year>=2010"]}).text
    rows = [{"_id": f"d{i}", "text": text, "year": 2000 + i} for i, text in enumerate(toy.texts(30))]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--out", tmp_path / "index", "--columns", "year", "--bm25")
    run("index", text_model, tmp_path / "docs.jsonl", *words)
    faiss = serve(tmp_path / "index")
    assert faiss.get("/info").json()["columns"] == {"year": "integer"}
    for more in ({}, {"hybrid": "rrf"}):
        answer = faiss.post("/search", json={"text": "fox", "k": 30, "where": ["year>=2025"], **more})
        assert set(ids(answer)) == {f"d{i}" for i in range(25, 30)}
        assert all(result["columns"]["year"] >= 2025 for result in answer.json()["results"])
    assert "give conditions (where)" in faiss.post("/search", json={"text": "fox", "filter": "year > 1"}).text
    assert "d28" not in ids(faiss.post("/search", json={"ids": ["d28"], "where": ["year>=2025"]}))
    assert "built without --columns" in serve(text_index).post("/search", json={"text": "a", "where": ["a=b"]}).text


@pytest.mark.slow
def test_hybrid_search(
    tmp_path: Path, serve: Serve, text_model: Path, text_index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.save_documents(tmp_path / "docs.jsonl", 60)
    run("index", text_model, tmp_path / "docs.jsonl", "--out", tmp_path / "index", "--bm25")
    client = serve(tmp_path / "index")
    assert client.get("/info").json()["hybrid"] is True
    capsys.readouterr()
    for how, weight in (("rrf", 0.5), ("weighted", 0.2)):
        run("search", tmp_path / "index", "fox hen", "--hybrid", how, "--weight", weight, "--json")
        told = [row["id"] for row in json.loads(capsys.readouterr().out)["results"]]
        wanted = {"text": "fox hen", "hybrid": how, "weight": weight}
        assert ids(client.post("/search", json=wanted)) == ids(client.get("/search", params=wanted)) == told
    assert client.post("/search", json={"ids": ["d1"], "hybrid": "rrf"}).status_code == 400
    assert client.post("/search", json={"text": "a", "hybrid": "rrf", "weight": 2}).status_code == 400
    other = serve(text_index)
    assert other.get("/info").json()["hybrid"] is False
    assert "--bm25" in other.post("/search", json={"text": "fox", "hybrid": "rrf"}).json()["error"]["message"]


@pytest.mark.slow
def test_reranking(tmp_path: Path, serve: Serve, text_model: Path, text_index: Path) -> None:
    toy.save_documents(tmp_path / "docs.jsonl", 60)
    run("index", text_model, tmp_path / "docs.jsonl", "--out", tmp_path / "index", "--texts", "--bm25")
    toy.cross_encoder(tmp_path / "judge")
    client = serve(tmp_path / "index", judge=tmp_path / "judge", app={"rerank_top": 20})
    assert client.get("/info").json()["rerank"] == 20
    assert client.get("/info").json()["texts"]
    assert client.get("/texts", params={"id": "d3"}).json() == {"id": "d3", "text": toy.texts(60)[3]}
    assert client.get("/texts", params={"id": "d60"}).status_code == 404
    plain = {"text": "fox hen", "k": 20, "rerank": False}
    names = ids(client.post("/search", json=plain))
    texts = toy.texts(60)
    ranked = CrossEncoder(str(tmp_path / "judge")).rank("fox hen", [texts[int(name[1:])] for name in names])
    expected = [names[row["corpus_id"]] for row in ranked]
    assert expected != names
    for wanted in ({"text": "fox hen", "k": 20}, {"text": "fox hen", "k": 20, "rerank": True}):
        for response in (client.post("/search", json=wanted), client.get("/search", params=wanted)):
            assert ids(response) == expected
            scores = [result["score"] for result in response.json()["results"]]
            np.testing.assert_allclose(scores, [row["score"] for row in ranked], atol=1e-5)
    fused = {"text": "fox hen", "k": 20, "hybrid": "rrf"}
    assert set(ids(client.post("/search", json=fused))) == set(ids(client.post("/search", json=fused | plain)))
    assert ids(client.post("/search", json={"ids": ["d3"], "k": 30}))
    assert client.post("/search", json={"ids": ["d3"], "rerank": True}).status_code == 400
    assert "20 are reranked" in client.post("/search", json={"text": "fox", "k": 21}).json()["error"]["message"]
    other = serve(text_index)
    assert other.get("/info").json()["rerank"] == 0
    assert not other.get("/info").json()["texts"]
    assert "built with --texts" in other.get("/texts", params={"id": "d3"}).json()["error"]["message"]
    (tmp_path / "index" / "texts" / "items.arrow").write_bytes(b"damaged")
    assert not serve(tmp_path / "index").get("/info").json()["texts"], "searched all the same"
    assert "--rerank" in other.post("/search", json={"text": "fox", "rerank": True}).json()["error"]["message"]


def test_embeddings_in_openais_form(serve: Serve, text_index: Path, text_model: Path) -> None:
    client = serve(text_index, batch_size=3)
    texts = ["fox", "dog dog dog dog dog dog dog dog dog dog dog dog dog dog dog dog dog dog", "hen ant", "a b c"]
    answer = client.post("/v1/embeddings", json={"input": texts, "model": "any"}).json()
    assert (answer["object"], [row["index"] for row in answer["data"]]) == ("list", [0, 1, 2, 3])
    np.testing.assert_allclose(
        [row["embedding"] for row in answer["data"]], encoded(text_model, "left", texts), atol=1e-5
    )
    tokenizer = load_model(text_model).left.prepare.tokenizer
    counted = sum(len(tokenizer("query: " + text)["input_ids"]) for text in texts)
    assert answer["usage"] == {"prompt_tokens": counted, "total_tokens": counted}
    written = client.post(
        "/v1/embeddings", json={"input": "fox", "encoding_format": "base64", "input_type": "document"}
    )
    vector = np.frombuffer(base64.b64decode(written.json()["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, encoded(text_model, "right", ["fox"])[0], atol=1e-5)
    assert client.post("/v1/embeddings", json={"input": "fox", "dimensions": 8}).status_code == 400
    assert client.post("/v1/embeddings", json={"input": "fox", "dimensions": 32}).status_code == 200


def test_health_metrics_and_openapi(serve: Serve, text_index: Path) -> None:
    client = serve(text_index)
    assert client.get("/health").json() == {"status": "ok", "generation": 1}
    client.post("/search", json={"text": "fox"})
    client.get("/no/such/place")
    told = client.get("/metrics").text
    assert 'dualenc_requests_total{path="/search",status="200"} 1.0' in told
    assert 'dualenc_requests_total{path="other",status="404"} 1.0' in told
    assert "dualenc_index_vectors 60.0" in told
    assert "dualenc_batch_size_count 1.0" in told
    assert "dualenc_queue_length 0.0" in told
    described = client.get("/openapi.json").json()["paths"]
    paths = "/search /search/image /v1/embeddings /health /metrics /reload /info /images /texts"
    assert set(paths.split()) <= set(described)


def test_a_token_is_asked_of_all_but_page_and_health(serve: Serve, text_index: Path) -> None:
    client = serve(text_index, app={"token": TOKEN})
    assert client.get("/").status_code == client.get("/health").status_code == 200
    for path in ("/search?text=fox", "/info", "/metrics", "/openapi.json", "/images?id=x", "/texts?id=x", "/no/such"):
        refused = client.get(path)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    for header in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer", TOKEN, "Bearer \xe9"):
        told = {"authorization": header.encode("latin-1")}
        assert client.get("/search?text=fox", headers=told).status_code == 401
    assert client.get("/search?text=fox", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
    assert client.post("/reload").status_code == 401
    assert client.post("/reload", headers={"authorization": f"Bearer {TOKEN}"}).json() == {"generation": 2}
    assert serve(text_index).post("/reload").status_code == 403


def test_other_names_for_this_machine_are_refused(serve: Serve, text_index: Path) -> None:
    client = serve(text_index, app={"hosts": ("localhost", "127.0.0.1", "[::1]")})
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert client.get("/health", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "[", ""):
        assert client.get("/health", headers={"host": host}).status_code == 400


@pytest.mark.slow
def test_a_new_index_takes_the_place_of_the_old_one(tmp_path: Path, serve: Serve, text_model: Path) -> None:
    toy.save_documents(tmp_path / "docs.jsonl", 20)
    run("index", text_model, tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    client = serve(tmp_path / "index", app={"token": TOKEN})
    client.headers["authorization"] = f"Bearer {TOKEN}"
    service: Any = client.service  # type: ignore[attr-defined]
    encoder = service.searcher.encoder
    toy.save_documents(tmp_path / "docs.jsonl", 30)
    run("index", text_model, tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    assert len(ids(client.get("/search?text=fox&k=100"))) == 20
    assert client.post("/reload").json() == {"generation": 2}
    assert len(ids(client.get("/search?text=fox&k=100"))) == 30
    assert service.searcher.encoder is encoder, "the same weights are not read again"
    (tmp_path / "index" / "index.faiss").write_bytes(b"broken")
    failed = client.post("/reload")
    assert failed.status_code == 409
    assert "the old index stays" in failed.json()["error"]["message"]
    assert len(ids(client.get("/search?text=fox&k=100"))) == 30
    assert 'dualenc_reloads_total{result="failed"} 1.0' in client.get("/metrics").text


def test_what_is_written_anew_is_noticed(tmp_path: Path, text_index: Path) -> None:
    folder = tmp_path / "index"
    assert _manifest(folder)[0] is None
    shutil.copytree(text_index, folder)
    seen = [_manifest(folder)]
    run("index", folder, text_index.parent / "docs.jsonl", "--bm25", "--texts")
    seen.append(_manifest(folder))
    (tmp_path / "gone.txt").write_text("d3\n")
    run("index", folder, "--remove", tmp_path / "gone.txt")
    seen.append(_manifest(folder))
    assert all(one[0] is not None for one in seen)
    assert seen[0] != seen[1] != seen[2] != seen[0]


@pytest.mark.slow
def test_a_refined_index_gives_its_exact_vectors_back(tmp_path: Path, text_model: Path) -> None:
    toy.save_documents(tmp_path / "docs.jsonl", 60)
    how = ("--factory", "IVF4,PQ8x4,Refine(Flat)")
    run("index", text_model, tmp_path / "docs.jsonl", "--out", tmp_path / "index", *how)
    expected = encoded(text_model, "right", toy.texts(60))[[7, 2]]
    np.testing.assert_allclose(Index.open(tmp_path / "index").vectors(["d7", "d2"]), expected, atol=1e-5)
