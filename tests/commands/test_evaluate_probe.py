"""`dualenc evaluate probe` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from dualenc.cli import main
from dualenc.data import open_corpus
from dualenc.encoders import load_model
from dualenc.search.embed import embed
from tests.commands.image_models import (
    HUES,
    pad_images,
    picture,
    replace_images,
    save_classes,
    save_image_model,
    save_splits,
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save_splits(tmp_path / "data")


def evaluate(*words: object) -> int:
    return main(["evaluate", "probe", *map(str, words), "--num-workers", "0", "--device", "cpu"])


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The line that a mistake prints."""
    capsys.readouterr()
    assert evaluate(*words) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_every_probe_is_in_the_metrics_and_in_the_report(image_model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(image_model, data, "--out", out, "--sgd", "features", "--sgd-epochs", "20") == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["train_images"], metrics["test_images"]) == (30, 18)
    names = ["1-NN", "20-NN, weighted", "linear, L-BFGS", "1-shot, linear", "5-shot, linear", "10-shot, linear"]
    assert list(metrics["accuracy"]) == [*names, "linear, SGD"]
    assert metrics["accuracy"]["linear, L-BFGS"]["accuracy"] > 0.9, "three hues are easily told apart"
    assert metrics["accuracy"]["1-shot, linear"]["sd"] >= 0
    assert metrics["features"]["same_label_cosine"] > metrics["features"]["different_label_cosine"]
    assert "20-NN, weighted" in (out / "report.html").read_text()


