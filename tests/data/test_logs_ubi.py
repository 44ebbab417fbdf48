"""Logs of User Behavior Insights 1.3: queries and events joined, in every form and layout."""

from __future__ import annotations

import json
import shutil
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
from tests.helpers.make import write_jsonl

IDS = ["B00", "B01", "B02", "B03"]
QUERIES: list[dict[str, Any]] = [
    {"query_id": "q-1", "user_query": "toner", "query_response_hit_ids": ["B00", "B01", "gone"],
     "timestamp": "2026-03-01T10:00:00Z", "client_id": "c", "application": "shop"},
    {"query_id": "q-2", "user_query": "ink", "query_response_hit_ids": ["B02", "B00"],
     "timestamp": "2026-03-02T10:00:00Z", "client_id": "c", "application": "shop"},
    {"query_id": "q-3", "user_query": "toner", "query_response_hit_ids": ["B00", "B01"],
     "timestamp": "2026-03-03T10:00:00Z", "client_id": "d", "application": "shop"},
]  # fmt: skip


def event(
    query_id: str | None, action: str, document: str | None, ordinal: int | None
) -> dict[str, Any]:
    """An event as the schema nests it."""
    return {
        "action_name": action,
        "query_id": query_id,
        "timestamp": "2026-03-03T10:00:05.250Z",
        "event_attributes": {
            "object": {"object_id": document, "object_id_field": "asin"},
            "position": {"ordinal": ordinal},
        },
    }


EVENTS = [
    event("q-1", "click", "B01", 2),
    event("q-1", "click", "B01", 2),
    event("q-1", "purchase", "B01", 2),
    event("q-2", "impression", "B02", 1),
    event("q-3", "add_to_cart", "B00", 1),
    event("q-3", "click", "B03", 14),
    event("q-9", "click", "B00", 1),
    event("q-1", "page_exit", None, None),
    event(None, "login", None, None),
]
SHOWN = {
    ("q-1", "toner", "B00"): (0, 1), ("q-1", "toner", "B01"): (5, 2),
    ("q-2", "ink", "B02"): (0, 1), ("q-2", "ink", "B00"): (0, 2),
    ("q-3", "toner", "B00"): (2, 1), ("q-3", "toner", "B01"): (0, 2),
    ("q-3", "toner", "B03"): (1, 14),
}  # fmt: skip
WEIGHTS = {"click": 1, "add_to_cart": 2, "purchase": 5}


@pytest.fixture
def documents() -> Embeddings:
    return Embeddings(IDS, np.eye(4, dtype=np.float32))


def flat(record: dict[str, Any]) -> dict[str, Any]:
    return pd.json_normalize(record).to_dict("records")[0]


def write(folder: Path, form: str) -> Path:
    """Queries and events as files of one form in a folder."""
    folder.mkdir()
    if form == "jsonl":
        write_jsonl(folder / "queries.jsonl", QUERIES)
        write_jsonl(folder / "events.jsonl", EVENTS)
    elif form == "opensearch":
        for name, rows in {"ubi_queries": QUERIES, "ubi_events": EVENTS}.items():
            hits = [{"_index": name, "_id": str(i), "_source": row} for i, row in enumerate(rows)]
            write_jsonl(folder / f"{name}.ndjson", hits)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(QUERIES), folder / "ubi_queries.parquet")
        pq.write_table(pa.Table.from_pylist(EVENTS), folder / "ubi_events.parquet")
    elif form == "days":
        for day in (0, 1, 2):
            for name in ("queries", "events"):
                (folder / name / f"dt=2026-03-0{day + 1}").mkdir(parents=True)
            part = folder / "queries" / f"dt=2026-03-0{day + 1}" / "part-0.parquet"
            pq.write_table(pa.Table.from_pylist(QUERIES[day : day + 1]), part)
            part = folder / "events" / f"dt=2026-03-0{day + 1}" / "part-0.parquet"
            pq.write_table(pa.Table.from_pylist(EVENTS[3 * day : 3 * day + 3]), part)
    else:
        pd.DataFrame(QUERIES).to_csv(folder / "queries.csv", index=False)
        pd.DataFrame(map(flat, EVENTS)).to_csv(folder / "events.csv", index=False)
    return folder


def found(log: ClickLog) -> dict[tuple[int, str, str], tuple[float, int]]:
    return {
        (session, log.queries.items[query], IDS[document]): (reward, position)
        for session, query, document, reward, position in zip(
            log.session.tolist(),
            log.query,
            log.document,
            log.reward.tolist(),
            log.position.tolist(),
        )
    }


