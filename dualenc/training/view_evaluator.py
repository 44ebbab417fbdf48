"""Evaluate image models on held-out images: by their classes, or by their augmented views.

`evaluation.corrupted` is imported late: it imports scikit-learn, which would delay every training
by 1.6 seconds.
"""

from __future__ import annotations

import logging
from types import MappingProxyType

import numpy as np
from PIL import Image

from dualenc.data.corpus import Corpus
from dualenc.data.readers.image_views import ImageViews
from dualenc.data.views import SimCLR
from dualenc.encoders.dual import DualEncoder
from dualenc.io.decoding import rgb_item
from dualenc.seeds import derive_seed
from dualenc.training.evaluators import Evaluator, KNNEvaluator, check_settings
from dualenc.types import Items

logger = logging.getLogger("dualenc.training")

NEIGHBORS = 20
MAX_VOTING = 20_000
"""Maximum number of training images that vote. More would make evaluations slow."""


class AugmentedImages:
    """SimCLR's view of each image: a pure function of its number, the view's number and a seed.

        AugmentedImages(images, SimCLR(size=32), view=0)[3]

    Args:
        images: N raw images.
        augment: augmentation to apply.
        view: number of the view.
        seed: random seed.
    """

    def __init__(self, images: Items, augment: SimCLR, view: int, seed: int = 0) -> None:
        self.images = images
        self.augment = augment
        self.view = view
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Image.Image:
        image = rgb_item(self.images[index], f"image {index}")
        return self.augment.image(image, derive_seed(self.seed, index, self.view, bits=32))


class ViewEvaluator(Evaluator):
    """Share of augmented views that are nearest to the other view of their image: no labels needed.

    Both views are SimCLR's, of the size of the model's images, and the same in every evaluation. A
    tie counts as wrong. The value falls as the number of images grows.

    Example:
        train, held_out = images.split(0.1)
        evaluator = ViewEvaluator(images.subset(held_out.left_id))
        Trainer(output="run").fit(model, train, objective, evaluator=evaluator)

    Args:
        images: held-out images, two or more.
        batch_size: number of images to encode at a time.

    Raises:
        DualencError: a setting is not valid.
    """

    primary = "other_view_top1"
    modalities = MappingProxyType({"left": "image"})

    def __init__(self, images: ImageViews, *, batch_size: int = 256) -> None:
        check_settings("ViewEvaluator", batch_size)
        self.images = images.left_items
        self.data = (f"views of {len(images):,} held-out images", None)
        self.batch_size = batch_size

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        from dualenc.evaluation.corrupted import SimCLRPrepare, nearest_images, summarize_nearest

        augment = SimCLRPrepare(model.left.prepare).augment
        ids = [str(row) for row in range(len(self.images))]
        views = []
        for view in range(2):
            items = AugmentedImages(self.images, augment, view)
            corpus = Corpus(ids, items, "image")
            # Unreadable images are missing from both views.
            views.append(self.embed(model, "left", corpus, f"view {view + 1} of held-out images"))
        nearest = nearest_images(np.stack([each.vectors for each in views], axis=1))
        return {self.primary: summarize_nearest(nearest)["top1"]}


def held_out_images_evaluator(
    images: ImageViews, rest: np.ndarray, held_out: np.ndarray
) -> Evaluator:
    """Return an evaluator of held-out images: nearest neighbors if they have classes, else views.

    Args:
        images: all images.
        rest: rows of the images to train on, of which at most 20,000 vote.
        held_out: rows of the others.
    """
    if not _have_classes(images.labels, rest, held_out):
        logger.info(
            "%d held-out images without classes: the share of their views that find the other "
            "view is measured",
            len(held_out),
        )
        return ViewEvaluator(images.subset(held_out))
    voting = images.subset(rest).sample(MAX_VOTING)
    num_labeled = int(np.sum(voting.labels >= 0))  # type: ignore[operator]
    logger.info(
        "%d held-out images: their classes are found by the nearest of %d training images",
        len(held_out),
        len(voting),
    )
    return KNNEvaluator(voting, images.subset(held_out), k=min(NEIGHBORS, num_labeled))


def _have_classes(labels: np.ndarray | None, rest: np.ndarray, held_out: np.ndarray) -> bool:
    """Return True if training images of two classes can vote on a held-out image with a class."""
    if labels is None:
        return False
    voting = labels[rest]
    return len(np.unique(voting[voting >= 0])) > 1 and bool((labels[held_out] >= 0).any())
