"""The folder of embeddings: Arrow's readers open it, and every damage is named in one line."""

from __future__ import annotations

import glob
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data.store.items import item_batch, read_batches, write_batches
from dualenc.data.store.vector_shards import Embeddings, ShardedVectors, is_embeddings
from dualenc.errors import DualencError
from dualenc.io.checksums import recorded
from dualenc.search.embed.writer import EmbeddingWriter, shard_ranges

NUM_ITEMS, DIM = 2500, 3
IDENTITY = {"side": "right", "model_checksum": "abc"}


def vectors(num_items: int = NUM_ITEMS, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num_items, dim)).astype(np.float32)


def ids(num_items: int = NUM_ITEMS) -> list[str]:
    return [f"item {i}" for i in range(num_items)]


def filled(writer: EmbeddingWriter, stored: np.ndarray) -> Embeddings:
    for number in writer.unwritten():
        writer.write(number, stored[writer.ranges[number]])
    writer.outdated()
    return writer.finish()


def write(folder: Path) -> Embeddings:
    writer = EmbeddingWriter(
        folder, ids(), DIM, "float32", IDENTITY, {"model": "m"}, snippet="snippet “{}”\n".format
    )
    return filled(writer, vectors())


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["lancedb", "duckdb", "polars", "datasets"])
def test_other_tools_open_the_folder_as_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
    code = page.partition("open the files directly:\n\n```python\n")[2].partition("```")[0]
    block = next(block for block in code.split("\n\n") if f"{tool}." in block)
    monkeypatch.chdir(tmp_path)
    years = pa.table({"year": [2020 + row % 5 for row in range(NUM_ITEMS)]})
    unit = vectors() / np.linalg.norm(vectors(), axis=1, keepdims=True)
    filled(EmbeddingWriter("emb", ids(), DIM, "float32", {}, snippet=str, columns=years), unit)
    names: dict[str, Any] = {
        tool: pytest.importorskip(tool),
        "glob": glob,
        "pyarrow": pa,
        "Embeddings": Embeddings,
    }
    names["vector"] = unit[7]
    exec(block, names)
    if tool == "lancedb":
        assert names["nearest"][0]["id"] == "item 7"
        assert all(row["year"] >= 2022 for row in names["nearest"])
    elif tool == "duckdb":
        assert names["nearest"].fetchall()[0] == ("item 7",)
    else:
        assert list(names["items"]["id"]) == ids()
        rows = names["items"]["vector"][:9]
        np.testing.assert_array_equal(
            np.array(rows.to_list() if tool == "polars" else rows, np.float32), unit[:9]
        )


