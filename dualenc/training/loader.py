"""From a plan of batches to tensors: this rank's slice of every global batch, decoded and prepared in workers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dualenc import distributed
from dualenc.data.pairs import Pair, PairDataset
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import BadSample, DualencError
from dualenc.training.encoding import Encoding
from dualenc.training.signals import forgive_one_sigterm
from dualenc.types import Inputs, OnError, Side

VIEWS = {"left": 0, "right": 1}
_STREAMS = {"batch": 0, "item": 1, "rank": 2, "table": 3, "compare": 4}

Stream = Literal["batch", "item", "rank", "table", "compare"]


def derive_seed(stream: Stream, *parts: int) -> int:
    """A 63-bit seed that is a pure function of non-negative integers, independent between streams.

    Args:
        stream: what the seed is for; equal parts give unrelated seeds in different streams.
        parts: for instance (seed, epoch, index, view).
    """
    return int(np.random.SeedSequence([_STREAMS[stream], *parts]).generate_state(1, np.uint64)[0] >> 1)


def augmentation_seeds(seed: int, epoch: int, indices: Iterable[int], side: Literal["left", "right"]) -> list[int]:
    """One seed per pair for the augmentation of one of its two views: of (seed, epoch, index, view)."""
    return [derive_seed("batch", seed, epoch, int(index), VIEWS[side]) for index in indices]


def item_seeds(seed: int, step: int, ids: Iterable[int], side: Literal["left", "right"]) -> list[int]:
    """One seed per item that an objective asks for by id: of (seed, step, id, view)."""
    return [derive_seed("item", seed, step, int(item), VIEWS[side]) for item in ids]


def generator(stream: Stream, *parts: int) -> np.random.Generator:
    """A numpy generator seeded as `derive_seed`."""
    return np.random.default_rng(derive_seed(stream, *parts))


PrepareItems = Callable[..., Inputs]
SIDES: tuple[Side, Side] = ("left", "right")


class Batch(NamedTuple):
    """This rank's part of one global batch, on the CPU.

    Attributes:
        indices: (b,) pair indices; bad samples are missing.
        left_id: (b,) left ids.
        right_id: (b,) right ids.
        left: inputs of the left tower, first dimension b; empty when b is 0.
        right: inputs of the right tower, first dimension b; empty when b is 0.
        left_positives: (b, K) right ids positive with each left item, padded with -1; None when each has one.
        right_positives: (b, K) left ids positive with each right item, padded with -1; None when each has one.
        negatives: inputs of the right tower for n mined negatives; None when there are none.
        negative_id: (n,) their right ids; None when there are none.
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
    bad: tuple[tuple[int, str], ...] = ()

    @property
    def size(self) -> int:
        """b, the number of pairs."""
        return self.indices.shape[0]


