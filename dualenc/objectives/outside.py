"""Items beside the batch: how an objective names them, finds them, and asks for their embeddings.

With two towers an item is named by its id. With views every image i is two items, as it is two columns of a batch: its
left view is item 2i, its right view item 2i + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, Side
from dualenc.objectives.base import Encode


def ids_of(items: Tensor, views: bool) -> Tensor:
    """The ids of items, of any shape."""
    return items // 2 if views else items


def left_view(items: Tensor) -> Tensor:
    """The left view of each item's image; -1 stays."""
    return torch.where(items < 0, items, items // 2 * 2)


def items_of(ids: Tensor, views: bool) -> Tensor:
    """(A, K) lists of ids padded with -1 -> the same as items (A, K), or with views both of each image (A, 2K)."""
    if not views:
        return ids
    return torch.cat([torch.where(ids < 0, ids, 2 * ids), torch.where(ids < 0, ids, 2 * ids + 1)], dim=1)


def candidate_items(anchors: Anchors) -> Tensor:
    """(C,) the candidates as items."""
    ids = anchors.candidate_ids
    if not anchors.views:
        return ids
    half = len(ids) // 2
    return torch.cat([2 * ids[:half], 2 * ids[half:] + 1])


def find(items: Tensor, wanted: Tensor) -> Tensor:
    """(A,) the first position in items (C,) of each wanted one (A,), -1 where it is not there."""
    if not len(items):
        return torch.full_like(wanted, -1)
    ordered, order = items.sort(stable=True)
    place = torch.searchsorted(ordered, wanted).clamp(max=len(items) - 1)
    return torch.where(ordered[place] == wanted, order[place], -1)


def embed(items: Tensor, encode: Encode, anchors: Anchors) -> Tensor:
    """(n, D) embeddings of items (n,), each distinct one encoded once; this rank's own needs, no collective."""
    if not len(items):
        return anchors.embeddings[:0]
    distinct, row = torch.unique(items, return_inverse=True)
    if not anchors.views:
        return encode(anchors.candidate_side, distinct)[row]
    embeddings = anchors.embeddings.new_zeros(len(distinct), anchors.embeddings.shape[1])
    sides: tuple[Side, ...] = ("left", "right")
    for view, side in enumerate(sides):
        place = (distinct % 2 == view).nonzero()[:, 0]
        if len(place):
            ids = ids_of(distinct[place], views=True)
            embeddings = embeddings.index_put((place,), encode(side, ids))
    return embeddings[row]


def similarities_beside(anchors: Anchors, rows: Tensor, embeddings: Tensor, num_each: int) -> Tensor:
    """(A, S) similarities of the anchors at `rows` (n,) with embeddings (n·S, D) of their own; -inf elsewhere."""
    empty = anchors.positive_similarities.new_full((len(anchors.ids), num_each), -torch.inf)
    if not len(rows):
        return empty
    own = embeddings.view(len(rows), num_each, embeddings.shape[-1])
    return empty.index_put((rows,), torch.einsum("ad,asd->as", anchors.embeddings[rows], own))
