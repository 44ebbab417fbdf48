"""Prefixes of embeddings: nDCG@10 of the first components, with an objective of the whole vectors
and one of several lengths (Kusupati et al. 2022, arXiv 2205.13147), at the same number of steps.

    python eval/matryoshka.py PATH --epochs 10

PATH is a BEIR folder; two perceptrons on frozen features (latent semantic analysis, 256 numbers)
are trained on its training pairs, as in eval/small_batch.py, to vectors of 256 numbers.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from comparison_tasks import Retrieval, beir_parts, on_features

from dualenc.encoders import VectorEncoder
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.probe import unit_rows
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import retrieve
from dualenc.objectives import GlobalCache, Matryoshka, Objective
from dualenc.search.embed.encode import embed
from dualenc.training import Trainer

DIMS = [16, 32, 64, 128, 256]


def qualities(model: VectorEncoder, test: Retrieval, dims: list[int]) -> dict[int, float]:
    """nDCG@10 of each length."""
    collection = test.collection
    queries, documents = (
        embed(tower, items, batch_size=256, progress=False)
        for tower, items in ((model.left, collection.queries), (model.right, collection.corpus))
    )
    found = {}
    for dim in dims:
        left, right = (
            unit_rows(np.asarray(side.vectors)[:, :dim]) for side in (queries, documents)
        )
        run = retrieve(queries.ids, left, documents.ids, right, depth=10, qrels=collection.qrels)
        found[dim] = statistics.mean(
            scores["ndcg@10"] for scores in score_queries(collection.qrels, run).values()
        )
    return found


def main(
    path: Path,
    epochs: int = 10,
    batch_size: int = 128,
    dims: list[int] | None = None,
    seeds: int = 3,
) -> None:
    """Train with and without lengths, and print a table.

    Args:
        path: BEIR folder.
        epochs: passes over its training pairs.
        batch_size: pairs in a batch.
        dims: lengths; the last one is that of the vectors.
        seeds: runs of each.
    """
    dims = dims or DIMS
    torch.set_num_threads(1)
    task = on_features(*beir_parts(path), learning_rate=1e-3)
    assert isinstance(task.test, Retrieval)
    rows: list[dict[str, object]] = []
    for name, lengths in (("whole vectors", None), ("dims", dims)):
        found = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = VectorEncoder(256, tower="mlp", dim=dims[-1], hidden=512, shared=False)
            sizes = {"num_left": task.pairs.num_left, "num_right": task.pairs.num_right}
            objective: Objective = GlobalCache(**sizes, temperature=0.05, seed=seed)
            if lengths:
                objective = Matryoshka(objective, lengths)
            with tempfile.TemporaryDirectory() as folder:
                settings = {
                    "batch_size": batch_size,
                    "epochs": epochs,
                    "learning_rate": task.learning_rate,
                }
                trainer = Trainer(
                    output=folder, seed=seed, save_every=None, progress=False, **settings
                )
                trainer.fit(model, task.pairs, objective)
            found.append(qualities(model, task.test, dims))
        means = {f"{dim}": statistics.mean(one[dim] for one in found) for dim in dims}
        rows.append({"trained on": name, **means})
    print_table(Table("nDCG@10 of the first components", rows))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
