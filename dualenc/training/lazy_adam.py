"""Adam for embedding tables, of which each step uses few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn


class LazyAdamW(torch.optim.AdamW):
    """AdamW that only updates the rows in a gradient, for parameters with sparse gradients.

    In a step that does not use a row, its moments and its weight decay pause, while AdamW would
    keep moving the row by its decaying first moment. The bias correction counts all steps. This is
    torch's `SparseAdam` with AdamW's decay. Rows that every step uses move as under AdamW (Kingma
    and Ba 2015, arXiv:1412.6980, Algorithm 1).

    Example:
        table = nn.EmbeddingBag(100_000, 256, sparse=True)
        optimizer = LazyAdamW(table.parameters(), lr=1e-3, weight_decay=0.01)

    The arguments are those of `torch.optim.AdamW`.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients, and clear sparse gradients.

        Args:
            closure: function that computes the loss again, as in torch's optimizers.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and gradient.is_sparse:
                    self._update_rows(parameter, gradient.coalesce(), group)
                    # AdamW refuses sparse gradients.
                    parameter.grad = None
        return super().step(closure)  # type: ignore[arg-type]

    def _update_rows(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update the rows of a coalesced sparse gradient."""
        rows = gradient.indices()[0]  # (n,)
        values = gradient.values()  # (n, D)
        state = self.state[parameter]
        if not state:
            # Named as in AdamW, so that checkpoints of both have one form.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = state["step"].item()
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        # m ← β₁·m + (1 − β₁)·g and v ← β₂·v + (1 − β₂)·g², on the rows of the gradient.
        first = state["exp_avg"].index_select(0, rows)
        first.lerp_(values, 1 - beta1)
        second = state["exp_avg_sq"].index_select(0, rows)
        second.mul_(beta2)
        second.addcmul_(values, values, value=1 - beta2)
        # Stored before `second` is reused for the square root.
        state["exp_avg"].index_copy_(0, rows, first)
        state["exp_avg_sq"].index_copy_(0, rows, second)
        second_correction = math.sqrt(1 - beta2**step)
        scale = second.sqrt_().div_(second_correction).add_(group["eps"])
        # Decoupled weight decay, before the step as in torch's AdamW.
        updated = parameter.index_select(0, rows)
        updated.mul_(1 - rate * group["weight_decay"])
        first_correction = 1 - beta1**step
        updated.addcdiv_(first, scale, value=-rate / first_correction)
        parameter.index_copy_(0, rows, updated)


def sparse_tables(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the trained weights that get sparse gradients, in a fixed order."""
    tables = []
    for module in modules:
        for part in module.modules():
            if not isinstance(part, nn.EmbeddingBag):
                continue
            if part.sparse and part.weight.requires_grad:
                tables.append(cast(nn.Parameter, part.weight))
    return tables
