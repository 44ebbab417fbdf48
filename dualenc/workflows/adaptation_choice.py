"""Choose how an adaptation weighs documents, and its share of the original weights, by folds.

Shapes: A values of α, S shares, Q held-out queries of all folds. The shares are those of the
original weights; where training begins at a previous run's model, which is the original then, those
of the base model, that of the index, come first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dualenc.types import Integers, Vectors
from dualenc.workflows.adapting import BASE, ORIGINAL, Interpolated

NEW = "new documents"
KNOWN = "documents in training"
MIN_DOCUMENTS = 30
"""Fewer documents of held-out queries cannot show whether adapting harms unclicked documents."""
DEFAULT_ALPHA, DEFAULT_SHARE = 0.1, 0.5
"""What is taken where too little is held out to choose."""
MANY_DOCUMENTS = 100
"""Fewer documents of held-out queries do not allow to go further than halfway."""
SLACK = 0.003
"""How far the mean score of new documents may be below the original's, less a standard error."""


class Trial(NamedTuple):
    """A training of a fold.

    Attributes:
        alpha: clicks that are added to those of every document; inf weighs all alike.
        steps: number of steps of the training, or of its best weights.
        points: scores of the fold's held-out queries, by task, at each share.
    """

    alpha: float
    steps: int
    points: Sequence[Interpolated]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out queries of all folds, and their scores by every choice.

        held_out = HeldOut.of_folds([trials_of_fold_0, trials_of_fold_1], documents)
        choice = choose(held_out)

    Attributes:
        alphas: (A,) values of α.
        shares: (S,) shares of the weights of a model, ascending for each; the last is 1.
        of: (S,) names of these models, `BASE` before `ORIGINAL`.
        steps: (A,) mean number of steps of the folds.
        is_new: (Q,) True for queries whose documents were in no training pair of their fold.
        document: (Q,) row of each query's first document.
        part: (Q,) fold of each query; of a single fold, one of two halves by document.
        scores: (A, S, Q) score of each query.
    """

    alphas: Vectors
    shares: Vectors
    of: Sequence[str]
    steps: Vectors
    is_new: np.ndarray
    document: Integers
    part: Integers
    scores: np.ndarray

    @classmethod
    def of_folds(
        cls, folds: Sequence[Sequence[Trial]], documents: Sequence[Mapping[str, Integers]]
    ) -> HeldOut:
        """Pool the queries of folds.

        Args:
            folds: trials of each fold, with the same values of α and shares in the same order.
            documents: row of the first document of each query, by fold and task.
        """
        scores, is_new, document, part = [], [], [], []
        for number, (trials, rows) in enumerate(zip(folds, documents, strict=True)):
            for task, own in rows.items():
                by_alpha = [[point.scores[task] for point in trial.points] for trial in trials]
                scores.append(np.array(by_alpha))
                is_new.append(np.full(len(own), task == NEW))
                document.append(own)
                part.append(np.full(len(own), number))
        first = folds[0]
        pooled = np.concatenate(document)
        parts = np.concatenate(part)
        if len(np.unique(parts)) == 1:
            # Whole documents: queries of one document are alike.
            parts = np.unique(pooled, return_inverse=True)[1] % 2
        return cls(
            np.array([trial.alpha for trial in first]),
            np.array([point.keep for point in first[0].points]),
            [point.of for point in first[0].points],
            np.array([[trial.steps for trial in trials] for trials in folds]).mean(axis=0),
            np.concatenate(is_new),
            pooled,
            parts,
            np.concatenate(scores, axis=2),
        )

    @property
    def base(self) -> int:
        """Number of the candidate that is the base model; without one, the original."""
        return int(np.flatnonzero(self.shares == 1)[0])

    @property
    def num_new_documents(self) -> int:
        """Number of first documents of the queries of new documents."""
        return len(np.unique(self.document[self.is_new]))

    def tasks(self) -> dict[str, np.ndarray]:
        """Return (Q,) masks of the queries of each task that has any."""
        masks = {NEW: self.is_new, KNOWN: ~self.is_new}
        return {task: mask for task, mask in masks.items() if mask.any()}

    def unmeasured(self) -> str | None:
        """Return why new documents cannot be measured; None if they can."""
        count = self.num_new_documents
        if count >= MIN_DOCUMENTS:
            return None
        few = f"fewer than {MIN_DOCUMENTS} cannot tell"
        return f"held-out queries of new documents name {count} documents, and {few}"


class Compared(NamedTuple):
    """Scores (Q,) of a task's queries before and after, and the group (Q,) of each query.

    `base` has the scores of the base model, if it is another than the one before.
    """

    before: Vectors
    after: Vectors
    groups: Integers
    base: Vectors | None = None


def pool(compared: Mapping[str, Compared]) -> Compared:
    """Return the scores of the queries of all tasks, of which there is at least one."""
    fields = zip(*(each[:3] for each in compared.values()), strict=True)
    return Compared(*map(np.concatenate, fields))


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen for the final training, and how good such choices are.

        choice = choose(held_out)
        print(choice.alpha, choice.keep, choice.steps)

    Attributes:
        alpha: clicks that are added to those of every document; inf weighs all alike.
        keep: share of the original weights, from 0 to 1; or of the base weights, see `of`.
        steps: number of steps of the final training; None for the maximum.
        compared: held-out scores by task. Those of each fold are at the choice that the other
            folds make, so that they are not the numbers that chose.
        curves: mean held-out scores by task at each share, at the chosen α.
        reason: how the share was chosen.
        unmeasured: why held-out queries cannot show the effect on new documents; None if they can.
        of: model whose share is kept, `ORIGINAL` or `BASE`.
    """

    alpha: float
    keep: float
    steps: int | None
    compared: Mapping[str, Compared]
    curves: Sequence[Interpolated]
    reason: str
    unmeasured: str | None
    of: str = ORIGINAL

    @property
    def is_original(self) -> bool:
        """True if the model stays as it is before the training."""
        return self.keep == 1 and self.of == ORIGINAL


