"""Weight averaging: a moving average of the weights, evaluated and saved in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AveragedWeights:
    """An exponential moving average of the trained weights and of running statistics.

    After each step θ̄ ← δ·θ̄ + (1 − δ)·θ (Tarvainen and Valpola 2017, arXiv:1703.01780). Integer
    buffers are copied.

    Example:
        average = AveragedWeights(model, decay=0.999)
        optimizer.step()
        average.update()
        with average.applied():
            evaluate(model)

    Args:
        model: the model whose weights are averaged.
        decay: decay δ of the average, in (0, 1).
        warm_up: True to use δ = min(decay, (1 + t)/(10 + t)) at step t, which forgets the initial
            weights quickly.
    """

    def __init__(self, model: nn.Module, decay: float, warm_up: bool = True) -> None:
        self.model = model
        self.decay = decay
        self.warm_up = warm_up
        self.steps = 0
        state = trained_state(model)
        self.average = {name: tensor.detach().clone() for name, tensor in state.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        self.steps += 1
        decay = self.decay
        if self.warm_up:
            warm_up_decay = (1 + self.steps) / (10 + self.steps)
            decay = min(decay, warm_up_decay)
        current = self.model.state_dict()
        averages = []
        weights = []
        for name, average in self.average.items():
            if average.is_floating_point():
                averages.append(average)
                weights.append(current[name])
            else:
                # Counters, such as the number of batches seen, cannot be averaged meaningfully.
                average.copy_(current[name])
        # One fused call for all weights. Identity towers have none, and the call needs some.
        if averages:
            update_averages = get_ema_multi_avg_fn(decay)
            update_averages(averages, weights, None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights in this context."""
        current = self.model.state_dict()
        # A state dict refers to the weights; without copies they would be overwritten.
        weights = {name: current[name].detach().clone() for name in self.average}
        _assign(self.model, self.average)
        try:
            yield
        finally:
            _assign(self.model, weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps in it."""
        return {"steps": self.steps, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.steps = state["steps"]
        for name, tensor in state["average"].items():
            self.average[name].copy_(tensor)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model without its frozen weights."""
    # With duplicates, as a state dict lists a shared weight under each of its names.
    weights = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


@torch.no_grad()
def _assign(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    state = model.state_dict()
    for name, tensor in weights.items():
        state[name].copy_(tensor)
