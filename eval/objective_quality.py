"""Does a small batch with a global objective train as well as a large one? One table for all
objectives.

Every objective gets the same encoder, the same number of steps and the same tuning: a grid of
learning rates and temperatures, chosen on held-out data with the first seed, then run with all
seeds. InfoNCE runs at the small and at a large batch. Results are kept as one JSON file per run, so
an interrupted table resumes.

    python eval/objective_quality.py papers PATH_TO_PAPERS --out runs/quality
    python eval/objective_quality.py cifar10 PATH_TO_CIFAR10 --out runs/quality
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quality import (
    COMPARED,
    cached,
    mean_and_sd,
    new_encoder,
    new_parser,
    open_parts,
    train_and_measure,
)

from dualenc.data import BeirPairs, PairDataset
from dualenc.encoders import DualEncoder, TextEncoder, train_tokenizer
from dualenc.evaluation.report_page import Table, print_table
from dualenc.io.files import write_json
from dualenc.objectives import SACLR, NegativeCache, Objective, SigLIP
from dualenc.training import Evaluator, KNNEvaluator, RetrievalEvaluator

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    **COMPARED,
    "NegativeCache": lambda **common: NegativeCache(**common),
    "SACLR row": lambda **common: SACLR(form="row", **common),
    "SACLR matrix": lambda **common: SACLR(form="matrix", rho=0.99, **common),
    "SACLR-1 matrix": lambda **common: SACLR(form="matrix", negatives=1, rho=0.99, **common),
    "SigLIP": SigLIP,
}


@dataclass
class Task:
    """What is trained on and measured: a new model per run, pairs, and held-out and test data in
    one evaluator."""

    new_model: Callable[[], DualEncoder]
    pairs: PairDataset
    evaluator: HeldOutAndTest


class HeldOutAndTest(Evaluator):
    """The same metric on validation data, to tune by, and on test data, to report."""

    primary = "validation"

    def __init__(self, validation: Evaluator, test: Evaluator) -> None:
        self.parts = {"validation": validation, "test": test}

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        return {name: part(model)[part.primary] for name, part in self.parts.items()}


def papers(path: str, num_pairs: int) -> Task:
    """Titles find abstracts: a one-layer transformer with a tokenizer of its own, both from
    scratch."""
    pairs = own_documents(path, "train", num_pairs)
    tokenizer = train_tokenizer(pairs.right_items, 8000, max_length=64)
    config = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {
        "intermediate_size": 256,
        "max_position_embeddings": 64,
        "vocab_size": len(tokenizer),
    }

    def new_model() -> DualEncoder:
        return TextEncoder(config=config, tokenizer=tokenizer, max_length=64)

    parts = (RetrievalEvaluator(pairs=own_documents(path, split, 500)) for split in ("dev", "test"))
    return Task(new_model, pairs, HeldOutAndTest(*parts))


def own_documents(path: str, split: str, limit: int) -> PairDataset:
    """The first pairs of one split with only their own documents as corpus."""
    whole = BeirPairs(path, split)
    items = [whole[i] for i in range(min(limit, len(whole)))]
    return PairDataset([pair.left for pair in items], [pair.right for pair in items])


def cifar10(path: str, num_pairs: int) -> Task:
    """Two views of an image: a narrow four-block ResNet, 20-nearest-neighbour accuracy on its
    features."""
    train, validation, test = open_parts(path, num_pairs, 1000)
    evaluator = HeldOutAndTest(KNNEvaluator(train, validation), KNNEvaluator(train, test))
    return Task(new_encoder, train, evaluator)


def run(task: Task, name: str, settings: dict[str, Any], folder: Path) -> dict[str, float]:
    """Train once; the evaluator's metrics at the end."""
    torch.manual_seed(settings["seed"])
    model, pairs = task.new_model(), task.pairs
    common = {"num_left": pairs.num_left, "num_right": pairs.num_right, "views": pairs.views}
    objective = OBJECTIVES[name](
        temperature=settings["temperature"], seed=settings["seed"], **common
    )
    given = {name: settings[name] for name in ("batch_size", "learning_rate", "seed")}
    return train_and_measure(
        model, pairs, objective, task.evaluator, output=folder, max_steps=settings["steps"], **given
    )


def row(task: Task, name: str, batch_size: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Tune one objective, run it with all seeds, and say what came out."""
    folder = Path(arguments.out) / arguments.task
    label = f"{name.replace(' ', '_')}-B{batch_size}"

    def measure(learning_rate: float, temperature: float, seed: int) -> dict[str, float]:
        settings = {
            "learning_rate": learning_rate,
            "temperature": temperature,
            "seed": seed,
            "batch_size": batch_size,
        }
        settings |= {"steps": arguments.steps, "pairs": arguments.pairs}
        path = folder / f"{label}-{learning_rate}-{temperature}-{seed}.json"
        return cached(path, lambda: run(task, name, settings, folder / "work" / label), settings)

    grid = itertools.product(arguments.learning_rates, arguments.temperatures)
    rate, tau = max(grid, key=lambda pair: measure(*pair, seed=0)["validation"])
    seeds = [measure(rate, tau, seed)["test"] for seed in range(arguments.seeds)]
    print(f"{label}: {seeds}", flush=True)
    chosen = {"learning rate": str(rate), "temperature": str(tau)}
    return {"objective": name, "batch": batch_size, **chosen, **mean_and_sd("test", seeds)}


def main() -> None:
    parser = new_parser(__doc__, "runs/quality", pairs=4000, steps=1000)
    parser.add_argument("task", choices=("papers", "cifar10"))
    parser.add_argument("path")
    parser.add_argument("--large-batch-size", type=int, default=512)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument(
        "--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES)
    )
    arguments = parser.parse_args()
    task = {"papers": papers, "cifar10": cifar10}[arguments.task](arguments.path, arguments.pairs)
    rows = [row(task, name, arguments.batch_size, arguments) for name in arguments.objectives]
    if arguments.large_batch_size:
        rows.append(row(task, "InfoNCE", arguments.large_batch_size, arguments))
    print_table(Table(f"{arguments.task}: {arguments.steps} steps, {arguments.seeds} seeds", rows))
    write_json(Path(arguments.out) / f"{arguments.task}.json", rows)


if __name__ == "__main__":
    main()
