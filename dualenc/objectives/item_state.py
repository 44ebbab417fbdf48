"""State of items by the million: on the device of the embeddings, or in CPU memory while these are on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualenc.objectives.looks import upload


class _OnTheWay(NamedTuple):
    """Values by table for rows of it, of all or `some`, on the CPU once they have `arrived` there."""

    rows: Tensor
    some: Tensor | None
    values: dict[str, Tensor]
    arrived: torch.cuda.Event | None


class ItemState(nn.Module):
    """Base of tables in buffers (N, …) with a row per item.

    Tables in CPU memory stay there whatever device the objective is moved to, and are pinned where there is a GPU. What
    a step writes to them travels while the step goes on, and is there when somebody asks, mostly the next step: nobody
    waits for it.

    Args:
        on_cpu: keep the tables in CPU memory.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        super().__init__()
        self.on_cpu = on_cpu
        self._unsettled: list[_OnTheWay] = []

    def take(self, name: str, rows: Tensor, known: Tensor | None = None) -> Tensor:
        """The rows (n,) of a table, on the device of `rows`.

        Args:
            name: of the table.
            rows: integers of any shape.
            known: the same on the CPU, where the host knows them; else it has to wait.
        """
        self.settle()
        table: Tensor = getattr(self, name)
        if table.device == rows.device:
            return table[rows]
        return upload(table[rows.cpu() if known is None else known], rows.device)

    def put(self, rows: Tensor, known: Tensor | None, some: Tensor | None = None, **values: Tensor) -> None:
        """Write values (n, …) into the rows (n,) of tables; who stands twice has the same values twice.

        Args:
            rows, known: see `take`.
            some: (n,) the rows to be written, of tables (N,); by default all.
            values: by name of the table.
        """
        tables = {name: getattr(self, name) for name in values}
        cpu = torch.device("cpu")
        if rows.device != cpu and all(table.device == cpu for table in tables.values()):
            kept = {name: new.detach().to(cpu, non_blocking=True) for name, new in values.items()}
            wanted = None if some is None else some.to(cpu, non_blocking=True)
            known = rows.to(cpu, non_blocking=True) if known is None else known
            arrived = torch.cuda.current_stream(rows.device).record_event() if rows.is_cuda else None
            self._unsettled.append(_OnTheWay(known, wanted, kept, arrived))
            return
        for name, table in tables.items():
            new = values[name].to(table)
            if some is not None:
                new = torch.where(some, new, table[rows])
            table[rows] = new

    def settle(self) -> None:
        """Write what is on its way."""
        unsettled, self._unsettled = self._unsettled, []
        for rows, some, values, arrived in unsettled:
            if arrived is not None:
                arrived.synchronize()
            where = slice(None) if some is None else some
            for name, new in values.items():
                table = getattr(self, name)
                table[rows[where]] = new[where].to(table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ItemState:
        self.settle()
        if not self.on_cpu:
            return super()._apply(fn, recurse)

        def stay(table: Tensor) -> Tensor:
            # Another precision, but no other device.
            like = fn(table[:0])
            return pinned_for(like, table.to(like.dtype))

        return super()._apply(stay, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__.copy()


def pinned_for(like: Tensor, table: Tensor) -> Tensor:
    """A CPU table in pinned memory where `like` is on a GPU, which then need not wait for its rows."""
    return table.pin_memory() if like.is_cuda else table
