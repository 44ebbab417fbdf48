"""The table of changed results against rankings worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dualenc.data import Corpus
from dualenc.data.item_lists import VectorItems
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import VectorEncoder
from dualenc.io.provenance import Provenance
from dualenc.search.index.open import Index
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.changed_results import LENGTH, changed_results, snippets_of

UNIT = np.eye(3, dtype=np.float32)


def model(matrix: list[list[float]]) -> VectorEncoder:
    """Return an encoder of vectors whose queries are multiplied by a matrix."""
    encoder = VectorEncoder(3, tower="linear", right_tower="identity")
    with torch.no_grad():
        weights = [each for each in encoder.left.parameters() if each.shape == (3, 3)]
        weights[0].copy_(torch.tensor(matrix))
    return encoder.eval()


def evaluator() -> IndexEvaluator:
    documents = Embeddings(["x", "y", "z"], UNIT, Provenance())
    queries = Corpus(["0", "1"], VectorItems(UNIT[:2] + 0.1 * UNIT[[1, 2]]), "vector")
    return IndexEvaluator(queries, {"0": {"y": 1}, "1": {"y": 1}}, documents)


def test_queries_that_changed_are_shown_before_and_after() -> None:
    identity = [[1.0, 0, 0], [0, 1, 0], [0, 0, 1]]
    # Exchanges the first two components, except for a query of the second and the third one.
    swap = [[0.0, 1, 0], [1, 0, 0], [0, 0, 1]]
    table = changed_results(
        evaluator(), model(identity), model(swap), {"0": "first", "1": "second"}.__getitem__, str
    )
    assert "2 of 2 changed" in table.caption
    assert {row["query"] for row in table.rows} == {"first", "second", ""}
    of_first = next(number for number, row in enumerate(table.rows) if row["query"] == "first")
    first = table.rows[of_first : of_first + 3]
    assert [row["before"] for row in first] == ["x", "✓ y", "z"]
    assert [row["after"] for row in first] == ["✓ y", "x", "z"]
    assert first[0]["nDCG@10"] == "0.63 → 1.00"


def test_unchanged_queries_are_left_out() -> None:
    same = model([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    table = changed_results(evaluator(), same, same, str, str)
    assert list(table.rows) == []
    assert "0 of 2 changed" in table.caption


def test_snippets_come_from_the_index_in_one_line(tmp_path: Path) -> None:
    texts = ["a line\nand another", "w " * 100, ""]
    vectors = Embeddings(["x", "y", "z"], UNIT, Provenance(), snippets=texts)
    Index.build(vectors).save(tmp_path / "index")
    snippet = snippets_of(tmp_path / "index")
    assert snippet("x") == "x: a line and another"
    assert len(snippet("y")) == len("y: ") + LENGTH
    assert snippets_of(tmp_path)("x") == "x"
