"""Memory per training item, identical on every rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dualenc import distributed


class LogAverages(nn.Module):
    """A moving average u of a positive quantity per item, kept as log u so that exp never overflows.

    Args:
        num_items: N, the number of items.
        start: log u of every item. NaN marks an item that was never visited: its first value is taken whole, whatever
            the batch around it.
    """

    log_u: Tensor

    def __init__(self, num_items: int, start: float = torch.nan) -> None:
        super().__init__()
        self.register_buffer("log_u", torch.full((num_items,), start))

    @torch.no_grad()
    def track(
        self,
        ids: Tensor,
        log_values: Tensor,
        rate: float,
        sizes: list[int] | None = None,
        store: bool = True,
        distinct: bool = False,
    ) -> Tensor:
        """u ← (1 − rate)·u + rate·value for the rows of this rank; the table takes the rows of all ranks.

        An item that stands in several rows of the batch (two views, several captions) gets each row's own average
        back, and stores their mean.

        Args:
            ids: (A,) the rows' items.
            log_values: (A,) log of the new values; -inf (a row without negatives) leaves its item untouched.
            rate: share of the new value, in (0, 1].
            sizes: number of rows on every rank, where known.
            store: whether the table is written; pass the objective's `updates_state`, alike on all ranks.
            distinct: no item stands in two rows, on any ranks.

        Returns:
            (A,) the updated log u of each row, without gradient.
        """
        old = self.log_u[ids].to(log_values)
        updated, usable = log_values, log_values > -torch.inf
        if rate < 1:
            updated = torch.logaddexp(old + math.log1p(-rate), log_values + math.log(rate))
            updated = torch.where(torch.isnan(old), log_values, updated)
        # A row without negatives gets its item's old average back, but has no say in the new one.
        updated = torch.where(usable, updated, old)
        if not store:
            return updated
        if distributed.is_initialized():
            ids, usable, stored = (distributed.gather(rows, sizes) for rows in (ids, usable, updated))
        else:
            stored = updated
        if distinct:
            # What a row without negatives writes is what was there.
            self.log_u[ids] = stored.to(self.log_u)
        else:
            self._store_mean(ids, torch.where(usable, stored, torch.nan))
        return updated

    def _store_mean(self, ids: Tensor, log_u: Tensor) -> None:
        """Write the mean (of u, not of log u) over the usable rows of each item."""
        usable = torch.isfinite(log_u)
        log_u = log_u.masked_fill(~usable, -torch.inf)
        # Every row is scaled by the peak of the batch's rows for its item, so that exp stays in range.
        items, row_item = torch.unique(ids, return_inverse=True)
        peak = log_u.new_full((len(items),), -torch.inf).scatter_reduce(0, row_item, log_u, reduce="amax")
        scaled = torch.exp(log_u - peak[row_item]).masked_fill(~usable, 0.0)
        total, count = (torch.zeros_like(peak).index_add(0, row_item, rows.to(peak)) for rows in (scaled, usable))
        mean = (peak + (total / count).log()).to(self.log_u)
        self.log_u[items] = torch.where(count > 0, mean, self.log_u[items])


def mean_per_item(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct items of the rows (A,), and the mean of the rows' values for each: a row order that ranks agree on."""
    items, row_item, count = torch.unique(ids, return_inverse=True, return_counts=True)
    total = torch.zeros_like(values[: len(items)]).index_add(0, row_item, values)
    return items, total / count


def first_rows(ids: Tensor) -> Tensor:
    """Positions of the first row of each distinct id (A,), so that a write by id never meets the same id twice."""
    items, row_item = torch.unique(ids, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    return rows.new_full((len(items),), len(ids)).scatter_reduce(0, row_item, rows, reduce="amin")
