"""The batch of a step: checked, gathered over ranks, and arranged as anchors against candidates.

Shapes: b pairs of this rank, P of all ranks, n mined negatives of all ranks, K positives; X, A, C,
D as in `anchors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.checks import check_shapes, check_values

if TYPE_CHECKING:
    from dualenc.objectives.base import Objective


@dataclass(frozen=True)
class EncodedBatch:
    """The pairs of a step, checked, in float32 or float64. Pairs of values are those of left and of
    right items."""

    embeddings: Tensor  # (2, b, D) of this rank's pairs, with gradient
    ids: Tensor  # (2, b)
    listed: tuple[
        Tensor | None, ...
    ]  # (b, K) further positives of the opposite side, padded with -1
    all_embeddings: Tensor  # (2, P, D) of all ranks, with gradient
    all_ids: Tensor  # (2, P)
    negatives: Tensor  # (n, D) mined right items of all ranks
    negative_id: Tensor  # (n,)
    sizes: list[int]  # pairs on every rank
    most_copies: int  # most pairs of the batch that share one item
    keys: Tensor | None = None  # (2, P, D) a momentum encoder's embeddings of all ranks' pairs

    @property
    def batch_rows(self) -> Tensor:
        """(b,) positions of this rank's pairs in the global batch."""
        start = sum(self.sizes[: distributed.rank()])
        return torch.arange(start, start + self.ids.shape[1], device=self.ids.device)


def gather_batch(
    objective: Objective,
    embeddings: Mapping[str, Tensor],
    ids: Mapping[str, Tensor],
    weights: Tensor | None,
) -> EncodedBatch:
    """Check the arguments of `Objective.forward` by its id spaces and views, and gather them over
    ranks."""
    check_shapes(embeddings, ids, weights, objective.views)

    numbers = {name: values.long() for name, values in ids.items()}
    own_ids = torch.stack([numbers["left_id"], numbers["right_id"]])
    # Ranks may hold different numbers of pairs and of mined negatives: the last batch rarely
    # divides evenly.
    own_counts = [own_ids.shape[1], len(embeddings.get("negatives", ()))]
    sizes, num_mined = distributed.rank_numbers(own_counts, own_ids.device)
    all_ids = distributed.gather(own_ids.T, sizes).T
    num_items = {"left": objective.num_left, "right": objective.num_right}
    most_copies = check_values(embeddings, numbers, weights, all_ids, num_items, objective.views)

    # Under mixed precision encoders give halves, in which a sum over thousands of candidates loses
    # its digits.
    precision = torch.float64 if embeddings["left"].dtype == torch.float64 else torch.float32
    vectors = {name: tensor.to(precision) for name, tensor in embeddings.items()}
    pair = [vectors["left"], vectors["right"]]
    keys = None
    if "keys_left" in vectors:
        both = [vectors["keys_left"], vectors["keys_right"]]
        keys = torch.stack([distributed.gather(side, sizes) for side in both])
    return EncodedBatch(
        embeddings=torch.stack(pair),
        ids=own_ids,
        listed=(numbers.get("left_positives"), numbers.get("right_positives")),
        all_embeddings=torch.stack([distributed.gather_with_grad(side, sizes) for side in pair]),
        all_ids=all_ids,
        negatives=distributed.gather_with_grad(vectors.get("negatives", pair[1][:0]), num_mined),
        negative_id=distributed.gather(numbers.get("negative_id", own_ids[1, :0]), num_mined),
        sizes=sizes,
        most_copies=most_copies,
        keys=keys,
    )


