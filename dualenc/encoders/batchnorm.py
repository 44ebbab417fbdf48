"""Batch normalisation that neither looks at the batch nor remembers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def frozen_batchnorm(module: nn.Module) -> Iterator[None]:
    """Within this context every BatchNorm of `module` uses its running statistics and leaves them alone.

    For forwards beside the training step (chain states, cache refreshes, embedding for batch selection), which
    must not depend on who else is encoded nor move the statistics. Other layers, dropout included, keep their
    mode; gradients flow as usual.
    """
    training = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
