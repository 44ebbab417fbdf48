"""Vectors of images are compared with the images; what explains a difference is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from timm.data import create_transform

from dualenc.data import open_image
from dualenc.encoders import load_model
from dualenc.encoders.image import ImageEncoder
from dualenc.errors import DualencError
from dualenc.search import Embeddings, Index
from dualenc.workflows.check_vectors import check
from tests.helpers import toy
from tests.helpers.checked import finding
from tests.helpers.in_process import run

pytestmark = pytest.mark.slow

N = 120
SIZE = (56, 40)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are neither square nor of the models' size, two models, and indexes of them."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "pictures").mkdir()
    for row in range(N):
        pixels = np.random.default_rng(row).integers(0, 255, (*SIZE[::-1], 3), np.uint8)
        Image.fromarray(pixels).resize(SIZE).save(folder / "pictures" / f"{row:03d}.png")
    toy.image_text_model(folder / "clip")
    torch.manual_seed(0)
    ImageEncoder("test_resnet", image_size=96, projector_dim=16).save(folder / "image")
    for kind in ("clip", "image"):
        run("index", folder / kind, folder / "pictures", "--out", folder / f"{kind}-index")
    return folder


def images(made: Path) -> list[Image.Image]:
    return [open_image(path) for path in sorted((made / "pictures").iterdir())]


def written(made: Path, kind: str, out: Path, pixels: Callable[[Image.Image], Any]) -> Path:
    """The index of what a model gives for images that were prepared otherwise, by other code."""
    model = load_model(made / kind)
    prepared = torch.stack([pixels(image) for image in images(made)])
    with torch.inference_mode():
        vectors = model.left({"image": prepared}).numpy()
    about = Index.open(made / f"{kind}-index").provenance
    names = ("model", "model_checksum", "side", "modality", "output", "kind", "data", "read")
    ids = [f"{row:03d}.png" for row in range(N)]
    embeddings = Embeddings(ids, vectors, about.only(names).updated(normalized=True))
    Index.build(embeddings, folder=out)
    return out


def timm_pixels(made: Path, **changes: Any) -> Callable[[Image.Image], Any]:
    config = json.loads((made / "image" / "config.json").read_text())["pretrained_cfg"]
    names = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    known = {name: config[name] for name in names if name in config}
    return create_transform(**{**known, **changes}, is_training=False)


def clip_pixels(made: Path, **changes: Any) -> Callable[[Image.Image], Any]:
    config = json.loads((made / "clip" / "open_clip_config.json").read_text())["preprocess_cfg"]
    cfg = PreprocessCfg(**{"size": 32, **config, **changes})
    return image_transform_v2(cfg, is_train=False)


@contextmanager
def repainted(made: Path, count: int) -> Iterator[None]:
    """Replace the first images by others for a moment."""
    pictures = made / "pictures"
    shutil.copytree(pictures, made / "kept")
    for row in range(count):
        Image.new("RGB", SIZE, (255, row, 255)).save(pictures / f"{row:03d}.png")
    yield
    shutil.rmtree(pictures)
    (made / "kept").rename(pictures)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "PQ8x4fs", "SQ8"])
@pytest.mark.parametrize("kind", ["clip", "image"])
def test_no_alarm_without_a_fault(made: Path, tmp_path: Path, kind: str, factory: str) -> None:
    words = (made / kind, made / "pictures", "--out", tmp_path / "index", "--factory", factory)
    run("index", *words)
    result = check(tmp_path / "index", model=str(made / kind))
    assert not result.alarms
    numbers = finding(result, "canaries").numbers
    assert (numbers["images"], numbers["deviating"]) == (N, 0)


CLIP_CHANGES = [
    ({"resize_mode": "squash"}, "resize_mode squash instead of shortest"),
    ({"mean": (0.5,) * 3, "std": (0.5,) * 3}, "the mean and std of Inception and SigLIP"),
]
IMAGE_CHANGES = [
    ({"interpolation": "nearest"}, "interpolation nearest instead of bilinear"),
    ({"input_size": (3, 64, 64)}, "input_size [3, 64, 64] instead of [3, 96, 96]"),
    ({"crop_pct": 1.0}, "crop_pct 1.0 instead of 0.95"),
    ({"mean": (0.0,) * 3, "std": (1.0,) * 3}, "the mean and std of none"),
]


@pytest.mark.parametrize(("changes", "named"), CLIP_CHANGES)
def test_preprocessing_of_open_clip_is_named(
    made: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    result = check(written(made, "clip", tmp_path / "index", clip_pixels(made, **changes)))
    assert f"images prepared with {named}" in finding(result, "canaries").line
    assert finding(result, "canaries").state == "alarm"
    same = written(made, "clip", tmp_path / "same", clip_pixels(made))
    assert finding(check(same), "canaries").state == "ok"


@pytest.mark.parametrize(("changes", "named"), IMAGE_CHANGES)
def test_preprocessing_of_timm_is_named(
    made: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    result = check(written(made, "image", tmp_path / "index", timm_pixels(made, **changes)))
    assert f"images prepared with {named}" in finding(result, "canaries").line
    assert finding(result, "canaries").state == "alarm"
    same = written(made, "image", tmp_path / "same", timm_pixels(made))
    assert finding(check(same), "canaries").state == "ok"


def test_other_weights(made: Path, tmp_path: Path) -> None:
    toy.image_text_model(tmp_path / "other", seed=1)
    result = check(made / "clip-index", model=str(tmp_path / "other"))
    line = finding(result, "canaries").line
    assert f"{N} of {N} images have other vectors" in line
    assert "the model's weights or settings are others than those recorded" in line


def test_changed_broken_and_missing_images(made: Path, tmp_path: Path) -> None:
    index = shutil.copytree(made / "clip-index", tmp_path / "index")
    with repainted(made, 10):
        line = finding(check(index), "canaries").line
        assert "10 of 120 images have other vectors" in line
        assert "the images have changed, such as '000.png'" in line
    with repainted(made, 0):
        (made / "pictures" / "007.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        found = finding(check(index), "canaries")
        assert (found.state, found.numbers["images"]) == ("ok", N - 1)
        assert found.line.endswith("; 1 cannot be read")
        (made / "pictures" / "007.png").unlink()
        found = finding(check(index), "canaries")
        assert found == ("canaries", "skipped", found.line, {})
        assert "the data lacks 1 of 120 images, such as '007.png'" in found.line
        for path in (made / "pictures").iterdir():
            path.write_bytes(b"\x89PNG\r\n\x1a\n")
        (made / "pictures" / "007.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        found = finding(check(index), "canaries")
        assert (found.state, "none of 120 items could be used" in found.line) == ("skipped", True)


def test_images_that_have_moved(made: Path, tmp_path: Path) -> None:
    index = shutil.copytree(made / "clip-index", tmp_path / "index")
    Index.open(index).provenance.updated(data=str(tmp_path / "gone")).write(index)
    assert "is gone; name it by --data" in finding(check(index), "canaries").line
    run("check", index, "--data", made / "pictures")
    with pytest.raises(DualencError, match="no such"):
        check(index, data=tmp_path / "nowhere")
    Index.open(index).provenance.updated(modality="text").write(index)
    with pytest.raises(DualencError, match="these vectors are not of images"):
        check(index, data=made / "pictures")
