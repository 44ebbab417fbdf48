"""The batch of a step: checked, gathered over ranks, and arranged as anchors against candidates.

Shapes: b pairs of this rank, P of all ranks, n mined negatives of all ranks, K positives, D dimension; X, A, C as in
`anchors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.checks import check_shapes, check_values, fail

if TYPE_CHECKING:
    from dualenc.objectives.base import Objective


@dataclass(frozen=True)
class Batch:
    """The pairs of a step, checked, in float32 or float64.

    Attributes:
        left, right: (b, D) embeddings of this rank's pairs, with gradient.
        left_id, right_id: (b,).
        left_positives, right_positives: (b, K) further positives of the opposite side, padded with -1; or None.
        all_left, all_right: (P, D) of all ranks, with gradient.
        all_left_id, all_right_id: (P,).
        negatives, negative_id: (n, D) and (n,) mined right items of all ranks.
        sizes: pairs on every rank.
        most_copies: most pairs of the batch that share one item.
        keys: (P, D) a momentum encoder's embeddings of left and of right items of all ranks; or None.
    """

    left: Tensor
    right: Tensor
    left_id: Tensor
    right_id: Tensor
    left_positives: Tensor | None
    right_positives: Tensor | None
    all_left: Tensor
    all_right: Tensor
    all_left_id: Tensor
    all_right_id: Tensor
    negatives: Tensor
    negative_id: Tensor
    sizes: list[int]
    most_copies: int
    keys: tuple[Tensor, Tensor] | None = None

    def detached(self) -> Batch:
        """The same without gradient, in copies: a loop may change its embeddings in place."""
        left = self.left.detach().clone()
        right = self.right.detach().clone()
        is_alone = self.all_left is self.left
        return replace(
            self,
            left=left,
            right=right,
            all_left=left if is_alone else self.all_left.detach(),
            all_right=right if is_alone else self.all_right.detach(),
            negatives=self.negatives.detach(),
        )


def gather_batch(
    objective: Objective,
    embeddings: Mapping[str, Tensor | None],
    ids: Mapping[str, Tensor | None],
    weights: Tensor | None,
) -> Batch:
    """Check what `Objective.forward` was given, and gather it over ranks.

    Args:
        objective: whose id spaces and views decide what is right, and whom errors name.
        embeddings: left, right, negatives, keys_left and keys_right (b, D).
        ids: left_id, right_id, left_positives, right_positives, negative_id.
        weights: (b,) or None.

    Raises:
        DualencError: shapes, types or values that do not fit.
    """
    given = {name: tensor for name, tensor in embeddings.items() if tensor is not None}
    given_ids = {name: values for name, values in ids.items() if values is not None}
    for name in ("left", "right", "left_id"):
        if name not in given and name not in given_ids:
            fail(objective, name, "is None; pass a tensor")
    check_shapes(objective, given, given_ids, weights, objective.views)

    given_ids = {name: values.long() for name, values in given_ids.items()}
    left_id = given_ids["left_id"]
    right_id = given_ids["right_id"]
    # Ranks may hold different numbers of pairs and of mined negatives: the last batch rarely divides evenly.
    own_numbers = [len(left_id), len(given.get("negatives", ()))]
    sizes, num_mined = distributed.rank_numbers(own_numbers, left_id.device)
    all_ids = distributed.gather(torch.stack([left_id, right_id], dim=1), sizes).T  # (2, P)
    num_items = {"left": objective.num_left, "right": objective.num_right}
    most_copies = check_values(objective, given, given_ids, weights, all_ids, num_items, objective.views)

    # Under mixed precision encoders give halves, in which a sum over thousands of candidates loses its digits.
    precision = torch.float64 if given["left"].dtype == torch.float64 else torch.float32
    left = given["left"].to(precision)
    right = given["right"].to(precision)
    negatives = right[:0]
    if "negatives" in given:
        negatives = given["negatives"].to(precision)
    keys = None
    if "keys_left" in given:
        keys_left = distributed.gather(given["keys_left"].to(precision), sizes)
        keys_right = distributed.gather(given["keys_right"].to(precision), sizes)
        keys = (keys_left, keys_right)
    return Batch(
        left=left,
        right=right,
        left_id=left_id,
        right_id=right_id,
        left_positives=given_ids.get("left_positives"),
        right_positives=given_ids.get("right_positives"),
        all_left=distributed.gather_with_grad(left, sizes),
        all_right=distributed.gather_with_grad(right, sizes),
        all_left_id=all_ids[0],
        all_right_id=all_ids[1],
        negatives=distributed.gather_with_grad(negatives, num_mined),
        negative_id=distributed.gather(given_ids.get("negative_id", right_id[:0]), num_mined),
        sizes=sizes,
        most_copies=most_copies,
        keys=keys,
    )


def two_towers(batch: Batch, num_left: int, temperature: Tensor) -> Anchors:
    """Left anchors against all right items, and right anchors against all left items (X = 2).

    Args:
        num_left: where right items begin in per-item tables.
    """
    rows = torch.stack([batch.left_id, num_left + batch.right_id])
    embeddings = torch.stack([batch.left, batch.right])
    all_embeddings = torch.stack([batch.all_left, batch.all_right])
    all_ids = torch.stack([batch.all_left_id, batch.all_right_id])
    batch_rows = _batch_rows(batch)
    left_positives = known_positives(
        batch.left_id, batch.right_id, all_ids[0], all_ids[1], batch.most_copies, batch.left_positives
    )
    right_positives = known_positives(
        batch.right_id, batch.left_id, all_ids[1], all_ids[0], batch.most_copies, batch.right_positives
    )
    # Both directions in one tensor: the shorter lists are padded.
    width = max(left_positives.shape[1], right_positives.shape[1])
    lists = [pad(ids, (width - ids.shape[1], 0), value=PADDING) for ids in (left_positives, right_positives)]
    return Anchors(
        directions=(0, 1),
        rows=rows,
        batch_rows=batch_rows,
        sizes=batch.sizes,
        embeddings=embeddings,
        partners=embeddings.flip(0),
        all_embeddings=all_embeddings.detach(),
        candidates=all_embeddings.flip(0),
        candidate_ids=all_ids.flip(0),
        positive_column=batch_rows.expand(2, -1),
        positive_ids=torch.stack(lists),
        temperature=temperature,
        keys=None if batch.keys is None else torch.stack(batch.keys).flip(0),
    )


def with_mined(batch: Batch, num_left: int, temperature: Tensor) -> list[Anchors]:
    """Both directions apart (X = 1 each), with mined negatives among the candidates of the left anchors."""
    both = two_towers(batch, num_left, temperature)
    right = both.of_direction(1)
    left = both.of_direction(0)
    # Only left anchors see mined right items, so the directions differ in C.
    left = replace(
        left,
        candidates=torch.cat([left.candidates, batch.negatives[None]], dim=1),
        candidate_ids=torch.cat([left.candidate_ids, batch.negative_id[None]], dim=1),
    )
    return [left, right]


def two_views(batch: Batch, temperature: Tensor) -> Anchors:
    """Both views of each image as anchors against the views of the global batch (X = 1, A = 2b, C = 2P)."""
    total = sum(batch.sizes)
    own = _batch_rows(batch)
    listed = [ids for ids in (batch.left_positives, batch.right_positives) if ids is not None]
    positives = known_positives(
        batch.left_id,
        batch.left_id,
        batch.all_left_id,
        batch.all_left_id,
        1,
        torch.cat(listed, dim=1) if listed else None,
    )
    candidates = torch.cat([batch.all_left, batch.all_right])[None]
    return Anchors(
        directions=(0,),
        rows=torch.cat([batch.left_id, batch.left_id])[None],
        batch_rows=torch.cat([own, own + total]),
        sizes=[2 * size for size in batch.sizes],
        embeddings=torch.cat([batch.left, batch.right])[None],
        partners=torch.cat([batch.right, batch.left])[None],
        all_embeddings=candidates.detach(),
        candidates=candidates,
        candidate_ids=torch.cat([batch.all_left_id, batch.all_left_id])[None],
        positive_column=torch.cat([own + total, own])[None],
        positive_ids=torch.cat([positives, positives])[None],
        temperature=temperature,
        keys=None if batch.keys is None else torch.cat(batch.keys)[None],
        views=True,
    )


def known_positives(
    ids: Tensor, partners: Tensor, all_ids: Tensor, all_partners: Tensor, most_copies: int, listed: Tensor | None
) -> Tensor:
    """(A, K) ascending ids that are not negatives of the anchors, each once, padded in front with -1.

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
        place = torch.searchsorted(ordered, ids)[:, None] + torch.arange(most_copies, device=ids.device)
        inside = place.clamp(max=len(ordered) - 1)
        shared = (ordered[inside] == ids[:, None]) & (place < len(ordered))
        positives = torch.where(shared, all_partners[order[inside]], PADDING)
    if listed is not None:
        positives = torch.cat([positives, listed], dim=1)
    if positives.shape[1] == 1:
        return positives
    # Each id once: its copies stand side by side once sorted, and padding sorts to the front.
    positives = positives.sort(dim=1).values
    repeated = torch.zeros_like(positives, dtype=torch.bool)
    repeated[:, 1:] = positives[:, 1:] == positives[:, :-1]
    return positives.masked_fill(repeated, PADDING).sort(dim=1).values


def _batch_rows(batch: Batch) -> Tensor:
    """(b,) places of this rank's pairs in the global batch."""
    start = sum(batch.sizes[: distributed.rank()])
    return torch.arange(start, start + len(batch.left_id), device=batch.left.device)
