"""Maps between two spaces, against scipy, scikit-learn and planted rotations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from sklearn.linear_model import RidgeCV

from dualenc.errors import DualencError
from dualenc.search import maps


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rotated(count: int, dim: int, new_dim: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around a common mean, and the same ones turned into another space, with noise."""
    random = np.random.default_rng(0)
    x = unit(random.normal(size=(count, dim)) + 0.5)
    rotation = np.linalg.qr(random.normal(size=(max(dim, new_dim),) * 2))[0][:dim, :new_dim]
    return x, unit(x @ rotation + noise * random.normal(size=(count, new_dim)) / np.sqrt(new_dim))


@pytest.mark.parametrize("new_dim", [12, 20])
def test_rotation_is_that_of_scipy(new_dim: int) -> None:
    x, y = rotated(200, 12, new_dim, 0.3)
    x_centred, y_centred = x - x.mean(axis=0), y - y.mean(axis=0)
    padded = np.pad(x_centred, ((0, 0), (0, new_dim - 12)))
    expected, scale = scipy.linalg.orthogonal_procrustes(padded, y_centred)
    expected = expected[:12] * scale / np.square(x_centred).sum()
    weight = maps.fit_orthogonal(x, y).tensors["weight"].numpy()
    # Rows of the padding are free; the others are those of scipy.
    np.testing.assert_allclose(weight, expected, atol=1e-5)


def test_ridge_and_its_penalty_are_those_of_scikit_learn() -> None:
    x, y = rotated(60, 16, 9, 0.7)
    scale = np.square(np.linalg.svd(x - x.mean(axis=0), compute_uv=False)).mean()
    expected = RidgeCV(alphas=maps.PENALTIES * scale).fit(x, y)
    assert maps.PENALTIES[0] < expected.alpha_ / scale < maps.PENALTIES[-1]
    fitted = maps.fit_linear(x, y).tensors
    np.testing.assert_allclose(fitted["weight"], expected.coef_.T, atol=1e-5)
    np.testing.assert_allclose(fitted["bias"], expected.intercept_, atol=1e-5)


@pytest.mark.parametrize("kind", maps.FITS)
def test_planted_rotation_is_recovered(kind: str) -> None:
    x, y = rotated(400, 12, 12, 0.0)
    fitted = maps.FITS[kind](x[:300], y[:300])
    mapped = fitted(x[300:])
    assert mapped.dtype == np.float32
    np.testing.assert_allclose(mapped, y[300:], atol=0.03 if kind == "perceptron" else 1e-3)
    np.testing.assert_allclose(np.linalg.norm(mapped, axis=1), 1, atol=1e-6)


def test_perceptron_learns_what_no_matrix_can() -> None:
    random = np.random.default_rng(0)
    x = unit(random.normal(size=(1500, 8)))
    y = unit(np.abs(x))
    cosine = {kind: (fit(x[:1200], y[:1200])(x[1200:]) * y[1200:]).sum(axis=1) for kind, fit in maps.FITS.items()}
    assert 1 - cosine["perceptron"].mean() < 0.5 * (1 - cosine["linear"].mean())
    again = maps.fit_perceptron(x[:1200], y[:1200])(x[1200:])
    assert ((again * y[1200:]).sum(axis=1) == cosine["perceptron"]).all()


def test_perceptron_computes_its_formula() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = {"weight": (3, 2), "bias": (2,), "hidden_weight": (3, 5), "hidden_bias": (5,), "out_weight": (5, 2)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    x = torch.randn(3, generator=random).double().numpy()
    w, b, w1, b1, w2 = (tensor.double().numpy() for tensor in tensors.values())
    z = x @ w1 + b1
    expected = x @ w + b + 0.5 * z * (1 + scipy.special.erf(z / np.sqrt(2))) @ w2
    mapped = maps.Map("perceptron", tensors)(x[None])[0]
    np.testing.assert_allclose(mapped, expected / np.linalg.norm(expected), atol=1e-6)


def test_choice_is_the_simplest_within_the_noise() -> None:
    x, y = rotated(600, 12, 12, 0.02)
    fold = maps.folds(len(x))
    choice = maps.choose(x, y, fold, maps_queries=False)
    assert choice.kind == "orthogonal"
    assert choice.recalls["orthogonal"] > 0.8
    stretched = x @ np.diag(np.linspace(0.2, 3, 12))
    choice = maps.choose(x, stretched, fold, maps_queries=True)
    assert choice.kind == "linear"
    assert choice.recalls["orthogonal"] < 0.9 < choice.recalls["linear"]


def test_no_row_is_mapped_by_a_map_that_saw_it() -> None:
    x, y = rotated(50, 6, 6, 0.1)
    fold = maps.folds(50)
    assert np.bincount(fold).tolist() == [10] * 5
    mapped = maps.out_of_fold("linear", x, y, fold)
    other = y.copy()
    other[7] = -other[7]
    changed = np.abs(maps.out_of_fold("linear", x, other, fold) - mapped).max(axis=1) > 1e-6
    assert changed.tolist() == (fold != fold[7]).tolist()


def test_neighbours_leave_out_the_query_itself() -> None:
    random = np.random.default_rng(0)
    documents = unit(random.normal(size=(40, 5)))
    rows = np.array([3, 17])
    queries = unit(random.normal(size=(2, 5)))
    expected = []
    for query, row in zip(queries, rows.tolist()):
        expected.append([j for j in np.argsort(-(documents @ query)).tolist() if j != row][:10])
    results = maps.neighbours(queries, documents, rows)
    assert results.tolist() == expected
    other = np.concatenate([results[:, 4:], np.full((2, 4), 99)], axis=1)
    assert maps.overlap(other, results).tolist() == [0.6, 0.6]


def test_saved_maps_are_the_same(tmp_path: Path) -> None:
    x, y = rotated(80, 6, 4, 0.1)
    written = {"documents": maps.fit_perceptron(x, y), "queries": maps.fit_orthogonal(y, x)}
    maps.save_maps(tmp_path / "maps.safetensors", written)
    read = maps.load_maps(tmp_path / "maps.safetensors")
    assert {name: one.kind for name, one in read.items()} == {"documents": "perceptron", "queries": "orthogonal"}
    assert (read["documents"](x) == written["documents"](x)).all()
    assert (read["queries"](y) == written["queries"](y)).all()
    (tmp_path / "maps.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DualencError, match="corrupt"):
        maps.load_maps(tmp_path / "maps.safetensors")