@pytest.mark.slow
def test_the_features_are_the_backbones(image_model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(image_model, data, "--out", out, "--shots", "1") == 0
    tower = load_model(str(image_model)).left
    parts = {part: open_corpus(data / part, modality="image") for part in ("train", "test")}
    features = {part: np.asarray(embed(tower, corpus, output="features").vectors) for part, corpus in parts.items()}
    reference = KNeighborsClassifier(1, metric="cosine").fit(features["train"], parts["train"].labels)
    expected = reference.score(features["test"], parts["test"].labels)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["accuracy"]["1-NN"]["accuracy"] == pytest.approx(expected)


@pytest.mark.slow
def test_sgd_on_augmented_images(image_model: Path, data: Path, tmp_path: Path) -> None:
    words = (image_model, data, "--sgd", "images", "--sgd-epochs", "3", "--shots", "1")
    assert evaluate(*words, "--out", tmp_path / "a") == 0
    assert evaluate(*words, "--out", tmp_path / "b") == 0
    first, second = (json.loads((tmp_path / name / "metrics.json").read_text())["accuracy"] for name in "ab")
    assert first == second
    assert "crops and flips" in first["linear, SGD"]["note"]


@pytest.mark.slow
def test_limits_take_images_of_all_classes(image_model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(image_model, data, "--out", out, "--limit", "9", "--train-limit", "15") == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["train_images"], metrics["test_images"]) == (15, 9)
    assert "same_label_cosine" in metrics["features"]


@pytest.mark.slow
def test_an_image_that_does_not_decode_is_left_out(image_model: Path, data: Path, tmp_path: Path) -> None:
    (data / "train" / "red" / "03.png").write_bytes(b"broken")
    out = tmp_path / "out"
    assert evaluate(image_model, data, "--out", out, "--sgd", "images", "--sgd-epochs", "1") == 0
    assert json.loads((out / "metrics.json").read_text())["train_images"] == 29


@pytest.mark.slow
def test_an_image_text_model_is_probed_by_its_image_tower(toy_clip: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(toy_clip, data, "--out", tmp_path / "out") == 0


@pytest.mark.slow
def test_classes_are_matched_by_name(image_model: Path, tmp_path: Path) -> None:
    """A class that the test images lack shifts their numbers, not their names."""
    data = save_splits(tmp_path / "data")
    shutil.rmtree(data / "test" / "blue")
    assert evaluate(image_model, data, "--out", tmp_path / "out") == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["accuracy"]["linear, L-BFGS"]["accuracy"] > 0.9


def test_mistakes_are_one_line(
    image_model: Path, data: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "is of kind query-document and encodes no images" in failure(capsys, toy_text, data, "--out", out)
    flat = tmp_path / "flat"
    flat.mkdir()
    for seed in range(3):
        picture(HUES["red"], seed).save(flat / f"{seed}.png")
    assert "there are no labels" in failure(capsys, image_model, flat, "--out", out)
    (data / "test" / "red").rename(data / "test" / "pink")
    assert "class pink is not among the 3 classes" in failure(capsys, image_model, data, "--out", out)
    (data / "test" / "pink").rename(data / "test" / "red")
    assert "shots=11: class 0 has 10" in failure(capsys, image_model, data, "--out", out, "--shots", "11")
    assert "--l2 is -1.0" in failure(capsys, image_model, data, "--out", out, "--l2", "0.1,-1")
    only = save_classes(tmp_path / "only", 4)
    shutil.rmtree(only / "red")
    shutil.rmtree(only / "green")
    assert "(train): all images are of one class" in failure(capsys, image_model, only, "--out", tmp_path / "other")
    assert not (out / "metrics.json").exists()


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.slow
def test_images_replaced_under_the_same_names_and_sizes_are_encoded_anew(
    part: str, image_model: Path, data: Path, tmp_path: Path
) -> None:
    pad_images(data)
    given = (image_model, data, "--shots", "1", "--out")
    assert evaluate(*given, tmp_path / "out") == 0
    before = json.loads((tmp_path / "out" / "metrics.json").read_text())
    replace_images(data / part)
    assert evaluate(*given, tmp_path / "out") == 0
    assert evaluate(*given, tmp_path / "fresh") == 0
    again, fresh = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("out", "fresh"))
    assert again == fresh
    assert again["accuracy"] != before["accuracy"]


@pytest.mark.slow
def test_other_weights_under_the_same_name_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_image_model(tmp_path / "model", seed=1)
    assert evaluate(tmp_path / "model", data, "--shots", "1", "--out", tmp_path / "out") == 0
    before = (tmp_path / "out" / "metrics.json").read_text()
    save_image_model(tmp_path / "model", seed=2)
    assert evaluate(tmp_path / "model", data, "--shots", "1", "--out", tmp_path / "out") == 2
    assert "holds an evaluation of other weights than" in capsys.readouterr().err
    assert (tmp_path / "out" / "metrics.json").read_text() == before


@pytest.mark.slow
def test_a_repaired_image_is_tried_again(image_model: Path, data: Path, tmp_path: Path) -> None:
    whole = (data / "train" / "red" / "03.png").read_bytes()
    counts = []
    for content in (b"broken", whole):
        (data / "train" / "red" / "03.png").write_bytes(content)
        assert evaluate(image_model, data, "--shots", "1", "--out", tmp_path / "out") == 0
        counts.append(json.loads((tmp_path / "out" / "metrics.json").read_text())["train_images"])
    assert counts == [29, 30]


@pytest.mark.parametrize(
    "words",
    [
        "--limit 0", "--train-limit -1", "--num-workers -1", "--seed -1", "--batch-size 0", "--l2 nan", "--l2 0",
        "--device foo", "--device meta", "--device cuda:99", "--sgd-epochs 0", "--shots 11", "--shots 0",
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_before_any_work(
    words: str, image_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option, value = words.split()
    given = ("evaluate", "probe", image_model, data, "--out", tmp_path / "out", option, value)
    assert main([str(word) for word in given]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("dualenc: error: ")
    assert option.strip("-").replace("-", "_") in line.replace("-", "_")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere", "/dev/null/below"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    place: str, image_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "cannot be written" in failure(capsys, image_model, data, "--out", tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_images_that_cannot_be_read_leave_no_folder(
    image_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for image in data.rglob("*.png"):
        image.write_bytes(b"broken")
    assert "none of 30 items could be used" in failure(capsys, image_model, data, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_real_images_of_ten_classes(image_model: Path, shared_data: Path, tmp_path: Path) -> None:
    words = (image_model, shared_data / "cifar10", "--limit", "60", "--train-limit", "200", "--shots", "5")
    assert evaluate(*words, "--out", tmp_path / "out") == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["train_images"], metrics["test_images"]) == (200, 60)


@pytest.mark.slow
def test_images_without_a_label_are_left_out_and_counted(
    image_model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accuracies = []
    for missing in (False, True):
        for part in ("train", "test"):
            rows = [f"{path.relative_to(data)},{path.parent.name}" for path in sorted((data / part).rglob("*.png"))]
            # A fifth of the rows more, of images of all classes.
            rows += [f"{row.partition(',')[0]}," for row in rows[::5]] if missing else []
            (data / f"{part}.csv").write_text("\n".join(["image,label", *rows]) + "\n")
        out = tmp_path / f"out {missing}"
        assert evaluate(image_model, data / "test.csv", "--train", data / "train.csv", "--out", out) == 0
        metrics = json.loads((out / "metrics.json").read_text())
        assert (metrics["train_images"], metrics["test_images"]) == (30, 18)
        accuracies.append({name: row["accuracy"] for name, row in metrics["accuracy"].items()})
    assert accuracies[0] == accuracies[1]
    assert "skipped 6 bad samples: 6 image without a label (first: 30)" in caplog.text
