from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import BeirPairs, read_beir
from dualenc.data.beir import read_qrels
from dualenc.errors import BadSample, DualencError

from .make import write_beir, write_jsonl

DOCUMENTS = [{"_id": f"d{i}", "title": "T" if i % 2 else "", "text": f"text {i}"} for i in range(4)]
QUERIES = [{"_id": f"q{i}", "text": f"query {i}", "metadata": {}} for i in range(3)]
QRELS = {"train": [("q2", "d3", 1), ("q0", "d3", 2), ("q0", "d1", 1), ("q0", "d0", 0)], "test": [("q1", "d0", 1)]}


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


def test_titles_and_grades_can_be_set(folder: Path) -> None:
    assert [p.right for p in BeirPairs(folder, titles=False, min_grade=2)] == ["text 3"]


def test_grades_as_weights_are_one_on_average(tmp_path: Path) -> None:
    lines = [{"_id": f"x{i}", "text": f"text {i}"} for i in range(4)]
    for name in ("corpus", "queries"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "qrels").mkdir()
    judged = [("x0", "x1", 1), ("x0", "x2", 3), ("x1", "x3", 2), ("x2", "x0", 0)]
    (tmp_path / "qrels" / "train.tsv").write_text("".join(f"{q}\t{d}\t{grade}\n" for q, d, grade in judged))
    assert BeirPairs(tmp_path).weights is None
    assert [pair.weight for pair in BeirPairs(tmp_path, weigh_grades=True)] == [0.5, 1.5, 1.0]
    with pytest.raises(DualencError, match="a weight is not below 0; give min_grade 1"):
        BeirPairs(tmp_path, weigh_grades=True, min_grade=0)


def test_read_beir_gives_queries_of_the_split_and_all_judgements(folder: Path) -> None:
    queries, corpus, qrels = read_beir(folder, "train")
    assert (queries.ids, [queries[i] for i in range(2)]) == (["q0", "q2"], ["query 0", "query 2"])
    assert (corpus.ids, corpus[3], corpus.text(3)) == (["d0", "d1", "d2", "d3"], "T text 3", "T text 3")
    assert qrels == {"q2": {"d3": 1}, "q0": {"d3": 2, "d1": 1, "d0": 0}}


def test_compressed_files_and_numbers_as_ids(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "x", [{"_id": 1, "text": "a"}], [{"_id": 7, "text": "q"}], {"test": [(7, 1, 1)]})
    for part in ("corpus", "queries"):
        file = folder / f"{part}.jsonl"
        (folder / f"{part}.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert read_beir(folder).qrels == {"7": {"1": 1}}


def test_qrels_without_a_header(folder: Path) -> None:
    (folder / "qrels" / "bare.tsv").write_text("q0\td0\t1\r\nq1\td1\t1\r\n")
    assert read_beir(folder, "bare").qrels == {"q0": {"d0": 1}, "q1": {"d1": 1}}


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 2)), max_size=20, unique_by=lambda t: t[:2])
)
def test_any_judgements_against_a_loop(tmp_path_factory: pytest.TempPathFactory, links: list) -> None:
    rows = [(f"q{q}", f"d{d}", grade) for q, d, grade in links]
    folder = write_beir(tmp_path_factory.mktemp("b") / "x", DOCUMENTS, QUERIES, {"train": rows})
    known = [(q, d) for q, d, grade in links if q < 3 and d < 4 and grade > 0]
    if not known:
        with pytest.raises(DualencError, match="no usable pair"):
            BeirPairs(folder)
        return
    pairs = BeirPairs(folder)
    assert [(p.left, p.right_id) for p in pairs] == [(f"query {q}", d) for q, d in known]
    assert pairs.skipped == sum(grade > 0 for _, _, grade in links) - len(known)


def test_a_missing_split_lists_the_splits_there_are(folder: Path) -> None:
    for read in (BeirPairs, read_beir):
        with pytest.raises(DualencError, match="no split 'dev'; there are: test, train"):
            read(folder, "dev")


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DualencError, match="no such folder"):
        read_beir(tmp_path / "nowhere")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DualencError, match=r"no queries\.jsonl in it"):
        read_beir(folder)


BROKEN = [
    ("corpus.jsonl", json.dumps({"_id": "x", "title": " ", "text": ""}), "corpus.jsonl:5: no text in column 'text'"),
    ("corpus.jsonl", json.dumps({"_id": "d1", "text": "again"}), "corpus.jsonl:5: document with an id used before"),
    ("corpus.jsonl", json.dumps({"text": "nameless"}), "corpus.jsonl:5: document without an id"),
    ("corpus.jsonl", '{"_id": "x", ', "corpus.jsonl:5: malformed JSON line"),
    ("queries.jsonl", json.dumps({"_id": "x", "text": ""}), "queries.jsonl:4: no text in column 'text'"),
    ("qrels/train.tsv", "q0\tnone\t1", "train.tsv:6: judgement of an unknown document"),
    ("qrels/train.tsv", "none\td0\t1", "train.tsv:6: judgement of an unknown query"),
    ("qrels/train.tsv", "q0\td3\t1", "train.tsv:6: pair judged twice"),
    ("qrels/train.tsv", "q1 d1 1", "train.tsv:6: malformed judgement"),
    ("qrels/train.tsv", "q1\td1\tyes", "train.tsv:6: malformed judgement"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "line", "message"), BROKEN)