def two_towers(batch: EncodedBatch, num_left: int, temperature: Tensor) -> Anchors:
    """Left anchors against all right items, and right anchors against all left ones (X = 2)."""
    lists = []
    for side, other in ((0, 1), (1, 0)):
        own = (batch.ids[side], batch.ids[other], batch.all_ids[side], batch.all_ids[other])
        lists.append(known_positives(*own, batch.most_copies, batch.listed[side]))
    # Both directions in one tensor: the shorter lists are padded.
    width = max(positives.shape[1] for positives in lists)
    lists = [pad(positives, (width - positives.shape[1], 0), value=PADDING) for positives in lists]
    return Anchors(
        directions=(0, 1),
        rows=torch.stack([batch.ids[0], num_left + batch.ids[1]]),
        batch_rows=batch.batch_rows,
        sizes=batch.sizes,
        embeddings=batch.embeddings,
        partners=batch.embeddings.flip(0),
        candidates=batch.all_embeddings.flip(0),
        candidate_ids=batch.all_ids.flip(0),
        positive_column=batch.batch_rows.expand(2, -1),
        positive_ids=torch.stack(lists),
        temperature=temperature,
        keys=None if batch.keys is None else batch.keys.flip(0),
    )


def with_mined(batch: EncodedBatch, num_left: int, temperature: Tensor) -> list[Anchors]:
    """Left anchors, with mined negatives among their candidates, and right anchors (X = 1 each)."""
    both = two_towers(batch, num_left, temperature)
    left = both.of_direction(0)
    candidates = torch.cat([left.candidates, batch.negatives[None]], dim=1)
    candidate_ids = torch.cat([left.candidate_ids, batch.negative_id[None]], dim=1)
    return [left.with_candidates(candidates, candidate_ids), both.of_direction(1)]


def two_views(batch: EncodedBatch, temperature: Tensor) -> Anchors:
    """Both views of each image as anchors against the views of the global batch (X = 1, A = 2b, C =
    2P)."""
    total = sum(batch.sizes)
    own = batch.batch_rows
    image = batch.ids[0]
    all_images = batch.all_ids[0]
    lists = [ids for ids in batch.listed if ids is not None]
    listed = torch.cat(lists, dim=1) if lists else None
    positives = known_positives(image, image, all_images, all_images, 1, listed)
    return Anchors(
        directions=(0,),
        rows=batch.ids.flatten()[None],
        batch_rows=torch.cat([own, own + total]),
        sizes=[2 * size for size in batch.sizes],
        embeddings=batch.embeddings.flatten(0, 1)[None],
        partners=batch.embeddings.flip(0).flatten(0, 1)[None],
        candidates=batch.all_embeddings.flatten(0, 1)[None],
        candidate_ids=batch.all_ids.flatten()[None],
        positive_column=torch.cat([own + total, own])[None],
        positive_ids=torch.cat([positives, positives])[None],
        temperature=temperature,
        keys=None if batch.keys is None else batch.keys.flatten(0, 1)[None],
        views=True,
    )


def known_positives(
    ids: Tensor,
    partners: Tensor,
    all_ids: Tensor,
    all_partners: Tensor,
    most_copies: int,
    listed: Tensor | None,
) -> Tensor:
    """(A, K) ascending ids that are not negatives of the anchors, each once, padded in front with
    -1.

    Args:
        ids, partners: (A,) the anchors' items, and those that they are paired with.
        all_ids, all_partners: (P,) both items of every pair of the batch.
        most_copies: an item is in at most so many pairs, each of which names a positive.
        listed: (A, K) further positives, padded with -1; or None.
    """
    positives = partners[:, None]
    if most_copies > 1:
        # The pairs of an item stand side by side once pairs are sorted by it.
        ordered, order = all_ids.sort(stable=True)
        first = torch.searchsorted(ordered, ids)[:, None]
        position = first + torch.arange(most_copies, device=ids.device)
        inside = position.clamp(max=len(ordered) - 1)
        is_shared = (ordered[inside] == ids[:, None]) & (position < len(ordered))
        positives = torch.where(is_shared, all_partners[order[inside]], PADDING)
    if listed is not None:
        positives = torch.cat([positives, listed], dim=1)
    if positives.shape[1] == 1:
        return positives
    # Each id once: its copies stand side by side once sorted, and padding sorts to the front.
    positives = positives.sort(dim=1).values
    is_repeated = torch.zeros_like(positives, dtype=torch.bool)
    is_repeated[:, 1:] = positives[:, 1:] == positives[:, :-1]
    return positives.masked_fill(is_repeated, PADDING).sort(dim=1).values
