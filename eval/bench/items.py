"""How long items outside the batch take to read: images that an objective asks for, by the number
of workers.

    python eval/bench/items.py --workers "[0,1,2,8]" --size 224

Images are JPEG files of noise, half as large again as the views, of which each request is a random
sample; views are SimCLR's. The network is a mean of pixels, so that what is timed is reading and
preparing, and the way from the workers.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from in_turn import in_turn
from jsonargparse import auto_cli
from tasks import noise_images
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.data import ImageFolderViews
from dualenc.encoders import ImageEncoder
from dualenc.encoders.dual import Tower
from dualenc.evaluation.report_page import Table, print_table
from dualenc.training.encoding import PlainEncoding
from dualenc.training.extra_items import ItemEncoder
from dualenc.types import Inputs


class MeanColour(Tower):
    """Unit vectors (B, 3) of images."""

    modality = "image"

    def forward(self, inputs: Inputs) -> Tensor:
        return normalize(inputs["image"].mean(dim=(2, 3)), dim=1)


def main(
    workers: Sequence[int] = (0, 1, 2),
    size: int = 224,
    items: int = 64,
    images: int = 512,
    repeats: int = 9,
) -> None:
    """Print milliseconds of a request and its ratio to reading in the process itself.

    Args:
        workers: numbers of workers, which take turns.
        size: of a view, in pixels.
        items: of a request.
        images: of the data.
        repeats: requests that are timed.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        noise_images(Path(folder), images, size=size * 3 // 2, suffix=".jpg")
        pairs = ImageFolderViews(folder)
        model = ImageEncoder("resnet18", image_size=size)
        tower = MeanColour()
        tower.prepare = model.left.prepare
        model.left = model.right = tower
        encoding = PlainEncoding(model, torch.device("cpu"), keep_statistics=False)
        encoders = {
            count: ItemEncoder(model, pairs, encoding, num_workers=count) for count in workers
        }
        draws = torch.Generator().manual_seed(0)

        def ask(encoder: ItemEncoder) -> Tensor:
            return encoder("left", torch.randint(images, (items,), generator=draws))

        times, _ = in_turn(
            {count: lambda e=encoder: ask(e) for count, encoder in encoders.items()},
            repeats,
            warm_up=1,
        )
        for encoder in encoders.values():
            encoder.close()
    rows = []
    for count, seconds in times.items():
        row = {"workers": count, "ms": 1000 * statistics.median(seconds)}
        rows.append(
            {
                **row,
                "× no workers": statistics.median(times[workers[0]]) / statistics.median(seconds),
            }
        )
    print_table(Table(f"{items} images of {size}×{size} pixels", rows))


if __name__ == "__main__":
    auto_cli(main)