@pytest.mark.parametrize("form", ["jsonl", "opensearch", "parquet", "days", "csv"])
def test_hits_are_showings_and_events_their_rewards(
    tmp_path: Path, documents: Embeddings, form: str
) -> None:
    """Hits in their order; an object beyond the hits has the position of its event."""
    log = open_log(write(tmp_path / "log", form), documents, weights=WEIGHTS)
    # Session 0 is q-1, because lists are numbered by appearance.
    expected = {(int(key[0][2]) - 1, *key[1:]): value for key, value in SHOWN.items()}
    assert found(log) == expected
    assert len(log) == len(SHOWN)
    assert len(log.queries) == 2
    assert log.skipped == 2  # the event of q-9, and the hit that is not in the index
    assert log.finding == (
        "read as UBI queries and events: 12 rows, 2 queries, 3 clicks, positions 1–14, "
        "2026-03-01 to 2026-03-03; 1 document is not in the index; "
        "2 events name no query or no object; chosen: 'add_to_cart' 2, 'click' 1, 'purchase' 5; "
        "shown, not chosen: 'impression'"
    )
    assert np.nanmax(log.time) == pd.Timestamp("2026-03-03T10:00:05.25Z").timestamp()


def test_two_sources_are_joined_in_any_order(tmp_path: Path, documents: Embeddings) -> None:
    folder = write(tmp_path / "log", "parquet")
    events = shutil.move(folder / "ubi_events.parquet", tmp_path / "a.parquet")
    queries = shutil.move(folder / "ubi_queries.parquet", tmp_path / "b.parquet")
    for sources in ([events, queries], [queries, events]):
        assert len(open_log(sources, documents)) == len(SHOWN)
    pairs = IndexPairs(write(tmp_path / "again", "jsonl"), documents)
    clicked = {(pair.left, IDS[pair.right_id]) for pair in pairs}
    assert clicked == {("toner", "B01"), ("toner", "B00"), ("toner", "B03")}


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_flat_events_without_hits(tmp_path: Path, documents: Embeddings, form: str) -> None:
    """As the generator of OpenSearch's plugin writes them, with ranks from 0."""
    queries = pd.DataFrame(QUERIES).drop(columns="query_response_hit_ids")
    rows = [
        ("q-1", "B00", 0, "impression"),
        ("q-1", "B01", 1, "impression"),
        ("q-1", "B01", 1, "click"),
        ("q-2", "B02", 0, "impression"),
    ]
    events = pd.DataFrame(rows, columns=["query_id", "object_id", "rank", "action_name"])
    for name, frame in {"ubi_queries": queries, "ubi_events": events}.items():
        path = tmp_path / f"{name}.{form}"
        if form == "csv":
            frame.to_csv(path, index=False)
        elif form == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_json(path, orient="records", lines=True)
    log = open_log(tmp_path, documents)
    assert found(log) == {
        (0, "toner", "B00"): (0, 1),
        (0, "toner", "B01"): (1, 2),
        (1, "ink", "B02"): (0, 1),
    }
    assert "column 'rank' counts from 0" in log.finding


def test_events_that_have_the_texts_of_their_queries(tmp_path: Path, documents: Embeddings) -> None:
    rows = [{**row, "user_query": "toner"} for row in EVENTS[:6]]
    log = open_log(write_jsonl(tmp_path / "events.jsonl", rows), documents, weights=WEIGHTS)
    assert found(log) == {
        (0, "toner", "B01"): (5, 2),
        (1, "toner", "B02"): (0, 1),
        (2, "toner", "B00"): (2, 1),
        (2, "toner", "B03"): (1, 14),
    }
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "events.parquet")
    nested = open_log(tmp_path / "events.parquet", documents, weights=WEIGHTS)
    assert found(nested) == found(log)


def test_refusals(tmp_path: Path, documents: Embeddings) -> None:
    folder = write(tmp_path / "log", "jsonl")
    with pytest.raises(BadSample, match=r"unknown query|without a vector"):
        open_log(folder, documents, on_error="raise")
    with pytest.raises(DualencError, match="no object is a document of the index"):
        open_log(folder, Embeddings(["x"], np.ones((1, 2), np.float32)))
    with pytest.raises(DualencError, match="lists what was shown, and no column says what was cl"):
        open_log(folder / "queries.jsonl", documents)
    rows = [{**flat(row), "object_id": "B00"} for row in EVENTS]
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DualencError, match="object_id' and 'object_id' both look like ids of obj"):
        open_log(folder, documents)
    columns = LogColumns(document="object_id")
    log = open_log(folder, documents, columns=columns)
    assert {IDS[row] for row in log.document[log.reward > 0]} == {"B00"}
