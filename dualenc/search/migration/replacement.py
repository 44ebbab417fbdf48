"""The next index of a migration: vectors that are new or mapped, and the swap of the folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.io.files import atomic_folder, remove
from dualenc.io.provenance import Provenance
from dualenc.search.documents import ReadRows
from dualenc.search.index.open import is_index
from dualenc.search.index.refined import REFINE, link
from dualenc.search.lexical import FOLDER as BM25_FOLDER
from dualenc.search.migration.maps import LinearMap
from dualenc.search.texts import FOLDER as TEXTS_FOLDER


def mixed_vectors(old: Any, to_new: LinearMap, new: Any, new_row: np.ndarray) -> ReadRows:
    """Return N lazy vectors in the new space, new ones where they exist and mapped ones elsewhere.

    Args:
        old: (N, E) vectors of the old model.
        to_new: the map from the old space to the new one.
        new: (n, D) vectors of the new model.
        new_row: (N,) row in `new`, or -1 to map the row of `old`.
    """
    dim = len(to_new.bias)

    def read(rows: np.ndarray) -> np.ndarray:
        new_rows = new_row[rows]
        is_new = new_rows >= 0
        vectors = np.empty((len(rows), dim), np.float32)
        vectors[is_new] = new[new_rows[is_new]]
        if not is_new.all():
            vectors[~is_new] = to_new(old[rows[~is_new]])
        return vectors

    return ReadRows(len(old), dim, read)


def replace_index(folder: Path, source: Path, provenance: Provenance) -> None:
    """Replace an index by that of `source` with a given record; keep its texts and BM25."""
    with atomic_folder(folder, is_index, "index") as part:
        link_tree(source, part)
        for name in (TEXTS_FOLDER, BM25_FOLDER):
            if (folder / name).is_dir():
                remove(part / name)
                link_tree(folder / name, part / name)
        provenance.write(part)


def build_options(replaced: Provenance, old: Path) -> dict[str, Any]:
    """Return options to build an index like the old one: tuned, measured, with a refine file."""
    measured = replaced.measured
    options: dict[str, Any] = {}
    if measured.recall_at_10 is None:
        options["recall_queries"] = 0
    if measured.target_recall is not None:
        options["target_recall"] = measured.target_recall
    if (old / REFINE).exists():
        # Codes that exceed half of the memory become a file, so this limit gives a file again.
        options["memory"] = (old / REFINE).stat().st_size
    return options


def link_tree(source: Path, target: Path) -> None:
    """Copy a folder by hard links, which is safe because no file is ever changed in place."""
    shutil.copytree(source, target, copy_function=link)
