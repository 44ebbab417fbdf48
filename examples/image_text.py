"""Image–text: a small CLIP from scratch, on pictures with two captions each.

    python examples/image_text.py

With your own data and a published model only the two marked places change.
"""

from __future__ import annotations

from pathlib import Path

import torch
from toy_data import write_shapes

from dualenc.data import TablePairs
from dualenc.encoders import ImageTextEncoder
from dualenc.objectives import GlobalCache
from dualenc.training import ImageTextEvaluator, Trainer, TrainingResult


def main(folder: Path = Path("runs/example_image_text"), epochs: int = 8) -> TrainingResult:
    # Your data: a table with a column of image files (inside the table's folder) and one of
    # captions, one text or a list; or ImageFolderPairs("my_folder"),
    # WebDatasetPairs("shards/*.tar").
    write_shapes(folder / "data")
    pairs = TablePairs(
        folder / "data" / "train.jsonl", left_column="image", right_column="captions"
    )
    held_out = TablePairs(
        folder / "data" / "test.jsonl", left_column="image", right_column="captions"
    )

    # A published model: model = ImageTextEncoder("ViT-B-32", pretrained="laion2b_s34b_b79k"), a
    # learning_rate of 1e-5, and chunk_size=128 in the trainer where a batch does not fit into
    # memory.
    torch.manual_seed(0)
    config = {
        "embed_dim": 32,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": 8,
            "width": 64,
            "layers": 2,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 49408,
            "width": 64,
            "heads": 2,
            "layers": 1,
        },
    }
    model = ImageTextEncoder(config=config, crop_scale=(0.9, 1.0))

    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    objective = GlobalCache(**sizes, temperature=0.1, positive_in_softmax=True)
    trainer = Trainer(
        output=folder / "run", batch_size=32, epochs=epochs, learning_rate=2e-3, overwrite=True
    )
    result = trainer.fit(model, pairs, objective, evaluator=ImageTextEvaluator(held_out))

    for name, value in result.metrics.items():
        print(f"{name:<24} {result.before[name]:.3f} → {value:.3f}")
    print(f'open_clip.create_model_and_transforms("local-dir:{result.model_folder}") loads it too')
    return result


if __name__ == "__main__":
    main()
