"""Vectors from folders of embeddings, .npy files and tables: values, ids, pairs, and what bad ones
do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import (
    BeirPairs,
    Corpus,
    MinedPairs,
    TablePairs,
    VectorPairs,
    open_corpus,
    open_pairs,
    read_beir,
)
from dualenc.errors import BadSample, DualencError
from dualenc.search.embed.writer import EmbeddingWriter, shard_ranges
from tests.helpers.make import write_jsonl

N, D = 20, 6
LEFT, RIGHT = (
    np.random.default_rng(seed).normal(size=(N, D)).astype(np.float32) for seed in (0, 1)
)
NAMES = [f"n{row}" for row in range(N)]


def write_embeddings(folder: Path, ids: list[str], vectors: np.ndarray) -> Path:
    writer = EmbeddingWriter(folder, ids, vectors.shape[1], "float32", {})
    for number, rows in enumerate(shard_ranges(len(ids))):
        writer.write(number, vectors[rows.start : rows.stop])
    writer.finish()
    return folder


def write_table(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        return write_jsonl(path, records)
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    return path


def write_source(folder: Path, kind: str) -> tuple[Path, list[str]]:
    """LEFT as a source of some kind, and the ids that it has."""
    if kind == "folder":
        return write_embeddings(folder / "emb", NAMES, LEFT), NAMES
    if kind == "npy":
        np.save(folder / "emb.npy", LEFT)
        return folder / "emb.npy", [str(row) for row in range(N)]
    records = [{"_id": name, "vector": row.tolist()} for name, row in zip(NAMES, LEFT)]
    return write_table(folder / f"emb.{kind}", records), NAMES


@pytest.mark.parametrize("kind", ["folder", "npy", "parquet", "jsonl"])
def test_every_source_gives_the_same_vectors_and_the_same_identity(
    tmp_path: Path, kind: str
) -> None:
    path, ids = write_source(tmp_path, kind)
    corpus = open_corpus(path, modality="vector")
    assert (corpus.modality, corpus.ids) == ("vector", ids)
    np.testing.assert_array_equal(np.stack([corpus[row] for row in range(N)]), LEFT)
    assert corpus.identity() == Corpus(ids, list(LEFT), "vector").identity()


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved", "fixed"])
def test_columns_of_vectors_make_pairs_by_row(tmp_path: Path, kind: str) -> None:
    records = [
        {"q": a.tolist(), "d": b.tolist(), "negative": (-b).tolist()} for a, b in zip(LEFT, RIGHT)
    ]
    records[3]["q"] = records[2]["q"]  # two documents of one query
    records[4]["negative"] = records[4]["d"]  # a positive
    path = tmp_path / f"pairs.{kind}"
    if kind == "saved":
        datasets.Dataset.from_list(records).save_to_disk(path)
    elif kind == "fixed":
        path = path.with_suffix(".parquet")
        schema = pa.schema([(name, pa.list_(pa.float32(), D)) for name in records[0]])
        pq.write_table(pa.Table.from_pylist(records, schema), path)
    else:
        write_table(path, records)
    for pairs in (TablePairs(path, "q", "d"), open_pairs(path, "q", "d")):
        assert (len(pairs), pairs.num_left, pairs.left_dim, pairs.right_dim) == (N, N - 1, D, D)
        assert (pairs.left_modality, pairs.right_modality, pairs.skipped) == ("vector", "vector", 1)
        assert pairs.left_id[2] == pairs.left_id[3]
        np.testing.assert_array_equal(pairs[5].left, LEFT[5])
        np.testing.assert_array_equal(pairs[5].right, RIGHT[5])
        np.testing.assert_array_equal(pairs[5].negatives[0], -RIGHT[5])
        assert pairs[4].negatives == ()
    assert TablePairs(path, "q", "d", deduplicate=False).num_left == N


def test_whole_numbers_are_vectors_where_they_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "whole.jsonl", [{"q": [1, 2], "d": [3, row]} for row in range(3)])
    pairs = TablePairs(path, "q", "d", left_modality="vector", right_modality="vector")
    assert [pair.right.tolist() for pair in pairs] == [[3, 0], [3, 1], [3, 2]]
    assert TablePairs(path, "q", "d", left_modality="vector").right_modality == "text"


def mined(ids: bool) -> list[dict[str, Any]]:
    """Tevatron's lines, or those of FlagEmbedding with ids for texts."""
    rows = [
        (f"n{row}", [f"n{row}", f"n{row + 1}"], [f"n{(5 * row + 3) % N}", "n0"])
        for row in range(0, N - 1, 2)
    ]
    if ids:
        return [{"query": query, "pos": pos, "neg": neg} for query, pos, neg in rows]

    def passages(names: list[str]) -> list[dict[str, str]]:
        return [{"docid": name, "title": "", "text": f"text of {name}"} for name in names]

    return [
        {
            "query_id": query,
            "query": f"text of {query}",
            "positive_passages": passages(pos),
            "negative_passages": passages(neg),
        }
        for query, pos, neg in rows
    ]


