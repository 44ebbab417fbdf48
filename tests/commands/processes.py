"""A command on two processes, as `accelerate launch` starts it on a machine without GPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_on_two(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `dualenc WORDS` on two gloo processes in a folder, and make sure that both ended well.

    `--multi_gpu` is what makes accelerate start several processes, ACCELERATE_USE_CPU what puts them on the CPU.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = f"-m accelerate.commands.launch --num_processes 2 --multi_gpu --main_process_port {port} -m dualenc"
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launch.split(), *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done
