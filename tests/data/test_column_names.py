"""One list of names for all readers, lists written as texts, and files that were joined as they
were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import BeirPairs, IndexPairs, MinedPairs, TablePairs, open_corpus, open_pairs
from dualenc.data.readers.column_names import IDS
from dualenc.data.readers.written_lists import parse_list
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import write_csv, write_jsonl


@pytest.mark.parametrize("name", [*IDS, "ID", "docId", "Product ID", "corpus-id"])
def test_an_index_and_its_clicks_know_the_same_ids(tmp_path: Path, name: str) -> None:
    path = write_csv(tmp_path / "x.csv", [name, "text"], [["b", "one"], ["a", "two"]])
    documents = open_corpus(path)
    assert documents.ids == ["b", "a"]
    vectors = Embeddings(documents.ids, np.eye(2, dtype=np.float32))
    clicks = write_csv(tmp_path / "clicks.csv", ["question", name], [["q", "a"], ["r", "b"]])
    assert IndexPairs(clicks, vectors).right_id.tolist() == [1, 0]
    lists = write_jsonl(tmp_path / "x.jsonl", [{name: "b", "vector": [0.5, 1.0]}])
    assert open_corpus(lists, modality="vector").ids == ["b"]


def test_beir_folders_and_passages_have_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    write_jsonl(tmp_path / "corpus.jsonl", [{"doc_id": "d", "text": "x"}])
    write_jsonl(tmp_path / "queries.jsonl", [{"query_id": "q", "text": "y"}])
    (tmp_path / "qrels" / "train.tsv").write_text("doc_id\tqid\tlabel\nd\tq\t1\n")
    pairs = BeirPairs(tmp_path)
    assert (pairs.queries.ids, pairs.corpus.ids, len(pairs)) == (["q"], ["d"], 1)


def test_row_numbers_are_no_ids_beside_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[number, f"p{number}", "x"] for number in range(3)]
    path = write_csv(tmp_path / "x.csv", ["id", "product_id", "text"], rows)
    assert open_corpus(path).ids == ["p0", "p1", "p2"]
    assert "column 'product_id' is read as ids, since 'id' numbers the rows" in caplog.text
    assert open_corpus(path, id_column="id").ids == ["0", "1", "2"]
    assert open_corpus(write_csv(path, ["id", "text"], [row[::2] for row in rows])).ids == [
        "0",
        "1",
        "2",
    ]


def test_ids_of_something_else_are_not_guessed(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "x.csv",
        ["product_id", "text"],
        [[number % 3, f"t{number}"] for number in range(30)],
    )
    with pytest.raises(
        DualencError, match=r"'product_id' repeats its values.*none numbers the rows"
    ):
        open_corpus(path)
    assert len(open_corpus(path, id_column="none")) == 30
    assert open_corpus(path, id_column="product_id").ids == ["0", "1", "2"]


def test_queries_do_not_have_the_ids_of_documents(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "x.csv", ["query_id", "query", "doc_id", "document"], [["q", "a", "d", "b"]]
    )
    assert open_corpus(path).ids == ["d"]
    assert open_corpus(path, part="queries").ids == ["q"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("['p1', \"it's\"]", ["p1", "it's"]),
        ('["a", "b"]', ["a", "b"]),
        ("['a' 'b c'\n 'd']", ["a", "b c", "d"]),
        ("[0.1 0.2\n 1.]", [0.1, 0.2, 1.0]),
        ("[1, 2]", [1, 2]),
        ("[0.1, NaN]", [0.1, None]),
        ("[]", []),
        ("[1, 'a']", None),
        ("[CLS] a", None),
        ("[[1]]", None),
        ("[0.1 ... 0.3]", None),
        ("[__import__('os').getcwd()]", None),
        ("[" * 9999 + "]" * 9999, None),
        ("[" + "-" * 99999 + "1]", None),
    ],
)
def test_lists_that_are_written_as_texts(text: str, values: list | None) -> None:
    assert parse_list(text) == values


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet"])
def test_lists_of_pandas_are_lists(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    frame = pd.DataFrame({"query": ["q", "r"], "pos": [["p", "p2"], ["s"]], "neg": [["n"], []]})
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        frame.astype(str).to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="," if form == "csv" else "\t")
    for pairs in (open_pairs(path), TablePairs(path, "query", "pos", "neg")):
        assert [(p.left, p.right, p.negatives) for p in pairs] == [
            ("q", "p", ("n",)),
            ("q", "p2", ("n",)),
            ("r", "s", ()),
        ]
        assert pairs.skipped == 0
    assert "column 'pos' is parsed as lists written as texts" in caplog.text
    with pytest.raises(DualencError, match="left column holds lists"):
        TablePairs(path, "pos", "query")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_vectors_that_are_written_as_texts(tmp_path: Path, form: str) -> None:
    frame = pd.DataFrame(
        {"query": ["[0.5, 1.0]", "[0 1]"], "embedding": ["[0.25 1. ]", "[2, 1]"], "id": ["a", "b"]}
    )
    path = tmp_path / f"x.{form}"
    frame.to_parquet(path) if form == "parquet" else frame.to_csv(path)
    pairs = TablePairs(path, "query", "embedding")
    assert (pairs.left_modality, pairs.right_modality) == ("vector", "vector")
    assert [pair.left.tolist() for pair in pairs] == [[0.5, 1.0], [0.0, 1.0]]
    corpus = open_corpus(path, modality="vector")
    assert (corpus.ids, corpus[0].tolist()) == (["a", "b"], [0.25, 1.0])


def test_a_text_in_brackets_among_others_is_a_text(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", ["query", "text"], [["q", "['a']"], ["r", "plain"]])
    assert [pair.right for pair in open_pairs(path)] == ["['a']", "plain"]


def test_sentiments_are_no_mined_negatives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[f"q{i}", f"a{i}", 0.1, 0.2, 0.7] for i in range(3)]
    path = write_csv(tmp_path / "x.csv", ["question", "answer", "neg", "neu", "pos"], rows)
    pairs = open_pairs(path)
    assert (type(pairs), pairs.negatives, pairs[0].right) == (TablePairs, None, "a0")
    assert "column 'neg' holds numbers and is not read as mined negatives" in caplog.text


@pytest.mark.parametrize("header", [["query", "document"], ["document", "query"]])
def test_a_header_inside_a_file_is_no_pair(tmp_path: Path, header: list[str]) -> None:
    row = {"query": "c", "document": "d"}
    rows = [["a", "b"], header, [row[name] for name in header]]
    path = write_csv(tmp_path / "x.csv", ["query", "document"], rows)
    pairs = open_pairs(path)
    assert ([(p.left, p.right) for p in pairs], pairs.skipped) == ([("a", "b"), ("c", "d")], 1)
    with pytest.raises(BadSample, match=r"x\.csv:3: header inside the file"):
        open_pairs(path, on_error="raise")


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_an_empty_cell_of_negatives_is_no_bad_sample(tmp_path: Path, form: str) -> None:
    frame = pd.DataFrame({"query": ["a", "b"], "positive": ["c", "d"], "negative": ["n", None]})
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        frame.to_parquet(path)
    elif form == "jsonl":
        frame.fillna("").to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path)
    pairs = TablePairs(path, "query", "positive", on_error="raise")
    assert [pair.negatives for pair in pairs] == [("n",), ()]
    assert pairs.skipped == 0


def test_nested_passages_in_parquet(tmp_path: Path) -> None:
    """As Tevatron's data sets are stored."""
    passage = [[{"docid": name, "title": "t", "text": name}] for name in "pn"]
    row: dict[str, Any] = {
        "query_id": "1",
        "query": "q",
        "positive_passages": passage[0],
        "negative_passages": passage[1],
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    for pairs in (open_pairs(tmp_path / "x.parquet"), MinedPairs(tmp_path / "x.parquet")):
        assert [(p.left, p.right, p.negatives) for p in pairs] == [("q", "t p", ("t n",))]
