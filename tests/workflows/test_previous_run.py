"""The models that a run continues between: the earlier one, and that of the index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.encoders import VectorEncoder
from dualenc.errors import DualencError
from dualenc.workflows.adapting import BASE, ORIGINAL
from dualenc.workflows.previous_run import PreviousRun
from dualenc.workflows.trained_pairs import TrainedPairs

D = 6


def perceptron(seed: int, is_trained: bool = False, dim: int = D) -> VectorEncoder:
    """A map as training begins with it, or with other weights everywhere."""
    torch.manual_seed(seed)
    model = VectorEncoder(dim, tower="dense", right_tower="identity", right_input_dim=D).eval()
    if is_trained:
        weights = model.state_dict()
        model.load_state_dict({name: torch.randn(own.shape) for name, own in weights.items()})
    return model


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_lines_between_perceptrons_of_other_seeds() -> None:
    """The base model leaves queries as they are, and halfway to it is half of the change that the
    earlier map makes, whatever the seed: it has the hidden layer of the earlier one."""
    trained = perceptron(0, is_trained=True)
    previous = PreviousRun(Path("one"), TrainedPairs({}), trained.state_dict(), "1f3a9c2077")
    untrained = perceptron(1)
    ends = previous.ends(untrained)
    queries = unit(np.random.default_rng(0).normal(size=(5, D))).astype(np.float32)
    assert ends.base is not None
    np.testing.assert_allclose(ends.base.encode(list(queries), "left"), queries, atol=1e-6)
    np.testing.assert_array_equal(
        ends.original.encode(list(queries), "left"), trained.encode(list(queries), "left")
    )
    changed = trained.left.map(torch.from_numpy(queries)).detach().numpy()
    halfway = perceptron(2)
    halfway.load_state_dict(ends.mix(ends.original, 0.5, BASE))
    expected = unit(np.sqrt(D) * queries + 0.5 * (changed - np.sqrt(D) * queries))
    np.testing.assert_allclose(halfway.encode(list(queries), "left"), expected, atol=1e-5)
    whole = ends.mix(untrained, 1, ORIGINAL)
    assert all(torch.equal(own, whole[name]) for name, own in trained.state_dict().items())
    assert previous.name == "from-1f3a9c20"


def test_a_map_of_other_queries_is_refused() -> None:
    previous = PreviousRun(Path("one"), TrainedPairs({}), perceptron(0, dim=4).state_dict(), "")
    with pytest.raises(DualencError, match=r"one: its model takes queries of another size"):
        previous.ends(perceptron(0))
