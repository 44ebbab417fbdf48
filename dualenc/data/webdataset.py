"""Pairs and corpora from webdataset shards, with stable ids and random access."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc.data.columns import Picked, number_distinct
from dualenc.data.corpus import Corpus
from dualenc.data.identity import file_identity
from dualenc.data.images import IMAGE_SUFFIXES, MOST_BYTES, decode_image
from dualenc.data.lines import MOST_LINE_BYTES
from dualenc.data.pairs import Modality, PairDataset
from dualenc.data.skips import OnError, Skips
from dualenc.data.tars import Tars, find_tars, index_tar
from dualenc.errors import BadSample, DualencError

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES = "jpg;jpeg;png;webp"
_IMAGE_ENDS = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)


class WebDatasetPairs(PairDataset):
    """Pairs from tars as webdataset and img2dataset write them: one sample, one pair.

    Each tar is scanned once; where its files lie is kept in an index beside it. Ids come from the position of the
    sample in the sorted tars.

    Args:
        path: a tar, a folder of tars, or a glob of tars.
        left: extension of the left file, or several by ";" of which the first that a sample has is taken.
        right: the same for the right file; `json:FIELD` is a text in a field of a JSON file.
        deduplicate: equal texts on the right share an id; reads every text once at the start.
        index_folder: where indexes are kept; by default beside the tars, or in the cache folder of `datasets` if that
            cannot be written to.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Raises:
        DualencError: no such tar, a compressed tar, nothing usable.
        BadSample: a truncated tar, a repeated, missing or empty file, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        left: str = IMAGES,
        right: str = "txt",
        *,
        deduplicate: bool = False,
        index_folder: str | Path | None = None,
        on_error: OnError = "skip",
    ) -> None:
        skips = Skips(path, on_error)
        shards = _Shards(path, skips, None if index_folder is None else Path(index_folder))
        left_files, right_files = shards.files(left), shards.files(right)
        good = left_files.there("left", skips)
        good[good] = right_files.there("right", skips, among=good)
        rows = np.flatnonzero(good)
        skips.demand(len(rows), "pair")
        first, right_id = rows, np.arange(len(rows))
        if deduplicate and right_files.modality == "text":
            rows = right_files.readable(rows, skips)
            first, right_id = number_distinct(right_files, rows)
        super().__init__(
            Picked(left_files, rows),
            Picked(right_files, first),
            right_id=right_id,
            left_modality=left_files.modality,
            right_modality=right_files.modality,
        )
        self.skipped = skips.report()


def tar_corpus(path: str | Path, member: str = IMAGES, *, on_error: OnError = "skip") -> Corpus:
    """One file of every sample in tars as items to embed; ids are the samples' names.

    Args:
        path: a tar, a folder of tars, or a glob of tars.
        member: as `left` of `WebDatasetPairs`.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Raises:
        DualencError: no such tar, a compressed tar, nothing usable.
        BadSample: a truncated tar, a repeated, missing or empty file, under on_error="raise".
    """
    skips = Skips(path, on_error)
    files = _Shards(path, skips, None).files(member)
    rows = np.flatnonzero(files.there("item", skips))
    skips.demand(len(rows), "item")
    names = [files.name(row) for row in rows.tolist()]
    if len(set(names)) < len(names):  # samples of different tars may be called alike
        names = [f"{files.tars.paths[files.tar[row]].stem}/{name}" for row, name in zip(rows, names, strict=True)]
    corpus = Corpus(names, Picked(files, rows), files.modality)
    corpus.skipped = skips.report()
    return corpus


class _Shards:
    """The indexes of all tars, one behind the other."""

    def __init__(self, path: str | Path, skips: Skips, index_folder: Path | None) -> None:
        import pyarrow as pa

        self.tars = Tars(find_tars(path))
        tables = [index_tar(tar, skips, index_folder) for tar in self.tars.paths]
        self.table = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
        self.tar = np.repeat(np.arange(len(tables)), [len(table) for table in tables])

    def files(self, spec: str) -> _Files:
        """For every sample, the file that `spec` names."""
        import pyarrow.compute as pc

        extensions, _, field = spec.partition(":")
        names = pc.list_flatten(self.table["extension"]).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(len(self.table)), pc.list_value_length(self.table["extension"]).to_numpy())
        chosen = np.full(len(self.table), -1, dtype=np.int64)
        for extension in reversed(extensions.lower().split(";")):
            found = np.flatnonzero(names == extension.lstrip("."))
            chosen[row[found]] = found
        return _Files(self, chosen, spec, field)


