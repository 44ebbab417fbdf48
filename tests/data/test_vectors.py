"""Vectors from folders of embeddings, .npy files and tables: values, ids, pairs, and what bad ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import BeirPairs, MinedPairs, TablePairs, VectorPairs, open_corpus, open_pairs, read_beir
from dualenc.errors import BadSample, DualencError
from dualenc.search.embeddings import EmbeddingWriter, shard_ranges
from tests.data.make import write_jsonl

N, D = 20, 6
LEFT, RIGHT = (np.random.default_rng(seed).normal(size=(N, D)).astype(np.float32) for seed in (0, 1))
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
def test_every_source_gives_the_same_vectors_and_the_same_identity(tmp_path: Path, kind: str) -> None:
    path, ids = write_source(tmp_path, kind)
    corpus = open_corpus(path, modality="vector")
    assert corpus.modality == "vector"
    assert corpus.ids == ids
    np.testing.assert_array_equal(np.stack([corpus[row] for row in range(N)]), LEFT)
    from dualenc.data import Corpus

    assert corpus.identity() == Corpus(ids, list(LEFT), "vector").identity()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_two_columns_make_pairs_by_row(tmp_path: Path, kind: str) -> None:
    records = [{"q": left.tolist(), "d": right.tolist()} for left, right in zip(LEFT, RIGHT)]
    records[3]["q"] = records[2]["q"]  # two documents of one query
    path = write_table(tmp_path / f"pairs.{kind}", records)
    for pairs in (TablePairs(path, "q", "d"), open_pairs(path, "q", "d")):
        assert (len(pairs), pairs.num_left, pairs.num_right) == (N, N - 1, N)
        assert (pairs.left_dim, pairs.right_dim) == (D, D)
        assert pairs.left_id[2] == pairs.left_id[3]
        np.testing.assert_array_equal(pairs[5].left, LEFT[5])
        np.testing.assert_array_equal(pairs[5].right, RIGHT[5])
    assert open_pairs(path, "q", "d", deduplicate=False).num_left == N


def test_negatives_of_another_size_than_the_documents_are_bad(tmp_path: Path) -> None:
    records = [{"q": [1.0, 0.5], "d": [0.5, 1.0, float(row)], "n": [1.5, 1.0]} for row in range(4)]
    pairs = TablePairs(write_table(tmp_path / "x.parquet", records), "q", "d", "n")
    assert (pairs.left_dim, pairs.right_dim, pairs.skipped) == (2, 3, 4)
    assert all(pair.negatives == () for pair in pairs)


def mined_texts(ids: bool) -> list[dict[str, Any]]:
    """Tevatron's lines, or those of FlagEmbedding with ids for texts."""
    mined = [(f"n{row}", [f"n{row}", f"n{row + 1}"], [f"n{(5 * row + 3) % N}", "n0"]) for row in range(0, N - 1, 2)]
    if ids:
        return [{"query": query, "pos": pos, "neg": neg} for query, pos, neg in mined]

    def passages(names: list[str]) -> list[dict[str, str]]:
        return [{"docid": name, "title": "", "text": f"text of {name}"} for name in names]

    return [
        {
            "query_id": query,
            "query": f"text of {query}",
            "positive_passages": passages(pos),
            "negative_passages": passages(neg),
        }
        for query, pos, neg in mined
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "parquet"])
@pytest.mark.parametrize("ids", [False, True], ids=["tevatron", "ids"])
def test_mined_negatives_may_name_vectors(tmp_path: Path, kind: str, ids: bool) -> None:
    """The pairs are those of the texts, item for item."""
    queries, _ = write_source(tmp_path, kind)
    documents = write_embeddings(tmp_path / "documents", NAMES, RIGHT)
    path = write_jsonl(tmp_path / "mined.jsonl", mined_texts(ids))
    texts = MinedPairs(write_jsonl(tmp_path / "texts.jsonl", mined_texts(False)))
    pairs = MinedPairs(path, queries=queries, documents=documents)
    assert pairs.left_modality == pairs.right_modality == "vector"
    assert pairs.skipped == texts.skipped
    assert len(pairs) == len(texts)
    for found, text in zip(pairs, texts):
        assert (found.left_id, found.right_id, found.negative_ids) == (text.left_id, text.right_id, text.negative_ids)
        named = {side: int(getattr(text, side).removeprefix("text of n")) for side in ("left", "right")}
        np.testing.assert_array_equal(found.left, LEFT[named["left"]])
        np.testing.assert_array_equal(found.right, RIGHT[named["right"]])
        for vector, negative in zip(found.negatives, text.negatives, strict=True):
            np.testing.assert_array_equal(vector, RIGHT[int(negative.removeprefix("text of n"))])


