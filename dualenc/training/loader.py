"""Data loading: this rank's slice of every global batch, read and prepared in workers."""

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
    """One seed per item for its augmentation: of (seed, epoch, pair index, view).

    Stream "item" is of the items that an objective asks for: of (seed, number of the batch, item
    id, view).
    """
    return [derive_seed(stream, seed, epoch, index, side) for index in ids]


class Batch(NamedTuple):
    """This rank's part of one global batch, on the CPU.

    Attributes:
        indices: (b,) pair indices; bad samples are missing.
        left_id, right_id: (b,) item ids.
        left, right: inputs of the towers, first dimension b; empty when b is 0.
        left_positives: (b, K) right ids positive with each left item, padded with -1; None when
            each has one.
        right_positives: (b, K) left ids positive with each right item, padded with -1; None when
            each has one.
        negatives: inputs of the right tower for n mined negatives; None when there are none.
        negative_id: (n,) their right ids; None when there are none.
        weights: (b,) what each pair's loss is multiplied by; None when all are 1.
        bad: (index, reason) of each sample left out.
    """

    indices: Tensor
    left_id: Tensor
    right_id: Tensor
    left: Inputs
    right: Inputs
    left_positives: Tensor | None = None
    right_positives: Tensor | None = None
    negatives: Inputs | None = None
    negative_id: Tensor | None = None
    weights: Tensor | None = None
    bad: tuple[tuple[int, str], ...] = ()

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Arguments of an objective other than embeddings, on its device."""
        names = (
            "left_id",
            "right_id",
            "left_positives",
            "right_positives",
            "negative_id",
            "weights",
        )
        parts = {name: part for name in names if (part := getattr(self, name)) is not None}
        return {name: part.to(device, non_blocking=True) for name, part in parts.items()}


class BatchLoader:
    """Loads batches by pair indices; the same ones whatever the number of workers."""

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
        # Builds its table once, before workers are forked, not in each of them.
        for side in SIDES:
            pairs.not_negatives(side, np.zeros(1, dtype=np.int64))
        self.pairs = pairs
        self.prepare = {"left": left_prepare, "right": right_prepare}
        self.seed = seed
        self.num_workers = num_workers
        self.on_error = on_error
        self.pin_memory = pin_memory

    def batches(self, plan: np.ndarray, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's part of the batches of one epoch.

        Args:
            plan: (num_batches, B) pair indices: the global batches in order.
            epoch: enters the seeds of the augmentation.
            start: number of batches to leave out at the beginning, as done already.
        """
        columns = distributed.rank_slice(plan.shape[1])
        loader: DataLoader[Batch] = DataLoader(
            plan[start:, columns],  # type: ignore[arg-type]  # rows by number, and their number, are enough
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=partial(self._build_or_error, epoch),
            worker_init_fn=forgive_one_sigterm,
            # A generator of its own: an iterator otherwise draws from, and so shifts, the global
            # one.
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            if isinstance(batch, DualencError):
                raise batch
            yield batch

    def _build_or_error(self, epoch: int, indices: np.ndarray) -> Batch | DualencError:
        try:
            return self.build(indices, epoch)
        except DualencError as error:
            # As a value: a DataLoader wraps what workers raise into many lines of traceback.
            return error

    def build(self, indices: np.ndarray, epoch: int) -> Batch:
        """Read and prepare the pairs of (b,) indices; what a worker does. The epoch enters the
        augmentation's seeds."""
        pairs, bad = self._read(indices)
        if without := self._without_tokens(pairs):
            bad += without
            pairs = [pair for pair in pairs if pair.index not in dict(without)]
        numbers = [pair.index for pair in pairs]
        left_id = np.array([pair.left_id for pair in pairs], dtype=np.int64)
        right_id = np.array([pair.right_id for pair in pairs], dtype=np.int64)
        left_seeds = augmentation_seeds(self.seed, epoch, numbers, "left")
        right_seeds = augmentation_seeds(self.seed, epoch, numbers, "right")
        return Batch(
            indices=torch.tensor(numbers, dtype=torch.int64),
            left_id=torch.from_numpy(left_id),
            right_id=torch.from_numpy(right_id),
            left=self._prepared("left", [pair.left for pair in pairs], left_seeds),
            right=self._prepared("right", [pair.right for pair in pairs], right_seeds),
            left_positives=self._positives("left", left_id),
            right_positives=self._positives("right", right_id),
            weights=None
            if self.pairs.weights is None
            else torch.tensor([pair.weight for pair in pairs]),
            bad=tuple(bad),
            **self._mined(pairs, right_seeds),
        )

    def _read(self, indices: np.ndarray) -> tuple[list[Pair], list[tuple[int, str]]]:
        """The pairs that can be read, and (index, reason) of the others."""
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
                    raise BadSample(f"pair {index}: {error}") from None
                bad.append((index, str(error)))
        return pairs, bad

    def _without_tokens(self, pairs: list[Pair]) -> list[tuple[int, str]]:
        """(index, reason) of the pairs with a text of no token, whose vector would be zero."""
        bad: dict[int, str] = {}
        for side in SIDES:
            items = [(pair.index, pair.left) for pair in pairs]
            if side == "right":
                rights = [(pair.index, (pair.right, *pair.negatives)) for pair in pairs]
                items = [(index, item) for index, several in rights for item in several]
            prepare = self.prepare[side]
            if not items or not (isinstance(prepare, TextPrepare) and prepare.may_be_empty()):
                continue
            mask = prepare([item for _, item in items])["attention_mask"]
            for (index, item), num_tokens in zip(items, mask.sum(dim=1).tolist(), strict=True):
                if not num_tokens:
                    bad.setdefault(index, f"{side} is {item[:40]!r}: {ZERO_VECTOR['text']}")
        if bad and self.on_error == "raise":
            index, reason = next(iter(bad.items()))
            raise BadSample(f"pair {index}: {reason}")
        return list(bad.items())

    def _prepared(self, side: Side, items: list[Any], seeds: list[int]) -> Inputs:
        return dict(self.prepare[side](items, seeds)) if items else {}

    def _mined(self, pairs: list[Pair], right_seeds: list[int]) -> dict[str, Any]:
        """Inputs and ids of the pairs' mined negatives; {} without any."""
        items: list[Any] = []
        ids: list[int] = []
        seeds: list[int] = []
        for pair, seed in zip(pairs, right_seeds, strict=True):
            items += pair.negatives
            ids += pair.negative_ids
            # They are right items too: each gets the next seed after that of the pair's own.
            seeds += range(seed + 1, seed + 1 + len(pair.negatives))
        if not items:
            return {}
        return {
            "negatives": self._prepared("right", items, seeds),
            "negative_id": torch.tensor(ids),
        }

    def _positives(self, side: Side, ids: np.ndarray) -> Tensor | None:
        # A batch may be empty on this rank, where every sample was bad.
        if len(ids) == 0:
            return None
        listed = self.pairs.not_negatives(side, ids)
        # One positive each is the pair's own.
        if listed.shape[1] <= 1:
            return None
        return torch.from_numpy(np.ascontiguousarray(listed))
