"""Columns of logs: labels and row numbers are never ids, two candidates are both named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import IndexPairs, TablePairs, open_pairs
from dualenc.data.logs.click_log import LogColumns
from dualenc.data.logs.log_times import read_times
from dualenc.data.logs.open_log import open_log
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from tests.helpers.make import write_csv, write_jsonl, write_rows


def numbered(count: int = 4) -> Embeddings:
    """Documents whose ids are 0, 1, 2, …, which labels and row numbers also are."""
    return Embeddings([str(row) for row in range(count)], np.eye(count, dtype=np.float32))


def clicked(path: Path, count: int = 4, **columns: Any) -> list[tuple[str, int, float]]:
    log = open_log(path, numbered(count), columns=LogColumns(**columns))
    texts = [log.queries.items[row] for row in log.query]
    return list(zip(texts, log.document.tolist(), log.reward.tolist()))


def test_a_column_of_labels_is_never_a_column_of_ids(tmp_path: Path) -> None:
    """Ids without a usual name are found by their values, not taken from the labels."""
    rows = [["lawn", 2, 1], ["lawn", 3, 0], ["cut", 3, 1]]
    path = write_csv(tmp_path / "a.csv", ["query", "sku", "clicked"], rows)
    assert clicked(path) == [("lawn", 2, 1), ("lawn", 3, 0), ("cut", 3, 1)]
    path = write_csv(tmp_path / "b.csv", ["query", "artikelnummer", "clicked"], rows)
    with pytest.raises(DualencError, match="the values of 'artikelnummer' are ids of documents"):
        clicked(path)
    assert clicked(path, document="artikelnummer") == [
        ("lawn", 2, 1),
        ("lawn", 3, 0),
        ("cut", 3, 1),
    ]


def test_row_numbers_are_never_ids_where_another_column_fits(tmp_path: Path) -> None:
    """Row numbers are not ids where another column fits."""
    rows = [[0, "lawn", 3], [1, "lawn", 2], [2, "cut", 1]]
    path = write_csv(tmp_path / "a.csv", ["id", "query", "asin"], rows)
    assert clicked(path) == [("lawn", 3, 1), ("lawn", 2, 1), ("cut", 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "saved"])
@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("clicked", 1, 0), ("label", 1, 0), ("relevance", 1, 0), ("is_click", True, False),
        ("clicks", 1, 0), ("clicked", True, False), ("is_click", "true", "false"),
    ],
)  # fmt: skip
def test_impressions_are_no_positives(
    tmp_path: Path, form: str, name: str, yes: Any, no: Any
) -> None:
    """127 clicks of 987 impressions are 127 positives."""
    is_click = np.arange(987) % 987 < 127
    rows = [
        {"query": f"q{row % 90}", "doc_id": str(row % 97), name: yes if clicked else no}
        for row, clicked in enumerate(is_click.tolist())
    ]
    path = write_rows(tmp_path, form, rows)
    log = open_log(path, numbered(97))
    assert log.finding == "read as impressions: 987 rows, 90 queries, 127 clicks"
    expected = {(row["query"], int(row["doc_id"])) for row in rows[:127]}
    pairs = IndexPairs(path, numbered(97))
    assert {(pair.left, pair.right_id) for pair in pairs} == expected


@pytest.mark.parametrize(
    ("header", "row", "named"),
    [
        (["query", "doc_id", "sku"], ["a", 3, 1], "'doc_id' and 'sku' both hold document ids"),
        (["query", "sku", "clicked", "label"], ["a", 3, 1, 0], "'label' and 'clicked' both look"),
        (["query", "sku", "position", "rank"], ["a", 3, 1, 1],
         "'position' and 'rank' both look like positions; name one as position_column "),
        (["query", "sku", "action", "event"], ["a", 3, "click", "click"],
         "'action' and 'event' both look like actions"),
        (["query", "sku", "clicks", "impressions", "views"], ["a", 3, 1, 2, 2],
         "'impressions' and 'views' both look like counts of impressions"),
        (["query", "sku", "weight", "weights"], ["a", 3, 1, 2], "'weight' and 'weights' both look"),
        (["query", "sku", "impressions"], ["a", 3, 2], "no column says what was clicked"),
        (["query", "sku", "clicked"], ["a", 3, 0], "none of them is above 0"),
        (["sku", "clicked"], [3, 0], "it is unclear which column is query_column"),
    ],
)  # fmt: skip
def test_two_candidates_are_both_named(tmp_path: Path, header: list, row: list, named: str) -> None:
    path = write_csv(tmp_path / "x.csv", header, [row, row])
    with pytest.raises(DualencError, match=named) as error:
        clicked(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_each_column_can_be_named(tmp_path: Path) -> None:
    header = ["suche", "artikel", "geklickt", "platz", "sitzung", "wann", "tat"]
    rows = [
        ["rasen", 3, 1, 4, "s", 1_772_359_200, "kauf"],
        ["rasen", 2, 0, 5, "s", 1_772_359_200, "kauf"],
    ]
    path = write_csv(tmp_path / "x.csv", header, rows)
    columns = LogColumns(
        query="suche", document="artikel", clicked="geklickt", position="platz",
        session="sitzung", time="wann", action="tat",
    )  # fmt: skip
    log = open_log(path, numbered(), columns=columns, weights={"kauf": 5})
    assert log.document.tolist() == [3, 2]
    assert log.reward.tolist() == [5, 0]
    assert log.position.tolist() == [4, 5]
    assert log.session.tolist() == [0, 0]
    assert log.time.tolist() == [1_772_359_200] * 2
    with pytest.raises(DualencError, match=r"no column 'platzz' \(did you mean platz\?\)"):
        open_log(path, numbered(), columns=LogColumns(position="platzz"))


def test_none_reads_no_such_column(tmp_path: Path) -> None:
    header = ["query", "doc_id", "clicked", "position", "session_id", "timestamp", "action"]
    rows = [["a", 3, 0, 2, "s", "2026-03-01", "view"], ["a", 2, 1, 1, "s", "2026-03-01", "click"]]
    path = write_csv(tmp_path / "x.csv", header, rows)
    none = dict.fromkeys(("clicked", "position", "session", "time", "action"), "none")
    log = open_log(path, numbered(), columns=LogColumns(**none))
    assert log.reward.tolist() == [1, 1]
    assert log.position.tolist() == [0, 0]
    assert log.session.tolist() == [0, 1]
    assert np.isnan(log.time).all()


def test_positions_are_not_ids(tmp_path: Path) -> None:
    """All of them are ids of the index, too."""
    rows = [["a", 3, 1, 1], ["a", 2, 0, 2], ["b", 1, 1, 1]]
    path = write_csv(tmp_path / "x.csv", ["query", "sku", "clicked", "position"], rows)
    assert [document for _, document, _ in clicked(path)] == [3, 2, 1]


def test_truth_values_under_other_names_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [["a", 3, 1], ["a", 2, 0]]
    path = write_csv(tmp_path / "x.csv", ["query", "sku", "geklickt"], rows)
    assert len(clicked(path)) == 2
    assert "column 'geklickt' holds 0 and 1 and is not read; if it says what" in caplog.text
    assert clicked(path, clicked="geklickt") == [("a", 3, 1), ("a", 2, 0)]


def test_average_positions_are_unknown(tmp_path: Path) -> None:
    rows = [["a", 3, 1, 1.5], ["a", 2, 0, 2], ["b", 1, 1, ""]]
    path = write_csv(tmp_path / "x.csv", ["query", "sku", "clicked", "position"], rows)
    log = open_log(path, numbered())
    assert log.position.tolist() == [0, 2, 0]
    assert "numbers in column 'position' that are not positions count as unknown" in log.finding


@pytest.mark.parametrize(
    ("values", "how"),
    [
        (["2026-03-01T12:00:00Z", "2026-03-01T13:00:00+01:00"], "ISO times"),
        (["2026-03-01 12:00:00", "2026-03-01T12:00:00.000"], "ISO times"),
        ([1_772_366_400, 1_772_366_400], "seconds since 1970"),
        ([1_772_366_400.0, 1_772_366_400.0], "seconds since 1970"),
        (["1772366400000", "1772366400000"], "milliseconds since 1970"),
        ([1_772_366_400_000, 1_772_366_400_000], "milliseconds since 1970"),
        ([1_772_366_400_000_000] * 2, "microseconds since 1970"),
        ([1_772_366_400_000_000_000] * 2, "nanoseconds since 1970"),
        (pa.array([1_772_366_400_000] * 2, pa.timestamp("ms")), "timestamps in UTC"),
        (pa.array([1_772_366_400] * 2, pa.timestamp("s", "Europe/Berlin")), "timestamps"),
    ],
)
def test_times_of_every_form(values: Any, how: str) -> None:
    """Noon of the first of March, 2026, in UTC."""
    array = values if isinstance(values, pa.Array) else pa.array(values)
    found = read_times(pa.chunked_array([array, pa.nulls(1, array.type)]))
    assert found is not None
    noon = pd.Timestamp("2026-03-01T12:00:00Z").timestamp()
    np.testing.assert_array_equal(found[0], [noon, noon, np.nan])
    assert found[1].startswith(how)


@pytest.mark.parametrize("values", [[20260301, 20260302], ["20260301", "20260302"],
                                    ["2026-03-01", "2026-03-02"]])  # fmt: skip
def test_days(values: list) -> None:
    found = read_times(pa.chunked_array([pa.array(values)]))
    assert found is not None
    day = pd.Timestamp("2026-03-01T00:00:00Z").timestamp()
    assert found[0].tolist() == [day, day + 86_400]


@pytest.mark.parametrize("values", [["monday", "tuesday"], [1, 2, 3], [None, None], [True]])
def test_what_is_not_a_time(values: list, tmp_path: Path) -> None:
    assert read_times(pa.chunked_array([pa.array(values)])) is None


def test_columns_that_are_not_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_csv(
        tmp_path / "x.csv", ["query", "sku", "day"], [["a", 3, "mon"], ["b", 2, "tue"]]
    )
    assert len(clicked(path)) == 2
    assert "column 'day' is ignored: its values are not times" in caplog.text
    with pytest.raises(DualencError, match="'day' does not hold times"):
        clicked(path, time="day")


@pytest.mark.parametrize(
    ("name", "values", "weights"),
    [
        ("clicked", [1, 0, 1], [1, 0, 1]),
        ("is_duplicate", [0, 1, 1], [0, 1, 1]),
        ("isDuplicate", [True, False, True], [1, 0, 1]),
        ("score", [0, 2, 1], [0, 1, 1]),
        ("was_clicked", [1, 0, 1], [1, 0, 1]),
        ("click_bool", [1, 0, 1], [1, 0, 1]),
        ("choice", ["Relevant", "Not relevant", "Relevant"], [1, 0, 1]),
        ("choice", ['{"choices": ["Relevant"]}', '{"choices": ["Not relevant"]}', "x"], "refused"),
        ("choice", ["left", "right", "left"], "refused"),
        ("score", [0.2, 0.9, 0.4], "refused"),
        ("similarity", [0.2, 0.9, 0.4], "refused"),
        ("is_duplicate", [0.5, 0.25, 1.0], "refused"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_labels_of_pairs_are_used_or_refused(
    tmp_path: Path, form: str, name: str, values: list, weights: Any
) -> None:
    """The rule of logs holds for tables of texts, too: no column of labels is ignored."""
    rows = [{"query": f"q{i}", "document": f"d{i}", name: value} for i, value in enumerate(values)]
    path = write_rows(tmp_path, form, rows)
    for read in (open_pairs, lambda path: TablePairs(path, "query", "document")):
        if weights == "refused":
            with pytest.raises(DualencError, match=name):
                read(path)
        else:
            assert read(path).weights.tolist() == weights  # type: ignore[union-attr]


def test_choices_of_label_studio(tmp_path: Path) -> None:
    """Records of its JSON export, which csv exports write as texts."""
    rows = [{"query": "a", "document": "b", "choice": {"choices": ["Relevant"]}},
            {"query": "c", "document": "d", "choice": {"choices": ["Not relevant"]}}]  # fmt: skip
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(DualencError):
        open_pairs(path)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    with pytest.raises(DualencError, match="choice"):
        open_pairs(tmp_path / "x.parquet")


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    """Nothing is left out in silence; of many columns the first eight are named."""
    rows = [{"query": "a", "sku": 3, "dwell": 7, "note": "x"}]
    log = open_log(write_rows(tmp_path, "csv", rows), numbered())
    assert log.finding.endswith("1 click; not read: 'dwell', 'note'")
    rows = [{"query": "a", "results": [3, 1], "clicked": [3], "page": 1}]
    log = open_log(write_rows(tmp_path, "jsonl", rows), numbered())
    assert log.finding.endswith("positions 1–2; not read: 'page'")
    rows = [{"query": "a", "sku": 3} | {f"c{number}": "x" for number in range(10)}]
    log = open_log(write_rows(tmp_path, "parquet", rows), numbered())
    assert log.finding.endswith("'c6', 'c7' and 2 others")


def test_events_are_known_by_the_last_word_of_their_names(tmp_path: Path) -> None:
    """As trackers such as Snowplow name them; a column that fits without it comes first."""
    shown = "search_result_impression"
    rows = [["a", 3, shown, 7, "x"], ["a", 2, shown, 7, "x"], ["a", 3, "searchResultClick", 7, "x"]]
    header = ["query", "sku", "event_name", "domain_sessionid", "event_type"]
    path = write_csv(tmp_path / "a.csv", header, rows)
    log = open_log(path, numbered())
    assert log.reward.tolist() == [1, 0]
    assert "chosen: 'searchResultClick' 1; shown, not chosen: 'search_result_imp" in log.finding
    rows = [["a", 3, "Product Clicked", 7, "click"]]
    assert clicked(write_csv(tmp_path / "b.csv", header, rows)) == [("a", 3, 1)]


def test_events_without_a_known_action_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [["a", 3, "seen_in_list"], ["b", 2, "followed"]]
    path = write_csv(tmp_path / "a.csv", ["query", "sku", "event_name"], rows)
    assert len(clicked(path)) == 2
    assert "column 'event_name' is not read, and all its rows count as clicks: 'followed', " in (
        caplog.text
    )
    log = open_log(path, numbered(), columns=LogColumns(action="event_name"))
    assert "chosen: 'followed' 1, 'seen_in_list' 1" in log.finding


@pytest.mark.parametrize(("at_fifth", "is_reported"), [(30, True), (26, False), (2, False)])
def test_clicks_that_may_be_impressions_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_fifth: int, is_reported: bool
) -> None:
    """A German column of clicks is unknown; all positions have as many rows."""
    counts = [30, 30, 30, 30, at_fifth, 1]
    rows = [
        [f"q{row}", row % 4, place, "nein"]
        for place, count in enumerate(counts, 1)
        for row in range(count)
    ]
    path = write_csv(tmp_path / "a.csv", ["query", "sku", "position", "Klick"], rows)
    assert len(clicked(path)) == len(rows)
    assert ("if rows are impressions, name the column of clicks" in caplog.text) == is_reported


def test_positions_that_are_texts_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A table with decimal commas has them."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"query;sku;position\r\na;3;1,0\r\nb;2;2,0\r\n")
    log = open_log(path, numbered())
    assert log.position.tolist() == [0, 0]
    assert "column 'position' is not read: '1,0' is not a number" in caplog.text


def test_ids_joined_in_one_text_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [["a", "3|1", "3"], ["b", "2|0", "2"]]
    path = write_csv(tmp_path / "a.csv", ["query", "results", "clicked"], rows)
    assert clicked(path) == [("a", 3, 1), ("b", 2, 1)]
    assert "column 'results' joins ids in one text ('3|1')" in caplog.text
    assert "column 'clicked' joins" not in caplog.text


def test_a_position_for_each_id_of_a_list(tmp_path: Path) -> None:
    """As in the events of Algolia's Insights."""
    rows = [
        {"query": "a", "objectIDs": ["3", "1"], "positions": [4, 9]},
        {"query": "b", "objectIDs": ["2"], "positions": [1]},
    ]
    for form in ("jsonl", "parquet"):
        log = open_log(write_rows(tmp_path, form, rows), numbered())
        assert log.document.tolist() == [3, 1, 2]
        assert log.position.tolist() == [4, 9, 1]
    rows[0]["positions"] = [4]
    with pytest.raises(DualencError, match="'positions' holds lists whose lengths differ"):
        open_log(write_rows(tmp_path, "jsonl", rows), numbered())
    # Beside single ids such lists are something else.
    rows = [{"query": "a", "sku": "3", "positions": [4, 9]}]
    log = open_log(write_rows(tmp_path, "jsonl", rows), numbered())
    assert log.position.tolist() == [0]
    assert log.finding.endswith("not read: 'positions'")


def test_times_of_bigquery() -> None:
    texts = ["2026-03-01 08:00:00 UTC", "2026-03-01 08:00:00.250000 UTC", None]
    found = read_times(pa.chunked_array([pa.array(texts)]))
    assert found is not None
    start = pd.Timestamp("2026-03-01T08:00:00Z").timestamp()
    np.testing.assert_array_equal(found[0], [start, start + 0.25, np.nan])


def test_one_record_around_all_rows_is_named(tmp_path: Path) -> None:
    """As a server answers a search; records in each row of a log are no such thing."""
    path = tmp_path / "answer.json"
    path.write_text('{"hits": {"total": 1, "hits": [{"_source": {"query": "a", "sku": 3}}]}}')
    with pytest.raises(DualencError, match=r"write these alone: jq '\.hits\.hits' FILE"):
        clicked(path)
    rows = [{"event_params": [{"key": "q"}], "sku": 3}, {"event_params": [{"key": "q"}], "sku": 2}]
    with pytest.raises(DualencError, match="query_column") as refused:
        clicked(write_jsonl(tmp_path / "export.jsonl", rows))
    assert "jq" not in str(refused.value)
