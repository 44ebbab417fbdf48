"""Adapters of vectors as a user types them: trained by a recipe, resumed, embedded, indexed,
searched, evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import VectorEncoder, load_model
from dualenc.training import RetrievalEvaluator
from tests.helpers.in_process import evaluated, failure, found, run
from tests.helpers.make import write_vectors

N, D = 96, 16


def write_rotated(folder: Path, seed: int = 0) -> Path:
    """Documents at random, queries that are their documents turned: a linear map finds them, the
    cosine does not."""
    random = np.random.default_rng(0)
    documents = random.normal(size=(N, D)).astype(np.float32)
    turn = np.linalg.qr(random.normal(size=(D, D)))[0]
    queries = (documents @ turn + 0.1 * np.random.default_rng(seed).normal(size=(N, D))).astype(
        np.float32
    )
    (folder / "qrels").mkdir(parents=True)
    write_vectors(folder / "corpus.parquet", "d", documents)
    write_vectors(folder / "queries.parquet", "q", queries)
    for split, rows in (("train", range(72)), ("test", range(72, N))):
        (folder / "qrels" / f"{split}.tsv").write_text(
            "".join(f"q{row}\td{row}\t1\n" for row in rows)
        )
    return folder


def read_vectors(path: Path) -> np.ndarray:
    return np.stack(pq.read_table(path).column("vector").to_pylist()).astype(np.float32)


def write_recipe(folder: Path, data: Path, **model: Any) -> list[str]:
    """A recipe's path and the values that make it small."""
    recipe = {
        "model": {"class_path": "VectorEncoder", "init_args": model},
        "data": {"class_path": "BeirPairs", "init_args": {"path": str(data)}},
        "objective": {"class_path": "DCL", "init_args": {"temperature": 0.1}},
        "evaluator": {"class_path": "RetrievalEvaluator", "init_args": {"path": str(data)}},
        "trainer": {
            "output": str(folder / "run"),
            "batch_size": 24,
            "epochs": 40,
            "learning_rate": 0.02,
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return [str(folder / "recipe.yaml"), "trainer.save_every=30", "trainer.progress=false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run whose queries alone are adapted."""
    folder = tmp_path_factory.mktemp("vectors")
    data = write_rotated(folder / "data")
    run("train", *write_recipe(folder, data, tower="linear", right_tower="identity"))
    return folder


@pytest.mark.slow
def test_embed_index_search_and_evaluate(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = trained / "run" / "model", trained / "data"
    assert RetrievalEvaluator(data)(VectorEncoder(D))["ndcg@10"] < 0.3
    metrics = evaluated("retrieval", tmp_path / "evaluation", model, data)
    assert metrics["systems"]["run"]["datasets"]["data"]["metrics"]["ndcg@10"] > 0.9
    run("embed", model, data, "--out", tmp_path / "emb", "--batch-size", 10)
    documents, queries = (read_vectors(data / f"{part}.parquet") for part in ("corpus", "queries"))
    units = documents / np.linalg.norm(documents, axis=1, keepdims=True)
    embeddings = Embeddings.open(tmp_path / "emb")
    assert embeddings.ids == [f"d{row}" for row in range(N)]
    np.testing.assert_allclose(
        embeddings.vectors[:], units, atol=1e-6
    )  # the right tower is the identity
    run("index", model, data / "corpus.parquet", "--out", tmp_path / "index")
    np.save(tmp_path / "query.npy", queries[80])
    results = found(capsys, tmp_path / "index", tmp_path / "query.npy", "-k", 3)
    encoder = load_model(model)
    scores = units @ encoder("left", encoder.left.prepare([queries[80]])).detach().numpy()[0]
    assert [result["id"] for result in results] == [f"d{row}" for row in np.argsort(-scores)[:3]]
    assert results[0]["id"] == "d80"


@pytest.mark.slow
def test_mistakes_are_one_line_each(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = trained / "run" / "model", trained / "data"
    np.save(tmp_path / "narrow.npy", np.ones((4, 3)))
    assert "dimension 3" in failure(
        capsys, "embed", model, tmp_path / "narrow.npy", "--out", tmp_path / "emb"
    )
    run("index", model, data, "--out", tmp_path / "index")
    assert "give a .npy file" in failure(capsys, "search", tmp_path / "index", "a text")
    assert "--bm25 needs texts" in failure(capsys, "evaluate", "retrieval", model, data, "--bm25")
