"""The exact global loss of every checkpoint of a run on a finite set of pairs, the squared norm of
its gradient, and the geometry of its embeddings (Yau et al. 2024, arXiv:2404.10575, Eq. 1, Eq. 4
and §4.5, Figure 7).

    python eval/convergence.py runs/mine PAIRS --pairs 500 --temperature 0.07

PAIRS are pairs, as `dualenc train` reads them; for models of kind image they are images, of which
two of SimCLR's augmentations are a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from estimators import FrozenPairs
from geometry import effective_rank, uniformity
from torch import Tensor, nn

from dualenc.data import Corpus, PairDataset, open_corpus, open_pairs
from dualenc.encoders import DualEncoder, load_model
from dualenc.encoders.dual import SIDES
from dualenc.evaluation.corrupted import SimCLRPrepare
from dualenc.evaluation.probe import unit_rows
from dualenc.evaluation.report_page import Table, print_table
from dualenc.training.checkpoint import Checkpoints
from dualenc.training.loader import augmentation_seeds
from dualenc.types import Inputs, Side, Vectors
from dualenc.workflows.labeled_images import random_rows

CHUNK = 64
"""Items prepared and encoded at once."""


class PairSet:
    """Chosen pairs, of which every item is encoded once; of images, two of SimCLR's augmentations
    of each are a pair.

    `rows` (M,) are numbers of images or pairs.
    """

    def __init__(self, data: Corpus | PairDataset, rows: np.ndarray) -> None:
        self.data = data
        self.items: dict[Side, np.ndarray] = {"left": rows, "right": rows}
        self._arguments: dict[str, Any] = {"views": True}
        ids: dict[Side, np.ndarray] = {"left": np.arange(len(rows)), "right": np.arange(len(rows))}
        if isinstance(data, PairDataset):
            own: dict[Side, np.ndarray] = {"left": data.left_id[rows], "right": data.right_id[rows]}
            for side in SIDES:
                self.items[side], ids[side] = np.unique(own[side], return_inverse=True)
            listed = {
                side: self._positives(data.positives(side, own[side]), side) for side in SIDES
            }
            self._arguments = {f"{side}_positives": positives for side, positives in listed.items()}
        self._arguments |= {f"{side}_id": torch.from_numpy(ids[side]) for side in SIDES}

    def _positives(self, ids: np.ndarray, side: Side) -> torch.Tensor | None:
        """(M, K) rows among the embedded items of ids of the other side; other items, and padding,
        are -1."""
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
                yield prepare([self.data[row] for row in ids], augmentation_seeds(0, 0, ids, side))
            else:
                yield prepare([self.data.item(side, item) for item in ids])

    def pairs(self, left: torch.Tensor, right: torch.Tensor) -> FrozenPairs:
        """The pairs between embeddings (N, D) of the items."""
        return FrozenPairs(left, right, **self._arguments)


class ExactPoint(NamedTuple):
    """One model on the curve of a run.

    Attributes:
        loss: L(θ), the mean of −s(x, y)/τ + log Σ_z exp(s(x, z)/τ) over all anchors x and their
            negatives z.
        squared_gradient_norm: ‖∇L(θ)‖².
        pairs: the embeddings.
    """

    loss: float
    squared_gradient_norm: float
    pairs: FrozenPairs


def exact_gradient(
    model: nn.Module,
    encode: Callable[[Side, Inputs], Tensor],
    chunks: Mapping[Side, Sequence[Inputs]],
    pairs: Callable[[Tensor, Tensor], FrozenPairs],
    temperature: float,
) -> ExactPoint:
    """The exact loss of a model and the squared norm of its gradient with respect to the trainable
    weights.

    The set is encoded twice: without a graph for the loss, and then chunk by chunk to backpropagate
    the loss's gradient on the embeddings. Put the model into evaluation mode, so that no item's
    embedding depends on its batch.

    Args:
        model: gradients of its weights are cleared.
        encode: `encode(side, inputs)` gives (n, D) unit-norm embeddings, with a graph where
            gradients are enabled.
        chunks: prepared inputs of the items of each side, left first, chunk by chunk, in order.
        pairs: from the embeddings of both sides, such as `FrozenPairs.one_to_one`.
        temperature: τ > 0.
    """
    with torch.no_grad():
        left, right = (
            torch.cat([encode(side, inputs) for inputs in own]) for side, own in chunks.items()
        )
    frozen = pairs(left.double(), right.double())
    gradient, loss = frozen.exact(temperature)
    model.zero_grad(set_to_none=True)
    for (side, own), on_side in zip(chunks.items(), gradient.split([len(left), len(right)])):
        start = 0
        for inputs in own:
            embeddings = encode(side, inputs)
            # A tower whose weights are all frozen gives embeddings without a graph.
            if embeddings.requires_grad:
                embeddings.backward(on_side[start : start + len(embeddings)].to(embeddings))
            start += len(embeddings)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    squared = sum(float(own.double().square().sum()) for own in gradients)
    model.zero_grad(set_to_none=True)
    return ExactPoint(loss, squared, frozen)


def alignment(left: Vectors, right: Vectors, power: float = 2) -> float:
    """Mean of ‖x − y‖^α over positive pairs of unit vectors (Wang & Isola 2020, Eq. 7); 0 is
    perfect."""
    difference = unit_rows(left, "left embeddings") - unit_rows(right, "right embeddings")
    return float(np.mean(np.linalg.norm(difference.astype(np.float64), axis=1) ** power))


def negative_cosines(left: Vectors, right: Vectors, pairs: FrozenPairs) -> np.ndarray:
    """Cosines of the left item of each pair with the right items of all pairs that it has nothing
    in common with."""
    left_id = pairs.left_id.numpy()
    right_id = pairs.right_id.numpy()
    positive = (left_id[:, None] == left_id) | (right_id[:, None] == right_id)
    if pairs.left_positives is not None:
        for column in pairs.left_positives.numpy().T:
            positive |= column[:, None] == right_id
    cosines = unit_rows(left) @ unit_rows(right).T
    return cosines[~positive]


def overlap(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Common area of two histograms of cosines: 0 if disjoint, 1 if equal."""
    edges = np.linspace(-1, 1, 101)
    shares = []
    for cosines in (positives, negatives):
        counts = np.histogram(np.clip(cosines, -1, 1), edges)[0]
        shares.append(counts / counts.sum())
    return float(np.minimum(*shares).sum())


