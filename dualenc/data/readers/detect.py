"""Detect the format of a data source from its name and files."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from dualenc.data.readers.images import IMAGE_SUFFIXES, is_image
from dualenc.data.readers.lines import COMPRESSIONS, file_format
from dualenc.data.readers.table_files import (
    TABLE_FORMATS,
    files_below,
    files_in,
    first_word,
    has_splits,
    is_split,
    is_table,
    report_unread,
    split_tables,
)
from dualenc.data.store.vector_shards import is_embeddings
from dualenc.errors import DualencError
from dualenc.io.reading import with_home
from dualenc.io.terminal import without_credentials

Kind = Literal[
    "beir", "tars", "vectors", "images", "saved", "saved_splits", "files", "folder", "hub"
]
"""vectors: a folder of embeddings or a .npy file. saved, saved_splits: written by `datasets`.
files: a table by name or glob. folder: of tables. hub: a name on the hub, or a retrieval collection
in a folder laid out as on the hub."""

ONLY_SPLIT = "train"
"""What `datasets` calls the rows of a source without splits."""
CAPTION_FILES = [
    f"{stem}{suffix}"
    for stem in ("metadata", "captions")
    for suffix in TABLE_FORMATS
    if suffix != ".txt"
]
"""Tables of captions among images."""

_CARD_BYTES = 1 << 20  # of a README.md that is looked at
_HEADER = re.compile(r"---[ \t\r]*\n(?:(?!---).*\n)*?configs:[ \t\r]*\n((?:(?!---)[ -].*\n)+)")
# Absolute paths, URLs, escapes and anchors of YAML.
_ELSEWHERE = re.compile(r"\.\.|:/|\\|[\s\"']/|[:-]\s+[*&]")
_URL = re.compile(r"[A-Za-z][\w+.-]+(:/|::)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def detect(source: str | Path) -> Kind:
    """Return the kind of a source, "files" if it does not exist.

    "collection" is a retrieval collection on the hub, or in a folder with the same layout. To
    recognize one, `datasets` looks the name up.
    """
    refuse_url(source)
    path = with_home(Path(source))
    if path.is_dir():
        return _kind_of_folder(path)
    if path.suffix == ".npy":
        return "vectors"
    if path.suffix == ".tar":
        return "tars"
    # A name with a table's suffix is a file that is missing, not a data set of the hub.
    is_name = _HUB_NAME.fullmatch(str(source)) and file_format(path) not in TABLE_FORMATS
    return "hub" if is_name and not path.is_file() else "files"


def refuse_url(source: str | Path) -> None:
    """Raise a `DualencError` for a URL, also if `Path` has collapsed its slashes."""
    if _URL.match(str(source)) and not Path(source).exists():
        url = without_credentials(str(source))
        raise DualencError(
            "URLs are not opened",
            fix="download the files first and name these",
            where=url,
        )


def _kind_of_folder(folder: Path) -> Kind:
    entries = {entry.name: entry for entry in folder.iterdir()}
    has_tsv = any((folder / "qrels").glob("*.tsv"))
    if "README.md" in entries and not has_tsv and {"corpus", "queries"} <= _configurations(folder):
        return "hub"
    if entries.keys() & {
        "qrels",
        "corpus.jsonl",
        *(f"corpus.jsonl{suffix}" for suffix in COMPRESSIONS),
    }:
        return "beir"
    if "state.json" in entries:
        return "saved"
    if "dataset_dict.json" in entries:
        return "saved_splits"
    has_shards = any(name.startswith("data-") and name.endswith(".arrow") for name in entries)
    if has_shards and is_embeddings(folder):
        return "vectors"
    return _kind_of_files(folder, list(entries.values()))


def _kind_of_files(folder: Path, entries: list[Path]) -> Kind:
    """Return the kind of a folder that is described by its files alone."""
    suffixes = {entry.suffix.lower() for entry in entries if not entry.name.startswith(".")}
    # The hub stores the tables of a data set in `data`.
    tables = {file.name for file in (*entries, *files_in(folder / "data")) if is_table(file)}
    if ".tar" in suffixes:
        report_unread(folder, "the tars in this folder are read, other files are not", tables)
        return "tars"
    beside = {name for name in tables - set(CAPTION_FILES) if not name.lower().endswith(".txt")}
    if suffixes & set(IMAGE_SUFFIXES):
        report_unread(
            folder, "the images in this folder are read, tables beside them are not", beside
        )
        return "images"
    if not tables:
        has_tables = False
        for file in files_below(folder):
            if is_image(file):
                return "images"
            has_tables = has_tables or is_table(file)
        return "folder" if has_tables or (folder / "data").is_dir() else "images"
    # Images may lie in a subfolder of their captions, or beside notes and lists; tables of splits
    # are tables.
    are_beside = not any(map(is_split, map(first_word, tables)))
    if not are_beside or not any(map(is_image, files_below(folder))):
        return "folder"
    report_unread(
        folder, "the images in its subfolders are read, tables beside them are not", beside
    )
    return "images"


def _configurations(folder: Path) -> set[str]:
    """Return the configurations in the header of a folder's README.md, as on the hub.

    Empty if any of the files lie elsewhere.
    """
    card = folder / "README.md"
    if (
        not card.is_file()
        or card.stat().st_size > _CARD_BYTES
        or (folder / ".huggingface.yaml").exists()
    ):
        return set()
    header = _HEADER.match(card.read_text("utf-8-sig", errors="replace"))
    if header is None or _ELSEWHERE.search(header[1]):
        return set()
    return set(re.findall(r"config_name:\s*[\"']?([\w.-]+)", header[1]))


def check_split(source: str | Path, split: str, splits: Collection[str] = (ONLY_SPLIT,)) -> None:
    """Raise a `DualencError` if a split is not among `splits`, by default `train` alone."""
    if split not in splits:
        raise DualencError(
            f"no split {split!r}",
            fix=f"there are: {', '.join(splits)}",
            where=source,
        )


def default_split(source: str | Path) -> str:
    """Return the split to evaluate by default: a source's only split, otherwise test."""
    kind = detect(source)
    if kind == "folder" and not has_splits(split_tables(with_home(Path(source)))):
        return ONLY_SPLIT
    return ONLY_SPLIT if kind in ("tars", "vectors", "saved", "files") else "test"
