"""The batch of a step: checked, gathered over ranks, and arranged as anchors against candidates.

Shapes: b pairs of this rank, P of all ranks, n mined negatives of all ranks, K positives; X, A, C,
D as in `anchors`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.checks import check_shapes, check_values
from dualenc.objectives.corpus_sizes import SampledCorpus
from dualenc.objectives.pair_batch import PairBatch


@dataclass(frozen=True)
class GatheredBatch:
    """The checked pairs of all ranks in float32 or float64; index 0 is left, 1 is right."""

    embeddings: Tensor  # (2, b, D) of this rank's pairs, with gradient
    ids: Tensor  # (2, b)
    # (b, K) further positives, on the opposite side, of left and of right items; padded with -1
    listed: tuple[Tensor | None, ...]
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


def gather_batch(batch: PairBatch, corpus: SampledCorpus) -> GatheredBatch:
    """Check a batch, and gather it over ranks.

    Args:
        batch: pairs with embeddings.
        corpus: id spaces of both sides.
    """
    check_shapes(batch, corpus.views)

    ids = {name: values.long() for name, values in batch.ids.items()}
    own_ids = torch.stack([ids["left_id"], ids["right_id"]])  # (2, b)
    own_negative_id = ids.get("negative_id", own_ids[1, :0])
    # Ranks may hold different numbers of pairs and mined negatives: the last batch of an epoch
    # rarely divides evenly.
    own_counts = [own_ids.shape[1], len(own_negative_id)]
    sizes, num_mined = distributed.rank_numbers(own_counts, own_ids.device)
    all_ids = distributed.gather(own_ids.T, sizes).T
    num_items = {"left": corpus.num_left, "right": corpus.num_right}
    most_copies = check_values(batch, all_ids, num_items, corpus.views)

    # Under mixed precision encoders return half precision, in which a sum over thousands of
    # candidates loses its digits.
    embeddings = batch.embeddings
    precision = torch.float64 if embeddings["left"].dtype == torch.float64 else torch.float32
    vectors = {name: tensor.to(precision) for name, tensor in embeddings.items()}
    both_sides = [vectors["left"], vectors["right"]]
    all_embeddings = [distributed.gather_with_grad(side, sizes) for side in both_sides]
    # A rank without mined negatives takes part in the collectives with no rows.
    own_negatives = vectors.get("negatives", vectors["right"][:0])
    keys = None
    if "keys_left" in vectors:
        own_keys = [vectors["keys_left"], vectors["keys_right"]]
        keys = torch.stack([distributed.gather(side, sizes) for side in own_keys])
    return GatheredBatch(
        embeddings=torch.stack(both_sides),
        ids=own_ids,
        listed=(ids.get("left_positives"), ids.get("right_positives")),
        all_embeddings=torch.stack(all_embeddings),
        all_ids=all_ids,
        negatives=distributed.gather_with_grad(own_negatives, num_mined),
        negative_id=distributed.gather(own_negative_id, num_mined),
        sizes=sizes,
        most_copies=most_copies,
        keys=keys,
    )


def two_towers(batch: GatheredBatch, num_left: int, temperature: Tensor) -> Anchors:
    """Arrange left anchors against right items and right anchors against left ones (X = 2)."""
    lists = []
    for side, other in ((0, 1), (1, 0)):
        lists.append(
            known_positives(
                ids=batch.ids[side],
                partners=batch.ids[other],
                all_ids=batch.all_ids[side],
                all_partners=batch.all_ids[other],
                most_copies=batch.most_copies,
                listed=batch.listed[side],
            )
        )
    # Both directions share one tensor, so the shorter lists are padded in front.
    width = max(positives.shape[1] for positives in lists)
    padded = []
    for positives in lists:
        missing = width - positives.shape[1]
        padded.append(pad(positives, (missing, 0), value=PADDING))
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
        positive_ids=torch.stack(padded),
        temperature=temperature,
        keys=None if batch.keys is None else batch.keys.flip(0),
    )


def with_mined(batch: GatheredBatch, num_left: int, temperature: Tensor) -> list[Anchors]:
    """Arrange left anchors, with mined negatives as candidates, and right anchors (X = 1 each)."""
    both = two_towers(batch, num_left, temperature)
    left = both.of_direction(0)
    candidates = torch.cat([left.candidates, batch.negatives[None]], dim=1)
    candidate_ids = torch.cat([left.candidate_ids, batch.negative_id[None]], dim=1)
    return [left.with_candidates(candidates, candidate_ids), both.of_direction(1)]


def two_views(batch: GatheredBatch, temperature: Tensor) -> Anchors:
    """Arrange both views of each image against all views of the batch (X = 1, A = 2b, C = 2P)."""
    # Candidates are the left views of all images, then the right views: image i is in columns i and
    # P + i, and the positive of each view is the other one.
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
    """Return (A, K) ids that are not negatives of each anchor: ascending, unique, padded with -1.

    Args:
        ids: (A,) the anchors' items.
        partners: (A,) the items that they are paired with.
        all_ids: (P,) the anchor-side item of every pair of the batch.
        all_partners: (P,) the other item of every pair.
        most_copies: upper bound on the pairs that share one item; each names a positive.
        listed: (A, K) further positives, padded with -1; or None.
    """
    positives = partners[:, None]
    if most_copies > 1:
        # After sorting by item, the pairs of an item are adjacent: its `most_copies` rows from
        # `first` on hold all of them, and perhaps some of the next item.
        ordered, order = all_ids.sort(stable=True)
        first = torch.searchsorted(ordered, ids)[:, None]
        position = first + torch.arange(most_copies, device=ids.device)
        inside = position.clamp(max=len(ordered) - 1)
        has_item = ordered[inside] == ids[:, None]
        is_shared = has_item & (position < len(ordered))
        sharing = all_partners[order[inside]]
        positives = torch.where(is_shared, sharing, PADDING)
    if listed is not None:
        positives = torch.cat([positives, listed], dim=1)
    if positives.shape[1] == 1:
        return positives
    # Remove repeated ids: copies are adjacent once sorted, and padding sorts to the front.
    positives = positives.sort(dim=1).values
    is_repeated = torch.zeros_like(positives, dtype=torch.bool)
    before = positives[:, :-1]
    is_repeated[:, 1:] = positives[:, 1:] == before
    return positives.masked_fill(is_repeated, PADDING).sort(dim=1).values
