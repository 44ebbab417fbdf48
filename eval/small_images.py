"""What the comparisons on small images share: data, encoder, and results kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.batching import BatchSelector
from dualenc.data import ImageViews, PairDataset, TableViews
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder, ImageEncoder
from dualenc.evaluation.corrupted import nearest_images, summarise
from dualenc.files import write_json
from dualenc.objectives import Objective
from dualenc.training import Evaluator, KNNEvaluator, Trainer


def new_encoder() -> DualEncoder:
    """A ResNet with four narrow blocks and a stem for small images: trains in a minute on one core."""
    thin = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 128)}
    return ImageEncoder("resnet18", image_size=24, projector_dim=64, augment=SimCLR(24), backbone_args=thin)


def open_parts(folder: str, num_train: int, num_test: int) -> tuple[ImageViews, ImageViews, ImageViews]:
    """Training, validation and test images: random parts of train.parquet and of test.parquet or val.parquet."""
    test_file = next(p for p in (Path(folder, "test.parquet"), Path(folder, "val.parquet")) if p.exists())
    known = TableViews(Path(folder, "train.parquet")).sample(num_train + num_test)
    train, validation = (known.subset(rows) for rows in np.split(np.arange(len(known)), [num_train]))
    return train, validation, TableViews(test_file).sample(num_test)


class PairRetrieval(KNNEvaluator):
    """Top-1 retrieval of an image's other augmented view among all images (minibatch-contrastive.txt, Table 1), kNN."""

    primary = "pair_top1"

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        views = np.stack([self._views(model, view) for view in (0, 1)], axis=1)
        return {**super().__call__(model), "pair_top1": summarise(nearest_images(views))["top1"]}

    def _views(self, model: DualEncoder, view: int) -> np.ndarray:
        rows = range(len(self.test))
        parts = [
            model.encode("left", model.left.prepare([self.test[i] for i in chunk], [2 * i + view for i in chunk]))
            for chunk in (rows[start : start + 256] for start in range(0, len(rows), 256))
        ]
        return np.concatenate([part.detach().cpu().numpy() for part in parts])


def train_and_measure(
    model: DualEncoder,
    train: PairDataset,
    objective: Objective,
    evaluator: Evaluator,
    batching: BatchSelector | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Metrics of the model at the end of training, whether or not an earlier one was better."""
    trainer = Trainer(save_every=None, overwrite=True, progress=False, deterministic=False, **settings)
    trainer.fit(model, train, objective, batching)
    return evaluator(model.eval())


def cached(path: Path, compute: Callable[[], dict[str, float]], settings: dict[str, Any]) -> dict[str, float]:
    """The metrics of an earlier call, or new ones, kept as a JSON file with the settings that led to them."""
    if not path.exists():
        write_json(path, {"metrics": compute(), **settings})
    found = json.loads(path.read_text())
    metrics: dict[str, float] = found.pop("metrics")
    if found != settings:
        raise SystemExit(f"{path} was made with {found}, now asked for are {settings}: choose another --out")
    return metrics
