"""Items outside the batch: each distinct item is encoded once, by the caller's `encode`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import PADDING
from dualenc.objectives.checks import check_encoded
from dualenc.types import Side

Encode = Callable[[Side, Tensor], Tensor]
"""`encode(side, ids)` embeds n items, whose ids are on the CPU, as (n, D). With several processes all make the same
calls in the same order, even for no items: a pass through a sharded model is collective."""

CANDIDATE_SIDES: tuple[Side, Side] = ("right", "left")
"""The candidates' side of directions 0 and 1."""


class ItemEncoder:
    """Embeds items of the candidates' side by an `encode` of ids.

    Args:
        encode: see `Encode`.
        views: items are views of images, see `anchors`.
        like: (…, D) embeddings whose dimension, precision and device the results have.
    """

    def __init__(self, encode: Encode, views: bool, like: Tensor) -> None:
        self.encode = encode
        self.views = views
        self.like = like
        # Objectives switch autocast off for themselves; encoders run under the caller's, which is still on here.
        self._autocast: AbstractContextManager[object] = nullcontext()
        device = like.device.type
        if torch.is_autocast_enabled(device):
            self._autocast = torch.autocast(device, dtype=torch.get_autocast_dtype(device))

    def __call__(self, items: Tensor, directions: tuple[int, ...]) -> Tensor:
        """(X, n, D) embeddings of items (X, n); zeros for -1.

        Args:
            items: on any device; the only ids that the host waits for in a step.
            directions: (X) of `Anchors`, 0 for right candidates, 1 for left ones.

        Raises:
            DualencError: `encode` gives another shape, or vectors that are neither of norm 1 nor zero.
        """
        embeddings = []
        # One transfer for both directions: each stalls the queue of an accelerator.
        for direction, ids in zip(directions, items.cpu(), strict=True):
            if self.views:
                embeddings.append(self._embed_views(ids))
            else:
                embeddings.append(self._embed(CANDIDATE_SIDES[direction], ids))
        stacked = torch.stack(embeddings)
        check_encoded(stacked)
        return stacked

    def _embed_views(self, items: Tensor) -> Tensor:
        is_left = items % 2 == 0
        ids = items // 2  # floor division keeps -1
        left = self._embed("left", ids.where(is_left, PADDING))
        right = self._embed("right", ids.where(~is_left, PADDING))
        return left + right

    def _embed(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) embeddings of ids (n,) on the CPU; zeros for -1."""
        dimension = self.like.shape[-1]
        distinct, inverse = ids.unique(return_inverse=True)
        inverse = inverse.to(self.like.device)
        present = distinct[distinct >= 0]
        padding = self.like.new_zeros(len(distinct) - len(present), dimension)
        # A single process has no collective pass to join.
        if not len(present) and not distributed.is_initialized():
            return padding[inverse]

        with self._autocast:
            embeddings = self.encode(side, present)
        expected = (len(present), dimension)
        if embeddings.shape != expected:
            shape = tuple(embeddings.shape)
            raise DualencError(f"encode gave shape {shape} for {len(present)} ids; it must be {expected}")
        # -1 sorts first, so its row of zeros does too.
        return torch.cat([padding, embeddings.to(self.like)])[inverse]
