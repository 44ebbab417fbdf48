"""The folder of embeddings: numpy alone reads it, and every damage is named in one line."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DiskFull, DualencError
from dualenc.search.embeddings import Embeddings, EmbeddingWriter, ShardedVectors, is_embeddings, shard_ranges

NUM_ITEMS, DIM = 2500, 3
IDENTITY = {"side": "right", "model_checksum": "abc"}


def vectors(num_items: int = NUM_ITEMS, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num_items, dim)).astype(np.float32)


def ids(num_items: int = NUM_ITEMS) -> list[str]:
    return [f"item {i}" for i in range(num_items)]


def write(folder: Path, dtype: str = "float32") -> Embeddings:
    writer = EmbeddingWriter(folder, ids(), DIM, dtype, IDENTITY, {"model": "m"})
    for number in writer.missing():
        rows = writer.ranges[number]
        writer.write(number, vectors()[rows.start : rows.stop])
    return writer.finish(lambda row: f"snippet “{row}”\n")


def one_line(error: pytest.ExceptionInfo[DualencError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_numpy_and_json_alone_read_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    shards = sorted((tmp_path / "emb").glob("shard-*.npy"))
    assert len(shards) == 3
    np.testing.assert_array_equal(np.concatenate([np.load(shard) for shard in shards]), vectors())
    assert (tmp_path / "emb" / "ids.txt").read_text(encoding="utf-8").splitlines() == ids()
    meta = json.loads((tmp_path / "emb" / "meta.json").read_text())
    assert meta["dim"] == DIM
    assert meta["dtype"] == "float32"
    assert meta["shard_rows"] == [834, 833, 833]
    snippets = [json.loads(line) for line in (tmp_path / "emb" / "snippets.jsonl").open(encoding="utf-8")]
    assert snippets[7] == "snippet “7”\n"


def test_opened_embeddings_are_those_that_were_written(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    embeddings = Embeddings.open(tmp_path / "emb")
    assert is_embeddings(tmp_path / "emb")
    assert embeddings.ids == ids()
    assert embeddings.meta["side"] == "right"
    assert embeddings.snippets is not None
    assert [embeddings.snippets[row] for row in (2499, 0, 1200)] == [f"snippet “{r}”\n" for r in (2499, 0, 1200)]
    np.testing.assert_array_equal(np.asarray(embeddings.vectors), vectors())
    np.testing.assert_array_equal(np.concatenate(list(embeddings.blocks(999))), vectors())
    assert all(isinstance(shard, np.memmap) for shard in embeddings.vectors.shards)


def test_half_precision(tmp_path: Path) -> None:
    embeddings = write(tmp_path / "emb", "float16")
    assert embeddings.vectors.dtype == np.float16
    np.testing.assert_array_equal(np.asarray(embeddings.vectors), vectors().astype(np.float16))
    assert next(embeddings.blocks()).dtype == np.float32


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    start=st.integers(-30, 30),
    stop=st.integers(-30, 30),
    step=st.sampled_from([1, 2, -1]),
    seed=st.integers(0, 99),
)
def test_shards_read_as_one_matrix(lengths: list[int], start: int, stop: int, step: int, seed: int) -> None:
    matrix = vectors(sum(lengths), 2)
    sharded = ShardedVectors(np.split(matrix, np.cumsum(lengths)[:-1]))
    assert sharded.shape == matrix.shape
    np.testing.assert_array_equal(sharded[start:stop:step], matrix[start:stop:step])
    if len(matrix):
        rows = np.random.default_rng(seed).integers(-len(matrix), len(matrix), size=7)
        np.testing.assert_array_equal(sharded[rows], matrix[rows])
        np.testing.assert_array_equal(sharded[int(rows[0])], matrix[rows[0]])
        np.testing.assert_array_equal(sharded[matrix[:, 0] > 0], matrix[matrix[:, 0] > 0])
    with pytest.raises(IndexError):
        sharded[[len(matrix)]]


@given(st.integers(1, 300_000))
def test_shards_cover_every_row_once(num_items: int) -> None:
    ranges = shard_ranges(num_items)
    assert ranges[0].start == 0
    assert ranges[-1].stop == num_items
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
    assert max(map(len, ranges)) <= 16384
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_an_interrupted_run_writes_only_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "emb"
    first = EmbeddingWriter(folder, ids(), DIM, "float32", IDENTITY)
    rows = first.ranges[0]
    first.write(0, vectors()[rows.start : rows.stop])
    (folder / ".shard-00001.npy.part-00c0ffee").mkdir()
    with pytest.raises(DualencError, match="not finished"):
        Embeddings.open(folder)
    second = EmbeddingWriter(folder, ids(), DIM, "float32", IDENTITY)
    assert second.missing() == [1, 2]
    assert not list(folder.glob(".*"))
    np.testing.assert_array_equal(np.asarray(write(folder).vectors), vectors())


def test_a_truncated_shard_is_named_and_written_again(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    shard = tmp_path / "emb" / "shard-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-100])
    for verify in (True, False):
        with pytest.raises(DualencError, match=r"shard-00001\.npy: truncated or corrupt \(10024 bytes") as error:
            Embeddings.open(tmp_path / "emb", verify=verify)
        assert "again" in one_line(error)
    writer = EmbeddingWriter(tmp_path / "emb", ids(), DIM, "float32", IDENTITY)
    assert writer.missing() == [1]
    np.testing.assert_array_equal(np.asarray(write(tmp_path / "emb").vectors), vectors())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not numpy at all",
        b"\x93NUMPY\x01\x00",
        b"PK\x03\x04",
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999, 3)}\n",
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 20 + b"\n",
    ],
)
def test_a_corrupt_shard_is_named(tmp_path: Path, content: bytes, verify: bool) -> None:
    write(tmp_path / "emb")
    (tmp_path / "emb" / "shard-00002.npy").write_bytes(content)
    with pytest.raises(DualencError, match=r"shard-00002\.npy: .*corrupt") as error:
        Embeddings.open(tmp_path / "emb", verify=verify)
    one_line(error)


@pytest.mark.parametrize(
    "name", ["ids.txt", "snippets.jsonl", "shard-00000.npy", "shard-00001.npy", "shard-00002.npy", "shard-00001.json"]
)
@pytest.mark.parametrize("place", [0.01, 0.5, 0.99])
def test_a_flipped_bit_is_noticed(tmp_path: Path, name: str, place: float) -> None:
    write(tmp_path / "emb")
    path = tmp_path / "emb" / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(DualencError, match=f"{name}: corrupt") as error:
        Embeddings.open(tmp_path / "emb")
    assert "run the same `dualenc embed` again" in one_line(error)
    assert np.array_equal(np.asarray(write(tmp_path / "emb").vectors), vectors()), "and that mends it"


def test_swapped_lines_are_noticed(tmp_path: Path) -> None:
    for name in ("ids.txt", "snippets.jsonl"):
        write(tmp_path / name / "emb")
        path = tmp_path / name / "emb" / name
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::-1]))
        with pytest.raises(DualencError, match=f"{name}: corrupt"):
            Embeddings.open(path.parent)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": []},
        {"files": {"../../etc/passwd": "0" * 64}},
        {"files": None},
        {"sizes": {}},
        {"sizes": 7},
        {"shard_rows": ["834", 833, 833]},
        {"shard_rows": [-834, 833, 833]},
        {"shard_rows": []},
        {"shard_rows": {"0": 1}},
        {"shard_rows": [834, 833, 833, 0]},
        {"shard_rows": [10**30, 833, 833]},
        {"dim": 10**30},
        {"dim": "3"},
        {"dim": 0},
        {"dim": True},
        {"dtype": "object"},
        {"dtype": 32},
        {"complete": "yes"},
        {"version": "2"},
        {"version": None},
        {"version": 1},
        {"format": ["dualenc embeddings"]},
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_meta_of_the_wrong_shape_is_told(tmp_path: Path, change: dict, verify: bool) -> None:
    write(tmp_path / "emb")
    path = tmp_path / "emb" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DualencError) as error:
        Embeddings.open(tmp_path / "emb", verify=verify)
    one_line(error)


@pytest.mark.parametrize("content", ["[]", "7", "null", '"text"', "{}", "", "[" * 10**5])
def test_a_meta_that_is_no_object_is_told(tmp_path: Path, content: str) -> None:
    write(tmp_path / "emb")
    (tmp_path / "emb" / "meta.json").write_text(content)
    for function in (Embeddings.open, write):
        with pytest.raises(DualencError, match="emb") as error:
            function(tmp_path / "emb")
        one_line(error)


def test_a_device_is_not_read_for_ever(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    (tmp_path / "emb" / "ids.txt").unlink()
    (tmp_path / "emb" / "ids.txt").symlink_to("/dev/zero")
    with pytest.raises(DualencError, match=r"ids\.txt: missing"):
        Embeddings.open(tmp_path / "emb")


@pytest.mark.parametrize(("bad", "dtype"), [(np.nan, "float32"), (np.inf, "float32"), (1e5, "float16")])
def test_a_vector_that_is_not_finite_as_stored_is_never_written(tmp_path: Path, bad: float, dtype: str) -> None:
    writer = EmbeddingWriter(tmp_path / "emb", ids(), DIM, dtype, IDENTITY)
    block = vectors()[834:1666]
    block[7, 1] = bad
    with pytest.raises(DualencError, match=f"the vector of 'item 842' is not finite as {dtype}"):
        writer.write(1, block, [(840, "unreadable")])
    assert writer.missing() == [0, 1, 2]


class TestContents:
    """Shards are told apart by what they are made of, not by their ids alone."""

    @staticmethod
    def writer(folder: Path, items: list[str]) -> EmbeddingWriter:
        return EmbeddingWriter(
            folder, ids(), DIM, "float32", IDENTITY, contents=lambda rows: "".join(items[rows.start : rows.stop])
        )

    def written(self, folder: Path, items: list[str], skipped: dict[int, str] | None = None) -> list[int]:
        """Which shards a run writes."""
        writer = self.writer(folder, items)
        missing = writer.missing()
        for number in missing:
            bad = [(row, why) for row, why in (skipped or {}).items() if row in writer.ranges[number]]
            rows = [row for row in writer.ranges[number] if row not in dict(bad)]
            writer.write(number, vectors()[rows], bad)
        writer.finish()
        return missing

    def test_a_shard_with_a_changed_item_is_written_again(self, tmp_path: Path) -> None:
        items = [str(row) for row in range(NUM_ITEMS)]
        assert self.written(tmp_path / "emb", items) == [0, 1, 2]
        assert self.written(tmp_path / "emb", items) == []
        items[900] = "changed"
        assert self.written(tmp_path / "emb", items) == [1]
        assert self.written(tmp_path / "emb", items) == []

    def test_a_mended_item_is_tried_again(self, tmp_path: Path) -> None:
        items = ["bad" if row == 900 else str(row) for row in range(NUM_ITEMS)]
        assert self.written(tmp_path / "emb", items, {900: "unreadable"}) == [0, 1, 2]
        assert len(Embeddings.open(tmp_path / "emb")) == NUM_ITEMS - 1
        assert self.written(tmp_path / "emb", items, {900: "unreadable"}) == []
        items[900] = "mended"
        assert self.written(tmp_path / "emb", items) == [1]
        assert Embeddings.open(tmp_path / "emb").ids == ids()

    def test_meanwhile_the_folder_is_not_finished(self, tmp_path: Path) -> None:
        items = [str(row) for row in range(NUM_ITEMS)]
        self.written(tmp_path / "emb", items)
        items[0] = "changed"
        assert self.writer(tmp_path / "emb", items).missing() == [0]
        with pytest.raises(DualencError, match="not finished"):
            Embeddings.open(tmp_path / "emb")

    def test_a_kill_between_shard_and_note_writes_the_shard_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        items = [str(row) for row in range(NUM_ITEMS)]
        self.written(tmp_path / "emb", items)
        items[0] = "changed"
        writer = self.writer(tmp_path / "emb", items)
        with monkeypatch.context() as patch:
            patch.setattr("dualenc.search.embeddings.write_json", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                writer.write(0, vectors()[:834])
        assert self.writer(tmp_path / "emb", items).missing() == [0]

    @pytest.mark.parametrize("note", ["[]", "{}", '{"contents": 1, "sha256": "", "skipped": []}', "x"])
    def test_a_damaged_note_writes_the_shard_again(self, tmp_path: Path, note: str) -> None:
        items = [str(row) for row in range(NUM_ITEMS)]
        self.written(tmp_path / "emb", items)
        (tmp_path / "emb" / "shard-00001.json").write_text(note)
        assert self.written(tmp_path / "emb", items) == [1]


@pytest.mark.parametrize("fails_at", range(12))
def test_a_full_disk_is_told_and_a_later_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """The disk is full from the n-th write on: three shards with their notes, ids, snippets, meta and what follows."""
    calls = itertools.count()
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if next(calls) >= fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match=f"{tmp_path}.*no space left on the disk"):
            write(tmp_path / "emb")
    assert not list((tmp_path / "emb").glob(".*"))
    if (tmp_path / "emb" / "meta.json").exists():
        with pytest.raises(DualencError, match="not finished"):
            Embeddings.open(tmp_path / "emb")
    np.testing.assert_array_equal(np.asarray(write(tmp_path / "emb").vectors), vectors())


@pytest.mark.parametrize("limit", [0, 500, 3000, 10_000, 10_130])
def test_a_limit_on_the_size_of_files_never_leaves_a_truncated_one(tmp_path: Path, limit: int) -> None:
    """A shard has 10,136 bytes: numpy alone takes one cut short at its very end for written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(DiskFull, match=f"^{tmp_path}/emb"):
            write(tmp_path / "emb")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "emb").exists() == (limit > 0)
    assert not list(tmp_path.glob("emb/shard*"))
    np.testing.assert_array_equal(np.asarray(write(tmp_path / "emb").vectors), vectors())


