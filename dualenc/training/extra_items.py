"""Items outside the batch, which an objective asks for by id: read, prepared and encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import SIDES, DualEncoder, check_item
from dualenc.errors import BadSample, DualencError
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import augmentation_seeds
from dualenc.training.signals import forgive_one_sigterm
from dualenc.types import Inputs, OnError, Side


class Request(NamedTuple):
    """Items to read in one process: their side, places, ids, and seeds of their augmentation."""

    side: Side
    places: list[int]
    ids: list[int]
    seeds: list[int]


class ItemReader:
    """Reads and prepares requests: inputs of the items that can be read, {} for none, and their
    places; or an error."""

    def __init__(self, model: DualEncoder, pairs: PairDataset, on_error: OnError) -> None:
        self.prepare = {side: model.tower(side).prepare for side in SIDES}
        self.pairs = pairs
        self.on_error = on_error

    def __getitem__(self, request: Request) -> tuple[Inputs, list[int]] | BadSample:
        items = []
        places = []
        seeds = []
        for place, item_id, seed in zip(*request[1:], strict=True):
            try:
                item = self.pairs.item(request.side, item_id)
                check_item(
                    item, self.prepare[request.side].modality, f"{request.side} item {item_id}"
                )
                items.append(item)
            except BadSample as error:
                if self.on_error == "raise":
                    return error
                continue
            places.append(place)
            seeds.append(seed)
        return dict(self.prepare[request.side](items, seeds)) if items else {}, places


class ItemEncoder:
    """The `encode` of an objective: embeds single items by id, augmented with a seed of (seed,
    batch, id, view).

    Images are read in workers: it takes longer than to encode them. BatchNorm normalises items as
    it did the batch: see `BatchStatistics`. Whether a graph is built follows
    `torch.is_grad_enabled()`. With on_error="skip" an item that cannot be read gets a zero vector,
    similar to nothing. `num_encoded` counts the items.
    """

    def __init__(
        self,
        model: DualEncoder,
        pairs: PairDataset,
        encoding: PlainEncoding,
        *,
        seed: int = 0,
        num_workers: int = 0,
        on_error: OnError = "skip",
    ) -> None:
        self.limits = {"left": pairs.num_left, "right": pairs.num_right}
        self.images = [side for side in SIDES if model.tower(side).modality == "image"]
        self.num_workers = num_workers if self.images else 0
        self.encoding = encoding
        self.seed = seed
        self.batch_number = 0
        self.num_encoded = 0
        self.requests: list[Request] = []
        self.loader: DataLoader[tuple[Inputs, list[int]]] = DataLoader(
            ItemReader(model, pairs, on_error),  # type: ignore[arg-type]  # an item per request is enough
            sampler=self.requests,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=forgive_one_sigterm,
            # A generator of its own: an iterator otherwise draws from, and so shifts, the global
            # one.
            generator=torch.Generator().manual_seed(0),
        )

    def close(self) -> None:
        """End the workers."""
        del self.loader

    def begin(self, batch_number: int) -> None:
        """Begin a batch, whose number in the run enters the seeds of the augmentation."""
        self.batch_number = batch_number

    def __call__(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) embeddings of items (n,) of a side."""
        return self.sides([(side, ids)])[0]

    def sides(self, parts: Sequence[tuple[Side, Tensor]]) -> list[Tensor]:
        """(n, D) embeddings of the items (n,) of each part; in one pass where both sides share
        their weights."""
        requests = [self._requests(side, ids.reshape(-1).tolist()) for side, ids in parts]
        self.requests[:] = chain.from_iterable(requests)
        # As a list: an iterator, held by the traceback of an error, would keep the workers.
        read = iter(list(self.loader))
        prepared = [_joined(islice(read, len(own))) for own in requests]
        # Even without any item: all ranks make this pass together.
        inputs = [(side, own) for (side, _), (own, _) in zip(parts, prepared, strict=True)]
        encoded = self.encoding.encode_parts(*inputs, out_of_batch=True)
        results = []
        for embeddings, (_, places), (_, ids) in zip(encoded, prepared, parts, strict=True):
            self.num_encoded += len(places)
            results.append(_at_places(embeddings, places, ids.numel()))
        return results

    def _requests(self, side: Side, ids: list[int]) -> list[Request]:
        """The items of a side, divided among the workers if they are images."""
        limit = self.limits[side]
        for item_id in ids:
            if not 0 <= item_id < limit:
                raise DualencError(
                    f"the objective asks for {side} item {item_id}, outside [0, {limit})"
                )
        seeds = augmentation_seeds(self.seed, self.batch_number, ids, side, "item")
        workers = max(1, self.num_workers) if side in self.images else 1
        size = max(1, -(-len(ids) // workers))
        requests = []
        for start in range(0, len(ids), size):
            places = list(range(start, min(start + size, len(ids))))
            requests.append(
                Request(side, places, ids[start : start + size], seeds[start : start + size])
            )
        return requests


def _joined(read: Iterable[tuple[Inputs, list[int]] | BadSample]) -> tuple[Inputs, list[int]]:
    """What several workers read, as one."""
    parts = []
    places = []
    for result in read:
        if isinstance(result, BadSample):
            raise result
        inputs, own_places = result
        if inputs:
            parts.append(inputs)
        places += own_places
    if len(parts) < 2:
        return (parts[0] if parts else {}), places
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, places


def _at_places(embeddings: Tensor, places: list[int], count: int) -> Tensor:
    """(count, D) with embeddings (n, D) at n places, and zeros elsewhere."""
    if len(places) == count:
        return embeddings
    rows = torch.tensor(places, dtype=torch.int64, device=embeddings.device)
    return embeddings.new_zeros(count, embeddings.shape[1]).index_copy(0, rows, embeddings)
