"""Ids of open_clip's training pairs: from its CSV data set, and from webdataset tars."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset

from dualenc.data.pairs import PairDataset
from dualenc.data.webdataset import WebDatasetPairs
from dualenc.errors import DualencError
from dualenc.objectives.items import Encode
from dualenc.types import Side


class IndexedData:
    """open_clip's `data["train"]`, which remembers the rows of the batches that it hands on; see `with_ids`.

    Attributes:
        pairs: the pairs by row; equal image paths and equal captions have equal ids.
        prepare: of each side, what makes a raw item a tensor.
    """

    def __init__(
        self, info: Any, loader: Any, pairs: PairDataset, image: Callable[..., Any], text: Callable[..., Any]
    ) -> None:
        self.info = info
        self.pairs = pairs
        self.prepare: dict[Side, Callable[..., Any]] = {"left": image, "right": text}
        self.num_batches = info.dataloader.num_batches
        self.num_samples = info.dataloader.num_samples
        self._loader = loader
        self._rows: list[Tensor] = []

    @property
    def dataloader(self) -> IndexedData:
        """What `train_one_epoch` iterates over: (images, texts)."""
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """`num_left` (images) and `num_right` (texts) of an objective."""
        return {"num_left": self.pairs.num_left, "num_right": self.pairs.num_right}

    def set_epoch(self, epoch: int) -> None:
        self.info.set_epoch(epoch)

    def __len__(self) -> int:
        return int(self.num_batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._rows = []
        for images, texts, rows in self._loader:
            self._rows.append(torch.as_tensor(rows))
            yield images, texts

    def take_rows(self) -> list[Tensor]:
        """The rows of the batches handed on since the last call, one (b,) for each batch."""
        rows = self._rows
        self._rows = []
        return rows

    def encoder(self, model: nn.Module) -> Encode:
        """`encode(side, ids)` with a CLIP model: items are read and prepared as in training."""
        clip: Any = getattr(model, "module", model)

        def encode(side: Side, ids: Tensor) -> Tensor:
            # Each process makes a pass, even for no items.
            items = [self.prepare[side](self.pairs.item(side, i)) for i in ids.tolist() or [0]]
            tower = clip.encode_image if side == "left" else clip.encode_text
            inputs = torch.stack(items).to(clip.logit_scale.device)
            if side == "left":
                inputs = inputs.to(next(clip.visual.parameters()).dtype)
            return normalize(tower(inputs).float(), dim=-1)[: len(ids)]

        return encode


def with_ids(info: Any) -> IndexedData:
    """Index the training data that open_clip's `get_data` made from a CSV file or from webdataset tars.

    Of tars the ids come from the tar and `__key__`: each is scanned once, texts and images are compared once.

    Raises:
        DualencError: data of another form.
    """
    loader = info.dataloader
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "captions"):
        data: Any = loader.dataset
        images, captions = ([str(value) for value in values] for values in (data.images, data.captions))
        left_items, left_id = _distinct(images)
        right_items, right_id = _distinct(captions)
        pairs = PairDataset(left_items, right_items, left_id, right_id, left_modality="image")
        indexed = DataLoader(
            _WithRows(data),
            batch_size=loader.batch_size,
            sampler=loader.sampler,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
        )
        return IndexedData(
            info, indexed, pairs, lambda path: data.transforms(Image.open(path)), lambda text: data.tokenize([text])[0]
        )
    stages = getattr(getattr(getattr(loader, "pipeline", [None])[0], "dataset", None), "pipeline", None)
    places = [i for i, stage in enumerate(stages or []) if getattr(stage, "args", None) == ("image", "text")]
    if not stages or len(places) != 1:
        raise DualencError("with_ids takes data from a CSV file or webdataset tars of open_clip 3.3; give one of these")
    import webdataset

    urls = list(dict.fromkeys(stages[0].urls))
    tar_pairs = WebDatasetPairs(urls)
    keys = _Keys(urls, tar_pairs)
    prepare = next(stage.kw for stage in stages if "image" in getattr(stage, "kw", {}) and callable(stage.kw["image"]))
    # Samples that `WebDatasetPairs` left out as broken have no id.
    stages[places[0] : places[0] + 1] = [
        webdataset.map(keys.add_row),
        webdataset.select(lambda sample: sample["row"] >= 0),
        webdataset.to_tuple("image", "text", "row"),
    ]
    return IndexedData(info, loader, tar_pairs, prepare["image"], prepare["text"])


class _WithRows(Dataset[Any]):
    """The items of a data set of (image, text), with their row."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Any, Any, int]:
        image, text = self.data[row]
        return image, text, row


class _Keys:
    """The row of a webdataset sample by its tar and key, from sorted 64-bit digests."""

    def __init__(self, urls: list[str], pairs: WebDatasetPairs) -> None:
        samples = pairs.samples()
        digests = np.fromiter((self._digest(urls[tar], key) for tar, key in samples), np.uint64, len(pairs))
        self.order = np.argsort(digests)
        self.digests = digests[self.order]
        if (self.digests[1:] == self.digests[:-1]).any():
            raise DualencError("webdataset: a tar holds two samples of one name; pack it again")

    @staticmethod
    def _digest(url: str, key: str) -> int:
        text = f"{url}\n{key}".encode(errors="surrogateescape")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def add_row(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with its "row"; -1 if it has none."""
        digest = np.uint64(self._digest(sample["__url__"], sample["__key__"]))
        place = int(np.searchsorted(self.digests, digest))
        known = place < len(self.digests) and self.digests[place] == digest
        return {**sample, "row": int(self.order[place]) if known else -1}


def _distinct(values: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The distinct values in order of appearance, and the number of each value among them."""
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
    return list(numbers), codes