def choose(held_out: HeldOut, keep: float | None = None) -> Choice:
    """Choose α and the share of the original weights by the held-out queries of all folds.

    The choice has the best mean score over all queries among those that are harmless to new
    documents: the mean difference of their scores from the original's is a standard error above
    −0.003, and that from the base model's is above −0.003 itself. Standard errors are over
    documents. Where the queries of new documents name fewer than 100 documents, which underestimate
    the harm of what fits them by chance, at least half of the weights is kept. Each fold is also
    scored at the choice that the other folds make: these scores are of queries that had no part in
    the choice.

    Where the queries of new documents name fewer than 30 documents, halfway to the original with
    α = 0.1 is taken if it does not lower the mean score of seen documents, or else the original.

    Args:
        held_out: scores of all choices.
        keep: share of the original that is given; then only α is chosen.
    """
    everyone = np.ones(len(held_out.document), dtype=bool)
    is_measured = held_out.unmeasured() is None
    alpha, share = _pick(held_out, everyone, is_measured, keep)
    after = np.zeros(len(held_out.document))
    for part in np.unique(held_out.part):
        own = held_out.part == part
        chosen = _pick(held_out, ~own, is_measured, keep)
        after[own] = held_out.scores[chosen][own]
    before, base = held_out.scores[0, -1], held_out.scores[0, held_out.base]
    tasks = held_out.tasks()
    compared = {
        task: Compared(
            before[mask],
            after[mask],
            held_out.document[mask],
            base[mask] if BASE in held_out.of else None,
        )
        for task, mask in tasks.items()
    }
    curves = [
        Interpolated(float(own), {task: scores[mask] for task, mask in tasks.items()}, of)
        for own, of, scores in zip(
            held_out.shares, held_out.of, held_out.scores[alpha], strict=True
        )
    ]
    chosen_share = float(held_out.shares[share])
    return Choice(
        float(held_out.alphas[alpha]),
        chosen_share,
        max(1, round(float(held_out.steps[alpha]))),
        compared,
        curves,
        _reason(keep, chosen_share, is_measured),
        held_out.unmeasured(),
        held_out.of[share],
    )


