"""Logs of search systems: every shape of rows gives the showings that pandas finds by hand."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import IndexPairs
from dualenc.data.logs.click_log import ClickLog, LogColumns
from dualenc.data.logs.open_log import open_log
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import (
    encoded,
    picture,
    shade_of,
    write_beir,
    write_csv,
    write_jsonl,
    write_rows,
)

FORMS = ["jsonl", "csv", "parquet", "saved"]
IDS = ["d0", "d1", "d2", "d3", "d4"]


@pytest.fixture
def documents() -> Embeddings:
    return Embeddings(IDS, np.eye(5, dtype=np.float32))


def numbered(count: int = 5) -> Embeddings:
    return Embeddings([str(row) for row in range(count)], np.eye(count, dtype=np.float32))


def showings(log: ClickLog, ids: Sequence[str] = IDS) -> list[tuple[str, str, float]]:
    return [
        (log.queries.items[query], ids[document], reward)
        for query, document, reward in zip(log.query, log.document, log.reward.tolist())
    ]


CLICKS = [("how", "d0"), ("why", "d2"), ("how", "d0"), ("how", "gone")]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_a_click(tmp_path: Path, documents: Embeddings, form: str) -> None:
    """Without sessions each row is a click of its own."""
    path = write_rows(tmp_path, form, [{"query": q, "doc_id": d} for q, d in CLICKS])
    log = open_log(path, documents)
    assert showings(log) == [("how", "d0", 1), ("why", "d2", 1), ("how", "d0", 1)]
    assert log.queries.ids == ["0", "1"]
    assert log.position.tolist() == [0, 0, 0]
    assert log.session.tolist() == [0, 1, 2]
    assert np.isnan(log.time).all()
    assert not log.grades_are_relevance
    assert log.skipped == 1
    assert log.finding == (
        "read as clicks: 4 rows, 2 queries, 3 clicks; 1 document is not in the index"
    )


IMPRESSIONS = [
    ("lawn", "d0", True, 1, "2026-03-01T10:00:00Z"),
    ("lawn", "d1", False, 2, "2026-03-01T10:00:00Z"),
    ("cut", "d3", False, 1, "2026-05-31T00:00:01Z"),
    ("cut", "d1", True, 2, "2026-05-31T00:00:01Z"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["clicked", "label", "relevance", "is_click", "clicks"])
def test_a_row_an_impression(tmp_path: Path, documents: Embeddings, form: str, name: str) -> None:
    """0 and 1, or true and false, under each usual name."""
    rows = [
        {"query": q, "doc_id": d, name: clicked if form == "jsonl" else int(clicked),
         "position": position, "timestamp": time}
        for q, d, clicked, position, time in IMPRESSIONS
    ]  # fmt: skip
    log = open_log(write_rows(tmp_path, form, rows), documents)
    assert showings(log) == [
        ("lawn", "d0", 1),
        ("lawn", "d1", 0),
        ("cut", "d3", 0),
        ("cut", "d1", 1),
    ]
    assert log.position.tolist() == [1, 2, 1, 2]
    assert log.finding == (
        "read as impressions: 4 rows, 2 queries, 2 clicks, positions 1–2, 2026-03-01 to 2026-05-31"
    )
    assert log.time[0] == pd.Timestamp("2026-03-01T10:00:00Z").timestamp()


def test_counts_with_impressions(tmp_path: Path, documents: Embeddings) -> None:
    rows = [["lawn", "d0", 3, 1], ["lawn", "d1", 2, 0], ["cut", "d2", 1, 2]]
    header = ["query", "sku", "impressions", "clicks"]
    log = open_log(write_csv(tmp_path / "x.csv", header, rows), documents)
    counted: dict[tuple[str, str], list[float]] = {}
    for query, document, reward in showings(log):
        counted.setdefault((query, document), []).append(reward)
    # A row with more clicks than impressions was shown as often as it was clicked.
    assert counted == {
        ("lawn", "d0"): [1, 0, 0],
        ("lawn", "d1"): [0, 0],
        ("cut", "d2"): [1, 1],
    }
    assert log.session.tolist() == list(range(7))
    assert "read as counts of clicks and impressions: 3 rows, 2 queries, 3 clicks" in log.finding


def test_counts_without_impressions(tmp_path: Path, documents: Embeddings) -> None:
    rows = [["lawn", "d0", 3], ["lawn", "d1", 0]]
    log = open_log(write_csv(tmp_path / "x.csv", ["query", "sku", "n_clicks"], rows), documents)
    assert showings(log) == [("lawn", "d0", 1)] * 3 + [("lawn", "d1", 0)]


def test_more_counts_than_memory_are_sampled(
    tmp_path: Path, documents: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualenc.data.logs.showings.MAX_SHOWINGS", 20_000)
    rows = [["lawn", "d0", 600_000, 60_000], ["lawn", "d1", 400_000, 0]]
    header = ["query", "sku", "impressions", "clicks"]
    log = open_log(write_csv(tmp_path / "x.csv", header, rows), documents)
    of_first = log.document == 0
    # Binomial with a share of 1/50: within five standard deviations.
    assert abs(of_first.sum() - 12_000) < 5 * 12_000**0.5
    assert abs(log.reward.sum() - 1_200) < 5 * 1_200**0.5
    assert "2.00% of its 1,000,000 showings are sampled" in log.finding


EVENTS = [
    ("s1", "lawn", "d0", "impression", 1),
    ("s1", "lawn", "d1", "impression", 2),
    ("s1", "lawn", "d1", "click", 2),
    ("s1", "lawn", "d1", "click", 2),
    ("s1", "lawn", "d1", "add_to_cart", 2),
    ("s2", "lawn", "d0", "View", 1),
    ("s2", "lawn", "d1", "click", 2),
    ("s1", "cut", "d1", "purchase", 1),
]
COLUMNS = ["session_id", "query", "product_id", "action", "rank"]


@pytest.mark.parametrize(
    ("weights", "rewards"),
    [
        (None, [0, 1, 0, 1, 1]),
        ({"click": 1, "add_to_cart": 2, "purchase": 5}, [0, 2, 0, 1, 5]),
        ({"Add to Cart": 0.5}, [0, 1, 0, 1, 1]),
        ({"click": 0, "add_to_cart": 0, "view": 3}, [0, 0, 3, 0, 1]),
    ],
)
def test_the_reward_of_a_showing_is_its_largest_weight_in_a_session(
    tmp_path: Path, documents: Embeddings, weights: dict | None, rewards: list[float]
) -> None:
    """Repeated clicks count once a session, and a session's lists are those of its queries."""
    path = write_csv(tmp_path / "x.csv", COLUMNS, EVENTS)
    log = open_log(path, documents, weights=weights)
    frame = pd.DataFrame(EVENTS, columns=COLUMNS)
    by_hand = frame.groupby(["session_id", "query", "product_id"], sort=False).size()
    expected = [(query, document) for _, query, document in by_hand.index]
    assert [entry[:2] for entry in showings(log)] == expected
    assert log.reward.tolist() == rewards
    assert log.session.tolist() == [0, 0, 1, 1, 2]
    assert log.position.tolist() == [1, 2, 1, 2, 1]
    assert "results lists by column 'session_id'" in log.finding


