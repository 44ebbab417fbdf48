"""Item tables against lists and dicts; damaged and forged files end in one line."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data.store import items as subject
from dualenc.data.store.items import ITEMS, ORDER, ItemTable, check_ids, write_batches, write_items
from dualenc.errors import DualencError

TEXT = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12)
NAMES = st.lists(TEXT, unique=True, min_size=1, max_size=40)


def opened(folder: Path, count: int) -> ItemTable:
    return ItemTable([folder / ITEMS], count, "write it again")


def use(folder: Path, count: int = 3) -> None:
    """Read all that a table holds."""
    table = opened(folder, count)
    list(table.ids)
    table.ids.rows(["a", "z"])
    table.ids.rows(["a"] * 2000)
    list(table.texts or ())
    _ = None if table.columns is None else table.columns.to_pydict()


@pytest.mark.slow
@given(NAMES, st.lists(TEXT, max_size=5), st.sampled_from([3, 2**14]), st.sampled_from([0, 1000]))
def test_ids_are_a_sequence_that_finds_rows(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    others: list[str],
    batch: int,
    many: int,
) -> None:
    """In one record batch and in several, by binary search and in one pass."""
    folder = tmp_path_factory.mktemp("items")
    row_of = {name: row for row, name in enumerate(names)}
    queries = [*names, *others, *names[:2], "half \ud800"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "BATCH_ROWS", batch)
        patch.setattr(subject, "MANY_IDS", many)
        write_items(folder, names)
        ids = opened(folder, len(names)).ids
        assert ids.rows(queries).tolist() == [row_of.get(name, -1) for name in queries]
    assert ids == names
    assert list(ids) == names
    for part in (slice(1, -1), slice(None, None, -2)):
        assert ids[part] == names[part]
    assert [ids[row] for row in range(-len(names), len(names))] == names + names
    assert names[-1] in ids
    with pytest.raises(IndexError):
        ids[len(names)]


def test_texts_and_columns_come_back(tmp_path: Path) -> None:
    columns = pa.table(
        {"year": [2020, None, 2022], "lang": pa.chunked_array([["en"], ["de", None]])}
    )
    write_items(tmp_path, iter("abc"), iter(["", "two\nlines", "üñ"]), columns)
    table = opened(tmp_path, 3)
    assert table.texts == ["", "two\nlines", "üñ"]
    assert table.columns.equals(columns)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "c", "b"], "'b' is a duplicate, at rows 1 and 3"),
        (["a", b"b"], "id b'b' at row 1 is bytes, not a text"),
        (["a", "b\n"], "at row 1 contains a line break"),
        (["a", "\ud800"], "at row 1 is not valid Unicode"),
    ],
)
def test_ids_that_are_refused(names: list[Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        check_ids(names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"items\.arrow: truncated or corrupt \(.*\); write it again"),
        (b"ARROW1\x00\x00" + b"\xff" * 60 + b"ARROW1", r"items\.arrow: truncated or corrupt"),
        ({"id": ["a", None, "b"]}, "a string is missing"),
        ({"name": ["a", "b", "c"]}, "lacks a column of ids"),
        ({"id": [1, 2, 3]}, "int64 instead of strings"),
        ({"id": ["a", "b", "c"], "text": [1, 2, 3]}, "int64 instead of strings"),
        ({"id": ["a"]}, "has 1 rows instead of 3"),
        ((b"abc", b"a\xffc"), r"items\.arrow: corrupt .*utf-8"),
        *(
            (
                (struct.pack("<4i", 0, 1, 2, 3), struct.pack("<4i", *offsets)),
                r"items\.arrow: .*corrupt",
            )
            for offsets in ((0, 1, 2**30, 3), (0, -5, 2, 3), (2**31 - 1, 1, 2, 3), (0, 2, 1, 3))
        ),
    ],
)
def test_items_that_are_damaged_or_something_else(
    tmp_path: Path, content: Any, message: str
) -> None:
    write_items(tmp_path, "abc")
    path = tmp_path / ITEMS
    if isinstance(content, dict):
        write_batches(path, [pa.record_batch(content)])
    elif isinstance(content, tuple):
        whole = path.read_bytes()
        assert whole.count(content[0]) == 1
        path.write_bytes(whole.replace(*content))
    else:
        path.write_bytes(content)
    with pytest.raises(DualencError, match=message):
        use(tmp_path)


@pytest.mark.parametrize(
    "order", [np.array([0, 1, 9], np.uint32), np.array([0, 1], np.uint32), np.zeros(3), b"", b"PK"]
)
def test_an_order_that_does_not_fit(tmp_path: Path, order: Any) -> None:
    write_items(tmp_path, "abc")
    if isinstance(order, bytes):
        (tmp_path / ORDER).write_bytes(order)
    else:
        np.save(tmp_path / ORDER, order)
    with pytest.raises(DualencError, match=r"order\.npy: corrupt"):
        use(tmp_path)
