"""Variants of a training: negatives that were mined, and several lengths.

    python eval/variants.py mined SCIFACT --epochs 5 --seeds 3
    python eval/variants.py matryoshka SCIFACT --epochs 20 --seeds 2

Each trains two perceptrons on frozen features of a BEIR folder and prints nDCG@10 on its test
queries. All rows of a table take the same number of steps. "matryoshka" is Kusupati et al. 2022,
arXiv:2205.13147.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toys
from frame import Outcome, Settings, command_line, print_runs, run_all, train
from tasks import Retrieval, beir_parts, on_features, vector_pairs

from dualenc.data import Corpus, PairDataset
from dualenc.data.corpus import corpora
from dualenc.encoders import DualEncoder, VectorEncoder
from dualenc.objectives import GlobalCache, InfoNCE, Matryoshka
from dualenc.search.embed.encode import embed
from dualenc.search.mining import Rule, mine_negatives

LIMITS = {"mined, no limit": None, "mined, at most 0.95 of the positive": 0.95}


def compare(
    rows: Iterable[str], seeds: int, measure: Callable[[Settings], Outcome], **common: Any
) -> None:
    """Train each row with each seed, and print a table."""
    wanted = [{**common, "trained on": row, "seed": seed} for row in rows for seed in range(seeds)]
    print_runs("nDCG@10 on test queries", run_all(wanted, measure, processes=1))


def with_negatives(model: DualEncoder, pairs: PairDataset, rule: Rule, **how: Any) -> PairDataset:
    """Return the pairs with the negatives that a model finds for them; `how` is for `embed`."""
    sides = zip((model.left, model.right), corpora(pairs), strict=True)
    vectors = [embed(*side, progress=False, **how) for side in sides]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mined.jsonl"
        mine_negatives(*vectors, pairs, file, rule=rule, progress=False)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = {int(row["query_id"]): [int(own) for own in row["neg_id"]] for row in rows}
    negatives = [found.get(query, []) for query in pairs.left_id.tolist()]
    columns = (pairs.left_items, pairs.right_items, pairs.left_id, pairs.right_id)
    modalities = {"left_modality": pairs.left_modality, "right_modality": pairs.right_modality}
    return PairDataset(*columns, negatives=negatives, **modalities)


def mined(path: Path, epochs: int = 5, seeds: int = 3, dim: int = 256) -> None:
    """Train again, on the pairs alone or with what the model mined, from `dim` features a text."""
    task = on_features(*beir_parts(path), learning_rate=1e-3, dim=dim)

    def measure(settings: Settings) -> Outcome:
        row, seed = settings["trained on"], settings["seed"]
        trainer = {"epochs": epochs, "seed": seed, "learning_rate": 1e-3}
        torch.manual_seed(seed)
        model = train(task.new_model(), task.pairs, InfoNCE(temperature=0.05), **trainer).model
        if row in LIMITS:
            rule = Rule(settings["num_negatives"], relative=LIMITS[row])
            pairs = with_negatives(model, task.pairs, rule)
            train(model, pairs, InfoNCE(temperature=0.05), **trainer)
        elif row != "before mining":
            train(model, task.pairs, InfoNCE(temperature=0.05), **trainer)
        return task.test(model)

    common = {"task": path.name, "epochs": epochs, "num_negatives": 4}
    compare(("before mining", "pairs alone", *LIMITS), seeds, measure, **common)


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
    task = on_features(*beir_parts(path), learning_rate=1e-3, dim=dims[-1])
    pairs = task.pairs
    trainer = {"epochs": epochs, "batch_size": min(128, len(pairs))}

    def measure(settings: Settings) -> Outcome:
        seed = settings["seed"]
        torch.manual_seed(seed)
        model = VectorEncoder(pairs.left_dim, tower="mlp", dim=dims[-1], hidden=512, shared=False)
        sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
        objective = GlobalCache(**sizes, temperature=0.05, seed=seed)
        if settings["trained on"] == "dims":
            objective = Matryoshka(objective, dims)
        train(model, pairs, objective, learning_rate=1e-3, seed=seed, **trainer)
        return {str(dim): beginning(model, task.test, dim) for dim in dims}

    common = {"task": path.name, **trainer, "dims": list(dims)}
    compare(("whole vectors", "dims"), seeds, measure, **common)


def check(folder: Path) -> None:
    """Mine on a circle, and measure all components."""
    angles = np.radians([0, 10, 30, 70])
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    pairs, rule = vector_pairs(circle, circle), Rule(num_negatives=1, relative=None)
    found = with_negatives(VectorEncoder(2, tower="identity"), pairs, rule)
    assert [pair.negative_ids for pair in found] == [(1,), (0,), (1,), (2,)]
    toy = toys.beir(folder / "toy")
    task, same = on_features(*beir_parts(toy), 1e-3, dim=16), VectorEncoder(16, tower="identity")
    some, whole = (beginning(same, task.test, dim) for dim in (4, 16))
    assert some < whole == task.test(same)["ndcg@10"]
    mined(toy, epochs=1, seeds=2, dim=16)
    matryoshka(toy, epochs=1, seeds=1, dims=(4, 16))


if __name__ == "__main__":
    command_line(mined, matryoshka, check=check)
