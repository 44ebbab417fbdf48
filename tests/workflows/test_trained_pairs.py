"""The record of trained pairs: what is known again in another log, and in an index that changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dualenc.data.logs.open_log import open_log
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.workflows.adaptation_log import learn_log
from dualenc.workflows.trained_pairs import Seen, TrainedPairs

N = 8


@pytest.fixture
def documents() -> Embeddings:
    return Embeddings([f"d{row}" for row in range(N)], np.eye(N, dtype=np.float32), Provenance())


def recorded(path: Path, rows: list[str], documents: Embeddings) -> TrainedPairs:
    """Write clicks, and return the record of a model that was trained on all."""
    path.write_text("\n".join(["query,doc_id", *rows]) + "\n")
    log = open_log(path, documents)
    return TrainedPairs.of(learn_log(log, documents).pairs, log.queries, documents)


def test_a_pair_is_known_again_by_its_contents(tmp_path: Path, documents: Embeddings) -> None:
    """In another log, in another order, and after it was written and read."""
    record = recorded(tmp_path / "old.csv", ["a,d0", "b,d1", "b,d2"], documents)
    record.write(tmp_path / "trained_pairs.parquet")
    record = TrainedPairs.read(tmp_path / "trained_pairs.parquet")
    assert len(record) == 3
    (tmp_path / "new.csv").write_text("query,doc_id\nc,d3\nb,d2\nb,d4\na,d1\nd,d5\nA,d0\n")
    log = open_log(tmp_path / "new.csv", documents)
    pairs = learn_log(log, documents).pairs
    seen = Seen(record, log.queries, documents)
    names = [log.queries.text(row) for row in range(len(log.queries))]
    by_name = {
        (names[query], document): held
        for query, document, held in zip(pairs.left_id, pairs.right_id.tolist(), seen.holds(pairs))
    }
    assert [pair for pair, held in by_name.items() if held] == [("b", 2)]
    new, known = seen.may_be_new(pairs), seen.may_be_known(pairs)
    # Neither d0 nor d1 nor d2 is new; only "b" has a pair that was trained on.
    assert [name for name, own in zip(names, new) if own] == ["c", "d"]
    assert [name for name, own in zip(names, known) if own] == ["c", "a", "d", "A"]


def test_records_add_up(tmp_path: Path, documents: Embeddings) -> None:
    one = recorded(tmp_path / "one.csv", ["a,d0", "b,d1"], documents)
    two = recorded(tmp_path / "two.csv", ["b,d1", "c,d1", "c,d2"], documents)
    both = one.with_pairs_of(two)
    assert len(both) == 4
    assert sorted(both.document_ids()) == ["d0", "d1", "d2"]
    TrainedPairs({}).write(tmp_path / "none.parquet")
    assert len(TrainedPairs.read(tmp_path / "none.parquet")) == 0


def test_documents_may_come_and_go_but_not_change(tmp_path: Path, documents: Embeddings) -> None:
    record = recorded(tmp_path / "log.csv", ["a,d0", "b,d1"], documents)
    vectors = np.asarray(documents.vectors)
    grown = Embeddings(["x", *documents.ids[1:]], vectors, Provenance())
    record.check_documents(grown, "index")
    for ids in ([f"e{row}" for row in range(N)], documents.ids[::-1]):
        with pytest.raises(DualencError, match="holds other vectors than those"):
            record.check_documents(Embeddings(ids, vectors, Provenance()), "index")
    TrainedPairs({}).check_documents(grown, "index")


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.parquet").write_bytes(b"not a table")
    with pytest.raises(DualencError, match=r"is damaged .*; adapt without --from"):
        TrainedPairs.read(tmp_path / "record.parquet")
