"""What `import dualenc` offers, and what it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dualenc


def test_every_name_is_what_its_package_offers() -> None:
    for name in dualenc.__all__:
        assert getattr(dualenc, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = dualenc.nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("dualenc", "torch"), ("dualenc.objectives", "transformers"), ("dualenc.objectives", "datasets")],
)
def test_an_import_loads_no_more_than_it_needs(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