def test_ids_without_a_vector_are_counted(tmp_path: Path) -> None:
    queries, documents = (write_embeddings(tmp_path / part, NAMES[:9], LEFT[:9]) for part in ("queries", "documents"))
    records = [
        {"query": "n1", "pos": ["n2", "lost"], "neg": ["n3", "gone", "n4"]},
        {"query": "away", "pos": ["n5"], "neg": ["n6"]},
    ]
    path = write_jsonl(tmp_path / "mined.jsonl", records)
    pairs = MinedPairs(path, queries=queries, documents=documents)
    assert (len(pairs), pairs.skipped) == (1, 3)
    assert [vector.tobytes() for vector in pairs[0].negatives] == [LEFT[3].tobytes(), LEFT[4].tobytes()]
    with pytest.raises(
        BadSample, match=r"mined\.jsonl:2: id without a vector; column 'query' names what is not embedded"
    ):
        MinedPairs(path, queries=queries, documents=documents, on_error="raise")
    with pytest.raises(DualencError, match="queries and documents are given together"):
        MinedPairs(path, queries=queries)


def test_two_folders_make_pairs_by_id(tmp_path: Path) -> None:
    write_embeddings(tmp_path / "left", NAMES[:15], LEFT[:15])
    write_embeddings(tmp_path / "right", NAMES[:4:-1], RIGHT[:4:-1])
    pairs = VectorPairs(tmp_path / "left", tmp_path / "right")
    assert len(pairs) == 10
    assert pairs.skipped == 10
    for number in range(10):
        np.testing.assert_array_equal(pairs[number].left, LEFT[5 + number])
        np.testing.assert_array_equal(pairs[number].right, RIGHT[5 + number])
    with pytest.raises(BadSample, match="id 'n0': left vector without a partner"):
        VectorPairs(tmp_path / "left", tmp_path / "right", on_error="raise")


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_a_beir_folder_may_hold_vectors(tmp_path: Path, kind: str) -> None:
    for part, vectors in (("queries", LEFT), ("corpus", RIGHT)):
        if kind == "folder":
            write_embeddings(tmp_path / part, NAMES, vectors)
        else:
            write_table(
                tmp_path / f"{part}.parquet", [{"_id": n, "vector": v.tolist()} for n, v in zip(NAMES, vectors)]
            )
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


def test_bad_vectors_are_left_out_and_counted(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"_id": name, "vector": row.tolist()} for name, row in zip(NAMES, LEFT)]
    for row, bad in enumerate((None, [], [1.0], [0.0] * D, [float("nan")] * D, [None] * D, "text", [1e999] * D)):
        records[row]["vector"] = bad
    path = write_jsonl(tmp_path / "v.jsonl", [json.dumps(record) for record in records])
    corpus = open_corpus(path, modality="vector")
    assert corpus.ids == NAMES[8:]
    assert corpus.skipped == 8
    np.testing.assert_array_equal(corpus[0], LEFT[8])


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([float("nan")] * D, "v.jsonl:1: vector that is not finite"),
        ([0.0] * D, "v.jsonl:1: vector of zeros"),
        ([1.0], f"v.jsonl:1: vector of another size than {D}; embed it as the others"),
        (None, "v.jsonl:1: no vector in column 'vector'"),
        ("a text", "v.jsonl:1: value of a wrong type; a str where a list of numbers"),
    ],
    ids=["nan", "zero", "size", "missing", "text"],
)
def test_or_stop_at_the_first(tmp_path: Path, bad: Any, told: str) -> None:
    rows = [bad, *LEFT.tolist()]
    path = write_jsonl(tmp_path / "v.jsonl", [json.dumps({"vector": row}) for row in rows])
    with pytest.raises(BadSample, match=told) as error:
        open_corpus(path, modality="vector", on_error="raise")
    assert "\n" not in str(error.value)


def test_what_holds_no_vectors_is_told_in_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"vector": ["a", "b"]}), tmp_path / "text.parquet")
    np.save(tmp_path / "cube.npy", np.zeros((2, 2, 2)))
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "broken.npy").write_bytes(b"no")
    for name in ("text.parquet", "cube.npy", "pickle.npy", "broken.npy", "none.npy"):
        with pytest.raises(DualencError, match=name) as error:
            open_corpus(tmp_path / name, modality="vector")
        assert "\n" not in str(error.value)
