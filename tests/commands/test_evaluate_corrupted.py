"""`dualenc evaluate corrupted` as a user runs it: on the fly and from CIFAR-C."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.evaluation.corrupted import read_baseline
from dualenc.workflows.evaluate_corrupted import _about
from tests.helpers.image_models import save_cifar_c, save_splits
from tests.helpers.in_process import evaluated, failure

FEW = ("--corruptions", "gaussian_noise,fog,pixelate")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save_splits(tmp_path / "data", test=3)


def evaluate(out: Path, *words: Any, workers: int = 0) -> dict[str, Any]:
    return evaluated("corrupted", out, *words, "--num-workers", workers, "--device", "cpu")


@pytest.mark.slow
def test_all_three_parts(image_model: Path, data: Path, tmp_path: Path) -> None:
    found = evaluate(tmp_path / "out", image_model, data, *FEW, "--train", data)
    assert (
        found["corrupted"]["images"],
        found["plain"]["images"],
        found["robustness"]["images"],
    ) == (9, 9, 9)
    assert {name for name in found["corrupted"] if "/" in name} == {
        "top1/gaussian_noise",
        "top1/fog",
        "top1/pixelate",
    }
    by_corruption = [
        found["corrupted"][f"top1/{name}"] for name in ("gaussian_noise", "fog", "pixelate")
    ]
    assert found["corrupted"]["top1"] == pytest.approx(np.mean(by_corruption))
    assert found["robustness"]["clean_accuracy"] > 0.8
    errors = [error for row in found["robustness"]["errors"].values() for error in row.values()]
    assert len(errors) == 15
    assert found["robustness"]["mean_error"] == pytest.approx(np.mean(errors))
    assert "mean_corruption_error" not in found["robustness"]
    assert "Accuracy by corruption and severity" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_workers_change_nothing_and_other_settings_do(
    image_model: Path, data: Path, tmp_path: Path
) -> None:
    one = evaluate(tmp_path / "one", image_model, data, *FEW)
    assert evaluate(tmp_path / "two", image_model, data, *FEW, workers=2) == one
    assert (
        evaluate(tmp_path / "two", image_model, data, *FEW, "--severity", "5", "--seed", "3") != one
    )
    assert (
        evaluate(tmp_path / "few", image_model, data, *FEW, "--limit", "4")["corrupted"]["images"]
        == 4
    )


@pytest.mark.slow
def test_cifar_c_is_read_and_needs_no_clean_images(
    image_model: Path, data: Path, tmp_path: Path
) -> None:
    folder = save_cifar_c(tmp_path / "cifar-c")
    found = evaluate(tmp_path / "out", image_model, folder, "--train", data / "train")
    assert set(found["robustness"]["errors"]) == {"fog", "contrast", "snow"}
    assert found["corrupted"]["images"] == 6
    assert "plain" not in found
    assert "clean_accuracy" not in found["robustness"]


@pytest.mark.slow
def test_the_mean_corruption_error_is_relative_to_a_baseline(
    image_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hendrycks & Dietterich 2019: the sum of errors over severities divided by the baseline's."""
    baseline = tmp_path / "alexnet.json"
    baseline.write_text(json.dumps({"gaussian_noise": 0.8, "fog": [0.1, 0.2, 0.3, 0.4, 0.5]}))
    words = (image_model, data, "--train", data, "--baseline", baseline)
    names = "gaussian_noise,fog,saturate"
    found = evaluate(tmp_path / "out", *words, "--corruptions", names)["robustness"]
    sums = {name: sum(row.values()) for name, row in found["errors"].items()}
    expected = {"gaussian_noise": sums["gaussian_noise"] / 4, "fog": sums["fog"] / 1.5}
    assert found["corruption_errors"] == pytest.approx(expected)
    assert found["mean_corruption_error"] == pytest.approx(np.mean([*expected.values()]))
    assert found["corruptions_in_it"] == 2
    assert found["mean_error"] == pytest.approx(np.mean([*sums.values()]) / 5)
    # Of itself every error is 1 (or undefined), and a measured file is a baseline.
    assert read_baseline(tmp_path / "out" / "metrics.json")["fog"] == pytest.approx(sums["fog"] / 5)
    words = ("evaluate", "corrupted", *words, "--out", tmp_path / "other")
    assert "the baseline lacks an error rate under pixelate" in failure(capsys, *words, *FEW)
    assert "--baseline is for the errors of a linear probe" in failure(
        capsys, "evaluate", "corrupted", image_model, data, "--baseline", baseline
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_plan_comes_first(
    image_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(tmp_path / "few", image_model, data, *FEW, "--train", data, "--limit", "6")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "retrieval: 6 images × 3 corruptions = 18 versions"
    assert lines[1] == "robustness: 6 images × 3 corruptions × 5 severities = 90 versions"
    evaluate(tmp_path / "more", image_model, data, *FEW, "--split", "train")
    first, *_ = capsys.readouterr().out.splitlines()
    start = "retrieval: 30 images × 3 corruptions = 90 versions; takes about "
    assert re.fullmatch(start + r"(a second|\d+ (second|minute)s)", first)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "a second"),
        (3, "3 seconds"),
        (119, "119 seconds"),
        (150, "2 minutes"),
        (7300, "2 hours"),
    ],
)
def test_durations_are_rounded(seconds: float, words: str) -> None:
    assert _about(seconds) == f"about {words}"
