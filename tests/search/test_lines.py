"""Ids on disk against a list and a dict; what damage says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.search import Embeddings, Index
from dualenc.search import lines as subject
from dualenc.search.lines import MappedIds, beside, check_ids, hash_lines, write_ids
from tests.search.clusters import clustered
from tests.search.test_index import on_disk

NAMES = st.lists(
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), unique=True, min_size=1, max_size=40
)


@given(NAMES, st.lists(st.text(max_size=3), max_size=5), st.sampled_from([3, 2**24]), st.booleans())
def test_a_sequence_that_finds_rows(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], others: list[str], at_once: int, with_arrays: bool
) -> None:
    """However many hashes are sorted at once, and without the arrays of folders of older versions."""
    path = tmp_path_factory.mktemp("ids") / "ids.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "SORTED_AT_ONCE", at_once)
        write_ids(path, names)
    if not with_arrays:
        beside(path, "starts").unlink()
        beside(path, "order").unlink()
    assert path.read_bytes() == "".join(f"{name}\n" for name in names).encode()
    ids, row_of = MappedIds(path, len(names)), {name: row for row, name in enumerate(names)}
    assert ids == names
    assert list(ids) == names
    assert ids[1:-1] == names[1:-1]
    assert [ids[row] for row in range(-len(names), len(names))] == names + names
    asked = [*names, *(name for name in others if name.isprintable())]
    assert ids.rows(asked).tolist() == [row_of.get(name, -1) for name in asked]


LONG = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=300), unique=True)


@given(NAMES | LONG, st.data(), st.sampled_from([3, 2**12]), st.sampled_from([4, 64]))
def test_texts_of_rows_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject, together: int, short: int
) -> None:
    """Short lines, long ones, no lines, -1 for none, of any shape: what a list gives row by row."""
    path = tmp_path_factory.mktemp("ids") / "ids.txt"
    write_ids(path, names)
    rows = np.array(data.draw(st.lists(st.integers(-1, len(names) - 1), max_size=20)), np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "DECODED_LINES", together)
        patch.setattr(subject, "SHORT_LINE", short)
        found = MappedIds(path, len(names)).texts(np.stack([rows, rows[::-1]]))
    expected = ["" if row < 0 else names[row] for row in rows.tolist()]
    assert found.dtype == object
    assert found.tolist() == [expected, expected[::-1]]


@given(st.lists(st.binary(max_size=6), max_size=20))
def test_the_hash_is_that_of_its_formula(lines: list[bytes]) -> None:
    def mixed(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    weights = [mixed(place * 0x9E3779B97F4A7C15 % 2**64) for place in range(1, 9)]
    sums = [sum(byte * weight for byte, weight in zip(line + b"\n", weights)) for line in lines]
    expected = [mixed(total % 2**64) for total in sums]
    assert hash_lines(lines).tolist() == expected


def test_equal_hashes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "hash_lines", lambda lines: np.full(len(lines), 7, np.uint64))
    check_ids(["a", "b", "c"])
    with pytest.raises(DualencError, match="'b' stands twice, at rows 1 and 3"):
        check_ids(["a", "b", "c", "b"])
    write_ids(tmp_path / "ids.txt", ["a", "b", "c"])
    assert MappedIds(tmp_path / "ids.txt").rows(["c", "a", "d", "b"]).tolist() == [2, 0, -1, 1]


def test_an_id_takes_thirteen_bytes_besides_its_characters(tmp_path: Path) -> None:
    write_ids(tmp_path / "ids.txt", (f"{row:07d}" for row in range(100_000)))
    taken = sum(path.stat().st_size for path in tmp_path.iterdir()) / 100_000 - 7
    assert taken == pytest.approx(13, abs=0.01)
    ids = MappedIds(tmp_path / "ids.txt")
    assert ids[99_999] == "0099999"
    assert ids.rows(["0031415"])[0] == 31_415


def test_damaged_arrays_are_told_in_a_line(tmp_path: Path) -> None:
    write_ids(tmp_path / "ids.txt", ["a", "b", "c"])
    (tmp_path / "ids.txt").write_text("a\nb\n")
    with pytest.raises(DualencError, match=r"ids\.txt: has 4 bytes instead of 6"):
        MappedIds(tmp_path / "ids.txt")
    for content in (b"", b"\x93NUMPY", b"PK\x03\x04"):
        beside(tmp_path / "ids.txt", "starts").write_bytes(content)
        with pytest.raises(DualencError, match=r"ids\.starts\.npy: corrupt") as error:
            MappedIds(tmp_path / "ids.txt")
        assert "\n" not in str(error.value)
    write_ids(tmp_path / "ids.txt", ["a", "b", "c"])
    np.save(beside(tmp_path / "ids.txt", "order"), np.array([0, 1, 9], np.uint32))
    with pytest.raises(DualencError, match=r"ids\.order\.npy"):
        MappedIds(tmp_path / "ids.txt").rows(["a"])
    (tmp_path / "ids.txt").write_bytes(b"a\n\xff\nc\n")
    with pytest.raises(DualencError, match="corrupt at row 1"):
        MappedIds(tmp_path / "ids.txt")[1]
    for content in (b"a\n\xff\nc\n", b"a\n" + b"\xff" * 999 + b"\nc\n"):
        (tmp_path / "ids.txt").write_bytes(content)
        np.save(beside(tmp_path / "ids.txt", "starts"), [0, 2, len(content) - 2, len(content)])
        with pytest.raises(DualencError, match="corrupt at row 1"):
            MappedIds(tmp_path / "ids.txt").texts(np.array([[0, 1, 2]]))
    for end in (9, 2**62):
        np.save(beside(tmp_path / "ids.txt", "starts"), [0, end, 2, len(content)])
        with pytest.raises(DualencError, match="corrupt at row 0"):
            MappedIds(tmp_path / "ids.txt").texts(np.array([0, 0]))


def test_folders_of_the_version_before_are_read(tmp_path: Path) -> None:
    embeddings = on_disk(tmp_path / "emb", clustered(60), side="right")
    Index.build(embeddings).save(tmp_path / "index")
    for folder in (tmp_path / "emb", tmp_path / "index"):
        for path in (*folder.glob("*.starts.npy"), *folder.glob("*.order.npy")):
            path.unlink()
        meta = json.loads((folder / "meta.json").read_text())
        meta["files"] = {name: digest for name, digest in meta["files"].items() if (folder / name).exists()}
        del meta["sizes"]
        (folder / "meta.json").write_text(json.dumps(meta | {"version": 2}))
    index = Index.open(tmp_path / "index")
    assert Embeddings.open(tmp_path / "emb").ids == index.ids == [f"doc {row}" for row in range(60)]
    assert index.search(clustered(60)[7], 1)[1].tolist() == [["doc 7"]]
    assert index.snippet(59) == "text 59"
