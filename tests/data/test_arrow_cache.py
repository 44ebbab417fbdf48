from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from dualenc.data import tables as arrow_cache
from dualenc.data.pairs import Skips
from dualenc.data.tables import LINE, read_lines
from dualenc.errors import BadSample, DualencError

from .make import write_jsonl


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything goes through the cache folder, however small."""
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    monkeypatch.setattr(arrow_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def read(path: Path, skips: Skips | None = None, **options):
    return read_lines([path], {"text": "value"}, (), skips or Skips(path), **options)


def test_values_become_texts_and_lists_of_texts(tmp_path: Path) -> None:
    records = [{"a": "x", "b": ["y", 2]}, {"a": 1.5, "b": "z"}, {"a": None}, {"a": True, "b": None, "c": {}}]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    rows = read_lines([path], {"a": "value", "b": "list"}, (), Skips(path))
    assert rows["a"][:] == ["x", "1.5", None, "true"]
    assert rows["b"][:] == [["y", "2"], ["z"], [], []]
    assert rows[LINE][:] == [1, 2, 3, 4]


def test_large_files_are_memory_mapped_and_written_once(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": f"t{i}"} for i in range(5000)] + ["{broken"])
    first_skips, second_skips = Skips(path), Skips(path)
    first = read(path, first_skips)
    written = {file: file.stat().st_mtime_ns for file in on_disk.iterdir()}
    second = read(path, second_skips)
    assert {file: file.stat().st_mtime_ns for file in on_disk.iterdir()} == written
    assert first["text"][:] == second["text"][:] == [f"t{i}" for i in range(5000)]
    assert first.cache_files[0]["filename"].startswith(str(on_disk))
    assert (first_skips.total, first_skips.describe()) == (second_skips.total, second_skips.describe())
    assert first_skips.total == 1


def test_only_the_path_travels_to_worker_processes(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "word " * 200} for _ in range(1000)])
    assert len(pickle.dumps(read(path))) < 10_000


def test_a_changed_file_is_read_again(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "old"}])
    assert read(path)["text"][:] == ["old"]
    os.utime(write_jsonl(path, [{"text": "new"}]), (1, 1))
    assert read(path)["text"][:] == ["new"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}, "{broken"])
    with pytest.raises(BadSample, match=r"x\.jsonl:2"):
        read(path, Skips(path, "raise"))
    assert not list(on_disk.glob("*"))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(arrow_cache, "cache_folder", lambda: tmp_path / "file" / "cache")
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}])
    with pytest.raises(DualencError, match="set HF_DATASETS_CACHE"):
        read(path)


def test_limit_stops_early(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": "b"}, "{broken"])
    skips = Skips(path)
    assert read(path, skips, limit=2)["text"][:] == ["a", "b"]
    assert skips.total == 0


@pytest.mark.parametrize("value", [["a", "list"], {"a": "record"}, "\ud800"])
def test_a_value_that_is_no_text_is_named_or_skipped(tmp_path: Path, value: object) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}, {"text": value}])
    with pytest.raises(BadSample, match=r"x\.jsonl:2: value of a wrong type"):
        read(path, Skips(path, "raise"))
    skips = Skips(path)
    assert len(read(path, skips)) == 1
    assert skips.total == 1


def test_a_missing_column_names_the_nearest_before_a_long_read(tmp_path: Path) -> None:
    records = ({"text": "a", "title": "b"} for _ in range(1500))
    path = write_jsonl(tmp_path / "x.jsonl", [*records, {"texts": "too late"}])
    with pytest.raises(DualencError, match=r"no column 'texts'; did you mean 'text'\? \(columns: text, title\)"):
        read_lines([path], {"texts": "value"}, (), Skips(path))


def test_a_column_may_be_missing_in_some_records(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"other": "a"}, {"text": "b"}])
    assert read(path)["text"][:] == [None, "b"]


def test_a_file_replaced_with_its_old_time_and_size_is_read_again(tmp_path: Path, on_disk: Path) -> None:
    path = tmp_path / "x.jsonl"
    for text in ("one", "two", "one"):
        write_jsonl(path, [{"text": text}])
        os.utime(path, ns=(0, 10**18))
        assert read(path)["text"][:] == [text]
    assert len(list(on_disk.glob("*.arrow"))) == 2


def test_a_damaged_cache_is_told(tmp_path: Path, on_disk: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "one"}])
    read(path)
    next(on_disk.glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(DualencError, match="damaged data cache"):
        read(path)
    next(on_disk.glob("*.json")).write_text("[]")
    with pytest.raises(DualencError, match="damaged data cache"):
        read(path)


def test_nul_characters_are_no_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": "a\0b"}])
    with pytest.raises(BadSample, match=r"x\.jsonl:2: value of a wrong type; a NUL character stands in the text"):
        read(path, Skips(path, "raise"))
    assert read(path)["text"][:] == ["a"]
