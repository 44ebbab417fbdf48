"""Decoded images: all images of a data set in memory as pixels, so that no step decodes any."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor
from tqdm import tqdm

from dualenc.data.identity import identities
from dualenc.data.pairs import PairDataset
from dualenc.errors import BadSample, DualencError
from dualenc.types import Items, Side

MAX_BYTES = 8 << 30


class DecodedImages:
    """N images of one size as uint8 pixels.

    Args:
        items: N images.
        workers: threads that decode.
        progress: show a progress bar.

    Attributes:
        pixels: (N, 3, H, W) uint8.
        bad: reason by row of images that do not decode.

    Raises:
        DualencError: images of several sizes, or more pixels than `MAX_BYTES`.
    """

    def __init__(self, items: Items, workers: int = 1, progress: bool = False) -> None:
        self.items = items
        self.pixels = torch.zeros(0, dtype=torch.uint8)
        self.bad: dict[int, str] = {}
        with ThreadPoolExecutor(workers) as pool:
            decoded = pool.map(self._decode, range(len(items)))
            for row, image in enumerate(tqdm(decoded, "decode", len(items), disable=not progress, leave=False)):
                if image is not None:
                    self._keep(row, image)

    def _decode(self, row: int) -> Tensor | None:
        try:
            return pil_to_tensor(self.items[row])
        except BadSample as error:
            self.bad[row] = str(error)
            return None

    def _keep(self, row: int, image: Tensor) -> None:
        if not len(self.pixels):
            if len(self.items) * image.numel() > MAX_BYTES:
                raise DualencError(f"{len(self.items):,} images take more than {MAX_BYTES >> 30} GiB of pixels")
            self.pixels = torch.zeros(len(self.items), *image.shape, dtype=torch.uint8)
        if image.shape != self.pixels.shape[1:]:
            raise DualencError(f"image {row} has another size than those before: {tuple(image.shape[1:])}")
        self.pixels[row] = image

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Tensor:
        if row in self.bad:
            raise BadSample(self.bad[row])
        return self.pixels[row]

    def identities(self, rows: np.ndarray, read: bool) -> Sequence[bytes]:
        """Those of the images themselves, for `dualenc.data.identity`."""
        return identities(self.items, rows, read)


def decode_images(pairs: PairDataset, sides: Collection[Side], workers: int = 1, progress: bool = False) -> PairDataset:
    """The same pairs with the images of some sides decoded.

    Args:
        pairs: M pairs.
        sides: whose items are images to decode; views have one collection, which is decoded once.
        workers: threads that decode.
        progress: show a progress bar.

    Raises:
        DualencError: see `DecodedImages`.
    """
    decoded = copy.copy(pairs)
    both: tuple[Side, Side] = ("left", "right")
    for side in both:
        if side == "right" and pairs.right_items is pairs.left_items:
            decoded.right_items = decoded.left_items
        elif side in sides:
            setattr(decoded, f"{side}_items", DecodedImages(pairs.items(side), workers, progress))
    return decoded
