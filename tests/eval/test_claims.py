"""The script of the papers' claims measures what it says, and chooses temperatures as it says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.eval_scripts import load_script


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    return load_script("claims.py")


def options(out: Path, **other: float) -> argparse.Namespace:
    given = {
        "batch_size": 4,
        "learning_rate": 1e-3,
        "steps": 3,
        "pairs": 28,
        "test": 12,
        "versions": 3,
        "seeds": 2,
    }
    return argparse.Namespace(out=str(out), epochs=2, rate=0.01, **{**given, **other})


def test_with_fixed_statistics_an_embedding_depends_on_its_image_alone(claims: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.randn(20, 3, 16, 16)
    nothing = torch.zeros(0, 0, 3, 16, 16)
    model = claims.with_fixed_statistics(
        claims.SmallEncoder(claims.StoredViews(nothing[:, 0:0], nothing)), images
    )
    together = model("left", {"image": images})
    alone = torch.cat([model("left", {"image": image[None]}) for image in images])
    torch.testing.assert_close(together, alone)
    # What the first layer passes on has mean 0 and variance 1 over the set, per channel.
    first = model.left.backbone[:2](images)
    torch.testing.assert_close(first.mean(dim=(0, 2, 3)), torch.zeros(32), atol=1e-5, rtol=0)
    torch.testing.assert_close(first.var(dim=(0, 2, 3)), torch.ones(32), atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SimCLR", "NegativeCache", "EMC2", "ISIR"])
def test_descent_on_a_finite_set_lowers_the_exact_loss(claims: ModuleType, name: str) -> None:
    views = torch.randn(12, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    views[:, 1] = views[:, 0] + 0.1 * views[:, 1]
    settings = {"batch_size": 4, "learning_rate": 0.01, "temperature": 0.2, "seed": 0}
    before, *_, after = claims.descend(name, views, epochs=6, **settings)
    assert (before["epoch"], after["epoch"]) == (0, 6)
    assert after["loss"] < before["loss"] - 0.1
    assert after["squared gradient"] > 0


def test_the_temperature_is_the_best_on_validation_with_the_first_seed(
    claims: ModuleType, tmp_path: Path
) -> None:
    given = options(tmp_path)
    shared = {
        "batch_size": 4,
        "learning_rate": 1e-3,
        "steps": 3,
        "pairs": 28,
        "test": 12,
        "versions": 3,
    }

    def known(name: str, temperature: float, seed: int, validation: float, linear: float) -> None:
        file = tmp_path / f"{claims.file_name(name)}-{temperature}-{seed}.json"
        settings = {**shared, "temperature": temperature, "seed": seed}
        file.write_text(
            json.dumps({"metrics": {"validation": validation, "linear": linear}, **settings})
        )

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