class BatchLoader:
    """Turns an array of pair indices into batches; the same ones whatever the number of workers.

    Args:
        pairs: the training pairs.
        left_prepare: the left tower's `prepare`.
        right_prepare: the right tower's `prepare`.
        seed: of the augmentation.
        num_workers: processes that decode and prepare; 0 does it in this process.
        on_error: "skip" leaves bad samples out of their batch and lists them, "raise" stops at the first.
        augment: training augmentation; False for the preprocessing of evaluation.
        pin_memory: page-locked host memory, for faster copies to a GPU.
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
        augment: bool = True,
        pin_memory: bool = False,
    ) -> None:
        for side in SIDES:
            pairs.positives(side, np.zeros(1, dtype=np.int64))  # builds its table once, here, not in every worker
        self.builder = _BatchBuilder(pairs, left_prepare, right_prepare, seed, on_error, augment)
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def batches(self, plan: np.ndarray, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's part of the batches of one epoch.

        Args:
            plan: (num_batches, B) pair indices: the global batches in order.
            epoch: enters the seeds of the augmentation.
            start: number of batches to leave out at the beginning, as done already.

        Raises:
            DualencError: a bad sample, with on_error="raise".
        """
        loader: DataLoader[Batch] = DataLoader(
            _PlannedBatches(self.builder, plan, epoch, distributed.rank(), distributed.world_size()),
            batch_size=None,
            sampler=range(start, len(plan)),  # type: ignore[arg-type]  # an iterable with a length is enough
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=_unchanged,
            worker_init_fn=forgive_one_sigterm,
            # A generator of its own: an iterator otherwise draws from, and so shifts, the global one.
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            if isinstance(batch, DualencError):
                raise batch
            yield batch

    def for_evaluation(self) -> BatchLoader:
        """The same with the preprocessing of evaluation; bad samples are left out."""
        other = copy.copy(self)
        other.builder = copy.copy(self.builder)
        other.builder.augment, other.builder.on_error = False, "skip"
        return other


class _BatchBuilder:
    """Everything a worker needs to build a batch; without weights, so it is cheap to send."""

    def __init__(
        self,
        pairs: PairDataset,
        left_prepare: PrepareItems,
        right_prepare: PrepareItems,
        seed: int,
        on_error: OnError,
        augment: bool,
    ) -> None:
        self.pairs = pairs
        self.left_prepare, self.right_prepare = left_prepare, right_prepare
        self.seed, self.on_error, self.augment = seed, on_error, augment

    def build(self, indices: np.ndarray, epoch: int) -> Batch:
        pairs, bad = self._read(indices)
        left_id = np.array([pair.left_id for pair in pairs], dtype=np.int64)
        right_id = np.array([pair.right_id for pair in pairs], dtype=np.int64)
        kept = [pair.index for pair in pairs]
        negatives = [item for pair in pairs for item in pair.negatives]
        negative_id = [item_id for pair in pairs for item_id in pair.negative_ids]
        return Batch(
            indices=torch.tensor(kept, dtype=torch.int64),
            left_id=torch.from_numpy(left_id),
            right_id=torch.from_numpy(right_id),
            left=self._inputs("left", [pair.left for pair in pairs], self._seeds(epoch, kept, "left")),
            right=self._inputs("right", [pair.right for pair in pairs], self._seeds(epoch, kept, "right")),
            left_positives=self._positives("left", left_id),
            right_positives=self._positives("right", right_id),
            negatives=self._inputs("right", negatives, self._negative_seeds(epoch, pairs)) if negatives else None,
            negative_id=torch.tensor(negative_id, dtype=torch.int64) if negatives else None,
            bad=bad,
        )

    def _read(self, indices: np.ndarray) -> tuple[list[Pair], tuple[tuple[int, str], ...]]:
        pairs, bad = [], []
        for index in indices.tolist():
            try:
                pairs.append(self.pairs[index])
            except BadSample as error:
                if self.on_error == "raise":
                    raise BadSample(f"pair {index}: {error}") from None
                bad.append((index, str(error)))
        return pairs, tuple(bad)

    def _inputs(self, side: Side, items: list[Any], seeds: list[int] | None) -> Inputs:
        prepare = self.left_prepare if side == "left" else self.right_prepare
        return dict(prepare(items, seeds)) if items else {}

    def _seeds(self, epoch: int, indices: list[int], side: Side) -> list[int] | None:
        return augmentation_seeds(self.seed, epoch, indices, side) if self.augment else None

    def _negative_seeds(self, epoch: int, pairs: list[Pair]) -> list[int] | None:
        """The negatives of a pair are right items beside its own: each gets the pair's next seed."""
        if not self.augment:
            return None
        own = augmentation_seeds(self.seed, epoch, [pair.index for pair in pairs], "right")
        return [seed + 1 + n for seed, pair in zip(own, pairs, strict=True) for n in range(len(pair.negatives))]

    def _positives(self, side: Side, ids: np.ndarray) -> Tensor | None:
        if not len(ids):
            return None
        listed = self.pairs.positives(side, ids)
        return torch.from_numpy(np.ascontiguousarray(listed)) if listed.shape[1] > 1 else None


class _PlannedBatches(Dataset[Any]):
    """Map-style over batch numbers; one item is one finished batch of this rank."""

    def __init__(self, builder: _BatchBuilder, plan: np.ndarray, epoch: int, rank: int, world_size: int) -> None:
        self.builder, self.plan, self.epoch = builder, plan, epoch
        self.rows = distributed.rank_slice(plan.shape[1], rank, world_size)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> Batch | DualencError:
        try:
            return self.builder.build(self.plan[number, self.rows], self.epoch)
        except DualencError as error:
            # As a value: a DataLoader wraps what workers raise into many lines of traceback.
            return error


@contextmanager
def killed_worker_told(num_workers: int) -> Iterator[None]:
    """A data worker that somebody kills is told in one line; PyTorch raises it wherever the program happens to be.

    Raises:
        DualencError: a worker was killed.
    """
    try:
        yield
    except RuntimeError as error:
        killed = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*?)[.\n]", f"{error}\n")
        if killed is None:
            raise
        raise DualencError(
            f"a data worker was killed (process {killed[1]} {killed[2]}), mostly for want of memory; lower "
            f"trainer.num_workers (now {num_workers}) or give the job more memory, then go on with --resume"
        ) from error


