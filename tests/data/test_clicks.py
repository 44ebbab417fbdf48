"""Clicks: queries with ids of documents whose vectors are there, and their split by documents."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import IndexPairs, split_by_documents
from dualenc.data.pairs import PairDataset
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


@pytest.mark.parametrize("seed", range(5))
def test_held_out_documents_are_in_no_training_pair(seed: int) -> None:
    """New queries: none of their documents is trained on; known ones: each is; positives stay known
    to all parts."""
    generator = np.random.default_rng(seed)
    left_id = generator.integers(0, 400, 1500)
    right_id = (generator.beta(1, 3, 1500) * 300).astype(int)
    pairs = PairDataset(
        [str(row) for row in range(400)], [str(row) for row in range(300)], left_id, right_id
    )
    parts = split_by_documents(pairs, 0.2, most=30, seed=seed)
    trained = set(parts.train.right_id.tolist())
    documents = defaultdict(set)
    for query, document in zip(left_id.tolist(), right_id.tolist()):
        documents[query].add(document)
    assert parts.new is not None
    assert parts.known is not None
    for query in set(parts.new.left_id.tolist()):
        assert documents[query].isdisjoint(trained)
        assert query not in parts.train.left_id
    for query in set(parts.known.left_id.tolist()):
        assert documents[query] <= trained
        assert query not in parts.train.left_id
    assert len(parts.train) >= 0.6 * len(pairs)
    assert 5 <= len(set(parts.new.left_id.tolist())) <= 30
    for query in set(parts.train.left_id.tolist()):
        listed = parts.train.positives("left", np.array([query]))[0].tolist()
        assert {document for document in listed if document >= 0} == documents[query]


def test_a_document_that_all_click_is_not_held_out() -> None:
    """Holding it out would leave nothing to train on."""
    pairs = PairDataset(
        [str(row) for row in range(50)],
        ["popular", "rare"],
        np.arange(50),
        np.r_[np.zeros(49, int), 1],
    )
    parts = split_by_documents(pairs, 0.1, most=100)
    assert parts.new is not None
    assert parts.new.right_id.tolist() == [1]
    assert len(parts.train) == 48  # and one query of the popular document is held out as known


@pytest.mark.parametrize(("share", "most"), [(2, 10), (float("nan"), 10), (-0.1, 10), (0.1, -1)])
def test_a_split_needs_a_share_and_a_count(share: float, most: int) -> None:
    pairs = PairDataset(["a", "b"], ["c", "d"], [0, 1], [0, 1])
    with pytest.raises(DualencError, match=r"share must be in|most must be 0 or more"):
        split_by_documents(pairs, share, most)
