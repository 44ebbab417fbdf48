"""Which candidates are no negatives of an anchor. Positives go by identity, never by position in a batch."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = -1


def partners(ids: Tensor, all_ids: Tensor, all_partners: Tensor, copies: int) -> Tensor:
    """(A, copies) the partners of each anchor's item in all pairs of the batch that it stands in, padded with -1.

    Args:
        ids: (A,) the anchors' items.
        all_ids, all_partners: (P,) both items of every pair.
        copies: an item stands in at most so many pairs.
    """
    ordered, order = all_ids.sort(stable=True)
    first = torch.searchsorted(ordered, ids)
    place = first[:, None] + torch.arange(copies, device=ids.device)
    inside = place.clamp(max=len(ordered) - 1)
    shared = (ordered[inside] == ids[:, None]) & (place < len(ordered))
    return torch.where(shared, all_partners[order[inside]], PADDING)


def listed(ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """(A, C): whether a candidate's id (C,) stands in the anchor's list (A, K); -1 stands for no id."""
    if ids.shape[1] == 1:
        return ids == candidate_ids
    if not len(candidate_ids):
        return torch.zeros(len(ids), 0, dtype=torch.bool, device=ids.device)
    # Every id of a list is looked up among the sorted candidates, and marks the first of its copies there.
    num_candidates = len(candidate_ids)
    ordered = candidate_ids.sort().values
    place = torch.searchsorted(ordered, ids).clamp(max=num_candidates - 1)
    place = torch.where(ordered[place] == ids, place, num_candidates)
    marked = torch.zeros(len(ids), num_candidates + 1, dtype=torch.bool, device=ids.device).scatter_(1, place, True)
    return marked[:, torch.searchsorted(ordered, candidate_ids)]


def distinct_ids(ids: Tensor) -> Tensor:
    """(A, K) lists padded with -1 -> the same, sorted, with a repeated id replaced by -1."""
    ids = ids.sort(dim=1).values
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids.masked_fill(repeated, PADDING)
