"""The whole texts of an index or an engine beside it, found by id: what a cross-encoder reads.

    texts/    ids.txt, texts.jsonl (a JSON string a line), the arrays that find a line, and meta.json

All are mapped: opening reads next to nothing, and a search the lines of its candidates. The folder lies inside that of
the index, and its meta.json names the checksum of what it belongs to: it is never of other texts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dualenc.data.identity import texts_checksum
from dualenc.errors import DualencError
from dualenc.files import (
    atomic_folder,
    checksums,
    is_folder_of,
    locked,
    read_json_object,
    sizes,
    verify_files,
    write_json,
)
from dualenc.search.lines import MappedIds, Snippets, check_ids, lines_files, write_ids, write_snippets

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.search.engines import EngineIndex
    from dualenc.search.index import Index

FOLDER = "texts"
FORMAT = "dualenc texts"
AGAIN = "run dualenc index INDEX --texts"


class KeptTexts:
    """N texts on disk by their ids.

    Args:
        folder: of the index that they belong to.
        of: checksum of that (`checksum_of`).

    Raises:
        DualencError: none are kept there, they are of another index, or damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], of: str) -> None:
        self.folder = Path(folder) / FOLDER
        if not self.folder.is_dir():
            raise DualencError(f"{folder}: keeps no texts for a cross-encoder to read; {AGAIN}")
        meta = read_json_object(self.folder / "meta.json", {"count": int, "of": str, "files": dict})
        if meta["of"] != of:
            raise DualencError(f"{self.folder}: is of other texts than the index; {AGAIN}")
        names = [file for name in ("ids.txt", "texts.jsonl") for file in lines_files(self.folder, name)]
        verify_files(self.folder, names, meta, AGAIN, whole=False)
        self.ids = MappedIds(self.folder / "ids.txt", meta["count"])
        self.texts = Snippets(self.folder / "texts.jsonl", meta["count"])

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, ids: Sequence[str]) -> list[str]:
        """The texts of n ids.

        Raises:
            DualencError: one of them has none.
        """
        rows = self.ids.rows(ids).tolist()
        if -1 in rows:
            raise DualencError(f"{self.folder}: has no text of {ids[rows.index(-1)][:80]!r}; {AGAIN}")
        return [self.texts[row] for row in rows]


def checksum_of(index: Index | EngineIndex) -> str:
    """What tells an index from one of other items: the checksum of its ids, or of what was pushed."""
    from dualenc.search.engines import EngineIndex

    return index.about.fingerprint if isinstance(index, EngineIndex) else str(index.meta["files"].get("ids.txt"))


def rows_in(corpus: Corpus, index: Index, folder: str | os.PathLike[str]) -> list[int]:
    """The row of a corpus that each item of an index was made of.

    Raises:
        DualencError: the corpus lacks one, or has another text under its id than was embedded.
    """
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    for name in index.ids:
        if name not in row_of:
            raise DualencError(f"{folder}: the data has no text {name[:80]!r}; name what the index was made of")
    rows = [row_of[name] for name in index.ids]
    # After `--remove` the beginnings of the texts are all that is known of them.
    for place, row in enumerate(rows if index.snippets is not None else ()):
        if index.snippet(place) != corpus.text(row):
            _refuse_changed(folder, f"of {corpus.ids[row][:80]!r} ")
    _check_unchanged(corpus, rows, index.meta, folder)
    return rows


def _check_unchanged(
    corpus: Corpus, rows: Sequence[int], meta: Mapping[str, Any], folder: str | os.PathLike[str]
) -> None:
    """Insist that texts are those that a meta.json has the checksum of, if it has one."""
    recorded = meta.get("texts_checksum")
    if recorded is not None and recorded != texts_checksum((corpus.ids[row], corpus[row]) for row in rows):
        _refuse_changed(folder)


def _refuse_changed(folder: str | os.PathLike[str], which: str = "") -> NoReturn:
    raise DualencError(
        f"{folder}: the text {which}in the data is not what was embedded; embed and index the data again"
    )


def add_texts(folder: str | os.PathLike[str], corpus: Corpus) -> int:
    """Put texts into the folder of an index or of a pushed collection.

    Args:
        folder: that `dualenc index` or `dualenc push` wrote.
        corpus: the texts that it was made of, in any order; of an index only its own are kept.

    Returns:
        How many.

    Raises:
        DualencError: no texts, or not those of the index, or texts that have changed since they were embedded.
    """
    if corpus.modality != "text":
        raise DualencError(
            f"{folder}: its data holds {corpus.modality}s, and a cross-encoder reads texts; leave it out"
        )
    with locked(folder):
        return _add_texts(folder, corpus)


def _add_texts(folder: str | os.PathLike[str], corpus: Corpus) -> int:
    from dualenc.search.engines.index import is_engine, read_engine_meta
    from dualenc.search.index import Index

    ids: Sequence[str] = corpus.ids
    rows: Sequence[int] = range(len(corpus))
    if is_engine(folder):  # which does not list its ids
        about, meta = read_engine_meta(folder)
        belongs_to = about.fingerprint
        if len(ids) < about.count:
            told = f"the data has {len(ids):,} texts for {about.count:,} vectors"
            raise DualencError(f"{folder}: {told}; name what the embeddings were made of")
        if len(ids) == about.count:
            _check_unchanged(corpus, rows, meta, folder)
    else:
        index = Index.open(folder)
        belongs_to = checksum_of(index)
        ids = index.ids
        rows = rows_in(corpus, index, folder)
    check_ids(ids)
    with atomic_folder(Path(folder) / FOLDER, functools.partial(is_folder_of, wanted=FORMAT), "texts") as part:
        part.mkdir()
        write_ids(part / "ids.txt", ids)
        write_snippets(part / "texts.jsonl", (corpus[row] for row in rows))
        files = checksums(part, sorted(path.name for path in part.iterdir()))
        head = {"format": FORMAT, "version": 1, "count": len(ids), "of": belongs_to}
        write_json(part / "meta.json", {**head, "sizes": sizes(part, files), "files": files})
    return len(ids)
