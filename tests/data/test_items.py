"""Item tables against lists and dicts; damaged and forged files end in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import items as subject
from dualenc.data.items import ITEMS, ORDER, ItemTable, check_ids, write_batches, write_items
from dualenc.errors import DualencError

TEXT = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12)
NAMES = st.lists(TEXT, unique=True, min_size=1, max_size=40)


def opened(folder: Path, count: int) -> ItemTable:
    return ItemTable([folder / ITEMS], count, "write it again")


@pytest.mark.slow
@given(NAMES, st.lists(TEXT, max_size=5), st.sampled_from([3, 2**14]), st.sampled_from([0, 1000]))
def test_ids_are_a_sequence_that_finds_rows(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], others: list[str], batch: int, many: int
) -> None:
    """In one record batch and in several, by binary search and in one pass."""
    folder = tmp_path_factory.mktemp("items")
    row_of = {name: row for row, name in enumerate(names)}
    asked = [*names, *others, *names[:2], "half \ud800"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "BATCH_ROWS", batch)
        patch.setattr(subject, "MANY_IDS", many)
        write_items(folder, names)
        ids = opened(folder, len(names)).ids
        assert ids.rows(asked).tolist() == [row_of.get(name, -1) for name in asked]
    assert ids == names
    assert list(ids) == names
    assert ids[1:-1] == names[1:-1]
    assert ids[::-2] == names[::-2]
    assert [ids[row] for row in range(-len(names), len(names))] == names + names
    assert names[-1] in ids
    with pytest.raises(IndexError):
        ids[len(names)]


def test_texts_and_columns_come_back(tmp_path: Path) -> None:
    columns = pa.table({"year": [2020, None, 2022], "lang": pa.chunked_array([["en"], ["de", None]])})
    write_items(tmp_path, iter("abc"), iter(["", "two\nlines", "üñ"]), columns)
    table = opened(tmp_path, 3)
    assert table.texts == ["", "two\nlines", "üñ"]
    assert table.columns.equals(columns)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "c", "b"], "'b' is a duplicate, at rows 1 and 3"),
        (["a", "", ""], "'' is a duplicate, at rows 1 and 2"),
        (["a", b"b"], "id b'b' at row 1 is bytes, not a text"),
        (["a", "b\n"], "at row 1 contains a line break"),
        (["a", "\ud800"], "at row 1 is not valid Unicode"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2**14])
def test_ids_that_are_refused(monkeypatch: pytest.MonkeyPatch, names: list[Any], message: str, batch: int) -> None:
    monkeypatch.setattr(subject, "BATCH_ROWS", batch)
    with pytest.raises(DualencError, match=message):
        check_ids(names)


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"PK\x03\x04", b"ARROW1\x00\x00" + b"\xff" * 60 + b"ARROW1"])
def test_a_file_that_is_no_arrow_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ITEMS).write_bytes(content)
    with pytest.raises(DualencError, match=r"items\.arrow: truncated or corrupt \(.*\); write it again") as error:
        opened(tmp_path, 3)
    assert "\n" not in str(error.value)


def use(table: ItemTable) -> None:
    """Read all that a table holds."""
    list(table.ids)
    table.ids.rows(["a", "nobody"])
    table.ids.rows(["a"] * 2000)
    list(table.texts or ())
    _ = None if table.columns is None else table.columns.to_pydict()


@pytest.mark.slow
def test_no_flipped_bit_reads_other_memory(tmp_path: Path) -> None:
    """Without any checksum: each is either harmless or a line."""
    columns = pa.table({"year": [1, 2, None], "lang": ["en", None, "de"]})
    write_items(tmp_path, "abc", ["a text"] * 3, columns)
    content = (tmp_path / ITEMS).read_bytes()
    generator = np.random.default_rng(0)
    reported = 0
    for place, bit in zip(generator.integers(len(content), size=1500).tolist(), generator.integers(8, size=1500)):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        (tmp_path / ITEMS).write_bytes(changed)
        try:
            use(opened(tmp_path, 3))
        except DualencError:
            reported += 1
    assert reported > 300


@pytest.mark.parametrize("offsets", [(0, 1, 2**30, 3), (0, -5, 2, 3), (2**31 - 1, 1, 2, 3), (0, 2, 1, 3)])
def test_offsets_outside_the_data_are_refused(tmp_path: Path, offsets: tuple[int, ...]) -> None:
    write_items(tmp_path, "abc")
    content = (tmp_path / ITEMS).read_bytes()
    sound = struct.pack("<4i", 0, 1, 2, 3)
    assert content.count(sound) == 1
    (tmp_path / ITEMS).write_bytes(content.replace(sound, struct.pack("<4i", *offsets)))
    with pytest.raises(DualencError, match=r"items\.arrow: .*corrupt"):
        use(opened(tmp_path, 3))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"id": ["a", None]}, "a string is missing"),
        ({"name": ["a", "b"]}, "has no column of ids"),
        ({"id": [1, 2]}, "int64 instead of strings"),
        ({"id": ["a", "b"], "text": [1, 2]}, "int64 instead of strings"),
        ({"id": ["a"]}, "has 1 rows instead of 2"),
    ],
)
def test_tables_of_something_else(tmp_path: Path, batch: dict[str, list], message: str) -> None:
    write_batches(tmp_path / ITEMS, [pa.record_batch(batch)])
    with pytest.raises(DualencError, match=message):
        list(opened(tmp_path, 2).ids)


@pytest.mark.parametrize(
    "order", [np.array([0, 1, 9], np.uint32), np.array([0, 1], np.uint32), np.zeros(3), b"", b"PK"]
)
def test_an_order_that_does_not_fit(tmp_path: Path, order: Any) -> None:
    write_items(tmp_path, "abc")
    if isinstance(order, bytes):
        (tmp_path / ORDER).write_bytes(order)
    else:
        np.save(tmp_path / ORDER, order)
    with pytest.raises(DualencError, match=r"order\.npy: corrupt") as error:
        opened(tmp_path, 3).ids.rows(["z"])
    assert json.dumps(str(error.value)).count("\\n") == 0


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    write_items(tmp_path, ["abc", "def"])
    (tmp_path / ITEMS).write_bytes((tmp_path / ITEMS).read_bytes().replace(b"abcdef", b"ab\xffdef"))
    with pytest.raises(DualencError, match=r"items\.arrow: corrupt .*utf-8"):
        list(opened(tmp_path, 2).ids)
