"""Image encoders against timm itself; training crops are functions of image and seed, and seeding
stays local."""

from __future__ import annotations

import pickle
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from dualenc.encoders import ImageEncoder, load_model
from dualenc.encoders.image import ImagePrepare, seeded, seeded_transform
from dualenc.errors import DualencError

SMALL: dict[str, Any] = {
    "backbone": "resnet10t",
    "image_size": 16,
    "backbone_args": {"stem_type": ""},
}

BACKBONES: dict[str, dict[str, Any]] = {
    "plain": {"backbone": "test_resnet", "image_size": 80},
    "small-image stem": SMALL,
    "transformer of fixed size": {
        "backbone": "test_vit",
        "image_size": 32,
        "backbone_args": {"patch_size": 8},
    },
    "own normalisation": {"backbone": "test_convnext", "image_size": 32},
}


@pytest.fixture(params=list(BACKBONES))
def model(request: pytest.FixtureRequest) -> ImageEncoder:
    torch.manual_seed(0)
    return ImageEncoder(**BACKBONES[request.param], projector_dim=8)


@pytest.mark.slow
@torch.no_grad()
def test_the_lines_of_the_model_card_load_the_backbone_in_timm_with_equal_features(
    model: ImageEncoder, images: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    lines = re.findall(
        r"With timm:\n\n```python\n(.*?)```", Path("model/README.md").read_text(), flags=re.DOTALL
    )[0]
    assert "dualenc" not in lines
    theirs: dict[str, Any] = {}
    exec(lines, theirs)
    pixels = torch.stack([theirs["transform"](image) for image in images])
    assert torch.equal(model.left.prepare(images)["image"], pixels)
    features = model.left.features({"image": pixels})
    assert features.shape == (3, model.left.feature_dim)
    assert (theirs["model"](pixels) - features).abs().max() < 1e-5


@pytest.mark.slow
def test_reloaded_model_is_the_same_with_its_projector(
    model: ImageEncoder, images: list[Image.Image], tmp_path: Path
) -> None:
    model.train()
    model("left", model.left.prepare(images))  # moves the statistics of batch normalisation
    model.eval().save(tmp_path / "model")
    again = load_model(tmp_path / "model")
    ours = model.left.prepare(images)
    assert torch.equal(again.left.prepare(images)["image"], ours["image"])
    assert torch.equal(again("right", ours), model("right", ours))
    assert again.kind == "image"
    assert again.views
    again.save(tmp_path / "again")
    for name in ("model.safetensors", "projector.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


@pytest.mark.parametrize("backbone", ["eva02_tiny_patch14_224", "test_vit", "test_resnet"])
def test_another_image_size_is_that_of_the_saved_model(backbone: str, tmp_path: Path) -> None:
    """Also where timm does not take it from the configuration; a saved model opens at yet another
    size."""
    small = {"depth": 1, "embed_dim": 24, "num_heads": 2} if "eva" in backbone else {}
    model = ImageEncoder(backbone, image_size=112, projector_dim=None, backbone_args=small)
    model.save(tmp_path / "model")
    for size in (None, 112, 224):
        again = ImageEncoder(str(tmp_path / "model"), image_size=size, projector_dim=None)
        again.save(tmp_path / "again")
        pixels = {"image": torch.rand(1, 3, size or 112, size or 112)}
        assert torch.equal(load_model(tmp_path / "again")("left", pixels), again("left", pixels))
        assert size == 224 or torch.equal(model("left", pixels), again("left", pixels))


def test_training_compares_the_projector_and_probes_see_the_backbone(
    images: list[Image.Image],
) -> None:
    model = ImageEncoder("test_resnet", image_size=32, projector_dim=8)
    linears = [layer for layer in model.left.projector if isinstance(layer, nn.Linear)]
    size = model.left.feature_dim
    assert [(layer.in_features, layer.out_features) for layer in linears] == [
        (size, size),
        (size, 8),
    ]
    inputs = model.left.prepare(images)
    expected = model.left.projector(model.left.features(inputs))
    torch.testing.assert_close(model("left", inputs), nn.functional.normalize(expected, dim=1))
    assert model.left is model.right


def test_vectors_are_unit_norm_float32_also_in_bfloat16(images: list[Image.Image]) -> None:
    model = ImageEncoder("test_resnet", image_size=32)
    inputs = model.left.prepare(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors, features = model("left", inputs), model.left.features(inputs)
    assert vectors.dtype == features.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))


def test_without_projector_the_features_are_compared(
    images: list[Image.Image], tmp_path: Path
) -> None:
    model = ImageEncoder("test_resnet", image_size=32, projector_dim=None)
    inputs = model.left.prepare(images)
    expected = nn.functional.normalize(model.left.features(inputs), dim=1)
    torch.testing.assert_close(model("left", inputs), expected)
    model.save(tmp_path / "model")
    assert not (tmp_path / "model" / "projector.safetensors").exists()
    assert torch.equal(load_model(tmp_path / "model")("left", inputs), model("left", inputs))


def test_an_augmentation_of_ones_own_is_normalised(
    images: list[Image.Image], caplog: pytest.LogCaptureFixture
) -> None:
    def white(image: Image.Image, seed: int) -> torch.Tensor:
        return torch.full((3, 8, 8), float(seed))

    model = ImageEncoder("test_resnet", image_size=32, augment=white)
    mean, std = (torch.tensor(model.data_config[name]) for name in ("mean", "std"))
    assert torch.allclose(
        model.left.prepare(images[:1], seeds=[1])["image"][0, :, 0, 0], (1 - mean) / std
    )
    assert "training views have 8x8 pixels, but images to encode have 32x32" in caplog.text


def test_a_saved_model_trains_on_with_its_projector(tmp_path: Path) -> None:
    model = ImageEncoder("test_resnet", image_size=32, projector_dim=16)
    model.save(tmp_path)
    for name in (str(tmp_path), f"local-dir:{tmp_path}"):
        again = ImageEncoder(name, projector_dim=16)
        assert all(
            map(torch.equal, model.left.projector.parameters(), again.left.projector.parameters())
        )
    assert ImageEncoder(str(tmp_path), projector_dim=8).dim == 8


@pytest.mark.parametrize(("size", "small"), [(32, True), (64, True), (65, False)])
def test_small_images_get_the_stem_for_them(size: int, small: bool) -> None:
    model = ImageEncoder("resnet10t", image_size=size, backbone_args={"stem_type": ""})
    assert model.small_image_stem is small
    assert model.left.backbone.conv1.kernel_size == ((3, 3) if small else (7, 7))
    assert (model.data_config["crop_pct"] == 1.0) is small


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projector_dim": 0}, "projector_dim is 0"),
        ({"image_size": 0}, "cannot encode an image"),
        (
            {"backbone": "test_vit", "small_image_stem": True},
            "does not have a stem that small_image_stem could replace",
        ),
        ({"backbone_args": {"no_such_argument": 1}}, "no_such_argument"),
        ({"backbone": "./no-such-folder"}, "no such folder"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        ImageEncoder(**{"backbone": "test_resnet", **arguments})


TO_PIXELS = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


def test_seeding_is_local() -> None:
    seed_all()
    expected = draw()
    seed_all()
    inside = []
    for seed in (2**63 - 1, 2**63 - 1, 1):
        with seeded(seed):
            inside.append(draw())
    assert draw() == expected
    assert inside[0] == inside[1]
    assert all(a != b for a, b in zip(inside[0], inside[2]))


@pytest.fixture
def prepare() -> ImagePrepare:
    crops = v2.Compose([v2.RandomResizedCrop(8), TO_PIXELS])
    return ImagePrepare(
        v2.Compose([v2.Resize((8, 8)), TO_PIXELS]), partial(seeded_transform, transform=crops), {}
    )


def test_views_do_not_depend_on_company_or_worker(
    prepare: ImagePrepare, images: list[Image.Image]
) -> None:
    together = prepare(images, seeds=[5, 6, 7])["image"]
    assert together.shape == (3, 3, 8, 8)
    elsewhere = pickle.loads(pickle.dumps(prepare))
    assert torch.equal(elsewhere(images[1:2], seeds=[6])["image"], together[1:2])
    assert not torch.equal(prepare(images, seeds=[5, 8, 7])["image"][1], together[1])
