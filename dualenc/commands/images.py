"""What the image evaluations share: images with labels, the image tower of a model, augmented views, encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.commands.evaluation import keep_embeddings
from dualenc.errors import DualencError
from dualenc.evaluation.corruption import Images
from dualenc.evaluation.image_versions import Encode, ImageVersions, Inputs, Prepare, encode_versions
from dualenc.evaluation.ledger import Ledger
from dualenc.files import remove, removed_if_refused
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Tower

Output = Literal["embedding", "features"]
Source = tuple[str, str, int | None]
"""Data, split and the number of images to take."""


def random_rows(total: int, limit: int | None) -> np.ndarray:
    """All numbers below `total`, or `limit` of them, always the same: files are often sorted by class."""
    return np.sort(np.random.default_rng(0).permutation(total)[:limit])


def open_images(data: str, split: str, *, label_column: str | None = None, limit: int | None = None) -> Corpus:
    """The images of whatever `data.open_corpus` reads, with their labels if there are any.

    Args:
        data: Also a folder of images with a subfolder for each split.
        split: Which split; a folder of images without such a subfolder is taken whole.
        label_column: Of a table; by default `label`, if there is one.
        limit: Take so many images, chosen at random, always the same ones.
    """
    from dualenc.data import Corpus, open_corpus
    from dualenc.data.columns import Picked
    from dualenc.data.sources import is_image_folder

    folder = Path(data) / split
    # A split is a name, not a way out of the folder.
    is_subfolder = Path(split).name == split != ".." and is_image_folder(data) and folder.is_dir()
    source = folder if is_subfolder else data
    images = open_corpus(source, modality="image", split=split, label_column=label_column)
    if images.modality != "image":
        raise DualencError(f"{data}: holds {images.modality}; give images")
    if limit is None or limit >= len(images):
        return images
    rows = random_rows(len(images), limit)
    labels = None if images.labels is None else images.labels[rows]
    ids = [images.ids[row] for row in rows]
    return Corpus(ids, Picked(images.items, rows), "image", labels=labels, class_names=images.class_names)


def require_labels(corpus: Corpus, what: str) -> np.ndarray:
    """The (N,) labels of a corpus.

    Raises:
        DualencError: it has none, or an image has none.
    """
    if corpus.labels is None:
        raise DualencError(f"{what}: there are no labels; name their column with --label-column, or use class folders")
    if (corpus.labels < 0).any():
        raise DualencError(f"{what}: image {int(np.argmax(corpus.labels < 0))} has no label; give every image one")
    return corpus.labels


class Labelled(NamedTuple):
    """Images, their features (N, D) and labels (N,); images that cannot be read are left out of all three."""

    items: Images
    features: np.ndarray
    labels: np.ndarray


def labelled_features(
    tower: Tower, corpus: Corpus, labels: np.ndarray, folder: Path, batch_size: int, num_workers: int
) -> Labelled:
    """What probes are fit on and tested with; features are kept in `folder`, where an interrupted run goes on."""
    from dualenc.data.columns import Picked

    embeddings = keep_embeddings(
        folder, tower, corpus, {}, batch_size=batch_size, output="features", num_workers=num_workers
    )
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    rows = np.array([row_of[name] for name in embeddings.ids])
    return Labelled(Picked(corpus.items, rows), np.asarray(embeddings.vectors, np.float32), labels[rows])


def align_labels(labels: np.ndarray, names: Sequence[str] | None, onto: Sequence[str] | None, what: str) -> np.ndarray:
    """Class numbers of one source in the numbering of another, by the names of the classes.

    A name matches its equal, or one that begins with it as a word ("n01443537" and "n01443537 goldfish").

    Args:
        labels: (N,) class numbers.
        names: The name of each class number; None leaves the numbers as they are.
        onto: The names in the other numbering.
        what: Names the source in the error.

    Raises:
        DualencError: a class that occurs is not among the others.
    """
    if names is None or onto is None or list(names) == list(onto):
        return labels
    numbers = {key: number for number, name in reversed(list(enumerate(onto))) for key in (name.split()[0], name)}
    numbers |= {name: number for number, name in enumerate(onto)}
    mapped = labels.copy()
    for number in np.unique(labels).tolist():
        if names[number] not in numbers:
            raise DualencError(
                f"{what}: class {names[number]} is not among the {len(onto)} classes of the training images"
            )
        mapped[labels == number] = numbers[names[number]]
    return mapped


def open_image_tower(model: str, device: torch.device) -> Tower:
    """The image tower of a model of kind image or image-text, in evaluation mode.

    Raises:
        DualencError: it cannot be loaded, or has no image tower.
    """
    from dualenc.encoders import load_model

    encoder = load_model(model, device=str(device))
    if encoder.left.modality != "image":
        raise DualencError(f"{model}: is of kind {encoder.kind} and encodes no images; give a model of kind image")
    encoder.eval()
    return encoder.left


class AugmentedPrepare:
    """A tower's evaluation preprocessing, of images augmented before it; picklable.

    Whatever preprocessing a model has, it sees the same augmentation; a loaded model does not know how it was trained.

    Args:
        prepare: The tower's.
        augment: Image and seed to pixels (3, H, W) in [0, 1] or to an image.
    """

    def __init__(self, prepare: Prepare, augment: Callable[[Image.Image, int], Any]) -> None:
        self.prepare, self.augment = prepare, augment

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int] | None = None) -> Inputs:
        if seeds is None:
            return self.prepare(items)
        return self.prepare([_as_image(self.augment(item, seed)) for item, seed in zip(items, seeds, strict=True)])


def simclr_prepare(prepare: Prepare) -> AugmentedPrepare:
    """SimCLR's augmentation at the size of the tower's input, before the tower's preprocessing."""
    from dualenc.data.views import SimCLR

    side = prepare([Image.new("RGB", (64, 64))])["image"].shape[-1]
    return AugmentedPrepare(prepare, SimCLR(size=side))


