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
from torchvision.datasets import ImageFolder

from dualenc.data import (
    ImageFolderPairs,
    ImageFolderViews,
    ImageViews,
    MinedPairs,
    PairDataset,
    TablePairs,
    TableViews,
    open_corpus,
    open_pairs,
)
from dualenc.data import cache as arrow_cache
from dualenc.data.labels import Labels
from dualenc.errors import BadSample, DualencError

from .make import encoded, picture, rights_in, shade_of, write_csv, write_jsonl

WORD = st.text("ab ", max_size=3)
LISTS = st.lists(WORD, max_size=3)
ROWS = st.lists(st.fixed_dictionaries({"q": WORD, "d": LISTS, "n": LISTS}), max_size=8)


def expected(rows: list[dict]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Every usable (left, right, negatives), by loops."""
    positive = {(row["q"], d) for row in rows for d in row["d"]}
    pairs = []
    for row in rows:
        if row["q"].strip():
            # A repeated negative counts once.
            negatives = tuple(dict.fromkeys(n for n in row["n"] if n.strip() and (row["q"], n) not in positive))
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


@pytest.mark.slow
@given(ROWS)
def test_pairs_are_those_of_a_loop_and_equal_texts_share_ids(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict]
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("pairs") / "x.jsonl", rows)
    pairs = expected(rows)
    if not pairs:
        with pytest.raises(DualencError, match=r"no usable (pair|record)"):
            TablePairs(path, "q", "d", "n")
        return
    read = TablePairs(path, "q", "d", "n")
    assert [(p.left, p.right, p.negatives) for p in read] == pairs
    consistent(read)


@pytest.mark.slow
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


def test_max_negatives_keeps_the_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"q": "q", "d": "d", "n": ["", "n0", "n1", "n2"]}])
    assert TablePairs(path, "q", "d", "n", max_negatives=2)[0].negatives == ("n0", "n1")


def test_ids_are_stable_when_rows_are_added(tmp_path: Path) -> None:
    rows = [{"q": f"q{i % 3}", "d": f"d{i % 4}"} for i in range(12)]
    short = TablePairs(write_jsonl(tmp_path / "short.jsonl", rows[:6]), "q", "d")
    long = TablePairs(write_jsonl(tmp_path / "long.jsonl", rows), "q", "d")
    limited = TablePairs(tmp_path / "long.jsonl", "q", "d", split="train[:6]")
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


@pytest.mark.slow
def test_pairs_are_read_in_spawned_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    pairs = TablePairs(write_jsonl(tmp_path / "x.jsonl", [{"q": "q", "d": ["a", "b"]}]), "q", "d")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(rights_in, (pickle.dumps(pairs),)) == ["a", "b"]


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
        with pytest.raises(BadSample, match="not a file"):
            trusted[1]
    else:
        assert shade_of(trusted[1].left) == 5
    for reader, options in ((TableViews, {}), (open_corpus, {"modality": "image"})):
        with pytest.raises(BadSample, match=r"outside of the folder|not a file"):
            reader(path, **options)[1]


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


@pytest.mark.parametrize("values", [pa.array([1]), pa.array([{"a": b"x"}]), pa.array([{"bytes": 1}])])
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


def test_decimals_and_dates_are_spelled_out(tmp_path: Path) -> None:
    columns = {"text": pa.array([Decimal("1.50"), None]), "_id": pa.array([date(2020, 1, 2), date(2021, 1, 2)])}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    corpus = open_corpus(tmp_path / "x.parquet")
    assert (corpus.ids, corpus[0], corpus.skipped) == (["2020-01-02"], "1.50", 1)


def flag(query: str, pos: list[str], neg: list[str]) -> dict:
    """A row as FlagEmbedding's mining script writes it."""
    return {"query": query, "pos": pos, "neg": neg, "pos_scores": [0.9] * len(pos), "prompt": "", "type": "normal"}


def tevatron(query: str, pos: list[str], neg: list[str]) -> dict:
    """A row as Tevatron writes it; texts "title|text"."""
    passage = [
        [{"docid": t, "title": t.partition("|")[0], "text": t.partition("|")[2]} for t in ts] for ts in (pos, neg)
    ]
    return {"query_id": "7", "query": query, "positive_passages": passage[0], "negative_passages": passage[1]}


def test_flag_embedding(tmp_path: Path) -> None:
    rows = [flag("q0", ["p0", "p1"], ["n0", "n1"]), flag("q1", ["n0"], ["p0", "n2"])]
    pairs = MinedPairs(write_jsonl(tmp_path / "x.jsonl", rows))
    assert [(p.left, p.right, p.negatives) for p in pairs] == [
        ("q0", "p0", ("n0", "n1")),
        ("q0", "p1", ("n0", "n1")),
        ("q1", "n0", ("p0", "n2")),
    ]
    # One query's positive is another's negative: the same item, whatever its role.
    assert pairs[2].right_id == pairs[0].negative_ids[0]
    assert pairs[2].negative_ids[0] == pairs[0].right_id
    assert (pairs.num_left, pairs.num_right) == (2, 5)


@pytest.mark.parametrize(("titles", "texts"), [(True, ("T one", "U two")), (False, ("one", "two"))])
def test_tevatron(tmp_path: Path, titles: bool, texts: tuple[str, str]) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [tevatron("q", ["T|one"], ["U|two"])])
    pair = MinedPairs(path, titles=titles)[0]
    assert (pair.left, pair.right, *pair.negatives) == ("q", *texts)


