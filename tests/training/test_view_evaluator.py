"""Evaluators of held-out images: by class if there are classes, else by the other view."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from dualenc.data import ImageViews
from dualenc.data.views import SimCLR
from dualenc.encoders.dual import DualEncoder, Prepare, Tower
from dualenc.seeds import derive_seed
from dualenc.training import KNNEvaluator, Trainer, ViewEvaluator

SIZE = 8


class MeanPixels(Prepare):
    modality = "image"

    def __call__(self, items, seeds=None):
        pixels = np.stack([np.asarray(item.resize((SIZE, SIZE))) for item in items])
        return {"image": torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255}


class ColourTower(Tower):
    """The mean colour of an image, as its vector."""

    def __init__(self):
        super().__init__()
        self.dim, self.feature_dim, self.modality, self.prepare = 3, 3, "image", MeanPixels()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return torch.nn.functional.normalize(inputs["image"].mean((2, 3)) * self.scale, dim=-1)


def model():
    tower = ColourTower()
    return DualEncoder(tower, tower, kind="image", views=True)


def random_images(count):
    generator = np.random.default_rng(0)
    return [
        Image.fromarray(generator.integers(0, 255, (16, 16, 3)).astype(np.uint8))
        for _ in range(count)
    ]


class Unreadable(list):
    """Items of which the second cannot be read."""

    def __getitem__(self, index):
        if index == 1:
            from dualenc.errors import BadSample

            raise BadSample("cannot be decoded", fix="remove it", where="image 1")
        return super().__getitem__(index)


def expected(images, numbers):
    """The share of views nearest to the other view of their image, by a loop over the images."""
    augment = SimCLR(size=SIZE)
    views = []
    for view in range(2):
        rows = []
        for number in numbers:
            pixels = augment(images[number], derive_seed(0, number, view, bits=32))
            vector = (pixels * 255).round().mean(dim=(1, 2)).double().numpy()
            rows.append(vector / np.linalg.norm(vector))
        views.append(np.stack(rows))
    hits = 0
    for queries, items in ((views[0], views[1]), (views[1], views[0])):
        for number, query in enumerate(queries):
            hits += int(np.argmax(items @ query) == number)
    return hits / (2 * len(numbers))


def test_views_find_the_other_view_as_in_a_loop():
    images = random_images(12)
    metrics = ViewEvaluator(ImageViews(images), batch_size=5)(model())
    assert metrics == {"other_view_top1": pytest.approx(expected(images, range(12)))}
    assert 0 < metrics["other_view_top1"] < 1
    assert metrics == ViewEvaluator(ImageViews(images))(model()), "the same views every time"


def test_an_unreadable_image_is_left_out_of_both_views():
    images = random_images(6)
    metrics = ViewEvaluator(ImageViews(Unreadable(images)))(model())
    rest = [number for number in range(6) if number != 1]
    assert metrics["other_view_top1"] == pytest.approx(expected(images, rest))


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (None, ViewEvaluator),
        (np.zeros(40, np.int64), ViewEvaluator),  # one class: any neighbor is right
        (np.full(40, -1), ViewEvaluator),
        (np.arange(40) % 4, KNNEvaluator),
    ],
)
def test_held_out_images_are_evaluated_by_class_if_they_have_classes(labels, kind):
    images = ImageViews(random_images(40), labels)
    rest, evaluator = Trainer(output="run", held_out=0.25).hold_out(images, None, is_recipe=False)
    assert type(evaluator) is kind
    assert len(rest) == 30
    assert rest.num_left == 40, "tables of the objective keep a row for each image"
    if kind is KNNEvaluator:
        voting, tested = (corpus.items for corpus in evaluator.corpora)
        assert evaluator.k == 20
        pictures = [{item.tobytes() for item in part} for part in (voting, tested)]
        assert len(pictures[0]) == 30
        assert len(pictures[1]) == 10
        assert not pictures[0] & pictures[1]
        assert pictures[0] == {images.left_items[row].tobytes() for row in rest.left_id}
