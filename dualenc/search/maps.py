"""Maps between the spaces of two models, learned on vectors of the same texts.

Source: Drift-Adapter (Vejendla 2025, arXiv:2509.23471), which maps queries of a new model into the space of an old one.
Every map is affine, with or without a residual perceptron, and ends in a vector of length one:

    x ↦ unit(x·W + b + gelu(x·W₁ + b₁)·W₂)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from dualenc.encoders.dual import unit_norm
from dualenc.errors import DualencError
from dualenc.files import atomic_path
from dualenc.search.exact import exact_search

NEIGHBOURS = 10
FOLDS = 5
"""Pairs are held out by fifths."""
PENALTIES = 10.0 ** np.arange(-4, 2)
"""Ridge penalties to choose from, in units of the mean squared singular value."""
HIDDEN = 64
EPOCHS = 20
BATCH_SIZE = 256
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Map:
    """A map of vectors (n, D) to unit vectors (n, E); `tensors` are W and b, and of a perceptron W₁, b₁ and W₂."""

    kind: str
    tensors: Mapping[str, Tensor]

    @torch.inference_mode()
    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Map vectors (n, D) to float32 unit vectors (n, E)."""
        inputs = torch.from_numpy(np.ascontiguousarray(vectors, np.float32))
        return _forward(self.tensors, inputs).numpy()


class Choice(NamedTuple):
    """The kind of map that was chosen, and the mean recall@10 of neighbours of every kind on the held-out pairs."""

    kind: str
    recalls: dict[str, float]


def fit_orthogonal(x: np.ndarray, y: np.ndarray) -> Map:
    """Scaled Procrustes rotation between centred pairs x (n, D) and y (n, E), W = s·UVᵀ of the SVD of xᵀy.

    With D ≠ E, UVᵀ has orthonormal columns or rows (Schönemann 1966, rectangular); s is the least-squares scale.
    """
    x_mean = x.mean(axis=0, dtype=np.float64)
    y_mean = y.mean(axis=0, dtype=np.float64)
    centred = x - x_mean
    left, singular, right = np.linalg.svd(centred.T @ (y - y_mean), full_matrices=False)
    rotation = left @ right
    scale = singular.sum() / np.square(centred @ rotation).sum()
    return _affine("orthogonal", scale * rotation, x_mean, y_mean)


def fit_linear(x: np.ndarray, y: np.ndarray) -> Map:
    """Ridge regression of pairs x (n, D) and y (n, E), the penalty of `PENALTIES` by the exact leave-one-out error."""
    x_mean = x.mean(axis=0, dtype=np.float64)
    y_mean = y.mean(axis=0, dtype=np.float64)
    left, singular, right = np.linalg.svd(x - x_mean, full_matrices=False)
    squares = np.square(singular)
    target = y - y_mean
    projected = left.T @ target
    best_error = np.inf
    weight = np.zeros((x.shape[1], y.shape[1]))
    for penalty in PENALTIES * squares.mean():
        shrinkage = squares / (squares + penalty)
        # The diagonal of the hat matrix; the first term is that of the intercept, which is not penalized.
        leverage = 1 / len(x) + np.square(left) @ shrinkage
        residual = (target - (left * shrinkage) @ projected) / (1 - leverage)[:, None]
        error = np.square(residual).mean()
        if error < best_error:
            best_error = error
            weight = right.T @ ((singular / (squares + penalty))[:, None] * projected)
    return _affine("linear", weight, x_mean, y_mean)


