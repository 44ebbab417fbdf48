"""Which candidates are no negatives of an anchor. Positives go by identity, never by position in a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1


@dataclass(frozen=True)
class Positives:
    """What the mask of some anchors is worked out from, row by row, when it is asked for.

    Attributes:
        ids: (A, K) known ids of the candidate side that are no negatives, padded with -1.
        own: (A, 2) left and right id of the anchor's pair.
        pairs: (P, 2) left and right ids of the pairs that the first P candidates come from. A candidate whose pair
            shares an id with the anchor's is no negative.
        copies: (C,) which distinct item a candidate is, where an item comes more than once: all copies share the fate
            of one.
    """

    ids: Tensor
    own: Tensor
    pairs: Tensor
    copies: Tensor | None = None

    @classmethod
    def of_pairs(cls, ids: Tensor, own: Tensor, pairs: Tensor, candidate_ids: Tensor) -> Positives:
        """For anchors of two towers; candidate_ids (C,) are the pairs' and then those of mined negatives."""
        items, copies = torch.unique(candidate_ids, return_inverse=True)
        return cls(ids, own, pairs, copies if len(items) < len(candidate_ids) else None)

    @classmethod
    def of_views(cls, ids: Tensor) -> Positives:
        """For two views, where the ids say it all."""
        return cls(ids, own=ids.new_zeros(len(ids), 2), pairs=ids.new_zeros(0, 2))

    def take(self, rows: slice) -> Positives:
        """Those of some anchors."""
        return Positives(self.ids[rows], self.own[rows], self.pairs, self.copies)

    def excluded(self, candidate_ids: Tensor) -> Tensor:
        """(A, C) true where a candidate is no negative."""
        excluded = torch.zeros(len(self.ids), len(candidate_ids), dtype=torch.bool, device=candidate_ids.device)
        in_pairs = excluded[:, : len(self.pairs)]
        for side in range(2):
            in_pairs |= self.own[:, side, None] == self.pairs[None, :, side]
        if self.copies is not None:
            excluded = _all_copies(excluded, self.copies)
        return excluded | listed(self.ids, candidate_ids)


def listed(ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """(A, C): whether a candidate's id stands in the anchor's list (A, K)."""
    found = torch.zeros(len(ids), len(candidate_ids), dtype=torch.bool, device=candidate_ids.device)
    for column in ids.unbind(dim=1):
        found |= column[:, None] == candidate_ids[None, :]
    return found


def distinct_ids(ids: Tensor) -> Tensor:
    """(A, K) lists padded with -1 -> the same, sorted, with a repeated id replaced by -1."""
    ids = ids.sort(dim=1).values
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids.masked_fill(repeated, PADDING)


def _all_copies(excluded: Tensor, copies: Tensor) -> Tensor:
    """(A, C): whether the candidate, or another copy of its item, is excluded."""
    hits = torch.zeros_like(excluded, dtype=torch.float32)  # there are no more distinct items than candidates
    return (hits.index_add_(1, copies, excluded.float()) > 0)[:, copies]
