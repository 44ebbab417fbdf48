"""Models on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import tiny


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a query-document model."""
    folder = tmp_path_factory.mktemp("models") / "text"
    tiny.save_text_model(folder)
    return folder


@pytest.fixture(scope="session")
def image_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image-text model."""
    folder = tmp_path_factory.mktemp("models") / "clip"
    tiny.save_image_text_model(folder)
    return folder
