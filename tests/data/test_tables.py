from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest

from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.read_options import ReadOptions
from dualenc.data.readers.tables import FILE, LINE, DataTable, TableSource
from dualenc.data.store import cache as arrow_cache
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import write_csv, write_jsonl

ROWS = {"query": ["q0", "q1", "q2"], "documents": [["a", "b"], ["c"], []]}
COLUMNS: dict[str, ColumnKind] = {"query": "value", "documents": "list"}
QUERY: dict[str, ColumnKind] = {"query": "value"}


def read(
    source: Path | str,
    columns: dict[str, ColumnKind] = COLUMNS,
    subset: str | None = None,
    **options: Any,
) -> DataTable:
    bad_rows = BadRows(source, "raise")
    return TableSource(source, bad_rows, options=ReadOptions(**options), subset=subset).open(
        columns
    )


def queries(source: Path | str, **options: Any) -> list[str]:
    return read(source, QUERY, **options).dataset["query"][:]


def save(folder: Path, kind: str) -> Path:
    data = datasets.Dataset.from_dict(ROWS)
    path = folder / f"train.{kind}"
    if kind == "parquet":
        data.to_parquet(path)
    elif kind == "jsonl":
        data.to_json(path)
    elif kind == "jsonl.gz":
        data.to_json(folder / "plain.jsonl")
        path.write_bytes(gzip.compress((folder / "plain.jsonl").read_bytes()))
    else:
        data.save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "saved"])
def test_every_format_that_datasets_writes_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, kind)
    table = read(path)
    assert {name: table.dataset[name][:] for name in COLUMNS} == ROWS
    assert TableSource(path, BadRows(path)).kinds == COLUMNS
    assert set(table.dataset.column_names) - {FILE, LINE} == set(COLUMNS)


def test_rows_have_a_position_and_globs_are_sorted(tmp_path: Path) -> None:
    for part in (2, 1):
        write_jsonl(tmp_path / f"part{part}.jsonl", [{"query": f"{part}0"}, {"query": f"{part}1"}])
    table = read(tmp_path / "part*.jsonl", QUERY)
    assert table.dataset["query"][:] == ["10", "11", "20", "21"]
    assert table.position(3) == f"{tmp_path}/part2.jsonl:2"
    assert read(save(tmp_path, "parquet")).position(2).endswith("train.parquet row 2")


@pytest.mark.parametrize("ending", [".csv", "-00000-of-00001.csv"])
@pytest.mark.parametrize("inside", [".", "data"])
def test_a_folder_holds_splits(tmp_path: Path, ending: str, inside: str) -> None:
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    for name in ("train", "test"):
        write_csv(folder / f"{name}{ending}", ["query"], [[name]])
    assert queries(tmp_path, split="test") == ["test"]
    with pytest.raises(DualencError, match="no split 'dev'; there are: test, train"):
        read(tmp_path, QUERY, split="dev")


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "saved", "splits", "folder"])
@pytest.mark.parametrize("split", ["dev", "train[:50%]", "train+test", "train[", ""])
def test_a_split_is_one_of_the_names_that_a_source_has(
    tmp_path: Path, kind: str, split: str
) -> None:
    names = "train"
    if kind == "csv":
        path = write_csv(tmp_path / "train.csv", ["query"], [["q"]])
    elif kind == "splits":
        names = "train, test"
        path = tmp_path / kind
        data = datasets.Dataset.from_dict(ROWS)
        datasets.DatasetDict(train=data, test=data.select([2])).save_to_disk(path)
        assert queries(path, split="test") == ["q2"]
    elif kind == "folder":
        path = save(tmp_path, "parquet").parent
    else:
        path = save(tmp_path, kind)
    assert queries(path, split="train")
    with pytest.raises(DualencError) as error:
        read(path, QUERY, split=split)
    assert str(error.value) == f"{path}: no split {split!r}; there are: {names}"


