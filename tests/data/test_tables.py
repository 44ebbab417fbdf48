from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path

import datasets
import pytest

from dualenc.data import cache as arrow_cache
from dualenc.data.bad_rows import BadRows
from dualenc.data.line_tables import FILE, LINE, ColumnKind, table_of_lines
from dualenc.data.tables import DataTable, open_table, peek_columns
from dualenc.errors import BadSample, DualencError

from .make import write_csv, write_jsonl

ROWS = {"query": ["q0", "q1", "q2"], "documents": [["a", "b"], ["c"], []]}
COLUMNS: dict[str, ColumnKind] = {"query": "value", "documents": "list"}


def read(source: Path | str, columns: dict[str, ColumnKind] = COLUMNS, **options) -> DataTable:
    return open_table(source, columns, BadRows(source, "raise"), **options)


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
    assert peek_columns(path) == COLUMNS
    assert set(table.dataset.column_names) - {FILE, LINE} == set(COLUMNS)


def test_rows_know_where_they_stand(tmp_path: Path) -> None:
    for part in (1, 2):
        write_jsonl(tmp_path / f"part{part}.jsonl", [{"query": "q"}, {"query": "q"}])
    assert read(tmp_path / "part*.jsonl", {"query": "value"}).position(3) == f"{tmp_path}/part2.jsonl:2"
    assert read(save(tmp_path, "parquet")).position(2).endswith("train.parquet row 2")


def test_globs_join_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        datasets.Dataset.from_dict({"query": [name]}).to_parquet(tmp_path / f"{name}.parquet")
    assert read(str(tmp_path / "*.parquet"), {"query": "value"}).dataset["query"][:] == ["a", "b", "c"]


@pytest.mark.parametrize("layout", ["train.csv test.csv", "train-00000-of-00001.csv test-00000-of-00001.csv"])
@pytest.mark.parametrize("inside", [".", "data"])
def test_a_folder_holds_splits(tmp_path: Path, layout: str, inside: str) -> None:
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    for name in layout.split():
        write_csv(folder / name, ["query"], [[name.partition(".")[0].partition("-")[0]]])
    assert read(tmp_path, {"query": "value"}, split="test").dataset["query"][:] == ["test"]
    with pytest.raises(DualencError, match="no split 'dev'; there are: test, train"):
        read(tmp_path, {"query": "value"}, split="dev")


def test_a_saved_dataset_with_splits(tmp_path: Path) -> None:
    datasets.DatasetDict(train=datasets.Dataset.from_dict(ROWS)).save_to_disk(tmp_path / "saved")
    assert len(read(tmp_path / "saved")) == 3
    with pytest.raises(DualencError, match="no split 'test'; there are: train"):
        read(tmp_path / "saved", split="test")


SLICES = ["train", "train[:90%]", "train[-3:]", "train[:20%]+train[80%:]", "train[40%:60%]"]
KINDS = ["parquet", "csv", "jsonl", "saved", "splits", "folder"]


@pytest.mark.parametrize(
    ("kind", "split"), [*(("parquet", split) for split in SLICES), *((kind, "train[2:4]") for kind in KINDS)]
)
def test_slices_are_those_of_datasets(tmp_path: Path, kind: str, split: str) -> None:
    data = datasets.Dataset.from_dict({"query": [f"q{i}" for i in range(11)]})
    path = tmp_path / f"data.{kind}"
    if kind == "csv":
        write_csv(path, ["query"], [[query] for query in data["query"]])
    elif kind == "saved":
        data.save_to_disk(path)
    elif kind == "splits":
        datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        write_jsonl(path / "train.jsonl", [{"query": query} for query in data["query"]])
        write_jsonl(path / "test.jsonl", [{"query": "another"}])
    else:
        getattr(data, f"to_{'json' if kind == 'jsonl' else 'parquet'}")(path)
    data.to_parquet(tmp_path / "same.parquet")
    cache = str(tmp_path / "cache")
    theirs = datasets.load_dataset("parquet", data_files=str(tmp_path / "same.parquet"), split=split, cache_dir=cache)
    wanted = {"query": "value"}
    assert read(path, wanted, split=split).dataset["query"][:] == theirs["query"][:]
    if kind in ("csv", "jsonl"):
        assert read(path, wanted, split=split).position(1) == f"{path}:{4 if kind == 'jsonl' else 5}"