def test_weights_are_checked(
    tmp_path: Path, documents: Embeddings, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_csv(tmp_path / "x.csv", COLUMNS, EVENTS)
    with pytest.raises(DualencError, match=r"weight of 'click' is -1: .*; give click=0"):
        open_log(path, documents, weights={"click": -1})
    with pytest.raises(DualencError, match="weight of 'click' is nan"):
        open_log(path, documents, weights={"click": float("nan")})
    open_log(path, documents, weights={"cart": 2, "click": 1})
    assert "no action is called 'cart' (did you mean add_to_cart?)" in caplog.text
    rows = [("s1", "lawn", "d0", "thumbs_down", 1), ("s1", "lawn", "d1", "thumbs_up", 1)]
    path = write_csv(tmp_path / "y.csv", COLUMNS, rows)
    with pytest.raises(DualencError, match=r"'thumbs_down' speaks against a document.*=0"):
        open_log(path, documents)
    log = open_log(path, documents, weights={"thumbs_down": 0})
    assert log.reward.tolist() == [0, 1]


def test_impressions_and_clicks_need_a_session(tmp_path: Path, documents: Embeddings) -> None:
    rows = [event[1:] for event in EVENTS]
    path = write_csv(tmp_path / "x.csv", COLUMNS[1:], rows)
    with pytest.raises(DualencError, match="no column says which belong together; name a column"):
        open_log(path, documents)
    users = [(("u1", "u2")[row % 2], *event[1:]) for row, event in enumerate(EVENTS)]
    path = write_csv(tmp_path / "x.csv", ["user_id", *COLUMNS[1:]], users)
    assert "results lists by column 'user_id'" in open_log(path, documents).finding


def test_a_user_is_no_session_where_rows_are_clicks(tmp_path: Path, documents: Embeddings) -> None:
    rows = [["u", "lawn", "d0"], ["u", "lawn", "d0"]]
    path = write_csv(tmp_path / "x.csv", ["user_id", "query", "doc_id"], rows)
    assert len(open_log(path, documents)) == 2
    assert len(open_log(path, documents, columns=LogColumns(session="user_id"))) == 1


def test_rows_without_a_session_are_lists_of_their_own(
    tmp_path: Path, documents: Embeddings
) -> None:
    rows = [["", "lawn", "d0"], ["", "lawn", "d0"], ["s", "lawn", "d0"], ["s", "lawn", "d0"]]
    for form in ("csv", "parquet"):
        frame = pd.DataFrame(rows, columns=["session_id", "query", "doc_id"]).replace("", None)
        path = tmp_path / f"x.{form}"
        frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
        log = open_log(path, documents)
        assert log.session.tolist() == [0, 1, 2]


def test_query_ids_are_sessions_if_a_query_has_several(
    tmp_path: Path, documents: Embeddings
) -> None:
    header = ["query_id", "query", "doc_id"]
    rows = [["1", "lawn", "d0"], ["1", "lawn", "d0"], ["2", "lawn", "d0"]]
    log = open_log(write_csv(tmp_path / "x.csv", header, rows), documents)
    assert log.session.tolist() == [0, 1]
    # One id for each text: it names the query, and the rows are clicks of several users.
    rows[2][0] = "1"
    assert len(open_log(write_csv(tmp_path / "y.csv", header, rows), documents)) == 3


LISTS: list[dict[str, Any]] = [
    {"query": "lawn", "results": ["d0", "d1", "gone"], "clicked": ["d1"]},
    {"query": "cut", "results": ["d3", "d1"], "clicked": []},
    {"query": "lawn", "results": ["d2", "d0"], "clicked": ["d2", "d2", "d4"]},
]
LISTED = [
    ("lawn", "d0", 0), ("lawn", "d1", 1), ("cut", "d3", 0), ("cut", "d1", 0),
    ("lawn", "d2", 1), ("lawn", "d0", 0), ("lawn", "d4", 1),
]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "texts"])
def test_a_row_a_session(tmp_path: Path, documents: Embeddings, form: str) -> None:
    """A click on a document that is not in its list, such as one of page two, has no position."""
    path = tmp_path / f"x.{'parquet' if form == 'texts' else form}"
    if form == "jsonl":
        write_jsonl(path, LISTS)
    elif form == "csv":
        pd.DataFrame(LISTS).to_csv(path, index=False)
    else:
        frame = pd.DataFrame(LISTS)
        (frame.astype(str) if form == "texts" else frame).to_parquet(path)
    log = open_log(path, documents)
    assert sorted(showings(log)) == sorted(LISTED)
    expected = {("lawn", "d0"): 1, ("lawn", "d1"): 2, ("cut", "d3"): 1, ("cut", "d1"): 2}
    found = {(q, d): p for (q, d, _), p in zip(showings(log), log.position.tolist())}
    assert {key: found[key] for key in expected if key != ("lawn", "d0")} == {
        key: value for key, value in expected.items() if key != ("lawn", "d0")
    }
    assert found[("lawn", "d4")] == 0
    assert log.finding.startswith("read as results lists: 3 rows, 2 queries, 3 clicks, positions")
    assert log.skipped == 1
    pairs = IndexPairs(path, documents)
    clicked = [(pair.left, IDS[pair.right_id]) for pair in pairs]
    assert sorted(clicked) == [("lawn", "d1"), ("lawn", "d2"), ("lawn", "d4")]


