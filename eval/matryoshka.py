"""Prefixes of embeddings: nDCG@10 of the first components, trained whole or at several lengths.

    python eval/matryoshka.py SCIFACT --epochs 20 --seeds 2

Two perceptrons on frozen features of a BEIR folder are trained for the same number of steps with
and without `Matryoshka` (Kusupati et al. 2022, arXiv 2205.13147).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import toys
from frame import Outcome, Settings, Store, command_line, train
from mined import print_runs
from tasks import Retrieval, Task, beir_parts, on_features

from dualenc.data.corpus import Corpus
from dualenc.encoders import DualEncoder, VectorEncoder
from dualenc.objectives import GlobalCache, Matryoshka
from dualenc.search.embed.encode import embed


def quality(model: DualEncoder, test: Retrieval, dim: int) -> float:
    """Return nDCG@10 of the first components."""
    parts = {"queries": model.left, "corpus": model.right}
    for name, tower in parts.items():
        items = getattr(test.collection, name)
        vectors = embed(tower, items, batch_size=256, dim=dim, progress=False).vectors
        parts[name] = Corpus(items.ids, vectors, "vector")
    shortened = Retrieval(test.collection._replace(**parts))
    return shortened(VectorEncoder(dim, tower="identity"))["ndcg@10"]


def measure(task: Task, settings: Settings) -> Outcome:
    """Train the whole vectors or several lengths; return nDCG@10 by the number of components."""
    dims, pairs = settings["dims"], task.pairs
    torch.manual_seed(settings["seed"])
    model = VectorEncoder(pairs.left_dim, tower="mlp", dim=dims[-1], hidden=512, shared=False)
    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    objective = GlobalCache(**sizes, temperature=0.05, seed=settings["seed"])
    if settings["trained on"] == "dims":
        objective = Matryoshka(objective, dims)
    trainer = {name: settings[name] for name in ("epochs", "batch_size", "seed")}
    train(model, pairs, objective, learning_rate=task.learning_rate, **trainer)
    return {str(dim): quality(model, task.test, dim) for dim in dims}


def run(
    path: Path,
    epochs: int = 10,
    batch_size: int = 128,
    dims: Sequence[int] = (16, 32, 64, 128, 256),
    seeds: int = 3,
    results: str = os.devnull,
) -> None:
    """Print nDCG@10 on the test queries of a BEIR folder; `dims` ends with all components."""
    task = on_features(*beir_parts(path), learning_rate=1e-3, dim=dims[-1])
    common = {"task": path.name, "epochs": epochs, "batch_size": batch_size, "dims": list(dims)}
    rows, store = ("whole vectors", "dims"), Store(Path(results))
    wanted = [{**common, "trained on": row, "seed": seed} for row in rows for seed in range(seeds)]
    store.get(wanted, partial(measure, task))
    print_runs("nDCG@10 of the first components", store.runs)


def check(folder: Path) -> None:
    """Compare all components with the ordinary measure, and run on toy data."""
    path = toys.beir(folder / "beir")
    task = on_features(*beir_parts(path), learning_rate=1e-3, dim=16)
    same = VectorEncoder(16, tower="identity")
    assert quality(same, task.test, 4) < quality(same, task.test, 16) == task.test(same)["ndcg@10"]
    run(path, epochs=1, batch_size=12, dims=(4, 16), seeds=1)


if __name__ == "__main__":
    command_line(run, check=check)