@pytest.mark.parametrize("kind", ["folder", "parquet"])
@pytest.mark.parametrize("ids", [False, True], ids=["tevatron", "ids"])
def test_mined_negatives_may_name_vectors(tmp_path: Path, kind: str, ids: bool) -> None:
    """The pairs are those of the texts, item for item."""
    queries, _ = write_source(tmp_path, kind)
    documents = write_embeddings(tmp_path / "documents", NAMES, RIGHT)
    texts = MinedPairs(write_jsonl(tmp_path / "texts.jsonl", mined(False)))
    pairs = MinedPairs(
        write_jsonl(tmp_path / "mined.jsonl", mined(ids)), queries=queries, documents=documents
    )
    assert (pairs.left_modality, pairs.right_modality) == ("vector", "vector")
    assert (len(pairs), pairs.skipped) == (len(texts), texts.skipped)
    for pair, text in zip(pairs, texts):
        assert (pair.left_id, pair.right_id, pair.negative_ids) == (
            text.left_id,
            text.right_id,
            text.negative_ids,
        )
        row = {
            side: int(getattr(text, side).removeprefix("text of n")) for side in ("left", "right")
        }
        np.testing.assert_array_equal(pair.left, LEFT[row["left"]])
        np.testing.assert_array_equal(pair.right, RIGHT[row["right"]])
        for vector, negative in zip(pair.negatives, text.negatives, strict=True):
            np.testing.assert_array_equal(vector, RIGHT[int(negative.removeprefix("text of n"))])


def test_ids_without_a_vector_are_counted(tmp_path: Path) -> None:
    queries, documents = (
        write_embeddings(tmp_path / part, NAMES[:9], LEFT[:9]) for part in ("queries", "documents")
    )
    records = [
        {"query": "n1", "pos": ["n2", "lost"], "neg": ["n3", "gone", "n4"]},
        {"query": "away", "pos": ["n5"], "neg": ["n6"]},
    ]
    path = write_jsonl(tmp_path / "mined.jsonl", records)
    pairs = MinedPairs(path, queries=queries, documents=documents)
    assert (len(pairs), pairs.skipped) == (1, 3)
    assert [vector.tobytes() for vector in pairs[0].negatives] == [
        LEFT[3].tobytes(),
        LEFT[4].tobytes(),
    ]
    with pytest.raises(BadSample, match=r"mined\.jsonl:2: id without a vector; column 'query'"):
        MinedPairs(path, queries=queries, documents=documents, on_error="raise")
    with pytest.raises(DualencError, match="queries and documents must be given together"):
        MinedPairs(path, queries=queries)


