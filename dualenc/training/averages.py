"""Weight averaging: a moving average of the weights, evaluated and saved in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AveragedWeights:
    """An exponential moving average of the weights that train, and of running statistics; integers
    are copied.

    θ̄ ← δ·θ̄ + (1 − δ)·θ after each step (Tarvainen and Valpola 2017, arXiv:1703.01780), where δ is
    `decay`, or with `warm_up` min(decay, (1 + t)/(10 + t)) at step t, so that the first weights are
    soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float, warm_up: bool = True) -> None:
        self.model = model
        self.decay = decay
        self.warm_up = warm_up
        self.steps = 0
        self.average = {
            name: tensor.detach().clone() for name, tensor in trained_state(model).items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of a step."""
        self.steps += 1
        decay = self.decay
        if self.warm_up:
            decay = min(decay, (1 + self.steps) / (10 + self.steps))
        current = self.model.state_dict()
        floating = [name for name, tensor in self.average.items() if tensor.is_floating_point()]
        # One fused call for all weights. Identity towers have none.
        if floating:
            averages = [self.average[name] for name in floating]
            weights = [current[name] for name in floating]
            get_ema_multi_avg_fn(decay)(averages, weights, None)
        for name in self.average.keys() - set(floating):
            self.average[name].copy_(current[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In this context the model has the averaged weights."""
        current = self.model.state_dict()
        weights = {name: current[name].detach().clone() for name in self.average}
        _assign(self.model, self.average)
        try:
            yield
        finally:
            _assign(self.model, weights)

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of steps in it."""
        return {"steps": self.steps, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.steps = state["steps"]
        for name, tensor in state["average"].items():
            self.average[name].copy_(tensor)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without its frozen weights."""
    weights = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


@torch.no_grad()
def _assign(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    state = model.state_dict()
    for name, tensor in weights.items():
        state[name].copy_(tensor)
