"""Run files, as trec_eval's own parser reads them; per-query logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation.runs import write_per_query, write_trec
from tests.helpers.result_files import read_per_query

names = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=5)
runs = st.dictionaries(
    names,
    st.dictionaries(
        names, st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5
    ),
    max_size=4,
)


@pytest.mark.slow
@given(runs)
def test_a_run_reads_back_the_same_in_pytrec_eval(
    tmp_path_factory: pytest.TempPathFactory, run: dict
) -> None:
    path = tmp_path_factory.mktemp("runs") / "run.trec"
    write_trec(path, run)
    with open(path, encoding="utf-8") as stream:
        read = pytrec_eval.parse_run(stream)
    assert read.keys() == run.keys()
    for query, documents in run.items():
        assert {doc: np.float32(score) for doc, score in read[query].items()} == documents


def test_lines_are_ranked_as_trec_eval_ranks_them(tmp_path: Path) -> None:
    write_trec(tmp_path / "run.trec", {"q1": {"a": 0.5, "b": 0.5, "c": 0.1, "d": 0.9}}, tag="mine")
    assert (tmp_path / "run.trec").read_text() == (
        "q1 Q0 d 1 0.9 mine\nq1 Q0 b 2 0.5 mine\nq1 Q0 a 3 0.5 mine\nq1 Q0 c 4 0.1 mine\n"
    )


def test_a_per_query_log_reads_back(tmp_path: Path) -> None:
    per_query = {"q1": {"ndcg@10": 1 / 3, "mrr@10": 0.5}, "q ü": {"ndcg@10": 0.0, "mrr@10": 1.0}}
    write_per_query(tmp_path / "log.ndjson", per_query, "toy")
    assert read_per_query(tmp_path / "log.ndjson") == per_query


@pytest.mark.parametrize(
    "run", [{"q 1": {"d": 1.0}}, {"q": {"d 1": 1.0}}, {"": {"d": 1.0}}, {"q": {"\udcff": 1.0}}]
)
def test_ids_that_the_format_cannot_hold_leave_no_file(run: dict, tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="white space"):
        write_trec(tmp_path / "run.trec", run)
    assert list(tmp_path.iterdir()) == []
