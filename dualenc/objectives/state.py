"""The random draws of an objective: the same on every rank, and part of its state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import KnownIds, joined
from dualenc.objectives.item_state import ItemState
from dualenc.objectives.looks import upload
from dualenc.seeds import derive_seed

# Of a large batch, as many rows come from one draw as have so many numbers.
ENTRIES_PER_DRAW = 2**21


class SharedRandom(nn.Module):
    """Numbered draws that all ranks make alike: draw for the whole global batch, then take the rank's own rows.

    Draw k comes from a generator seeded by (seed, k) on the device that wants it. So nothing is copied to an
    accelerator, and the whole state is two integers, valid on any device and for any number of ranks.

    Args:
        seed: start of the sequence.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.draws = 0

    def uniform(self, *shape: int, like: Tensor) -> Tensor:
        """Draws in [0, 1), multiples of 2⁻²⁴ whatever the precision, of the given shape and like `like`."""
        return torch.rand(shape, generator=self._next(like.device), device=like.device).to(like.dtype)

    def exponential(self, *shape: int, like: Tensor) -> Tensor:
        """Draws of log(1/u) with u uniform in (0, 1), of the given shape, with the device and precision of `like`."""
        draws = torch.empty(shape, device=like.device).exponential_(generator=self._next(like.device))
        return draws.to(like.dtype)

    def rows(self, num_rows: int, width: int) -> Callable[[Tensor | None, Tensor], Tensor]:
        """(num_rows, width) draws of `exponential`, given out by row: never the whole matrix of a large batch at once.

        Every run of some rows of the global batch has its own numbered draw. So a row's numbers depend neither on the
        rank that holds it nor on the rows it is looked at with, and looking again gives the same ones.

        Returns:
            A function of rows (n,) on the CPU, None for all, and a tensor of the wanted device and precision, which
            gives (n, width), not to be written to.
        """
        size, first = max(1, ENTRIES_PER_DRAW // max(1, width)), self.draws
        num_runs = max(1, -(-num_rows // size))
        self.draws += num_runs

        # One block of rows after the other wants the same run.
        held: dict[int, Tensor] = {}

        def run(number: int, like: Tensor) -> Tensor:
            if number not in held:
                held.clear()
                random = SharedRandom(self.seed)
                random.draws = first + number
                held[number] = random.exponential(min(size, num_rows - number * size), width, like=like)
            return held[number]

        def draws_of(rows: Tensor | None, like: Tensor) -> Tensor:
            if rows is None:
                return joined([run(number, like) for number in range(num_runs)])
            if num_runs == 1:
                return run(0, like)[upload(rows, like.device)]
            numbers, place = (rows // size).unique(return_inverse=True)
            return joined([run(number, like) for number in numbers.tolist()])[
                upload(place * size + rows % size, like.device)
            ]

        return draws_of

    def integers(self, high: int, *shape: int, device: torch.device) -> Tensor:
        """Integers in [0, high) of the given shape."""
        return torch.randint(high, shape, generator=self._next(device), device=device)

    def permutation(self, size: int, device: torch.device) -> Tensor:
        """(size,) the numbers [0, size) in random order."""
        return torch.randperm(size, generator=self._next(device), device=device)

    def get_extra_state(self) -> Tensor:
        """Seed and number of draws made, for the state dict."""
        return torch.tensor([self.seed, self.draws])

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved position."""
        if state.shape != (2,):
            raise DualencError("objective state: _extra_state of the random draws must hold seed and position")
        self.seed, self.draws = (int(number) for number in state)

    def _next(self, device: torch.device) -> torch.Generator:
        seed = derive_seed("draw", self.seed, self.draws)
        self.draws += 1
        return torch.Generator(device).manual_seed(seed)


class PairsSeen(nn.Module):
    """How many pairs training has seen: a number of the host, which waits for no device, and part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def get_extra_state(self) -> Tensor:
        """The number, for the state dict."""
        return torch.tensor(self.number)

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved number."""
        self.number = int(state)


class LogAverages(ItemState):
    """A moving average u of a positive quantity per item, kept as log u so that exp never overflows.

    Args:
        num_items: N, the number of items.
        start: log u of every item. NaN marks an item that was never visited: its first value is taken whole, whatever
            the batch around it.
        on_cpu: see `ItemState`.
    """

    log_u: Tensor

    def __init__(self, num_items: int, start: float = torch.nan, on_cpu: bool = False) -> None:
        super().__init__(on_cpu)
        self.register_buffer("log_u", torch.full((num_items,), start))

    @torch.no_grad()
    def store(
        self,
        ids: Tensor,
        log_u: Tensor,
        log_values: Tensor | None = None,
        sizes: list[int] | None = None,
        known: KnownIds | None = None,
    ) -> None:
        """Write what `log_average` gave; the table takes the rows of all ranks. An item that stands in several rows of
        the batch (two views, several captions) takes their mean.

        Args:
            ids: (A,) the rows' items.
            log_u: (A,) their new averages.
            log_values: (A,) the new values; a row where one is -inf (no negatives) has no say. None where no item
                stands in two rows, on any ranks.
            sizes: number of rows on every rank, where known.
            known: the items on the CPU, where the host knows them.
        """
        ids, stored = distributed.gather(ids, sizes), distributed.gather(log_u, sizes)
        everyone = known and known.all_anchors
        if log_values is None:
            # What a row without negatives writes is what was there.
            self.put(ids, everyone, log_u=stored)
            return
        # The mean of u, not of log u, over an item's rows, each scaled by their peak so that exp stays in range.
        usable = torch.isfinite(stored) & (distributed.gather(log_values, sizes) > -torch.inf)
        stored, first = stored.masked_fill(~usable, -torch.inf), first_rows(ids)
        peak = torch.full_like(stored, -torch.inf).scatter_reduce(0, first, stored, reduce="amax")[first]
        mean, some = mean_by_first(torch.exp(stored - peak), usable, first)
        self.put(ids, everyone, some, log_u=peak + mean.log())


@torch.no_grad()
def log_average(old: Tensor, log_values: Tensor, rate: float, all_usable: bool = False) -> Tensor:
    """(A,) the log of u ← (1 − rate)·u + rate·value, of each row its own; of an item's first visit the value.

    Args:
        old: (A,) log u, NaN for an item that was never visited.
        log_values: (A,) log of the new values; -inf (a row without negatives) leaves the old.
        rate: share of the new value, in (0, 1].
        all_usable: no value is -inf.
    """
    updated = log_values
    if rate < 1:
        updated = torch.logaddexp(old + math.log1p(-rate), log_values + math.log(rate))
        updated = torch.where(torch.isnan(old), log_values, updated)
    return updated if all_usable else torch.where(log_values > -torch.inf, updated, old)


def first_rows(ids: Tensor) -> Tensor:
    """(A,) of each row the first row with the same id: who writes what stands there gives all copies one value."""
    ordered, order = ids.sort(stable=True)
    return order[torch.searchsorted(ordered, ids)]


def mean_by_first(values: Tensor, usable: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """(A,) the mean of the usable values (A,) among the rows that share a first row (A,); and whether there are any."""
    values = values.masked_fill(~usable, 0.0)
    total, count = (torch.zeros_like(values).index_add(0, first, rows.to(values))[first] for rows in (values, usable))
    return total / count.clamp(min=1), count > 0
