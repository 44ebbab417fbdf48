"""The configurations of recipes/launch start what they say: ranks on one machine, on several, and
under SLURM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from dualenc.cli import main
from tests.helpers.fakes import weights
from tests.helpers.launched import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "recipes" / "launch"
STEPS = 200


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of an adapter on random vectors; 200 steps take long enough to be interrupted."""
    draw = np.random.default_rng(0)
    data = {}
    for name in ("left", "right"):
        data[name] = str(tmp_path / f"{name}.npy")
        np.save(data[name], draw.standard_normal((64, 8)).astype(np.float32))
    settings = {
        "model": {"class_path": "VectorEncoder", "init_args": {"dim": 8, "tower": "linear"}},
        "data": {"class_path": "VectorPairs", "init_args": data},
        "objective": {"class_path": "SogCLR", "init_args": {"temperature": 0.1}},
        "trainer": {
            "output": str(tmp_path / "run"),
            "batch_size": 8,
            "max_steps": STEPS,
            "save_every": 20,
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "mine.yaml"


@pytest.fixture
def alone(recipe: Path, tmp_path: Path) -> Path:
    """The run of one process, uninterrupted."""
    assert main(["train", str(recipe), f"trainer.output={tmp_path / 'alone'}"]) == 0
    return tmp_path / "alone"


def start(*words: object, **environment: object) -> subprocess.Popen[str]:
    """A command in a session of its own, as on a machine of its own."""
    own = {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own |= {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | own,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """With all that it has started, which lives in sessions of its own."""
    own = psutil.Process(process.pid)
    for each in [own, *own.children(recursive=True)]:
        each.kill()


def end(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    """Exit code, and what it has written."""
    try:
        written, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return process.returncode, written


def nodes(recipe: Path) -> list[subprocess.Popen[str]]:
    """The same run on two machines with one process each."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        LAUNCH / "several_nodes.yaml",
    ]
    command += [
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        free_port(),
        "--num_processes",
        2,
    ]
    run = ("-m", "dualenc", "train", recipe)
    return [start(*command, "--machine_rank", rank, *run) for rank in range(2)]


@pytest.mark.nightly
def test_a_lost_machine_ends_the_run_which_is_resumed_with_another_number(
    tmp_path: Path, recipe: Path, alone: Path
) -> None:
    first, second = nodes(recipe)
    wait_for_checkpoint(tmp_path / "run", first)
    kill(second)
    code, written = end(first, 60)
    assert code != 0
    errors = [line for line in written.splitlines() if "dualenc: error: " in line]
    assert len(errors) == 1, written
    assert "the connection to another process of this run is lost" in errors[0]
    assert "--resume" in errors[0]
    assert not (tmp_path / "run" / "model").exists()
    assert main(["train", str(recipe), "--resume"]) == 0
    assert close(tmp_path / "run", alone)


SRUN = """#!/bin/bash
# Stands in for SLURM: starts the tasks, and passes USR1 on to all of them, as `--signal` without B:
# does.
while [[ $1 == --* ]]; do shift; done
pids=()
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    pids+=($!)
done
echo "${pids[@]}" > "$TASKS.part" && mv "$TASKS.part" "$TASKS"
status=0
for pid in "${pids[@]}"; do
    wait "$pid" || { code=$?; [ $code -gt $status ] && status=$code; }
done
exit $status
"""
SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "requeued $2"; else echo 127.0.0.1; fi
"""


@pytest.mark.nightly
def test_a_slurm_job_out_of_time_is_queued_again_and_resumes(
    tmp_path: Path, recipe: Path, alone: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment: dict[str, object] = {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_NTASKS": 2,
        "SLURM_NTASKS_PER_NODE": 2,
    }
    environment |= {"SLURM_JOB_NODELIST": "here", "TASKS": tmp_path / "tasks"}
    environment["PATH"] = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = start("bash", LAUNCH / "slurm.sh", recipe, **environment)
    wait_for_checkpoint(tmp_path / "run", job)
    for pid in (tmp_path / "tasks").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    code, written = end(job)
    assert code == 138, written
    assert f"requeued {os.getpid()}" in written
    code, written = end(start("bash", LAUNCH / "slurm.sh", recipe, **environment))
    assert code == 0, written
    assert "requeued" not in written
    assert " s on 2 processes" in written
    assert close(tmp_path / "run", alone)


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Until the run has one; the process must not have ended by then."""
    until = time.monotonic() + seconds
    while not list((run / "checkpoints").glob("*")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)


def close(*runs: Path) -> bool:
    """Whether two runs end with the same weights, but for rounding in another order."""
    first, second = (weights(run) for run in runs)
    return all(np.allclose(first[name], second[name], atol=1e-4) for name in first)
