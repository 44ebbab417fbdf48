"""docs/compatibility.md has the versions that the code and pyproject.toml have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dualenc.data.store import vector_shards
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search import lexical, texts
from dualenc.search.engines import pushed_folder
from dualenc.search.index import open as index_folder
from dualenc.search.migration import stages

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
ROWS = {
    cells[0]: cells[1:]
    for cells in (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("| ")
    )
}


@pytest.mark.parametrize(
    ("row", "versions"),
    [
        ("embeddings, index", (vector_shards.FORMAT_VERSION, index_folder.FORMAT_VERSION)),
        ("what `dualenc push` wrote", (pushed_folder.FORMAT_VERSION,)),
        ("texts of an index, migration", (texts.FORMAT_VERSION, stages.FORMAT_VERSION)),
    ],
)
def test_formats_are_those_of_the_code(row: str, versions: tuple[int, ...]) -> None:
    written, read, _ = ROWS[row]
    assert {written, read} == {str(version) for version in versions}


def test_bm25_is_read_in_all_its_versions() -> None:
    written, read, _ = ROWS["BM25 of an index"]
    assert written == str(lexical.VERSION)
    assert read.startswith(" and ".join(map(str, lexical.VERSIONS)))


def test_the_error_of_another_format_is_as_shown(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"format": "x", "version": 3}')
    with pytest.raises(DualencError) as error:
        Provenance.from_folder(tmp_path, "x", 4, [], "another", "again")
    assert f"index: {str(error.value).removeprefix(f'{tmp_path}: ')}" in PAGE


def test_allowed_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split("[<>=]", each)[0]: each for each in project["dependencies"]}
    assert project["requires-python"] == ">=" + ROWS["Python"][0].split()[0]
    assert required["torch"] == "torch>=" + ROWS["torch"][0].split()[0]
    for row, name in (
        ("sentence-transformers", "sentence-transformers"),
        ("transformers", "transformers"),
    ):
        major = int(ROWS[row][0])
        assert re.fullmatch(rf"{name}>={major}(\.0)?,<{major + 1}", required[name])
    assert required["open_clip_torch"] == "open_clip_torch>=3.3,<4"
    assert ROWS["open_clip"][0] == "3.3 up to 4"
