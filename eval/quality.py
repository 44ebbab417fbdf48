"""What comparisons of trained encoders share: options, small images, training, results kept on
disk."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.batching import BatchSelector
from dualenc.data import ImageViews, PairDataset, TableViews
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder, ImageEncoder
from dualenc.evaluation.corrupted import nearest_images, summarize_nearest
from dualenc.io.files import write_json
from dualenc.objectives import DCL, EMC2, HCL, ISIR, InfoNCE, ISogCLR, Objective, SogCLR
from dualenc.training import Evaluator, KNNEvaluator, Trainer

COMPARED: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "DCL": DCL,
    "HCL": lambda **common: HCL(hardness=0.5, class_prior=0.01, **common),
    "SogCLR": lambda **common: SogCLR(gamma=0.5, **common),
    "ISogCLR": lambda **common: ISogCLR(gamma=0.5, temperature_rate=0.001, **common),
    "EMC2": EMC2,
    "ISIR": ISIR,
}
"""Objectives with the settings that comparisons of trained encoders share."""


def new_parser(
    description: str | None, out: str, pairs: int, steps: int
) -> argparse.ArgumentParser:
    """Options that every comparison has, with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=out)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    return parser


def new_encoder() -> DualEncoder:
    """A ResNet with four narrow blocks and a stem for small images: trains in a minute on one
    core."""
    thin = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 128)}
    return ImageEncoder(
        "resnet18", image_size=24, projector_dim=64, augment=SimCLR(24), backbone_args=thin
    )


def open_parts(
    folder: str, num_train: int, num_test: int
) -> tuple[ImageViews, ImageViews, ImageViews]:
    """Training, validation and test images: random parts of train.parquet and of test.parquet or
    val.parquet."""
    test_file = next(
        p for p in (Path(folder, "test.parquet"), Path(folder, "val.parquet")) if p.exists()
    )
    images = TableViews(Path(folder, "train.parquet")).sample(num_train + num_test)
    train, validation = (
        images.subset(rows) for rows in np.split(np.arange(len(images)), [num_train])
    )
    return train, validation, TableViews(test_file).sample(num_test)


class PairRetrieval(KNNEvaluator):
    """Top-1 retrieval of an image's other augmented view among all images (Cho et al., Table 1),
    kNN."""

    primary = "pair_top1"

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        views: list[list[np.ndarray]] = [[], []]
        for start in range(0, len(self.test), 256):
            rows = range(start, min(start + 256, len(self.test)))
            for view, parts in enumerate(views):
                inputs = model.left.prepare(
                    [self.test[i] for i in rows], [2 * i + view for i in rows]
                )
                parts.append(model("left", inputs).detach().cpu().numpy())
        both = np.stack([np.concatenate(parts) for parts in views], axis=1)
        return {
            **super().__call__(model),
            "pair_top1": summarize_nearest(nearest_images(both))["top1"],
        }


def train_and_measure(
    model: DualEncoder,
    train: PairDataset,
    objective: Objective,
    evaluator: Evaluator,
    batching: BatchSelector | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Metrics of the model at the end of training, whether or not an earlier one was better."""
    trainer = Trainer(
        save_every=None, overwrite=True, progress=False, deterministic=False, **settings
    )
    trainer.fit(model, train, objective, batching)
    return evaluator(model.eval())


def cached(
    path: Path, compute: Callable[[], dict[str, float]], settings: dict[str, Any]
) -> dict[str, float]:
    """The metrics of an earlier call, or new ones, kept as a JSON file with the settings that led
    to them."""
    if not path.exists():
        write_json(path, {"metrics": compute(), **settings})
    found = json.loads(path.read_text())
    metrics: dict[str, float] = found.pop("metrics")
    if found != settings:
        raise SystemExit(
            f"{path} was made with {found}, now asked for are {settings}: choose another --out"
        )
    return metrics


def mean_and_sd(name: str, values: Sequence[float]) -> dict[str, object]:
    """Two cells of a table: over seeds."""
    return {
        name: statistics.mean(values),
        f"{name} sd": statistics.stdev(values) if len(values) > 1 else 0.0,
    }
