"""The quickstart's data is a BEIR folder whose test functions are held out from training."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualenc.commands.quickstart import Docstring, write_collection
from dualenc.data import BeirPairs, read_beir
from dualenc.errors import DualencError

DOCSTRINGS = [
    Docstring(f"package.function_{i}", f"Summary number {i} here.", f"rest of docstring {i}") for i in range(20)
]


def test_reads_as_training_pairs_and_as_a_retrieval_set(tmp_path: Path) -> None:
    write_collection(tmp_path / "data", DOCSTRINGS, num_test=5)
    pairs, test = BeirPairs(tmp_path / "data", "train"), read_beir(tmp_path / "data", "test")
    assert len(pairs) == 15
    assert len(test.queries) == 5
    assert len(test.corpus) == 20
    held_out = {document for judged in test.qrels.values() for document in judged}
    trained = {test.corpus.ids[right_id] for right_id in pairs.right_id}
    assert not held_out & trained
    pair = pairs[0]
    assert pair.right.startswith("package.function_")
    assert pair.left.startswith("Summary number")


def test_the_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    splits = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_collection(tmp_path / name, DOCSTRINGS, num_test=5, seed=seed)
        splits.append((tmp_path / name / "qrels" / "test.tsv").read_text())
    assert splits[0] == splits[1] != splits[2]


def test_too_few_docstrings_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="20 docstrings were found on this machine, 40 are needed"):
        write_collection(tmp_path / "data", DOCSTRINGS, num_test=20)
    assert not (tmp_path / "data").exists()
