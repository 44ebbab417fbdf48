"""Pairs and corpora from webdataset shards, with stable ids and random access."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.columns import Picked, number_distinct
from dualenc.data.corpus import Corpus
from dualenc.data.identity import file_identity
from dualenc.data.images import IMAGE_SUFFIXES
from dualenc.data.lines import MAX_LINE_BYTES
from dualenc.data.pairs import PairDataset
from dualenc.data.remote import local_copies
from dualenc.data.skips import Skips
from dualenc.data.tar_index import Tars, index_tar
from dualenc.data.urls import is_url
from dualenc.decoding import MAX_BYTES, decode_image
from dualenc.errors import BadSample, DualencError
from dualenc.reading import glob_files
from dualenc.types import Modality, OnError

_IMAGE_ENDS = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)
IMAGES = ";".join(_IMAGE_ENDS)


class WebDatasetPairs(PairDataset):
    """Pairs from tars as webdataset and img2dataset write them: one sample, one pair.

    Each tar is scanned once for an index, stored next to it. Ids come from
    the position of the sample in the sorted tars.

    Args:
        path: a tar, a folder of tars, a glob of tars, a URL (`dualenc.data.remote`; `{000..123}` counts up), or a list
            of these.
        left: extension of the left file, or several by ";", the first that a sample has.
        right: the same for the right file; `json:FIELD` is a text in a field of a JSON file.
        deduplicate: equal texts and equal images of one side are the same item and share an id. At the start this reads
            every text, and the images that have the size of another one.
        index_folder: where indexes are kept; by default next to the tars, or in the cache folder of `datasets` if that
            cannot be written to.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Raises:
        DualencError: no such tar, a compressed tar, nothing usable.
        BadSample: a truncated tar, a repeated, missing or empty file, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path | list[str],
        left: str = IMAGES,
        right: str = "txt",
        *,
        deduplicate: bool = True,
        index_folder: str | Path | None = None,
        on_error: OnError = "skip",
    ) -> None:
        skips = Skips(path[0] if isinstance(path, list) else path, on_error)
        shards = _Shards(path, skips, None if index_folder is None else Path(index_folder))
        left_files = _Files(shards, left)
        right_files = _Files(shards, right)
        good = left_files.usable("left", skips)
        # A sample without a left file is counted once.
        good[good] = right_files.usable("right", skips, among=good)
        rows = np.flatnonzero(good)
        skips.demand(len(rows), "pair")
        left_id = right_id = np.arange(len(rows))
        if deduplicate:
            left_id = _numbers(left_files, rows, skips)
            rows, left_id = rows[left_id >= 0], left_id[left_id >= 0]
            right_id = _numbers(right_files, rows, skips)
            rows, left_id, right_id = (values[right_id >= 0] for values in (rows, left_id, right_id))
            skips.demand(len(rows), "pair")
        # Without gaps, where a pair was left out.
        _, left_first, left_id = np.unique(left_id, return_index=True, return_inverse=True)
        _, right_first, right_id = np.unique(right_id, return_index=True, return_inverse=True)
        super().__init__(
            Picked(left_files, rows[left_first]),
            Picked(right_files, rows[right_first]),
            left_id,
            right_id,
            left_modality=left_files.modality,
            right_modality=right_files.modality,
        )
        self.skipped = skips.report()
        self._files = left_files
        self._rows = rows

    def samples(self) -> Iterator[tuple[int, str]]:
        """Of each pair the number of its tar, in the order of `path` and of sorted names, and the name in the tar."""
        for row in self._rows.tolist():
            yield int(self._files.tar[row]), self._files.samples[row].as_py()


def _numbers(files: _Files, rows: np.ndarray, skips: Skips) -> np.ndarray:
    """Numbers (n,), equal for equal files, of some samples (n,); -1 for unreadable files, which `skips` counts."""

    def skip(row: int) -> None:
        skips.bad(f"unreadable file {files.spec!r}", files.where(row))

    if files.modality == "image":
        return number_distinct(files.read, rows, sizes=files.size[rows], unreadable=skip)[1]
    return number_distinct(files.__getitem__, rows, unreadable=skip)[1]


def tar_corpus(path: str | Path, member: str = IMAGES, *, on_error: OnError = "skip") -> Corpus:
    """One file of every sample in tars as items to embed; ids are the samples' names.

    The arguments and errors are those of `WebDatasetPairs`; `member` is as `left` there.
    """
    skips = Skips(path, on_error)
    files = _Files(_Shards(path, skips), member)
    rows = np.flatnonzero(files.usable("item", skips))
    skips.demand(len(rows), "item")
    names = [files.name(row) for row in rows.tolist()]
    # Samples of different tars may have the same name.
    if len(set(names)) < len(names):
        names = [f"{Path(files.tars.paths[files.tar[row]].name).stem}/{name}" for row, name in zip(rows, names)]
    corpus = Corpus(names, Picked(files, rows), files.modality)
    corpus.skipped = skips.report()
    return corpus


class _Shards:
    """The tars of a file name, folder, glob or URL, sorted, and the rows of their indexes in that order."""

    def __init__(self, path: str | Path | list[str], skips: Skips, index_folder: Path | None = None) -> None:
        tars = _find_tars(path)
        if not tars:
            raise DualencError(f"{path}: no such tar; give a .tar file, a folder of them or a glob like 'shards/*.tar'")
        self.tars = Tars(tars)
        tables = [index_tar(tar, skips, index_folder) for tar in tars]
        self.table = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
        self.tar = np.repeat(np.arange(len(tables)), [len(table) for table in tables])