@pytest.mark.parametrize(
    ("name", "clicked"),
    [
        ("clicked_ranks", [[2], [], [1]]),
        ("clicked", [[2], [], [1]]),
        ("click_position", [[1], [], [0]]),
        ("clicked", [[0, 1, 0], [0, 0], [1, 0]]),
    ],
)
def test_clicks_of_a_list_by_rank_or_label(
    tmp_path: Path, documents: Embeddings, name: str, clicked: list
) -> None:
    rows = [{"query": f"q{i}", "shown": row["results"], name: clicked[i]}
            for i, row in enumerate(LISTS)]  # fmt: skip
    log = open_log(write_jsonl(tmp_path / "x.jsonl", rows), documents)
    assert [entry for entry in showings(log) if entry[2]] == [("q0", "d1", 1), ("q2", "d2", 1)]
    assert log.position[log.reward > 0].tolist() == [2, 1]


@pytest.mark.parametrize("values", [[[0, 1], [1, 0]], [[False, True], [True, False]]])
def test_labels_of_a_list(tmp_path: Path, documents: Embeddings, values: list) -> None:
    """Of what was shown, positions are known; grades are judgements."""
    rows = [{"query": "a", "results": ["d0", "d3"], "labels": values[0]},
            {"query": "b", "results": ["d3", "d0"], "labels": values[1]}]  # fmt: skip
    log = open_log(write_jsonl(tmp_path / "x.jsonl", rows), documents)
    assert showings(log) == [("a", "d0", 0), ("a", "d3", 1), ("b", "d3", 1), ("b", "d0", 0)]
    assert log.position.tolist() == [1, 2, 1, 2]
    rows[0]["labels"] = [0, 3]
    graded = open_log(
        write_jsonl(tmp_path / "y.jsonl", rows), documents, columns=LogColumns(clicked="labels")
    )
    assert showings(graded)[:2] == [("a", "d0", 0), ("a", "d3", 3)]


