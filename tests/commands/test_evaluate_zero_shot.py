"""`dualenc evaluate zero-shot` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.cli import main
from dualenc.data.vector_shards import Embeddings
from dualenc.evaluation.runs import read_per_query
from tests.commands.image_models import pad_images, replace_images
from tests.commands.toy import COLOURS, write_captioned, write_classes


@pytest.fixture
def model(toy_clip: Path) -> Path:
    return toy_clip


def evaluate(model: Path, *rest: object) -> int:
    return main(["evaluate", "zero-shot", str(model), *map(str, rest)])


@pytest.mark.slow
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


def test_mistakes_are_told_in_one_line(
    model: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, unlabelled = write_classes(tmp_path / "data"), write_captioned(tmp_path / "unlabelled")
    (tmp_path / "few.txt").write_text("red\n")
    (tmp_path / "bad.txt").write_text("a photo\n")
    numbered = tmp_path / "numbered"
    write_classes(numbered)
    for number, colour in enumerate(sorted(COLOURS)):
        (numbered / colour).rename(numbered / str(number))
    for words, message in [
        ((model, unlabelled), "no labels"),
        ((model, data, "--class_names", tmp_path / "few.txt"), "1 class names, but there is a label 2"),
        ((model, data, "--class_names", tmp_path / "absent.txt"), "no such file"),
        ((model, data, "--templates", tmp_path / "bad.txt"), "bad.txt:1: a template needs {} once"),
        ((model, numbered), "the classes have no names; give them with --class_names FILE"),
        ((toy_text, data), "needs kind image-text"),
    ]:
        assert evaluate(*words, "--out", tmp_path / "out") == 2  # type: ignore[arg-type]
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1], error
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_images_templates_and_names_replaced_under_the_same_names_count_anew(model: Path, tmp_path: Path) -> None:
    data, templates, names = write_classes(tmp_path / "data"), tmp_path / "templates.txt", tmp_path / "names.txt"
    pad_images(data)
    templates.write_text("a {} picture\n")
    names.write_text("blue\ngreen\nred\n")
    given = (model, data, "--templates", templates, "--class-names", names, "--out")

    def change_images() -> None:
        replace_images(data)

    def change_templates() -> None:
        templates.write_text("{} number\n")

    def change_names() -> None:
        names.write_text("red\nblue\ngreen\n")

    assert evaluate(*given, tmp_path / "out") == 0
    for number, change in enumerate((change_images, change_templates, change_names)):
        before = vectors_below(tmp_path / "out")
        change()
        assert evaluate(*given, tmp_path / "out") == 0
        assert evaluate(*given, tmp_path / f"fresh-{number}") == 0
        again, fresh = (tmp_path / name for name in ("out", f"fresh-{number}"))
        assert vectors_below(again) == vectors_below(fresh) != before
        measured = [json.loads((folder / "metrics.json").read_text()) for folder in (again, fresh)]
        assert measured[0] == measured[1]


def vectors_below(folder: Path) -> list[bytes]:
    """The embeddings that an evaluation keeps."""
    return [path.read_bytes() for path in sorted((folder / "embeddings").rglob("data-*.arrow"))]


@pytest.mark.parametrize("option", ["--templates", "--class-names"])
@pytest.mark.parametrize("content", ["caf\u00e9 {}\n".encode("latin-1"), b"\xff\xfe", b""])
def test_files_that_are_no_text_are_refused(
    option: str, content: bytes, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = write_classes(tmp_path / "data", per_class=1), tmp_path / "file.txt"
    file.write_bytes(content)
    assert evaluate(model, data, option, file, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(f"dualenc: error: {file}")
    assert not (tmp_path / "out").exists()


def test_a_split_is_no_way_out_of_the_folder(model: Path, tmp_path: Path) -> None:
    """ "../other" names no split; the folder is taken whole."""
    data = write_classes(tmp_path / "data", per_class=2)
    write_classes(tmp_path / "other", per_class=3)
    assert evaluate(model, data, "--split", "../other", "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["images"] == 6
