"""Detect the format of a data source from its name and files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from dualenc.data.readers.hub_data import has_configuration
from dualenc.data.readers.images import IMAGE_SUFFIXES, held_out_split, is_image
from dualenc.data.readers.lines import COMPRESSIONS, file_format
from dualenc.data.readers.read_options import ONLY_SPLIT
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
from dualenc.types import StrPath

Kind = Literal[
    "beir",  # a BEIR folder
    "collection",  # a retrieval collection on the hub, or in a folder with the same layout
    "tars",
    "vectors",  # a folder of embeddings or a .npy file
    "images",
    "saved",  # written by `datasets.save_to_disk`
    "saved_splits",  # the same, with splits
    "files",  # tables by name or glob
    "folder",  # a folder of tables
    "hub",  # another data set of the hub
]
RETRIEVAL_KINDS: tuple[Kind, ...] = ("beir", "collection")
"""Kinds of retrieval collections: documents, queries and judgements."""
PARTS = ("corpus", "queries")
"""Parts of a retrieval collection that hold items."""
CAPTION_FILES = [
    f"{stem}{suffix}"
    for stem in ("metadata", "captions")
    for suffix in TABLE_FORMATS
    if suffix != ".txt"
]
"""Names of caption tables in a folder of images."""

_CARD_BYTES = 1 << 20  # a larger README.md is ignored
_HEADER = re.compile(r"---[ \t\r]*\n(?:(?!---).*\n)*?configs:[ \t\r]*\n((?:(?!---)[ -].*\n)+)")
# Absolute paths, URLs, and YAML escapes and anchors, which could hide one: the header of a
# downloaded README.md must not make `datasets` read files outside of its folder.
_ELSEWHERE = re.compile(r"\.\.|:/|\\|[\s\"']/|[:-]\s+[*&]")
_URL = re.compile(r"[A-Za-z][\w+.-]+(:/|::)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def detect(source: StrPath) -> Kind:
    """Return the kind of a source, "files" if it does not exist.

    "collection" is a retrieval collection on the hub, or in a folder with the same layout. To
    recognize one, `datasets` looks the name up.
    """
    kind = detect_locally(source)
    is_collection = kind == "hub" and all(has_configuration(source, part) for part in PARTS)
    return "collection" if is_collection else kind


def detect_locally(source: StrPath) -> Kind:
    """Return the kind of a source without asking the hub, where a collection is just "hub"."""
    refuse_url(source)
    path = with_home(Path(source))
    if path.is_dir():
        return _kind_of_folder(path)
    if path.suffix == ".npy":
        return "vectors"
    if path.suffix == ".tar":
        return "tars"
    # A name with the suffix of a table is a missing file rather than a hub data set.
    is_name = _HUB_NAME.fullmatch(str(source)) and file_format(path) not in TABLE_FORMATS
    return "hub" if is_name and not path.is_file() else "files"


def refuse_url(source: StrPath) -> None:
    """Raise a `DualencError` for a URL, also if `Path` has collapsed its slashes."""
    if _URL.match(str(source)) and not Path(source).exists():
        url = without_credentials(str(source))
        raise DualencError(
            "URLs are not supported",
            fix="download the files and give their path",
            where=url,
        )


def _kind_of_folder(folder: Path) -> Kind:
    entries = {entry.name: entry for entry in folder.iterdir()}
    # A BEIR folder on the hub has a README.md, too. Its tsv judgements can be read without it.
    has_tsv = any((folder / "qrels").glob("*.tsv"))
    if "README.md" in entries and not has_tsv and _configurations(folder).issuperset(PARTS):
        return "hub"
    corpus_files = {f"corpus.jsonl{suffix}" for suffix in ("", *COMPRESSIONS)}
    if entries.keys() & {"qrels", *corpus_files}:
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
    # A folder cloned from the hub has its tables in `data`.
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
    # Tables named like splits are the data. Others may be captions, notes or lists of the images
    # in subfolders.
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
    if not card.is_file() or card.stat().st_size > _CARD_BYTES:
        return set()
    # `datasets` would read this file in place of the header that is checked here.
    if (folder / ".huggingface.yaml").exists():
        return set()
    header = _HEADER.match(card.read_text("utf-8-sig", errors="replace"))
    if header is None or _ELSEWHERE.search(header[1]):
        return set()
    return set(re.findall(r"config_name:\s*[\"']?([\w.-]+)", header[1]))


def default_split(source: StrPath) -> str:
    """Return the split to evaluate by default: a source's only split, otherwise test.

    For a folder of images without test, another held-out split such as val.
    """
    kind = detect_locally(source)
    if kind == "images":
        return held_out_split(source)
    if kind == "folder" and not has_splits(split_tables(with_home(Path(source)))):
        return ONLY_SPLIT
    return ONLY_SPLIT if kind in ("tars", "vectors", "saved", "files") else "test"
