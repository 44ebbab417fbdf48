"""`dualenc evaluate probe` as a user runs it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from dualenc.data import open_corpus
from dualenc.data.labels import align_labels
from dualenc.encoders import load_model
from dualenc.search import Embeddings
from dualenc.search.embed.encode import embed
from dualenc.workflows.labeled_images import open_images
from tests.helpers.image_models import save_splits
from tests.helpers.in_process import evaluated


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save_splits(tmp_path / "data")


def evaluate(out: Path, *words: Any) -> dict[str, Any]:
    return evaluated("probe", out, *words, "--num-workers", 0, "--device", "cpu")


@pytest.mark.slow
def test_every_probe_is_in_the_metrics_and_in_the_report(
    image_model: Path, data: Path, tmp_path: Path
) -> None:
    metrics = evaluate(tmp_path / "out", image_model, data)
    assert (metrics["train_images"], metrics["test_images"]) == (30, 18)
    assert list(metrics["accuracy"]) == ["1-NN", "20-NN, weighted", "linear, L-BFGS"]
    assert metrics["accuracy"]["linear, L-BFGS"]["accuracy"] > 0.9, (
        "three hues are easily told apart"
    )
    assert "20-NN, weighted" in (tmp_path / "out" / "report.html").read_text()
    tower = load_model(str(image_model)).left
    parts = {part: open_corpus(data / part, modality="image") for part in ("train", "test")}
    features = {
        part: np.asarray(embed(tower, corpus, output="features").vectors)
        for part, corpus in parts.items()
    }
    reference = KNeighborsClassifier(1, metric="cosine").fit(
        features["train"], parts["train"].labels
    )
    expected = reference.score(features["test"], parts["test"].labels)
    assert metrics["accuracy"]["1-NN"]["accuracy"] == pytest.approx(expected)


@pytest.mark.slow
def test_limits_take_images_of_all_classes(toy_clip: Path, data: Path, tmp_path: Path) -> None:
    """Of the image tower of an image-text model."""
    metrics = evaluate(tmp_path / "out", toy_clip, data, "--limit", "9", "--train-limit", "15")
    assert (metrics["train_images"], metrics["test_images"]) == (15, 9)
    chosen = [
        set(open_images(str(data / "train"), "train", limit=15, seed=seed).ids)
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]


def test_numbers_stay_where_one_side_has_no_names() -> None:
    labels, names = np.array([0, 2, 1]), ["blue", "green", "red"]
    for own, onto in ((names, ["0", "1", "2"]), (["0", "1", "2"], names), (None, names)):
        assert align_labels(labels, own, onto, "here").tolist() == [0, 2, 1]
    assert align_labels(labels, names, ["green", "red", "blue"], "here").tolist() == [2, 1, 0]


def test_numbers_of_species_are_names() -> None:
    names = ["1355868", "1355869", "1355870"]
    assert align_labels(np.array([0, 1]), names[1:], names, "here").tolist() == [1, 2]


@pytest.mark.slow
def test_classes_are_matched_by_name_and_a_broken_image_is_left_out(
    image_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class that the test images lack shifts their numbers, not their names."""
    shutil.rmtree(data / "test" / "blue")
    (data / "train" / "blue" / "03.png").write_bytes(b"broken")
    metrics = evaluate(tmp_path / "out", image_model, data)
    assert (metrics["train_images"], metrics["skipped"]) == (29, 1)
    assert "left out 1 of 30 items; the first, blue/03.png" in capsys.readouterr().err
    assert metrics["accuracy"]["linear, L-BFGS"]["accuracy"] > 0.9


@pytest.mark.slow
def test_images_without_a_label_are_left_out_and_counted(
    image_model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = evaluate(tmp_path / "expected", image_model, data)["accuracy"]
    for part in ("train", "test"):
        rows = [
            f"{path.relative_to(data)},{path.parent.name}"
            for path in sorted((data / part).rglob("*.png"))
        ]
        rows += [f"{row.partition(',')[0]}," for row in rows[::5]]
        (data / f"{part}.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    metrics = evaluate(
        tmp_path / "out", image_model, data / "test.csv", "--train", data / "train.csv"
    )
    assert (metrics["train_images"], metrics["test_images"]) == (30, 18)
    for name, row in metrics["accuracy"].items():
        assert row["accuracy"] == expected[name]["accuracy"]
    assert "skipped 6 bad samples: 6 image without a label (first: 30)" in caplog.text


@pytest.mark.slow
def test_a_folder_without_splits_is_split_at_random(
    image_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = evaluate(tmp_path / "out", image_model, data / "train")
    assert (metrics["train_images"], metrics["test_images"]) == (24, 6)
    assert (metrics["split"], metrics["train_split"]) == ("a random fifth", "the others")
    line = "there are no splits; 6 random images are tested, and 24 others train the probe"
    assert line in capsys.readouterr().out
    parts = [
        set(Embeddings.open(tmp_path / "out" / "features" / part).ids) for part in ("train", "test")
    ]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(open_corpus(data / "train", modality="image").ids)


@pytest.mark.slow
def test_without_test_images_those_of_val_are_tested(
    image_model: Path, data: Path, tmp_path: Path
) -> None:
    expected = evaluate(tmp_path / "expected", image_model, data)["accuracy"]
    (data / "test").rename(data / "val")
    metrics = evaluate(tmp_path / "out", image_model, data)
    assert metrics["split"] == "val"
    assert metrics["accuracy"] == expected
