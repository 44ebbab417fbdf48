"""Images that are decoded once and augmented in batches: the same training but for rounding."""

import numpy as np
import pytest
import torch
from PIL import Image

from dualenc.data.images import ImageFiles
from dualenc.data.table_pairs import ImageViews
from dualenc.data.views import SimCLR
from dualenc.encoders import ImageEncoder
from dualenc.errors import DualencError
from dualenc.objectives import ISIR
from dualenc.training.log import read_metrics
from tests.training.runs import train

COUNT = 24


@pytest.fixture
def folder(tmp_path):
    waves = np.linspace(0, 6, 32)
    for number in range(COUNT):
        pixels = np.sin(waves[:, None] * (1 + number % 5) + waves[None] * (1 + number % 3))[..., None] * [100, 70, 50]
        Image.fromarray((pixels + 128).astype(np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def images(folder):
    return ImageViews(ImageFiles(folder, [f"{number}.png" for number in range(COUNT)]))


def run(folder, name, **changes):
    torch.manual_seed(0)
    model = ImageEncoder("resnet18", image_size=32, projector_dim=8, augment=SimCLR(32))
    objective = ISIR(temperature=0.5, num_left=COUNT, num_right=COUNT)
    changes = {"learning_rate": 1e-3, "epochs": 2, "log_every": 1, "on_error": "skip"} | changes
    result = train(folder / name, model=model, pairs=images(folder), objective=objective, **changes)
    return result, [line["gradient_norm"] for line in read_metrics(folder / name / "metrics.jsonl")]


@pytest.mark.slow
def test_decoded_images_train_alike(folder):
    (folder / "5.png").write_bytes(b"no image")
    plain, expected = run(folder, "plain")
    decoded, found = run(folder, "decoded", data_on_device=True, num_workers=2)
    # On a CPU "auto" leaves single images to workers.
    assert run(folder, "auto", data_on_device="auto")[1] == expected
    assert decoded.skipped == plain.skipped == 1
    assert found != expected
    assert found[:2] == pytest.approx(expected[:2], rel=0.1)


@pytest.mark.slow
def test_a_run_with_decoded_images_is_resumed_as_one(folder):
    whole, expected = run(folder, "whole", data_on_device=True)
    run(folder, "half", data_on_device=True, max_steps=4, epochs=None, schedule="constant", warmup=0)
    with pytest.raises(DualencError, match="data_on_device"):
        run(folder, "half", data_on_device=False, max_steps=4, epochs=None, schedule="constant", warmup=0, resume=True)
    assert len(expected) == whole.steps


def test_images_that_cannot_wait_on_a_device(folder):
    Image.new("RGB", (16, 16)).save(folder / "7.png")
    with pytest.raises(DualencError, match=r"image 7 has another size than those before: \(16, 16\); leave it out"):
        run(folder, "sizes", data_on_device=True)
    with pytest.raises(DualencError, match="no tower augments batches of images"):
        train(folder / "vectors", data_on_device=True)