@pytest.mark.parametrize("rows", [999, 16384])
def test_record_batches_of_a_folder_and_of_memory_are_equal(tmp_path: Path, rows: int) -> None:
    columns = pa.table({"year": list(range(NUM_ITEMS)), "lang": ["en", None] * (NUM_ITEMS // 2)})
    writer = EmbeddingWriter(
        tmp_path / "emb", ids(), DIM, "float16", {}, snippet=str, columns=columns
    )
    stored = filled(writer, vectors())
    held = Embeddings(
        ids(), vectors().astype(np.float16), None, list(map(str, range(NUM_ITEMS))), columns
    )
    batches = list(stored.record_batches(rows))
    assert max(map(len, batches)) <= rows
    assert batches[0].schema.names == ["id", "vector", "text", "year", "lang"]
    assert batches[0].schema.field("vector").type == pa.list_(pa.float16(), DIM)
    assert pa.Table.from_batches(batches).equals(pa.Table.from_batches(held.record_batches(rows)))
    assert stored.columns.equals(columns)


def test_opened_embeddings_are_those_that_were_written(tmp_path: Path) -> None:
    write(tmp_path / "emb")
    embeddings = Embeddings.open(tmp_path / "emb")
    assert is_embeddings(tmp_path / "emb")
    assert embeddings.ids == ids()
    assert embeddings.provenance.side == "right"
    assert embeddings.snippets is not None
    assert [embeddings.snippets[row] for row in (2499, 0, 1200)] == [
        f"snippet “{r}”\n" for r in (2499, 0, 1200)
    ]
    np.testing.assert_array_equal(np.asarray(embeddings.vectors), vectors())
    np.testing.assert_array_equal(np.concatenate(list(embeddings.blocks(999))), vectors())
    assert all(not shard.flags.owndata for shard in embeddings.vectors.shards), "views of the file"
    assert embeddings.rows_of(["item 7", "nobody", "item 2499"]).tolist() == [7, -1, 2499]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    start=st.integers(-30, 30),
    stop=st.integers(-30, 30),
    step=st.sampled_from([1, 2, -1]),
    seed=st.integers(0, 99),
)
def test_shards_read_as_one_matrix(
    lengths: list[int], start: int, stop: int, step: int, seed: int
) -> None:
    matrix = vectors(sum(lengths), 2)
    sharded = ShardedVectors(np.split(matrix, np.cumsum(lengths)[:-1]))
    assert sharded.shape == matrix.shape
    np.testing.assert_array_equal(sharded[start:stop:step], matrix[start:stop:step])
    if len(matrix):
        rows = np.random.default_rng(seed).integers(len(matrix), size=7)
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
    (folder / ".data-00001.arrow.part").mkdir()
    with pytest.raises(DualencError, match="not finished"):
        Embeddings.open(folder)
    second = EmbeddingWriter(folder, ids(), DIM, "float32", IDENTITY)
    assert second.unwritten() == [1, 2]
    assert not list(folder.glob(".*"))
    np.testing.assert_array_equal(np.asarray(write(folder).vectors), vectors())


@pytest.mark.parametrize("name", ["data-00001.arrow", "meta.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "emb")
    (tmp_path / "emb" / name).unlink()
    with pytest.raises(DualencError, match=name):
        Embeddings.open(tmp_path / "emb")


@pytest.mark.parametrize("name", ["data-00000.arrow", "order.npy"])
@pytest.mark.parametrize("place", [0.5, None])
def test_damage_is_noticed(tmp_path: Path, name: str, place: float | None) -> None:
    write(tmp_path / "emb")
    path = tmp_path / "emb" / name
    content = bytearray(path.read_bytes())
    if place is None:
        del content[-100:]
    else:
        content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(DualencError, match=f"{name}: .*corrupt"):
        Embeddings.open(tmp_path / "emb")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../../etc/passwd": "0" * 64}}, "its files are not those of the folder"),
        ({"sizes": 7}, "'sizes' is an integer, not an object"),
        ({"shard_rows": [-834, 833, 833]}, "shard_rows .* do not describe embeddings"),
        ({"dim": 10**30}, "instead of float32 vectors of dimension 10+"),
        ({"dtype": "object"}, "dtype object and .* do not describe embeddings"),
        ({"version": 99}, "has format 99 of another dualenc"),
        ({"format": "dualenc index"}, "not a folder of embeddings; .* --out EMBEDDINGS"),
    ],
)
def test_a_meta_that_describes_no_embeddings(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write(tmp_path / "emb")
    path = tmp_path / "emb" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DualencError, match=message):
        Embeddings.open(tmp_path / "emb")


@pytest.mark.parametrize(
    ("bad", "dtype"), [(np.nan, "float32"), (np.inf, "float32"), (1e5, "float16")]
)
def test_a_vector_that_is_not_finite_as_stored_is_never_written(
    tmp_path: Path, bad: float, dtype: str
) -> None:
    writer = EmbeddingWriter(tmp_path / "emb", ids(), DIM, dtype, IDENTITY)
    block = vectors()[834:1666]
    block[7, 1] = bad
    with pytest.raises(DualencError, match=f"the vector of 'item 842' is not finite as {dtype}"):
        writer.write(1, block, [(840, "unreadable")])
    assert writer.unwritten() == [0, 1, 2]


class TestContents:
    """Shards are identified by their contents, not by their ids alone."""

    @staticmethod
    def writer(folder: Path, items: list[str]) -> EmbeddingWriter:
        return EmbeddingWriter(
            folder,
            ids(),
            DIM,
            "float32",
            IDENTITY,
            contents=lambda rows: "".join(items[rows.start : rows.stop]),
        )

    def written(
        self, folder: Path, items: list[str], skipped: dict[int, str] | None = None
    ) -> list[int]:
        """Which shards a run writes."""
        writer = self.writer(folder, items)
        missing = writer.unwritten() or writer.outdated()
        for number in missing:
            bad = [
                (row, why) for row, why in (skipped or {}).items() if row in writer.ranges[number]
            ]
            rows = [row for row in writer.ranges[number] if row not in dict(bad)]
            writer.write(number, vectors()[rows], bad)
        writer.finish()
        return missing

    def test_a_shard_with_a_changed_item_is_written_again(self, tmp_path: Path) -> None:
        items = [str(row) for row in range(NUM_ITEMS)]
        assert self.written(tmp_path / "emb", items) == [0, 1, 2]
        assert self.written(tmp_path / "emb", items) == []
        items[900] = "changed"
        assert self.writer(tmp_path / "emb", items).outdated() == [1]
        with pytest.raises(DualencError, match="not finished"):
            Embeddings.open(tmp_path / "emb")
        assert self.written(tmp_path / "emb", items) == [1]

    def test_a_repaired_item_is_tried_again(self, tmp_path: Path) -> None:
        items = ["bad" if row == 900 else str(row) for row in range(NUM_ITEMS)]
        assert self.written(tmp_path / "emb", items, {900: "unreadable"}) == [0, 1, 2]
        assert len(Embeddings.open(tmp_path / "emb")) == NUM_ITEMS - 1
        items[900] = "repaired"
        assert self.written(tmp_path / "emb", items) == [1]
        assert Embeddings.open(tmp_path / "emb").ids == ids()

    @pytest.mark.parametrize("note", ["[]", '{"contents": 1, "sha256": "", "skipped": []}', None])
    def test_a_damaged_shard_is_written_again(self, tmp_path: Path, note: str | None) -> None:
        items = [str(row) for row in range(NUM_ITEMS)]
        self.written(tmp_path / "emb", items)
        path = tmp_path / "emb" / "data-00001.arrow"
        if note is None:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        else:
            batch = read_batches(path, "")[0]
            write_batches(path, [batch.replace_schema_metadata({"dualenc": note})])
        assert self.written(tmp_path / "emb", items) == [1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (item_batch(ids(833), None, None, vectors(833, 5)), "Schema at index 2 was different"),
        (
            pa.record_batch({"id": ids(833), "vector": pa.nulls(833, pa.list_(pa.float32(), 3))}),
            "a vector is missing",
        ),
    ],
)
def test_arrow_files_of_something_else(tmp_path: Path, batch: pa.RecordBatch, message: str) -> None:
    """With checksums that fit, as somebody may write them."""
    folder = tmp_path / "emb"
    filled(EmbeddingWriter(folder, ids(), DIM, "float32", IDENTITY), vectors())
    write_batches(folder / "data-00002.arrow", [batch])
    meta = json.loads((folder / "meta.json").read_text())
    meta |= recorded(folder, meta["files"])
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DualencError, match=message):
        Embeddings.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"side": "left"}, "side right, not left"),
        ({"model_checksum": "xyz"}, "embeddings by other weights"),
        ({"dim": 4}, "dim 3, not 4"),
        ({"dtype": "float16"}, "dtype float32, not float16"),
        ({"ids": ids()[::-1]}, "ids_checksum"),
    ],
)
def test_another_run_is_not_resumed(tmp_path: Path, change: dict, message: str) -> None:
    write(tmp_path / "emb")
    given = {"ids": ids(), "dim": DIM, "dtype": "float32", **change}
    identity = {key: given.get(key, value) for key, value in IDENTITY.items()}
    with pytest.raises(DualencError, match=message):
        EmbeddingWriter(tmp_path / "emb", given["ids"], given["dim"], given["dtype"], identity)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("b\nc", "at row 1 contains a line break"),
        ("a", "'a' is a duplicate, at rows 0 and 1"),
        ("caf\udce9.jpg", "at row 1 is not valid Unicode"),
        (7, "id 7 at row 1 is int, not a text"),
    ],
)
def test_ids_that_cannot_be_written_or_told_apart_are_refused_before_any_work(
    tmp_path: Path, bad: Any, message: str
) -> None:
    with pytest.raises(DualencError, match=message):
        EmbeddingWriter(tmp_path / "emb", ["a", bad], DIM, "float32", IDENTITY)
    assert not (tmp_path / "emb").exists()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 1)])
def test_vectors_that_do_not_fit_the_ids(shape: tuple[int, ...]) -> None:
    with pytest.raises(DualencError, match=r"matrix|one id per vector"):
        Embeddings(["a", "b", "c"], np.zeros(shape))
