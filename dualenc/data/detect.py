"""What a source is, recognised once by its name and the files in it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from dualenc.data.images import IMAGE_SUFFIXES, SPLITS, is_image
from dualenc.data.lines import LINE_FORMATS, file_format
from dualenc.data.vector_shards import is_embeddings
from dualenc.errors import DualencError
from dualenc.terminal import without_credentials

Kind = Literal["beir", "tars", "vectors", "images", "saved", "saved_splits", "files", "folder", "hub"]
"""vectors: a folder of embeddings or a .npy file. saved, saved_splits: written by `datasets`. files: a table by name or
glob. folder: of tables. hub: a name on the hub, or a retrieval collection in a folder laid out as on the hub."""

ONLY_SPLIT = "train"
"""What `datasets` calls the rows of a source without splits."""
TABLE_FORMATS = (*LINE_FORMATS, ".parquet")
CAPTION_FILES = [f"{stem}{suffix}" for stem in ("metadata", "captions") for suffix in TABLE_FORMATS if suffix != ".txt"]
"""Tables of captions among images."""

_CARD_BYTES = 1 << 20  # of a README.md that is looked at
_HEADER = re.compile(r"---[ \t\r]*\n(?:(?!---).*\n)*?configs:[ \t\r]*\n((?:(?!---)[ -].*\n)+)")
# Absolute paths, URLs, escapes and anchors of YAML.
_ELSEWHERE = re.compile(r"\.\.|:/|\\|[\s\"']/|[:-]\s+[*&]")
_URL = re.compile(r"[A-Za-z][\w+.-]+(:/|::)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def detect(source: str | Path) -> Kind:
    """The kind of a source; "files" for one that does not exist."""
    refuse_url(source)
    path = Path(source)
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
    """Raise a `DualencError` for a URL, which a `Path` writes with one slash."""
    if _URL.match(str(source)) and not Path(source).exists():
        url = without_credentials(str(source))
        raise DualencError(f"{url}: URLs are not opened; download the files first and name these")


def _kind_of_folder(folder: Path) -> Kind:
    entries = {entry.name: entry for entry in folder.iterdir()}
    has_tsv = any((folder / "qrels").glob("*.tsv"))
    if "README.md" in entries and not has_tsv and {"corpus", "queries"} <= _configurations(folder):
        return "hub"
    if entries.keys() & {"corpus.jsonl", "corpus.jsonl.gz", "qrels"}:
        return "beir"
    if "state.json" in entries:
        return "saved"
    if "dataset_dict.json" in entries:
        return "saved_splits"
    has_shards = any(name.startswith("data-") and name.endswith(".arrow") for name in entries)
    if has_shards and is_embeddings(folder):
        return "vectors"
    suffixes = {Path(name).suffix.lower() for name in entries}
    if ".tar" in suffixes:
        return "tars"
    # The hub stores the tables of a data set in `data`.
    files = [*entries.values(), *(folder / "data").glob("*")]
    tables = {file.name for file in files if file_format(file) in TABLE_FORMATS and file.is_file()}
    if suffixes & set(IMAGE_SUFFIXES) or not (tables or (folder / "data").is_dir()):
        return "images"
    # Images may lie in a subfolder of their captions, or beside notes and lists; tables of splits are tables.
    are_beside = not any(re.split(r"[._-]", name)[0].lower() in SPLITS for name in tables)
    inner = folder.glob("*/**/*") if tables and are_beside else ()
    return "images" if any(map(is_image, inner)) else "folder"


def _configurations(folder: Path) -> set[str]:
    """The configurations that the header of a folder's README.md names, as on the hub; none if files lie elsewhere."""
    card = folder / "README.md"
    if not card.is_file() or card.stat().st_size > _CARD_BYTES or (folder / ".huggingface.yaml").exists():
        return set()
    header = _HEADER.match(card.read_text("utf-8-sig", errors="replace"))
    if header is None or _ELSEWHERE.search(header[1]):
        return set()
    return set(re.findall(r"config_name:\s*[\"']?([\w.-]+)", header[1]))


def check_split(source: str | Path, split: str, splits: Collection[str] = (ONLY_SPLIT,)) -> None:
    """Raise a `DualencError` for a split that is not among those of a source; by default it has only one."""
    if split not in splits:
        raise DualencError(f"{source}: no split {split!r}; there are: {', '.join(splits)}")


def default_split(source: str | Path) -> str:
    """The split to evaluate where the user names none: the only one of a source without splits, else test."""
    return ONLY_SPLIT if detect(source) in ("tars", "vectors", "saved", "files") else "test"