def measure(model: DualEncoder, chosen: PairSet, temperature: float) -> dict[str, float]:
    """Loss, gradient norm and geometry of one model."""
    chunks: dict[Side, list[Inputs]] = {side: list(chosen.inputs(model, side)) for side in SIDES}
    point = exact_gradient(model, model, chunks, chosen.pairs, temperature)
    pairs = point.pairs
    left = pairs.left.detach().float().numpy()[pairs.left_id.numpy()]
    right = pairs.right.detach().float().numpy()[pairs.right_id.numpy()]
    positives = np.sum(unit_rows(left) * unit_rows(right), axis=1)
    negatives = negative_cosines(left, right, pairs)
    return {
        "loss": point.loss,
        "squared_gradient_norm": point.squared_gradient_norm,
        "alignment": alignment(left, right),
        "uniformity": (uniformity(left) + uniformity(right)) / 2,
        "effective_rank": (effective_rank(left) + effective_rank(right)) / 2,
        "positive_cosine": float(positives.mean()),
        "negative_cosine": float(negatives.mean()),
        "overlap": overlap(positives, negatives),
    }


def main(
    run: str, data: str, *, pairs: int = 500, temperature: float = 0.07, split: str = "train"
) -> None:
    """Measure every checkpoint of a run, and print a table.

    Args:
        run: output folder of a training.
        data: pairs or images.
        pairs: how many, at random.
        temperature: τ of the loss.
        split: of a folder or hub name.
    """
    folder = Path(run)
    model = load_model(str(folder / "model"), device="cpu").eval()
    is_image = model.kind == "image"
    items = (
        open_corpus(data, modality="image", split=split)
        if is_image
        else open_pairs(data, split=split)
    )
    chosen = PairSet(items, random_rows(len(items), pairs, seed=0))
    rows = []
    for step, checkpoint in Checkpoints(folder / "checkpoints").finished():
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        measured = measure(model, chosen, temperature)
        # Gradient norms fall by orders of magnitude.
        shown = f"{measured['squared_gradient_norm']:.3e}"
        rows.append({"step": step, **measured, "squared_gradient_norm": shown})
    print_table(Table(f"{run} on {len(chosen.items['left'])} pairs of {data}", rows))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
