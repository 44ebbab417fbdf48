"""Objectives: what their gradients are worth on a model and pairs, by batch size."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualenc import distributed
from dualenc.commands.labelled_images import random_rows
from dualenc.commands.output import Evaluation, short_name
from dualenc.data import Corpus, PairDataset, open_corpus, open_pairs
from dualenc.encoders import DualEncoder, load_model
from dualenc.encoders.dual import SIDES
from dualenc.errors import DualencError, nearest
from dualenc.evaluation.corrupted import SimCLRPrepare
from dualenc.evaluation.objectives import (
    ESTIMATORS,
    OTHER_LOSSES,
    FrozenPairs,
    Measured,
    advice,
    epochs,
    found_first,
    measure_objective,
    softmax_shares,
)
from dualenc.evaluation.report import Table
from dualenc.training.checkpoint import Checkpoints
from dualenc.training.loader import augmentation_seeds
from dualenc.types import Inputs, Side

if TYPE_CHECKING:
    from dualenc.commands.evaluate import ObjectivesOptions
    from dualenc.commands.options import ColumnOptions, OutputOptions

Row = dict[str, object]

TEMPERATURE = 0.07
BOUND = 0.02
CHUNK = 64
"""Items prepared and encoded at once."""


def evaluate_objectives(
    model: str, data: str, options: ObjectivesOptions, columns: ColumnOptions, output: OutputOptions
) -> None:
    """Measure each objective."""
    names = _chosen_names(options.objectives)
    evaluation = Evaluation("objectives", model, data, output)
    encoder = load_model(model, device=str(evaluation.device)).eval()
    evaluation.check_weights(encoder.left, encoder.right)
    temperature = options.temperature or trained_temperature(encoder, Path(model)) or TEMPERATURE
    items = open_set(encoder, data, options.split, columns)
    batch_size = options.batch_size
    if len(items) < batch_size:
        raise DualencError(
            f"{data}: holds {len(items)} pairs, fewer than a batch of {batch_size}; lower --batch-size"
        )
    # In whole batches: a rest would make a smaller one.
    rows = random_rows(len(items), min(options.pairs, len(items)) // batch_size * batch_size)
    frozen = embed_pairs(encoder, PairSet(items, rows, seed=options.seed))
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("warm_up", "max_epochs", "seed")}
    measured: dict[str, Measured] = {}
    # Each process measures on its own: objectives would take the batches of all processes for one.
    own = names[distributed.rank_slice(len(names))]
    with distributed.single_process():
        order = next(epochs(len(frozen), batch_size, options.seed))
        shares = softmax_shares(frozen, temperature, order).cpu().numpy()
        # What holds for the fine-tuning of two towers was not seen with views.
        first = 0.0 if frozen.views else found_first(frozen, order)
        _, loss = frozen.exact(temperature)
        for name in own:
            measured[name] = measure_objective(
                frozen, ESTIMATORS[name], temperature, batch_size, bound=BOUND, **settings
            )
            print(f"{name}: {measured[name].epochs} epochs", file=sys.stderr)
    results = {
        name: result for part in distributed.gather_objects(measured) for name, result in part.items()
    }
    if distributed.is_main():
        facts: Row = {"model": model, "data": data, "split": options.split, "kind": encoder.kind}
        facts |= {"batch_size": batch_size, "temperature": temperature, "pairs": len(frozen), **settings}
        facts["pairs_of_data"] = len(items)
        _write_results(evaluation, facts, results, loss, shares, first)
    distributed.barrier()


def _chosen_names(names: list[str] | None) -> list[str]:
    """The objectives to measure, by default all."""
    for name in names or ():
        if name not in ESTIMATORS:
            known = ", ".join(ESTIMATORS)
            raise DualencError(
                f"--objectives: there is no '{name}'{nearest(name, ESTIMATORS)}; choose from {known}"
            )
    return list(dict.fromkeys(names or ESTIMATORS))


def trained_temperature(model: DualEncoder, folder: Path) -> float | None:
    """τ of a model's training: as the model records it, or its run's latest checkpoint; None for neither."""
    recorded = getattr(model, "temperature", None)
    if recorded is not None:
        return float(recorded)
    run = folder.parent / "checkpoints"
    checkpoints = Checkpoints(run).finished() if folder.is_dir() and run.is_dir() else []
    if not checkpoints:
        return None
    state = torch.load(checkpoints[-1][1] / "state.pt", map_location="cpu", weights_only=True, mmap=True)
    recorded = state["objective"].get("log_temperature")
    return None if recorded is None else float(recorded.exp())


def open_set(model: DualEncoder, data: str, split: str, columns: ColumnOptions) -> Corpus | PairDataset:
    """Open the items to measure a model on: images for models of kind image, pairs for all others."""
    items: Corpus | PairDataset
    if model.kind == "image":
        items = open_corpus(data, modality="image", split=split)
        modalities: tuple[str, ...] = (items.modality,)
    else:
        items = open_pairs(data, **vars(columns), split=split)
        modalities = (items.left_modality, items.right_modality)
    for side, modality in zip(SIDES, modalities):
        expected = model.tower(side).modality
        if modality != expected:
            raise DualencError(
                f"{data}: its {side} items are {modality}, but the model's {side} tower takes {expected}"
            )
    if len(items) < 2:
        raise DualencError(f"{data}: holds one item; a set of two or more is needed")
    return items


class PairSet:
    """Chosen pairs, of which every item is encoded once; of images, two of SimCLR's augmentations of each are a pair.

    `rows` (M,) are numbers of images or pairs; the augmentations depend on the seed only.
    """

    def __init__(self, data: Corpus | PairDataset, rows: np.ndarray, seed: int = 0) -> None:
        self.data = data
        self.seed = seed
        self.items: dict[Side, np.ndarray] = {"left": rows, "right": rows}
        self._arguments: dict[str, Any] = {"views": True}
        ids: dict[Side, np.ndarray] = {"left": np.arange(len(rows)), "right": np.arange(len(rows))}
        if isinstance(data, PairDataset):
            own: dict[Side, np.ndarray] = {"left": data.left_id[rows], "right": data.right_id[rows]}
            for side in SIDES:
                self.items[side], ids[side] = np.unique(own[side], return_inverse=True)
            listed = {side: self._positives(data.positives(side, own[side]), side) for side in SIDES}
            self._arguments = {f"{side}_positives": positives for side, positives in listed.items()}
        self._arguments |= {f"{side}_id": torch.from_numpy(ids[side]) for side in SIDES}

    def _positives(self, ids: np.ndarray, side: Side) -> torch.Tensor | None:
        """(M, K) rows among the embedded items of ids of the other side; other items, and padding, are -1."""
        others = self.items["right" if side == "left" else "left"]
        rows = np.searchsorted(others, ids).clip(max=len(others) - 1)
        listed = np.where(others[rows] == ids, rows, -1)
        # Where no item has more positives than its own pair, there is nothing to list.
        return torch.from_numpy(listed) if ((listed >= 0).sum(axis=1) > 1).any() else None

    def inputs(self, model: DualEncoder, side: Side) -> Iterator[Inputs]:
        """Prepared inputs of the items of a side, chunk by chunk."""
        prepare: Any = model.tower(side).prepare
        if isinstance(self.data, Corpus):
            prepare = SimCLRPrepare(prepare)
        for start in range(0, len(self.items[side]), CHUNK):
            ids = self.items[side][start : start + CHUNK].tolist()
            if isinstance(self.data, Corpus):
                yield prepare([self.data[row] for row in ids], augmentation_seeds(self.seed, 0, ids, side))
            else:
                yield prepare([self.data.item(side, item) for item in ids])

    def pairs(self, left: torch.Tensor, right: torch.Tensor) -> FrozenPairs:
        """The pairs between embeddings (N, D) of the items."""
        return FrozenPairs(left, right, **self._arguments)


@torch.no_grad()
def embed_pairs(model: DualEncoder, chosen: PairSet) -> FrozenPairs:
    """Embed every item of a set."""
    device = next(model.parameters()).device
    embedded = []
    for side in SIDES:
        parts = []
        for inputs in chosen.inputs(model, side):
            parts.append(model(side, {name: tensor.to(device) for name, tensor in inputs.items()}))
        embedded.append(torch.cat(parts).float())
    return chosen.pairs(*embedded)


def _write_results(
    evaluation: Evaluation,
    facts: Row,
    results: Mapping[str, Measured],
    loss: float,
    shares: np.ndarray,
    first: float,
) -> None:
    """Write a table of the objectives, the share of the softmax in a batch, and the advice."""
    num_pairs = int(str(facts["pairs"]))
    batch_size = int(str(facts["batch_size"]))
    share = {"mean": float(shares.mean()), "median": float(np.median(shares))}
    share["anchors_above_half"] = float(np.mean(shares > 0.5))
    line = advice(dict(results), batch_size, first)
    rows = [_as_row(name, result, num_pairs) for name, result in results.items()]
    share_row: Row = {"B": batch_size, "pairs": num_pairs, **share}
    evaluation.conclude(
        f"Objectives: {short_name(evaluation.model)} on {facts['data']}",
        facts | {"advice": line},
        {
            "objectives": {name: _as_metrics(name, result, num_pairs) for name, result in results.items()},
            "softmax_share": share,
            "positives_found_first": first,
            "exact_loss": loss,
        },
        [
            Table(
                f"Gradients at B = {batch_size}, τ = {facts['temperature']:.4g}, {num_pairs:,} pairs", rows
            ),
            Table("Share of the softmax over the corpus that a batch holds", [share_row]),
        ],
    )
    print(line)


def _as_row(name: str, result: Measured, num_pairs: int) -> Row:
    notes = []
    if name in OTHER_LOSSES:
        notes.append("another loss")
    if result.bias.error > BOUND:
        notes.append("stopped at the limit of epochs")
    return {
        "objective": name,
        "bias": str(result.bias),
        "step error": f"{result.step_error:.3f} ± {result.step_error_error:.3f}",
        "extra encodes per pair": round(result.encodes, 3),
        "state, bytes per pair": round(result.state_bytes / num_pairs),
        "epochs": result.epochs,
        "note": "; ".join(notes),
    }


def _as_metrics(name: str, result: Measured, num_pairs: int) -> Row:
    return {
        "bias": result.bias.value,
        "bias_error": result.bias.error,
        "bias_limit": result.bias.limit,
        "biased": result.bias.is_significant,
        "step_error": result.step_error,
        "step_error_error": result.step_error_error,
        "encodes_per_pair": result.encodes,
        "state_bytes_per_pair": result.state_bytes / num_pairs,
        "epochs": result.epochs,
        "global_loss": name not in OTHER_LOSSES,
    }
