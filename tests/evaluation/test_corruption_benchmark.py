"""The benchmark of corrupted retrieval runs in small and says how long 10,000 images take."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.commands.image_models import save_splits

SCRIPT = Path(__file__).resolve().parents[2] / "eval" / "bench" / "corruption.py"


def test_minutes_follow_from_milliseconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = save_splits(tmp_path / "data", test=2)
    runpy.run_path(str(SCRIPT))["main"](str(data), images=2, num_workers=0)
    printed = capsys.readouterr().out
    assert printed.startswith("2 images of 32 pixels, 19 corruptions, 0 workers")
    per_image, minutes = (float(re.search(rf"([0-9.]+) {unit}", printed)[1]) for unit in ("ms per", "minutes"))
    assert minutes == pytest.approx(10_000 * per_image / 60_000, rel=0.1, abs=0.1)
