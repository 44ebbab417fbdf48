"""Find the files of a table: in a folder by split or partition, without files other tools add."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

from dualenc.data.bad_rows import report_once
from dualenc.data.readers.images import SPLITS
from dualenc.data.readers.lines import LINE_FORMATS, file_format, is_empty
from dualenc.data.readers.read_options import check_split
from dualenc.errors import DualencError
from dualenc.io.reading import glob_files
from dualenc.types import StrPath

TABLE_FORMATS = (*LINE_FORMATS, ".parquet")
Partition = dict[str, int | str | None]
"""Keys of the folders that hold a file: {"year": 2024} for `year=2024/part-0.parquet`."""

_CONVERSIONS = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), "save the sheet as csv"),
    **dict.fromkeys(
        (".arrow", ".feather", ".orc", ".avro", ".pkl", ".h5", ".db"), "write its rows as parquet"
    ),
    **dict.fromkeys(
        (".lz4", ".snappy", ".deflate", ".br", ".7z", ".rar", ".z", ".tgz", ".tar"),
        "decompress it first",
    ),
    ".zip": "unpack it, or name it by what the one file in it is, such as x.csv.zip",
}
"""Advice for files of other formats, by suffix."""
_MAX_BESIDE = 100_000  # files in subfolders to mention as unread; more would take too long to list
# Files about the data, by name without suffix.
_ABOUT = ("readme", "license", "licence", "notice", "changelog", "citation", "requirements")
_ABOUT_JSON = ("dataset_info.json", "dataset_infos.json", "dataset-metadata.json", "state.json")
# Catalogs list the valid files of a table; other files in its folder may hold deleted rows.
_CATALOGS = {
    "_delta_log": "Delta table",
    ".hoodie": "Hudi table",
    "metadata/*.metadata.json": "Iceberg table",
}
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
# At most 18 digits, which fit into 64 bits. 007 is a text: as a number it would lose its zeros.
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


def find_files(source: StrPath, split: str) -> list[Path]:
    """Return the table files of a path, glob or folder, sorted; of a folder, those of a split."""
    is_folder = Path(source).is_dir()
    files = _files_of_split(Path(source), split) if is_folder else _files_of_glob(str(source))
    formats = {file_format(file) for file in files}
    if len(formats) == 1 and formats <= set(TABLE_FORMATS):
        if not is_folder:
            check_split(source, split)
        return files
    fix = f"give a file, folder or glob of one of {', '.join(TABLE_FORMATS)}, or .tar files"
    if not files:
        problem = (
            "no table in this folder (use ImageFolderViews for images)"
            if is_folder
            else "no such file"
        )
    elif len(formats) > 1:
        problem = f"files of several formats ({', '.join(sorted(formats))})"
        fix = "name those of one format, by a glob"
    else:
        suffix = files[0].suffix.lower()
        problem = f"a file of another format ({file_format(files[0]) or suffix or 'no suffix'})"
        fix = _CONVERSIONS.get(file_format(files[0])) or _CONVERSIONS.get(suffix, fix)
    raise DualencError(problem, fix=fix, where=source)


def _files_of_glob(pattern: str) -> list[Path]:
    """Return the files that match a glob, without those that Spark and Arrow add to tables."""
    files = glob_files(pattern)
    # `*` also matches _SUCCESS and _metadata, which the user does not mean.
    own = [
        file
        for file in files
        if not file.name.startswith("_") or file_format(file) in TABLE_FORMATS
    ]
    return own or files


def _files_of_split(folder: Path, split: str) -> list[Path]:
    splits = split_tables(folder)
    if not splits or split in splits:
        return splits.get(split, [])
    if has_splits(splits):
        check_split(folder, split, sorted(filter(None, splits)))
    check_split(folder, split)
    ((name, files),) = splits.items()
    # Numbered parts belong together; a common first word may mean something else, so report it.
    if name:
        report_once(
            f"{folder}: no file is named like a split; all {name}* are read as {split} "
            f"({len(files)} files)"
        )
    return files


def is_table(path: Path) -> bool:
    """Return True for files of `TABLE_FORMATS`, except hidden ones and files like README.txt."""
    name = path.name.lower()
    if _is_hidden(name) or file_format(path) not in TABLE_FORMATS or name in _ABOUT_JSON:
        return False
    return name.split(".")[0] not in _ABOUT and path.is_file()


def _is_hidden(name: str) -> bool:
    """Return True for auxiliary files of Spark, Arrow and notebooks: _SUCCESS, .x.crc, ._x.png."""
    return name.startswith((".", "_"))


def files_in(folder: Path) -> list[Path]:
    """Return the contents of a folder, sorted; [] if it does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files in the subfolders of a folder, sorted within each, without hidden ones."""
    for subfolder in files_in(folder):
        if _is_hidden(subfolder.name) or not subfolder.is_dir():
            continue
        for parent, folders, names in os.walk(subfolder):
            folders[:] = sorted(name for name in folders if not _is_hidden(name))
            yield from (Path(parent, name) for name in sorted(names) if not _is_hidden(name))


def first_word(name: str) -> str:
    """Return the beginning of a file's name, which may be its split."""
    return re.split(r"[._-]", name)[0]


