"""Does choosing who meets whom in a batch help? Random, OSGD, spectral and bisection batches with
two objectives.

Trains a small image encoder on two augmented views and measures retrieval of the augmented pair, as
Table 1 of Cho et al., "Mini-batch optimization of contrastive loss", and nearest-neighbour
accuracy. One JSON file per run: an interrupted table resumes.

    python eval/batching_quality.py PATH_TO_CIFAR10 --out runs/batching
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from probes import OSGDBatches
from quality import (
    PairRetrieval,
    cached,
    mean_and_sd,
    new_encoder,
    new_parser,
    open_parts,
    train_and_measure,
)

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches
from dualenc.data import ImageViews
from dualenc.evaluation.report_page import Table, print_table
from dualenc.io.files import write_json
from dualenc.objectives import InfoNCE, Objective, SogCLR

BATCHINGS: dict[str, Callable[..., BatchSelector]] = {
    "random": RandomBatches,
    "OSGD": partial(OSGDBatches, k=40, q=20),
    "spectral": partial(SpectralBatches, method="spectral"),
    "bisection": partial(SpectralBatches, method="bisection"),
}
OBJECTIVES: dict[str, Callable[..., Objective]] = {"SimCLR": InfoNCE, "SogCLR": SogCLR}


def run(
    names: tuple[str, str],
    train: ImageViews,
    evaluator: PairRetrieval,
    seed: int,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """Train once with one batching and one objective; the metrics at the end, and what the last
    selection was like."""
    torch.manual_seed(seed)
    model = new_encoder()
    batching = BATCHINGS[names[0]](len(train), arguments.batch_size, seed=seed)
    objective = OBJECTIVES[names[1]](
        num_left=len(train), temperature=arguments.temperature, views=True, seed=seed
    )
    work = Path(arguments.out) / "work"
    settings = {
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "seed": seed,
    }
    settings |= {"max_steps": arguments.steps, "mixed_precision": "bf16", "output": work}
    metrics = train_and_measure(model, train, objective, evaluator, batching, **settings)
    logged = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    last = next((entry for entry in reversed(logged) if "selection/loss" in entry), {})
    return {**metrics, **{k: float(v) for k, v in last.items() if k.startswith("selection/")}}


def main() -> None:
    parser = new_parser(__doc__, "runs/batching", pairs=3200, steps=600)
    parser.add_argument("path", help="folder with train.parquet and test.parquet or val.parquet")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=0.2)
    arguments = parser.parse_args()
    train, _, test = open_parts(arguments.path, arguments.pairs, 1000)
    evaluator = PairRetrieval(train, test)
    rows: list[dict[str, object]] = []
    for names in ((b, o) for o in OBJECTIVES for b in BATCHINGS):
        runs = []
        for seed in range(arguments.seeds):
            path = Path(arguments.out) / f"{names[0]}-{names[1]}-{seed}.json"
            train_once = partial(run, names, train, evaluator, seed, arguments)
            runs.append(cached(path, train_once, {**vars(arguments), "seed": seed}))
        row: dict[str, object] = {"batches": names[0], "objective": names[1]}
        for metric in ("pair_top1", "knn_accuracy"):
            row |= mean_and_sd(metric, [metrics[metric] for metrics in runs])
        rows.append(row | {k: v for k, v in runs[-1].items() if k.startswith("selection/")})
        print(row, flush=True)
    print_table(
        Table(
            f"{Path(arguments.path).name}: {arguments.steps} steps, {arguments.seeds} seeds", rows
        )
    )
    write_json(Path(arguments.out) / "table.json", rows)


if __name__ == "__main__":
    main()
