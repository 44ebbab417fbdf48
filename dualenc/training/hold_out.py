"""Held-out pairs: a part of the training data that is kept for evaluation."""

from __future__ import annotations

from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.errors import DualencError
from dualenc.training.evaluators import Evaluator, ImageTextEvaluator, RetrievalEvaluator

MAX_HELD_OUT = 1000
"""More pairs would make evaluation slow and not much more precise."""
MIN_PAIRS = 100
"""Of fewer pairs none are held out by default: too few would be left for training and for a meaningful number."""
DEFAULT_SHARE = 0.1


def default_share(pairs: PairDataset) -> float:
    """The share of the pairs that a recipe without an evaluator holds out."""
    takes_part = not pairs.views and not isinstance(pairs, Mixture) and len(pairs) >= MIN_PAIRS
    return DEFAULT_SHARE if takes_part else 0.0


def hold_out(pairs: PairDataset, share: float, seed: int) -> tuple[PairDataset, Evaluator]:
    """Split training pairs, and make the evaluator of the part that is held out.

    Args:
        pairs: M pairs.
        share: of the pairs, at most 1,000; all pairs of a left item are in one part.
        seed: of the choice.

    Returns:
        The other pairs, with the same items and ids, and the evaluator.

    Raises:
        DualencError: the pairs are views of images or a mixture, or a part would be empty.
    """
    if pairs.views or isinstance(pairs, Mixture):
        kind = "views of images" if pairs.views else "a mixture of sources"
        raise DualencError(f"held_out does not apply to {kind}; name an evaluator instead")
    rest, held_out = pairs.split(min(share, MAX_HELD_OUT / len(pairs)), seed)
    if pairs.left_modality == "image" and pairs.right_modality == "text":
        return rest, ImageTextEvaluator(held_out)
    return rest, RetrievalEvaluator(pairs=held_out)
