"""Describe the installation: versions, platform, devices, extras and environment variables.

Only the standard library is imported here, so that the description also works where a package is
missing or broken. torch and faiss are asked in processes of their own, which may crash.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from dualenc import __version__
from dualenc.io.cpus import usable_cpus

PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "huggingface_hub",
    "open_clip_torch",
    "timm",
    "faiss-cpu",
    "datasets",
    "pyarrow",
    "accelerate",
    "safetensors",
    "numpy",
    "scipy",
    "scikit-learn",
)
FAISS_BUILDS = ("faiss-gpu", "faiss-gpu-cu11", "faiss-gpu-cu12")
"""Other distributions of faiss, which overwrite the files of faiss-cpu."""
DEVELOPMENT = ("docs", "test", "dev")
"""Extras that users do not need."""
VARIABLES = re.compile(
    r"(ACCELERATE|CUDA|CUBLAS|DUALENC|FAISS|HF|HUGGING_?FACE|KMP|MKL|NCCL|OMP|PYTORCH|QDRANT|"
    r"SENTENCE_TRANSFORMERS|TOKENIZERS|TORCH|TRANSFORMERS|WANDB)_\w+"
    r"|PG(PASSWORD|PASSFILE)|(HTTPS?|ALL)_PROXY|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|LD_LIBRARY_PATH|PYTHONPATH|XDG_CACHE_HOME|TMPDIR",
    re.IGNORECASE,
)
PLAIN = re.compile(
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|HOME)|CUBLAS_WORKSPACE_CONFIG"
    r"|(OMP|MKL)_(NUM_THREADS|DYNAMIC)|TOKENIZERS_PARALLELISM|TORCH_HOME|\w+_OFFLINE"
    r"|HF_(HOME|HUB_CACHE|DATASETS_CACHE)|SENTENCE_TRANSFORMERS_HOME|PYTORCH_\w*CONF"
    r"|PYTORCH_ENABLE_MPS_FALLBACK|ACCELERATE_(USE_\w+|MIXED_PRECISION)|(LOCAL_)?(RANK|WORLD_SIZE)"
    r"|LD_LIBRARY_PATH|PYTHONPATH|XDG_CACHE_HOME|TMPDIR|DUALENC_TEST_\w+"
)
"""Variables whose values are shown. Any other may hold a secret, and is only shown to be set."""
TIMEOUT = 60
"""Seconds that a library may take to import."""

_TORCH = """
import json, torch
facts = {"version": torch.__version__, "CUDA": torch.version.cuda}
facts["threads"] = torch.get_num_threads()
facts["instructions"] = torch.backends.cpu.get_cpu_capability()
devices = ["cpu"]
for number in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(number)
    devices.append(f"cuda:{number} {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
if torch.backends.mps.is_available():
    devices.append("mps")
facts["devices"] = "; ".join(devices)
print("\\n" + json.dumps(facts))
"""
_FAISS = """
import json, faiss
facts = {"version": faiss.__version__, "build": faiss.get_compile_options().strip()}
facts |= {"threads": faiss.omp_get_max_threads(), "GPUs": getattr(faiss, "get_num_gpus", int)()}
print("\\n" + json.dumps(facts))
"""


@dataclass(frozen=True)
class Environment:
    """A description of the installation. It contains no secrets.

        environment().packages["torch"]

    Attributes:
        system: versions of dualenc and Python, platform, cores and memory.
        packages: version by package; "missing" where there is none.
        torch: what torch reports: its build, threads and devices; or `error`.
        faiss: what faiss reports: its build (instruction set), threads and GPUs; or `error`.
        extras: for each extra of the package "installed", or what it lacks.
        variables: relevant environment variables; "(set)" in place of values that may be secret.
    """

    system: Mapping[str, object]
    packages: Mapping[str, str]
    torch: Mapping[str, object]
    faiss: Mapping[str, object]
    extras: Mapping[str, str]
    variables: Mapping[str, str]

    def as_json(self) -> dict[str, object]:
        """Return the description as nested values for JSON."""
        return asdict(self)


def environment() -> Environment:
    """Describe the installation, for a bug report. Same as `dualenc env`.

        dualenc.environment().torch["devices"]

    Missing and broken packages are described, and never an error.
    """
    with ThreadPoolExecutor() as pool:
        torch, faiss = pool.map(_probe, (_TORCH, _FAISS))
    packages = {name: version_of(name) for name in PACKAGES}
    builds = {name: version_of(name) for name in FAISS_BUILDS}
    packages |= {name: version for name, version in builds.items() if version != MISSING}
    return Environment(_system(), packages, torch, faiss, _extras(), _variables())


MISSING = "missing"


def version_of(package: str) -> str:
    """Return the installed version of a package, without importing it; "missing" if there is none.

    Args:
        package: name of the distribution, such as "faiss-cpu".
    """
    try:
        # The version of a damaged installation is None.
        return metadata.version(package) or "unknown"
    except metadata.PackageNotFoundError:
        return MISSING
    # Any error: metadata of another tool may be unreadable.
    except Exception as error:
        return f"unknown ({type(error).__name__})"


def _system() -> dict[str, object]:
    """Return versions of dualenc and Python, the platform, and what the machine has."""
    facts: dict[str, object] = {
        "dualenc": __version__,
        "installed in": _without_home(str(Path(__file__).parents[1])),
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cores": f"{os.cpu_count()}, of which {usable_cpus()} are usable",
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        facts["memory"] = f"{num_bytes / 2**30:.1f} GiB"
    return facts


def _probe(script: str) -> dict[str, object]:
    """Run a script in another process; return the facts that it prints, or why there are none."""
    # -P: a file torch.py in the current folder is not the library.
    command = [sys.executable, "-P", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__}: no answer within {TIMEOUT} s"}
    lines = done.stdout.strip().splitlines()
    # A library may print before it ends the process.
    if done.returncode == 0 and lines and lines[-1].startswith('{"version"'):
        facts: dict[str, object] = json.loads(lines[-1])
        return facts
    reasons = [line for line in done.stderr.splitlines() if line.strip()]
    reason = reasons[-1].strip() if reasons else "no message"
    return {"error": f"cannot be imported (exit code {done.returncode}): {_without_home(reason)}"}


def _extras() -> dict[str, str]:
    """Return for each extra whether its packages are installed."""
    try:
        requirements = metadata.requires("dualenc") or []
    except metadata.PackageNotFoundError:
        # A checkout that is on the path, but not installed.
        return {}
    needed: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"extra == [\"']([\w-]+)[\"']", requirement)
        if extra and extra[1] not in DEVELOPMENT:
            needed.setdefault(extra[1], []).append(re.split(r"[^\w.-]", requirement)[0])
    missing = {
        extra: [name for name in names if version_of(name) == MISSING]
        for extra, names in needed.items()
    }
    return {
        extra: f"lacks {', '.join(names)}" if names else "installed"
        for extra, names in sorted(missing.items())
    }


def _variables() -> dict[str, str]:
    """Return the relevant environment variables, without values that may be secret."""
    return {
        name: _without_home(value) if PLAIN.fullmatch(name) else "(set)"
        for name, value in sorted(os.environ.items())
        if VARIABLES.fullmatch(name)
    }


def _without_home(text: str) -> str:
    """Return a text with ~ in place of the home folder, whose name is often the user's."""
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text
