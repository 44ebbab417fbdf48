"""Images alone: two augmented views of each image find one another (SimCLR's task); classes are
only measured.

    python examples/unimodal.py

The generated images have random colours; classes differ by pattern, so the colour jitter must teach
what matters.
"""

from __future__ import annotations

from pathlib import Path

import torch
from toy_data import write_patterns

from dualenc.data import ImageFolderViews
from dualenc.data.views import SimCLR
from dualenc.encoders import ImageEncoder
from dualenc.objectives import SogCLR
from dualenc.training import KNNEvaluator, Trainer, TrainingResult


def main(folder: Path = Path("runs/example_unimodal"), epochs: int = 15) -> TrainingResult:
    # Your data: a folder of images, or TableViews("train.parquet") for a table with a column of
    # images.
    write_patterns(folder / "train", per_class=60)
    write_patterns(folder / "test", per_class=25)
    images = ImageFolderViews(folder / "train")

    # For real images: ImageEncoder("resnet50", image_size=224, augment=SimCLR(size=224)), larger
    # batches, 100 epochs.
    torch.manual_seed(0)
    small = {"layers": [1, 1, 1, 1], "channels": [16, 32, 64, 128]}
    augment = SimCLR(size=16, strength=2.0, min_area=0.5)
    model = ImageEncoder("resnet18", image_size=16, backbone_args=small, augment=augment)

    objective = SogCLR(num_left=len(images), temperature=0.2, views=True)
    evaluator = KNNEvaluator(images, ImageFolderViews(folder / "test"), k=5)
    trainer = Trainer(
        output=folder / "run", batch_size=32, epochs=epochs, learning_rate=4e-3, overwrite=True
    )
    result = trainer.fit(model, images, objective, evaluator=evaluator)

    before, after = result.before["knn_accuracy"], result.metrics["knn_accuracy"]
    print(f"5-NN accuracy on test images: {before:.3f} → {after:.3f}")
    print(
        f"{result.model_folder / 'README.md'} "
        "shows how timm loads the backbone with its small-image stem"
    )
    return result


if __name__ == "__main__":
    main()
