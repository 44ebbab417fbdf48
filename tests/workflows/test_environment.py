"""`dualenc env`: it describes the installation, broken packages included, and shows no secret."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import faiss
import pytest
import torch

from dualenc import __version__, environment
from dualenc.workflows.environment import PACKAGES

ROOT = Path(__file__).parents[2]


def described(tmp_path: Path, *path: Path, **variables: str) -> tuple[dict, str]:
    """What `dualenc env --json` writes and prints, with folders before all others on the path."""
    file = tmp_path / "env.json"
    settings = {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "dualenc", "env", "--json", str(file)],
        env={**os.environ, **settings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
def test_it_reports_what_the_libraries_say(tmp_path: Path) -> None:
    # A file in the current folder is not the library.
    (tmp_path / "torch.py").write_text("raise SystemError('not torch')")
    found, printed = described(tmp_path)
    assert found["system"]["dualenc"] == __version__
    assert found["system"]["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["devices"].startswith("cpu")
    assert found["faiss"]["version"] == faiss.__version__
    assert found["faiss"]["build"] == faiss.get_compile_options().strip()
    for name in ("numpy", "transformers", "sentence-transformers"):
        assert found["packages"][name] == version(name)
        assert f"  {name}: {version(name)}\n" in printed
    assert list(found["packages"])[: len(PACKAGES)] == list(PACKAGES)


@pytest.mark.slow
def test_secrets_and_the_home_folder_are_not_shown(tmp_path: Path) -> None:
    secrets = {
        "HF_TOKEN": "hf_secret1",
        "WANDB_API_KEY": "secret2",
        "QDRANT_API_KEY": "secret3",
        "PGPASSWORD": "secret4",
        "https_proxy": "http://me:secret5@proxy",
        "HF_ENDPOINT": "https://me:secret6@mirror",
        "ACCELERATE_WHATEVER": "secret7",
    }
    home = tmp_path / "jane"
    shown = {"HF_HOME": str(home / "cache"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "3"}
    found, printed = described(tmp_path, **secrets, **shown, HOME=str(home), MY_OTHER="hidden")
    assert {name: found["variables"][name] for name in secrets} == dict.fromkeys(secrets, "(set)")
    assert found["variables"]["HF_HOME"] == "~/cache"
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["faiss"]["threads"] == 3
    for text in (printed, json.dumps(found)):
        assert not re.search(r"secret\d", text)
        assert "jane/" not in text
        assert "hidden" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "raise OSError('libcudart.so.13: no such file')",
            "OSError: libcudart.so.13: no such file",
        ),
        ("import os; os.abort()", "exit code -6"),
        ("import sys; print('bye'); sys.exit()", "no message"),
        ("", "has no attribute"),
    ],
)
def test_broken_libraries_are_described(code: str, error: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("torch", "faiss"):
        (broken / f"{name}.py").write_text(code)
    found, printed = described(tmp_path, broken)
    for name in ("torch", "faiss"):
        assert error in found[name]["error"]
    assert error in printed
    assert found["packages"]["numpy"] == version("numpy")


@pytest.mark.slow
def test_it_runs_without_any_package_that_trains_or_searches(tmp_path: Path) -> None:
    """Only what reads the command line is left."""
    broken = tmp_path / "broken"
    for name in ("torch", "faiss", "numpy", "transformers", "datasets", "pyarrow", "yaml", "tqdm"):
        (broken / name).mkdir(parents=True)
        (broken / name / "__init__.py").write_text("raise ImportError('damaged')")
    done = subprocess.run(
        [sys.executable, "-m", "dualenc", "env"],
        env={**os.environ, "PYTHONPATH": f"{broken}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("ImportError: damaged") == 2
    assert done.stderr == ""


def test_missing_and_damaged_packages_and_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an installation that knows dualenc and a package whose metadata is empty."""
    own = tmp_path / "dualenc-0.1.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: dualenc\nVersion: 0.1\n"
        'Requires-Dist: numpy>=1.26\nRequires-Dist: peft>=0.19; extra == "lora"\n'
        'Requires-Dist: psycopg[binary]>=3.2; extra == "postgres"\n'
        'Requires-Dist: pytest; extra == "test"\n'
    )
    for name, text in (("peft", "Name: peft\nVersion: 1.0\n"), ("numpy", "")):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("dualenc.workflows.environment._probe", lambda _: {"error": "left out"})
    found = environment()
    assert found.extras == {"lora": "installed", "postgres": "lacks psycopg"}
    assert found.packages["torch"] == "missing"
    assert found.packages["numpy"].startswith("unknown")
    (own / "METADATA").unlink()
    own.rmdir()
    assert environment().extras == {}
