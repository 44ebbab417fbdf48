"""The benchmark of batch selection compares what it says it compares."""

from __future__ import annotations

from types import ModuleType

import pytest

from dualenc.batching import batch_losses
from dualenc.batching.spectral import spectral_batches
from tests.eval.scripts import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench/batching.py")


def test_scikit_learn_solves_the_same_problem_as_well(bench: ModuleType) -> None:
    left, right = bench.clustered_embeddings(320, clusters=5)
    theirs = bench.scikit_learn_batches(left, right)
    ours = spectral_batches(left, right, bench.B, bench.TEMPERATURE, 0)
    assert sorted(theirs.ravel().tolist()) == list(range(320))
    means = [batch_losses(left, right, batches, 0.1).mean() for batches in (ours, theirs)]
    assert means[0] == pytest.approx(means[1], rel=0.1)
