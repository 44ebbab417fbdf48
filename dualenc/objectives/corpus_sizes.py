"""The corpus as it is sampled: how many items there are on each side, and how often each counts.

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
    """The id spaces of both sides. The corpus is the multiset of the pairs' items, or every item
    once.

    Args:
        num_left, num_right: sizes of the id spaces; None if unknown.
        views: both sides are views of the same images, one id space.

    Attributes:
        counts_pairs: whether an item counts once for each pair that it is in (`set_counts`), or
            once.
    """

    pair_counts: Tensor | None

    def __init__(self, num_left: int | None, num_right: int | None, views: bool) -> None:
        super().__init__()
        self.num_left = num_left
        self.num_right = num_right
        self.views = views
        self.num_views = 2 if views else 1
        # Rows of a table with one per item: left items first, then right ones; with views one per
        # image.
        self.num_rows = (num_left or 0) + (0 if views else num_right or 0)
        self.counts_pairs = True
        self.num_pairs = 0
        # A fact about the data, set anew in every run; None where every item is in one pair.
        self.register_buffer("pair_counts", None, persistent=False)

    def num_ids(self, direction: int) -> int | None:
        """Size of the id space of a direction's candidates; None if unknown."""
        return self.num_right if direction == 0 else self.num_left

    def num_items(self, direction: int) -> int:
        """N, a direction's candidates: ids, or with views two for each; 0 if unknown."""
        return (self.num_ids(direction) or 0) * self.num_views

    def size(self, direction: int) -> int:
        """A direction's ids, each as often as it counts; 1 if unknown."""
        if self.id_counts(direction) is not None:
            return self.num_pairs or 1
        return self.num_ids(direction) or 1

    def id_counts(self, direction: int) -> Tensor | None:
        """How often each id of a direction's candidates counts; None where each counts once."""
        if self.pair_counts is None or not self.counts_pairs:
            return None
        if direction == 0 and not self.views:
            return self.pair_counts[self.num_left :]
        return self.pair_counts[: self.num_left]

    def item_counts(self, direction: int) -> Tensor | None:
        """(N,) how often each candidate counts; None where each counts once."""
        counts = self.id_counts(direction)
        if counts is None:
            return None
        return counts.repeat_interleave(self.num_views)

    def set_counts(self, left_counts: Tensor, right_counts: Tensor, device: torch.device) -> None:
        """Set how many pairs each item is in, see `Objective.set_counts`."""
        counts = {"left_counts": as_numbers("left_counts", left_counts, device)}
        sizes = {"left_counts": self.num_left, "right_counts": self.num_right}
        if not self.views:
            counts["right_counts"] = as_numbers("right_counts", right_counts, device)
        for name, values in counts.items():
            if values.shape != (sizes[name],):
                fail(name, f"has shape {tuple(values.shape)}; it must hold {sizes[name]} counts")
            if values.dtype == torch.bool:
                fail(name, "holds truth values; it must hold counts, as of torch.bincount")
            if not bool((torch.isfinite(values) & (values >= 0)).all()):
                fail(name, "holds negative or infinite counts, or NaN; they must be 0 or more")
        sums = [float(values.double().sum()) for values in counts.values()]
        if not math.isclose(sums[0], sums[-1], rel_tol=1e-6):
            problem = f"sum to {sums[0]:g} and {sums[-1]:g}; each pair counts on both sides"
            fail("left_counts and right_counts", problem)
        if not sums[0]:
            fail("left_counts and right_counts", "sum to 0; each pair counts on both sides")
        self.num_pairs = round(sums[0])
        # In the order of per-item tables.
        by_row = torch.cat([values.float() for values in counts.values()]).to(device)
        self.pair_counts = by_row if bool((by_row != 1).any()) else None

    def log_num_negatives(self, anchors: Anchors) -> Tensor:
        """(X, A) log of the number of negatives that each anchor has in the corpus, or in the batch
        if N is unknown."""
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
                positive_counts = (
                    counts[anchors.positive_ids[x].clamp(min=0)] * is_positive[x]
                )  # (A, K)
                number = (self.num_pairs - positive_counts.sum(dim=-1)) * self.num_views
            numbers.append(number)
        # An anchor without negatives has a loss of its positive alone.
        return torch.stack(numbers).clamp(min=1).to(anchors.embeddings.dtype).log()
