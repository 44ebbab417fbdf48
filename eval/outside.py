"""Your own losses, or those of other libraries, as objectives: classes by their import path.

    PYTHONPATH=. python eval/small_batch.py run vectors PAPERS --objectives
    '["InfoNCE","my_package.MyLoss"]'

A class is a `dualenc.objectives.Objective`, or a plain loss that returns a scalar for a batch's
embeddings (B, D) of both sides: `loss(left, right)`, or with ids (B,) `loss(left, right, left_id,
right_id)`, by these names. Its constructor gets those of `temperature`, `num_left`, `num_right`,
`views` and `seed` that it names.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from dualenc.errors import DualencError
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
