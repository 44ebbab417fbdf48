"""Items outside the batch: each distinct one encoded once, by the caller's `encode`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.checks import check_encoded
from dualenc.types import Side

Encode = Callable[[Side, Tensor], Tensor]
"""`encode(side, ids)` embeds n items by id, on the CPU, to (n, D). With several processes each of them calls it equally
often and in the same order, also for no items: all ranks make the passes through a sharded model together."""


class ItemEncoder:
    """Embeds items of the candidates' side by an `encode` of ids.

    Args:
        encode: see `Encode`.
        views: items are views of images, see `anchors`.
        like: (…, D) embeddings of the wanted dimension, precision and device.
    """

    def __init__(self, encode: Encode, views: bool, like: Tensor) -> None:
        self.encode, self.views, self.like = encode, views, like
        device = like.device.type
        # Objectives compute in full precision, encoders in the caller's.
        self._autocast: tuple[str, torch.dtype] | None = None
        if torch.is_autocast_enabled(device):
            self._autocast = (device, torch.get_autocast_dtype(device))

    def __call__(self, items: Tensor, directions: tuple[int, ...]) -> Tensor:
        """(X, n, D) embeddings of items (X, n); zeros for -1.

        Args:
            items: on any device; the only ids that the host waits for in a step.
            directions: (X) of `Anchors`, 0 for right candidates, 1 for left ones.

        Raises:
            DualencError: `encode` gives another shape, or vectors that are neither of norm 1 nor zero.
        """
        embeddings = [
            self._embed_views(wanted) if self.views else self._embed("right" if direction == 0 else "left", wanted)
            for direction, wanted in zip(directions, items.cpu(), strict=True)
        ]
        found = torch.stack(embeddings)
        check_encoded(found)
        return found

    def _embed_views(self, items: Tensor) -> Tensor:
        is_left = items % 2 == 0
        ids = torch.where(items < 0, items, items // 2)
        return self._embed("left", ids.where(is_left, -1)) + self._embed("right", ids.where(~is_left, -1))

    def _embed(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) embeddings of ids (n,) on the CPU; zeros for -1."""
        distinct, inverse = ids.unique(return_inverse=True)
        wanted = distinct[distinct >= 0]
        rows = [self.like.new_zeros(len(distinct) - len(wanted), self.like.shape[-1])]  # -1 sorts first
        if len(wanted) or distributed.is_initialized():
            with self._precision():
                found = self.encode(side, wanted)
            if found.shape != (len(wanted), self.like.shape[-1]):
                expected = (len(wanted), self.like.shape[-1])
                raise DualencError(
                    f"encode gave shape {tuple(found.shape)} for {len(wanted)} ids; it must be {expected}"
                )
            rows.append(found.to(self.like))
        return torch.cat(rows)[inverse.to(self.like.device)]

    def _precision(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        device, dtype = self._autocast
        return torch.autocast(device, dtype=dtype)
