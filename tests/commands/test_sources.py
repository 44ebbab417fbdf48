"""Sources as other tools leave them, where a command reads them: what is read, said and refused."""

from __future__ import annotations

import bz2
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data.store.vector_shards import Embeddings
from tests.helpers import toy
from tests.helpers.image_models import picture
from tests.helpers.in_process import failure, run

TABLE = pa.table({"id": ["a", "b"], "text": ["wing flow", "shock heat"], "tags": [["x"], ["y"]]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.text_model(tmp_path_factory.mktemp("model") / "model")


def spark(folder: Path) -> Path:
    folder.mkdir()
    pq.write_table(TABLE, folder / "part-00000-x.snappy.parquet")
    (folder / "_SUCCESS").touch()
    return folder


def hive(folder: Path) -> Path:
    for year in (2023, 2024):
        (folder / f"year={year}").mkdir(parents=True)
        ids = pa.array([f"{name}{year}" for name in "ab"])
        pq.write_table(TABLE.set_column(0, "id", ids), folder / f"year={year}" / "part-0.parquet")
    return folder


def packed(folder: Path) -> Path:
    path = folder.with_suffix(".csv.bz2")
    path.write_bytes(bz2.compress(b"id,text\na,wing flow\nb,shock heat\n"))
    return path


@pytest.mark.parametrize(("make", "count"), [(spark, 2), (hive, 4), (packed, 2)])
def test_embedding_what_other_tools_write(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    count: int,
) -> None:
    path = make(tmp_path / "source")
    monkeypatch.setenv("HOME", str(tmp_path))
    columns = ["--columns", "year"] if make is hive else []
    run("embed", model, f"~/{path.name}", "--out", tmp_path / "emb", *columns)
    embeddings = Embeddings.open(tmp_path / "emb")
    assert len(embeddings) == count
    if make is hive:
        assert embeddings.columns.column("year").to_pylist() == [2023, 2023, 2024, 2024]


def configurations(folder: Path) -> Path:
    for name in ("pair", "triplet"):
        (folder / name).mkdir(parents=True)
        pq.write_table(TABLE, folder / name / "train-00000-of-00001.parquet")
    return folder


def without_header(folder: Path) -> Path:
    path = folder.with_suffix(".csv")
    path.write_text("How do I reset it?\nanother\n")
    return path


def parts(folder: Path) -> Path:
    folder.mkdir()
    (folder / "part_0.csv").write_text("id,text\na,wing\n")
    (folder / "part_1.csv").write_text("b,flow\n")
    return folder


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (configurations, [], "in its subfolders (pair, triplet); name one of these"),
        (without_header, [], "looks like a text, not like the name of a column"),
        (parts, [], "part_1.csv: its first line (b, flow) is not that of part_0.csv (id, text)"),
        (
            spark,
            ["--columns", "tags"],
            "column 'tags' holds list<element: string>, which cannot be kept",
        ),
    ],
)
def test_what_is_refused_in_one_line(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    options: list[str],
    message: str,
) -> None:
    path = make(tmp_path / "source")
    assert message in failure(capsys, "embed", model, path, "--out", tmp_path / "emb", *options)
    assert not (tmp_path / "emb").exists()


def test_a_name_in_latin_1_among_images(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    try:
        picture((200, 20, 20), 0).save(folder / os.fsdecode(b"caf\xe9.png"))
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    picture((20, 20, 200), 1).save(folder / "b.png")
    run("embed", toy.image_text_model(tmp_path / "model"), folder, "--out", tmp_path / "emb")
    assert sorted(Embeddings.open(tmp_path / "emb").ids) == ["b.png", "caf\\xe9.png"]
