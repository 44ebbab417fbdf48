"""The scripts of recipes/launch that embed on a cluster write the folder that one process
writes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import toy
from tests.helpers.in_process import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "recipes" / "launch"
ROWS = 4000


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A model, documents for four shards, and a folder to write."""
    model = toy.text_model(tmp_path / "model")
    rows = [{"_id": f"d{row}", "text": text} for row, text in enumerate(toy.texts(ROWS))]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(model), str(tmp_path / "documents.jsonl"), str(tmp_path / "emb")]


def start(script: str, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, str(LAUNCH / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
    )


def shards(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.arrow")}


def check_as_alone(arguments: list[str], tmp_path: Path) -> None:
    run("embed", *arguments[:2], "--out", tmp_path / "alone")
    assert shards(arguments[2]) == shards(tmp_path / "alone")
    assert len(shards(arguments[2])) == 4
    assert json.loads(Path(arguments[2], "meta.json").read_text())["side"] == "right"


def test_tasks_of_a_slurm_array_share_a_folder(arguments: list[str], tmp_path: Path) -> None:
    tasks = [
        start("embed_slurm.py", arguments, SLURM_ARRAY_TASK_ID=str(number)) for number in range(3)
    ]
    # One task is lost with its node.
    tasks[2].kill()
    tasks[2].communicate()
    for number, task in enumerate(tasks[:2]):
        written, errors = task.communicate(timeout=240)
        assert task.returncode == 0, errors
        assert f"task {number}: 4,000 embeddings in {arguments[2]}" in written
    check_as_alone(arguments, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_actors_of_ray_share_a_folder(arguments: list[str], tmp_path: Path) -> None:
    cluster = start("embed_ray.py", arguments, RAY_USAGE_STATS_ENABLED="0")
    written, errors = cluster.communicate(timeout=400)
    assert cluster.returncode == 0, errors
    assert "4,000 embeddings by " in written
    check_as_alone(arguments, tmp_path)


@pytest.mark.parametrize("script", ["embed_slurm.py", "embed_ray.py"])
def test_a_script_is_short(script: str) -> None:
    assert len((LAUNCH / script).read_text().splitlines()) <= 40


def test_sbatch_reads_the_directives() -> None:
    """It takes lines that begin with #SBATCH, up to the first that is no comment (its manual
    page)."""
    lines = (LAUNCH / "embed_slurm.py").read_text().partition('"""')[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    names = [line.split()[1].partition("=")[0] for line in lines if line.startswith("#SBATCH ")]
    assert names == ["--job-name", "--array", "--gpus", "--cpus-per-task", "--time", "--requeue"]
