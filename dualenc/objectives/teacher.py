"""Learning from a teacher's scores of a query's positive and mined negatives: distillation into a dual encoder.

The student's scores are s/τ, the teacher's t (divided by a temperature of its own); k runs over the pair's negatives.

    margin_mse   mean over pairs and k of ((s⁺ − s_k)/τ − (t⁺ − t_k))²
    kl           mean over pairs of Σ_c p_c (log p_c − log q_c), with p = softmax(t) and q = softmax(s/τ) over c, the
                 positive and the pair's negatives

Sources: Hofstätter et al. 2020, arXiv 2010.02666 (Margin-MSE, there of products without a temperature); Ren et al.
2021, arXiv 2110.07367 (RocketQAv2: KL of distributions over a list).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualenc import distributed


def teacher_loss(
    kind: str,
    left: Tensor,
    right: Tensor,
    negatives: Tensor,
    rows: Tensor,
    scores: Tensor,
    temperature: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """The scalar whose mean over ranks is the loss of the global batch; 0 where the teacher has said nothing.

    Args:
        kind: "margin_mse" or "kl".
        left, right: (b, D) embeddings of this rank's pairs, with gradient.
        negatives: (n, D) of its mined negatives, with gradient.
        rows: (b, K) which of them belong to each pair, padded with -1.
        scores: (b, 1 + K) the teacher's, of the positive and of these; NaN where it has none. Without that of its
            positive a pair does not count.
        temperature: τ of the student.
        weights: (b,) of the pairs.
    """
    positive = (left * right).sum(dim=1, keepdim=True)
    own = positive[:, :0]
    if rows.shape[1] and len(negatives):
        own = torch.einsum("bd,bkd->bk", left, negatives[rows.clamp(min=0)])
    rows, scores = rows[:, : own.shape[1]], scores[:, : 1 + own.shape[1]]
    student = torch.cat([positive, own], dim=1) / temperature
    there = torch.isfinite(scores)
    there = there & there[:, :1]
    there[:, 1:] &= rows >= 0
    scores = scores.masked_fill(~there, 0.0)
    if kind == "margin_mse":
        errors = ((student[:, :1] - student[:, 1:]) - (scores[:, :1] - scores[:, 1:])).square()
        counted = there[:, 1:]
        each = errors.masked_fill(~counted, 0.0).sum(dim=1)
        count = counted.sum()
    else:
        use = there.sum(dim=1) > 1
        # A row that does not count is all zeros, so that its gradient is 0 and not NaN.
        hidden = ~there & use[:, None]
        target = scores.masked_fill(hidden, -torch.inf).log_softmax(dim=1)
        found = student.masked_fill(hidden, -torch.inf).log_softmax(dim=1)
        terms = target.exp() * (target.masked_fill(hidden, 0.0) - found.masked_fill(hidden, 0.0))
        each = terms.sum(dim=1).masked_fill(~use, 0.0)
        count = use.sum()
    if weights is not None:
        each = each * weights
    total = distributed.all_reduce(count.to(each.dtype))
    return each.sum() * distributed.world_size() / total.clamp(min=1)