def test_labels_of_whole_rows(tmp_path: Path, documents: Embeddings) -> None:
    rows = [{"query": "a", "positives": ["d0", "d1"], "clicked": 1},
            {"query": "b", "positives": ["d2"], "clicked": 0}]  # fmt: skip
    log = open_log(write_jsonl(tmp_path / "x.jsonl", rows), documents)
    assert showings(log) == [("a", "d0", 1), ("a", "d1", 1), ("b", "d2", 0)]
    rows = [{"query": row["query"], "results": row["positives"], "clicked": row["clicked"]}
            for row in rows]  # fmt: skip
    with pytest.raises(DualencError, match="whether a document of 'results' was clicked, and not"):
        open_log(write_jsonl(tmp_path / "y.jsonl", rows), documents)


def test_one_clicked_id_in_a_row(tmp_path: Path, documents: Embeddings) -> None:
    rows = [{"query": "a", "doc_ids": ["d0", "d1"], "clicked": "d1"},
            {"query": "b", "doc_ids": ["d0", "d1"], "clicked": None}]  # fmt: skip
    log = open_log(write_jsonl(tmp_path / "x.jsonl", rows), documents)
    assert showings(log) == [("a", "d0", 0), ("a", "d1", 1), ("b", "d0", 0), ("b", "d1", 0)]


def test_ids_or_ranks_have_to_be_told(tmp_path: Path) -> None:
    """Where the ids are small numbers, both fit."""
    rows = [{"query": "a", "shown": [2, 1, 3], "clicked": [1]}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(DualencError, match="'clicked' may hold ids or ranks: its numbers are both"):
        open_log(path, numbered())
    log = open_log(path, numbered(), columns=LogColumns(position="clicked"))
    assert log.document[log.reward > 0].tolist() == [2]
    write_jsonl(path, [{"query": "a", "shown": [2, 1, 3], "clicked_ids": [1]}])
    log = open_log(path, numbered())
    assert log.document[log.reward > 0].tolist() == [1]


def test_lists_of_what_was_shown_are_no_clicks(tmp_path: Path, documents: Embeddings) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"query": "a", "results": ["d0", "d1"]}])
    with pytest.raises(DualencError, match="lists what was shown, and no column says what was cl"):
        open_log(path, documents)
    write_jsonl(path, [{"query": "a", "results": ["d0", "d1"], "hits": ["d0"], "clicked": ["d0"]}])
    with pytest.raises(DualencError, match="'results' and 'hits' both look like lists"):
        open_log(path, documents)


def test_a_beir_folder(tmp_path: Path, documents: Embeddings) -> None:
    rows = [["q1", "d0", 1], ["q1", "d1", 0], ["q2", "d4", 2], ["q2", "gone", 1]]
    queries = [{"_id": "q1", "text": "how"}, {"_id": "q2", "text": "why"}]
    folder = write_beir(tmp_path / "x", [{"_id": "d0", "text": "a"}], queries, {"train": rows})
    log = open_log(folder, documents)
    assert showings(log) == [("how", "d0", 1), ("how", "d1", 0), ("why", "d4", 2)]
    assert log.grades_are_relevance
    assert log.finding == (
        "read as judgements: 4 rows, 2 queries, 2 relevant pairs; 1 document is not in the index"
    )