def _find_tars(path: str | Path | list[str]) -> list[Path]:
    if isinstance(path, list):
        return [tar for part in path for tar in _find_tars(part)]
    if is_url(path):
        return local_copies(str(path))
    return glob_files(str(Path(path) / "*.tar") if Path(path).is_dir() else str(path))


class _Files:
    """The file of each sample that `spec` names, as an item; offset and size -1 where a sample has none."""

    def __init__(self, shards: _Shards, spec: str) -> None:
        extensions, _, self.field = spec.partition(":")
        if self.field and not spec.lower().startswith("json:"):
            raise DualencError(f"{spec!r}: a field is named, but only JSON files have fields; write json:{self.field}")
        self.tars = shards.tars
        self.tar = shards.tar
        self.spec = spec if spec != IMAGES else "jpg;jpeg;png;webp;…"
        self.samples: pa.ChunkedArray = shards.table["sample"]
        by_preference = extensions.lower().split(";")
        images = [extension.endswith(_IMAGE_ENDS) for extension in by_preference]
        self.modality: Modality = "image" if all(images) else "text"
        # Files of all samples in one array, and the sample of each.
        names = pc.list_flatten(shards.table["extension"]).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(len(shards.table)), pc.list_value_length(shards.table["extension"]).to_numpy())
        chosen = np.full(len(shards.table), -1, dtype=np.int64)  # place of each sample's file
        # The last one written wins: the first in the list.
        for extension in reversed(by_preference):
            places = np.flatnonzero(names == extension.lstrip("."))
            chosen[row[places]] = places
        # A sample's name ends at the first dot: `clip.0001.jpg` is the file `0001.jpg` of `clip`.
        endings = tuple(f".{extension.lstrip('.')}" for extension in by_preference)
        dotted = [place for place in np.flatnonzero(chosen[row] < 0) if names[place].endswith(endings)]
        self.dotted = np.bincount(row[dotted], minlength=len(shards.table))
        # A further value for samples without a file, whose place is -1.
        self.offset, self.size = (
            np.append(pc.list_flatten(shards.table[name]).to_numpy(), -1)[chosen] for name in ("offset", "size")
        )

    def usable(self, side: str, skips: Skips, among: np.ndarray | None = None) -> np.ndarray:
        """Which samples have a file that is not empty; `skips` counts the others."""
        rows = np.arange(len(self)) if among is None else np.flatnonzero(among)
        dotted = self.dotted[rows]
        if dotted.any():
            reason = f"{side} file {self.spec!r} with dots in its name, where a sample's name ends at the first dot"
            mend = "replace dots before the extension, clip_0001.jpg"
            skips.bad(reason, self.where(rows[dotted > 0][0]), mend, int(dotted.sum()))
        without = (self.size[rows] < 0) & (dotted == 0)
        for reason, bad in (("sample without", without), ("empty", self.size[rows] == 0)):
            if bad.any():
                where = self.where(rows[bad][0])
                skips.bad(f"{reason} {side} file {self.spec!r}", where, "add it, name another one", int(bad.sum()))
        return self.size[rows] > 0

    def name(self, row: int) -> str:
        """The sample's name in its tar."""
        return self.samples[int(row)].as_py().removeprefix("./")

    def where(self, row: int) -> str:
        """Its tar and its name."""
        return f"{self.tars.paths[self.tar[row]]}: {self.name(row)}"

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> Any:
        data = self.read(index)
        where = self.where(index)
        return decode_image(data, where) if self.modality == "image" else self._decode_text(data, where)

    def read(self, index: int) -> bytes:
        """The contents of the file of a sample; a `BadSample` if it is too large or cut off."""
        size = int(self.size[index])
        where = self.where(index)
        # Checked before the bytes are read.
        max_bytes = MAX_BYTES if self.modality == "image" else MAX_LINE_BYTES
        if size > max_bytes:
            raise BadSample(f"{where}: file of {size:,} bytes, where {max_bytes:,} are allowed; remove the sample")
        data = self.tars.read(int(self.tar[index]), int(self.offset[index]), size)
        if len(data) < size:
            raise BadSample(f"{where}: the tar ends inside this sample; fetch it again")
        return data

    def _decode_text(self, data: bytes, where: str) -> str:
        try:
            text = json.loads(data)[self.field] if self.field else data.decode("utf-8-sig")
        except (ValueError, KeyError, TypeError, RecursionError):
            what = f"JSON object with a field {self.field!r}" if self.field else "UTF-8 text"
            raise BadSample(f"{where}: {self.spec!r} is no {what}; mend the sample or name another file") from None
        if not isinstance(text, str) or not text.strip():
            raise BadSample(f"{where}: {self.spec!r} holds no text; fill it in or remove the sample")
        return text.strip()

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """Identities for `dualenc.data.identity`: the tar's own, and the file's place in it."""
        places = zip(*(part[rows].tolist() for part in (self.tar, self.offset, self.size)))
        field = self.field.encode()
        return [b"%s %d %d %s" % (self._tar_identities[tar], offset, size, field) for tar, offset, size in places]

    @cached_property
    def _tar_identities(self) -> list[bytes]:
        """Name and checksum of each tar."""
        return [tar.name.encode(errors="surrogateescape") + b" " + file_identity(tar) for tar in self.tars.paths]
