"""Embeddings that tests push to every engine, and what a search of them must give by numpy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

from dualenc.io.provenance import Provenance
from dualenc.search import Embeddings
from dualenc.search.engines.engine import Engine
from tests.helpers.conditions import KINDS, LANGUAGES

NUM = 120
DIM = 16
IDS = [f"id {row} “é”" for row in range(NUM)]


def vectors(count: int = NUM, unit: bool = True, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True) if unit else made


def frame() -> pd.DataFrame:
    """Columns of every kind with a fifth of their values missing."""
    random = np.random.default_rng(1)
    columns = {
        "year": [2018, 2019, 2020],
        "weight": [-1.5, 0.0, 2.0],
        "lang": list(LANGUAGES),
        "open": [True, False],
    }
    values = {
        name: [
            None if random.random() < 0.2 else choices[random.integers(len(choices))]
            for _ in range(NUM)
        ]
        for name, choices in columns.items()
    }
    return pd.DataFrame({name: pd.Series(column, dtype=object) for name, column in values.items()})


def embeddings(dtype: str = "float32", unit: bool = True, seed: int = 0) -> Embeddings:
    types = [pa.int64(), pa.float64(), pa.large_string(), pa.bool_()]
    arrays = [pa.array(frame()[name].tolist(), kind) for name, kind in zip(KINDS, types)]
    stored = vectors(unit=unit, seed=seed).astype(dtype)
    snippets = [f"snippet {i}" for i in range(NUM)]
    return Embeddings(
        IDS, stored, Provenance(normalized=unit), snippets, pa.table(arrays, names=list(KINDS))
    )


def check_results(index: Engine, source: Embeddings, metric: str) -> None:
    """The best five rows of seven queries, their scores and columns are numpy's; with a larger k
    all rows are found."""
    queries = vectors(7, unit=False, seed=5)
    stored = np.asarray(source.vectors, np.float64)
    expected = queries @ stored.T
    if metric == "cosine":
        expected /= np.linalg.norm(queries, axis=1, keepdims=True) * np.linalg.norm(stored, axis=1)
    for row, hits in enumerate(index.search(queries, k=5)):
        best = np.argsort(-expected[row])[:5]
        assert [hit.id for hit in hits] == [source.ids[i] for i in best]
        np.testing.assert_allclose(
            [hit.score for hit in hits], expected[row][best], rtol=3e-3, atol=3e-3
        )
        assert hits[0].snippet == f"snippet {best[0]}"
        assert hits[0].columns == {k: v for k, v in frame().iloc[best[0]].items() if v is not None}
    assert len(index.search(queries[0], k=NUM + 5)[0]) == NUM
