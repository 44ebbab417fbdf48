"""Objectives: what their gradients are worth on a model and pairs, by batch size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc import distributed
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
    found_first,
    measure,
    softmax_shares,
)
from dualenc.evaluation.output import Evaluation, display_name
from dualenc.evaluation.pair_sets import PairSet, embed_pairs, open_set
from dualenc.evaluation.report import Figure, Table
from dualenc.evaluation.run_models import trained_temperature
from dualenc.search.embed import tower_checksum

if TYPE_CHECKING:
    from dualenc.evaluation.options import ColumnOptions, ObjectivesOptions, OutputOptions

Row = dict[str, object]

TEMPERATURE = 0.07
BOUND = 0.02


def evaluate(model: str, data: str, options: ObjectivesOptions, columns: ColumnOptions, output: OutputOptions) -> None:
    """Measure each objective that has not been measured yet."""
    chosen = _chosen(options.objectives)
    evaluation = Evaluation("objectives", model, data, output)
    encoder = load_model(model, device=str(evaluation.device)).eval()
    evaluation.check_weights(encoder.left, encoder.right)
    temperature = options.temperature or trained_temperature(encoder, Path(model)) or TEMPERATURE
    items = open_set(encoder, data, options.split, columns)
    batch_size = options.batch_size
    if len(items) < batch_size:
        raise DualencError(f"{data}: holds {len(items)} pairs, fewer than a batch of {batch_size}; lower --batch-size")
    # In whole batches: a rest would make a smaller one.
    rows = random_rows(len(items), min(options.pairs, len(items)) // batch_size * batch_size)
    frozen = embed_pairs(encoder, PairSet(items, rows, seed=options.seed))
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("warm_up", "max_epochs", "seed")}
    facts: Row = {"batch_size": batch_size, "temperature": temperature, "pairs": len(frozen), **settings}
    signature = facts | {"bound": BOUND}
    if distributed.is_main():
        signature |= {"data": items.identity(), "model": [tower_checksum(encoder.tower(side)) for side in SIDES]}
    ledger: Ledger[str] = Ledger(evaluation.folder / "finished", distributed.broadcast_object(signature))
    own = ledger.missing(chosen)
    # Each process measures on its own: objectives would take the batches of all processes for one.
    with distributed.single_process():
        order = next(epochs(len(frozen), batch_size, options.seed))
        shares = softmax_shares(frozen, temperature, order).cpu().numpy()
        # What holds for the fine-tuning of two towers was not seen with views.
        first = 0.0 if frozen.views else found_first(frozen, order)
        _, loss = frozen.exact(temperature)
        for name in own:
            measured = measure(frozen, ESTIMATORS[name], temperature, batch_size, bound=BOUND, **settings)
            ledger.add({name: measured.to_plain()})
            print(f"{name}: {measured.epochs} epochs", file=sys.stderr)
    finished = ledger.all_values()
    if distributed.is_main():
        facts = {"model": model, "data": data, "split": options.split, "kind": encoder.kind, **facts}
        facts["pairs_of_data"] = len(items)
        results = {name: Measured.from_plain(finished[name]) for name in chosen}
        _report(evaluation, facts, results, loss, shares, first)
    distributed.barrier()


def _chosen(names: list[str] | None) -> list[str]:
    """The objectives to measure, by default all."""
    if names == []:
        raise DualencError("--objectives names none; leave it out to measure all")
    for name in names or ():
        if name not in ESTIMATORS:
            known = ", ".join(ESTIMATORS)
            raise DualencError(f"--objectives: there is no '{name}'{nearest(name, ESTIMATORS)}; choose from {known}")
    return list(dict.fromkeys(names or ESTIMATORS))


def _report(
    evaluation: Evaluation, facts: Row, results: dict[str, Measured], loss: float, shares: np.ndarray, first: float
) -> None:
    """A table of the objectives, the share of the softmax in a batch, plots of both, and the advice."""
    num_pairs = int(str(facts["pairs"]))
    batch_size = int(str(facts["batch_size"]))
    seen = {"mean": float(shares.mean()), "median": float(np.median(shares))}
    seen["anchors_above_half"] = float(np.mean(shares > 0.5))
    line = advice(results, batch_size, first)
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
            "positives_found_first": first,
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
    stopped = "stopped at the limit of epochs" if found.bias.error > BOUND else ""
    return {
        "objective": name,
        "bias": str(found.bias),
        "step error": f"{found.step_error:.3f} ± {found.step_error_error:.3f}",
        "extra encodes per pair": round(found.encodes, 3),
        "state, bytes per pair": round(found.state_bytes / num_pairs),
        "epochs": found.epochs,
        "note": "; ".join(filter(None, ["another loss" if name in OTHER_LOSSES else "", stopped])),
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
    biases = {name: (found.bias.value, found.bias.error) for name, found in results.items()}
    steps = {name: (found.step_error, found.step_error_error) for name, found in results.items()}
    series = {"bias": biases, "error of a step": steps}
    heights, spreads = (
        {kind: {name: pair[part] for name, pair in of_objectives.items()} for kind, of_objectives in series.items()}
        for part in (0, 1)
    )
    caption = "Distance from the gradient of the global loss, relative to its length, ± one standard error"
    return Figure(caption, plots.bars(heights, ylabel="relative to the gradient", errors=spreads))
