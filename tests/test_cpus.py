"""Worker processes are limited by the CPUs that are left to this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from dualenc.io.cpus import usable_cpus, usable_workers
print(usable_cpus(), usable_workers(8), usable_workers(0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sched_setaffinity")
def test_a_process_with_one_cpu_gets_one_worker() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["1", "1", "0"]
