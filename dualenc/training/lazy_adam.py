"""Adam for tables of which a step uses few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn


class LazyAdamW(torch.optim.AdamW):
    """AdamW that updates, of parameters with sparse gradients, the rows of these gradients only.

    A row's moments and weight decay stand still in the steps that do not use it, while AdamW goes
    on moving the row by its decaying first moment; the bias correction counts all steps. This is
    torch's `SparseAdam` with AdamW's decay. Rows that every step uses move as under AdamW (Kingma
    and Ba 2015, arXiv:1412.6980, Algorithm 1).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients; sparse gradients are consumed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._update_rows(parameter, parameter.grad.coalesce(), group)
                    # AdamW refuses sparse gradients.
                    parameter.grad = None
        return super().step(closure)  # type: ignore[arg-type]

    def _update_rows(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        rows = gradient.indices()[0]  # (n,)
        values = gradient.values()  # (n, D)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = state["step"].item()
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].index_select(0, rows).lerp_(values, 1 - beta1)
        second = state["exp_avg_sq"].index_select(0, rows).mul_(beta2)
        second.addcmul_(values, values, value=1 - beta2)
        state["exp_avg"].index_copy_(0, rows, first)
        state["exp_avg_sq"].index_copy_(0, rows, second)
        scale = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        updated = parameter.index_select(0, rows).mul_(1 - group["lr"] * group["weight_decay"])
        updated.addcdiv_(first, scale, value=-group["lr"] / (1 - beta1**step))
        parameter.index_copy_(0, rows, updated)


def sparse_tables(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The trained weights that get sparse gradients, in a fixed order."""
    tables = []
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
                tables.append(cast(nn.Parameter, part.weight))
    return tables