def is_split(name: str) -> bool:
    """Return True for common names of splits."""
    return name.lower() in SPLITS


def split_tables(folder: Path) -> dict[str, list[Path]]:
    """Return the table files of a folder by split, sorted.

    Files in the folder and in its `data` folder belong to the split that their names begin with. If
    there are none, subfolders with names of splits are splits, and all partitions
    (`year=2024/part-0.parquet`) belong together. Without splits, all files are under one other
    name.

    Raises:
        DualencError: the only tables are in other subfolders, partitions lie beside tables, or a
            catalog (Delta, Hudi, Iceberg) decides which files are valid.
    """
    for pattern, kind in _CATALOGS.items():
        if next(folder.glob(pattern), None) is not None:
            raise DualencError(
                f"this is a {kind}, whose log decides which of its files are valid",
                fix="write its rows to parquet files in another folder",
                where=folder,
            )
    files = [file for file in (*files_in(folder), *files_in(folder / "data")) if is_table(file)]
    # `data` is one of the subfolders. If its files are the table, do not list them as unread.
    seen = set(files)
    most = _MAX_BESIDE if files else None
    # Partitions and splits in subfolders are both grouped by the first folder on the way.
    subfolders: dict[str, list[Path]] = {}
    for file in islice(files_below(folder), most):
        if file not in seen and is_table(file):
            subfolders.setdefault(_parents(folder, file)[0], []).append(file)
    parts = {name for name in subfolders if "=" in name}
    below = [file.relative_to(folder).as_posix() for group in subfolders.values() for file in group]
    # It is unclear whether the rows of both make one table.
    if files and parts:
        raise DualencError(
            f"a table ({files[0].name}) lies beside partitions ({min(parts)})",
            fix="move one of them to a separate folder",
            where=folder,
        )
    if files:
        report_unread(
            folder, "the tables in this folder are read, those in its subfolders are not", below
        )
        return _by_first_word(files)
    if parts and len(parts) == len(subfolders):
        return {"": [file for group in subfolders.values() for file in group]}
    if not all(map(is_split, subfolders)):
        names = sorted({str(Path(name).parent) for name in below})
        raise DualencError(
            f"no table in the folder itself, but in its subfolders ({_first(names, 5)})",
            fix=f"name one of these: {folder / names[0]}",
            where=folder,
        )
    return subfolders


def _parents(folder: Path, file: Path) -> tuple[str, ...]:
    """Return the names of the folders between a folder, or its `data` folder, and a file."""
    parts = file.relative_to(folder).parts[:-1]
    return parts[1:] if parts[:1] == ("data",) and len(parts) > 1 else parts


def _by_first_word(files: Iterable[Path]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for file in files:
        word = first_word(file.name)
        # Numbers distinguish parts, not splits.
        splits.setdefault("" if word.isdecimal() else word, []).append(file)
    return splits


def _partition_keys(folder: Path, file: Path) -> dict[str, str]:
    """Return the decoded `name=value` folders between a folder and a file in it."""
    pairs = [part.split("=", 1) for part in _parents(folder, file) if "=" in part]
    return {unquote(name): unquote(value) for name, value in pairs}


def has_splits(splits: Collection[str]) -> bool:
    """Return True if names of `split_tables` are splits; one other name stands for all files."""
    return len(splits) != 1 or any(map(is_split, splits))


def report_unread(folder: Path, what: str, names: Collection[str]) -> None:
    """Log in one line which files of a folder are not read."""
    if names:
        report_once(f"{folder}: {what}: {_first(sorted(names), 3)}")


def _first(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")


def without_empty(source: StrPath, files: list[Path]) -> list[Path]:
    """Return the files that are not empty, or all of them if every one is.

    Parallel jobs with nothing to write leave empty files.
    """
    empty = [file for file in files if is_empty(file)]
    if not empty or len(empty) == len(files):
        return files
    report_once(f"{source}: {len(empty)} of {len(files)} files are empty (first: {empty[0].name})")
    return [file for file in files if file not in empty]


def read_partitions(folder: Path, files: Iterable[Path]) -> list[Partition]:
    """Return the decoded keys of each file's partition, [] without partitions.

    Values are integers if all values of a key are.
    """
    rows = [_partition_keys(folder, file) for file in files]
    names = {name for row in rows for name in row}
    if not names:
        return []
    partitions: list[Partition] = [dict(row) for row in rows]
    for name in names:
        # One text among the values makes all of them texts: a column has one type.
        values = [row[name] for row in rows if row.get(name, _NULL_PARTITION) != _NULL_PARTITION]
        are_numbers = all(map(_WHOLE_NUMBER.fullmatch, values))
        for row in partitions:
            value = row.get(name, _NULL_PARTITION)
            if value == _NULL_PARTITION:
                row[name] = None
            else:
                row[name] = int(str(value)) if are_numbers else value
    shown = ", ".join(sorted(names))
    report_once(f"{folder}: the names of partition folders are read as columns: {shown}")
    return partitions
