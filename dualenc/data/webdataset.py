"""Pairs and corpora from webdataset shards, with stable ids and random access."""

from __future__ import annotations

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

_EXTENSIONS = {"image": [suffix[1:] for suffix in IMAGE_SUFFIXES], "text": ["txt"]}
_NAMES = {"image": "jpg;jpeg;png;webp;…", "text": "txt"}


class WebDatasetPairs(PairDataset):
    """Images and their captions (.txt) from tars as webdataset and img2dataset write them: one sample, one pair.

    Each tar is scanned once for an index, stored in the cache folder.

    Args:
        path: a tar, a folder of tars, a glob of tars, or a list of these.
        deduplicate: equal texts and equal images of one side share an id; this reads texts and images of equal size.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.
    """

    def __init__(
        self, path: str | Path | list[str], *, deduplicate: bool = True, on_error: OnError = "skip"
    ) -> None:
        bad_rows = BadRows(path[0] if isinstance(path, list) else path, on_error)
        samples = _Samples(path, bad_rows)
        images = _Files(samples, "image")
        texts = _Files(samples, "text")
        rows = images.usable("left", np.arange(len(images)), bad_rows)
        # A sample without a left file is counted once.
        rows = texts.usable("right", rows, bad_rows)
        bad_rows.require(len(rows), "pair")
        left_first, left_id = images.number(rows, deduplicate)
        right_first, right_id = texts.number(rows, deduplicate)
        super().__init__(
            Picked(images, left_first),
            Picked(texts, right_first),
            left_id,
            right_id,
            left_modality="image",
        )
        self.skipped = bad_rows.report()


def tar_corpus(path: str | Path, modality: Modality, bad_rows: BadRows) -> Corpus:
    """The images or the texts of the samples in tars, as items to embed; ids are the samples' names."""
    files = _Files(_Samples(path, bad_rows), modality)
    rows = files.usable("item", np.arange(len(files)), bad_rows)
    bad_rows.require(len(rows), "item")
    names = [files.name(row) for row in rows.tolist()]
    # Samples of different tars may have the same name.
    if len(set(names)) < len(names):
        names = [f"{files.tar_of(row).stem}/{name}" for row, name in zip(rows, names)]
    return Corpus(names, Picked(files, rows), modality)


class _Samples:
    """The samples of all tars of a file name, folder or glob, and their files, by the indexes of the tars.

    Of each sample its name and the number of its tar; of each file its sample, extension, offset and size.
    """

    def __init__(self, path: str | Path | list[str], bad_rows: BadRows) -> None:
        self.tars = _find_tars(path)
        if not self.tars:
            raise DualencError(
                f"{path}: no such tar; give a .tar file, a folder of them or a glob like 'shards/*.tar'"
            )
        tables = [index_tar(tar, bad_rows) for tar in self.tars]
        # Numbered in order of appearance, tar by tar: files of a sample need not follow one another.
        samples = [table["sample"].combine_chunks().dictionary_encode() for table in tables]
        counts = [len(names.dictionary) for names in samples]
        starts = np.cumsum([0, *counts])
        self.names = pa.chunked_array([names.dictionary for names in samples])
        self.tar = np.repeat(np.arange(len(tables)), counts)
        self.files = pa.concat_tables(tables)
        sample_of = [names.indices.to_numpy() + start for names, start in zip(samples, starts)]
        self.sample_of_file = np.concatenate(sample_of)


def _find_tars(path: str | Path | list[str]) -> list[Path]:
    if isinstance(path, list):
        return [tar for part in path for tar in _find_tars(part)]
    refuse_url(path)
    return glob_files(str(Path(path) / "*.tar") if Path(path).is_dir() else str(path))


class _Files:
    """The image or the text of each sample, as an item; offset and size -1 where a sample has none."""

    def __init__(self, samples: _Samples, modality: Modality) -> None:
        self.tars = samples.tars
        self.tar = samples.tar
        self.names = samples.names
        self.modality = modality
        chosen = np.full(len(self.names), -1, dtype=np.int64)  # each sample's file
        # The last one written wins: the first in the list.
        for extension in reversed(_EXTENSIONS[modality]):
            files = np.flatnonzero(pc.equal(samples.files["extension"], extension).to_numpy())
            chosen[samples.sample_of_file[files]] = files
        # A further value for samples without a file, whose position is -1.
        self.offset = np.append(samples.files["offset"].to_numpy(), -1)[chosen]
        self.size = np.append(samples.files["size"].to_numpy(), -1)[chosen]

    def usable(self, side: str, rows: np.ndarray, bad_rows: BadRows) -> np.ndarray:
        """Those of some samples (n,) that have a file that is not empty; the others are bad."""
        size = self.size[rows]
        fix = "add it; a sample's name ends at its first dot"
        for reason, bad in (("sample without", size < 0), ("empty", size == 0)):
            if bad.any():
                position = self.position(rows[bad][0])
                reason = f"{reason} {side} file {_NAMES[self.modality]!r}"
                bad_rows.add(reason, position, fix, int(bad.sum()))
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
        return self.names[int(row)].as_py().removeprefix("./")

    def position(self, row: int) -> str:
        """Its tar and its name, for messages."""
        return f"{self.tar_of(row)}: {self.name(row)}"

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> Any:
        data = self.read(index)
        position = self.position(index)
        if self.modality == "image":
            return decode_image(data, position)
        try:
            text = data.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise BadSample(f"{position}: its .txt is no UTF-8 text; convert it") from None
        if not text:
            raise BadSample(f"{position}: its .txt holds no text; fill it in or remove the sample")
        return text

    def read(self, index: int) -> bytes:
        """The contents of the file of a sample; a `BadSample` if it is too large."""
        size = int(self.size[index])
        # Checked before the bytes are read.
        if size > MAX_BYTES:
            reason = f"file of {size:,} bytes, where {MAX_BYTES:,} are allowed"
            raise BadSample(f"{self.position(index)}: {reason}; remove the sample")
        return read_member(self.tar_of(index), int(self.offset[index]), size)

    def item_identity(self, row: int, read: bool) -> bytes:
        """The tar's identity, and the file's offset and size in it."""
        return b"%s %d %d " % (self._tar_identities[self.tar[row]], self.offset[row], self.size[row])

    @cached_property
    def _tar_identities(self) -> list[bytes]:
        return [tar.name.encode(errors="surrogateescape") + b" " + file_identity(tar) for tar in self.tars]
