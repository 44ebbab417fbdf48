"""Items outside the batch: each distinct item is encoded once, by the caller's `encode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import PADDING
from dualenc.objectives.checks import check_encoded, check_encoded_rows, fail
from dualenc.types import Side

Encode = Callable[[Side, Tensor], Tensor]
"""`encode(side, ids)` embeds n items, whose ids are on the CPU, as (n, D). All processes make the
same calls in the same order, even without items. A method `encode.sides([(side, ids), …]) ->
[(n, D), …]` is optional, and embeds items of both sides at once."""
CANDIDATE_SIDES: tuple[Side, Side] = ("right", "left")  # of directions 0 and 1


class OutsideEncoder:
    """Embeds items of the candidates' side with the caller's `encode`.

    Repeated items are encoded once per call.

        encoder = OutsideEncoder(encode, views=False, like=embeddings)
        encoder(items, directions=(0, 1))  # (X, n) -> (X, n, D)

    Args:
        encode: function that embeds ids, see `Encode`.
        views: True if items are views of images, see `anchors`.
        like: (…, D) embeddings with the dimension, precision and device of the results.
    """

    def __init__(self, encode: Encode, views: bool, like: Tensor) -> None:
        self.encode = encode
        self.views = views
        self.like = like
        # Objectives disable autocast for their own arithmetic. Encoders run under the caller's
        # autocast, which is still active here.
        self._autocast: AbstractContextManager[object] = nullcontext()
        device = like.device.type
        if torch.is_autocast_enabled(device):
            self._autocast = torch.autocast(device, dtype=torch.get_autocast_dtype(device))

    def __call__(self, items: Tensor, directions: tuple[int, ...]) -> Tensor:
        """Return (X, n, D) embeddings of items (X, n) of directions (X); zeros for -1."""
        # One transfer for both directions: each stalls the queue of an accelerator.
        ids = items.cpu()
        if not distributed.is_initialized() and bool((ids == PADDING).all()):
            return self.like.new_zeros(*ids.shape, self.like.shape[-1])
        if self.views:
            embeddings = torch.stack([self._embed_views(row) for row in ids])
        else:
            sides = [CANDIDATE_SIDES[direction] for direction in directions]
            parts = list(zip(sides, ids, strict=True))
            embeddings = torch.stack(self._embed(parts))
        check_encoded(embeddings)
        return embeddings

    def _embed_views(self, items: Tensor) -> Tensor:
        is_left = items % 2 == 0
        ids = items // 2  # floor division keeps -1
        left_ids = ids.where(is_left, PADDING)
        right_ids = ids.where(~is_left, PADDING)
        left, right = self._embed([("left", left_ids), ("right", right_ids)])
        return left + right

    def _embed(self, parts: list[tuple[Side, Tensor]]) -> list[Tensor]:
        """Return (n, D) embeddings of each part, a side and ids (n,) on the CPU; zeros for -1."""
        distinct = []
        rows = []
        for side, ids in parts:
            known = ids[ids != PADDING].unique()
            distinct.append((side, known))
            # Row 0 holds zeros, and belongs to -1, which sorts below all ids.
            row = torch.searchsorted(known, ids, right=True)
            rows.append(row.to(self.like.device, non_blocking=True))
        zero = self.like.new_zeros(1, self.like.shape[-1])
        results = []
        for encoded, row in zip(self._encode(distinct), rows, strict=True):
            results.append(torch.cat([zero, encoded])[row])
        return results

    def _encode(self, parts: list[tuple[Side, Tensor]]) -> list[Tensor]:
        """Return (n, D) embeddings of each part, a side and distinct ids (n,)."""
        # Several processes encode even without items: all must take part in collective passes.
        to_encode = parts
        if not distributed.is_initialized():
            to_encode = [(side, ids) for side, ids in parts if len(ids)]
        encode_sides = getattr(self.encode, "sides", None)
        with self._autocast:
            if encode_sides is not None and len(to_encode) > 1:
                encoded = encode_sides(to_encode)
                if not isinstance(encoded, Sequence) or len(encoded) != len(to_encode):
                    problem = "returned the wrong number of tensors from its method sides"
                    fail("encode", problem, f"it must return {len(to_encode)}")
            else:
                encoded = [self.encode(side, ids) for side, ids in to_encode]
        by_side = {}
        for (side, ids), embeddings in zip(to_encode, encoded, strict=True):
            check_encoded_rows(embeddings, len(ids), self.like.shape[-1])
            by_side[side] = embeddings.to(self.like)
        no_rows = self.like.new_zeros(0, self.like.shape[-1])
        return [by_side.get(side, no_rows) for side, _ in parts]
