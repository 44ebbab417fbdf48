"""Objectives: what their gradients are worth on a model and pairs, by batch size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualenc import distributed
from dualenc.commands.labelled_images import random_rows
from dualenc.commands.output import Evaluation
from dualenc.data import Corpus, PairDataset, open_corpus, open_pairs
from dualenc.encoders import DualEncoder, load_model
from dualenc.encoders.dual import SIDES
from dualenc.errors import DualencError, nearest
from dualenc.evaluation.corrupted import SimCLRPrepare
from dualenc.evaluation.objectives import (
    ESTIMATORS,
    FrozenPairs,
    Measured,
    advice,
    epochs,
    found_first,
    measure_objective,
)
from dualenc.evaluation.report import Table
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
    names = list(dict.fromkeys(options.objectives or ESTIMATORS))
    for name in names:
        if name not in ESTIMATORS:
            problem = f"there is no '{name}'{nearest(name, ESTIMATORS)}"
            raise DualencError(f"--objectives: {problem}; choose from {', '.join(ESTIMATORS)}")
    evaluation = Evaluation("objectives", model, data, output)
    encoder = load_model(model, device=str(evaluation.device)).eval()
    evaluation.check_weights(encoder.left, encoder.right)
    temperature = options.temperature or getattr(encoder, "temperature", None) or TEMPERATURE
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
        _, loss = frozen.exact(temperature)
        for name in own:
            measured[name] = measure_objective(
                frozen, ESTIMATORS[name], temperature, batch_size, bound=BOUND, **settings
            )
            print(f"{name}: {measured[name].epochs} epochs", file=sys.stderr)
    parts = distributed.gather_objects(measured)
    if distributed.is_main():
        results = {name: result for part in parts for name, result in part.items()}
        # What holds for the fine-tuning of two towers was not seen with views.
        order = next(epochs(len(frozen), batch_size, options.seed))
        first = 0.0 if frozen.views else found_first(frozen, order)
        line = advice(results, batch_size, first)
        facts: Row = {"model": model, "data": data, "split": options.split, "kind": encoder.kind}
        facts |= {"batch_size": batch_size, "temperature": temperature, "pairs": len(frozen), **settings}
        title = f"Gradients at B = {batch_size}, τ = {temperature:.4g}, {len(frozen):,} pairs"
        metrics = {name: _as_metrics(result, len(frozen)) for name, result in results.items()}
        evaluation.conclude(
            "Objectives",
            data,
            facts | {"pairs_of_data": len(items), "advice": line},
            {"objectives": metrics, "positives_found_first": first, "exact_loss": loss},
            [Table(title, [_as_row(name, result, len(frozen)) for name, result in results.items()])],
        )
        print(line)
    distributed.barrier()


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


def _as_row(name: str, result: Measured, num_pairs: int) -> Row:
    return {
        "objective": name,
        "bias": str(result.bias),
        "step error": f"{result.step_error:.3f} ± {result.step_error_error:.3f}",
        "extra encodes per pair": round(result.encodes, 3),
        "state, bytes per pair": round(result.state_bytes / num_pairs),
        "epochs": result.epochs,
        "note": "stopped at the limit of epochs" if result.bias.error > BOUND else "",
    }


def _as_metrics(result: Measured, num_pairs: int) -> Row:
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
    }
