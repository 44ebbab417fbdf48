"""Pairs and corpora from webdataset shards, with stable ids and random access."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus
from dualenc.data.detect import refuse_url
from dualenc.data.identity import file_identity
from dualenc.data.images import IMAGE_SUFFIXES
from dualenc.data.item_lists import Picked, number_distinct
from dualenc.data.pairs import PairDataset
from dualenc.data.tar_index import index_tar, read_member
from dualenc.decoding import MAX_BYTES, decode_image
from dualenc.errors import BadSample, DualencError
from dualenc.reading import glob_files
from dualenc.types import Modality, OnError

_IMAGE_ENDS = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)
IMAGES = ";".join(_IMAGE_ENDS)


class WebDatasetPairs(PairDataset):
    """Pairs from tars as webdataset and img2dataset write them: one sample, one pair.

    Each tar is scanned once for an index, stored in the cache folder.

    Args:
        path: a tar, a folder of tars, a glob of tars, or a list of these.
        left: extension of the left file, or several by ";", the first that a sample has.
        right: the same for the right file; `json:FIELD` is a text in a field of a JSON file.
        deduplicate: equal texts and equal images of one side share an id; this reads texts and images of equal size.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.
    """

    def __init__(
        self,
        path: str | Path | list[str],
        left: str = IMAGES,
        right: str = "txt",
        *,
        deduplicate: bool = True,
        on_error: OnError = "skip",
    ) -> None:
        bad_rows = BadRows(path[0] if isinstance(path, list) else path, on_error)
        shards = _Shards(path, bad_rows)
        left_files = _MemberFiles(shards, left)
        right_files = _MemberFiles(shards, right)
        rows = left_files.usable("left", np.arange(len(left_files)), bad_rows)
        # A sample without a left file is counted once.
        rows = right_files.usable("right", rows, bad_rows)
        bad_rows.require(len(rows), "pair")
        left_first, left_id = left_files.number(rows, deduplicate)
        right_first, right_id = right_files.number(rows, deduplicate)
        super().__init__(
            Picked(left_files, left_first),
            Picked(right_files, right_first),
            left_id,
            right_id,
            left_modality=left_files.modality,
            right_modality=right_files.modality,
        )
        self.skipped = bad_rows.report()


def tar_corpus(path: str | Path, member: str = IMAGES, *, on_error: OnError = "skip") -> Corpus:
    """One file of every sample in tars as items to embed; ids are the samples' names.

    The arguments are those of `WebDatasetPairs`; `member` is as `left` there.
    """
    bad_rows = BadRows(path, on_error)
    files = _MemberFiles(_Shards(path, bad_rows), member)
    rows = files.usable("item", np.arange(len(files)), bad_rows)
    bad_rows.require(len(rows), "item")
    names = [files.name(row) for row in rows.tolist()]
    # Samples of different tars may have the same name.
    if len(set(names)) < len(names):
        names = [f"{files.tar_of(row).stem}/{name}" for row, name in zip(rows, names)]
    return Corpus(names, Picked(files, rows), files.modality, skipped=bad_rows.report())


class _Shards:
    """The tars of a file name, folder or glob, sorted, and the rows of their indexes in that order."""

    def __init__(self, path: str | Path | list[str], bad_rows: BadRows) -> None:
        tars = _find_tars(path)
        if not tars:
            raise DualencError(
                f"{path}: no such tar; give a .tar file, a folder of them or a glob like 'shards/*.tar'"
            )
        self.tars = tars
        tables = [index_tar(tar, bad_rows) for tar in tars]
        self.table = pa.concat_tables(tables)
        self.tar = np.repeat(np.arange(len(tables)), [len(table) for table in tables])


def _find_tars(path: str | Path | list[str]) -> list[Path]:
    if isinstance(path, list):
        return [tar for part in path for tar in _find_tars(part)]
    refuse_url(path)
    return glob_files(str(Path(path) / "*.tar") if Path(path).is_dir() else str(path))


class _MemberFiles:
    """The file of each sample that `spec` names, as an item; offset and size -1 where a sample has none."""

    def __init__(self, shards: _Shards, spec: str) -> None:
        extensions, _, self.field = spec.partition(":")
        if self.field and extensions.lower() != "json":
            raise DualencError(
                f"{spec!r}: a field is named, but only JSON files have fields; write json:{self.field}"
            )
        self.tars = shards.tars
        self.tar = shards.tar
        self.spec = spec if spec != IMAGES else "jpg;jpeg;png;webp;…"
        self.samples: pa.ChunkedArray = shards.table["sample"]
        by_preference = [extension.removeprefix(".") for extension in extensions.lower().split(";")]
        is_image = all(extension.endswith(_IMAGE_ENDS) for extension in by_preference)
        self.modality: Modality = "image" if is_image else "text"
        # Files of all samples in one array, and the sample of each.
        lists = shards.table["extension"]
        names = pc.list_flatten(lists).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).to_numpy())
        chosen = np.full(len(lists), -1, dtype=np.int64)  # position of each sample's file
        # The last one written wins: the first in the list.
        for extension in reversed(by_preference):
            positions = np.flatnonzero(names == extension)
            chosen[row[positions]] = positions
        # A further value for samples without a file, whose position is -1.
        self.offset = np.append(pc.list_flatten(shards.table["offset"]).to_numpy(), -1)[chosen]
        self.size = np.append(pc.list_flatten(shards.table["size"]).to_numpy(), -1)[chosen]

    def usable(self, side: str, rows: np.ndarray, bad_rows: BadRows) -> np.ndarray:
        """Those of some samples (n,) that have a file that is not empty; the others are bad."""
        size = self.size[rows]
        fix = "add it, or name another one; a sample's name ends at its first dot"
        for reason, bad in (("sample without", size < 0), ("empty", size == 0)):
            if bad.any():
                position = self.position(rows[bad][0])
                bad_rows.add(f"{reason} {side} file {self.spec!r}", position, fix, int(bad.sum()))
        return rows[size > 0]

    def number(self, rows: np.ndarray, deduplicate: bool) -> tuple[np.ndarray, np.ndarray]:
        """The samples of the distinct files among some samples' (n,), and the number of each sample's file."""
        if not deduplicate:
            return number_distinct(None, rows)
        if self.modality == "image":
            return number_distinct(self.read, rows, sizes=self.size[rows])
        return number_distinct(self.__getitem__, rows)

    def tar_of(self, row: int) -> Path:
        """The tar of a sample."""
        return self.tars[self.tar[row]]

    def name(self, row: int) -> str:
        """The sample's name in its tar."""
        return self.samples[int(row)].as_py().removeprefix("./")

    def position(self, row: int) -> str:
        """Its tar and its name, for messages."""
        return f"{self.tar_of(row)}: {self.name(row)}"

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> Any:
        data = self.read(index)
        position = self.position(index)
        return (
            decode_image(data, position) if self.modality == "image" else self._decode_text(data, position)
        )

    def read(self, index: int) -> bytes:
        """The contents of the file of a sample; a `BadSample` if it is too large."""
        size = int(self.size[index])
        # Checked before the bytes are read.
        if size > MAX_BYTES:
            reason = f"file of {size:,} bytes, where {MAX_BYTES:,} are allowed"
            raise BadSample(f"{self.position(index)}: {reason}; remove the sample")
        return read_member(self.tar_of(index), int(self.offset[index]), size)

    def _decode_text(self, data: bytes, position: str) -> str:
        try:
            text = json.loads(data)[self.field] if self.field else data.decode("utf-8-sig")
        except (ValueError, KeyError, TypeError, RecursionError):
            what = f"JSON object with a field {self.field!r}" if self.field else "UTF-8 text"
            raise BadSample(
                f"{position}: {self.spec!r} is no {what}; fix the sample or name another file"
            ) from None
        if not isinstance(text, str) or not text.strip():
            raise BadSample(f"{position}: {self.spec!r} holds no text; fill it in or remove the sample")
        return text.strip()

    def item_identity(self, row: int, read: bool) -> bytes:
        """The tar's identity, and the file's offset and size in it."""
        tar = self._tar_identities[self.tar[row]]
        return b"%s %d %d %s" % (tar, self.offset[row], self.size[row], self.field.encode())

    @cached_property
    def _tar_identities(self) -> list[bytes]:
        return [tar.name.encode(errors="surrogateescape") + b" " + file_identity(tar) for tar in self.tars]
