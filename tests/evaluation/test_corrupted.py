"""Versions of images, retrieval of the other view, and corruption errors, against slow loops and
known cases."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from dualenc.errors import BadSample, DualencError
from dualenc.evaluation import corrupted as image_versions
from dualenc.evaluation.corrupted import (
    CLEAN,
    ImageVersions,
    corruption_errors,
    estimate_seconds,
    measure_versions,
    nearest_images,
    nearest_versions,
    read_baseline,
    robustness_rows,
    summarize_nearest,
)
from dualenc.evaluation.corruptions import CleanImages, GeneratedCorruptions
from dualenc.seeds import derive_seed


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def slow(first: np.ndarray, second: np.ndarray) -> list[int]:
    """The row of `second` nearest to each row of `first`."""
    return [int(np.argmax([cosine(x, y) for y in second])) for x in first]


@given(seed=st.integers(0, 999), images=st.integers(1, 4), versions=st.integers(2, 6))
def test_versions_are_matched_within_their_image_only(
    seed: int, images: int, versions: int
) -> None:
    features = np.random.default_rng(seed).normal(size=(images, 2, versions, 3))
    features[:, 1] += features[:, 0]
    found = nearest_versions(features)
    for i in range(images):
        assert found[i, 0].tolist() == slow(features[i, 0], features[i, 1])
        assert found[i, 1].tolist() == slow(features[i, 1], features[i, 0])


@given(seed=st.integers(0, 999), images=st.integers(2, 12))
def test_images_are_matched_among_all(seed: int, images: int) -> None:
    features = np.random.default_rng(seed).normal(size=(images, 2, 3))
    features[:, 1] += features[:, 0]
    found = nearest_images(features)
    assert found[:, 0].tolist() == slow(features[:, 0], features[:, 1])
    assert found[:, 1].tolist() == slow(features[:, 1], features[:, 0])


def test_one_point_for_everything_finds_nothing() -> None:
    assert (nearest_versions(np.ones((3, 2, 4, 5))) == -1).all()
    assert (nearest_images(np.ones((6, 2, 5))) == -1).all()
    assert summarize_nearest(nearest_versions(np.ones((3, 2, 4, 5))))["top1"] == 0.0
    with pytest.raises(DualencError, match="one image cannot be found among others"):
        nearest_images(np.ones((1, 2, 5)))


def test_the_two_directions_may_differ() -> None:
    first = np.array([[1.0, 0.0], [0.0, 1.0]])
    second = np.array([[0.9, 0.1], [1.0, 0.05]])  # both lie near the first row of `first`
    found = nearest_versions(np.stack([first, second])[None])
    assert found.tolist() == [[[1, 0], [0, 0]]]
    assert summarize_nearest(found, ["fog", "snow"]) == {
        "top1": 0.25,
        "top1/fog": 0.5,
        "top1/snow": 0.0,
    }


CONDITIONS = [("gaussian_noise", 1), ("fog", 2), ("fog", 5)]


def pictures(count: int, size: int = 32) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(count)
    ]


def prepare(images: list[Image.Image], seeds: list[int] | None = None) -> dict[str, Tensor]:
    """Pixels as numbers; "augmentation" multiplies by a factor drawn from the seed."""
    pixels = torch.stack([torch.from_numpy(np.asarray(image, np.float32)) for image in images])
    if seeds is not None:
        pixels *= (
            torch.tensor([np.random.default_rng(seed).uniform(0.5, 2) for seed in seeds])
            .float()
            .view(-1, 1, 1, 1)
        )
    return {"pixels": pixels}


def encode(inputs: dict[str, Tensor]) -> np.ndarray:
    return inputs["pixels"].mean(dim=(1, 2)).numpy()


class WithBad:
    """Images of which some cannot be read."""

    def __init__(self, images: list[Image.Image], bad: set[int]):
        self.images, self.bad = images, bad

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Image.Image:
        if index in self.bad:
            raise BadSample(f"row {index}: cannot be decoded")
        return self.images[index]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("views", [0, 2])
def test_the_features_are_those_of_the_slow_loop(
    views: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_versions, "VERSIONS_PER_FORWARD", 2 * 3 * 2)
    source = GeneratedCorruptions(CleanImages(pictures(6)), seed=4)
    versions = ImageVersions(source, CONDITIONS, prepare, views=views, seed=9)
    blocks: list[list[int]] = []

    def value_of(rows: list[int], features: np.ndarray) -> np.ndarray:
        blocks.append(rows)
        return features

    found = measure_versions(versions, encode, value_of, [0, 1, 3, 4, 5], num_workers=workers)
    assert [row for rows in blocks for row in rows] == [0, 1, 3, 4, 5]
    assert len(blocks) > 1
    assert found.shape == (5, max(views, 1), 3, 3)
    for place, index in enumerate([0, 1, 3, 4, 5]):
        for c, (name, severity) in enumerate(CONDITIONS):
            image = source.image(index, name, severity)
            for view in range(max(views, 1)):
                seeds = [derive_seed(9, index, name, severity, view, bits=32)] if views else None
                assert np.allclose(
                    found[place, view, c], encode(prepare([image], seeds))[0], rtol=1e-6
                )


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_images_are_left_out_and_logged(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    versions = ImageVersions(CleanImages(WithBad(pictures(4), {0, 2})), [CLEAN], prepare)
    found = measure_versions(
        versions, encode, lambda rows, _: np.array(rows), range(4), num_workers=workers
    )
    assert found.tolist() == [1, 3]
    for row in (0, 2):
        assert f"left out row {row}: cannot be decoded" in caplog.text
    with pytest.raises(DualencError, match="none of 1 images can be read"):
        measure_versions(versions, encode, lambda rows, _: np.array(rows), [2], num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_too_small_images_are_one_line_from_any_process(workers: int) -> None:
    versions = ImageVersions(
        GeneratedCorruptions(CleanImages(pictures(2, size=28))), CONDITIONS, prepare
    )
    with pytest.raises(DualencError, match="image 0 is 28x28; corruptions need 32x32") as error:
        measure_versions(
            versions, encode, lambda _, features: features, range(2), num_workers=workers
        )
    assert "\n" not in str(error.value)


class Slow(CleanImages):
    """Images that take 20 ms each, and the first one 300 ms, as if a library had to be loaded."""

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        time.sleep(0.3 if index == 0 else 0.02)
        return super().image(index, corruption, severity)


@pytest.mark.slow
def test_the_estimate_leaves_the_first_image_out_and_divides_by_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = ImageVersions(Slow(pictures(100)), [CLEAN], prepare)
    alone = estimate_seconds(versions, encode, range(100))
    assert alone is not None
    assert 2 <= alone < 6
    monkeypatch.setattr("dualenc.evaluation.corrupted.usable_workers", lambda number: number)
    parallel = estimate_seconds(versions, encode, range(100), num_workers=2)
    assert parallel is not None
    assert parallel < 0.8 * alone


def test_few_or_unreadable_images_are_not_timed() -> None:
    few = ImageVersions(CleanImages(pictures(9)), [CLEAN], prepare)
    assert estimate_seconds(few, encode, range(9)) is None
    bad = ImageVersions(CleanImages(WithBad(pictures(12), {0, 1})), [CLEAN], prepare)
    assert estimate_seconds(bad, encode, range(12)) is None


ERRORS = np.array([[0.1, 0.3], [0.2, 0.6]])


def test_rows_show_accuracy_and_means() -> None:
    rows = robustness_rows(ERRORS, ["fog", "snow"], [1, 5])
    assert rows[0] == {
        "corruption": "fog",
        "1": 0.9,
        "5": 0.7,
        "mean": pytest.approx(0.8),
    }
    assert rows[2]["corruption"] == "mean"
    assert rows[2]["5"] == pytest.approx(0.55)
    assert rows[2]["mean"] == pytest.approx(0.7)


def test_corruption_errors_are_relative_to_a_baseline() -> None:
    errors = {"fog": [0.1, 0.2, 0.3, 0.4, 0.5], "snow": [0.2] * 5, "saturate": [0.9] * 5}
    found = corruption_errors(errors, {"fog": 0.6, "snow": 0.1, "frost": 0.3})
    assert found == pytest.approx({"fog": 1.5 / 3.0, "snow": 2.0})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"fog": [0.1, 0.2]}', "'fog' is \\[0.1, 0.2\\]; give an error rate from 0 to 1"),
        ('{"fog": 81.9}', "'fog' is 81.9; give an error rate from 0 to 1"),
        ('{"fog": true}', "'fog' is True"),
        ('{"fog": {"1": 0.5}}', "'fog' is {'1': 0.5}"),
        ('{"robustness": 3}', "does not contain error rates by corruption"),
        ('{"robustness": {"errors": [1]}}', "does not contain error rates by corruption"),
        ("[]", "holds a list instead of an object"),
        ("{", "not valid JSON"),
    ],
)
def test_baselines_of_another_form(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "baseline.json").write_text(content)
    with pytest.raises(DualencError, match=message):
        read_baseline(tmp_path / "baseline.json")
