"""Short prefixes of embeddings are judged as a slow search judges them."""

from __future__ import annotations

import numpy as np
import pytest

from dualenc.data import Corpus, RetrievalSet
from dualenc.encoders import VectorEncoder
from tests.helpers.eval_scripts import load_script


@pytest.mark.slow
def test_prefixes_are_judged_by_exact_search() -> None:
    script = load_script("matryoshka.py")
    rng = np.random.default_rng(0)
    names = [str(row) for row in range(30)]
    vectors = rng.standard_normal((30, 6)).astype(np.float32)
    noisy = vectors + 0.5 * rng.standard_normal((30, 6)).astype(np.float32)
    queries = Corpus([f"q{name}" for name in names], noisy, "vector")
    qrels = {f"q{name}": {name: 1} for name in names}
    test = script.Retrieval(RetrievalSet(queries, Corpus(names, vectors, "vector"), qrels))
    found = script.qualities(VectorEncoder(6, tower="identity"), test, [2, 3, 6])
    for dim, score in found.items():
        a, b = (
            v[:, :dim] / np.linalg.norm(v[:, :dim], axis=1, keepdims=True)
            for v in (queries.items, vectors)
        )
        own = a @ b.T
        rank = (own > own.diagonal()[:, None]).sum(axis=1)
        expected = np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean()
        assert score == pytest.approx(expected, abs=1e-6)
    assert found[2] < found[6]
