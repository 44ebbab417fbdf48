"""Training queries against frozen documents: the logged loss is L(θ), and a killed run resumes bit
for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.data import PairDataset, VectorPairs
from dualenc.encoders import VectorEncoder
from dualenc.objectives import FrozenCorpus
from dualenc.training.log import read_metrics
from tests.helpers.fakes import same, weights
from tests.helpers.runs import run_and_die, train, train_and_die

TAU = 0.1


def parts(folder: Path, sampled: bool = False) -> dict[str, Any]:
    """30 queries near their documents; the documents' tower leaves them as they are."""
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    documents = draw.normal(size=(30, 6)).astype(np.float32)
    files = {"left": documents + draw.normal(size=(30, 6)).astype(np.float32), "right": documents}
    for name, vectors in files.items():
        if not (folder / f"{name}.npy").exists():
            np.save(folder / f"{name}.npy", vectors)
    pairs = VectorPairs(folder / "left.npy", folder / "right.npy")
    options: dict[str, Any] = {}
    if sampled:
        options = {"max_exact": 5, "nearest": 3, "sampled": 8}
        options["search"] = lambda queries, nearest: (-queries @ documents.T).argsort(axis=1)[
            :, :nearest
        ]
    objective = FrozenCorpus(documents, num_left=30, num_right=30, temperature=TAU, **options)
    return {
        "pairs": pairs,
        "model": VectorEncoder(6, tower="mlp", right_tower="identity"),
        "objective": objective,
    }


def loss_of(model: VectorEncoder, pairs: PairDataset) -> float:
    """L(θ) over all queries and documents, from the formula."""
    with torch.no_grad():
        left = model("left", model.left.prepare(list(pairs.left_items))).double()
        right = model("right", model.right.prepare(list(pairs.right_items))).double()
    scores = left @ right.T / TAU
    negatives = scores.clone().fill_diagonal_(-torch.inf)
    return float((negatives.logsumexp(dim=1) - scores.diagonal()).mean())


def test_the_logged_loss_is_that_of_all_documents(tmp_path):
    """At a rate of 0 the mean over an epoch's batches is L(θ); training lowers it."""
    given = parts(tmp_path)
    expected = loss_of(given["model"], given["pairs"])
    train(tmp_path / "still", **given, learning_rate=1e-12, weight_decay=0.0, epochs=1, log_every=5)
    logged = [
        line["loss"]
        for line in read_metrics(tmp_path / "still" / "metrics.jsonl")
        if "loss" in line
    ]
    assert np.mean(logged) == pytest.approx(expected, rel=1e-5)
    train(tmp_path / "trained", **given, epochs=20, learning_rate=0.01, save_every=None)
    assert loss_of(given["model"], given["pairs"]) < expected - 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("sampled", "chunk_size"), [(False, None), (True, None), (False, 2)])
def test_killed_and_resumed_equals_unbroken(tmp_path, sampled, chunk_size):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(whole, **parts(tmp_path, sampled), chunk_size=chunk_size)
    changes = parts(tmp_path, sampled) | {"chunk_size": chunk_size}
    assert run_and_die(train_and_die, broken, 8, changes) == -signal.SIGKILL
    train(broken, resume=True, **parts(tmp_path, sampled), chunk_size=chunk_size)
    assert same(weights(broken), weights(whole))
