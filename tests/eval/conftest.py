"""A run, its images and a model that scripts measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualenc.data import ImageFolderViews
from dualenc.data.views import SimCLR
from dualenc.encoders.image import ImageEncoder
from dualenc.objectives import DCL
from dualenc.training.trainer import Trainer
from tests.helpers.image_models import save_classes


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
        output=folder,
        batch_size=9,
        max_steps=6,
        save_every=2,
        keep_checkpoints=9,
        learning_rate=3e-3,
        progress=False,
    )
    trainer.fit(model, ImageFolderViews(classes), DCL(num_left=18, temperature=0.2, views=True))
    return folder