def test_two_folders_make_pairs_by_id(tmp_path: Path) -> None:
    write_embeddings(tmp_path / "left", NAMES[:15], LEFT[:15])
    write_embeddings(tmp_path / "right", NAMES[:4:-1], RIGHT[:4:-1])
    pairs = VectorPairs(tmp_path / "left", tmp_path / "right")
    assert (len(pairs), pairs.skipped) == (10, 10)
    for number in range(10):
        np.testing.assert_array_equal(pairs[number].left, LEFT[5 + number])
        np.testing.assert_array_equal(pairs[number].right, RIGHT[5 + number])
    with pytest.raises(BadSample, match="id 'n0': vector without a partner"):
        VectorPairs(tmp_path / "left", tmp_path / "right", on_error="raise")


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_a_beir_folder_may_hold_vectors(tmp_path: Path, kind: str) -> None:
    for part, vectors in (("queries", LEFT), ("corpus", RIGHT)):
        if kind == "folder":
            write_embeddings(tmp_path / part, NAMES, vectors)
        else:
            records = [{"_id": name, "vector": row.tolist()} for name, row in zip(NAMES, vectors)]
            write_table(tmp_path / f"{part}.parquet", records)
    (tmp_path / "qrels").mkdir()
    lines = [f"n{q}\tn{d}\t1" for q, d in ((4, 1), (4, 2), (7, 9))]
    (tmp_path / "qrels" / "train.tsv").write_text("\n".join(lines) + "\n")
    for pairs in (BeirPairs(tmp_path), open_pairs(tmp_path)):
        assert (len(pairs), pairs.num_left, pairs.num_right) == (3, 2, N)
        assert pairs.left_modality == pairs.right_modality == "vector"
        np.testing.assert_array_equal(pairs[2].left, LEFT[7])
        np.testing.assert_array_equal(pairs[2].right, RIGHT[9])
    assert read_beir(tmp_path, "train").corpus.modality == "vector"
    assert len(open_corpus(tmp_path, part="queries")) == N


BAD: list[tuple[Any, str]] = [
    ([float("nan")] * D, "vector that is not finite"),
    ([None] * D, "vector that is not finite"),
    ([1e999] * D, "vector that is not finite"),
    ([0.0] * D, "vector of zeros"),
    (None, "no vector in column 'vector'"),
    ([], "no vector in column 'vector'"),
    ("a text", "value of a wrong type; column 'vector' holds a text where a list of numbers"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_vector_is_named_or_left_out(tmp_path: Path, bad: Any, message: str) -> None:
    records = [
        {"_id": "bad", "vector": bad},
        *({"_id": n, "vector": v.tolist()} for n, v in zip(NAMES, LEFT)),
    ]
    path = write_jsonl(tmp_path / "v.jsonl", [json.dumps(record) for record in records])
    with pytest.raises(BadSample, match=rf"v\.jsonl:1: {message}"):
        open_corpus(path, modality="vector", on_error="raise")
    corpus = open_corpus(path, modality="vector")
    assert (corpus.ids, corpus.skipped) == (NAMES, 1)
    np.testing.assert_array_equal(corpus[0], LEFT[0])


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def test_what_holds_no_vectors_is_refused_and_no_pickle_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"vector": ["a", "b"]}), tmp_path / "text.parquet")
    pq.write_table(pa.table({"vector": [[1.0], [1.0, 2.0]]}), tmp_path / "sizes.parquet")
    np.save(tmp_path / "cube.npy", np.zeros((2, 2, 2)))
    np.save(tmp_path / "pickle.npy", np.array([Bomb(tmp_path / "canary")]), allow_pickle=True)
    (tmp_path / "broken.npy").write_bytes(b"no")
    for name in (
        "text.parquet",
        "sizes.parquet",
        "cube.npy",
        "pickle.npy",
        "broken.npy",
        "none.npy",
    ):
        with pytest.raises(DualencError, match=name):
            open_corpus(tmp_path / name, modality="vector")
    assert not (tmp_path / "canary").exists()


def test_all_of_many_distinct_vectors_are_numbered_apart(tmp_path):
    """Of 2,000 digests several begin with a zero byte."""
    rows = np.random.default_rng(0).normal(size=(2000, 4)).astype(np.float32)
    np.save(tmp_path / "left.npy", rows)
    np.save(tmp_path / "right.npy", -rows)
    pairs = VectorPairs(tmp_path / "left.npy", tmp_path / "right.npy")
    assert pairs.left_id.tolist() == pairs.right_id.tolist() == list(range(2000))
    assert np.array_equal(np.stack([pairs[index].left for index in range(2000)]), rows)