def unmeasured_choice(keep: float | None, reason: str) -> Choice:
    """Return the choice without any held-out query: the original, unless a share is given.

    Args:
        keep: share that is given; None takes the original.
        reason: why no query was held out.
    """
    how = f"default: the original, since {reason}" if keep is None else "--keep"
    share = 1.0 if keep is None else keep
    return Choice(DEFAULT_ALPHA, share, None, {}, [], how, reason)


def _pick(
    held_out: HeldOut, rows: np.ndarray, is_measured: bool, keep: float | None
) -> tuple[int, int]:
    """Return the numbers of α and of the share that the queries in `rows` (Q,) choose."""
    scores = held_out.scores[:, :, rows]
    gains = scores - scores[:1, -1:]  # (A, S, q) over the original
    is_new = held_out.is_new[rows]
    original = len(held_out.shares) - 1
    default = int(np.argmin(np.abs(np.log(held_out.alphas / DEFAULT_ALPHA))))
    if keep is not None:
        share = int(np.flatnonzero(held_out.shares == keep)[-1])
        if not rows.any():
            return default, share
        return int(np.argmax(_means(gains[:, share]))), share
    if not is_measured:
        halfway = int(np.flatnonzero(held_out.shares == DEFAULT_SHARE)[-1])
        # Seen documents, or all that was measured.
        own = gains[default, halfway, ~is_new if (~is_new).any() else is_new]
        return default, halfway if len(own) and own.mean() >= 0 else original
    if not is_new.any():
        return default, original
    # Most documents of an index are in no click, so new documents come first.
    of_new = gains[:, :, is_new]
    is_allowed = _are_harmless(of_new, held_out.document[rows][is_new])
    is_allowed &= _means(of_new - of_new[:1, held_out.base, None]) >= -SLACK
    if held_out.num_new_documents < MANY_DOCUMENTS:
        is_allowed &= held_out.shares >= DEFAULT_SHARE
    means = np.where(is_allowed, _means(gains), -math.inf)
    # The last of equals: the largest share.
    flat = np.flatnonzero(means.T.ravel() == means.max())[-1]
    share, alpha = divmod(int(flat), len(held_out.alphas))
    return alpha, share


def _are_harmless(gains: np.ndarray, groups: Integers) -> np.ndarray:
    """Return (A, S) whether gains (A, S, Q) of queries in groups (Q,) are hardly below 0."""
    return _means(gains) - _standard_errors(gains, groups) >= -SLACK


def _means(values: np.ndarray) -> np.ndarray:
    """Return means over the last axis, rounded: differences by summation order decide nothing."""
    return values.mean(axis=-1).round(6)


def _standard_errors(values: np.ndarray, groups: Integers) -> np.ndarray:
    """Return the standard error of the mean over the last axis (Q,), for queries in groups (Q,).

    Queries of a group may be alike in any way (Liang and Zeger 1986, Biometrika 73(1)).
    """
    number = np.unique(groups, return_inverse=True)[1]
    indicators = np.eye(number.max() + 1)[number]  # (Q, groups)
    sums = (values - values.mean(axis=-1, keepdims=True)) @ indicators
    errors: np.ndarray = np.sqrt(np.square(sums).sum(axis=-1)) / values.shape[-1]
    return errors


def _reason(keep: float | None, share: float, is_measured: bool) -> str:
    """Return how the share was chosen."""
    if keep is not None:
        return "--keep"
    if is_measured:
        return "held-out queries; the numbers of each fold are at the choice of the others"
    if share == 1:
        return "default: the original, since halfway lowers the mean of documents in training"
    return "default: halfway, which does not lower the mean of documents in training"