def _unchanged(batch: Any) -> Any:
    return batch


class ItemEncoder:
    """Fetches raw items, augments them with a seed of (seed, step, id, view), and encodes them.

    BatchNorm normalises them as it did the batch: see `BatchStatistics`. Whether a graph is built follows
    `torch.is_grad_enabled()`. With on_error="skip" a broken item gets a zero vector, similar to nothing, and is counted
    in `bad`: nobody can leave it out of what was asked for.

    Args:
        model: the two towers, which also know how to prepare items.
        pairs: where the items are.
        seed: of the augmentation.
        on_error: "skip" or "raise", for items that cannot be read.

    Attributes:
        num_encoded: how many items were encoded so far.
        bad: reason by (side, id) of the items that could not be read.
    """

    def __init__(self, model: DualEncoder, pairs: PairDataset, *, seed: int = 0, on_error: OnError = "skip") -> None:
        self.model, self.pairs = model, pairs
        self.seed, self.on_error = seed, on_error
        self.num_encoded = 0
        self.bad: dict[tuple[str, int], str] = {}

    def bind(self, encoding: Encoding, step: int) -> Callable[[Side, Tensor], Tensor]:
        """The callback of one step.

        Args:
            encoding: how this step encodes: plainly or with gradient caching.
            step: number of the batch, for the seeds.
        """

        def encode(side: Side, ids: Tensor) -> Tensor:
            return self._encode(encoding, side, ids, step)

        return encode

    def _encode(self, encoding: Encoding, side: Side, ids: Tensor, step: int) -> Tensor:
        listed = [int(item_id) for item_id in ids.reshape(-1).tolist()]
        self._check(side, listed)
        items = [self._read(side, item_id) for item_id in listed]
        found = [position for position, item in enumerate(items) if item is not None]
        self.num_encoded += len(found)
        seeds = item_seeds(self.seed, step, [listed[position] for position in found], side)
        raw = [items[position] for position in found]
        inputs = dict(self.model.tower(side).prepare(raw, seeds)) if raw else {}
        embeddings = encoding.encode(side, inputs, beside=True)
        if len(found) == len(listed):
            return embeddings
        position = torch.tensor(found, dtype=torch.int64, device=embeddings.device)
        return embeddings.new_zeros(len(listed), embeddings.shape[1]).index_copy(0, position, embeddings)

    def _read(self, side: Side, item_id: int) -> Any:
        try:
            return self.pairs.item(side, item_id)
        except BadSample as error:
            if self.on_error == "raise":
                raise
            self.bad[side, item_id] = str(error)
            return None

    def _check(self, side: Side, ids: list[int]) -> None:
        limit = self.pairs.num_left if side == "left" else self.pairs.num_right
        wrong = [item_id for item_id in ids if not 0 <= item_id < limit]
        if wrong:
            raise DualencError(f"the objective asks for {side} item {wrong[0]}, but ids lie in [0, {limit})")
