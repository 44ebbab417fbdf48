"""Mined hard negatives: what does a second training gain by them, at the same number of steps?

    python eval/mined.py SCIFACT --epochs 5 --seeds 3

Two perceptrons on frozen features of a BEIR folder mine for their own training queries, as `dualenc
mine` does, and are then trained as long again: on the pairs alone, or with what was mined.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toys
from frame import Outcome, Run, Settings, Store, command_line, key_of, spread, train
from tasks import Task, beir_parts, on_features, vector_pairs

from dualenc.data import PairDataset
from dualenc.data.corpus import corpora
from dualenc.encoders import DualEncoder, VectorEncoder
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import InfoNCE
from dualenc.search.embed.encode import embed
from dualenc.search.mining import Rule, mine_negatives

LIMITS = {"mined, no limit": None, "mined, at most 0.95 of the positive": 0.95}


def by_seed(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs that differ in nothing but the seed."""
    groups: dict[str, list[Run]] = {}
    for each in runs:
        groups.setdefault(key_of(each.settings | {"seed": None}), []).append(each)
    return list(groups.values())


def print_runs(title: str, runs: Iterable[Run], digits: int = 3) -> None:
    """Print settings and outcomes of each group of runs; of whole numbers the first."""
    rows = []
    for own in by_seed(runs):
        rows.append({name: str(value) for name, value in own[0].settings.items() if name != "seed"})
        for name, value in own[0].outcome.items():
            values = [each.outcome[name] for each in own]
            rows[-1][name] = value if isinstance(value, int) else spread(values, digits)
    print_table(Table(title, rows))


def mined(model: DualEncoder, pairs: PairDataset, rule: Rule, **how: Any) -> PairDataset:
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


def measure(task: Task, settings: Settings) -> Outcome:
    """Train, mine and train again; return nDCG@10 on the test queries."""
    trainer = {name: settings[name] for name in ("epochs", "seed")} | {"learning_rate": 1e-3}
    row = settings["trained on"]
    torch.manual_seed(settings["seed"])
    model = train(task.new_model(), task.pairs, InfoNCE(temperature=0.05), **trainer).model
    if row in LIMITS:
        rule = Rule(settings["num_negatives"], relative=LIMITS[row])
        train(model, mined(model, task.pairs, rule), InfoNCE(temperature=0.05), **trainer)
    elif row != "before mining":
        train(model, task.pairs, InfoNCE(temperature=0.05), **trainer)
    return task.test(model)


def run(
    path: Path, epochs: int = 20, seeds: int = 3, dim: int = 256, results: str = os.devnull
) -> None:
    """Print nDCG@10 on the test queries of a BEIR folder, with `dim` features per text."""
    task = on_features(*beir_parts(path), learning_rate=1e-3, dim=dim)
    common = {"task": path.name, "epochs": epochs, "num_negatives": 4}
    rows = ("before mining", "pairs alone", *LIMITS)
    wanted = [{**common, "trained on": row, "seed": seed} for row in rows for seed in range(seeds)]
    store = Store(Path(results))
    store.get(wanted, partial(measure, task))
    print_runs("A second training", store.runs)


def check(folder: Path) -> None:
    """Mine the neighbors of points on a circle, and run on toy data."""
    angles = np.radians([0, 10, 30, 70])
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    pairs, rule = vector_pairs(circle, circle), Rule(num_negatives=1, relative=None)
    found = mined(VectorEncoder(2, tower="identity"), pairs, rule)
    assert [pair.negative_ids for pair in found] == [(1,), (0,), (1,), (2,)]
    run(toys.beir(folder / "beir"), epochs=1, seeds=2, dim=16)


if __name__ == "__main__":
    command_line(run, check=check)
