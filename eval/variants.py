"""Several lengths of embeddings at once (Matryoshka, Kusupati et al. 2022, arXiv:2205.13147).

    python eval/variants.py SCIFACT --epochs 20 --seeds 2

Trains two perceptrons on frozen features of a BEIR folder and prints nDCG@10 on its test queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
import toys
from frame import Outcome, Settings, command_line, print_runs, run_all, train
from rows import sizes_of
from tasks import Retrieval, beir_parts, on_features

from dualenc.data import Corpus
from dualenc.encoders import DualEncoder, VectorEncoder
from dualenc.objectives import GlobalCache, Matryoshka
from dualenc.search.embed.encode import embed


def beginning(model: DualEncoder, test: Retrieval, dim: int) -> float:
    """Return nDCG@10 of the first components."""
    parts = {"queries": model.left, "corpus": model.right}
    for name, tower in parts.items():
        items = getattr(test.collection, name)
        vectors = embed(tower, items, batch_size=256, dim=dim, progress=False).vectors
        parts[name] = Corpus(items.ids, vectors, "vector")
    shortened = Retrieval(test.collection._replace(**parts))
    return shortened(VectorEncoder(dim, tower="identity"))["ndcg@10"]


def matryoshka(
    path: Path, epochs: int = 20, seeds: int = 2, dims: Sequence[int] = (16, 32, 64, 128, 256)
) -> None:
    """Train the whole vectors or several lengths, and measure the first components."""
    task = on_features(*beir_parts(path), dim=dims[-1])
    pairs = task.pairs
    trainer = {"epochs": epochs, "batch_size": min(128, len(pairs))}

    def measure(settings: Settings) -> Outcome:
        seed = settings["seed"]
        torch.manual_seed(seed)
        model = VectorEncoder(pairs.left_dim, tower="mlp", dim=dims[-1], hidden=512, shared=False)
        objective = GlobalCache(**sizes_of(pairs), temperature=0.05, seed=seed)
        if settings["trained on"] == "dims":
            objective = Matryoshka(objective, dims)
        train(model, pairs, objective, learning_rate=1e-3, seed=seed, **trainer)
        return {str(dim): beginning(model, task.test, dim) for dim in dims}

    common = {"task": path.name, **trainer, "dims": list(dims)}
    rows = product(("whole vectors", "dims"), range(seeds))
    wanted = [{**common, "trained on": row, "seed": seed} for row, seed in rows]
    print_runs("nDCG@10 on test queries", run_all(wanted, measure, processes=1))


def check(folder: Path) -> None:
    """Measure all components, which are the whole vectors, and fewer."""
    toy = toys.beir(folder / "toy")
    task, same = on_features(*beir_parts(toy), dim=16), VectorEncoder(16, tower="identity")
    some, whole = (beginning(same, task.test, dim) for dim in (4, 16))
    assert some < whole == task.test(same)["ndcg@10"]
    matryoshka(toy, epochs=1, seeds=1, dims=(4, 16))


if __name__ == "__main__":
    command_line(matryoshka, check=check)