def test_grades_are_judgements_and_counts_are_not(tmp_path: Path, documents: Embeddings) -> None:
    path = write_csv(tmp_path / "x.csv", ["query", "doc_id", "relevance"],
                     [["a", "d0", 3], ["a", "d1", 0], ["b", "d2", 1]])  # fmt: skip
    log = open_log(path, documents)
    assert log.reward.tolist() == [3, 0, 1]
    assert log.grades_are_relevance


@pytest.mark.parametrize("form", FORMS)
def test_the_scores_of_a_teacher_are_taken_as_they_are(
    tmp_path: Path, documents: Embeddings, form: str
) -> None:
    pairs = [("a", "d0", 0.25), ("a", "d1", 0.0), ("b", "d2", 7.5)]
    rows = [{"query": query, "doc_id": document, "weight": w} for query, document, w in pairs]
    log = open_log(write_rows(tmp_path, form, rows), documents)
    assert log.reward.tolist() == [0.25, 0, 7.5]
    assert log.grades_are_relevance
    assert log.finding == "read as weighted pairs: 3 rows, 2 queries, 2 relevant pairs"
    rows[0]["weight"] = -0.5
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(DualencError, match=r"'weight' holds a negative weight \(-0.5\); write 0"):
        open_log(write_rows(other, form, rows), documents)


