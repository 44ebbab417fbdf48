from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dualenc.data import (
    BeirPairs,
    Corpus,
    ImageFolderPairs,
    ImageFolderViews,
    MinedPairs,
    TablePairs,
    TableViews,
    VectorPairs,
    WebDatasetPairs,
    open_corpus,
    open_pairs,
)
from dualenc.data.corpus import used_items
from dualenc.data.readers import detect as formats
from dualenc.data.readers import tables
from dualenc.data.readers.detect import detect
from dualenc.errors import DualencError
from tests.helpers.make import (
    contents,
    encoded,
    picture,
    shade_of,
    write_beir,
    write_csv,
    write_jsonl,
    write_rows,
)
from tests.helpers.tars import write_tar


def texts(corpus: Corpus) -> dict[str, str]:
    return {name: corpus[i] for i, name in enumerate(corpus.ids)}


@pytest.mark.parametrize(
    ("columns", "documents", "queries"),
    [
        ("question answer", "answer", "question"),
        ("answer question", "answer", "question"),
        ("anchor positive negative", "positive", "anchor"),
        ("sentence1 sentence2", "sentence2", "sentence1"),
        ("query text", "text", "query"),
        ("question text answer", "answer", "question"),
        ("query title text", "text", "query"),
        ("title question answer", "answer", "question"),
        ("text answer", "text", "text"),
        ("question", "question", "question"),
    ],
)
def test_documents_are_the_right_side_of_pairs(
    tmp_path: Path, columns: str, documents: str, queries: str
) -> None:
    names = columns.split()
    path = write_csv(
        tmp_path / "qa.csv", names, [[f"{name} {row}" for name in names] for row in range(2)]
    )
    assert list(open_corpus(path).items) == [f"{documents} 0", f"{documents} 1"]
    assert list(open_corpus(path, part="queries").items) == [f"{queries} 0", f"{queries} 1"]
    if len(names) > 1 and names != ["text", "answer"]:
        assert open_pairs(path)[0][3:5] == (f"{queries} 0", f"{documents} 0")


def test_beir_folders(tmp_path: Path) -> None:
    documents = [{"_id": "a", "title": "T", "text": "x"}, {"_id": "b", "title": "", "text": "y"}]
    beir = write_beir(
        tmp_path / "beir", documents, [{"_id": "q", "text": "why"}], {"train": [("q", "a", 1)]}
    )
    assert (
        texts(open_corpus(beir))
        == texts(open_corpus(beir / "corpus.jsonl"))
        == {"a": "T x", "b": "y"}
    )
    assert texts(open_corpus(beir, part="queries")) == {"q": "why"}
    assert isinstance(open_pairs(beir), BeirPairs)


