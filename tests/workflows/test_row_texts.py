"""Whole texts of rows: from the data where the stored text is its beginning, else as stored."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dualenc.data import Corpus
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.workflows.row_texts import RowTexts

LONG = "one  two\n" * 100
SHOWN = ("one two " * 40)[:239].rstrip() + "…"


def texts() -> RowTexts:
    items = ["short", LONG, "of\0NUL", "a\ud800b", "ends here…"]
    return RowTexts(Corpus(["a", "b", "c", "d", "e"], items))


@pytest.mark.parametrize(
    ("id", "stored", "whole"),
    [
        ("a", "short", "short"),
        ("b", SHOWN, LONG),
        ("c", "of\ufffdNUL", "of\0NUL"),
        ("c", "of\0NUL", "of\0NUL"),
        ("d", "a?b", "a\ud800b"),
        ("a", "a client's", "a client's"),
        ("b", SHOWN.replace("one", "two"), SHOWN.replace("one", "two")),
        # The row of another id does not count.
        ("a", SHOWN, SHOWN),
        ("new", "short", "short"),
        ("a", None, None),
    ],
)
def test_the_text_of_the_data_or_of_the_row(id: str, stored: str | None, whole: str) -> None:
    assert texts().whole(id, stored) == whole


def test_sources_are_counted_once_for_each_row(caplog: pytest.LogCaptureFixture) -> None:
    rows = texts()
    for _ in range(2):
        rows.whole("b", SHOWN)
        rows.whole("e", "ends here…")
    rows.whole("new", "added by a client")
    rows.whole("other", "perhaps cut…")
    # Changed in between.
    rows.whole("a", "short")
    rows.whole("a", "changed")
    with caplog.at_level(logging.INFO):
        rows.check("db 'docs'")
        rows.report("db 'docs'")
    said = "db 'docs': 2 texts come from the data, and 3, which clients have written, from the rows"
    assert [record.message for record in caplog.records] == [
        said,
        "db 'docs': 1 of them end with …, as if they were cut",
    ]


def test_other_data_is_refused() -> None:
    rows = texts()
    rows.whole("unknown", SHOWN)
    with pytest.raises(DualencError, match="db: 1 texts are beginnings, and none is of a text in"):
        rows.check("db")
    with pytest.raises(DualencError, match="its data consists of vectors, not texts"):
        RowTexts(Corpus(["a"], [[1.0]], modality="vector"))


def test_the_recorded_data_is_read_as_it_was_or_another_is_named(tmp_path: Path) -> None:
    for name in ("docs", "moved"):
        (tmp_path / f"{name}.csv").write_text(f"key,body,title\n7,{name} text,a title\n")
    read = {"text_column": "body", "id_column": "key"}
    about = Provenance(data=str(tmp_path / "docs.csv"), read=read)
    assert RowTexts.open("emb", about).whole("7", "docs text") == "docs text"
    assert RowTexts.open("emb", about).corpus.ids == ["7"]
    assert RowTexts.open("emb", about, str(tmp_path / "moved.csv")).corpus[0] == "moved text"
    (tmp_path / "docs.csv").unlink()
    with pytest.raises(DualencError, match=r"emb: .* is gone; name it by --data"):
        RowTexts.open("emb", about)