WRONG_SPLITS = ["validation", "test[:50%]", "train+test", "train[", "train[:200%]", ""]


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        *(("csv", split) for split in WRONG_SPLITS),
        *((kind, "test") for kind in ("parquet", "csv", "jsonl", "saved", "glob")),
    ],
)
def test_splits_that_a_file_does_not_have_are_refused(tmp_path: Path, kind: str, split: str) -> None:
    path: Path | str = tmp_path / f"train.{kind}"
    if kind in ("csv", "glob"):
        write_csv(tmp_path / "train.csv", ["query"], [["q"]])
        path = str(tmp_path / "*.csv") if kind == "glob" else path
    else:
        path = save(tmp_path, kind)
    with pytest.raises(DualencError, match=r"no split '.*'; there are: train") as error:
        read(path, {"query": "value"}, split=split)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("split", ["train[3:]", "train[2:2]", "train[2:1]"])
def test_a_slice_without_rows_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(DualencError, match=r"has no rows \(of train 3\); widen the slice"):
        read(save(tmp_path, "parquet"), split=split)


def test_a_shuffled_saved_dataset_keeps_its_order(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict(ROWS).select([2, 0])
    data.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved").dataset["query"][:] == ["q2", "q0"]


def test_a_hub_name_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: object, **options: object) -> datasets.Dataset:
        asked.append((args, options))
        return datasets.Dataset.from_dict(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read("owner/name", split="dev[:3]", subset="small")) == 3
    assert asked == [(("owner/name", "small"), {"split": "dev[:3]"})]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.csv", "no such file; give a file, folder or glob of"),
        ("no/such/*.parquet", "no such file"),
        ("owner/nothing", "as a dataset of the hub it does not load"),
    ],
)
def test_a_source_that_is_not_there(source: str, message: str) -> None:
    with pytest.raises(DualencError) as error:
        read(source)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=r"no column 'quary'; did you mean 'query'\? \(columns: query, documents\)"):
        read(save(tmp_path, "parquet"), {"quary": "value"})


def test_files_of_several_formats_are_no_table(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", ["query"], [["a"]])
    write_jsonl(tmp_path / "train.jsonl", [{"query": "a"}])
    with pytest.raises(DualencError, match=r"no table of one format \(\.csv, \.jsonl\)"):
        read(tmp_path)


@pytest.mark.parametrize("cut", [20, 400])
def test_a_broken_parquet_file_is_named(tmp_path: Path, cut: int) -> None:
    path = save(tmp_path, "parquet")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DualencError, match=r"train\.parquet: not a readable parquet file") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_damaged_parquet_pages_are_told(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_dict({"query": [f"text {i}" for i in range(2000)]}).to_parquet(path)
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)
    with pytest.raises(DualencError, match=r"train\.parquet: not a readable parquet file"):
        read(path, {"query": "value"})


