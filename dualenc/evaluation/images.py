"""Labelled images for evaluations: opening, features, class numbers, augmentation before preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from dualenc.data import Corpus, open_corpus
from dualenc.data.columns import Picked
from dualenc.data.labels import rows_with_label
from dualenc.data.views import SimCLR
from dualenc.encoders import Tower, load_model
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import EncodeInputs, PrepareImages
from dualenc.evaluation.corruptions import Images
from dualenc.evaluation.embedding import embed_into
from dualenc.types import Inputs, Output


def random_rows(total: int, limit: int | None) -> np.ndarray:
    """All row numbers below `total`, or a sample of `limit` with a fixed seed: files are often sorted by class."""
    return np.sort(np.random.default_rng(0).permutation(total)[:limit])


def open_images(
    data: str, split: str, *, label_column: str | None = None, quotes: bool | None = None, limit: int | None = None
) -> Corpus:
    """The images of whatever `data.open_corpus` reads, with their labels if there are any; `limit` of them at random.

    If some images have labels, those without are left out, counted and reported.
    """
    images = open_corpus(data, modality="image", split=split, label_column=label_column, quotes=quotes)
    if images.modality != "image":
        raise DualencError(f"{data}: holds {images.modality}; give images")
    if images.labels is not None:
        rows = rows_with_label(images.labels, data, images.ids)
        images = images if len(rows) == len(images) else images.take(rows)
    if limit is None or limit >= len(images):
        return images
    return images.take(random_rows(len(images), limit))


def require_labels(corpus: Corpus, what: str, *, for_training: bool = False) -> np.ndarray:
    """The (N,) labels of a corpus that `open_images` opened; for training two classes or more."""
    if corpus.labels is None:
        raise DualencError(f"{what}: there are no labels; name their column with --label-column, or use class folders")
    if for_training and len(np.unique(corpus.labels)) < 2:
        raise DualencError(f"{what}: all images are of one class; a probe needs two or more")
    return corpus.labels


class Labelled(NamedTuple):
    """Images, their features (N, D) and labels (N,); images that cannot be read are left out of all three."""

    items: Images
    features: np.ndarray
    labels: np.ndarray


def labelled_features(
    tower: Tower, corpus: Corpus, labels: np.ndarray, folder: Path, batch_size: int, num_workers: int
) -> Labelled:
    """Features to fit probes on or test them with; kept in `folder`, from which an interrupted run resumes."""
    embeddings = embed_into(folder, tower, corpus, batch_size=batch_size, output="features", num_workers=num_workers)
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    rows = np.array([row_of[name] for name in embeddings.ids])
    return Labelled(Picked(corpus.items, rows), np.asarray(embeddings.vectors, np.float32), labels[rows])


def align_labels(labels: np.ndarray, names: Sequence[str] | None, onto: Sequence[str] | None, what: str) -> np.ndarray:
    """Class numbers (N,) of one source, with their names, in the numbering of another, by the names of the classes.

    A name matches its equal, or one that begins with it as a word ("n01443537" and "n01443537 goldfish"). Where one
    source has no names the numbers stay; a class that occurs and is not among the others is an error, which `what`
    opens.
    """
    if names is None or onto is None or list(names) == list(onto):
        return labels
    numbers = {key: number for number, name in reversed(list(enumerate(onto))) for key in (name.split()[0], name)}
    numbers |= {name: number for number, name in enumerate(onto)}
    mapped = labels.copy()
    for number in np.unique(labels).tolist():
        if names[number] not in numbers:
            among = f"the {len(onto)} classes of the training images"
            raise DualencError(f"{what}: class {names[number]} is not among {among}")
        mapped[labels == number] = numbers[names[number]]
    return mapped


def open_image_tower(model: str, device: torch.device) -> Tower:
    """The image tower of a model of kind image or image-text, in evaluation mode."""
    encoder = load_model(model, device=str(device))
    if encoder.left.modality != "image":
        raise DualencError(f"{model}: is of kind {encoder.kind} and encodes no images; give a model of kind image")
    encoder.eval()
    return encoder.left


class AugmentedPrepare:
    """Augmentation before a tower's evaluation preprocessing; picklable.

    `augment` takes an image and a seed to pixels (3, H, W) in [0, 1] or to an image.
    """

    def __init__(self, prepare: PrepareImages, augment: Callable[[Image.Image, int], Any]) -> None:
        self.prepare = prepare
        self.augment = augment

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int] | None = None) -> Inputs:
        if seeds is None:
            return self.prepare(items)
        views = [self.augment(item, seed) for item, seed in zip(items, seeds, strict=True)]
        for place, view in enumerate(views):
            if isinstance(view, torch.Tensor):
                pixels = (view.permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8)
                views[place] = Image.fromarray(pixels.numpy())
        return self.prepare(views)


def simclr_prepare(prepare: PrepareImages) -> AugmentedPrepare:
    """SimCLR's augmentation at the size of the tower's input, before the tower's preprocessing."""
    side = prepare([Image.new("RGB", (64, 64))])["image"].shape[-1]
    return AugmentedPrepare(prepare, SimCLR(size=side))


def encoder_of(tower: Tower, output: Output) -> EncodeInputs:
    """Inputs of the tower to (B, D) float32 embeddings, or to the features that probes use."""
    device = next(tower.parameters()).device

    @torch.inference_mode()
    def encode(inputs: Inputs) -> np.ndarray:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        vectors: torch.Tensor = tower(on_device) if output == "embedding" else tower.features(on_device)
        return vectors.float().cpu().numpy()

    return encode
