"""The benchmark of batch selection compares what it says it compares."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from dualenc.batching import batch_losses
from dualenc.batching.spectral import spectral_batches
from tests.eval.scripts import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench/batching.py")


def test_synthetic_embeddings_are_unit_vectors(bench: ModuleType) -> None:
    for side in bench.clustered_embeddings(50, clusters=3):
        np.testing.assert_allclose(np.linalg.norm(side, axis=1), 1, rtol=1e-5)
        assert side.dtype == np.float32


def test_scikit_learn_solves_the_same_problem_as_well(bench: ModuleType) -> None:
    left, right = bench.clustered_embeddings(320, clusters=5)
    theirs = bench.scikit_learn_batches(left, right)
    ours = spectral_batches(left, right, bench.B, bench.TEMPERATURE, 0, "normalized")
    assert sorted(theirs.ravel().tolist()) == list(range(320))
    means = [batch_losses(left, right, batches, 0.1).mean() for batches in (ours, theirs)]
    assert means[0] == pytest.approx(means[1], rel=0.1)


def test_prints_a_line_per_method(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.compare("clustered", *bench.clustered_embeddings(640, clusters=5), spectral_up_to=0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in lines] == ["spectral", "random", "bisection", "bandwidth"]
    assert lines[0][3].startswith("~")
