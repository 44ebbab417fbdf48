"""`dualenc check` as cron runs it: a table, a file, an exit code; on folders and on engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualenc.cli import main
from tests.helpers.in_process import failure, run
from tests.helpers.local_qdrant import url_of, use_folders
from tests.helpers.postgres_rows import execute

pytestmark = pytest.mark.slow

NAMES = [
    *("opens", "canaries", "finite", "zero", "length", "duplicates", "mixture", "counts", "ids"),
    *("texts", "recall", "filters", "drift", "swaps", "migration"),
]


def findings(folder: Path, file: Path, *words: Any, code: int = 0) -> dict[str, dict[str, Any]]:
    """The findings by check that `dualenc check` writes, and its exit code."""
    command = ["check", folder, *words, "--json", file]
    assert main([str(word) for word in command]) == code
    written = json.loads(file.read_text())
    found = {each["check"]: each for each in written["findings"]}
    assert written["alarms"] == sum(each["state"] == "alarm" for each in found.values())
    return found


def test_a_clean_index(
    tmp_path: Path, toy_text: Path, columned_beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("index", toy_text, columned_beir, "--out", tmp_path / "index", "--texts", "--bm25")
    capsys.readouterr()
    found = findings(tmp_path / "index", tmp_path / "f.json", "--queries", columned_beir)
    printed = capsys.readouterr()
    assert list(found) == NAMES
    assert {name for name in NAMES if found[name]["state"] == "skipped"} == {
        "mixture",
        "filters",
        "drift",
    }
    # The paths of the test are longer than those of users.
    lines = [line for line in printed.out.splitlines() if str(tmp_path) not in line]
    assert all(len(line.rstrip()) <= 80 for line in lines if "─" not in line)
    assert printed.err == ""


def test_an_alarm_is_the_last_line_and_exit_code_1(
    tmp_path: Path, toy_text: Path, columned_beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("index", toy_text, columned_beir, "--out", tmp_path / "index", "--texts")
    meta = json.loads((tmp_path / "index" / "meta.json").read_text())
    (tmp_path / "index" / "meta.json").write_text(json.dumps(meta | {"model_checksum": "0"}))
    capsys.readouterr()
    assert main(["check", str(tmp_path / "index")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"dualenc: error: {tmp_path / 'index'}: alarm: canaries: the model's")


def test_refusals(
    tmp_path: Path, emb: Path, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "neither an index nor embeddings" in failure(capsys, "check", toy_text)
    assert "lies in the embeddings" in failure(capsys, "check", emb, "--json", emb / "f.json")
    assert "is a URL" in failure(capsys, "check", "postgresql://me@localhost/db")


def test_embeddings_in_qdrant(
    tmp_path: Path, emb: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_folders(monkeypatch)
    run("push", emb, url_of(tmp_path / "data"), "--out", tmp_path / "engine")
    found = findings(tmp_path / "engine", tmp_path / "f.json")
    for name in ("canaries", "length", "counts", "ids", "texts", "recall"):
        assert found[name]["state"] == "ok", found[name]


def test_rows_that_somebody_changed_in_postgresql(
    tmp_path: Path, emb: Path, postgres: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("push", emb, postgres, "--table", "watched", "--out", tmp_path / "engine")
    run(*words)
    found = findings(tmp_path / "engine", tmp_path / "f.json")
    for name in ("canaries", "finite", "zero", "length", "counts", "ids", "texts", "recall"):
        assert found[name]["state"] == "ok", found[name]
    # Another program writes vectors of another model, of another length, and removes a row.
    change = "UPDATE watched SET embedding = (SELECT embedding FROM watched WHERE id = 'd1')"
    execute(postgres, f"{change} WHERE id < 'd2'")
    execute(postgres, "DELETE FROM watched WHERE id = 'd30'")
    execute(postgres, "UPDATE watched SET text = ' ' WHERE id = 'd31'")
    double = "array_fill(3, ARRAY[32])::real[]::vector(32)::halfvec(32)"
    execute(postgres, f"UPDATE watched SET embedding = embedding * {double} WHERE id = 'd32'")
    found = findings(tmp_path / "engine", tmp_path / "f.json", code=1)
    for name in ("canaries", "length", "duplicates", "mixture", "counts", "texts"):
        assert found[name]["state"] == "alarm", found[name]
    assert found["counts"]["line"] == "39 rows are stored, and 40 were pushed"
    execute(postgres, "DROP TABLE watched")
    assert "is gone" in findings(tmp_path / "engine", tmp_path / "f.json", code=1)["opens"]["line"]
