"""Time of corrupted-image retrieval besides the encoder: corrupting, augmenting and searching, per
10,000 images.

    python eval/bench/corruption.py PATH_TO_CIFAR10/test.parquet --size 32
    python eval/bench/corruption.py PATH_TO_TINY_IMAGENET/val.parquet --size 64

Every image is corrupted in 19 ways, each version augmented twice and searched for among the others,
as `dualenc evaluate corrupted` does; in the encoder's place is a fixed random projection of the
pixels.
"""

from __future__ import annotations

import time

import numpy as np
from jsonargparse import auto_cli

ALL_IMAGES = 10_000


def main(
    data: str, size: int = 32, images: int = 300, num_workers: int = 2, severity: int = 1
) -> None:
    """Print milliseconds per image, and minutes for 10,000 images.

    Args:
        data: images, as `dualenc evaluate corrupted` reads them.
        size: pixels per side of the augmented views.
        images: how many are timed; chosen at random.
        num_workers: processes that corrupt and augment.
        severity: of the corruptions, 1 to 5.
    """
    from dualenc.data import open_corpus
    from dualenc.data.readers.detect import default_split
    from dualenc.encoders import ImageEncoder
    from dualenc.evaluation.corrupted import (
        ImageVersions,
        SimCLRPrepare,
        measure_versions,
        nearest_versions,
        summarize_nearest,
    )
    from dualenc.evaluation.corruptions import ALL, CleanImages, GeneratedCorruptions
    from dualenc.types import Inputs
    from dualenc.workflows.labeled_images import random_rows

    corpus = open_corpus(data, modality="image", split=default_split(data))
    source = GeneratedCorruptions(
        CleanImages(corpus.take(random_rows(len(corpus), images, seed=0)).items), ALL
    )
    prepare = SimCLRPrepare(ImageEncoder(image_size=size).left.prepare)
    versions = ImageVersions(source, [(name, severity) for name in ALL], prepare, views=2)
    projection = np.random.default_rng(0).normal(size=(3 * size * size, 64)).astype(np.float32)

    def encode(inputs: Inputs) -> np.ndarray:
        return inputs["image"].flatten(1).numpy() @ projection

    searches = []

    def search(_: list[int], features: np.ndarray) -> np.ndarray:
        before = time.perf_counter()
        nearest = nearest_versions(features)
        searches.append(time.perf_counter() - before)
        return nearest

    start = time.perf_counter()
    found = measure_versions(versions, encode, search, range(len(source)), num_workers=num_workers)
    seconds = time.perf_counter() - start
    top1 = summarize_nearest(found, ALL)["top1"]
    print(
        f"{len(source)} images of {size} pixels, {len(ALL)} corruptions, {num_workers} workers; "
        f"top-1 {top1:.3f}"
    )
    print(
        f"{1000 * seconds / len(source):.1f} ms per image, "
        f"{1000 * sum(searches) / len(source):.2f} of them in search"
    )
    print(
        f"{ALL_IMAGES * seconds / len(source) / 60:.1f} minutes for "
        f"{ALL_IMAGES:,} images (want ≤ 15)"
    )


if __name__ == "__main__":
    auto_cli(main)