class _Files:
    """One file of each sample as an item; position -1 where a sample has none."""

    def __init__(self, shards: _Shards, chosen: np.ndarray, spec: str, field: str) -> None:
        import pyarrow.compute as pc

        self.tars, self.tar, self.spec, self.field = shards.tars, shards.tar, spec, field
        self.samples: pa.ChunkedArray = shards.table["sample"]
        values = [pc.list_flatten(shards.table[name]).to_numpy() for name in ("offset", "size")]
        self.offset, self.size = (np.where(chosen >= 0, v[chosen] if len(v) else -1, -1) for v in values)
        self._tar_identities: list[bytes] | None = None
        images = [extension.endswith(_IMAGE_ENDS) for extension in spec.partition(":")[0].lower().split(";")]
        self.modality: Modality = "image" if all(images) else "text"
        if field and not spec.lower().startswith("json:"):
            raise DualencError(f"{spec!r}: a field is named, but only JSON files have fields; write json:{field}")

    def there(self, side: str, skips: Skips, among: np.ndarray | None = None) -> np.ndarray:
        """Which samples have a file that is not empty; the others are told to `skips`."""
        rows = np.arange(len(self)) if among is None else np.flatnonzero(among)
        for reason, bad in (("sample without", self.size[rows] < 0), ("empty", self.size[rows] == 0)):
            if bad.any():
                where = f"{self.tars.paths[self.tar[rows[bad][0]]]}: {self.name(rows[bad][0])}"
                skips.bad(f"{reason} {side} file {self.spec!r}", where, "add it, name another one", int(bad.sum()))
        return self.size[rows] > 0

    def readable(self, rows: np.ndarray, skips: Skips) -> np.ndarray:
        """The rows whose files can be read; the others are told to `skips`."""
        kept = []
        for row in rows.tolist():
            try:
                self[row]
                kept.append(row)
            except BadSample:
                where = f"{self.tars.paths[self.tar[row]]}: {self.name(row)}"
                skips.bad(f"unreadable file {self.spec!r}", where)
        skips.demand(len(kept), "pair")
        return np.array(kept)

    def name(self, row: int) -> str:
        """The sample's name in its tar."""
        return self.samples[int(row)].as_py().removeprefix("./")

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> Any:
        number, size = int(self.tar[index]), int(self.size[index])
        where = f"{self.tars.paths[number]}: {self.name(index)}"
        most = MOST_BYTES if self.modality == "image" else MOST_LINE_BYTES
        if size > most:
            raise BadSample(f"{where}: file of {size:,} bytes, where {most:,} are allowed; remove the sample")
        data = self.tars.read(number, int(self.offset[index]), size)
        if len(data) < size:
            raise BadSample(f"{where}: the tar ends inside this sample; fetch it again")
        return decode_image(data, where) if self.modality == "image" else self._text(data, where)

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for: the tar's own identity, and where in it the file lies."""
        if self._tar_identities is None:
            self._tar_identities = [file_identity(tar) for tar in self.tars.paths]
        names = [path.name.encode(errors="surrogateescape") for path in self.tars.paths]
        places = zip(*(part[rows].tolist() for part in (self.tar, self.offset, self.size)), strict=True)
        return [
            b"%s %s %d %d %s" % (names[tar], self._tar_identities[tar], offset, size, self.spec.encode())
            for tar, offset, size in places
        ]

    def _text(self, data: bytes, where: str) -> str:
        try:
            text = json.loads(data)[self.field] if self.field else data.decode("utf-8-sig")
        except (ValueError, KeyError, TypeError, RecursionError):
            what = f"JSON object with a field {self.field!r}" if self.field else "UTF-8 text"
            raise BadSample(f"{where}: {self.spec!r} is no {what}; mend the sample or name another file") from None
        if not isinstance(text, str) or not text.strip():
            raise BadSample(f"{where}: {self.spec!r} holds no text; fill it in or remove the sample")
        return text.strip()


def is_tars(path: str | Path) -> bool:
    """Whether a path, folder or glob means tars."""
    folder = Path(path)
    return str(path).endswith(".tar") or (folder.is_dir() and any(folder.glob("*.tar")))