def test_a_snippet_with_half_a_character_is_kept(tmp_path: Path) -> None:
    writer = EmbeddingWriter(tmp_path / "emb", ["a"], DIM, "float32", IDENTITY)
    writer.write(0, vectors(1))
    snippets = writer.finish(lambda row: "half \ud800 of it").snippets
    assert snippets is not None
    assert snippets[0] == "half \ud800 of it"


def test_a_shard_of_pickled_objects_is_never_loaded(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    np.save(tmp_path / "emb" / "shard-00000.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DualencError, match="corrupt"):
        Embeddings.open(tmp_path / "emb")


def test_a_shard_of_another_shape_is_named(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    np.save(tmp_path / "emb" / "shard-00000.npy", vectors(834, 5))
    with pytest.raises(DualencError, match=r"shard-00000\.npy: truncated or corrupt \(16808 bytes") as error:
        Embeddings.open(tmp_path / "emb")
    one_line(error)


@pytest.mark.parametrize("name", ["ids.txt", "shard-00001.npy", "meta.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "emb")
    (tmp_path / "emb" / name).unlink()
    with pytest.raises(DualencError, match=name) as error:
        Embeddings.open(tmp_path / "emb")
    one_line(error)


def test_ids_that_do_not_fit_are_told(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    (tmp_path / "emb" / "ids.txt").write_text("only one\n")
    with pytest.raises(DualencError, match=r"ids\.txt: truncated or corrupt \(9 bytes") as error:
        Embeddings.open(tmp_path / "emb")
    one_line(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"side": "left"}, "side right, not left"),
        ({"model_checksum": "xyz"}, "model_checksum abc, not xyz"),
        ({"dim": 4}, "dim 3, not 4"),
        ({"dtype": "float16"}, "dtype float32, not float16"),
        ({"ids": ids()[::-1]}, "ids_checksum"),
    ],
)
def test_another_run_is_not_resumed(tmp_path: Path, change: dict, message: str) -> None:
    write(tmp_path / "emb")
    given = {"ids": ids(), "dim": DIM, "dtype": "float32", **change}
    identity = {key: given.get(key, value) for key, value in IDENTITY.items()}
    with pytest.raises(DualencError, match=message) as error:
        EmbeddingWriter(tmp_path / "emb", given["ids"], given["dim"], given["dtype"], identity)
    assert "choose another folder or remove it" in one_line(error)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DualencError, match="holds no embeddings"):
        EmbeddingWriter(tmp_path, ids(), DIM, "float32", IDENTITY)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_not_a_folder_of_embeddings(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"format": "dualenc index"}')
    assert not is_embeddings(tmp_path)
    with pytest.raises(DualencError, match="not a folder of embeddings"):
        Embeddings.open(tmp_path)


def test_a_newer_format_is_told(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"format": "dualenc embeddings", "version": 99}')
    with pytest.raises(DualencError, match="newer dualenc"):
        Embeddings.open(tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("b\nc", "at row 1 contains a line break"),
        ("a", "'a' stands twice, at rows 0 and 1"),
        ("caf\udce9.jpg", "at row 1 is not valid Unicode"),
        (7, "id 7 at row 1 is int, not a text"),
    ],
)
def test_ids_that_cannot_be_written_or_told_apart_are_refused_before_any_work(
    tmp_path: Path, bad: Any, message: str
) -> None:
    with pytest.raises(DualencError, match=message) as error:
        EmbeddingWriter(tmp_path / "emb", ["a", bad], DIM, "float32", IDENTITY)
    one_line(error)
    assert not (tmp_path / "emb").exists()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 1)])
def test_vectors_that_do_not_fit_the_ids(shape: tuple[int, ...]) -> None:
    with pytest.raises(DualencError, match=r"matrix|one id per vector"):
        Embeddings(["a", "b", "c"], np.zeros(shape))
