"""The map between two spaces, against normal equations and a planted rotation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from scipy.linalg import orthogonal_procrustes

from dualenc.errors import DualencError
from dualenc.search.migration import maps


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rotated(count: int, dim: int, new_dim: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around a common mean, and the same ones turned into another space, with
    noise."""
    random = np.random.default_rng(0)
    x = unit(random.normal(size=(count, dim)) + 0.5)
    rotation = np.linalg.qr(random.normal(size=(max(dim, new_dim),) * 2))[0][:dim, :new_dim]
    return x, unit(x @ rotation + noise * random.normal(size=(count, new_dim)) / np.sqrt(new_dim))


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias by the normal equations of centred pairs."""
    x_mean, y_mean = x.mean(axis=0), y.mean(axis=0)
    centred = x - x_mean
    weight = np.linalg.solve(
        centred.T @ centred + penalty * np.eye(x.shape[1]), centred.T @ (y - y_mean)
    )
    return weight, y_mean - x_mean @ weight


def test_ridge_has_the_penalty_of_the_least_error_with_each_pair_left_out() -> None:
    x, y = rotated(60, 16, 9, 0.7)
    scale = np.square(np.linalg.svd(x - x.mean(axis=0), compute_uv=False)).mean()
    errors = []
    for penalty in maps.PENALTIES * scale:
        error = 0.0
        for row in range(60):
            weight, bias = ridge(np.delete(x, row, 0), np.delete(y, row, 0), penalty)
            error += np.square(x[row] @ weight + bias - y[row]).sum()
        errors.append(error)
    best = int(np.argmin(errors))
    assert 0 < best < len(errors) - 1
    weight, bias = ridge(x, y, maps.PENALTIES[best] * scale)
    fitted = maps.fit(x, y)
    np.testing.assert_allclose(fitted.weight, weight, atol=1e-6)
    np.testing.assert_allclose(fitted.bias, bias, atol=1e-6)
    mapped = x @ weight + bias
    np.testing.assert_allclose(fitted(x), unit(mapped), atol=1e-6)


@pytest.mark.parametrize(("new_dim", "noise"), [(9, 0.7), (9, 0.0), (24, 0.3)])
def test_rescaled_has_the_variance_of_the_targets_in_their_principal_directions(
    new_dim: int, noise: float
) -> None:
    x, y = rotated(60, 16, new_dim, noise)
    before, fitted = maps.fit(x, y), maps.fit(x, y, "rescaled")
    mean = y.mean(axis=0)
    _, _, directions = np.linalg.svd(y - mean, full_matrices=False)
    shrunk, mapped = (x @ own.weight + own.bias - mean for own in (before, fitted))
    for direction in directions:
        wanted, short = np.std((y - mean) @ direction), np.std(shrunk @ direction)
        stretch = wanted / short if short > 1e-6 else 0
        np.testing.assert_allclose(mapped @ direction, stretch * (shrunk @ direction), atol=1e-4)
    np.testing.assert_allclose(mapped.mean(axis=0), 0, atol=1e-5)


@pytest.mark.parametrize("new_dim", [12, 7, 20])
def test_rotation_is_that_of_scipy_for_centered_vectors(new_dim: int) -> None:
    x, y = rotated(80, 12, new_dim, 0.5)
    # Vectors with zeros appended have the same Procrustes problem with a square matrix.
    size = max(12, new_dim)
    wide = [
        np.pad(each - each.mean(axis=0), ((0, 0), (0, size - each.shape[1]))) for each in (x, y)
    ]
    expected = orthogonal_procrustes(*wide)[0][:12, :new_dim]
    fitted = maps.fit(x, y, "rotation")
    np.testing.assert_allclose(
        wide[0][:, :12] @ fitted.weight, wide[0][:, :12] @ expected, atol=1e-5
    )
    centers = x.mean(axis=0) @ fitted.weight + fitted.bias
    np.testing.assert_allclose(centers, y.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("kind", maps.KINDS)
def test_planted_rotation_is_recovered(kind: maps.MapKind) -> None:
    x, y = rotated(400, 12, 12, 0.0)
    mapped = maps.fit(x[:300], y[:300], kind)(x[300:])
    assert mapped.dtype == np.float32
    np.testing.assert_allclose(mapped, y[300:], atol=1e-3)


@pytest.mark.parametrize("kind", maps.KINDS)
def test_no_row_is_mapped_by_a_map_that_saw_it(kind: maps.MapKind) -> None:
    x, y = rotated(50, 6, 6, 0.1)
    fold = maps.folds(50)
    assert np.bincount(fold).tolist() == [10] * 5
    mapped = maps.out_of_fold(x, y, fold, kind)
    other = y.copy()
    other[7] = -other[7]
    changed = np.abs(maps.out_of_fold(x, other, fold, kind) - mapped).max(axis=1) > 1e-6
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


def test_saved_map_is_the_same(tmp_path: Path) -> None:
    x, y = rotated(80, 6, 4, 0.1)
    written = maps.fit(x, y)
    written.save(tmp_path / "map.safetensors")
    assert (maps.LinearMap.load(tmp_path / "map.safetensors")(x) == written(x)).all()
    for content in (b"no tensors", save({"other": x})):
        (tmp_path / "map.safetensors").write_bytes(content)
        with pytest.raises(DualencError, match="corrupt"):
            maps.LinearMap.load(tmp_path / "map.safetensors")
