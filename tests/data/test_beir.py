from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.data import BeirPairs, IndexPairs, read_beir
from dualenc.data.corpus import held_out
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import write_beir, write_jsonl

DOCUMENTS = [{"_id": f"d{i}", "title": "T" if i % 2 else "", "text": f"text {i}"} for i in range(4)]
QUERIES = [{"_id": f"q{i}", "text": f"query {i}", "metadata": {}} for i in range(3)]
QRELS = {
    "train": [("q2", "d3", 1), ("q0", "d3", 2), ("q0", "d1", 1), ("q0", "d0", 0)],
    "test": [("q1", "d0", 1)],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "beir", DOCUMENTS, QUERIES, QRELS)


def test_pairs_are_the_relevant_judgements_and_the_corpus_is_whole(folder: Path) -> None:
    pairs = BeirPairs(folder)
    assert [(p.left, p.right) for p in pairs] == [
        ("query 2", "T text 3"),
        ("query 0", "T text 3"),
        ("query 0", "T text 1"),
    ]
    assert (pairs.num_left, pairs.num_right) == (2, 4)
    assert pairs.right_id.tolist() == [3, 3, 1]  # positions in corpus.jsonl
    assert pairs.item("right", 2) == "text 2"  # judged by nobody, a candidate all the same
    assert (pairs.queries.ids, pairs.corpus.ids) == (["q0", "q2"], ["d0", "d1", "d2", "d3"])
    assert pairs.positives("left", np.array([0])).tolist() == [[1, 3]]
    assert pairs.positives("right", np.array([3, 0])).tolist() == [[0, 1], [-1, -1]]


def test_documents_of_equal_texts_are_no_negatives(tmp_path: Path) -> None:
    """Under several ids, each of which is judged; ids decide where a collection is evaluated."""
    documents = [
        {"_id": name, "text": text} for name, text in zip("abc", ["same", "same", "other"])
    ]
    queries = [{"_id": name, "text": name.strip("2")} for name in ("q", "r", "q2")]
    qrels = [["q", "a", 1], ["r", "b", 1], ["q2", "c", 1]]
    folder = write_beir(tmp_path / "x", documents, queries, {"train": qrels})
    pairs = BeirPairs(folder)
    assert (pairs.num_left, pairs.num_right, len(pairs)) == (3, 3, 3)
    listed = [set(row) - {-1} for row in pairs.not_negatives("left", np.arange(3)).tolist()]
    assert listed == [{0, 1, 2}, {0, 1}, {0, 1, 2}]
    assert read_beir(folder, "train").qrels == {"q": {"a": 1}, "r": {"b": 1}, "q2": {"c": 1}}
    assert held_out(pairs).qrels["left-0"] == {"right-0": 1}
    vectors = Embeddings(["a", "b", "c"], np.eye(3, dtype=np.float32))
    clicks = IndexPairs(folder, vectors)
    assert (clicks.num_left, clicks.left_id.tolist()) == (2, [0, 1, 0])


def test_titles_grades_and_weights(folder: Path) -> None:
    assert [p.right for p in BeirPairs(folder, titles=False)] == ["text 3", "text 3", "text 1"]
    assert BeirPairs(folder).weights is None
    # The mean grade of 1, 2 and 1 is 4/3.
    assert [pair.weight for pair in BeirPairs(folder, weigh_grades=True)] == pytest.approx(
        [0.75, 1.5, 0.75]
    )
    (folder / "qrels" / "none.tsv").write_text("q0\td3\t0\n")
    with pytest.raises(DualencError, match="judge a document of the corpus with grade 1 or more"):
        BeirPairs(folder, "none")


def test_read_beir_gives_queries_of_the_split_and_all_judgements(folder: Path) -> None:
    queries, corpus, qrels = read_beir(folder, "train")
    assert (queries.ids, [queries[i] for i in range(2)]) == (["q0", "q2"], ["query 0", "query 2"])
    assert (corpus.ids, corpus[3], corpus.text(3)) == (
        ["d0", "d1", "d2", "d3"],
        "T text 3",
        "T text 3",
    )
    assert qrels == {"q2": {"d3": 1}, "q0": {"d3": 2, "d1": 1, "d0": 0}}


