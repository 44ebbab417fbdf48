"""What is trained: data, a model, and the tool to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import rivals
from in_turn import default_model
from PIL import Image
from rivals import Train

from dualenc.data import ImageFolderViews, PairDataset, TableViews
from dualenc.data.readers.images import ImageFiles
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder, ImageEncoder, ImageTextEncoder, TextEncoder

TaskName = Literal["text", "image-text", "views"]
FEW = 3
"""Steps before times, and a profile, are taken."""
VIEW_SIZE = 32

SMALL_CLIP: dict[str, Any] = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 96, "patch_size": 16, "width": 256, "layers": 6, "head_width": 64},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}


@dataclass
class Options:
    """What all rows of a run have in common; see `main`."""

    batch_size: int
    steps: int
    repeats: int
    workers: int
    text_source: str
    text_length: int
    images: Path | None
    chunk_size: int | None
    rows: list[str] | None
    profile: Path | None

    @property
    def num_pairs(self) -> int:
        """As many as the longest training needs."""
        return self.batch_size * (FEW + self.steps + 1)


class Task(NamedTuple):
    """Data, a model and another tool.

    Attributes:
        name: of the task.
        pairs: training pairs.
        new_model: makes our model.
        rival_name: the other tool.
        new_rival: makes its training loop, in bf16 or not.
    """

    name: str
    pairs: PairDataset
    new_model: Callable[[], DualEncoder]
    rival_name: str
    new_rival: Callable[[bool], Train]


def text_task(options: Options, folder: Path) -> Task:
    """MiniLM on pairs of texts, against sentence-transformers."""
    left, right = text_pairs(options.text_source, options.num_pairs)
    common = (
        left,
        right,
        options.batch_size,
        options.workers,
        options.text_length,
        options.chunk_size,
    )
    new_model = partial(TextEncoder, default_model(), max_length=options.text_length)
    return Task(
        "text",
        PairDataset(left, right),
        new_model,
        "sentence-transformers",
        lambda bf16: rivals.sentence_transformers(*common, bf16),
    )


def text_pairs(source: str, count: int) -> tuple[list[str], list[str]]:
    """Summaries and bodies of docstrings; or titles and texts of a corpus.jsonl, named by itself or
    its folder."""
    from dualenc.workflows.run_quickstart import read_docstrings

    if source == "docstrings":
        docstrings = read_docstrings(count)
        return [d.summary for d in docstrings], [d.rest for d in docstrings]
    file = Path(source) / "corpus.jsonl" if Path(source).is_dir() else Path(source)
    with file.open(encoding="utf-8") as lines:
        documents = [json.loads(line) for line in lines]
    pairs = [(d["title"], d["text"]) for d in documents if d.get("title") and d.get("text")][:count]
    return [title for title, _ in pairs], [text for _, text in pairs]


def image_text_task(options: Options, folder: Path) -> Task:
    """A small CLIP on noise with captions, against open_clip."""
    names = noise_images(folder, options.num_pairs, size=128, suffix=".jpg")
    captions = [
        f"noise of number {number}, without any picture in it" for number in range(len(names))
    ]
    common = (folder, names, captions, SMALL_CLIP, options.batch_size, options.workers)
    return Task(
        "image-text",
        PairDataset(ImageFiles(folder, names), captions, left_modality="image"),
        partial(ImageTextEncoder, config=SMALL_CLIP),
        "open_clip",
        lambda bf16: rivals.open_clip(*common, bf16),
    )


def views_task(options: Options, folder: Path) -> Task:
    """ResNet-18 on two views of images, against lightly."""
    if options.images is None:
        noise_images(folder, options.num_pairs, size=VIEW_SIZE, suffix=".png")
        pairs = ImageFolderViews(folder)
    else:
        images = TableViews(options.images)
        pairs = images.subset(np.arange(min(options.num_pairs, len(images))))
    new_model = partial(ImageEncoder, "resnet18", image_size=VIEW_SIZE, augment=SimCLR(VIEW_SIZE))
    common = (pairs.left_items, new_model, VIEW_SIZE, options.batch_size, options.workers)
    return Task("views", pairs, new_model, "lightly", lambda bf16: rivals.lightly(*common, bf16))


TASKS: dict[TaskName, Callable[[Options, Path], Task]] = {
    "text": text_task,
    "image-text": image_text_task,
    "views": views_task,
}


def noise_images(folder: Path, count: int, size: int, suffix: str) -> list[str]:
    """Names of image files of noise, written to a folder."""
    draw = np.random.default_rng(0)
    names = [f"{number}{suffix}" for number in range(count)]
    for name in names:
        Image.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / name)
    return names
