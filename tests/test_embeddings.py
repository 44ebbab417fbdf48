"""The folder of embeddings: numpy alone reads it, and every damage is named in one line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.embedding_writer import EmbeddingWriter, shard_ranges
from dualenc.embeddings import Embeddings, ShardedVectors, is_embeddings
from dualenc.errors import DualencError

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
    (folder / ".shard-00001.npy.part-123").write_bytes(b"half of it")
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
    with pytest.raises(DualencError, match=r"shard-00001\.npy: truncated or corrupt") as error:
        Embeddings.open(tmp_path / "emb")
    assert "again" in one_line(error)
    writer = EmbeddingWriter(tmp_path / "emb", ids(), DIM, "float32", IDENTITY)
    assert writer.missing() == [1]
    np.testing.assert_array_equal(np.asarray(write(tmp_path / "emb").vectors), vectors())


@pytest.mark.parametrize("content", [b"", b"not numpy at all", b"\x93NUMPY\x01\x00"])
def test_a_corrupt_shard_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "emb")
    (tmp_path / "emb" / "shard-00002.npy").write_bytes(content)
    with pytest.raises(DualencError, match=r"shard-00002\.npy: truncated or corrupt") as error:
        Embeddings.open(tmp_path / "emb")
    one_line(error)


def test_a_shard_of_pickled_objects_is_never_loaded(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    np.save(tmp_path / "emb" / "shard-00000.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DualencError, match="corrupt"):
        Embeddings.open(tmp_path / "emb")


def test_a_shard_of_another_shape_is_named(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    np.save(tmp_path / "emb" / "shard-00000.npy", vectors(834, 5))
    with pytest.raises(
        DualencError, match=r"float32 of shape \(834, 5\) instead of float32 of shape \(834, 3\)"
    ) as error:
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
    with pytest.raises(DualencError, match="1 ids for 2500 vectors") as error:
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


def test_an_id_with_a_line_break_is_refused(tmp_path: Path) -> None:
    writer = EmbeddingWriter(tmp_path / "emb", ["a", "b\nc"], DIM, "float32", IDENTITY)
    writer.write(0, vectors(2))
    with pytest.raises(DualencError, match="row 1 contains a line break"):
        writer.finish()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 1)])
def test_vectors_that_do_not_fit_the_ids(shape: tuple[int, ...]) -> None:
    with pytest.raises(DualencError, match=r"matrix|one id per vector"):
        Embeddings(["a", "b", "c"], np.zeros(shape))
