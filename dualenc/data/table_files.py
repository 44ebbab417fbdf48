"""Files and splits of tables: what a path, glob, folder, saved data set or URL stands for."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualenc.data.cache import first_line
from dualenc.data.lines import LINE_FORMATS, file_format
from dualenc.data.remote import RemoteFile, expand, open_files
from dualenc.data.urls import display_name, is_url, url_suffix
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from datasets import Dataset

TableFile = Path | RemoteFile
ONLY_SPLIT = "train"
"""What `datasets` calls the rows of a file."""
TABLE_FORMATS = (*LINE_FORMATS, ".parquet")

_FORMATS = ", ".join(TABLE_FORMATS)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_files(source: str, split: str) -> list[TableFile]:
    """The table files that a path, glob, folder or URL stands for, sorted; none of a saved data set or a hub name.

    Of a folder, the files named SPLIT.*, SPLIT-* or SPLIT_* in it or in its `data` folder, as the hub lays them out;
    everything else is one split, train.

    Raises:
        DualencError: nothing matches, the formats differ, or there is no such split.
    """
    # Refused rather than ignored: another split of the same file would be the training data again.
    if has_one_split(source) and split_name(split) != ONLY_SPLIT:
        raise DualencError(f"{display_name(source)}: no split {split!r}; there are: {ONLY_SPLIT}")
    if is_url(source):
        urls = expand(source)
        _check_one_format(source, {url_suffix(url) for url in urls})
        return [*open_files(urls)]
    path = Path(source)
    if is_saved(path):
        return []
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _files_of_split(path, split)
    elif any(character in source for character in "*?["):
        files = sorted(Path(match) for match in glob.glob(source, recursive=True) if Path(match).is_file())
    # A name with a table's suffix is a file that is missing, not a data set of the hub.
    elif _HUB_NAME.fullmatch(source) and file_format(path) not in TABLE_FORMATS:
        return []
    else:
        files = []
    if not files:
        raise DualencError(f"{source}: no such file; give a file, folder or glob of {_FORMATS}")
    _check_one_format(source, {file_format(file) for file in files})
    return [*files]


def _check_one_format(source: str, formats: set[str]) -> None:
    if len(formats) > 1 or not formats <= set(TABLE_FORMATS):
        found = ", ".join(sorted(formats)) or "no suffix"
        one = f"give files of one format among {_FORMATS}, or .tar files"
        raise DualencError(f"{display_name(source)}: no table of one format ({found}); {one}")


def _files_of_split(folder: Path, split: str) -> list[Path]:
    # The hub keeps the files of a data set in `data`.
    folders = [parent for parent in (folder, folder / "data") if parent.is_dir()]
    tables = [file for parent in folders for file in parent.iterdir() if file.is_file()]
    split_of = {file: re.split(r"[._-]", file.name)[0] for file in sorted(tables) if file_format(file) in TABLE_FORMATS}
    files = [file for file, name in split_of.items() if name == split_name(split)]
    if split_of and not files:
        raise DualencError(f"{folder}: no split {split!r}; there are: {', '.join(sorted(set(split_of.values())))}")
    return files


def has_one_split(source: str | Path) -> bool:
    """Whether a source has one split only: files by name, glob or URL, or a saved data set without splits."""
    path = Path(source)
    if is_url(source) or path.is_file() or (path / "state.json").is_file():
        return True
    return not path.is_dir() and any(character in str(source) for character in "*?[")


def split_name(split: str) -> str:
    """The one name in a split such as train[:10%]+train[90%:]; several different names unchanged."""
    names = {part.partition("[")[0].strip() for part in split.split("+")}
    return names.pop() if len(names) == 1 else split


def is_whole(split: str) -> bool:
    """Whether a split is a name without slices."""
    return split_name(split) == split


def check_whole(source: str | Path, split: str) -> None:
    """Refuse splits and slices of sources that have neither: tars and vectors."""
    if split != ONLY_SPLIT:
        raise DualencError(
            f"{display_name(source)}: no split {split!r}, for it has neither splits nor slices; leave it out"
        )


def select_split(splits: Mapping[str, Dataset], split: str, source: str) -> Dataset:
    """The rows of a split, or of slices of splits in the syntax of `datasets`."""
    from datasets import ReadInstruction, concatenate_datasets

    if split in splits:
        return splits[split]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        there = f"{', '.join(splits)}, and slices such as train[:90%] ({first_line(error).rstrip('.')})"
        raise DualencError(f"{source}: no split {split!r}; there are: {there}") from None
    slices = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts if part.from_ < part.to]
    if not slices:
        sizes = ", ".join(f"{name} {len(rows):,}" for name, rows in splits.items())
        raise DualencError(f"{source}: split {split!r} has no rows (of {sizes}); widen the slice")
    return concatenate_datasets(slices)


def is_saved(source: str | Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return any((Path(source) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def is_parquet(file: TableFile) -> bool:
    """Whether a table file is in Parquet format."""
    return file_format(Path(file.name)) == ".parquet"


def local_copies(files: Sequence[TableFile]) -> list[Path]:
    """The files on this machine, remote ones as copies in the cache folder."""
    return [file.copy() if isinstance(file, RemoteFile) else file for file in files]
