"""Tables with a row per item: moving averages in the log domain, and writes with duplicate items.

All ranks write the same values, so the tables are equal everywhere and any rank can save them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_average(log_old: Tensor, log_new: Tensor, rate: float) -> Tensor:
    """Return the log of u ← (1 − rate)·u + rate·value, elementwise and without overflow.

    Args:
        log_old: log u; NaN for an item that was never visited, whose average becomes its first
            value.
        log_new: log of the new values; -inf (an anchor without negatives) keeps the old one.
        rate: weight of the new value, in (0, 1].
    """
    updated = log_new
    if rate < 1:
        share_of_old = log_old + math.log1p(-rate)
        share_of_new = log_new + math.log(rate)
        mixed = torch.logaddexp(share_of_old, share_of_new)
        updated = torch.where(log_old.isnan(), log_new, mixed)
    return torch.where(log_new > -torch.inf, updated, log_old)


def first_occurrence(ids: Tensor, preferred: Tensor | None = None) -> Tensor:
    """Return (n,) for each row the first row with the same id (n,), or the first `preferred` one.

    Indexing with it makes duplicates write one value: which of several writes to a row wins is
    undefined on a GPU.
    """
    # Preferred rows have even sort keys, others odd ones: a preferred row of an id sorts first.
    smallest = 2 * ids
    keys = smallest
    if preferred is not None:
        keys = smallest + ~preferred
    ordered, order = keys.sort(stable=True)
    first = torch.searchsorted(ordered, smallest)
    return order[first]


def mean_over_duplicates(values: Tensor, usable: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Average the usable values (n,) of the same item, as grouped by `first_occurrence`.

    Returns:
        (n,) the mean of each row's item; (n,) True if the item has any usable value.
    """
    zeros = torch.zeros_like(values)
    usable_values = values.masked_fill(~usable, 0.0)
    # In the first row of each item; indexing with `first` copies it to the others.
    totals = zeros.index_add(0, first, usable_values)
    counts = zeros.index_add(0, first, usable.to(values))
    total = totals[first]
    count = counts[first]
    return total / count.clamp(min=1), count > 0


def write_log_means(table: Tensor, rows: Tensor, log_values: Tensor, usable: Tensor) -> None:
    """Write logs (n,) into rows (n,) of a table where `usable` (n,).

    If an item has several rows (two views, several captions), the log of their mean is written.
    """
    first = first_occurrence(rows)
    log_values = log_values.masked_fill(~usable, -torch.inf)
    # Divided by the largest value of the item, so that exp stays in range.
    lowest = torch.full_like(log_values, -torch.inf)
    peaks = lowest.scatter_reduce(0, first, log_values, reduce="amax")
    peak = peaks[first]
    scaled = torch.exp(log_values - peak)
    mean, written = mean_over_duplicates(scaled, usable, first)
    write_rows(table, rows, peak + mean.log(), written)


def write_rows(table: Tensor, rows: Tensor, values: Tensor, written: Tensor) -> None:
    """Write values (n,) into rows (n,) of a table where `written`; duplicates must be equal."""
    table[rows] = torch.where(written, values.to(table), table[rows])
