"""`dualenc evaluate zero-shot` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dualenc.data.store.vector_shards import Embeddings
from dualenc.workflows.evaluate_zero_shot import _name_classes
from tests.helpers.image_models import HUES, save_classes
from tests.helpers.in_process import evaluated, failure


@pytest.mark.slow
def test_top1_from_the_embeddings(
    toy_clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = save_classes(tmp_path / "data", per_class=4), tmp_path / "out"
    (tmp_path / "prompts.txt").write_text("a {} picture\nthe {} photo\n")
    measured = evaluated("zero-shot", out, toy_clip, data, "--templates", tmp_path / "prompts.txt")
    assert (measured["images"], measured["classes"]) == (12, 3)
    images = np.asarray(Embeddings.open(out / "embeddings" / "images-test").vectors)
    prompts = np.asarray(Embeddings.open(out / "embeddings" / "prompts").vectors)
    means = prompts.reshape(3, 2, -1).mean(axis=1)
    predicted = (images @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(axis=1)
    labels = np.repeat(np.arange(3), 4)  # folders in alphabetical order
    assert measured["metrics"]["top@1"] == pytest.approx(np.mean(predicted == labels))
    assert "top@5" not in measured["metrics"]
    assert [row["class"] for row in measured["per_class"]] == sorted(HUES)
    assert "hardest first" in (out / "report.html").read_text()
    assert "Zero-shot" in capsys.readouterr().out
    # Other prompts in the same file are embedded anew.
    (tmp_path / "prompts.txt").write_text("{} number\n")
    again = evaluated("zero-shot", out, toy_clip, data, "--templates", tmp_path / "prompts.txt")
    assert again == evaluated(
        "zero-shot", tmp_path / "fresh", toy_clip, data, "--templates", tmp_path / "prompts.txt"
    )


def test_class_names_from_a_file(
    toy_clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, names = save_classes(tmp_path / "data", per_class=1), tmp_path / "names.txt"
    names.write_text("blue_sky\ngreen grass\nred rose\n")
    measured = evaluated("zero-shot", tmp_path / "out", toy_clip, data, "--class_names", names)
    assert [row["class"] for row in measured["per_class"]] == [
        "blue sky",
        "green grass",
        "red rose",
    ]
    found = []
    for order in (sorted(HUES), ["red", "green", "blue"], ["black", "blue", "green", "red"]):
        names.write_text("\n".join(order))
        measured = evaluated(
            "zero-shot", tmp_path / "".join(order), toy_clip, data, "--class_names", names
        )
        assert [row["class"] for row in measured["per_class"]] == [
            name for name in order if name in HUES
        ]
        found.append({row["class"]: row["top@1"] for row in measured["per_class"]})
    assert found[0] == found[1], "in any order each image is of its own class"
    names.write_text("RED\nGreen\nBlue\n")
    measured = evaluated("zero-shot", tmp_path / "case", toy_clip, data, "--class_names", names)
    assert [row["class"] for row in measured["per_class"]] == ["RED", "Green", "Blue"]
    names.write_text("red\nlight green\nblue\n")
    message = "lists blue at the place of another class of the data, and not all of them by name"
    assert message in failure(
        capsys, "evaluate", "zero-shot", toy_clip, data, "--class-names", names
    )
    names.write_text("one\ntwo\nthree\nfour\n")
    message = "4 class names for 3 classes, which it does not list by name"
    assert message in failure(
        capsys, "evaluate", "zero-shot", toy_clip, data, "--class-names", names
    )


@pytest.mark.parametrize("labels", [[1, 2, 3], [2, 1, 3, 3]])
def test_class_numbers_may_begin_at_one(
    labels: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the labels of flowers, cars and birds."""
    (tmp_path / "names.txt").write_text("rose\nlily\ntulip\n")
    caplog.set_level("INFO", "dualenc.workflows")
    names, numbers = _name_classes(str(tmp_path / "names.txt"), None, np.array(labels), "data")
    assert [names[number] for number in numbers] == [
        ["rose", "lily", "tulip"][label - 1] for label in labels
    ]
    assert "the first name is that of class 1" in caplog.text


def test_class_names_behind_the_ids_of_the_folders(toy_clip: Path, tmp_path: Path) -> None:
    data, names = save_classes(tmp_path / "data", per_class=1), tmp_path / "names.txt"
    for number, name in enumerate(sorted(HUES)):
        (data / name).rename(data / f"n0000000{number}")
    names.write_text("n00000009 black\nn00000002 red\nn00000000 blue\nn00000001 green\n")
    measured = evaluated("zero-shot", tmp_path / "out", toy_clip, data, "--class_names", names)
    names.write_text("blue\ngreen\nred\n")
    expected = evaluated("zero-shot", tmp_path / "by_place", toy_clip, data, "--class_names", names)
    assert [row["class"] for row in measured["per_class"]] == ["red", "blue", "green"]
    images = Embeddings.open(tmp_path / "out" / "embeddings" / "images-test")
    prompts = np.asarray(
        Embeddings.open(tmp_path / "out" / "embeddings" / "prompts").vectors
    ).reshape(4, 8, -1)
    nearest = (images.vectors[:] @ prompts.mean(axis=1).T).argmax(axis=1).tolist()
    assert measured["metrics"]["top@1"] == pytest.approx(np.mean(np.array(nearest) == [2, 3, 1]))
    assert expected["classes"] == 3


def test_a_split_is_no_way_out_of_the_folder(toy_clip: Path, tmp_path: Path) -> None:
    """ "../other" names no split; the folder is taken whole."""
    data = save_classes(tmp_path / "data", per_class=2)
    save_classes(tmp_path / "other", per_class=3)
    assert (
        evaluated("zero-shot", tmp_path / "out", toy_clip, data, "--split", "../other")["images"]
        == 6
    )
