"""Clicks: queries with ids of documents whose vectors are there, and their split by documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import IndexPairs
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError


@pytest.fixture
def documents() -> Embeddings:
    vectors = np.eye(6, dtype=np.float16)
    return Embeddings(["10", "11", "d two", "13", "14", "15"], vectors)


def named_pairs(pairs: IndexPairs) -> list[tuple[str, str]]:
    return [(pair.left, pairs.documents.ids[pair.right_id]) for pair in pairs]


ROWS = [("how", "10"), ("why", "d two"), ("how", "15"), ("how", "10")]
EXPECTED = [("how", "10"), ("why", "d two"), ("how", "15")]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_rows_of_a_table_are_pairs(tmp_path: Path, documents: Embeddings, suffix: str) -> None:
    """Several rows of a query are several positives, a repeated row is one pair, all documents are
    right items."""
    frame = pandas.DataFrame(ROWS, columns=["query", "doc_id"])
    path = tmp_path / f"clicks.{suffix}"
    if suffix == "parquet":
        frame.to_parquet(path)
    elif suffix == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, sep="\t" if suffix == "tsv" else ",", index=False)
    pairs = IndexPairs(path, documents)
    assert named_pairs(pairs) == EXPECTED
    assert (pairs.num_left, pairs.num_right) == (2, 6)
    np.testing.assert_array_equal(pairs.positives("left", np.array([0, 1])), [[0, 5], [2, -1]])
    np.testing.assert_array_equal(pairs[1].right, documents.vectors[2])


def test_clicks_on_documents_without_a_direction_are_bad_rows(
    tmp_path: Path, documents: Embeddings
) -> None:
    pandas.DataFrame(ROWS, columns=["query", "doc_id"]).to_csv(tmp_path / "clicks.csv", index=False)
    vectors = np.array(documents.vectors)
    vectors[documents.ids.index("15")] = 0
    pairs = IndexPairs(tmp_path / "clicks.csv", Embeddings(documents.ids, vectors))
    assert named_pairs(pairs) == [pair for pair in EXPECTED if pair[1] != "15"]
    assert pairs.skipped == 1


def test_numbers_are_ids(tmp_path: Path, documents: Embeddings) -> None:
    """pandas writes ids beside missing ones as 10.0; whole numbers of any column type are ids."""
    frame = pandas.DataFrame({"question": ["a", "b", "c"], "document_id": [10, None, 13]})
    frame.to_csv(tmp_path / "clicks.csv", index=False)
    frame.to_parquet(tmp_path / "clicks.parquet")
    for name in ("clicks.csv", "clicks.parquet"):
        pairs = IndexPairs(tmp_path / name, documents)
        assert named_pairs(pairs) == [("a", "10"), ("c", "13")]
        assert pairs.skipped == 1


def test_lists_of_ids(tmp_path: Path, documents: Embeddings) -> None:
    """A row may name several documents; unknown ones and rows without any are counted."""
    rows = [
        {"query": "a", "positives": [10, 15]},
        {"query": "b", "positives": []},
        {"query": "c", "positives": [99]},
    ]
    path = tmp_path / "clicks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    pairs = IndexPairs(path, documents)
    assert named_pairs(pairs) == [("a", "10"), ("a", "15")]
    assert pairs.skipped == 2


def test_queries_that_are_vectors(tmp_path: Path, documents: Embeddings) -> None:
    """Equal vectors are one query."""
    vectors = [[1.0, 2.0], [0.5, 0.0], [1.0, 2.0]]
    table = pa.table(
        {"vector": pa.array(vectors, pa.list_(pa.float32())), "document": ["10", "11", "13"]}
    )
    pq.write_table(table, tmp_path / "clicks.parquet")
    pairs = IndexPairs(tmp_path / "clicks.parquet", documents)
    assert (pairs.left_modality, pairs.left_dim, pairs.right_dim, pairs.num_left) == (
        "vector",
        2,
        6,
        2,
    )
    assert pairs.left_id.tolist() == [0, 1, 0]


def test_a_beir_folder(tmp_path: Path, documents: Embeddings) -> None:
    """queries.jsonl and judgements of grade 1 or more; no corpus is needed."""
    (tmp_path / "qrels").mkdir()
    (tmp_path / "queries.jsonl").write_text(
        '{"_id": "q1", "text": "how"}\n{"_id": "q2", "text": "why"}\n'
    )
    judgements = (
        "query-id\tcorpus-id\tscore\nq1\t10\t1\nq1\t11\t0\nq2\t15\t2\nq2\tgone\t1\nq3\t10\t1\n"
    )
    (tmp_path / "qrels" / "train.tsv").write_text(judgements)
    pairs = IndexPairs(tmp_path, documents)
    assert named_pairs(pairs) == [("how", "10"), ("why", "15")]
    assert pairs.skipped == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("query,doc_id\na,x\nb,y\n", "doc_id"),
        ("query,clicked_at\na,10\n", "document_column"),
        ("clicked,doc_id\na,10\n", "query_column"),
        ("query,doc_id\n,10\n", "query"),
    ],
)
def test_refusals_name_the_column(
    tmp_path: Path, documents: Embeddings, text: str, named: str
) -> None:
    (tmp_path / "clicks.csv").write_text(text)
    with pytest.raises(DualencError, match=named):
        IndexPairs(tmp_path / "clicks.csv", documents)
