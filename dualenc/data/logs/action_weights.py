"""Weights of actions: what a click, a cart or a purchase is worth."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import numpy as np

from dualenc.data.logs.log_names import CHOOSING, LAST_WORDS, REJECTING, SHOWING_ONLY
from dualenc.data.readers.column_names import normalized
from dualenc.errors import DualencError, nearest

logger = logging.getLogger("dualenc.data")


class ActionWeights:
    """The weight of each action by name; names are compared in snake case.

    Actions without a weight count 1, and showings (impression, view, result_shown, …) 0. Actions
    against a document (thumbs_down, return, …) must be given a weight.

        ActionWeights({"purchase": 5}).of("Add to cart")  # 1.0

    Args:
        weights: weights >= 0 by name of the action.

    Raises:
        DualencError: a weight is negative or not a number.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = {normalized(name): weight for name, weight in (weights or {}).items()}
        for name, weight in self.weights.items():
            if isinstance(weight, str) or not np.isfinite(weight):
                raise DualencError(
                    f"weight of {name!r} is {weight!r}", fix="give a number >= 0", where="weights"
                )
            if weight < 0:
                raise DualencError(
                    f"weight of {name!r} is {weight:g}: a document cannot be pushed away by name",
                    fix=f"give {name}=0, which counts it as shown and not chosen",
                    where="weights",
                )

    def of(self, action: object, where: object = "") -> float:
        """Return the weight of an action; 0 for a missing one."""
        name = normalized(str("" if action is None else action))
        if name in self.weights:
            return float(self.weights[name])
        if name in REJECTING:
            raise DualencError(
                f"action {name!r} speaks against a document, so it cannot count as a click",
                fix=f"give it a weight (--weights {name}=0 counts it as shown and not chosen)",
                where=where,
            )
        return 0.0 if not name or is_showing_only(name) else 1.0

    def check_used(self, actions: Collection[str]) -> None:
        """Report weights of actions that do not occur; there may be no purchase on some day."""
        known = {normalized(name) for name in actions}
        for name in self.weights:
            if name not in known:
                shown = ", ".join(sorted(known)[:8]) or "none"
                logger.warning(
                    "weights: no action is called %r%s; there are: %s",
                    name,
                    nearest(name, known),
                    shown,
                )


def is_showing_only(action: object) -> bool:
    """Return True for actions that say that a document was shown, and no more."""
    return known_action(action) in SHOWING_ONLY


def known_action(action: object) -> str | None:
    """Return the common name of an action, which may be the last word of its name, or None."""
    name = normalized(str("" if action is None else action))
    if name in CHOOSING | SHOWING_ONLY | REJECTING:
        return name
    last = name.rpartition("_")[2]
    return last if last in LAST_WORDS else None
