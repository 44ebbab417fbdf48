from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest

from dualenc.data import ImageFolderPairs
from dualenc.errors import BadSample, DualencError

from .make import picture, shade_of, write_csv, write_jsonl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shade in (1, 2, 3):
        (tmp_path / "sub").mkdir(exist_ok=True)
        picture(shade).save(tmp_path / "sub" / f"{shade}.png")
    return tmp_path


def contents(pairs: ImageFolderPairs) -> list[tuple[int, str]]:
    return [(shade_of(p.left), p.right) for p in pairs]


def test_a_table_of_captions(folder: Path) -> None:
    rows = [["sub/2.png", "two"], ["sub/1.png", "one"], ["sub/2.png", "a two"]]
    write_csv(folder / "captions.csv", ["image", "caption"], rows)
    pairs = ImageFolderPairs(folder)
    assert contents(pairs) == [(2, "two"), (1, "one"), (2, "a two")]
    assert pairs.positives("left", np.array([0])).tolist() == [[0, 2]]
    assert (pairs.left_modality, pairs.right_modality) == ("image", "text")


def test_the_layout_of_datasets_imagefolder(folder: Path) -> None:
    records = [{"file_name": f"sub/{i}.png", "text": f"number {i}"} for i in (1, 2, 3)]
    write_jsonl(folder / "metadata.jsonl", records)
    other = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train")
    assert contents(ImageFolderPairs(folder)) == [(shade_of(row["image"]), row["text"]) for row in other]


def test_lists_of_captions_in_a_table_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    table = write_jsonl(tmp_path_factory.mktemp("t") / "x.jsonl", [{"photo": "1.png", "says": ["one", "uno"]}])
    pairs = ImageFolderPairs(folder / "sub", table, image_column="photo", caption_column="says")
    assert contents(pairs) == [(1, "one"), (1, "uno")]


def test_text_files_beside_the_images(folder: Path) -> None:
    for shade, text in ((1, "one\n\nuno\n"), (2, "two"), (3, "uno")):
        (folder / "sub" / f"{shade}.txt").write_text(text)
    pairs = ImageFolderPairs(folder)
    assert contents(pairs) == [(1, "one"), (1, "uno"), (2, "two"), (3, "uno")]
    assert pairs.right_id.tolist() == [0, 1, 2, 1]
    assert ImageFolderPairs(folder, deduplicate=False).right_id.tolist() == [0, 1, 2, 3]


def test_images_without_a_text_file_are_skipped(folder: Path) -> None:
    (folder / "sub" / "2.txt").write_text("two")
    pairs = ImageFolderPairs(folder)
    assert (contents(pairs), pairs.skipped) == ([(2, "two")], 2)
    with pytest.raises(BadSample, match=r"1\.png: image without a caption; write one to 1\.txt"):
        ImageFolderPairs(folder, on_error="raise")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["sub/9.png", "nine"], "captions.csv:3: image that is not in the folder; 'sub/9.png' is not in"),
        (["sub/2.png", " "], "captions.csv:3: no text in column 'caption'"),
        (["", "two"], "captions.csv:3: no image in column 'image'"),
    ],
)
def test_bad_rows_are_named_or_skipped(folder: Path, row: list[str], message: str) -> None:
    write_csv(folder / "captions.csv", ["image", "caption"], [["sub/1.png", "one"], row, ["sub/3.png", "three"]])
    with pytest.raises(BadSample) as error:
        ImageFolderPairs(folder, on_error="raise")
    assert message in str(error.value)
    pairs = ImageFolderPairs(folder)
    assert (contents(pairs), pairs.skipped) == ([(1, "one"), (3, "three")], 1)


def test_no_captions_at_all(folder: Path) -> None:
    with pytest.raises(DualencError, match="no usable image with a caption: 3 image without a caption"):
        ImageFolderPairs(folder)


def test_unknown_columns_are_told(folder: Path) -> None:
    write_csv(folder / "captions.csv", ["a", "b"], [["sub/1.png", "one"]])
    with pytest.raises(DualencError, match="none of the columns a, b is known; name one by image_column="):
        ImageFolderPairs(folder)


def test_captions_that_are_not_utf8_are_named_or_left_out(folder: Path) -> None:
    for shade in (1, 2, 3):
        (folder / "sub" / f"{shade}.txt").write_bytes(b"one\ncaf\xe9\n")
    assert [p.right for p in ImageFolderPairs(folder)] == ["one"] * 3
    with pytest.raises(BadSample, match=r"1\.txt:2: line that is not UTF-8"):
        ImageFolderPairs(folder, on_error="raise")


def test_a_table_of_captions_must_name_files(folder: Path) -> None:
    data = datasets.Dataset.from_dict({"image": [b"contents"], "caption": ["x"]})
    data.to_parquet(folder / "captions.parquet")
    with pytest.raises(DualencError, match="column 'image' holds binary, where texts are needed"):
        ImageFolderPairs(folder)