def fit_perceptron(x: np.ndarray, y: np.ndarray, seed: int = 0) -> Map:
    """The linear map of pairs x (n, D) and y (n, E), and a residual perceptron, which begins at zero, on 1 − cosine."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.from_numpy(np.ascontiguousarray(x, np.float32))
    targets = torch.from_numpy(np.ascontiguousarray(y, np.float32))
    residual = {
        "hidden_weight": torch.randn(x.shape[1], HIDDEN, generator=generator),
        "hidden_bias": torch.zeros(HIDDEN),
        "out_weight": torch.zeros(HIDDEN, y.shape[1]),
    }
    for tensor in residual.values():
        tensor.requires_grad_()
    tensors = {**fit_linear(x, y).tensors, **residual}
    optimizer = torch.optim.AdamW(residual.values(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), generator=generator).split(BATCH_SIZE):
            mapped = _forward(tensors, inputs[rows])
            loss = (1 - functional.cosine_similarity(mapped, targets[rows])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return Map("perceptron", {name: tensor.detach() for name, tensor in tensors.items()})


FITS: dict[str, Callable[[np.ndarray, np.ndarray], Map]] = {
    "orthogonal": fit_orthogonal,
    "linear": fit_linear,
    "perceptron": fit_perceptron,
}
"""How each kind is learned, the simplest first."""


def folds(count: int, seed: int = 0) -> np.ndarray:
    """(n,) the fold of each pair, 0 to 4, of equal sizes up to one."""
    return np.random.default_rng(seed).permutation(count) % FOLDS


def out_of_fold(kind: str, x: np.ndarray, y: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """x (n, D) mapped to (n, E), each row by a map that was learned from the pairs of other folds."""
    mapped = np.empty((len(x), y.shape[1]), np.float32)
    for number in range(FOLDS):
        is_held_out = fold == number
        mapped[is_held_out] = FITS[kind](x[~is_held_out], y[~is_held_out])(x[is_held_out])
    return mapped


def choose(x: np.ndarray, y: np.ndarray, fold: np.ndarray, *, maps_queries: bool) -> Choice:
    """Choose the kind of map from x (n, D) to y (n, E) by recall@10 of neighbours among the pairs of fold 0.

    The truth is what the vectors of y find among themselves. With `maps_queries` mapped vectors search those of y,
    otherwise the reverse. The simplest kind within two standard errors of the best, query by query, is chosen.
    """
    is_held_out = fold == 0
    own = y[is_held_out]
    rows = np.arange(len(own))
    truth = neighbours(own, own, rows)
    recalls = {}
    for kind, fit in FITS.items():
        mapped = fit(x[~is_held_out], y[~is_held_out])(x[is_held_out])
        queries = mapped if maps_queries else own
        documents = own if maps_queries else mapped
        recalls[kind] = overlap(neighbours(queries, documents, rows), truth)
    best = max(FITS, key=lambda kind: recalls[kind].mean())
    within_noise = [kind for kind in FITS if not _is_below(recalls[kind], recalls[best])]
    return Choice(within_noise[0], {kind: float(recall.mean()) for kind, recall in recalls.items()})


def neighbours(queries: np.ndarray, documents: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The 10 nearest documents (Q, 10) of queries (Q, D), by exact search; a query's own row (Q,) is left out."""
    columns = exact_search(queries, documents, NEIGHBOURS + 1)[1]
    # A stable sort moves the query itself, where it was found, behind the others.
    order = np.argsort(columns == rows[:, None], axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)[:, :NEIGHBOURS]


def overlap(results: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(Q,) the share of the true neighbours (Q, k) among the results (Q, k)."""
    return (results[:, :, None] == truth[:, None, :]).any(axis=1).mean(axis=1)


def save_maps(path: Path, maps: Mapping[str, Map]) -> None:
    """Write maps by name as one safetensors file, atomically."""
    tensors = {f"{name}.{key}": value for name, one in maps.items() for key, value in one.tensors.items()}
    with atomic_path(path) as part:
        save_file(tensors, part, {name: one.kind for name, one in maps.items()})


def load_maps(path: Path) -> dict[str, Map]:
    """Read the maps that `save_maps` wrote."""
    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, "pt") as file:
            kinds = file.metadata()
            for key in file.keys():  # noqa: SIM118
                name, _, tensor = key.partition(".")
                tensors.setdefault(name, {})[tensor] = file.get_tensor(key)
    except SafetensorError as error:
        raise DualencError(f"{path}: corrupt ({error}); remove its folder and migrate again") from None
    return {name: Map(kinds[name], own) for name, own in tensors.items()}


def _forward(tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    mapped = inputs @ tensors["weight"] + tensors["bias"]
    if "out_weight" in tensors:
        hidden = functional.gelu(inputs @ tensors["hidden_weight"] + tensors["hidden_bias"])
        mapped = mapped + hidden @ tensors["out_weight"]
    return unit_norm(mapped)


def _affine(kind: str, weight: np.ndarray, x_mean: np.ndarray, y_mean: np.ndarray) -> Map:
    """The map (x − x_mean)·W + y_mean."""
    values = {"weight": weight, "bias": y_mean - x_mean @ weight}
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(value, np.float32)) for name, value in values.items()
    }
    return Map(kind, tensors)


def _is_below(recalls: np.ndarray, best: np.ndarray) -> bool:
    """Whether recalls (Q,) are below the best ones (Q,) by more than two standard errors of the paired difference."""
    difference = best - recalls
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    return bool(difference.mean() > 2 * error)
