"""Losses of other libraries, and your own, as objectives: classes named by their import path.

    PYTHONPATH=. python eval/small_batch.py run vectors PAPERS --objectives
    '["InfoNCE","my_package.MyLoss"]'

A class is a `dualenc.objectives.Objective`, or a plain loss that returns a scalar for a batch's
embeddings (B, D) of both sides: `loss(left, right)`, or with ids (B,) `loss(left, right, left_id,
right_id)`, by these names. Its constructor gets those of `temperature`, `num_left`, `num_right`,
`views` and `seed` that it names. A method `set_progress(fraction)` is called before each batch with
the share of the training that is done.

Adapters: `outside.LibAUCPairs` (`pip install libauc`), and `outside.FastCLIP` for
https://github.com/Optimization-AI/fast_clip (the package `fastclip` on PyPI is another program).
They scale losses so that the gradient of an anchor's first visit is that of `SogCLR`, and clipping
treats all alike.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualenc.errors import DualencError, explain
from dualenc.objectives import Objective
from dualenc.objectives.anchors import Anchors


def import_objective(path: str) -> Callable[..., Objective]:
    """Return the class at an import path, or a constructor of a `PlainLoss` of it."""
    fix, where = "install its package, or put its folder into PYTHONPATH", f"objective {path}"
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise DualencError(str(error), fix=fix, where=where) from error
    if not inspect.isclass(found):
        fix = "name an Objective, or a class of a loss"
        raise DualencError("not a class", fix=fix, where=where)
    return found if issubclass(found, Objective) else partial(PlainLoss, found)


def report_progress(objective: Objective, num_batches: int) -> None:
    """Call `objective.set_progress`, if it has that, before each batch of a training."""
    num_seen = 0

    def before_batch(*_: Any) -> None:
        nonlocal num_seen
        if objective.training and torch.is_grad_enabled():
            objective.set_progress(num_seen / num_batches)
            num_seen += 1

    if hasattr(objective, "set_progress"):
        objective.register_forward_pre_hook(before_batch)


class PlainLoss(Objective):
    """A scalar loss of a batch as an objective, on one process; no estimate of L(θ)."""

    takes_mined = False
    reports_loss = False

    def __init__(self, loss_class: type, **common: Any) -> None:
        super().__init__(**common)
        accepted = common.keys() & inspect.signature(loss_class).parameters.keys()
        self.loss = loss_class(**{name: common[name] for name in accepted})
        call = self.loss.forward if isinstance(self.loss, nn.Module) else self.loss
        self.takes = {"left_id", "right_id"} & inspect.signature(call).parameters.keys()
        if hasattr(self.loss, "set_progress"):
            self.set_progress = self.loss.set_progress

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        if self.views:
            left, right = anchors.embeddings[0].chunk(2)
            left_id, right_id = anchors.candidate_ids[0].chunk(2)
        else:
            left, right = anchors.embeddings
            right_id, left_id = anchors.candidate_ids  # candidates are of the other side
        ids = {"left_id": left_id, "right_id": right_id}
        loss = self.loss(left, right, **{name: ids[name] for name in self.takes})
        if not isinstance(loss, Tensor) or loss.dim():
            shape = getattr(loss, "shape", type(loss).__name__)
            fix = "return a scalar tensor"
            raise DualencError(f"returns {shape}", fix=fix, where=type(self.loss).__name__)
        return loss.expand(anchors.rows.shape)


class LibAUCPairs(nn.Module):
    """SogCLR of two towers by LibAUC: averages of exp((s − s⁺)/τ), of both sides by the left id."""

    def __init__(self, temperature: float, num_left: int) -> None:
        super().__init__()
        with explain("LibAUC's losses", "pip install libauc"):
            from libauc.losses.contrastive import GCLoss_v2

        # γ is that of `SogCLR` in the same tables.
        self.loss = GCLoss_v2(N=num_left, tau=temperature, gamma=0.5)

    def forward(self, left: Tensor, right: Tensor, left_id: Tensor) -> Tensor:
        loss, _ = self.loss(left, right, left_id.cpu())
        # Theirs grows with the number of negatives, and is of τ·L.
        return loss / (self.loss.tau * max(len(left) - 1, 1))


class FastCLIP(nn.Module):
    """FastCLIP-v1 (Wei et al. 2024, arXiv:2407.01445): the global loss at a constant τ.

    γ falls as a cosine to 0.2 in the first half of the training.
    """

    def __init__(self, temperature: float, num_left: int, num_right: int) -> None:
        super().__init__()
        with explain("FastCLIP's loss", "clone its repository, and put src into PYTHONPATH"):
            from fast_clip.loss import FastCLIPLoss

        self.temperature = temperature
        self.loss = FastCLIPLoss(
            data_size=max(num_left, num_right),
            gamma=0.2,
            gamma_schedule="cosine",
            gamma_decay_epochs=1,
            multiply_tau=False,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        )

    def set_progress(self, fraction: float) -> None:
        self.loss.adjust_hyperparams(2 * fraction)

    def forward(self, left: Tensor, right: Tensor, left_id: Tensor, right_id: Tensor) -> Tensor:
        features, ids = (left, right), (left_id.cpu(), right_id.cpu())
        scale = torch.as_tensor(1 / self.temperature).to(left)
        local = self.loss.local(features, ids, features, scale, 0)
        losses, (left_scores, right_scores), averages = local[:2], local[2:4], local[4]
        self.loss.set_params(*ids, *averages)
        # What other processes compute is this one's own.
        scores = right_scores.T, left_scores.T
        both = self.loss(features, features, averages, losses, averages, scores, scale, 0)
        return both / 2
