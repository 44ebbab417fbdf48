"""Means since the last log, kept on the device so that no step waits for it, and the first step with a bad loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualenc import distributed


class Meter:
    """Sums scalars step by step; `average` brings their means over steps and ranks to the CPU.

    Args:
        device: where the scalars are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.first_bad_step = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, step: int, values: dict[str, Tensor | float]) -> None:
        """Add the values of one step, of which some may be missing; "loss" must be finite, which `bad_step` tells."""
        for name, value in values.items():
            scalar = torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
            self.sums[name] = self.sums[name] + scalar if name in self.sums else scalar
            self.counts[name] = self.counts.get(name, 0) + 1
            if name == "loss":
                first = ~torch.isfinite(scalar) & (self.first_bad_step == 0)
                self.first_bad_step = torch.where(first, float(step), self.first_bad_step)

    def bad_step(self, all_ranks: bool = True) -> int | None:
        """The first step whose loss was not finite, or None; on some rank, if all ranks call it together."""
        own = self.first_bad_step[None]
        steps = (distributed.gather(own) if all_ranks else own).tolist()
        return min((int(step) for step in steps if step > 0), default=None)

    def average(self) -> dict[str, float]:
        """Means since the last call, over the steps that had a value, and ranks; all ranks call it together."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        sums = distributed.all_reduce(torch.stack([self.sums[name] for name in names]), "mean").tolist()
        means = {name: total / self.counts[name] for name, total in zip(names, sums, strict=True)}
        self.sums, self.counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """The sums over all ranks, so that a resumed run logs the same means; all ranks call it together."""
        names = sorted(self.sums)
        sums = {name: float(distributed.all_reduce(self.sums[name], "mean")) for name in names}
        return {"sums": sums, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.counts = dict(state["counts"])
        self.sums = {
            name: torch.tensor(value, dtype=torch.float64, device=self.device) for name, value in state["sums"].items()
        }
