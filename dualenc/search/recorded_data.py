"""The data that vectors were made of, opened again as their meta.json records it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dualenc.data import Corpus, open_corpus
from dualenc.errors import BadSample, DualencError
from dualenc.io.provenance import Provenance
from dualenc.types import StrPath

RECORDED = (
    "split",
    "text_column",
    "image_column",
    "vector_column",
    "id_column",
    "quotes",
)
"""Options of `open_corpus` that meta.json records: those that decide which items are read."""
TRIED = 5
"""Images that are read to see whether they are there."""


def open_recorded(
    about: Provenance, folder: StrPath, data: str | None = None, *, allow_outside: bool = False
) -> Corpus:
    """Open the items that vectors were made of, in the order of the data.

        corpus = open_recorded(index.provenance, "index")
        corpus.take(rows_in(corpus, index, "index"))

    Args:
        about: record of the vectors: `data`, `read` and `modality`.
        folder: where it is, for errors.
        data: where the data is now; None takes the recorded place.
        allow_outside: whether image paths may lead out of the folder of a table.

    Raises:
        DualencError: the data is gone, or cannot be opened.
    """
    source = data or about.data or ""
    if data is None and not (source and Path(source).exists()):
        raise DualencError(f"its data {source} is gone", fix="name it by --data", where=folder)
    options = from_record(about, folder)
    return open_corpus(source, modality=about.modality, allow_outside=allow_outside, **options)


def from_record(about: Provenance, folder: StrPath) -> dict[str, Any]:
    """Return the options that are recorded with vectors.

    Args:
        about: record of the vectors.
        folder: where it is, for errors.

    Raises:
        DualencError: the entry holds anything else. The file may come from a stranger, and only
            the user may allow paths outside the folder of a table.
    """
    options = about.read
    if isinstance(options, dict) and set(RECORDED).issuperset(options):
        types = {"quotes": bool}
        if all(isinstance(value, types.get(name, str)) for name, value in options.items()):
            return options
    raise DualencError(
        f"'read' in meta.json is {str(options)[:80]}, not how the data was read",
        fix="build it again",
        where=folder,
    )


def check_readable(items: Corpus) -> None:
    """Raise if none of a few images can be read: their folder may be gone, or not mounted.

    Args:
        items: the images.

    Raises:
        BadSample: why the first of them cannot be read.
    """
    first: BadSample | None = None
    for row in np.linspace(0, len(items) - 1, min(len(items), TRIED)).astype(int).tolist():
        try:
            _ = items[row]
        except BadSample as error:
            first = first or error
        else:
            return
    if first is not None:
        raise first