def test_lists_of_a_teachers_scores(tmp_path: Path, documents: Embeddings) -> None:
    rows = [
        {"query": "a", "doc_ids": ["d0", "d3"], "score": [0.9, 0.1]},
        {"query": "b", "doc_ids": ["d2"], "score": [0.5]},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(DualencError, match="do not say from where on"):
        open_log(path, documents)
    log = open_log(path, documents, columns=LogColumns(weight="score"))
    assert showings(log) == [
        ("a", "d0", pytest.approx(0.9)),
        ("a", "d3", pytest.approx(0.1)),
        ("b", "d2", 0.5),
    ]


def test_weights_of_clicked_rows(tmp_path: Path, documents: Embeddings) -> None:
    path = write_csv(tmp_path / "x.csv", ["query", "doc_id", "clicked", "weight"],
                     [["a", "d0", 1, 2.5], ["a", "d1", 0, 9], ["b", "d2", 1, ""]])  # fmt: skip
    log = open_log(path, documents)
    assert log.reward.tolist() == [2.5, 0]
    assert not log.grades_are_relevance
    assert log.skipped == 1


def test_several_logs_at_once(tmp_path: Path, documents: Embeddings) -> None:
    """Equal queries are one, and sessions of two logs stay apart."""
    first = write_csv(tmp_path / "a.csv", COLUMNS, EVENTS)
    second = write_csv(tmp_path / "b.csv", ["query", "doc_id"], [["cut", "d4"], ["new", "d0"]])
    log = open_log([first, second], documents)
    assert [log.queries.items[row] for row in range(3)] == ["lawn", "cut", "new"]
    assert showings(log)[-2:] == [("cut", "d4", 1), ("new", "d0", 1)]
    assert log.session.tolist() == [0, 0, 1, 1, 2, 3, 4]
    assert log.finding.startswith("read as events and clicks: 10 rows, 3 queries, 5 clicks")
    vectors = tmp_path / "c.parquet"
    pq.write_table(pa.table({"vector": [[1.0, 2.0]], "doc_id": ["d0"]}), vectors)
    with pytest.raises(DualencError, match="queries are texts in one log and vectors in another"):
        open_log([first, vectors], documents)


def test_days_of_spark_and_hive(tmp_path: Path, documents: Embeddings) -> None:
    """Partition folders give the day of each row."""
    for day, rows in {"2026-03-01": IMPRESSIONS[:2], "2026-03-02": IMPRESSIONS[2:]}.items():
        folder = tmp_path / "log" / f"dt={day}"
        folder.mkdir(parents=True)
        frame = pd.DataFrame([row[:4] for row in rows], columns=["query", "sku", "clicked", "rank"])
        frame.to_parquet(folder / "part-00000-c.snappy.parquet")
    (tmp_path / "log" / "_SUCCESS").touch()
    log = open_log(tmp_path / "log", documents)
    assert log.reward.tolist() == [1, 0, 0, 1]
    assert "2026-03-01 to 2026-03-02" in log.finding


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_logs(tmp_path: Path, documents: Embeddings, suffix: str) -> None:
    text = "".join(json.dumps({"query": q, "doc_id": d}) + "\n" for q, d in CLICKS)
    path = tmp_path / f"x.jsonl{suffix}"
    codec = "gzip" if suffix == ".gz" else "zstd"
    with pa.output_stream(str(path), compression=codec) as stream:
        stream.write(text.encode())
    if suffix == ".gz":
        assert gzip.decompress(path.read_bytes()).decode() == text
    assert len(open_log(path, documents)) == 3


def test_vector_and_image_queries(tmp_path: Path, documents: Embeddings) -> None:
    vectors = pa.array([[1.0, 2.0], [0.5, 0.0], [1.0, 2.0]], pa.list_(pa.float32()))
    table = pa.table({"vector": vectors, "doc_id": ["d0", "d1", "d3"], "clicked": [1, 0, 1]})
    pq.write_table(table, tmp_path / "v.parquet")
    log = open_log(tmp_path / "v.parquet", documents)
    assert (log.queries.modality, log.query.tolist()) == ("vector", [0, 1, 0])
    for shade in (10, 200):
        (tmp_path / f"{shade}.png").write_bytes(encoded(picture(shade)))
    rows = [["10.png", "d0"], ["200.png", "d1"], ["10.png", "d2"]]
    log = open_log(write_csv(tmp_path / "i.csv", ["image", "doc_id"], rows), documents)
    assert (log.queries.modality, log.query.tolist()) == ("image", [0, 1, 0])
    assert shade_of(log.queries[1]) == 200


def test_bad_rows_are_counted_or_raised(tmp_path: Path, documents: Embeddings) -> None:
    rows = [["lawn", "d0", 1], ["", "d1", 0], ["cut", "", 1], ["cut", "gone", 1], ["cut", "d2", ""]]
    path = write_csv(tmp_path / "x.csv", ["query", "doc_id", "clicked"], rows)
    assert open_log(path, documents).skipped == 4
    with pytest.raises(BadSample):
        open_log(path, documents, on_error="raise")


def test_the_finding_is_logged(
    tmp_path: Path, documents: Embeddings, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path, "csv", [{"query": q, "doc_id": d} for q, d in CLICKS])
    with caplog.at_level(logging.INFO, logger="dualenc.data"):
        log = open_log(path, documents)
    assert f"{path}: {log.finding}" in caplog.messages


def test_nothing_clicked_is_an_error(tmp_path: Path, documents: Embeddings) -> None:
    rows = [("s1", "lawn", "d0", "impression", 1)]
    path = write_csv(tmp_path / "x.csv", COLUMNS, rows)
    with pytest.raises(DualencError, match="nothing was clicked"):
        open_log(path, documents)
    with pytest.raises(DualencError, match="no log; name at least one"):
        open_log([], documents)


def test_arrays_of_a_log_have_one_length(documents: Embeddings, tmp_path: Path) -> None:
    path = write_rows(tmp_path, "csv", [{"query": q, "doc_id": d} for q, d in CLICKS])
    log = open_log(path, documents)
    assert len(log.take(log.query == 0)) == 2
    with pytest.raises(DualencError, match="document has 3 entries for 1 showings"):
        ClickLog(log.queries, log.query[:1], *([log.document] * 5), False, "", 0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_million_rows_are_the_groups_of_pandas(tmp_path: Path) -> None:
    """Sessions, largest weights and first positions, as a groupby finds them."""
    generator = np.random.default_rng(0)
    n = 200_000
    frame = pd.DataFrame(
        {
            "session_id": generator.integers(0, n // 10, n),
            "document_id": generator.integers(0, 400, n),
            "position": generator.integers(1, 11, n),
            "action": generator.choice(["impression", "click", "cart"], n, p=[0.8, 0.15, 0.05]),
        }
    )
    frame["query"] = [f"query {number}" for number in frame["session_id"] % 3_000]
    frame.to_parquet(tmp_path / "x.parquet")
    documents = Embeddings([str(row) for row in range(400)], np.ones((400, 2), np.float32))
    log = open_log(tmp_path / "x.parquet", documents, weights={"cart": 2})
    frame["reward"] = frame["action"].map({"impression": 0, "click": 1, "cart": 2})
    grouped = frame.groupby(["session_id", "query", "document_id"], sort=False)
    expected = grouped.agg(reward=("reward", "max"), position=("position", "min")).reset_index()
    assert len(log) == len(expected)
    np.testing.assert_array_equal(log.reward, expected["reward"])
    np.testing.assert_array_equal(log.position, expected["position"])
    np.testing.assert_array_equal(log.document, expected["document_id"])
    texts = [log.queries.items[row] for row in range(len(log.queries))]
    assert [texts[row] for row in log.query] == expected["query"].tolist()
