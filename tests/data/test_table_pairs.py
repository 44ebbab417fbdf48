from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import PairDataset, TablePairs, TableViews, open_corpus, open_pairs
from dualenc.data import tables as arrow_cache
from dualenc.errors import BadSample, DualencError

from .make import encoded, picture, shade_of, write_csv, write_jsonl

WORD = st.text("ab ", max_size=3)
LISTS = st.lists(WORD, max_size=3)
ROWS = st.lists(st.fixed_dictionaries({"q": WORD, "d": LISTS, "n": LISTS}), max_size=8)


def expected(rows: list[dict]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Every usable (left, right, negatives), by loops."""
    positive = {(row["q"], d) for row in rows for d in row["d"]}
    pairs = []
    for row in rows:
        if row["q"].strip():
            negatives = tuple(n for n in row["n"] if n.strip() and (row["q"], n) not in positive)
            pairs += [(row["q"], d, negatives) for d in row["d"] if d.strip()]
    return pairs


def consistent(pairs: PairDataset) -> None:
    """Ids are dense, and one id is one item."""
    for side, ids in (("left", pairs.left_id), ("right", pairs.right_id)):
        number = pairs.num_left if side == "left" else pairs.num_right
        assert 0 <= ids.min() <= ids.max() < number
        items = [pairs.item(side, i) for i in range(number)]  # type: ignore[arg-type]
        assert len(set(items)) == number
    assert [(p.left, p.right) for p in pairs] == [
        (pairs.item("left", p.left_id), pairs.item("right", p.right_id)) for p in pairs
    ]
    assert all(p.negatives == tuple(pairs.item("right", i) for i in p.negative_ids) for p in pairs)


@given(ROWS)
def test_pairs_are_those_of_a_loop_and_equal_texts_share_ids(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict]
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("pairs") / "x.jsonl", rows)
    pairs = expected(rows)
    if not pairs:
        with pytest.raises(DualencError, match="no usable pair"):
            TablePairs(path, "q", "d", "n")
        return
    read = TablePairs(path, "q", "d", "n")
    assert [(p.left, p.right, p.negatives) for p in read] == pairs
    consistent(read)


@given(ROWS)
def test_without_deduplication_rows_and_list_entries_have_ids_of_their_own(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict]
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("pairs") / "x.jsonl", rows)
    pairs = expected(rows)
    if pairs:
        read = TablePairs(path, "q", "d", deduplicate=False)
        assert [(p.left, p.right) for p in read] == [(q, d) for q, d, _ in pairs]
        assert read.right_id.tolist() == list(range(len(pairs)))
        used = [row for row in rows if row["q"].strip() and any(d.strip() for d in row["d"])]
        assert read.num_left == len(used)


def test_the_same_from_jsonl_and_parquet_and_memory_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": f"q{i % 7}", "d": [f"d{i % 5}", f"d{i}"], "n": [f"d{i + 50}", ""]} for i in range(40)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    write_jsonl(tmp_path / "x.jsonl", rows)
    small = TablePairs(tmp_path / "x.jsonl", "q", "d", "n")
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    for pairs in (TablePairs(tmp_path / "x.jsonl", "q", "d", "n"), TablePairs(tmp_path / "x.parquet", "q", "d", "n")):
        assert list(pairs) == list(small)
        assert pairs.skipped == small.skipped == 40


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_table_of_image_paths_and_captions(tmp_path: Path, suffix: str) -> None:
    for shade in (10, 20):
        picture(shade).save(tmp_path / f"{shade}.png")
    rows = [["10.png", "ten"], ["20.png", "twenty"], ["10.png", "a ten"]]
    path = write_csv(tmp_path / f"x{suffix}", ["image", "caption"], rows, "," if suffix == ".csv" else "\t")
    pairs = TablePairs(path, "image", "caption")
    assert (pairs.left_modality, pairs.right_modality) == ("image", "text")
    assert [(shade_of(p.left), p.right) for p in pairs] == [(10, "ten"), (20, "twenty"), (10, "a ten")]
    assert pairs.left_id.tolist() == [0, 1, 0]
    assert pairs.positives("left", np.array([0])).tolist() == [[0, 2]]


def test_images_in_the_table_and_lists_of_captions(tmp_path: Path) -> None:
    features = datasets.Features(
        image=datasets.Image(), captions=datasets.List(datasets.Value("string")), n=datasets.Value("int32")
    )
    images = [{"bytes": encoded(picture(s)), "path": None} for s in (1, 2)]
    rows = {"image": images, "captions": [["a", "b"], ["c"]], "n": [7, 8]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "x.parquet")
    pairs = TablePairs(tmp_path / "x.parquet", "image", "captions")
    assert [(shade_of(p.left), p.right, p.left_id) for p in pairs] == [(1, "a", 0), (1, "b", 0), (2, "c", 1)]
    assert TablePairs(tmp_path / "x.parquet", "image", "n")[1].right == "8"  # numbers are spelled out


def test_raw_file_contents_are_images(tmp_path: Path) -> None:
    rows = {"image": [encoded(picture(9))], "caption": ["nine"]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "x.parquet")
    assert shade_of(TablePairs(tmp_path / "x.parquet", "image", "caption")[0].left) == 9


def test_paths_can_start_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    picture(3).save(tmp_path / "pictures" / "3.png")
    path = write_csv(tmp_path / "x.csv", ["image", "caption"], [["3.png", "three"]])
    assert shade_of(TablePairs(path, "image", "caption", image_root=tmp_path / "pictures")[0].left) == 3
    with pytest.raises(BadSample, match=r"3\.png: image cannot be read"):
        TablePairs(path, "image", "caption")[0]


def test_max_negatives_keeps_the_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"q": "q", "d": "d", "n": ["", "n0", "n1", "n2"]}])
    assert TablePairs(path, "q", "d", "n", max_negatives=2)[0].negatives == ("n0", "n1")


def test_limit_and_ids_are_stable_when_rows_are_added(tmp_path: Path) -> None:
    rows = [{"q": f"q{i % 3}", "d": f"d{i % 4}"} for i in range(12)]
    short = TablePairs(write_jsonl(tmp_path / "short.jsonl", rows[:6]), "q", "d")
    long = TablePairs(write_jsonl(tmp_path / "long.jsonl", rows), "q", "d")
    limited = TablePairs(tmp_path / "long.jsonl", "q", "d", limit=6)
    assert list(short) == list(limited) == list(long)[:6]


def test_bad_rows_are_counted_and_reported_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"q": "q", "d": "d"}, {"q": " ", "d": "d"}, "{broken", {"q": "q", "d": None}, {"q": "q", "d": ["", "e"]}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with caplog.at_level(logging.WARNING, logger="dualenc.data"):
        pairs = TablePairs(path, "q", "d")
    assert [(p.left, p.right) for p in pairs] == [("q", "d"), ("q", "e")]
    assert pairs.skipped == 4
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: skipped 4 bad samples: 1 malformed JSON line (first: {path}:3), "
        f"1 no text in column 'q' (first: {path}:2), 2 no text in column 'd' (first: {path}:4)"
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "", "d": "d", "n": "n"}, "x.jsonl:2: no text in column 'q'"),
        ({"q": "q", "d": [], "n": "n"}, "x.jsonl:2: no text in column 'd'"),
        ({"q": "q", "d": "d", "n": [""]}, "x.jsonl:2: no text in column 'n'"),
        ({"q": "q", "d": "d", "n": "d"}, "x.jsonl:2: negative that is also a positive"),
    ],
)
def test_on_error_raise_names_the_first_bad_row(tmp_path: Path, row: dict, message: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"q": "q0", "d": "d0", "n": "n0"}, row])
    with pytest.raises(BadSample) as error:
        TablePairs(path, "q", "d", "n", on_error="raise")
    assert message in str(error.value)
    assert "on_error=skip" in str(error.value)
    assert "\n" not in str(error.value)


def test_lists_belong_to_the_right(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"q": "q", "d": ["a"]}]).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(DualencError, match="column 'd' holds lists; name it as right_column"):
        TablePairs(tmp_path / "x.parquet", "d", "q")


def test_on_error_has_two_choices(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="on_error: 'ignore' is not a choice; take skip or raise"):
        TablePairs(tmp_path, "q", "d", on_error="ignore")  # type: ignore[arg-type]


def _rights(pickled: bytes) -> list[str]:
    return [pair.right for pair in pickle.loads(pickled)]


@pytest.mark.slow
def test_pairs_are_read_in_spawned_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    pairs = TablePairs(write_jsonl(tmp_path / "x.jsonl", [{"q": "q", "d": ["a", "b"]}]), "q", "d")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_rights, (pickle.dumps(pairs),)) == ["a", "b"]


def test_flickr8k_opens_with_two_column_names(shared_data: Path) -> None:
    pairs = TablePairs(shared_data / "flickr8k_112" / "test.parquet", "image", "captions", deduplicate=False)
    assert (len(pairs), pairs.num_left, pairs.num_right, pairs.skipped) == (5000, 1000, 5000, 0)
    assert pairs[7].left.size == (112, 112)
    assert pairs.positives("left", np.array([1])).tolist() == [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize("how", ["dots", "absolute", "link to a file", "link to a folder", "device", "pipe"])
def test_images_of_a_table_lie_in_its_folder_unless_allowed(tmp_path: Path, how: str) -> None:
    outside, folder = tmp_path / "secret.png", tmp_path / "data"
    folder.mkdir()
    picture(5).save(outside)
    picture(6).save(folder / "in.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    paths = {"dots": "../secret.png", "absolute": str(outside), "link to a file": "link.png"}
    paths |= {"link to a folder": "up/secret.png", "device": "/dev/zero", "pipe": "pipe"}
    path = write_csv(folder / "x.csv", ["image", "text"], [["in.png", "a"], [paths[how], "b"]])
    for data in (TablePairs(path, "image", "text", left_modality="image"), open_pairs(path)):
        assert shade_of(data[0].left) == 6
        with pytest.raises(BadSample, match=r"(outside of the folder .* allow_outside=True|not a file)") as error:
            data[1]
        assert "x.csv:3" in str(error.value)
        data.identity()  # does not read it either
    trusted = TablePairs(path, "image", "text", left_modality="image", allow_outside=True)
    if how in ("device", "pipe"):
        with pytest.raises(BadSample, match="a device, pipe or socket, not a file"):
            trusted[1]
    else:
        assert shade_of(trusted[1].left) == 5
    for reader, options in ((TableViews, {}), (open_corpus, {"modality": "image"})):
        with pytest.raises(BadSample, match=r"outside of the folder|not a file"):
            reader(path, **options)[1]
    if how == "absolute":
        wider = TablePairs(path, "image", "text", left_modality="image", image_root=tmp_path)
        assert shade_of(wider[1].left) == 5


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("query", pa.array([{"a": "x"}])),
        ("query", pa.array([b"x"])),
        ("query", pa.array([["x"]])),
        ("document", pa.array([{"a": "x"}])),
        ("document", pa.array([b"x"], pa.large_binary())),
        ("document", pa.array([[["x"]]])),
        ("document", pa.array([[b"x"]])),
        ("negative", pa.array([[{"a": 1}]])),
    ],
)
def test_columns_of_a_kind_that_is_no_text_are_told(tmp_path: Path, column: str, values: pa.Array) -> None:
    good = {"query": pa.array(["q"]), "document": pa.array(["d"]), "negative": pa.array(["n"])}
    pq.write_table(pa.table({**good, column: values}), tmp_path / "x.parquet")
    with pytest.raises(DualencError, match=f"column '{column}' holds ") as error:
        TablePairs(tmp_path / "x.parquet", *good, left_modality="text", right_modality="text")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values", [pa.array([1]), pa.array([{"a": b"x"}]), pa.array([[b"x"]]), pa.array([{"bytes": 1}])]
)
def test_columns_of_a_kind_that_is_no_image_are_told(tmp_path: Path, values: pa.Array) -> None:
    pq.write_table(pa.table({"image": values, "text": ["x"]}), tmp_path / "x.parquet")
    path = tmp_path / "x.parquet"
    for read in (
        lambda: TableViews(path),
        lambda: open_corpus(path),
        lambda: TablePairs(path, "image", "text", left_modality="image"),
    ):
        with pytest.raises(DualencError, match="column 'image' holds"):
            read()


@pytest.mark.parametrize("column", ["_id", "title", "label"])
def test_ids_titles_and_labels_are_single_values(tmp_path: Path, column: str) -> None:
    main = {"image": [encoded(picture(1))] * 2} if column == "label" else {"text": ["x", "y"]}
    pq.write_table(pa.table({**main, column: [["a", "b"], ["c", "d"]]}), tmp_path / "x.parquet")
    with pytest.raises(DualencError, match=f"column '{column}' holds lists"):
        open_corpus(tmp_path / "x.parquet")


def test_labels_that_are_keys_are_numbered_as_names(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [encoded(picture(1))] * 3, "label": [10**12, 5, 10**12]}), tmp_path / "x.parquet")
    data = TableViews(tmp_path / "x.parquet")
    assert data.labels.tolist() == [0, 1, 0]
    assert data.class_names == ["1000000000000", "5"]


def test_images_in_a_table_that_do_not_decode_are_named_by_their_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [encoded(picture(1)), b"no image"]}), tmp_path / "x.parquet")
    with pytest.raises(BadSample, match=r"x\.parquet row 1, column 'image': image cannot be decoded") as error:
        TableViews(tmp_path / "x.parquet")[1]
    assert "BytesIO" not in str(error.value)


def test_strings_of_a_parquet_file_that_are_not_utf8_are_bad_samples(tmp_path: Path) -> None:
    broken = pa.array([b"one", b"caf\xe9"]).view(pa.string())
    pq.write_table(pa.table({"text": broken, "_id": broken}), tmp_path / "x.parquet")
    corpus = open_corpus(tmp_path / "x.parquet")
    assert corpus.ids == ["one", r"caf\xe9"]
    assert corpus[0] == "one"
    with pytest.raises(BadSample, match="column 'text', value 1: not UTF-8 text"):
        corpus[1]
    assert corpus.identity() == open_corpus(tmp_path / "x.parquet").identity()
    with pytest.raises(BadSample, match="not UTF-8 text"):
        TablePairs(tmp_path / "x.parquet", "text", "_id")


def test_decimals_and_dates_are_spelled_out(tmp_path: Path) -> None:
    columns = {"text": pa.array([Decimal("1.50"), None]), "_id": pa.array([date(2020, 1, 2), date(2021, 1, 2)])}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    corpus = open_corpus(tmp_path / "x.parquet")
    assert (corpus.ids, corpus[0], corpus.skipped) == (["2020-01-02"], "1.50", 1)