def test_both_layouts_read_alike(tmp_path: Path) -> None:
    arguments = [("q0", ["|a", "|b"], ["|c"]), ("q1", ["|c"], ["|a"])]
    plain = [flag(q, [t[1:] for t in pos], [t[1:] for t in neg]) for q, pos, neg in arguments]
    one = MinedPairs(write_jsonl(tmp_path / "flag.jsonl", plain))
    other = MinedPairs(write_jsonl(tmp_path / "tevatron.jsonl", [tevatron(*a) for a in arguments]))
    assert list(one) == list(other)


def test_a_teachers_scores_follow_their_texts(tmp_path: Path) -> None:
    """Each text names its score; a negative that is a positive too leaves with its score, and lists are cut alike."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(20):
        names = [f"t{i}" for i in random.choice(30, 6, replace=False)]
        pos, neg = names[: 1 + number % 2], [*names[2:], names[0]][number % 3 :]
        scores = {"pos_scores": [int(t[1:]) / 2 for t in pos], "neg_scores": [int(t[1:]) / 2 for t in neg]}
        rows.append({**flag(f"q{number}", pos, neg), **scores})
    passages = [
        {
            "query_id": str(number),
            "query": row["query"],
            "positive_passages": [{"docid": t, "text": t, "score": int(t[1:]) / 2} for t in row["pos"]],
            "negative_passages": [{"docid": t, "text": t, "score": int(t[1:]) / 2} for t in row["neg"]],
        }
        for number, row in enumerate(rows)
    ]
    for records in (rows, passages):
        path = write_jsonl(tmp_path / "x.jsonl", records)
        for pairs in (MinedPairs(path, scores=True), MinedPairs(path, scores=True, max_negatives=2)):
            assert sum(len(pair.negatives) for pair in pairs) > 20
            for pair in pairs:
                assert pair.score == int(pair.right[1:]) / 2
                assert pair.negative_scores == tuple(int(text[1:]) / 2 for text in pair.negatives)
        without = MinedPairs(path)
        assert without[0].score is None
        assert without.identities() != MinedPairs(path, scores=True).identities()


def test_scores_that_fit_no_text_are_told_and_left_out(tmp_path: Path) -> None:
    rows = [
        {**flag("q0", ["p0"], ["n0", "n1"]), "pos_scores": [1.5], "neg_scores": [0.5]},
        {**flag("q1", ["p1"], ["n2"]), "pos_scores": [None], "neg_scores": [2]},
        {**flag("q2", ["p2"], []), "pos_scores": [3]},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    pairs = MinedPairs(path, scores=True)
    np.testing.assert_array_equal([pair.score for pair in pairs], [1.5, np.nan, 3])
    np.testing.assert_array_equal(np.concatenate([pair.negative_scores for pair in pairs]), [np.nan, np.nan, 2])
    assert pairs.skipped == 1
    with pytest.raises(BadSample, match=r"x\.jsonl:1: neg_scores that are not one for each text; give a number each"):
        MinedPairs(path, scores=True, on_error="raise")
    with pytest.raises(DualencError, match="no column 'pos_scores'"):
        MinedPairs(write_jsonl(tmp_path / "y.jsonl", [{"query": "q", "pos": ["p"], "neg": ["n"]}]), scores=True)
    with pytest.raises(DualencError, match="no positive has a teacher's score; mine them"):
        MinedPairs(write_jsonl(tmp_path / "z.jsonl", [tevatron("q", ["T|one"], ["U|two"])]), scores=True)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_weight_column(tmp_path: Path, ending: str) -> None:
    rows = [{"q": f"q{i}", "d": f"d{i}", "grade": weight} for i, weight in enumerate([1.0, 0.5, 0.0, -1.0, None, 2.0])]
    path = tmp_path / f"x.{ending}"
    if ending == "jsonl":
        write_jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    pairs = TablePairs(path, "q", "d", weight_column="grade")
    assert [(pair.left, pair.weight) for pair in pairs] == [("q0", 1), ("q1", 0.5), ("q2", 0), ("q5", 2)]
    assert pairs.skipped == 2
    assert [pair.weight for pair in TablePairs(path, "q", "d")] == [1] * 6
    with pytest.raises(BadSample, match="no weight of 0 or more in column 'grade'; fix the row"):
        TablePairs(path, "q", "d", weight_column="grade", on_error="raise")


def test_rows_without_negatives(tmp_path: Path) -> None:
    pairs = MinedPairs(write_jsonl(tmp_path / "x.jsonl", [{"query": "q", "pos": ["p"]}, flag("r", ["s"], ["t"])]))
    assert [p.negatives for p in pairs] == [(), ("t",)]


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["anchor", "positive", "negative_1", "negative_2", "negative_10"], ("n0", "n1", "n2")),
        (["query", "answer", "negative_10", "negative_2", "negative_1"], ("n2", "n1", "n0")),
        (["anchor", "positive", "negative", "score", "note"], ("n0",)),
        (["question", "answer", "hard_negative", "hard_negative_1", "negatively"], ("n0", "n1")),
        (["query", "pos", "neg", "x", "y"], ("n0",)),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_columns_of_negatives_are_read_by_their_names(
    tmp_path: Path, names: list[str], read: tuple[str, ...], form: str
) -> None:
    rows = [dict(zip(names, values)) for values in (["q", "p", "n0", "n1", "n2"], ["r", "s", "n1", "n1", "n1"])]
    path = tmp_path / f"x.{form}"
    if form == "jsonl":
        write_jsonl(path, rows)
    elif form == "csv":
        write_csv(path, names, [list(row.values()) for row in rows])
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    named = TablePairs(path, names[0], names[1])
    for pairs in [named] if names[1] == "pos" else [named, open_pairs(path)]:
        assert [(p.left, p.right, p.negatives) for p in pairs] == [("q", "p", read), ("r", "s", ("n1",))]
        consistent(pairs)
    assert TablePairs(path, names[0], names[1], []).negatives is None
    assert TablePairs(path, names[0], names[1], names[2])[0].negatives == ("n" + str(names[2:].index(names[2])),)


def test_a_repeated_negative_counts_once(tmp_path: Path) -> None:
    rows = [
        flag("q", ["p"], ["n", "m", "n", "n"]) | {"pos_scores": [1.0], "neg_scores": [0.4, 0.3, 0.2, 0.1]},
        flag("r", ["s"], ["n", "n"]) | {"pos_scores": [1.0], "neg_scores": [0.6, 0.5]},
    ]
    read = MinedPairs(write_jsonl(tmp_path / "x.jsonl", rows), scores=True)
    ids = [[1, 2, 1, 1], [1, 1]]
    scores = [0.4, 0.3, 0.2, 0.1, 0.6, 0.5]
    memory = PairDataset(["q", "r"], ["p", "n", "m", "s"], [0, 1], [0, 3], negatives=ids, negative_scores=scores)
    for pairs in (read, memory):
        assert [p.negatives for p in pairs] == [("n", "m"), ("n",)]
        assert [p.negative_scores for p in pairs] == [pytest.approx((0.4, 0.3)), pytest.approx((0.6,))]
    assert read.skipped == 0


def test_a_positive_among_the_negatives_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [flag("q", ["p0"], ["p1", "n"]), flag("q", ["p1"], ["p0"])]
    pairs = MinedPairs(write_jsonl(tmp_path / "x.jsonl", rows))
    assert [p.negatives for p in pairs] == [("n",), ()]
    assert pairs.skipped == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (flag("", ["p"], []), "x.jsonl:2: no text in column 'query'"),
        (flag("q", [], []), "x.jsonl:2: no text in column 'pos'"),
        (flag("q", ["p"], [" "]), "x.jsonl:2: no text in column 'neg'"),
        ({"query": "q", "pos": [["p"]]}, "x.jsonl:2: value of a wrong type"),
        ('{"query": "q", "pos": [', "x.jsonl:2: malformed JSON line"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path: Path, row: object, message: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [flag("q0", ["p0"], ["n0"]), row])
    with pytest.raises(BadSample) as error:
        MinedPairs(path, on_error="raise")
    assert message in str(error.value)
    pairs = MinedPairs(path)
    assert (pairs[0].left, pairs.skipped) == ("q0", 1)


def test_another_layout_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"query": "q", "positives": ["p"]}])
    with pytest.raises(DualencError, match="no column 'pos'; did you mean 'positives'"):
        MinedPairs(path)


@pytest.mark.parametrize("passages", [5, "text", {"text": "x"}, [{"text": 5}], [{"text": "x", "title": []}], [[["x"]]]])
def test_passages_of_another_shape_are_named_or_taken_as_one_text(tmp_path: Path, passages: object) -> None:
    good = {"query": "q", "positive_passages": [{"text": "p"}], "negative_passages": []}
    path = write_jsonl(tmp_path / "x.jsonl", [good, {**good, "query": "r", "positive_passages": passages}])
    single = isinstance(passages, (int, str))
    assert len(MinedPairs(path)) == 1 + single
    if not single:
        with pytest.raises(BadSample, match=r"x\.jsonl:2: value of a wrong type"):
            MinedPairs(path, on_error="raise")


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
    with pytest.raises(DualencError, match=r"cannot tell which column is image_column; name it \(columns: a, b\)"):
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