def test_a_bad_line_is_named_or_skipped(folder: Path, file: str, line: str, message: str) -> None:
    good = list(BeirPairs(folder))
    with open(folder / file, "a") as stream:
        stream.write(line + "\n")
    with pytest.raises(BadSample) as error:
        BeirPairs(folder, on_error="raise")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    pairs = BeirPairs(folder)
    assert list(pairs) == good
    assert pairs.skipped == 1
    assert read_beir(folder, "train").corpus.skipped == 1


def test_a_judged_document_that_is_missing_still_counts_as_relevant(folder: Path) -> None:
    write_jsonl(folder / "corpus.jsonl", DOCUMENTS[1:])
    found = read_beir(folder, "test")
    assert found.qrels == {"q1": {"d0": 1}}
    assert found.corpus.ids == ["d1", "d2", "d3"]
    assert found.corpus.skipped == 1
    with pytest.raises(BadSample, match="'d0' is missing"):
        read_beir(folder, "test", on_error="raise")


@pytest.mark.slow
def test_scifact(shared_data: Path) -> None:
    pairs = BeirPairs(shared_data / "scifact", on_error="raise")
    assert (len(pairs), pairs.num_left, pairs.num_right) == (919, 809, 5183)
    queries, corpus, qrels = read_beir(shared_data / "scifact", on_error="raise")
    assert (len(queries), len(corpus), sum(map(len, qrels.values()))) == (300, 5183, 339)


def test_cranfield_has_two_empty_documents(shared_data: Path) -> None:
    assert read_beir(shared_data / "cranfield").corpus.skipped == 3  # and one judgement of one of them


def judged(folder: Path, lines: bytes) -> Path:
    """A BEIR folder of one query and two documents with these judgements."""
    write_beir(folder, [{"_id": i, "text": i} for i in "ab"], [{"_id": "q", "text": "x"}], {"test": []})
    (folder / "qrels" / "test.tsv").write_bytes(b"query-id\tcorpus-id\tscore\r\n" + lines)
    return folder


@pytest.mark.parametrize("grade", ["1" + "0" * 23, "9" * 5000, "nan", "1.5", "-", "", "1e3", "\u00b2"])
def test_grades_that_are_no_whole_numbers_are_named(tmp_path: Path, grade: str) -> None:
    folder = judged(tmp_path / "x", f"q\ta\t1\nq\tb\t{grade}\n".encode())
    assert read_beir(folder).qrels == {"q": {"a": 1}}
    with pytest.raises(BadSample, match=r"test\.tsv:3: malformed judgement; write .* a whole score"):
        read_beir(folder, on_error="raise")


def test_negative_grades_are_not_relevant_as_in_trec_eval(tmp_path: Path) -> None:
    folder = judged(tmp_path / "x", b"q\ta\t1\nq\tb\t-2\n")
    assert read_beir(folder, on_error="raise").qrels == {"q": {"a": 1, "b": -2}}
    assert len(BeirPairs(folder, "test")) == 1


def test_judgements_that_are_not_utf8_are_named_or_left_out(tmp_path: Path) -> None:
    folder = judged(tmp_path / "x", b"q\ta\t1\nq\tb\xe9\t1\n")
    assert read_beir(folder).qrels == {"q": {"a": 1}}
    with pytest.raises(BadSample, match=r"test\.tsv:3: line that is not UTF-8"):
        read_beir(folder, on_error="raise")


@pytest.mark.parametrize(
    "text", ["query-id\tcorpus-id\tscore\nq\td e\t2\nq\tf\t0.0\n", "q 0 d 2\nq\t0\te\t0\n", "q\td\t2\n\nq\te\t0\n"]
)
def test_qrels_of_beir_and_trec(text: str, tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text(text)
    assert [list(grades.values()) for grades in read_qrels(tmp_path / "qrels").values()] == [[2, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"query-id\tcorpus-id\tscore\n", "no usable judgement: it is empty"),
        (b"q\td\t1\nq\te\thigh\n", "1 malformed judgement .first: .*qrels:2."),
        (b"q 0 d 0.5\n", "malformed judgement .first: .*qrels:1."),
        (b"q 0 d 1048577\nq 0 d 100000000000000000000000\nq 0 d inf\n", "3 malformed judgement .first: .*qrels:1."),
        (b"q 0 d 1\nq 0 d 2\n", "pair judged twice .first: .*qrels:2."),
        (b"q\td\t1\nq\t\xff\t1\n", "line that is not UTF-8 text .first: .*qrels:2."),
    ],
)
def test_qrels_of_which_a_line_is_broken_are_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "qrels").write_bytes(text)
    with pytest.raises(DualencError, match=message) as caught:
        read_qrels(tmp_path / "qrels")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make", [None, Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["none", "dir", "pipe", "dev"]
)
def test_qrels_that_are_no_regular_file(tmp_path: Path, make: Callable[[Path], None] | None) -> None:
    if make is not None:
        make(tmp_path / "qrels")
    with pytest.raises(DualencError, match=r"No such file|not a file; give a regular file"):
        read_qrels(tmp_path / "qrels")


def test_judgements_that_are_no_file_are_told(tmp_path: Path) -> None:
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        folder = judged(tmp_path / str(number), b"q\ta\t1\n")
        (folder / "qrels" / "test.tsv").unlink()
        make(folder / "qrels" / "test.tsv")
        with pytest.raises(DualencError, match=r"test\.tsv: not a file"):
            read_beir(folder)