def test_an_empty_file_is_told_when_its_columns_are_asked_for(tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.json", "x.txt"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DualencError, match=rf"{name}: no usable record: it is empty"):
            peek_columns(tmp_path / name)


def test_a_parquet_file_replaced_with_its_old_time_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for word in ("one", "two"):
        datasets.Dataset.from_dict({"query": [word]}).to_parquet(path)
        os.utime(path, ns=(0, 10**18))
        assert read(path, {"query": "value"}).dataset["query"][:] == [word]


def test_a_damaged_saved_dataset_is_told(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "saved")
    for name, content in (("state.json", "{}"), ("state.json", "[1]"), ("state.json", "no json")):
        (tmp_path / "saved" / name).write_text(content)
        with pytest.raises(DualencError, match="saved data set cannot be read") as error:
            read(tmp_path / "saved")
        assert "\n" not in str(error.value)


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything goes through the cache folder, however small."""
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    monkeypatch.setattr(arrow_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def read_text(path: Path, skips: BadRows | None = None, **options):
    return table_of_lines([path], {"text": "value"}, (), skips or BadRows(path), **options)


def test_values_become_texts_and_lists_of_texts(tmp_path: Path) -> None:
    records = [{"a": "x", "b": ["y", 2]}, {"a": 1.5, "b": "z"}, {"a": None}, {"a": True, "b": None, "c": {}}]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    rows = table_of_lines([path], {"a": "value", "b": "list"}, (), BadRows(path))
    assert rows["a"][:] == ["x", "1.5", None, "true"]
    assert rows["b"][:] == [["y", "2"], ["z"], [], []]
    assert rows[LINE][:] == [1, 2, 3, 4]


def test_large_files_are_memory_mapped_and_written_once(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": f"t{i}"} for i in range(5000)] + ["{broken"])
    first_skips, second_skips = BadRows(path), BadRows(path)
    first = read_text(path, first_skips)
    written = {file: file.stat().st_mtime_ns for file in on_disk.iterdir()}
    second = read_text(path, second_skips)
    assert {file: file.stat().st_mtime_ns for file in on_disk.iterdir()} == written
    assert first["text"][:] == second["text"][:] == [f"t{i}" for i in range(5000)]
    assert first.cache_files[0]["filename"].startswith(str(on_disk))
    assert (first_skips.total, first_skips.describe()) == (second_skips.total, second_skips.describe())
    assert first_skips.total == 1


def test_a_table_whose_counts_are_missing_is_written_again(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}, "{broken"])
    read_text(path)
    (counts,) = on_disk.glob("*.json")
    counts.unlink()  # as after a kill between the two files
    skips = BadRows(path)
    assert read_text(path, skips)["text"][:] == ["a"]
    assert skips.total == 1


def test_only_the_path_travels_to_worker_processes(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "word " * 200} for _ in range(1000)])
    assert len(pickle.dumps(read_text(path))) < 10_000


def test_a_changed_file_is_read_again(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "old"}])
    assert read_text(path)["text"][:] == ["old"]
    os.utime(write_jsonl(path, [{"text": "new"}]), (1, 1))
    assert read_text(path)["text"][:] == ["new"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}, "{broken"])
    with pytest.raises(BadSample, match=r"x\.jsonl:2"):
        read_text(path, BadRows(path, "raise"))
    assert not list(on_disk.glob("*"))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(arrow_cache, "cache_folder", lambda: tmp_path / "file" / "cache")
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}])
    with pytest.raises(DualencError, match="set HF_DATASETS_CACHE"):
        read_text(path)


@pytest.mark.parametrize("value", [["a", "list"], {"a": "record"}, "\ud800"])
def test_a_value_that_is_no_text_is_named_or_skipped(tmp_path: Path, value: object) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}, {"text": value}])
    with pytest.raises(BadSample, match=r"x\.jsonl:2: value of a wrong type"):
        read_text(path, BadRows(path, "raise"))
    skips = BadRows(path)
    assert len(read_text(path, skips)) == 1
    assert skips.total == 1


def test_a_column_that_no_record_has_names_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a", "title": "b"}])
    with pytest.raises(DualencError, match=r"no column 'texts'; did you mean 'text'\? \(columns: text, title\)"):
        table_of_lines([path], {"texts": "value"}, (), BadRows(path))


def test_a_column_may_be_missing_in_some_records(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"other": "a"}] * 1500 + [{"text": "b"}])
    assert read_text(path)["text"][:] == [None] * 1500 + ["b"]


def test_a_file_replaced_with_its_old_time_and_size_is_read_again(tmp_path: Path, on_disk: Path) -> None:
    path = tmp_path / "x.jsonl"
    for text in ("one", "two", "one"):
        write_jsonl(path, [{"text": text}])
        os.utime(path, ns=(0, 10**18))
        assert read_text(path)["text"][:] == [text]
    assert len(list(on_disk.glob("*.arrow"))) == 2


def test_a_damaged_cache_is_told(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "one"}])
    read_text(path)
    next(on_disk.glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(DualencError, match="damaged data cache"):
        read_text(path)
    next(on_disk.glob("*.json")).write_text("[]")
    with pytest.raises(DualencError, match="damaged data cache"):
        read_text(path)
