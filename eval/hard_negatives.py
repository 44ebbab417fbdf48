"""Mined hard negatives: what a second training gains by them, at the same number of steps.

    python eval/hard_negatives.py PATH --epochs 20 --seeds 3

PATH is a BEIR folder; two perceptrons on frozen features (latent semantic analysis, 256 numbers) to
vectors of 64, as in eval/small_batch.py. They are trained with InfoNCE, mine negatives for their
own training queries (as `dualenc mine` does), and are then trained as long again: on the pairs
alone, or with what was mined.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
from pathlib import Path

import torch
from comparison_tasks import Retrieval, beir_parts, on_features

from dualenc.data import PairDataset
from dualenc.data.corpus import corpora
from dualenc.encoders import DualEncoder
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import InfoNCE
from dualenc.search.embed.encode import embed
from dualenc.search.mining import Rule, mine_negatives
from dualenc.training import Trainer

# The limit of a negative's score as a share of its positive's, by name (None: nothing is mined; 0:
# no limit).
VARIANTS: dict[str, float | None] = {
    "pairs alone": None,
    "mined, no limit": 0.0,
    "mined, at most 0.95 of the positive": 0.95,
}


def with_negatives(pairs: PairDataset, mined: Path) -> PairDataset:
    """The same pairs, each with what was mined for its query; without, where nothing was."""
    rows = [json.loads(line) for line in mined.read_text(encoding="utf-8").splitlines()]
    negatives = {
        int(row["query_id"]): [int(document) for document in row["neg_id"]] for row in rows
    }
    return PairDataset(
        pairs.left_items,
        pairs.right_items,
        pairs.left_id,
        pairs.right_id,
        negatives=[negatives.get(query, []) for query in pairs.left_id.tolist()],
        left_modality=pairs.left_modality,
        right_modality=pairs.right_modality,
    )


def train(model: DualEncoder, pairs: PairDataset, seed: int, epochs: int, folder: Path) -> None:
    """One training."""
    trainer = Trainer(
        output=folder,
        seed=seed,
        batch_size=32,
        epochs=epochs,
        learning_rate=1e-3,
        save_every=None,
        progress=False,
    )
    trainer.fit(model, pairs, InfoNCE(temperature=0.05))


def main(path: Path, epochs: int = 20, seeds: int = 3, num_negatives: int = 4) -> None:
    """Train, mine, train on, and print a table.

    Args:
        path: BEIR folder.
        epochs: passes over the training pairs, before mining and once again after it.
        seeds: runs of each.
        num_negatives: mined for each query at most.
    """
    torch.set_num_threads(1)
    task = on_features(*beir_parts(path), learning_rate=1e-3)
    assert isinstance(task.test, Retrieval)
    found: dict[str, list[float]] = {"before mining": [], **{name: [] for name in VARIANTS}}
    for seed in range(seeds):
        torch.manual_seed(seed)
        first = task.new_model()
        with tempfile.TemporaryDirectory() as scratch:
            work = Path(scratch)
            train(first, task.pairs, seed, epochs, work / "first")
            found["before mining"].append(task.test(first)["ndcg@10"])
            left, right = corpora(task.pairs)
            queries = embed(first.left, left, work / "queries", progress=False)
            documents = embed(first.right, right, work / "documents", progress=False)
            for number, (name, limit) in enumerate(VARIANTS.items()):
                pairs = task.pairs
                if limit is not None:
                    rule = Rule(num_negatives=num_negatives, relative=limit or None)
                    mine_negatives(
                        queries,
                        documents,
                        pairs,
                        work / f"{number}.jsonl",
                        rule=rule,
                        progress=False,
                    )
                    pairs = with_negatives(pairs, work / f"{number}.jsonl")
                model = copy.deepcopy(first)
                train(model, pairs, seed, epochs, work / str(number))
                found[name].append(task.test(model)["ndcg@10"])
                print(f"seed {seed}, {name}: nDCG@10 {found[name][-1]:.4f}", flush=True)
    rows = [
        {
            "trained on": name,
            "ndcg@10": statistics.mean(own),
            "deviation": statistics.stdev(own) if seeds > 1 else None,
        }
        for name, own in found.items()
    ]
    print_table(Table("A second training", rows))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
