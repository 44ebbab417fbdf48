"""Texts beside an index: read again from the data that was embedded, indexed by BM25, or kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualenc.data import Corpus
from dualenc.data.readers.sources import open_corpus
from dualenc.errors import DualencError
from dualenc.io.provenance import META, Provenance
from dualenc.io.reading import read_json_object
from dualenc.search.lexical import has_lexical
from dualenc.search.recorded_data import from_record
from dualenc.search.texts import has_texts
from dualenc.types import StrPath
from dualenc.workflows.recorded_options import ReadOptions, to_record


def open_texts(folder: str, data: str | None, reading: ReadOptions) -> Corpus:
    """Open the texts that an index or embeddings were made of.

    Args:
        folder: the index or the embeddings.
        data: source of the texts; None takes the one that meta.json records.
        reading: options that differ from the recorded ones.
    """
    path = Path(folder) / META
    # With `data`, the folder may also be a model.
    entries = {} if data is not None and not path.is_file() else read_json_object(path)
    provenance = Provenance.from_entries(entries)
    recorded = data or provenance.data
    if not isinstance(recorded, str):
        raise DualencError(
            "does not say what it was made of",
            fix="name it: index INDEX DATA --texts",
            where=folder,
        )
    # Read as they were when they were embedded, or the ids would be others.
    options: dict[str, Any] = {**from_record(provenance, folder), **to_record(reading)}
    return open_corpus(recorded, modality="text", **options)


def check_has_texts(index: StrPath, *, bm25: bool, texts: bool) -> bool:
    """Return True if an index has BM25 or texts, which appended texts then join.

    Raises:
        DualencError: the index lacks what is asked for.
    """
    if (bm25 and not has_lexical(index)) or (texts and not has_texts(index)):
        raise DualencError(
            "has no BM25 or no texts to append to",
            fix=f"run dualenc index {index} --bm25 --texts",
            where=index,
        )
    return has_lexical(index) or has_texts(index)
