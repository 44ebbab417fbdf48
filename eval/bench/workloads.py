"""What is trained: data, a model, and the tool to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rivals
from frame import Settings
from PIL import Image
from rivals import SMALL_CLIP, VIEW_SIZE
from tasks import default_model

from dualenc.data import ImageFolderViews, PairDataset, TableViews
from dualenc.data.readers.images import ImageFiles
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder, ImageEncoder, ImageTextEncoder, TextEncoder
from dualenc.workflows.run_quickstart import read_docstrings


class Workload(NamedTuple):
    """Training pairs, what makes our model, and the other tool's `rival(pairs, settings, …)`."""

    pairs: PairDataset
    new_model: Callable[[], DualEncoder]
    rival: Callable[..., None]


def texts(settings: Settings, count: int, folder: Path) -> Workload:
    """MiniLM on summaries and bodies of docstrings, or titles and texts of a corpus.jsonl."""
    if settings["text_source"] == "docstrings":
        pairs = [(docstring.summary, docstring.rest) for docstring in read_docstrings(count)]
    else:
        source = Path(settings["text_source"])
        file = source / "corpus.jsonl" if source.is_dir() else source
        with file.open(encoding="utf-8") as lines:
            documents = ((own.get("title"), own.get("text")) for own in map(json.loads, lines))
            pairs = [each for each in documents if all(each)][:count]
    left, right = map(list, zip(*pairs, strict=True))
    new_model = partial(TextEncoder, default_model(), max_length=settings["text_length"])
    return Workload(PairDataset(left, right), new_model, rivals.sentence_transformers)


def images_with_texts(settings: Settings, count: int, folder: Path) -> Workload:
    """A small CLIP on noise with captions."""
    files = noise_images(folder, count, size=128, suffix=".jpg")
    captions = [f"noise of number {number}, without any picture in it" for number in range(count)]
    pairs = PairDataset(files, captions, left_modality="image")
    return Workload(pairs, partial(ImageTextEncoder, config=SMALL_CLIP), rivals.open_clip)


def views(settings: Settings, count: int, folder: Path) -> Workload:
    """ResNet-18 on two views of images."""
    if settings["images"] is None:
        noise_images(folder, count, size=VIEW_SIZE, suffix=".png")
        pairs = ImageFolderViews(folder)
    else:
        images = TableViews(settings["images"])
        pairs = images.subset(np.arange(min(count, len(images))))
    augment = SimCLR(VIEW_SIZE)
    new_model = partial(ImageEncoder, "resnet18", image_size=VIEW_SIZE, augment=augment)
    return Workload(pairs, new_model, rivals.lightly)


WORKLOADS: dict[str, Callable[[Settings, int, Path], Workload]] = {
    "text": texts,
    "image-text": images_with_texts,
    "views": views,
}


def noise_images(folder: Path, count: int, size: int, suffix: str) -> ImageFiles:
    """Write image files of noise to a folder."""
    draw = np.random.default_rng(0)
    names = [f"{number}{suffix}" for number in range(count)]
    for name in names:
        Image.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / name)
    return ImageFiles(folder, names)