def crop_and_flip(image: Image.Image, seed: int) -> Image.Image:
    """A random crop, brought back to the image's size, and a random flip: the augmentation of the SGD probe."""
    import random

    from dualenc.data.views import crop_box

    draw = random.Random(seed).random
    top, left, height, width = crop_box(image.height, image.width, 0.08, draw)
    box = (left, top, left + width, top + height)
    view = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < 0.5 else view


def encoder_of(tower: Tower, output: Output) -> Encode:
    """Inputs of the tower to (B, D) float32 embeddings, or to the features that probes use."""
    device = next(tower.parameters()).device

    @torch.inference_mode()
    def encode(inputs: Inputs) -> np.ndarray:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        vectors: Tensor = tower(on_device) if output == "embedding" else tower.features(on_device)
        return vectors.float().cpu().numpy()

    return encode


def recorded(
    folder: Path,
    signature: dict[str, Any],
    versions: ImageVersions,
    encode: Encode,
    value_of: Callable[[list[int], np.ndarray], Sequence[Any]],
    *,
    indices: Sequence[int],
    num_workers: int,
    what: str,
) -> dict[int, Any]:
    """A value of each image from the features of its versions; resumes, and shares the images over processes.

    Args:
        folder: Where finished values are kept.
        signature: Everything the values depend on.
        versions: Of the images.
        encode: Inputs to features.
        value_of: Numbers (n) and features (n, V, C, D) of some images to one plain value for each.
        indices: Numbers of the images to do.
        num_workers: Processes that prepare.
        what: Names the progress bar.

    Returns:
        The value by number of every image that could be read, on every process. Others are counted on stderr.

    Raises:
        DualencError: none could be read; nothing is kept then.
    """
    with removed_if_refused(folder, "part-*.ndjson"):
        ledger: Ledger[int] = Ledger(folder, signature)
        todo = ledger.missing(indices)
        bar = tqdm(total=len(todo), desc=what, unit=" images", disable=not (todo and distributed.is_main()))
        with bar:
            for block in encode_versions(versions, encode, indices=todo, num_workers=num_workers):
                values = value_of(block.indices, block.features) if block.indices else []
                ledger.add(dict(zip(block.indices, values, strict=True)) | {index: None for index, _ in block.bad})
                bar.update(len(block.indices) + len(block.bad))
                if block.bad:
                    tqdm.write(printable(f"{what}: left out {block.bad[0][1]}"))
        done = {index: value for index, value in ledger.all_values().items() if value is not None}
        if not done:
            if distributed.is_main():
                remove(folder)
            raise DualencError(f"{what}: none of {len(indices)} images can be read; check the data")
    return done


def _as_image(view: Tensor | Image.Image) -> Image.Image:
    if isinstance(view, Image.Image):
        return view
    pixels = (view.permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8).numpy()
    return Image.fromarray(pixels)
