"""Distillation: a dual encoder also learns from a teacher's scores of each query's positive and mined negatives.

With s/τ the student's scores, t the teacher's divided by its temperature, and k over the pair's negatives:

    margin_mse   mean over pairs and k of ((s⁺ − s_k)/τ − (t⁺ − t_k))²
    kl           mean over pairs of Σ_c p_c (log p_c − log q_c), with p = softmax(t) and q = softmax(s/τ) over c, the
                 positive and the pair's negatives

Sources: Hofstätter et al. 2020, arXiv:2010.02666 (Margin-MSE, there of products without a temperature); Ren et al.
2021, arXiv:2110.07367 (RocketQAv2: KL of distributions over a list).

Shapes: b pairs of this rank, K negatives of each, n mined negatives of this rank, D dimension.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.objectives.checks import (
    check_choice,
    check_range,
    check_tensors,
    fail,
    names_class,
    read_extremes,
)
from dualenc.objectives.items import Encode
from dualenc.objectives.matryoshka import Wrapper


class Distilled(Wrapper):
    """own_weight times an objective's loss, plus `weight` times what a teacher's scores teach.

        Distilled(InfoNCE(temperature=0.02), "kl", teacher_temperature=0.02)

    Args:
        objective: not with views, which have no mined negatives.
        kind: "margin_mse" or "kl", see above.
        weight: factor of the teacher's loss.
        teacher_temperature: the teacher's scores are divided by it: 1 for the logits of a cross-encoder, for a teacher
            of cosines its own temperature.
        own_weight: factor of the objective's loss; 0 leaves the teacher alone.
    """

    needs_teacher = True

    def __init__(
        self,
        objective: Objective,
        kind: Literal["margin_mse", "kl"] = "kl",
        weight: float = 1.0,
        teacher_temperature: float = 1.0,
        own_weight: float = 1.0,
    ) -> None:
        if objective.views:
            fail("objective", "has views=True; a teacher scores pairs with mined negatives")
        check_choice("kind", kind, ("margin_mse", "kl"))
        check_range("weight", weight, "[0, inf)")
        check_range("own_weight", own_weight, "[0, inf)")
        check_range("teacher_temperature", teacher_temperature, "(0, inf)")
        super().__init__([objective])
        self.kind = kind
        self.weight = weight
        self.teacher_temperature = teacher_temperature
        self.own_weight = own_weight

    @names_class
    def forward(
        self,
        left: Tensor,
        right: Tensor,
        left_id: Tensor,
        right_id: Tensor | None = None,
        encode: Encode | None = None,
        *,
        teacher_scores: Tensor | None = None,
        teacher_rows: Tensor | None = None,
        negatives: Tensor | None = None,
        weights: Tensor | None = None,
        **batch: Any,
    ) -> ObjectiveOutput:
        """The loss of this rank's part of a batch; further arguments are those of the wrapped objective.

        Args:
            teacher_scores: (b, 1 + K) the teacher's scores of each pair's positive and of K of this rank's `negatives`;
                NaN where it has none. Without a score of its positive a pair teaches nothing.
            teacher_rows: (b, K) which rows of `negatives` these are, padded with -1.
        """
        output = self.main(
            left, right, left_id, right_id, encode, negatives=negatives, weights=weights, **batch
        )
        if teacher_scores is None or teacher_rows is None:
            fail("teacher_scores", "and teacher_rows are missing; pass what the teacher says of the pairs")
        check_tensors({"teacher_scores": teacher_scores, "teacher_rows": teacher_rows})
        num_negatives = 0 if negatives is None else len(negatives)
        check_teacher(len(left), num_negatives, teacher_scores, teacher_rows)
        precision = output.loss.dtype
        with torch.autocast(left.device.type, enabled=False):
            left = left.to(precision)
            right = right.to(precision)
            own = (left * right).sum(dim=1, keepdim=True)  # (b, 1), then (b, 1 + K)
            if teacher_rows.shape[1] and negatives is not None and num_negatives:
                of_pairs = negatives.to(precision)[teacher_rows.clamp(min=0)]  # (b, K, D)
                own = torch.cat([own, torch.einsum("bd,bkd->bk", left, of_pairs)], dim=1)
            scores = teacher_scores.to(own)[:, : own.shape[1]] / self.teacher_temperature
            is_scored = scores.isfinite() & scores[:, :1].isfinite()
            is_scored[:, 1:] &= teacher_rows[:, : own.shape[1] - 1] >= 0
            student = own / self.temperature.to(own)
            loss_of = margin_mse if self.kind == "margin_mse" else kl_divergence
            per_pair, count = loss_of(student, scores.masked_fill(~is_scored, 0.0), is_scored)
            if weights is not None:
                per_pair = per_pair * weights.to(per_pair)
            # So that the mean over ranks is the loss of the global batch.
            total = distributed.all_reduce(count.to(per_pair)).clamp(min=1)
            taught = per_pair.sum() * distributed.world_size() / total
        return output._replace(loss=self.own_weight * output.loss + self.weight * taught)


def check_teacher(num_pairs: int, num_negatives: int, scores: Tensor, rows: Tensor) -> None:
    """Refuse scores (b, 1 + K) and rows (b, K) of negatives that do not fit the batch."""
    if rows.dim() != 2 or len(rows) != num_pairs or scores.shape != (num_pairs, 1 + rows.shape[-1]):
        shapes = f"{tuple(scores.shape)}, teacher_rows {tuple(rows.shape)}"
        fail("teacher_scores", f"has shape {shapes}; they must be ({num_pairs}, 1 + K) and (…, K)")
    for low, high in read_extremes({"rows": rows}).values():
        if low < -1 or high >= num_negatives:
            expected = f"they must be rows of the {num_negatives} negatives, or -1 (padding)"
            fail("teacher_rows", f"holds rows in [{low:.0f}, {high:.0f}]; {expected}")


def margin_mse(student: Tensor, teacher: Tensor, is_scored: Tensor) -> tuple[Tensor, Tensor]:
    """(b,) squared errors of the margins, summed over negatives, and how many margins count; by scores (b, 1 + K), the
    positive's first, and where the teacher has one."""
    margins = student[:, :1] - student[:, 1:]
    targets = teacher[:, :1] - teacher[:, 1:]
    errors = (margins - targets).square().masked_fill(~is_scored[:, 1:], 0.0)
    return errors.sum(dim=1), is_scored[:, 1:].sum()


def kl_divergence(student: Tensor, teacher: Tensor, is_scored: Tensor) -> tuple[Tensor, Tensor]:
    """(b,) KL divergence of the student's softmax from the teacher's; and how many pairs count. Arguments:
    `margin_mse`."""
    counts = is_scored.sum(dim=1) > 1
    # A pair that does not count keeps all its scores, so that its gradient is 0 and not NaN.
    hidden = ~is_scored & counts[:, None]
    target = teacher.masked_fill(hidden, -torch.inf).log_softmax(dim=1)
    own = student.masked_fill(hidden, -torch.inf).log_softmax(dim=1)
    terms = target.exp() * (target.masked_fill(hidden, 0.0) - own.masked_fill(hidden, 0.0))
    return terms.sum(dim=1).masked_fill(~counts, 0.0), counts.sum()
