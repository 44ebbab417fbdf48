"""Data loading: worker processes read and prepare this rank's slice of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dualenc import distributed
from dualenc.data.pairs import Pair, PairDataset
from dualenc.encoders.dual import SIDES, ZERO_VECTOR, check_item
from dualenc.encoders.text import TextPrepare
from dualenc.errors import BadSample, DualencError
from dualenc.objectives.pair_batch import PairBatch
from dualenc.seeds import derive_seed
from dualenc.training.signals import forgive_one_sigterm
from dualenc.types import Inputs, OnError, Side

PrepareItems = Callable[..., Inputs]


def augmentation_seeds(
    seed: int,
    epoch: int,
    ids: Iterable[int],
    side: Side,
    stream: Literal["batch", "item"] = "batch",
) -> list[int]:
    """Derive one augmentation seed per item from (stream, seed, epoch, index, side).

    Args:
        seed: random seed of the run.
        epoch: number of the epoch; for the stream "item", number of the batch in the run.
        ids: pair indices; for the stream "item", item ids.
        side: side of the items.
        stream: "batch" for the items of a batch, "item" for items that an objective requests.
    """
    return [derive_seed(stream, seed, epoch, index, side) for index in ids]


class LoadedBatch(NamedTuple):
    """This rank's part of one global batch, on the CPU, before its items are encoded.

    Attributes:
        indices: (b,) pair indices of the readable pairs.
        pairs: ids, known positives and weights of these pairs; lists of positives are None if each
            item has one, and weights are None if all are 1.
        left: inputs of the left tower, first dimension b; empty if b is 0.
        right: inputs of the right tower, first dimension b; empty if b is 0.
        negatives: inputs of the right tower for n mined negatives; empty if n is 0.
        bad: (index, reason) of each unreadable pair.
    """

    indices: Tensor
    pairs: PairBatch
    left: Inputs
    right: Inputs
    negatives: Inputs
    bad: tuple[tuple[int, str], ...]


class BatchLoader:
    """Loads batches by pair indices. The result does not depend on the number of workers.

    Example:
        loader = BatchLoader(pairs, model.left.prepare, model.right.prepare)
        for batch in loader.batches(np.array([[0, 1], [2, 3]])):
            print(batch.indices)

    Args:
        pairs: the training pairs.
        left_prepare: preparation of the left tower.
        right_prepare: preparation of the right tower.
        seed: random seed for augmentation.
        num_workers: number of worker processes; 0 reads in this process.
        on_error: "skip" to skip unreadable pairs, "raise" to stop at the first one.
        pin_memory: True to load into pinned memory, for faster copies to a GPU.
    """

    def __init__(
        self,
        pairs: PairDataset,
        left_prepare: PrepareItems,
        right_prepare: PrepareItems,
        *,
        seed: int = 0,
        num_workers: int = 0,
        on_error: OnError = "skip",
        pin_memory: bool = False,
    ) -> None:
        # A first call builds the table, here once instead of in each forked worker.
        for side in SIDES:
            pairs.not_negatives(side, np.zeros(1, dtype=np.int64))
        self.pairs = pairs
        self.prepare = {"left": left_prepare, "right": right_prepare}
        self.seed = seed
        self.num_workers = num_workers
        self.on_error = on_error
        self.pin_memory = pin_memory

    def batches(self, plan: np.ndarray, epoch: int = 0, start: int = 0) -> Iterator[LoadedBatch]:
        """Iterate over this rank's part of the batches of one epoch.

        Args:
            plan: (num_batches, B) pair indices of the global batches, in order.
            epoch: number of the epoch, for the augmentation seeds.
            start: number of batches to skip at the beginning, because they are done.
        """
        columns = distributed.rank_slice(plan.shape[1])
        loader: DataLoader[LoadedBatch] = DataLoader(
            plan[start:, columns],  # type: ignore[arg-type]  # an array indexes like a data set
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=partial(self._build_or_error, epoch),
            worker_init_fn=forgive_one_sigterm,
            # With a separate generator, the loader does not draw from the global one.
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            if isinstance(batch, DualencError):
                raise batch
            yield batch

    def _build_or_error(self, epoch: int, indices: np.ndarray) -> LoadedBatch | DualencError:
        try:
            return self.build(indices, epoch)
        except DualencError as error:
            # Returned, because a DataLoader wraps what workers raise into a traceback.
            return error

    def build(self, indices: np.ndarray, epoch: int) -> LoadedBatch:
        """Read and prepare the pairs of one batch. Workers run it.

        Args:
            indices: (b,) pair indices.
            epoch: number of the epoch, for the augmentation seeds.

        Raises:
            BadSample: a pair is not readable, with on_error="raise".
        """
        pairs, bad = self._read(indices)
        # Only after preparation is it known whether a text has tokens.
        without_tokens = self._without_tokens(pairs)
        bad += without_tokens.items()
        pairs = [pair for pair in pairs if pair.index not in without_tokens]
        numbers = [pair.index for pair in pairs]
        left_seeds = augmentation_seeds(self.seed, epoch, numbers, "left")
        right_seeds = augmentation_seeds(self.seed, epoch, numbers, "right")
        negatives: list[Any] = []
        negative_seeds: list[int] = []
        for pair, seed in zip(pairs, right_seeds, strict=True):
            negatives += pair.negatives
            # Negatives are right items, too. Their seeds follow the seed of the positive.
            negative_seeds += range(seed + 1, seed + 1 + len(pair.negatives))
        return LoadedBatch(
            indices=torch.tensor(numbers, dtype=torch.int64),
            pairs=self._pair_batch(pairs),
            left=self._prepared("left", [pair.left for pair in pairs], left_seeds),
            right=self._prepared("right", [pair.right for pair in pairs], right_seeds),
            negatives=self._prepared("right", negatives, negative_seeds),
            bad=tuple(bad),
        )

    def _pair_batch(self, pairs: list[Pair]) -> PairBatch:
        """Return ids, known positives and weights of pairs."""
        left_id = np.array([pair.left_id for pair in pairs], dtype=np.int64)
        right_id = np.array([pair.right_id for pair in pairs], dtype=np.int64)
        negative_ids = [item_id for pair in pairs for item_id in pair.negative_ids]
        weights = None
        if self.pairs.weights is not None:
            weights = torch.tensor([pair.weight for pair in pairs])
        return PairBatch(
            left_id=torch.from_numpy(left_id),
            right_id=torch.from_numpy(right_id),
            left_positives=self._positives("left", left_id),
            right_positives=self._positives("right", right_id),
            negative_id=torch.tensor(negative_ids) if negative_ids else None,
            weights=weights,
        )

    def _read(self, indices: np.ndarray) -> tuple[list[Pair], list[tuple[int, str]]]:
        """Return the readable pairs, and (index, reason) of the others."""
        pairs: list[Pair] = []
        bad: list[tuple[int, str]] = []
        for index in indices.tolist():
            try:
                pair = self.pairs[index]
                check_item(pair.left, self.pairs.left_modality, "left")
                for item in (pair.right, *pair.negatives):
                    check_item(item, self.pairs.right_modality, "right")
                pairs.append(pair)
            except BadSample as error:
                if self.on_error == "raise":
                    raise BadSample(str(error), where=f"pair {index}") from None
                bad.append((index, str(error)))
        return pairs, bad

    def _without_tokens(self, pairs: list[Pair]) -> dict[int, str]:
        """Return the reason for each pair with a text without tokens, a zero vector, by index."""
        bad: dict[int, str] = {}
        for side in SIDES:
            items = []
            for pair in pairs:
                texts = [pair.left] if side == "left" else [pair.right, *pair.negatives]
                items += [(pair.index, text) for text in texts]
            prepare = self.prepare[side]
            if not items or not (isinstance(prepare, TextPrepare) and prepare.may_be_empty()):
                continue
            mask = prepare([item for _, item in items])["attention_mask"]
            token_counts = mask.sum(dim=1).tolist()
            for (index, item), num_tokens in zip(items, token_counts, strict=True):
                if not num_tokens:
                    bad.setdefault(index, f"{side} is {item[:40]!r}: {ZERO_VECTOR['text']}")
        if bad and self.on_error == "raise":
            index, reason = next(iter(bad.items()))
            raise BadSample(reason, where=f"pair {index}")
        return bad

    def _prepared(self, side: Side, items: list[Any], seeds: list[int]) -> Inputs:
        # Not every preparation accepts an empty list.
        return dict(self.prepare[side](items, seeds)) if items else {}

    def _positives(self, side: Side, ids: np.ndarray) -> Tensor | None:
        """Return the ids that must not be negatives of items; None if they are just the pairs'."""
        # All samples of this rank may be bad.
        if len(ids) == 0:
            return None
        listed = self.pairs.not_negatives(side, ids)
        # With one column, each item's only positive is that of its pair.
        if listed.shape[1] <= 1:
            return None
        return torch.from_numpy(np.ascontiguousarray(listed))
