"""`dualenc push` to PostgreSQL, and the commands on the folder that it writes, as a user types
them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.cli import main
from dualenc.search import Embeddings
from dualenc.search.engines.factory import push_embeddings
from tests.helpers.in_process import evaluated, failure, found, run

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(tmp_path: Path, emb: Path, postgres: str) -> Path:
    run("push", emb, postgres, "--table", "commands", "--out", tmp_path / "engine")
    return tmp_path / "engine"


def test_push_search_evaluate_and_push_again(
    tmp_path: Path,
    toy_text: Path,
    columned_beir: Path,
    emb: Path,
    engine: Path,
    postgres: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("push", emb, postgres, "--table", "commands", "--out", engine)
    assert "; 0 sent" in capsys.readouterr().out
    run("index", emb, "--out", tmp_path / "index")
    by_faiss = found(
        capsys,
        tmp_path / "index",
        "wing flow",
        "-k",
        7,
        "--where",
        "year>=2004",
        "--where",
        "lang=no",
    )
    for words in (
        ["--filter", "year >= 2004 AND lang = 'no'"],
        ["--where", "year>=2004", "--where", "lang=no"],
    ):
        by_engine = found(capsys, engine, "wing flow", "-k", 7, *words)
        for name in ("id", "snippet", "year", "lang"):
            assert [hit[name] for hit in by_engine] == [hit[name] for hit in by_faiss]
        np.testing.assert_allclose(
            [h["score"] for h in by_engine], [h["score"] for h in by_faiss], atol=2e-3
        )
    own = evaluated("retrieval", tmp_path / "own", toy_text, columned_beir)
    stored = evaluated(
        "retrieval", tmp_path / "stored", toy_text, columned_beir, "--documents", engine
    )
    metrics = [
        result["systems"]["toy-text"]["datasets"]["beir"]["metrics"] for result in (own, stored)
    ]
    assert metrics[1] == pytest.approx(metrics[0], abs=0.02)


def test_recall_is_measured_kept_and_promised(
    tmp_path: Path,
    emb: Path,
    postgres: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "workload.jsonl").write_text(
        '{"filter": "year >= 2005"}\n{"filter": "lang = \'no\'"}\n'
    )
    words: tuple[Any, ...] = (
        "push",
        emb,
        postgres,
        "--table",
        "promised",
        "--out",
        tmp_path / "engine",
    )
    run(*words, "--recall", 0.95, "--filters", tmp_path / "workload.jsonl")
    assert (
        "recall@10 1.000 (95 %: 0.992 to 1.000) in 500 searches; ef_search 40"
        in capsys.readouterr().out
    )
    recorded = json.loads((tmp_path / "engine" / "recall.json").read_text())
    assert (
        recorded["settings"]
        == json.loads((tmp_path / "engine" / "meta.json").read_text())["settings"]
    )
    run(*words)
    assert (
        json.loads((tmp_path / "engine" / "meta.json").read_text())["settings"]["ef_search"] == 40
    )
    run("evaluate", "engine", tmp_path / "engine")
    assert main(["evaluate", "engine", str(tmp_path / "engine"), "--recall", "0.999"]) == 1
    run(
        "push",
        emb,
        postgres,
        "--table",
        "promised",
        "--index",
        "ivfflat",
        "--out",
        tmp_path / "engine",
    )
    assert "no recall was measured" in failure(capsys, "evaluate", "engine", tmp_path / "engine")


def test_mistakes_end_in_one_line(
    tmp_path: Path,
    emb: Path,
    engine: Path,
    postgres: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"filter": "year >= 2005"}\n"year"\n')
    pushed: tuple[Any, ...] = ("push", emb, postgres, "--table", "commands", "--out", engine)
    recall = ("--recall", 0.9, "--filters")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((*pushed, *recall, tmp_path / "bad.jsonl"), "contains 1 not a JSON object (first: "),
        (
            ("push", emb, "http://local", "--index", "none"),
            "--index is of PostgreSQL; leave it out",
        ),
        (("search", engine, "wing", "--filter", "year >"), "the filter is not a SQL condition"),
        (("search", engine, "wing", "--nprobe", 3), "nprobe is 3, but the index is of kind hnsw"),
    ]
    for words, message in cases:
        assert message in failure(capsys, *words), words
    meta = json.loads((engine / "meta.json").read_text())
    for settings in (
        {"search_path": "x"},
        {"ef_search": "1; DROP TABLE x"},
        {"iterative_scan": "on; DROP TABLE x"},
    ):
        (engine / "meta.json").write_text(
            json.dumps(meta | {"settings": meta["settings"] | settings})
        )
        assert len(failure(capsys, "search", engine, "wing")) < 400


def test_the_url_is_shown_as_typed_without_its_password(
    tmp_path: Path, emb: Path, postgres: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = postgres.replace("postgresql:", "postgresql+psycopg:")
    run(
        "push",
        emb,
        typed.replace("me@", "me:s3c@ret@"),
        "--table",
        "typed",
        "--out",
        tmp_path / "engine",
    )
    shown = capsys.readouterr()
    assert f"(cosine) → {typed} 'typed'; 40 sent" in shown.out
    written = "".join(path.read_text() for path in (tmp_path / "engine").iterdir())
    assert typed in written
    assert "s3c" not in shown.out + shown.err + written
    found(capsys, tmp_path / "engine", "wing flow")


def test_a_dot_in_the_name_of_a_folder_is_no_schema(
    tmp_path: Path, emb: Path, postgres: str
) -> None:
    shutil.copytree(emb, tmp_path / "copy.v2")
    run("push", tmp_path / "copy.v2", postgres, "--out", tmp_path / "engine")
    meta = json.loads((tmp_path / "engine" / "meta.json").read_text())
    assert meta["collection"] == "copy.v2"


def test_an_engine_that_python_saved_is_evaluated(
    tmp_path: Path, emb: Path, postgres: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workload.jsonl").write_text('{"filter": "year >= 2005"}\n{"filter": ""}\n')
    engine = push_embeddings(Embeddings.open(emb), postgres, "saved by python")[0]
    engine.save(tmp_path / "engine")
    run("evaluate", "engine", tmp_path / "engine", "--filters", tmp_path / "workload.jsonl")
    shown = capsys.readouterr().out
    assert "recall@10 1.000" in shown
    assert "10.0000" not in shown
    assert re.search(r"year >= 2005\s+1\.0000\s+10\s+10\s", shown)
    # Embeddings of others in the recorded folder are no queries.
    folder = tmp_path / "other"
    shutil.copytree(emb, folder)
    engine.record(embeddings=str(folder))
    engine.save(tmp_path / "engine")
    (folder / "meta.json").unlink()
    run("evaluate", "engine", tmp_path / "engine", "--filters", tmp_path / "workload.jsonl")


def test_where_a_folder_is_expected_a_url_is_answered_with_the_one_of_push(
    tmp_path: Path,
    toy_text: Path,
    columned_beir: Path,
    postgres: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = postgres.replace("me@", "me:s3c/ret@")
    cases: list[tuple[Any, ...]] = [
        ("adapt", url, columned_beir, "--out", tmp_path / "adapted"),
        ("search", url, "wing"),
        ("evaluate", "engine", url),
        (
            "evaluate",
            "retrieval",
            toy_text,
            columned_beir,
            "--documents",
            url,
            "--out",
            tmp_path / "evaluated",
        ),
        ("adapt", "http://localhost:6333", columned_beir, "--out", tmp_path / "adapted"),
    ]
    for words in cases:
        message = failure(capsys, *words)
        assert (
            "is a URL; name the folder that `dualenc push` wrote, by default EMBEDDINGS-engine"
            in message
        )
        assert "s3c" not in message
    for folder in tmp_path.iterdir():
        assert not any(folder.iterdir())
