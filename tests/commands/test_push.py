"""`dualenc push`, and `search` on the folder that it writes, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.in_process import failure, found, run
from tests.helpers.local_qdrant import url_of, use_folders

FILTER = (
    '{"must": [{"key": "year", "range": {"gte": 2004}}, {"key": "lang", "match": {"value": "no"}}]}'
)


@pytest.fixture
def engine(
    tmp_path: Path, emb: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder that `push` wrote."""
    use_folders(monkeypatch)
    run("push", emb, url_of(tmp_path / "data"), "--out", tmp_path / "engine")
    shown = capsys.readouterr().out
    assert "40 vectors of dimension 32 (cosine)" in shown
    assert "data 'emb'; 40 sent" in shown
    return tmp_path / "engine"


@pytest.mark.slow
def test_push_search_and_push_again(
    tmp_path: Path, emb: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("push", emb, url_of(tmp_path / "data"), "--out", engine)
    assert "; 0 sent" in capsys.readouterr().out
    run("index", emb, "--out", tmp_path / "index")
    by_faiss = found(capsys, tmp_path / "index", "wing flow", "-k", 7)
    by_engine = found(capsys, engine, "wing flow", "-k", 7)
    for name in ("id", "snippet", "year"):
        assert [hit[name] for hit in by_engine] == [hit[name] for hit in by_faiss]
    np.testing.assert_allclose(
        [h["score"] for h in by_engine], [h["score"] for h in by_faiss], atol=2e-3
    )
    everything = pd.DataFrame(found(capsys, engine, "wing flow", "-k", 40))
    wanted = everything[(everything.year >= 2004) & (everything.lang == "no")].id.tolist()
    assert [
        hit["id"] for hit in found(capsys, engine, "wing flow", "-k", 40, "--filter", FILTER)
    ] == wanted


@pytest.mark.slow
def test_recall_of_a_collection_is_measured(
    tmp_path: Path, emb: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workload.jsonl").write_text(json.dumps({"filter": FILTER}) + "\n")
    run(
        "push",
        emb,
        url_of(tmp_path / "data"),
        "--out",
        engine,
        "--filters",
        tmp_path / "workload.jsonl",
    )
    # The client's own search is exact.
    assert (
        "recall@10 1.000 (95 %: 0.992 to 1.000) in 500 searches; hnsw_ef 64"
        in capsys.readouterr().out
    )
    assert json.loads((engine / "recall.json").read_text())["target"] == 0.95
    assert json.loads((engine / "meta.json").read_text())["settings"] == {"hnsw_ef": 64}


@pytest.mark.slow
def test_mistakes_end_in_one_line(
    tmp_path: Path, emb: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("index", emb, "--out", tmp_path / "index")
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("push", emb, tmp_path / "data"), "is not the URL of PostgreSQL or a Qdrant server"),
        (("push", emb, "http://local", "--out", tmp_path / "index"), "holds no collection"),
        (
            ("search", engine, "wing", "--where", "month>1"),
            "no column 'month'; there are year, lang",
        ),
        (
            ("search", tmp_path / "index", "wing", "--filter", "year>1"),
            "only an engine takes a filter",
        ),
    ]
    for words, message in cases:
        assert message in failure(capsys, *words), words
    meta = json.loads((engine / "meta.json").read_text())
    for name, value in {"model": 5, "side": "up"}.items():
        (engine / "meta.json").write_text(json.dumps(meta | {name: value}))
        message = failure(capsys, "search", engine, "wing")
        assert f"meta.json: '{name}' is " in message
