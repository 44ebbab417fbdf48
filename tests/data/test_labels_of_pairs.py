"""Columns of labels: used as such with a line, or refused; never ids, and never ignored."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.cli import main
from dualenc.data import ImageFolderPairs, IndexPairs, MinedPairs, TablePairs, open_pairs
from dualenc.data.corpus import held_out
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search.mining import mine_negatives
from tests.helpers.make import encoded, picture, write_csv, write_jsonl, write_rows

FORMS = ["jsonl", "csv", "parquet", "saved"]


def table(folder: Path, name: str, values: list[Any], form: str = "csv") -> Path:
    rows = [{"query": f"q{i}", "document": f"d{i}", name: value} for i, value in enumerate(values)]
    return write_rows(folder, form, rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "values", "weights"),
    [
        ("label", [1, 0, 1], [1, 0, 1]),
        ("clicked", [True, False, True], [1, 0, 1]),
        ("isClick", [0, 1, 0], [0, 1, 0]),
        ("is_duplicate", ["yes", "no", "Yes"], [1, 0, 1]),
        ("choice", ["Relevant", "Not relevant", "Not Relevant"], [1, 0, 0]),
        ("label", ["entailment", "not_entailment", "entailment"], [1, 0, 1]),
        ("relevance", [0, 1, 3], [0, 1, 1]),
        ("Relevance Score", [2.0, 0.0, 1.0], [1, 0, 1]),
        ("clicks", [0, 17, 240], [0, 1, 1]),
        ("label", [-1, 1, 1], [0, 1, 1]),
    ],
)
def test_labels_are_weights_of_0_and_1(
    tmp_path: Path,
    form: str,
    name: str,
    values: list,
    weights: list,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = table(tmp_path, name, values, form)
    with caplog.at_level(logging.WARNING, logger="dualenc.data"):
        for pairs in (open_pairs(path), TablePairs(path, "query", "document")):
            assert pairs.weights is not None
            assert pairs.weights.tolist() == weights
    lines = [record.getMessage() for record in caplog.records]
    number = weights.count(0)
    assert [f"column {name!r} is read as labels: {number} of 3 rows" in line for line in lines] == [
        True,
        True,
    ]
    assert TablePairs(path, "query", "document", weight_column="none").weights is None


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("score", [0.9, 0.1, 0.5], "do not say from where on rows match; name it as weight_column"),
        ("similarity", [4.2, 0.5, 5.0], "do not say from where on rows match"),
        ("label", [0, 1, 2], "may be grades, or stand for kinds"),
        (
            "label",
            ["entailment", "neutral", "contradiction"],
            "do not say which rows match; write 1 and 0",
        ),
        ("rating", [5, 1, 3], "have no 0 for rows that do not match"),
        ("label", [0, 0, 0], "but none of them is above 0"),
        ("score", [0, 40, 80], "its numbers go up to 80"),
    ],
)
def test_what_does_not_say_which_rows_match_is_refused(
    tmp_path: Path, name: str, values: list, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, name, values)
    with pytest.raises(DualencError, match=reason) as error:
        TablePairs(path, "query", "document")
    assert name in str(error.value)
    assert "weight_column=none" in str(error.value)
    assert len(TablePairs(path, "query", "document", weight_column="none")) == 3
    assert main(["evaluate", "retrieval", "static", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") <= 2


def test_two_columns_of_labels_are_both_named(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "x.csv",
        ["query", "document", "label", "clicked"],
        [["a", "b", 1, 0], ["c", "d", 0, 1]],
    )
    with pytest.raises(
        DualencError, match="'label' and 'clicked' both look like labels of the pairs"
    ):
        open_pairs(path)
    assert open_pairs(path, weight_column="clicked").weights.tolist() == [0, 1]  # type: ignore[union-attr]


def test_a_row_without_a_label_is_a_bad_row(tmp_path: Path) -> None:
    pairs = open_pairs(table(tmp_path, "label", ["1", "", "0"]))
    assert ([pair.left for pair in pairs], pairs.skipped) == (["q0", "q2"], 1)


def test_what_is_no_label_is_named_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = open_pairs(table(tmp_path, "target", ["a1 b", "c2 d", "e3 f"]))
    assert pairs.weights is None
    assert "column 'target' is ignored: its values are not labels of pairs" in caplog.text


def test_labels_of_lists(tmp_path: Path) -> None:
    rows = [{"anchor": f"q{i}", "passages": [f"a{i}", f"b{i}"], "labels": [1, 0]} for i in range(2)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    assert TablePairs(path, "anchor", "passages").weights.tolist() == [1, 0, 1, 0]  # type: ignore[union-attr]
    write_jsonl(path, [*rows, {"anchor": "q", "passages": ["a"], "labels": [1, 0]}])
    with pytest.raises(DualencError, match="lists whose lengths differ"):
        TablePairs(path, "anchor", "passages")


def test_words_are_weights_where_they_are_named(tmp_path: Path) -> None:
    path = table(tmp_path, "verdict", ["Relevant", "not relevant", "yes"])
    assert TablePairs(path, "query", "document", weight_column="verdict").weights.tolist() == [
        1,
        0,
        1,
    ]  # type: ignore[union-attr]


def test_class_names_of_the_hub_are_the_labels(tmp_path: Path) -> None:
    """In which 0 is the entailment."""
    import datasets

    features = datasets.Features(
        {
            "query": datasets.Value("string"),
            "document": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["entailment", "not_entailment"]),
        }
    )
    rows = {"query": ["a", "b"], "document": ["c", "d"], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "x")
    assert open_pairs(tmp_path / "x").weights.tolist() == [1, 0]  # type: ignore[union-attr]


def test_classes_of_images_are_no_labels_of_pairs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
    rows = [[f"{number}.png", f"caption {number}", number] for number in range(3)]
    write_csv(tmp_path / "metadata.csv", ["file_name", "text", "label"], rows)
    assert ImageFolderPairs(tmp_path).weights is None
    assert "column 'label' is ignored" in caplog.text
    write_csv(
        tmp_path / "metadata.csv",
        ["file_name", "text", "label"],
        [[*row[:2], row[2] % 2] for row in rows],
    )
    with pytest.raises(DualencError, match="may hold labels of the pairs or classes of the images"):
        open_pairs(tmp_path)
    assert open_pairs(tmp_path, weight_column="label").weights.tolist() == [0, 1, 0]  # type: ignore[union-attr]


def test_rows_that_do_not_match_are_not_relevant_and_may_be_mined(tmp_path: Path) -> None:
    path = table(tmp_path, "label", [1, 0, 1])
    pairs = open_pairs(path)
    assert held_out(pairs).qrels == {"left-0": {"right-0": 1}, "left-2": {"right-2": 1}}
    vectors = Embeddings(["0", "1", "2"], np.eye(3, dtype=np.float32))
    mine_negatives(vectors, vectors, pairs, tmp_path / "mined.jsonl", progress=False)
    assert [pair.left for pair in MinedPairs(tmp_path / "mined.jsonl")] == ["q0", "q2"]


@pytest.fixture
def documents() -> Embeddings:
    return Embeddings([str(number) for number in range(4)], np.eye(4, dtype=np.float32))


def clicked(path: Path, documents: Embeddings, **options: Any) -> list[tuple[str, int]]:
    return [(pair.left, pair.right_id) for pair in IndexPairs(path, documents, **options)]


def test_a_row_labelled_0_is_no_click(
    tmp_path: Path, documents: Embeddings, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [["lawn", 0, 1], ["lawn", 1, 0], ["lawn", 2, 0], ["cut", 1, 1], ["cut", 3, 0]]
    path = write_csv(tmp_path / "x.csv", ["query", "doc_id", "clicked"], rows)
    assert clicked(path, documents) == [("lawn", 0), ("cut", 1)]
    assert (
        "column 'clicked' is read as labels: 3 of 5 rows are labeled 0 and are not clicks"
        in caplog.text
    )
    assert len(clicked(path, documents, label_column="none")) == 5
    path = write_csv(
        tmp_path / "y.csv", ["query", "doc_id", "dwell"], [["lawn", 0, 31], ["lawn", 1, 0]]
    )
    assert clicked(path, documents, label_column="dwell") == [("lawn", 0)]


def test_labels_and_row_numbers_are_no_ids(tmp_path: Path, documents: Embeddings) -> None:
    path = write_csv(
        tmp_path / "a.csv",
        ["query", "sku", "clicked"],
        [["lawn", 0, 1], ["lawn", 1, 0], ["cut", 3, 1]],
    )
    assert clicked(path, documents) == [("lawn", 0), ("cut", 3)]
    path = write_csv(
        tmp_path / "b.csv", ["id", "query", "asin"], [[0, "lawn", 3], [1, "lawn", 2], [2, "cut", 1]]
    )
    assert clicked(path, documents) == [("lawn", 3), ("lawn", 2), ("cut", 1)]
    path = write_csv(tmp_path / "c.csv", ["query", "clicked"], [["lawn", 1], ["cut", 0]])
    with pytest.raises(DualencError, match="it is unclear which column is document_column"):
        IndexPairs(path, documents)
    # Ids that were clicked may have that name.
    path = write_csv(tmp_path / "d.csv", ["query", "clicked"], [["lawn", 3], ["cut", 2]])
    assert clicked(path, documents) == [("lawn", 3), ("cut", 2)]


@pytest.mark.parametrize(
    ("header", "rows", "named"),
    [
        (
            ["id", "query", "artikel"],
            [[0, "lawn", 3], [1, "cut", 2]],
            "'id' numbers the rows, .* 'artikel'",
        ),
        (
            ["query", "doc_id", "sku"],
            [["lawn", 3, 1], ["cut", 2, 0]],
            "'doc_id' and 'sku' both hold document ids",
        ),
        (
            ["query", "artikel"],
            [["lawn", 3], ["cut", 1]],
            "the values of 'artikel' are ids of documents",
        ),
    ],
)
def test_other_columns_of_ids_have_to_be_named(
    tmp_path: Path, documents: Embeddings, header: list, rows: list, named: str
) -> None:
    path = write_csv(tmp_path / "x.csv", header, rows)
    with pytest.raises(DualencError, match=named):
        IndexPairs(path, documents)
    assert clicked(path, documents, document_column=header[-1])


def test_grades_of_the_hub_have_any_usual_name(tmp_path: Path) -> None:
    from dualenc.data.readers.beir import read_beir

    folder = tmp_path / "x"
    for part, rows in {
        "corpus": [{"id": "d", "text": "x"}, {"id": "e", "text": "y"}],
        "queries": [{"query_id": "q", "text": "x"}],
        "default": [
            {"query_id": "q", "doc_id": "d", "relevance": 1},
            {"query_id": "q", "doc_id": "e", "relevance": 0},
        ],
    }.items():
        (folder / part).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / part / "test-0.parquet")
    configs = "".join(
        f"- config_name: {part}\n  data_files:\n  - split: test\n    path: {part}/test-*\n"
        for part in ("corpus", "queries", "default")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert read_beir(folder, "test").qrels == {"q": {"d": 1, "e": 0}}


def test_missing_labels_of_pandas(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    pd.DataFrame({"query": ["a", "b"], "document": ["c", "d"], "label": [1.0, None]}).to_csv(path)
    assert len(open_pairs(path)) == 1
