from __future__ import annotations

import logging
import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from dualenc.data import ImageFolderViews, ImageViews, TableViews
from dualenc.data.columns import Labels
from dualenc.errors import BadSample, DualencError

from .make import encoded, picture, shade_of, write_csv


def images(*shades: int | None) -> list[dict | None]:
    return [None if s is None else {"bytes": encoded(picture(s)), "path": None} for s in shades]


def save(path: Path, features: dict | None = None, **columns: list) -> Path:
    kinds = {"image": datasets.Image(), **(features or {})}
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).to_parquet(path)
    return path


def test_images_with_named_classes(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["cat", "dog"])
    path = save(tmp_path / "x.parquet", {"label": label}, image=images(1, 2, 3), label=[1, 0, 1])
    views = TableViews(path)
    assert [shade_of(pair.left) for pair in views] == [1, 2, 3]
    assert views.left_id.tolist() == views.right_id.tolist() == [0, 1, 2]
    assert views.labels is not None
    assert (views.labels.tolist(), views.class_names) == ([1, 0, 1], ["cat", "dog"])
    assert shade_of(pickle.loads(pickle.dumps(views))[2].right) == 3


@pytest.mark.parametrize(
    ("values", "numbers", "names"),
    [
        (["b", "a", "b"], [1, 0, 1], ["a", "b"]),
        ([2, 0, 2], [2, 0, 2], ["0", "1", "2"]),
        (["10", "9", "10"], [10, 9, 10], [str(i) for i in range(11)]),
        (["a", None, "a"], [0, -1, 0], ["a"]),
    ],
)
def test_classes_without_names_are_numbered_in_order(tmp_path: Path, values: list, numbers: list, names: list) -> None:
    kind = datasets.Value("int64" if isinstance(values[0], int) else "string")
    views = TableViews(
        save(tmp_path / "x.parquet", {"kind": kind}, image=images(1, 2, 3), kind=values), label_column="kind"
    )
    assert views.labels is not None
    assert (views.labels.tolist(), views.class_names) == (numbers, names)


def test_labels_are_optional_but_a_named_column_is_not(tmp_path: Path) -> None:
    path = save(tmp_path / "x.parquet", image=images(1))
    assert TableViews(path).labels is None
    with pytest.raises(DualencError, match="no column 'klass'; did you mean 'image'"):
        TableViews(path, label_column="klass")


def test_rows_without_an_image_are_skipped_with_their_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "x.parquet", {"label": datasets.Value("int64")}, image=images(1, None, 3), label=[0, 1, 2])
    with caplog.at_level(logging.WARNING, logger="dualenc.data"):
        views = TableViews(path)
    assert [shade_of(pair.left) for pair in views] == [1, 3]
    assert views.labels is not None
    assert (views.labels.tolist(), views.skipped) == ([0, 2], 1)
    assert f"1 no image in column 'image' (first: {path} row 1)" in caplog.text
    with pytest.raises(BadSample, match="row 1: no image in column 'image'"):
        TableViews(path, on_error="raise")


def test_an_undecodable_image_is_a_bad_sample_when_it_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "x.parquet", image=[*images(1), {"bytes": b"junk", "path": None}])
    views = TableViews(path)
    assert len(views) == 2
    with pytest.raises(BadSample, match="row 1, column 'image': image cannot be decoded"):
        views[1]


def test_csv_of_paths(tmp_path: Path) -> None:
    picture(4).save(tmp_path / "4.png")
    views = TableViews(write_csv(tmp_path / "x.csv", ["file", "label"], [["4.png", "four"]]), "file")
    assert (shade_of(views[0].left), views.class_names) == (4, ["four"])


def test_folders_are_classes_as_torchvision_has_them(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/2.png", "cat/deep/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(int(name[-5])).save(tmp_path / name)
    views, other = ImageFolderViews(tmp_path), ImageFolder(str(tmp_path))
    assert views.labels is not None
    assert (views.labels.tolist(), views.class_names) == (other.targets, other.classes)
    assert [shade_of(pair.left) for pair in views] == [shade_of(image) for image, _ in other]


def test_a_flat_folder_has_no_classes(tmp_path: Path) -> None:
    picture(1).save(tmp_path / "1.png")
    assert ImageFolderViews(tmp_path).labels is None


@pytest.mark.parametrize(
    ("name", "split", "size", "classes"), [("cifar10", "test", 10_000, 10), ("tiny_imagenet100", "val", 5000, 100)]
)
def test_real_images(shared_data: Path, name: str, split: str, size: int, classes: int) -> None:
    views = TableViews(shared_data / name, split=split, on_error="raise")
    assert views.labels is not None
    assert (len(views), len(views.class_names or [])) == (size, classes)
    assert np.bincount(views.labels).tolist() == [size // classes] * classes
    assert views[1].left.mode == "RGB"


def test_a_sample_is_a_seeded_part_with_its_labels() -> None:
    images = ImageViews(list("abcdefgh"), Labels(np.arange(8) % 3, ["x", "y", "z"]))
    part, again, other = images.sample(5, seed=1), images.sample(5, seed=1), images.sample(5, seed=2)
    drawn = [part.item("left", i) for i in range(5)]
    assert len(set(drawn)) == 5
    assert drawn == [again.item("left", i) for i in range(5)] != [other.item("left", i) for i in range(5)]
    assert [ord(letter) % 97 % 3 for letter in drawn] == part.labels.tolist()
    assert part.class_names == ["x", "y", "z"]
    assert len(images.sample(100)) == 8
