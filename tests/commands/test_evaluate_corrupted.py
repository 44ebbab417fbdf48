"""`dualenc evaluate corrupted` as a user runs it: on the fly, from CIFAR-C and interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dualenc.cli import main
from tests.commands.image_models import save_cifar_c, save_image_model, save_splits

FEW = ("--corruptions", "gaussian_noise,fog,pixelate")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save_splits(tmp_path / "data", test=3)


def words(*given: object, workers: int = 0) -> list[str]:
    return ["evaluate", "corrupted", *map(str, given), "--num-workers", str(workers), "--device", "cpu"]


def evaluate(*given: object, workers: int = 0) -> int:
    return main(words(*given, workers=workers))


def failure(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    """The line that a mistake prints."""
    capsys.readouterr()
    assert evaluate(*given) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def metrics_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.slow
def test_all_three_parts(image_model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(image_model, data, "--out", out, *FEW, "--train", data, "--severities", "1,5") == 0
    found = metrics_of(out)
    assert (found["corrupted"]["images"], found["plain"]["images"], found["robustness"]["images"]) == (9, 9, 9)
    assert {name for name in found["corrupted"] if "/" in name} == {"top1/gaussian_noise", "top1/fog", "top1/pixelate"}
    directions = [found["corrupted"][f"top1_{name}"] for name in ("first_to_second", "second_to_first")]
    assert found["corrupted"]["top1"] == pytest.approx(np.mean(directions))
    assert found["robustness"]["clean_accuracy"] > 0.8
    errors = found["robustness"]["errors"]
    assert found["robustness"]["mean_corruption_error"] == pytest.approx(
        np.mean([errors[name][severity] for name in errors for severity in ("1", "5")])
    )
    assert "most often taken for" in (out / "report.html").read_text()


@pytest.mark.slow
def test_workers_change_nothing_and_other_settings_do(image_model: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(image_model, data, "--out", tmp_path / "one", *FEW) == 0
    assert evaluate(image_model, data, "--out", tmp_path / "two", *FEW, workers=2) == 0
    assert metrics_of(tmp_path / "two") == metrics_of(tmp_path / "one")
    assert evaluate(image_model, data, "--out", tmp_path / "two", *FEW, "--severity", "5", "--seed", "3") == 0
    assert metrics_of(tmp_path / "two") != metrics_of(tmp_path / "one")


@pytest.mark.slow
def test_cifar_c_is_read_and_needs_no_clean_images(image_model: Path, data: Path, tmp_path: Path) -> None:
    folder = save_cifar_c(tmp_path / "cifar-c")
    out = tmp_path / "out"
    assert evaluate(image_model, folder, "--out", out, "--train", data / "train", "--augmentation", "model") == 0
    found = metrics_of(out)
    assert set(found["robustness"]["errors"]) == {"fog", "contrast", "snow"}
    assert found["corrupted"]["images"] == 6
    assert "plain" not in found
    assert evaluate(image_model, folder, "--clean", data, "--out", out) == 0
    assert metrics_of(out)["plain"]["images"] == 9


@pytest.mark.slow
def test_a_limit_takes_some_images(image_model: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(image_model, data, "--out", tmp_path / "few", *FEW, "--limit", "4") == 0
    assert metrics_of(tmp_path / "few")["corrupted"]["images"] == 4


@pytest.mark.slow
def test_real_images_of_64_pixels(shared_data: Path, tmp_path: Path) -> None:
    save_image_model(tmp_path / "model", image_size=64)
    given = (tmp_path / "model", shared_data / "tiny_imagenet100", "--split", "val", "--limit", "3")
    assert evaluate(*given, "--out", tmp_path / "out") == 0
    found = metrics_of(tmp_path / "out")
    assert sum("/" in name for name in found["corrupted"]) == 19
    assert found["plain"]["images"] == 3


@pytest.mark.slow
def test_mistakes_are_one_line(
    image_model: Path, data: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (20, 20)).save(flat / "small.png")
    folder = save_cifar_c(tmp_path / "cifar-c")
    for given, message in [
        ((toy_text, data), "is of kind query-document and encodes no images"),
        ((image_model, data, "--corruptions", "fogg"), "unknown corruption fogg (did you mean fog?)"),
        ((image_model, data, "--severity", "6"), "--severity is 6; it must lie between 1 and 5"),
        ((image_model, data, "--severities", "1,9", "--train", data), "--severity is 9"),
        ((image_model, flat), "image 0 is 20x20; corruptions need 32x32"),
        ((image_model, data, "--clean", data), "leave --clean out"),
        (
            (image_model, folder, "--corruptions", "frost"),
            "frost.npy: no such file or folder; there are snow",
        ),
        ((image_model, data, *FEW, "--train", flat), "there are no labels"),
    ]:
        assert message in failure(capsys, *given, "--out", out), message
        assert not (out / "metrics.json").exists()
    np.save(folder / "fog.npy", np.zeros((10, 32, 32, 3), np.uint8))
    assert "uint8 (30, H, W, 3) belongs" in failure(capsys, image_model, folder, "--out", out)
