"""`dualenc quickstart` from end to end, at toy size and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ARGUMENTS = ["--max-docs", "400", "--test-docs", "50", "--steps", "12", "--vocab-size", "1500"]


def test_trains_indexes_searches_and_says_what_to_type_next(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-m", "dualenc", "quickstart", *ARGUMENTS],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in ("untrained", "BM25", "trained", "Search: sort a list", "dualenc search quickstart-run/index"):
        assert words in done.stdout
    run = tmp_path / "quickstart-run"
    assert (run / "model" / "model.safetensors").exists()
    assert json.loads((run / "index" / "meta.json").read_text())["count"] == 400


def test_leaves_a_folder_of_something_else_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [sys.executable, "-m", "dualenc", "quickstart", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "holds something that is no quickstart" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