def test_a_shuffled_saved_dataset_keeps_its_order(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(ROWS).select([2, 0]).save_to_disk(tmp_path / "saved")
    assert queries(tmp_path / "saved") == ["q2", "q0"]


def test_a_hub_name_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: object, **options: object) -> datasets.Dataset:
        calls.append((args, options))
        return datasets.Dataset.from_dict(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read("owner/name", split="dev[:3]", subset="small")) == 3
    assert calls == [(("owner/name", "small"), {"split": "dev[:3]"})]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("formats", r"files of several formats \(\.csv, \.jsonl\); name those of one format"),
        ("saved", "saved data set cannot be read"),
        ("cut.parquet", r"cut\.parquet: cannot be read"),
        ("nowhere.csv", "no such file; give a file, folder or glob of"),
        ("no/such/*.parquet", "no such file"),
        (
            "images",
            r"images: no table in this folder \(use ImageFolderViews for images\); give a file",
        ),
        ("owner/nothing", "not a local file, and loading it as a hub data set fails"),
    ],
)
def test_sources_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("formats").mkdir()
    Path("images").mkdir()
    write_csv(Path("formats/train.csv"), ["query"], [["a"]])
    write_jsonl(Path("formats/train.jsonl"), [{"query": "a"}])
    datasets.Dataset.from_dict(ROWS).save_to_disk("saved")
    Path("saved/state.json").write_text("[1]")
    datasets.Dataset.from_dict(ROWS).to_parquet("cut.parquet")
    os.truncate("cut.parquet", 400)
    with pytest.raises(DualencError, match=message):
        read(source, QUERY)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    for kind in ("parquet", "jsonl"):
        with pytest.raises(
            DualencError,
            match=r"no column 'quary' \(did you mean query\?\); there are: query, docum",
        ):
            read(save(tmp_path, kind), {"quary": "value"})
    with pytest.raises(DualencError, match="no usable record: it is empty"):
        _ = TableSource(write_jsonl(tmp_path / "x.jsonl", []), BadRows("x")).kinds


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything goes through the cache folder, however small."""
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    monkeypatch.setattr(arrow_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def read_text(path: Path, bad_rows: BadRows | None = None) -> datasets.Dataset:
    return TableSource(path, bad_rows or BadRows(path)).open({"text": "value"}).dataset


def test_values_become_texts_and_lists_of_texts(tmp_path: Path) -> None:
    records = [
        {"a": "x", "b": ["y", 2]},
        {"a": 1.5, "b": "z"},
        {"a": None},
        {"a": True, "b": None, "c": {}},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    rows = TableSource(path, BadRows(path)).open({"a": "value", "b": "list"}).dataset
    assert rows["a"][:] == ["x", "1.5", None, "true"]
    assert rows["b"][:] == [["y", "2"], ["z"], [], []]
    assert rows[LINE][:] == [1, 2, 3, 4]


@pytest.mark.parametrize("value", [["a", "list"], {"a": "record"}, "\ud800"])
def test_a_value_that_is_no_text_is_named_or_skipped(tmp_path: Path, value: object) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}, {"text": value}])
    with pytest.raises(BadSample, match=r"x\.jsonl:2: value of a wrong type"):
        read_text(path, BadRows(path, "raise"))
    bad_rows = BadRows(path)
    assert len(read_text(path, bad_rows)) == 1
    assert bad_rows.total == 1


def test_large_files_are_memory_mapped_and_written_once(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"text": f"t{i} " * 20} for i in range(5000)] + ["{broken"]
    )
    counts = [BadRows(path), BadRows(path), BadRows(path)]
    first = read_text(path, counts[0])
    written = {file: file.stat().st_mtime_ns for file in on_disk.iterdir()}
    second = read_text(path, counts[1])
    assert {file: file.stat().st_mtime_ns for file in on_disk.iterdir()} == written
    assert first["text"][:] == second["text"][:] == [f"t{i} " * 20 for i in range(5000)]
    assert first.cache_files[0]["filename"].startswith(str(on_disk))
    assert len(pickle.dumps(second)) < 10_000, "only the path travels to worker processes"
    for file in on_disk.iterdir():  # as after a kill between the two files: both are written again
        file.unlink() if file.suffix == ".arrow" else file.write_text("{}")
    read_text(path, counts[2])
    assert [(one.total, one.describe()) for one in counts] == [(1, counts[0].describe())] * 3


def test_changed_files_are_read_again(tmp_path: Path, on_disk: Path) -> None:
    path = tmp_path / "x.jsonl"
    for text in ("one", "two", "one", "longer"):
        write_jsonl(path, [{"text": text}])
        os.utime(path, ns=(0, 10**18))
        assert read_text(path)["text"][:] == [text]
        datasets.Dataset.from_dict({"query": [text]}).to_parquet(tmp_path / "x.parquet")
        os.utime(tmp_path / "x.parquet", ns=(0, 10**18))
        assert queries(tmp_path / "x.parquet") == [text]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}, "{broken"])
    with pytest.raises(BadSample, match=r"x\.jsonl:2"):
        read_text(path, BadRows(path, "raise"))
    assert not list(on_disk.glob("*"))


def test_a_cache_that_is_damaged_or_cannot_be_written(
    tmp_path: Path, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "one"}])
    read_text(path)
    next(on_disk.glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(DualencError, match="damaged data cache"):
        read_text(path)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(arrow_cache, "cache_folder", lambda: tmp_path / "file" / "cache")
    with pytest.raises(DualencError, match="set HF_DATASETS_CACHE"):
        read_text(path)
