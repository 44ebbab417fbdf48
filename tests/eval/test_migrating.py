"""Between a model and its linear image, a migration loses little."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import toy
from tests.helpers.eval_scripts import load_script


@pytest.mark.slow
def test_migrating_to_a_linear_image_of_a_model_loses_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("migrating.py")
    model = toy.text_model(tmp_path / "old" / "model")
    collection = toy.write_beir(tmp_path / "beir", documents=300, queries=40)
    script.project(str(model), tmp_path / "new" / "model", dim=48)
    script.measure(str(model), str(tmp_path / "new" / "model"), collection, tmp_path / "work")
    printed = capsys.readouterr().out.split("beir, map of")[1]
    lines = [line for line in printed.splitlines() if line.strip().startswith(("old", "new"))]
    assert len(lines) == 7
    # The last column is what a system finds of the new model's ten: of mapped documents nearly all.
    assert all(float(line.split()[-1]) > 0.9 for line in lines[2:])
    assert lines[-1].split()[-2:] == ["1.0000", "1.0000"]
