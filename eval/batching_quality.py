"""Does choosing who meets whom in a batch help? Random, OSGD, spectral and bisection batches with two objectives.

Trains a small image encoder on two augmented views and measures retrieval of the augmented pair, as Table 1 of Cho et
al., "Mini-batch optimization of contrastive loss", and nearest-neighbour accuracy. One JSON file per run: an
interrupted table goes on where it stopped.

    python eval/batching_quality.py PATH_TO_CIFAR10 --out runs/batching
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_images import PairRetrieval, cached, new_encoder, open_parts, train_and_measure

from dualenc.batching import BatchSelector, OSGDBatches, RandomBatches, SpectralBatches
from dualenc.data import ImageViews
from dualenc.evaluation.report import Table, print_table
from dualenc.files import write_json
from dualenc.objectives import InfoNCE, Objective, SogCLR

BATCHINGS: dict[str, Callable[..., BatchSelector]] = {
    "random": RandomBatches,
    "OSGD": lambda num_pairs, batch_size, seed: OSGDBatches(num_pairs, batch_size, seed=seed, k=40, q=20),
    "spectral": lambda num_pairs, batch_size, seed: SpectralBatches(
        num_pairs, batch_size, seed=seed, method="spectral"
    ),
    "bisection": lambda num_pairs, batch_size, seed: SpectralBatches(
        num_pairs, batch_size, seed=seed, method="bisection"
    ),
}
OBJECTIVES: dict[str, Callable[..., Objective]] = {"SimCLR": InfoNCE, "SogCLR": SogCLR}


def run(
    names: tuple[str, str], train: ImageViews, evaluator: PairRetrieval, seed: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Train once with one batching and one objective; the metrics at the end, and what the last selection was like."""
    torch.manual_seed(seed)
    model = new_encoder()
    batching = BATCHINGS[names[0]](len(train), arguments.batch_size, seed=seed)
    objective = OBJECTIVES[names[1]](num_left=len(train), temperature=arguments.temperature, views=True, seed=seed)
    work = Path(arguments.out) / "work"
    metrics = train_and_measure(
        model,
        train,
        objective,
        evaluator,
        batching,
        output=work,
        batch_size=arguments.batch_size,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        seed=seed,
        mixed_precision="bf16",
    )
    lines = (work / "metrics.jsonl").read_text().splitlines()
    selections: list[dict[str, Any]] = [entry for line in lines if "selection/loss" in (entry := json.loads(line))]
    last = {k: float(v) for k, v in selections[-1].items() if k.startswith("selection/")} if selections else {}
    return {**metrics, **last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder with train.parquet and test.parquet or val.parquet")
    parser.add_argument("--out", default="runs/batching")
    parser.add_argument("--pairs", type=int, default=3200)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=0.2)
    arguments = parser.parse_args()
    train, _, test = open_parts(arguments.path, arguments.pairs, 1000)
    evaluator = PairRetrieval(train, test)
    rows: list[dict[str, object]] = []
    for names in ((b, o) for o in OBJECTIVES for b in BATCHINGS):
        runs = [
            cached(
                Path(arguments.out) / f"{names[0]}-{names[1]}-{seed}.json",
                lambda names=names, seed=seed: run(names, train, evaluator, seed, arguments),
                {**vars(arguments), "seed": seed},
            )
            for seed in range(arguments.seeds)
        ]
        row: dict[str, object] = {"batches": names[0], "objective": names[1]}
        for metric in ("pair_top1", "knn_accuracy"):
            values = [metrics[metric] for metrics in runs]
            row[metric] = statistics.mean(values)
            row[f"{metric} sd"] = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append(row | {k: v for k, v in runs[-1].items() if k.startswith("selection/")})
        print(row, flush=True)
    print_table(Table(f"{Path(arguments.path).name}: {arguments.steps} steps, {arguments.seeds} seeds", rows))
    write_json(Path(arguments.out) / "table.json", rows)


if __name__ == "__main__":
    main()
