"""Commands on two processes, as `accelerate launch` starts them on a machine without GPUs.

`accelerate launch tests/helpers/processes.py COMMANDS.json` runs each of a list of commands in one
pair of processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_on_two(folder: Path, *commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `dualenc WORDS` for each list of words on the same two gloo processes, and make sure that
    all end well."""
    (folder / "commands.json").write_text(json.dumps(commands))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = (
        f"-m accelerate.commands.launch --num_processes 2 --multi_gpu --main_process_port {port}"
    )
    # --multi_gpu makes accelerate start several processes, ACCELERATE_USE_CPU puts them on the CPU.
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, *launch.split(), __file__, str(folder / "commands.json")]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


if __name__ == "__main__":
    from dualenc.cli import main

    for command in json.loads(Path(sys.argv[1]).read_text()):
        if status := main(command):
            sys.exit(status)
