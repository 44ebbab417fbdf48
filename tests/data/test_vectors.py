"""Vectors from folders of embeddings, .npy files and tables: values, ids, pairs, and what bad ones do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
    for pairs in (VectorPairs(path, left_column="q", right_column="d"), open_pairs(path, "q", "d")):
        assert (len(pairs), pairs.num_left, pairs.num_right) == (N, N - 1, N)
        assert (pairs.left_dim, pairs.right_dim) == (D, D)
        assert pairs.left_id[2] == pairs.left_id[3]
        np.testing.assert_array_equal(pairs[5].left, LEFT[5])
        np.testing.assert_array_equal(pairs[5].right, RIGHT[5])
    assert open_pairs(path, "q", "d", deduplicate=False).num_left == N


def in_lists(letter: str, vectors: np.ndarray) -> list[dict[str, Any]]:
    """Rows of one query, two documents of which neighbours share one, and negatives; some of them none."""
    return [
        {
            "q": vectors[row].tolist(),
            "d": [(-vectors[row]).tolist(), (-vectors[row + 1]).tolist()],
            letter: [(2 * vectors[(row + step) % N]).tolist() for step in range(2, 2 + row % 3)],
        }
        for row in range(N - 1)
    ]


def write_lists(folder: Path, kind: str, records: list[dict[str, Any]]) -> Path:
    if kind == "saved":
        datasets.Dataset.from_list(records).save_to_disk(folder / "saved")
        return folder / "saved"
    if kind != "fixed":
        return write_table(folder / f"lists.{kind}", records)
    fixed = pa.list_(pa.float32(), D)
    schema = pa.schema([("q", fixed), ("d", pa.list_(fixed, 2)), ("n", pa.list_(fixed))])
    pq.write_table(pa.Table.from_pylist(records, schema), folder / "fixed.parquet")
    return folder / "fixed.parquet"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved", "fixed"])
def test_columns_may_hold_vectors_and_lists_of_them(tmp_path: Path, kind: str) -> None:
    pairs = TablePairs(write_lists(tmp_path, kind, in_lists("n", LEFT)), "q", "d", "n")
    assert (pairs.left_modality, pairs.right_modality) == ("vector", "vector")
    assert (pairs.left_dim, pairs.right_dim, pairs.skipped) == (D, D, 0)
    assert (len(pairs), pairs.num_left) == (2 * N - 2, N - 1)
    for number, pair in enumerate(pairs):
        row, second = divmod(number, 2)
        np.testing.assert_array_equal(pair.left, LEFT[row])
        np.testing.assert_array_equal(pair.right, -LEFT[row + second])
        wanted = [2 * LEFT[(row + step) % N] for step in range(2, 2 + row % 3)]
        assert len(pair.negatives) == len(wanted)
        for found, vector in zip(pair.negatives, wanted):
            np.testing.assert_array_equal(found, vector)
    assert pairs.right_id[1] == pairs.right_id[2], "equal vectors are one item"
    assert len({pairs.item("right", i).tobytes() for i in range(pairs.num_right)}) == pairs.num_right


NUMBER = st.sampled_from([0.0, 1.0, -2.5])
VECTOR = st.one_of(
    st.lists(NUMBER, min_size=2, max_size=2),
    st.none(),
    st.sampled_from([[], [1.0], [1.0, 2.0, 3.0], [float("nan"), 1.0], [None, 1.0], [1.0, float("inf")]]),
)
VECTORS = st.one_of(st.none(), st.lists(VECTOR, max_size=3))
MIXED = st.lists(st.fixed_dictionaries({"q": VECTOR, "d": VECTORS, "n": VECTORS}), max_size=6)


def is_good(vector: Any) -> bool:
    return vector is not None and len(vector) == 2 and None not in vector and 0 < np.abs(vector).sum() < np.inf


@pytest.mark.slow
@given(MIXED, st.sampled_from(["parquet", "jsonl", "saved"]), st.integers(0, 3))
@example([{"q": [None, 1.0], "d": [None], "n": [[], None]}, {"q": None, "d": [], "n": None}], "jsonl", 0)
@example([{"q": [1.0, 1.0], "d": [None, [1.0, None]], "n": []}], "jsonl", 0)
@settings(max_examples=40)
def test_pairs_of_vectors_are_those_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory, mixed: list[dict[str, Any]], kind: str, place: int
) -> None:
    """Among good rows, which say what size is meant, any others."""
    folder = tmp_path_factory.mktemp("mixed")
    solid = [{"q": [1.0, row + 0.5], "d": [[row + 0.5, 1.0]] * 3, "n": [[9.5, row]] * 3} for row in range(8)]
    records = [*solid[:place], *mixed, *solid[place:]]
    good = [row for row in records if is_good(row["q"])]
    positive = {(tuple(row["q"]), tuple(d)) for row in good for d in row["d"] or [] if is_good(d)}
    expected, told = [], len(records) - len(good)
    for row in good:
        right = [d for d in row["d"] or [] if is_good(d)]
        told += max(1, len(row["d"] or [])) - len(right)
        negatives = [n for n in row["n"] or [] if is_good(n)]
        kept = [n for n in negatives if (tuple(row["q"]), tuple(n)) not in positive]
        distinct = [n for place, n in enumerate(kept) if n not in kept[:place]]
        expected += [(row["q"], d, distinct) for d in right]
        told += len(right) * (len(negatives) - len(kept))
    told += sum(not is_good(n) for row in records for n in row["n"] or [])
    pairs = TablePairs(write_lists(folder, kind, records), "q", "d", "n")
    assert [(p.left.tolist(), p.right.tolist(), [n.tolist() for n in p.negatives]) for p in pairs] == expected
    assert pairs.skipped == told
    for side, count in (("left", pairs.num_left), ("right", pairs.num_right)):
        assert len({pairs.item(side, i).tobytes() for i in range(count)}) == count  # type: ignore[arg-type]


@pytest.mark.slow
def test_of_bad_vectors_in_columns_the_rows_are_left_out(tmp_path: Path) -> None:
    """Every kind of fault on every side; a row with a bad left vector is counted once, whatever stands on its right."""
    records = in_lists("n", LEFT)
    good, nan, zero = LEFT[0].tolist(), [float("nan")] * D, [0.0] * D
    records[0]["q"], records[0]["d"] = None, [nan]
    records[1]["q"] = nan
    records[2]["q"] = [1.0, 2.0]
    records[3]["d"] = []
    records[4]["d"] = [zero, None, good, [1.0]]
    records[5]["n"] = [nan, good, [1.0]]
    path = write_table(tmp_path / "lists.parquet", records)
    pairs = TablePairs(path, "q", "d", "n")
    assert pairs.skipped == 3 + 1 + 3 + 2
    rows = [4] + [row for row in range(5, N - 1) for _ in range(2)]
    assert [pair.left.tobytes() for pair in pairs] == [LEFT[row].tobytes() for row in rows]
    np.testing.assert_array_equal(pairs[0].right, LEFT[0])
    assert [vector.tobytes() for vector in pairs[1].negatives] == [LEFT[0].tobytes()]
    other = f"vector of another size than {D}"
    for row, told in ((0, "no vector in column 'q'"), (2, other), (3, "no vector in column 'd'"), (5, other)):
        alone = write_table(tmp_path / "one.parquet", [*records[row : row + 1], *in_lists("n", LEFT)])
        with pytest.raises(BadSample, match=rf"one\.parquet row 0: .*{told}"):
            TablePairs(alone, "q", "d", "n", on_error="raise")


def test_negatives_of_another_size_than_the_documents_are_bad(tmp_path: Path) -> None:
    records = [{"q": [1.0, 0.5], "d": [0.5, 1.0, float(row)], "n": [[1.5, 1.0]] * 3} for row in range(4)]
    pairs = TablePairs(write_table(tmp_path / "x.parquet", records), "q", "d", "n")
    assert (pairs.left_dim, pairs.right_dim, pairs.skipped) == (2, 3, 12)
    assert all(pair.negatives == () for pair in pairs)


def test_the_first_rows_tell_what_lines_hold(tmp_path: Path) -> None:
    records = in_lists("n", LEFT)
    records[0]["q"], records[1]["d"] = None, []
    records[2]["q"], records[3]["d"], records[4]["q"] = "a text", [["a text"]], [1] * D
    path = write_jsonl(tmp_path / "x.jsonl", records)
    assert len(TablePairs(path, "q", "d")) == len(open_pairs(path, "q", "d")) == 2 * (N - 5)
    whole = [{"q": [1, 2], "d": [3, row]} for row in range(3)]
    path = write_jsonl(tmp_path / "whole.jsonl", whole)
    pairs = TablePairs(path, "q", "d", left_modality="vector", right_modality="vector")
    assert [pair.right.tolist() for pair in pairs] == [[3, 0], [3, 1], [3, 2]], "numbers without a point are told"


def test_mined_negatives_may_be_vectors(tmp_path: Path) -> None:
    records = [{"query": r["q"], "pos": r["d"], "neg": r["n"]} for r in in_lists("n", LEFT)]
    path = write_jsonl(tmp_path / "mined.jsonl", records)
    table = TablePairs(write_table(tmp_path / "x.parquet", in_lists("n", LEFT)), "q", "d", "n", max_negatives=1)
    for pairs in (MinedPairs(path, max_negatives=1), open_pairs(path)):
        assert isinstance(pairs, MinedPairs)
        assert {k: v for k, v in pairs.identities().items() if k.startswith("left")} == {
            "left_items": table.identities()["left_items"]
        }
    assert MinedPairs(path, max_negatives=1).identity() == table.identity()


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


@pytest.mark.parametrize("kind", ["folder", "parquet", "vector", "embedding"])
def test_a_beir_folder_may_hold_vectors(tmp_path: Path, kind: str) -> None:
    for part, vectors in (("queries", LEFT), ("corpus", RIGHT)):
        if kind == "folder":
            write_embeddings(tmp_path / part, NAMES, vectors)
        else:
            field, end = ("vector", "parquet") if kind == "parquet" else (kind, "jsonl")
            write_table(tmp_path / f"{part}.{end}", [{"_id": n, field: v.tolist()} for n, v in zip(NAMES, vectors)])
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


def test_lines_of_a_beir_folder_with_bad_vectors_are_left_out(tmp_path: Path) -> None:
    """Whole numbers are vectors too, gzip is undone, and titles do not matter."""
    documents = [{"_id": f"d{row}", "title": "", "embedding": [row, 1]} for row in range(4)]
    documents[1]["embedding"], documents[2]["embedding"] = [0, 0], None
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q", "vector": [1, 2, 3]}])
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "train.tsv").write_text("q\td0\t1\nq\td1\t1\nq\td3\t1\n")
    pairs = BeirPairs(tmp_path)
    assert pairs.corpus.ids == ["d0", "d3"]
    assert pairs.skipped == 3, "two vectors and the judgement of one of them"
    assert [(pair.left.tolist(), pair.right.tolist()) for pair in pairs] == [
        ([1, 2, 3], [0, 1]),
        ([1, 2, 3], [3, 1]),
    ]


def test_texts_with_embeddings_beside_them_are_texts(tmp_path: Path) -> None:
    for part in ("corpus", "queries"):
        write_jsonl(tmp_path / f"{part}.jsonl", [{"_id": "a", "text": "a text", "vector": [0.5, 1.5]}])
    assert open_corpus(tmp_path).items[0] == "a text"


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
    np.save(tmp_path / "v.npy", LEFT)
    with pytest.raises(DualencError, match="both sides are the same vectors"):
        VectorPairs(tmp_path / "v.npy")
