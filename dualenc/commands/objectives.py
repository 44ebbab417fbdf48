"""`dualenc evaluate objectives`: what the gradients of the objectives are worth on a model and pairs, by batch size."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dualenc import distributed
from dualenc.commands.checks import MAX_ITEMS, MAX_SEED, check_range
from dualenc.commands.evaluation import Evaluation, display_name
from dualenc.encoders import load_model
from dualenc.encoders.dual import SIDES
from dualenc.errors import DualencError, nearest
from dualenc.evaluation import plots
from dualenc.evaluation.images import random_rows
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.objectives import (
    ESTIMATORS,
    OTHER_LOSSES,
    Measured,
    advice,
    epochs,
    measure,
    softmax_shares,
)
from dualenc.evaluation.pair_sets import PairSet, embed_pairs, open_set
from dualenc.evaluation.report import Figure, Table
from dualenc.evaluation.run_models import trained_temperature
from dualenc.search.embed import tower_checksum

Row = dict[str, object]

TEMPERATURE = 0.07
BOUND = 0.02


def objectives(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str = "train",
    left_column: str | None = None,
    right_column: str | None = None,
    batch_size: int = 32,
    temperature: float | None = None,
    objectives: list[str] | None = None,
    pairs: int = 2000,
    warm_up: int = 10,
    max_epochs: int = 64,
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Measure how far the gradient of each objective is from that of the global loss, on your model and pairs.

    Writes metrics.json and report.html. Pairs are embedded once and do not change; gradients are those with respect
    to the embeddings, and the pairs that are embedded are the whole corpus. Each objective makes six independent runs,
    until the standard error of its bias is below 0.02, or to the limit of epochs. Under `accelerate launch` the
    processes share the objectives. Interrupted, or with further objectives, it measures only those that it has not
    measured yet.

    Args:
        model: model folder or name.
        data: pairs, as `train` reads them; for models of kind image, images, of which two augmentations are a pair.
        out: folder to write; by default evaluations/objectives/MODEL-DATA-HASH.
        split: of the data.
        left_column: of a table of pairs.
        right_column: of a table of pairs.
        batch_size: B, pairs in a batch.
        temperature: τ; by default what the model was trained with, if it or its run's checkpoints record it, or 0.07.
        objectives: some of InfoNCE, DCL, SogCLR, SogCLR-0.1 (γ = 0.1), ISogCLR, GlobalCache, NegativeCache, EMC2, ISIR,
            HCL, SACLR, SigLIP; by default all.
        pairs: the most pairs that are embedded, chosen at random and always the same; a multiple of the batch size.
        warm_up: epochs of each run before anything counts, in which averages and chains settle.
        max_epochs: the most epochs of a run after that.
        seed: of the order of the pairs, of the objectives' draws, and of augmentations.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(2, MAX_ITEMS, batch_size=batch_size)
    check_range(batch_size, math.inf, pairs=pairs)
    check_range(1e-3, 1e4, temperature=temperature)
    check_range(0, 1 << 20, warm_up=warm_up)
    check_range(1, 1 << 20, max_epochs=max_epochs)
    check_range(0, MAX_SEED, seed=seed)
    chosen = _chosen(objectives)
    evaluation = Evaluation("objectives", model, data, out, device)
    encoder = load_model(model, device=str(evaluation.device)).eval()
    evaluation.check_weights(encoder.left, encoder.right)
    if temperature is None:
        temperature = trained_temperature(encoder, Path(model)) or TEMPERATURE
    items = open_set(encoder, data, split, left_column, right_column)
    if len(items) < batch_size:
        raise DualencError(f"{data}: holds {len(items)} pairs, fewer than a batch of {batch_size}; lower --batch-size")
    # In whole batches: a rest would make a smaller one.
    rows = random_rows(len(items), min(pairs, len(items)) // batch_size * batch_size)
    frozen = embed_pairs(encoder, PairSet(items, rows, seed=seed))
    settings: dict[str, Any] = {"warm_up": warm_up, "bound": BOUND, "max_epochs": max_epochs, "seed": seed}
    signature = {"batch_size": batch_size, "temperature": temperature, "pairs": len(frozen), **settings}
    if distributed.is_main():
        signature |= {"data": items.identity(), "model": [tower_checksum(encoder.tower(side)) for side in SIDES]}
    ledger: Ledger[str] = Ledger(evaluation.folder / "finished", distributed.broadcast_object(signature))
    own = ledger.missing(chosen)
    # Each process measures on its own: objectives would take the batches of all processes for one.
    with distributed.alone():
        order = next(epochs(len(frozen), batch_size, seed))
        shares = softmax_shares(frozen, temperature, order).cpu().numpy()
        _, loss = frozen.exact(temperature)
        for name in own:
            measured = measure(frozen, ESTIMATORS[name], temperature, batch_size, **settings)
            ledger.add({name: measured.to_plain()})
            print(f"{name}: {measured.epochs} epochs", file=sys.stderr)
    finished = ledger.all_values()
    if distributed.is_main():
        facts: Row = {"model": model, "data": data, "split": split, "kind": encoder.kind, "pairs": len(frozen)}
        facts |= {"pairs_of_data": len(items), "batch_size": batch_size, "temperature": temperature}
        facts |= {"warm_up": warm_up, "max_epochs": max_epochs, "seed": seed}
        results = {name: Measured.from_plain(finished[name]) for name in chosen}
        _report(evaluation, facts, results, loss, shares)
    distributed.barrier()


def _chosen(names: list[str] | None) -> list[str]:
    """The objectives to measure, by default all."""
    chosen = list(ESTIMATORS) if names is None else list(dict.fromkeys(names))
    for name in chosen:
        if name not in ESTIMATORS:
            known = ", ".join(ESTIMATORS)
            raise DualencError(f"--objectives: there is no '{name}'{nearest(name, ESTIMATORS)}; choose from {known}")
    if not chosen:
        raise DualencError("--objectives names none; leave it out to measure all")
    return chosen


def _report(evaluation: Evaluation, facts: Row, results: dict[str, Measured], loss: float, shares: np.ndarray) -> None:
    """A table of the objectives, the share of the softmax in a batch, plots of both, and the advice."""
    num_pairs = int(str(facts["pairs"]))
    batch_size = int(str(facts["batch_size"]))
    seen = {"mean": float(shares.mean()), "median": float(np.median(shares))}
    seen["anchors_above_half"] = float(np.mean(shares > 0.5))
    line = advice(results, batch_size)
    figures = []
    comparable = {name: found for name, found in results.items() if name not in OTHER_LOSSES}
    if comparable:
        figures.append(_distances(comparable))
    caption = f"Share of an anchor's softmax that its batch of {batch_size} holds; mean {seen['mean']:.4f}"
    plot = plots.histograms({"share": shares.tolist()}, xlabel="share of the softmax", ylabel="share of anchors")
    figures.append(Figure(caption, plot))
    rows = [_row(name, found, num_pairs) for name, found in results.items()]
    seen_row: Row = {"B": batch_size, "pairs": num_pairs, **seen}
    evaluation.conclude(
        f"Objectives: {display_name(evaluation.model)} on {facts['data']}",
        facts | {"advice": line},
        {
            "objectives": {name: _plain(name, found, num_pairs) for name, found in results.items()},
            "softmax_share": seen,
            "exact_loss": loss,
        },
        [
            Table(f"Gradients at B = {batch_size}, τ = {facts['temperature']:.4g}, {num_pairs:,} pairs", rows),
            Table("Share of the softmax over the corpus that a batch holds", [seen_row]),
        ],
        figures=figures,
    )
    print(line)


def _row(name: str, found: Measured, num_pairs: int) -> Row:
    """An objective in the table of the report."""
    notes = []
    if name in OTHER_LOSSES:
        notes.append("another loss")
    if found.bias.error > BOUND:
        notes.append("stopped at the limit of epochs")
    return {
        "objective": name,
        "bias": str(found.bias),
        "step error": f"{found.step_error:.3f} ± {found.step_error_error:.3f}",
        "extra encodes per pair": round(found.encodes, 3),
        "state, bytes per pair": round(found.state_bytes / num_pairs),
        "epochs": found.epochs,
        "note": "; ".join(notes),
    }


def _plain(name: str, found: Measured, num_pairs: int) -> Row:
    """An objective in metrics.json."""
    return {
        "bias": found.bias.value,
        "bias_error": found.bias.error,
        "bias_limit": found.bias.limit,
        "biased": found.bias.is_significant,
        "step_error": found.step_error,
        "step_error_error": found.step_error_error,
        "encodes_per_pair": found.encodes,
        "state_bytes_per_pair": found.state_bytes / num_pairs,
        "epochs": found.epochs,
        "global_loss": name not in OTHER_LOSSES,
    }


def _distances(results: dict[str, Measured]) -> Figure:
    """Bars of bias and step error, with standard errors."""
    heights = {
        "bias": {name: found.bias.value for name, found in results.items()},
        "error of a step": {name: found.step_error for name, found in results.items()},
    }
    spreads = {
        "bias": {name: found.bias.error for name, found in results.items()},
        "error of a step": {name: found.step_error_error for name, found in results.items()},
    }
    caption = "Distance from the gradient of the global loss, relative to its length, ± one standard error"
    return Figure(caption, plots.bars(heights, ylabel="relative to the gradient", errors=spreads))
