"""The notebooks run at a small size, where what they assert must hold; the outputs in them are of a
full run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

nbclient = pytest.importorskip("nbclient", reason='notebooks need pip install ".[test]"')
nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"


def outputs(notebook: Any, kind: str) -> list[Any]:
    """The outputs of all cells that have a representation of this kind, such as image/png."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs if kind in output.get("data", {})]


@pytest.mark.parametrize(("name", "figures"), [("small_batch", 1), ("from_emc2_to_code", 2)])
def test_notebook(name: str, figures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 200_000
    assert len(outputs(notebook, "image/png")) == figures
    assert "assert " in "".join(cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    monkeypatch.setenv("DUALENC_SHORT_NOTEBOOKS", "1")
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises the error of the first cell that fails
    assert len(outputs(notebook, "image/png")) == figures
