"""Images that are decoded once and augmented in batches: the same training but for rounding."""

import signal

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
from tests.training.runs import run_and_die, train, train_and_die

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


def settings(folder, **changes):
    torch.manual_seed(0)
    model = ImageEncoder("test_resnet", image_size=32, projector_dim=8, augment=SimCLR(32))
    objective = ISIR(temperature=0.5, num_left=COUNT, num_right=COUNT)
    parts = {"model": model, "pairs": images(folder), "objective": objective}
    return parts | {"learning_rate": 1e-3, "epochs": 2, "log_every": 1, "on_error": "skip"} | changes


def logged(output, name):
    return [line[name] for line in read_metrics(output / "metrics.jsonl")]


@pytest.mark.slow
def test_decoded_images_train_alike(folder):
    (folder / "5.png").write_bytes(b"no image")
    plain = train(folder / "plain", **settings(folder))
    decoded = train(folder / "decoded", **settings(folder, data_on_device=True, num_workers=2))
    train(folder / "auto", **settings(folder, data_on_device="auto"))
    assert decoded.skipped == plain.skipped == 1
    expected, found = (logged(folder / name, "batch_estimate")[:2] for name in ("plain", "decoded"))
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)  # another seed's views differ by 5 and 15 %
    # On a CPU "auto" leaves single images to workers.
    assert logged(folder / "auto", "batch_estimate")[:2] == expected


@pytest.mark.slow
def test_a_killed_run_with_decoded_images_resumes_as_if_unbroken(folder):
    train(folder / "unbroken", **settings(folder, data_on_device=True))
    assert run_and_die(train_and_die, folder / "broken", 6, settings(folder, data_on_device=True)) == -signal.SIGKILL
    with pytest.raises(DualencError, match="data_on_device"):
        train(folder / "broken", **settings(folder, data_on_device=False), resume=True)
    train(folder / "broken", **settings(folder, data_on_device=True), resume=True)
    assert logged(folder / "broken", "gradient_norm") == logged(folder / "unbroken", "gradient_norm")


def test_images_that_cannot_wait_on_a_device(folder):
    Image.new("RGB", (16, 16)).save(folder / "7.png")
    with pytest.raises(DualencError, match=r"image 7 has another size than those before: \(16, 16\); leave it out"):
        train(folder / "sizes", **settings(folder, data_on_device=True))
    with pytest.raises(DualencError, match="no tower augments batches of images"):
        train(folder / "vectors", data_on_device=True)