def test_text_files_and_tables_of_one_column(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one\n\ntwo\n")
    assert texts(open_corpus(tmp_path / "x.txt")) == {"0": "one", "1": "two"}
    assert texts(open_corpus(write_csv(tmp_path / "x.csv", ["thing"], [["a"]]))) == {"0": "a"}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_lists_of_texts_have_numbered_ids(tmp_path: Path, form: str) -> None:
    rows = [{"id": "i", "captions": ["a", "", "b"]}, {"id": "j", "captions": ["c"]}]
    corpus = open_corpus(write_rows(tmp_path, form, rows), text_column="captions")
    assert texts(corpus) == {"i#0": "a", "i#2": "b", "j#0": "c"}


@pytest.mark.parametrize(
    ("ids", "read"),
    [
        (["1", "", "3.0"], ["1", None, "3"]),
        (["1", "2.0"], ["1", "2"]),
        (["1.0", "nan", "2.0"], ["1", None, "2"]),
        (["1.0", "2.0"], ["1.0", "2.0"]),
        (["1.0", "x", "nan"], ["1.0", "x", "nan"]),
    ],
)
def test_whole_numbers_that_pandas_made_floating_are_ids_without_a_fraction(
    tmp_path: Path, ids: list[str], read: list[str | None]
) -> None:
    path = write_csv(tmp_path / "x.csv", ["id", "text"], [[name, f"text {name}"] for name in ids])
    assert open_corpus(path).ids == [name for name in read if name is not None]


@pytest.mark.parametrize("column", ["_id", "title", "label"])
def test_ids_titles_and_labels_are_single_values(tmp_path: Path, column: str) -> None:
    main = {"image": [encoded(picture(1))] * 2} if column == "label" else {"text": ["x", "y"]}
    pq.write_table(pa.table({**main, column: [["a", "b"], ["c", "d"]]}), tmp_path / "x.parquet")
    with pytest.raises(DualencError, match=f"column '{column}' holds lists"):
        open_corpus(tmp_path / "x.parquet")


def test_tables_of_labelled_images(tmp_path: Path) -> None:
    columns = {
        "image": [encoded(picture(s)) for s in (1, 2)],
        "label": ["dog", "cat"],
        "caption": ["one", "two"],
    }
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    corpus = open_corpus(tmp_path / "train.parquet")
    assert (corpus.modality, corpus.labels.tolist(), corpus.class_names) == (
        "image",
        [1, 0],
        ["cat", "dog"],
    )
    assert shade_of(corpus[1]) == 2
    for options in ({"modality": "text"}, {"text_column": "caption"}):
        assert texts(open_corpus(tmp_path / "train.parquet", **options)) == {"0": "one", "1": "two"}  # type: ignore
    assert isinstance(open_pairs(tmp_path / "train.parquet"), TablePairs)


def image_and_caption(path: Path, shade: int, caption: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = Image.registered_extensions().get(path.suffix.lower(), "PNG")
    path.write_bytes(encoded(picture(shade, (64, 64)), kind))
    path.with_suffix(".txt").write_text(caption)


@pytest.mark.parametrize("captions", ["metadata.csv", "captions.jsonl"])
def test_images_may_lie_in_a_subfolder_of_their_captions(tmp_path: Path, captions: str) -> None:
    (tmp_path / captions).write_text(
        "file_name,text\npics/a/1.png,one\n"
        if captions.endswith("csv")
        else '{"image": "pics/a/1.png", "text": "one"}'
    )
    assert detect(tmp_path) == "folder"
    (tmp_path / "pics" / "a").mkdir(parents=True)
    picture(5).save(tmp_path / "pics" / "a" / "1.png")
    assert contents(open_pairs(tmp_path)) == [(5, "one")]
    assert open_corpus(tmp_path).modality == "image"
    (tmp_path / "train.csv").write_text("text\none\n")
    assert detect(tmp_path) == "folder"


@pytest.mark.parametrize("beside", ["README.txt", "__MACOSX/test/._1.png"])
def test_what_lies_beside_folders_of_images_does_not_matter(tmp_path: Path, beside: str) -> None:
    for shade, split in enumerate(["train", "test"]):
        (tmp_path / split).mkdir()
        picture(shade).save(tmp_path / split / "1.png")
    (tmp_path / beside).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / beside).write_text("notes")
    assert [shade_of(image) for image in open_corpus(tmp_path, split="test")] == [1]
    assert [shade_of(view.left) for view in ImageFolderViews(tmp_path)] == [0]


@pytest.mark.parametrize("table", ["noisy_labels.csv", "00000.parquet", "00000_stats.json"])
def test_tables_beside_folders_of_images_do_not_matter_unless_they_are_splits(
    tmp_path: Path, table: str
) -> None:
    for shade, split in enumerate(["train", "val"]):
        (tmp_path / split).mkdir()
        picture(shade).save(tmp_path / split / "1.png")
    (tmp_path / table).write_text("path,label\n")
    assert [shade_of(image) for image in open_corpus(tmp_path, split="val")] == [1]
    (tmp_path / "validation-00000.csv").write_text("text\none\n")
    assert detect(tmp_path) == "folder"


def test_a_folder_without_images_beside_splits_is_no_class(tmp_path: Path) -> None:
    for shade, split in enumerate(["train", "val"]):
        (tmp_path / split / "cats").mkdir(parents=True)
        picture(shade).save(tmp_path / split / "cats" / "1.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "all.json").write_text("{}")
    assert [shade_of(view.left) for view in ImageFolderViews(tmp_path)] == [0]
    picture(9).save(tmp_path / "annotations" / "1.png")
    assert [shade_of(view.left) for view in ImageFolderViews(tmp_path)] == [9, 0, 1], (
        "a class like the others"
    )


def test_the_columns_of_open_clip_are_found_from_either(tmp_path: Path) -> None:
    picture(5).save(tmp_path / "1.png")
    (tmp_path / "cc.tsv").write_text("filepath\ttitle\n1.png\tone\n")
    for column in ({}, {"right_column": "title"}, {"left_column": "filepath"}):
        assert contents(open_pairs(tmp_path / "cc.tsv", **column)) == [(5, "one")]


def test_a_label_column_of_a_folder_without_classes_is_an_error(tmp_path: Path) -> None:
    picture(5).save(tmp_path / "1.png")
    with pytest.raises(
        DualencError,
        match="not in class folders, and a folder lacks columns; give the table that has 'kind'",
    ):
        open_corpus(tmp_path, label_column="kind")


@pytest.mark.parametrize("suffix", [".jfif", ".JPE", ".jp2", ".pgm", ".tif"])
def test_images_of_every_suffix_that_is_decoded_are_seen(tmp_path: Path, suffix: str) -> None:
    name = f"photo{suffix}"
    folder = tmp_path / "folder"
    image_and_caption(folder / name, 100, "one")
    assert open_corpus(folder).ids == [name]
    assert [pair.right for pair in ImageFolderPairs(folder)] == ["one"]
    data = (folder / name).read_bytes()
    tar = write_tar(tmp_path / "x.tar", [(f"1{suffix}", data), ("1.txt", b"one")])
    assert open_pairs(tar)[0].left.size == open_corpus(tar)[0].size == (64, 64)
    assert texts(open_corpus(tar, modality="text")) == {"1": "one"}
    assert isinstance(open_pairs(tmp_path / "x.tar"), WebDatasetPairs)


@pytest.mark.parametrize(("on_disk", "in_table"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_of_file_names_may_be_composed_otherwise(
    tmp_path: Path, on_disk: str, in_table: str
) -> None:
    folder = tmp_path / "folder"
    image_and_caption(folder / unicodedata.normalize(on_disk, "café.png"), 7, "unused")
    name = unicodedata.normalize(in_table, "café.png")
    (folder / unicodedata.normalize(on_disk, "café.txt")).unlink()
    (folder / Path(name).with_suffix(".txt")).write_text("beside")
    assert [(shade_of(pair.left), pair.right) for pair in ImageFolderPairs(folder)] == [
        (7, "beside")
    ]
    for file in ("metadata.csv", "table.csv"):
        write_csv(folder / file, ["image", "caption"], [[name, "one"]])
    for pairs in (ImageFolderPairs(folder), TablePairs(folder / "table.csv", "image", "caption")):
        assert [(shade_of(pair.left), pair.right, pairs.skipped) for pair in pairs] == [
            (7, "one", 0)
        ]


def test_folders_named_like_splits_are_splits_and_no_classes(tmp_path: Path) -> None:
    for number, split in enumerate(["train", "val"]):
        for shade, name in enumerate(["cat", "dog"]):
            image_and_caption(
                tmp_path / split / name / f"{number}.png", 10 * number + shade, f"{split} {name}"
            )
    for corpus in (open_corpus(tmp_path), open_corpus(tmp_path, split="train")):
        assert (corpus.ids, corpus.class_names) == (["cat/0.png", "dog/0.png"], ["cat", "dog"])
        assert corpus.labels.tolist() == [0, 1]
    assert [shade_of(image) for image in open_corpus(tmp_path, split="val")] == [10, 11]
    assert ImageFolderViews(tmp_path).class_names == ["cat", "dog"]
    assert [pair.right for pair in open_pairs(tmp_path, split="val")] == ["val cat", "val dog"]
    assert [pair.right for pair in ImageFolderPairs(tmp_path)] == ["train cat", "train dog"]
    for read in (open_corpus, open_pairs):
        with pytest.raises(DualencError, match="no split 'test'; there are: train, val"):
            read(tmp_path, split="test")
    # Among other folders `train` is a class.
    image_and_caption(tmp_path / "plane" / "9.png", 9, "plane")
    assert open_corpus(tmp_path).class_names == ["plane", "train", "val"]


@pytest.mark.parametrize(
    ("header", "role"), [(["file_name", "Bildtext"], "caption"), (["Bild", "caption"], "file_name")]
)
def test_columns_of_captioned_images_that_are_not_known_must_be_renamed(
    tmp_path: Path, header: list[str], role: str
) -> None:
    """`ImageFolderPairs` has no argument that could name them."""
    folder = tmp_path / "folder"
    image_and_caption(folder / "1.png", 7, "unused")
    table = write_csv(folder / "captions.csv", header, [["1.png", "one"]])
    message = (
        f"{table}: it is unclear which column is {role}; rename it to {role}, or read the table "
    )
    with pytest.raises(DualencError, match=f"{message}with TablePairs.*{', '.join(header)}"):
        ImageFolderPairs(folder)
    assert TablePairs(table, *header, left_modality="image")[0].right == "one"


def test_columns_of_pairs_by_usual_and_by_given_names(tmp_path: Path) -> None:
    mined = write_jsonl(tmp_path / "mined.jsonl", [{"query": "q", "pos": ["p"], "neg": []}])
    assert isinstance(open_pairs(mined), MinedPairs)
    path = write_csv(tmp_path / "x.csv", ["question", "answer", "note"], [["q", "a", "n"]])
    assert open_pairs(path)[0].right == "a"
    assert open_pairs(path, right_column="note")[0].right == "n"
    assert texts(open_corpus(path, text_column="note", id_column="answer")) == {"a": "n"}


@pytest.mark.parametrize(
    ("read", "options", "message"),
    [
        (open_pairs, {}, r"left_column; name it \(--left-column\) \(columns: first, second\)"),
        (open_corpus, {}, "name text_column or image_column"),
        (open_corpus, {"modality": "text"}, "name text_column"),
        (
            open_corpus,
            {"on_error": "ignore"},
            "on_error: 'ignore' is not a valid choice; choose skip or raise",
        ),
        (open_corpus, {"columns": ["a b"]}, "letters, digits and _"),
    ],
)
def test_what_has_to_be_named(tmp_path: Path, read: Any, options: dict, message: str) -> None:
    path = write_csv(tmp_path / "x.csv", ["first", "second"], [["a", "b"]])
    with pytest.raises(DualencError, match=message):
        read(path, **options)


@pytest.mark.parametrize(
    "url", ["s3://b/x.jsonl", "https://me:secret@h/x.jsonl?key=secret", "hf://u/x.tar", "zip::f"]
)
@pytest.mark.parametrize(
    "read", [open_corpus, open_pairs, WebDatasetPairs, BeirPairs, VectorPairs, TableViews]
)
def test_urls_are_refused_without_their_keys(read: Any, url: str) -> None:
    """A URL ends in one line that says to download the files, and repeats no key."""
    arguments = [url, url] if read is VectorPairs else [url]
    with pytest.raises(DualencError, match="URLs are not supported; download the files") as error:
        read(*arguments)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("read", [open_corpus, open_pairs])
def test_a_folder_is_recognized_and_examined_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    """Its files are listed and their first rows examined, which takes a while on a network drive.
    Then the columns are read."""
    file = tmp_path / "train.csv"
    file.write_text("query,document\na,b\nc,d\n")
    recognize = formats._kind_of_folder
    folders = []
    monkeypatch.setattr(
        formats, "_kind_of_folder", lambda folder: folders.append(folder) or recognize(folder)
    )
    read_records = tables.read_records
    files = []
    monkeypatch.setattr(
        tables, "read_records", lambda path, *rest: files.append(path) or read_records(path, *rest)
    )
    assert len(read(tmp_path)) == 2
    assert folders == [tmp_path]
    assert files == [file, file]


def test_snippets_are_in_one_line(tmp_path: Path) -> None:
    corpus = Corpus(["a", "b"], ["first\n  text", "x " * 500])
    assert (len(corpus), corpus[0], corpus.text(0)) == (2, "first\n  text", "first text")
    assert len(corpus.text(1)) <= 240
    assert corpus.text(1).endswith("x…")
    assert Corpus(["a"], [picture(3)], "image").text(0) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": ["a"], "items": ["x", "y"]}, "ids has 1 rows but there are 2 items"),
        ({"ids": ["a", "b", "a"], "items": ["x", "y", "z"]}, r"'a' is a duplicate \(2 times\)"),
        ({"ids": ["a"], "items": ["x"], "labels": [0, 1]}, "labels has 2 rows for 1 items"),
    ],
)
def test_wrong_arguments_of_a_corpus(arguments: dict, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        Corpus(**arguments)


def test_every_reader_takes_a_split(tmp_path: Path) -> None:
    for split, count in (("train", 9), ("test", 2)):
        names = [f"q{i}" for i in range(count)]
        columns = {
            "query": names,
            "document": names,
            "vector": np.eye(count, dtype=np.float32).tolist(),
        }
        columns["image"] = [encoded(picture(20 * i)) for i in range(count)]
        (tmp_path / "rows").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "rows" / f"{split}.parquet")
        (tmp_path / "mined").mkdir(exist_ok=True)
        mined = [{"query": name, "pos": [name], "neg": ["no"]} for name in names]
        write_jsonl(tmp_path / "mined" / f"{split}.jsonl", mined)
    path = tmp_path / "rows"
    readers: list[Any] = [
        lambda split: open_pairs(path, split=split),
        lambda split: open_pairs(path, "vector", "document", split=split),
        lambda split: open_corpus(path, text_column="document", split=split),
        lambda split: open_corpus(path, vector_column="vector", split=split),
        lambda split: open_corpus(path, split=split),
        lambda split: TableViews(path, split=split),
        lambda split: open_pairs(tmp_path / "mined", split=split),
    ]
    for reader in readers:
        assert (len(reader("train")), len(reader("test"))) == (9, 2)
        with pytest.raises(DualencError, match=r"no split 'train\[:2\]'; there are: test, train"):
            reader("train[:2]")


def test_what_has_no_splits_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.eye(4, dtype=np.float32))
    (tmp_path / "one.tar").touch()
    for name, reader in (
        ("vectors.npy", open_corpus),
        ("one.tar", open_corpus),
        ("one.tar", open_pairs),
    ):
        with pytest.raises(DualencError, match="no split 'test'; there are: train"):
            reader(tmp_path / name, split="test")


LONG_FORM = [(shade, f"caption {i} of {shade}") for shade in (1, 2, 3) for i in range(2)]
"""One row per caption: each image comes twice."""


def write_long_form(folder: Path, kind: str) -> Path:
    contents = [encoded(picture(shade)) for shade, _ in LONG_FORM]
    captions = [caption for _, caption in LONG_FORM]
    if "path" in kind:
        for data, (shade, _) in zip(contents, LONG_FORM):
            (folder / f"{shade}.png").write_bytes(data)
        written = [f"{'./' if i % 2 else ''}{shade}.png" for i, (shade, _) in enumerate(LONG_FORM)]
        table = write_csv(
            folder / f"{kind.split()[-1]}.csv", ["image", "caption"], zip(written, captions)
        )
        return folder if kind.endswith("metadata") else table
    records = [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(contents)]
    pq.write_table(
        pa.table({"image": contents if kind == "bytes" else records, "caption": captions}),
        folder / "x.parquet",
    )
    return folder / "x.parquet"


@pytest.mark.parametrize("kind", ["bytes", "records", "paths", "paths metadata"])
def test_images_on_several_rows_are_one_image(tmp_path: Path, kind: str) -> None:
    pairs = open_pairs(write_long_form(tmp_path, kind))
    assert (pairs.num_left, pairs.num_right) == (3, 6)
    assert pairs.left_id.tolist() == [0, 0, 1, 1, 2, 2]
    assert [shade_of(pair.left) for pair in pairs] == [1, 1, 2, 2, 3, 3]
    images, left_rows = used_items(pairs, "left")
    assert [shade_of(images[row]) for row in left_rows] == [1, 1, 2, 2, 3, 3]
