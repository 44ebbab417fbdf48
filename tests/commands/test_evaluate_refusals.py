"""What `dualenc evaluate …` refuses, in one line, before it writes anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers import toy
from tests.helpers.image_models import save_cifar_c, save_classes, save_splits
from tests.helpers.in_process import failure


def make_spaced(folder: Path) -> None:
    (toy.write_beir(folder) / "queries.jsonl").write_text('{"_id": "a b", "text": "wing"}\n')
    (folder / "qrels" / "test.tsv").write_text("a b\td1\t1\n")


def make_unjudged(folder: Path) -> None:
    (toy.write_beir(folder) / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")


def make_flat(folder: Path) -> None:
    folder.mkdir()
    Image.new("RGB", (20, 20)).save(folder / "small.png")


def make_pink(folder: Path) -> None:
    (save_splits(folder, train=2, test=1) / "test" / "red").rename(folder / "test" / "pink")


MAKE: dict[str, Callable[[Path], object]] = {
    "beir": toy.write_beir,
    "spaced": make_spaced,
    "unjudged": make_unjudged,
    "captioned": toy.write_captioned,
    "colours": save_classes,
    "splits": save_splits,
    "flat": make_flat,
    "pink": make_pink,
    "cifar-c": save_cifar_c,
    "few.txt": lambda path: path.write_text("red\n"),
    "bad.txt": lambda path: path.write_text("a photo\n"),
    "pairs.csv": lambda path: path.write_text("query,document\nwing,a wing\ndrag,a drag\n"),
}
CORRUPTED = "corrupted {image} {splits} --corruptions fog,contrast"
REFUSALS = [
    ("retrieval {text} {beir} --split dev", "no split 'dev'; there are: test"),
    ("retrieval {text} {unjudged}", "no usable judgement"),
    ("retrieval {text} {spaced}", "'a b' is empty, holds white space or is not UTF-8"),
    ("retrieval {text} {beir} {beir}", "two folders are named beir"),
    ("retrieval {clip} {beir}", "or vector or query-index; use `dualenc evaluate image-text`"),
    ("retrieval {text} {captioned}", "holds images; use `dualenc evaluate image-text`"),
    ("image-text {clip} {beir}", "pairs of text and text, not of image and text"),
    ("image-text {text} {captioned}", "needs kind image-text; use `dualenc evaluate retrieval`"),
    ("zero-shot {clip} {captioned}", "lack labels"),
    ("zero-shot {clip} {colours} --class-names {few.txt}", "1 class names, but there is a label 2"),
    ("zero-shot {clip} {colours} --templates {bad.txt}", "bad.txt:1: a template needs {} once"),
    ("probe {text} {splits}", "is of kind query-document and does not encode images"),
    ("probe {image} {flat} --train {splits}", "the images lack labels"),
    (
        "probe {image} {colours} --split train",
        "a probe would be tested on its own training images; "
        "name other images to train on: --train",
    ),
    ("probe {image} {splits} --split train", "name other images to train on: --train"),
    (
        "probe {image} {colours} --train {colours}/../colours/",
        "name other images to train on: --train",
    ),
    (
        "corrupted {image} {colours} --train {colours}/",
        "a probe would be tested on its own training images",
    ),
    ("probe {image} {few.txt}", "(train): the images lack labels"),
    ("probe {image} {flat}", "the images lack labels"),
    ("probe {image} {pink}", "class pink is not among the 3 classes"),
    (
        "corrupted {image} {splits} --corruptions fogg,fog",
        "unknown corruption fogg (did you mean fog?)",
    ),
    ("corrupted {image} {splits} --corruptions fog,fog", "give two or more different ones"),
    (f"{CORRUPTED} --severity 9", 'Invalid value "9" for --severity. Must be <= 5.'),
    (
        "corrupted {image} {cifar-c} --corruptions frost",
        "frost.npy: no such file or folder; there are snow",
    ),
    (
        "retrieval {text} {pairs.csv} --split train[:50%]",
        "no split 'train[:50%]'; there are: train",
    ),
]


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, toy_text: Path, toy_clip: Path, image_model: Path
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    for name, make in MAKE.items():
        make(folder / name)
    models = {"text": toy_text, "clip": toy_clip, "image": image_model}
    return {name: folder / name for name in MAKE} | models


@pytest.mark.parametrize(("line", "message"), REFUSALS, ids=[line for line, _ in REFUSALS])
def test_a_refusal_is_one_line_and_leaves_nothing(
    line: str,
    message: str,
    places: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, place in places.items():
        line = line.replace(f"{{{name}}}", str(place))
    workers = ["--num-workers", 0] if line.startswith(("probe", "corrupted")) else []
    words = ["evaluate", *line.split(), *workers, "--out", tmp_path / "out"]
    assert message in failure(capsys, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    place: str, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    line = failure(
        capsys, "evaluate", "probe", places["image"], places["splits"], "--out", tmp_path / place
    )
    assert "cannot be written" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_classes_without_names_need_a_file(
    toy_clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_classes(tmp_path / "numbered", per_class=2)
    for number, place in enumerate(sorted(folder.iterdir())):
        place.rename(folder / str(number))
    assert "give them with --class-names FILE" in failure(
        capsys, "evaluate", "zero-shot", toy_clip, folder
    )
