"""The script of the papers' claims measures what it says, and chooses temperatures as it says."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from types import ModuleType

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from tests.eval.scripts import load_script


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    return load_script("claims.py")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise in two colours, which are the classes: 40 images to train on and to validate, 12 to test."""
    folder = tmp_path_factory.mktemp("colours")
    random = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 12)):
        rows: dict[str, list[object]] = {"image": [], "label": []}
        for row in range(count):
            pixels = random.integers(0, 100, (32, 32, 3), dtype=np.uint8)
            pixels[:, :, row % 2] += 120
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "png")
            rows["image"].append(content.getvalue())
            rows["label"].append(row % 2)
        datasets.Dataset.from_dict(rows).to_parquet(folder / f"{name}.parquet")
    return folder


def options(out: Path, **other: float) -> argparse.Namespace:
    given = {"batch_size": 4, "learning_rate": 1e-3, "steps": 3, "pairs": 28, "test": 12, "versions": 3, "seeds": 2}
    return argparse.Namespace(out=str(out), epochs=2, rate=0.01, **{**given, **other})


def test_a_seed_chooses_among_the_stored_views(claims: ModuleType) -> None:
    plain = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1)
    augmented = torch.arange(6, dtype=torch.uint8).view(3, 2, 1, 1, 1)
    prepare = claims.StoredViews(plain, augmented)

    def pixels(*given: object) -> list[int]:
        return ((prepare(*given)["image"].flatten() + 1) * 127.5).round().int().tolist()

    assert pixels([2, 0]) == [2, 0]
    assert pixels([2, 0, 2], [100, 7, 5]) == [4, 1, 5]


def test_with_fixed_statistics_an_embedding_depends_on_its_image_alone(claims: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.randn(20, 3, 16, 16)
    nothing = torch.zeros(0, 0, 3, 16, 16)
    model = claims.with_fixed_statistics(claims.SmallEncoder(claims.StoredViews(nothing[:, 0:0], nothing)), images)
    together = model("left", {"image": images})
    alone = torch.cat([model("left", {"image": image[None]}) for image in images])
    torch.testing.assert_close(together, alone)
    # What the first layer passes on has mean 0 and variance 1 over the set, per channel.
    first = model.left.backbone[:2](images)
    torch.testing.assert_close(first.mean(dim=(0, 2, 3)), torch.zeros(32), atol=1e-5, rtol=0)
    torch.testing.assert_close(first.var(dim=(0, 2, 3)), torch.ones(32), atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SimCLR", "NegativeCache", "EMC2, one chain for both views", "ISIR"])
def test_descent_on_a_finite_set_lowers_the_exact_loss(claims: ModuleType, name: str) -> None:
    views = torch.randn(12, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    views[:, 1] = views[:, 0] + 0.1 * views[:, 1]
    settings = {"batch_size": 4, "learning_rate": 0.01, "temperature": 0.2, "seed": 0}
    before, *_, after = claims.descend(name, views, epochs=6, **settings)
    assert (before["epoch"], after["epoch"]) == (0, 6)
    assert after["loss"] < before["loss"] - 0.1
    assert after["squared gradient"] > 0


def test_the_temperature_is_the_best_on_validation_with_the_first_seed(claims: ModuleType, tmp_path: Path) -> None:
    given = options(tmp_path)
    shared = {"batch_size": 4, "learning_rate": 1e-3, "steps": 3, "pairs": 28, "test": 12, "versions": 3}

    def known(name: str, temperature: float, seed: int, validation: float, linear: float) -> None:
        file = tmp_path / f"{claims.file_name(name)}-{temperature}-{seed}.json"
        settings = {**shared, "temperature": temperature, "seed": seed}
        file.write_text(json.dumps({"metrics": {"validation": validation, "linear": linear}, **settings}))

    known("EMC2", 0.1, 0, validation=0.5, linear=0.9)
    known("EMC2", 0.3, 0, validation=0.6, linear=0.2)
    known("EMC2", 0.3, 1, validation=0.1, linear=0.4)
    for seed in (0, 1):
        known("EMC2, burn-in 0", 0.3, seed, validation=0.0, linear=0.7)
    rows = claims.Comparison(None, given).table(["EMC2", "EMC2, burn-in 0"], 2)
    assert [row["τ"] for row in rows] == ["0.3", "0.3"]
    assert rows[0]["linear"] == pytest.approx(0.3)
    assert rows[0]["linear sd"] == pytest.approx(0.1 * 2**0.5)
    assert rows[1]["linear"] == pytest.approx(0.7)


def test_an_arm_is_in_a_table_and_no_table_names_another(claims: ModuleType) -> None:
    assert {name for names in claims.EXPERIMENTS.values() for name in names} == set(claims.ARMS)


@pytest.mark.nightly
def test_arms_are_trained_measured_and_kept(claims: ModuleType, images: Path, tmp_path: Path) -> None:
    given = options(tmp_path)
    task = claims.Task(str(images), given.pairs, given.test, given.versions)
    assert task.versions.shape == (3, 2, 19, 3, 16, 16)
    names = ["SimCLR, bisection", "SogCLR, OSGD"]
    comparison = claims.Comparison(task, given)
    rows = comparison.table(names, 2)
    assert rows == comparison.table(names, 2)  # from the files
    for row in rows:
        # The classes are colours, which any network passes on.
        assert row["linear"] > 0.7
        assert all(0 <= row[metric] <= 1 for metric in ("knn20", "nn1", "pair", "version"))
    ends = claims.convergence(claims.scaled(task.augmented[:, :2]), given)
    assert [row["objective"] for row in ends] == list(claims.ON_FINITE_SET)
    assert (tmp_path / "finite-28-2.svg").stat().st_size > 0
