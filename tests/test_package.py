"""What `import dualenc` offers and loads, and what the metadata of the package promises."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import dualenc

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "dualenc").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def test_every_name_is_what_its_package_offers() -> None:
    for name in dualenc.__all__:
        assert getattr(dualenc, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = dualenc.nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("dualenc", "torch"),
        ("dualenc.objectives", "transformers"),
        ("dualenc.objectives", "datasets"),
        ("dualenc.evaluation.plots", "matplotlib"),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_files_have_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert PROJECT["version"] == citation["version"] == dualenc.__version__


def test_extras_that_errors_and_documents_name_exist() -> None:
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.py"),
        *SOURCES,
    ]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    named = {
        name
        for names in re.findall(r"""["'](?:dualenc|\.)\[([\w,]+)\]["']""", text)
        for name in names.split(",")
    }
    assert {"plots", "lora", "postgres"} <= named
    assert named <= set(EXTRAS)


def distribution(requirement: str) -> str:
    """The name of a requirement, as registries compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=;]", requirement, maxsplit=1)[0]).lower()


@pytest.mark.slow
def test_every_imported_package_is_required_by_name() -> None:
    providers = packages_distributions()
    required = {distribution(name) for name in PROJECT["dependencies"]}
    users_extras = [names for extra, names in EXTRAS.items() if extra not in {"test", "docs"}]
    optional = {distribution(name) for names in users_extras for name in names}
    imported = {module for path in SOURCES for module in imported_modules(path)}
    for module in imported - sys.stdlib_module_names - {"dualenc"}:
        names = {distribution(name) for name in providers[module]}
        assert names & (required | optional), (
            f"pyproject.toml does not require the package of {module}"
        )


def imported_modules(path: Path) -> set[str]:
    """The first names of all modules that a file imports, at the top or in functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.slow
def test_the_wheel_holds_recipes_and_templates_and_no_tests(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("dualenc", "tests"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache")
        )
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        tmp_path / "dist",
        tmp_path,
    ]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = (tmp_path / "dist").iterdir()
    with ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"dualenc-{PROJECT['version']}.dist-info/METADATA").decode()
    copied = [path for path in (tmp_path / "dualenc").rglob("*") if path.is_file()]
    assert files == {str(path.relative_to(tmp_path)) for path in copied} - {"dualenc/ruff.toml"}
    assert {
        "dualenc/py.typed",
        "dualenc/recipes/text_pairs.yaml",
        "dualenc/recipes/launch/slurm.sh",
    } <= files
    assert "Author: dualenc contributors" in metadata
