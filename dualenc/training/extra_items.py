"""Items outside the batch, which objectives request by id: reading, preparation and encoding."""

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
    """Items to read in one process.

    Attributes:
        side: side of the items.
        places: positions of the items in the objective's list of ids.
        ids: ids of the items.
        seeds: augmentation seeds of the items.
    """

    side: Side
    places: list[int]
    ids: list[int]
    seeds: list[int]


class ItemReader:
    """Data set of requests: reads and prepares the items of each.

    Indexing by a `Request` returns the inputs of its readable items ({} if there are none) and
    their places. With on_error="raise" it returns the error of an unreadable item instead.

    Args:
        model: model that prepares the items.
        pairs: pairs that hold the items.
        on_error: "skip" to skip unreadable items, "raise" to return their error.
    """

    def __init__(self, model: DualEncoder, pairs: PairDataset, on_error: OnError) -> None:
        self.prepare = {side: model.tower(side).prepare for side in SIDES}
        self.pairs = pairs
        self.on_error = on_error

    def __getitem__(self, request: Request) -> tuple[Inputs, list[int]] | BadSample:
        items = []
        places = []
        seeds = []
        side = request.side
        prepare = self.prepare[side]
        for place, item_id, seed in zip(*request[1:], strict=True):
            try:
                item = self.pairs.item(side, item_id)
                check_item(item, prepare.modality, f"{side} item {item_id}")
                items.append(item)
            except BadSample as error:
                if self.on_error == "raise":
                    # Returned, because a DataLoader wraps what workers raise into a traceback.
                    return error
                continue
            places.append(place)
            seeds.append(seed)
        inputs = dict(prepare(items, seeds)) if items else {}
        return inputs, places


class ItemEncoder:
    """The `encode` function of an objective: embeds items by id.

    Items are augmented with a seed derived from (seed, batch, id, side). BatchNorm normalizes them
    with the statistics of the batch, see `BatchStatistics`. A graph is built if gradients are
    enabled. An unreadable item gets a zero vector, whose similarity to anything is 0, unless
    on_error is "raise".

    Example:
        encode = ItemEncoder(model, pairs, PlainEncoding(model, device))
        encode("right", torch.tensor([3, 14]))  # (2, D)

    Args:
        model: model in training.
        pairs: pairs that hold the items.
        encoding: encoding of the current batch.
        seed: random seed for augmentation.
        num_workers: number of processes that read images, which takes longer than encoding them.
        on_error: "skip" to skip unreadable items, "raise" to stop at the first one.

    Attributes:
        num_encoded: number of items encoded so far.
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
            # With a separate generator, the loader does not draw from the global one.
            generator=torch.Generator().manual_seed(0),
        )

    def close(self) -> None:
        """End the workers."""
        del self.loader

    def begin(self, batch_number: int) -> None:
        """Start a batch.

        Args:
            batch_number: number of the batch in the run, for the augmentation seeds.
        """
        self.batch_number = batch_number

    def __call__(self, side: Side, ids: Tensor) -> Tensor:
        """Embed items (n,) of a side to (n, D)."""
        return self.sides([(side, ids)])[0]

    def sides(self, parts: Sequence[tuple[Side, Tensor]]) -> list[Tensor]:
        """Embed the items of several sides, in one pass if the towers share their weights.

        Args:
            parts: (side, ids) of each part, with ids (n,).

        Returns:
            Embeddings (n, D) of each part.
        """
        requests = [self._requests(side, ids.reshape(-1).tolist()) for side, ids in parts]
        self.requests[:] = chain.from_iterable(requests)
        # Read to the end first: the traceback of an error would keep an iterator, and its workers,
        # alive.
        read = iter(list(self.loader))
        prepared = [_joined(islice(read, len(own))) for own in requests]
        # Also without any item, because all ranks must take part in each forward pass.
        inputs = [(side, own) for (side, _), (own, _) in zip(parts, prepared, strict=True)]
        encoded = self.encoding.encode_parts(*inputs, out_of_batch=True)
        results = []
        for embeddings, (_, places), (_, ids) in zip(encoded, prepared, parts, strict=True):
            self.num_encoded += len(places)
            results.append(_at_places(embeddings, places, ids.numel()))
        return results

    def _requests(self, side: Side, ids: list[int]) -> list[Request]:
        """Return requests for the items of a side, one per worker for images, otherwise one."""
        limit = self.limits[side]
        for item_id in ids:
            if not 0 <= item_id < limit:
                raise DualencError(
                    f"the objective asks for {side} item {item_id}, outside [0, {limit})"
                )
        seeds = augmentation_seeds(self.seed, self.batch_number, ids, side, "item")
        # Texts are not split: all are tokenized at once, and padded to one length.
        workers = max(1, self.num_workers) if side in self.images else 1
        size = max(1, -(-len(ids) // workers))
        requests = []
        for start in range(0, len(ids), size):
            end = min(start + size, len(ids))
            places = list(range(start, end))
            requests.append(Request(side, places, ids[start:end], seeds[start:end]))
        return requests


def _joined(read: Iterable[tuple[Inputs, list[int]] | BadSample]) -> tuple[Inputs, list[int]]:
    """Concatenate the inputs and places that several workers returned."""
    parts = []
    places = []
    for result in read:
        if isinstance(result, BadSample):
            raise result
        inputs, own_places = result
        if inputs:
            parts.append(inputs)
        places += own_places
    if not parts:
        return {}, places
    if len(parts) == 1:
        return parts[0], places
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return joined, places


def _at_places(embeddings: Tensor, places: list[int], count: int) -> Tensor:
    """Return zeros (count, D) with embeddings (n, D) at n places."""
    if len(places) == count:
        return embeddings
    rows = torch.tensor(places, dtype=torch.int64, device=embeddings.device)
    zeros = embeddings.new_zeros(count, embeddings.shape[1])
    # Out of place, so that gradients reach the embeddings.
    return zeros.index_copy(0, rows, embeddings)
