"""Models on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualenc.data import ImageFolderViews
from dualenc.data.views import SimCLR
from dualenc.encoders.image import ImageEncoder
from dualenc.objectives import DCL
from dualenc.training.trainer import Trainer
from tests.commands import toy
from tests.commands.image_models import save_classes, save_image_model


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


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 18 pictures, one folder below it for each of three classes."""
    return save_classes(tmp_path_factory.mktemp("data") / "images", per_class=6)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory, classes: Path) -> Path:
    """A short training on `classes` with checkpoints at steps 2, 4 and 6."""
    torch.manual_seed(0)
    model = ImageEncoder("test_resnet", image_size=32, projector_dim=16, augment=SimCLR(32))
    folder = tmp_path_factory.mktemp("runs") / "short"
    trainer = Trainer(
        output=folder, batch_size=9, max_steps=6, save_every=2, keep_checkpoints=9, learning_rate=3e-3, progress=False
    )
    trainer.fit(model, ImageFolderViews(classes), DCL(num_left=18, temperature=0.2, views=True))
    return folder