def test_compressed_files_numbers_as_ids_and_qrels_without_a_header(tmp_path: Path) -> None:
    folder = write_beir(
        tmp_path / "x", [{"_id": 1, "text": "a"}], [{"_id": 7, "text": "q"}], {"test": [(7, 1, 1)]}
    )
    for part in ("corpus", "queries"):
        file = folder / f"{part}.jsonl"
        (folder / f"{part}.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    (folder / "qrels" / "bare.tsv").write_text("7\t1\t1\r\n")
    assert read_beir(folder).qrels == read_beir(folder, "bare").qrels == {"7": {"1": 1}}


def test_missing_splits_and_files_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DualencError, match="no split 'dev'; there are: test, train"):
        read_beir(folder, "dev")
    with pytest.raises(DualencError, match="no such folder"):
        read_beir(tmp_path / "nowhere")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DualencError, match=r"no queries\.jsonl in this folder"):
        read_beir(folder)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (
            "corpus.jsonl",
            json.dumps({"_id": "x", "title": " ", "text": ""}),
            "corpus.jsonl:5: no text in column",
        ),
        (
            "corpus.jsonl",
            json.dumps({"_id": "d1", "text": "x"}),
            "corpus.jsonl:5: text with an id used before",
        ),
        ("corpus.jsonl", json.dumps({"text": "nameless"}), "corpus.jsonl:5: text without an id"),
        ("corpus.jsonl", '{"_id": "x", ', "corpus.jsonl:5: malformed JSON line"),
        (
            "queries.jsonl",
            json.dumps({"_id": "x", "text": ""}),
            "queries.jsonl:4: no text in column",
        ),
        (
            "qrels/train.tsv",
            "q0\tnone\t1",
            "train.tsv:6: judged document that is not in the corpus",
        ),
        ("qrels/train.tsv", "none\td0\t1", "train.tsv:6: judgement of an unknown query"),
        ("qrels/train.tsv", "q0\td3\t1", "train.tsv:6: pair judged twice"),
        ("qrels/train.tsv", "q1 d1 1", "train.tsv:6: malformed judgement"),
        *(
            ("qrels/train.tsv", f"q1\td1\t{grade}", "train.tsv:6: malformed judgement")
            for grade in ("1.5", "", "9" * 30, "\u00b2")
        ),
    ],
)
def test_a_bad_line_is_named_or_skipped(folder: Path, file: str, line: str, message: str) -> None:
    good = list(BeirPairs(folder))
    with open(folder / file, "a") as stream:
        stream.write(line + "\n")
    with pytest.raises(BadSample, match=message):
        BeirPairs(folder, on_error="raise")
    pairs = BeirPairs(folder)
    assert list(pairs) == good
    assert pairs.skipped == 1


def test_judgements_of_missing_documents_and_below_zero_are_those_of_trec_eval(
    folder: Path,
) -> None:
    write_jsonl(folder / "corpus.jsonl", DOCUMENTS[1:])
    (folder / "qrels" / "test.tsv").write_text("q1\td0\t1\nq1\td1\t-2\n")
    _, corpus, qrels = read_beir(folder, "test")
    assert (qrels, corpus.ids, corpus.skipped) == (
        {"q1": {"d0": 1, "d1": -2}},
        ["d1", "d2", "d3"],
        1,
    )


@pytest.mark.parametrize(
    "text",
    [
        "query-id\tcorpus-id\tscore\nq1\td e\t2\nq1\tf\t0.0\n",
        "q1 0 d 2\nq1\t0\te\t0\n",
        "q1\td\t2\n\nq1\te\t0\n",
        "\tquery-id\tcorpus-id\tscore\n0\tq1\td\t2\n1\tq1\te\t0\n",
        "corpus-id\tquery-id\tscore\nd\tq1\t2\ne\tq1\t0\n",
        "\tquery-id\tlabel\tcorpus-id\n0\tq1\t2\td\n1\tq1\t0\te\n",
    ],
)
def test_qrels_of_beir_trec_and_pandas(text: str, folder: Path) -> None:
    (folder / "qrels" / "test.tsv").write_text(text)
    assert set(read_beir(folder).qrels) == {"q1"}
    assert [list(grades.values()) for grades in read_beir(folder).qrels.values()] == [[2, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"query-id\tcorpus-id\tscore\n", "no usable judgement: it is empty"),
        (b"q1\td1\thigh\n", "no usable judgement: 1 malformed judgement .first: .*test.tsv:1."),
    ],
)
def test_qrels_without_a_judgement_are_refused(folder: Path, text: bytes, message: str) -> None:
    (folder / "qrels" / "test.tsv").write_bytes(text)
    with pytest.raises(DualencError, match=message):
        read_beir(folder)
