"""Corpus sizes per side and the multiplicity of each item.

Shapes: X directions, A anchors of this rank, K known positives, N candidates of a direction, as in
`anchors`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.checks import as_numbers, fail


class SampledCorpus(nn.Module):
    """The id spaces of both sides, and how often each item counts as a negative.

    The corpus is the multiset of the pairs' items, or each item once (`counts_pairs`).

        corpus = SampledCorpus(num_left=100, num_right=1000, views=False)
        corpus.num_items(0)  # 1000 candidates of left anchors

    Args:
        num_left: size of the left id space; None if unknown.
        num_right: size of the right id space; None if unknown.
        views: True if both sides are views of the same images, with one id space.

    Attributes:
        counts_pairs: True if an item counts once per pair it occurs in (`set_counts`).
    """

    pair_counts: Tensor | None  # left items, then right items

    def __init__(self, num_left: int | None, num_right: int | None, views: bool) -> None:
        super().__init__()
        self.num_left = num_left
        self.num_right = num_right
        self.views = views
        self.num_views = 2 if views else 1
        # Rows of a per-item table: left items, then right items; with views one row per image.
        self.num_rows = (num_left or 0) + (0 if views else num_right or 0)
        self.counts_pairs = True
        self.num_pairs = 0
        # Not persistent: it describes the data, and is set in every run. None: one pair per item.
        self.register_buffer("pair_counts", None, persistent=False)

    def num_ids(self, direction: int) -> int | None:
        """Return the size of the id space of a direction's candidates; None if unknown."""
        return self.num_right if direction == 0 else self.num_left

    def num_items(self, direction: int) -> int:
        """Return N, a direction's number of candidates: ids, or two views per id; 0 if unknown."""
        return (self.num_ids(direction) or 0) * self.num_views

    def size(self, direction: int) -> int:
        """Return the number of a direction's ids with multiplicity; 1 if unknown."""
        if self.id_counts(direction) is not None:
            return self.num_pairs or 1
        return self.num_ids(direction) or 1

    def id_counts(self, direction: int) -> Tensor | None:
        """Return how often each id of a direction's candidates counts; None if each counts once."""
        if self.pair_counts is None or not self.counts_pairs:
            return None
        if direction == 0 and not self.views:
            return self.pair_counts[self.num_left :]
        return self.pair_counts[: self.num_left]

    def item_counts(self, direction: int) -> Tensor | None:
        """Return (N,) how often each candidate counts; None if each counts once."""
        counts = self.id_counts(direction)
        if counts is None:
            return None
        return counts.repeat_interleave(self.num_views)

    def set_counts(self, left_counts: Tensor, right_counts: Tensor, device: torch.device) -> None:
        """Set the number of pairs each item occurs in, see `Objective.set_counts`."""
        counts = {"left_counts": as_numbers("left_counts", left_counts, device)}
        sizes = {"left_counts": self.num_left, "right_counts": self.num_right}
        if not self.views:
            counts["right_counts"] = as_numbers("right_counts", right_counts, device)
        for name, values in counts.items():
            if values.shape != (sizes[name],):
                fix = f"it must hold {sizes[name]} counts"
                fail(name, f"has shape {tuple(values.shape)}", fix)
            if values.dtype == torch.bool:
                fail(name, "holds booleans", "it must hold counts, as from torch.bincount")
            if not bool((torch.isfinite(values) & (values >= 0)).all()):
                fail(name, "holds negative or infinite counts, or NaN", "they must be 0 or more")
        sums = [float(values.double().sum()) for values in counts.values()]
        left_sum = sums[0]
        right_sum = sums[-1]  # with views the same
        both = "left_counts and right_counts"
        fix = "each pair counts on both sides"
        if not math.isclose(left_sum, right_sum, rel_tol=1e-6):
            fail(both, f"sum to {left_sum:g} and {right_sum:g}", fix)
        if not left_sum:
            fail(both, "sum to 0", fix)
        self.num_pairs = round(left_sum)
        # In the row order of per-item tables.
        by_row = torch.cat([values.float() for values in counts.values()]).to(device)
        self.pair_counts = by_row if bool((by_row != 1).any()) else None

    def log_num_negatives(self, anchors: Anchors) -> Tensor:
        """Return (X, A) log of the number of negatives of each anchor in the corpus.

        If N is unknown, the negatives in the batch are counted.
        """
        is_positive = anchors.positive_ids != PADDING  # (X, A, K)
        numbers = []
        for x, direction in enumerate(anchors.directions):
            num_ids = self.num_ids(direction)
            counts = self.id_counts(direction)
            if num_ids is None:
                number = anchors.in_blocks(lambda block: block.num_negatives)[x]
            elif counts is None:
                number = (num_ids - is_positive[x].sum(dim=-1)) * self.num_views
            else:
                # Padding reads the count of id 0, which the mask removes.
                ids = anchors.positive_ids[x].clamp(min=0)  # (A, K)
                positive_counts = counts[ids] * is_positive[x]
                number = (self.num_pairs - positive_counts.sum(dim=-1)) * self.num_views
            numbers.append(number)
        # Clamped: an anchor without negatives must not make log(0) = -inf.
        return torch.stack(numbers).clamp(min=1).to(anchors.embeddings.dtype).log()
