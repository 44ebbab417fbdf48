"""`dualenc evaluate zero-shot` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.cli import main
from dualenc.embeddings import Embeddings
from dualenc.evaluation.runs import read_per_query
from tests.commands.toy import COLOURS, image_text_model, text_model, write_captioned, write_classes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_text_model(tmp_path_factory.mktemp("models") / "toy-clip")


def evaluate(model: Path, *rest: object) -> int:
    return main(["evaluate", "zero-shot", str(model), *map(str, rest)])


def test_top1_from_the_embeddings(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_classes(tmp_path / "data"), tmp_path / "out"
    (tmp_path / "prompts.txt").write_text("a {} picture\nthe {} photo\n")
    assert evaluate(model, data, "--out", out, "--templates", tmp_path / "prompts.txt") == 0
    measured = json.loads((out / "metrics.json").read_text())
    assert (measured["images"], measured["classes"]) == (12, 3)
    images = np.asarray(Embeddings.open(out / "embeddings" / "images-test").vectors)
    prompts = np.asarray(Embeddings.open(out / "embeddings" / "prompts").vectors)
    means = prompts.reshape(3, 2, -1).mean(axis=1)
    predicted = (images @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(axis=1)
    labels = np.repeat(np.arange(3), 4)  # folders in alphabetical order
    assert measured["metrics"]["top@1"] == pytest.approx(np.mean(predicted == labels))
    assert "top@5" not in measured["metrics"]
    assert [row["class"] for row in measured["per_class"]] == sorted(COLOURS)
    assert len(read_per_query(out / "per_query.ndjson")) == 12
    assert "hardest first" in (out / "report.html").read_text()
    assert "Zero-shot" in capsys.readouterr().out


def test_class_names_from_a_file(model: Path, tmp_path: Path) -> None:
    data, names = write_classes(tmp_path / "data", per_class=1), tmp_path / "names.txt"
    names.write_text("blue_sky\ngreen grass\nred rose\n")
    assert evaluate(model, data, "--out", tmp_path / "out", "--class_names", names) == 0
    measured = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [row["class"] for row in measured["per_class"]] == ["blue sky", "green grass", "red rose"]


def test_mistakes_are_told_in_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, unlabelled = write_classes(tmp_path / "data"), write_captioned(tmp_path / "unlabelled")
    (tmp_path / "few.txt").write_text("red\n")
    (tmp_path / "bad.txt").write_text("a photo\n")
    numbered = tmp_path / "numbered"
    write_classes(numbered)
    for number, colour in enumerate(sorted(COLOURS)):
        (numbered / colour).rename(numbered / str(number))
    texts = text_model(tmp_path / "text")
    for words, message in [
        ((model, unlabelled), "no labels"),
        ((model, data, "--class_names", tmp_path / "few.txt"), "1 class names, but there is a label 2"),
        ((model, data, "--class_names", tmp_path / "absent.txt"), "no such file"),
        ((model, data, "--templates", tmp_path / "bad.txt"), "bad.txt:1: a template needs {} once"),
        ((model, numbered), "the classes have no names; give them with --class_names FILE"),
        ((texts, data), "needs kind image-text"),
    ]:
        assert evaluate(*words, "--out", tmp_path / "out") == 2  # type: ignore[arg-type]
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1], error
        assert not (tmp_path / "out").exists()
