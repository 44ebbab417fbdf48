"""Models on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import toy
from tests.helpers.image_models import save_image_model


@pytest.fixture(scope="session")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of kind image."""
    folder = tmp_path_factory.mktemp("models") / "image"
    save_image_model(folder)
    return folder


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a query-document model that knows the words of `toy`."""
    return toy.text_model(tmp_path_factory.mktemp("models") / "toy-text")


@pytest.fixture(scope="session")
def toy_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image-text model that knows the words of `toy`'s captions."""
    return toy.image_text_model(tmp_path_factory.mktemp("models") / "toy-clip")
