"""Training pairs of a click log: each clicked document of a query, weighted by its relevance."""

from __future__ import annotations

import numpy as np

from dualenc.data.item_lists import Picked, VectorItems
from dualenc.data.logs.click_counts import distinct_pairs
from dualenc.data.logs.click_log import ClickLog
from dualenc.data.logs.click_model import ClickModel
from dualenc.data.pairs import PairDataset
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import Integers

LEAST_RELEVANCE = 0.5
"""Probability of relevance above which a clicked pair is a training pair."""


def pairs_of(log: ClickLog, documents: Embeddings, model: ClickModel | None) -> PairDataset:
    """Return the weighted training pairs of a log.

    Only pairs with an action are training pairs. Left items are the queries of these pairs, in the
    order of the log; right items are the vectors of all N documents, in index order. The weights:

    - grades that are relevance (judgements, scores of a teacher): as they are, the largest of a
      pair that is graded several times;
    - with a click model: 1 for pairs that are more likely relevant than not, others are left out;
      times the mean reward of the pair's clicked showings where rewards differ. In simulated logs
      (`eval/results/click_logs.md`) that is better than the probability as weight, and quicker;
    - without one, or with one that is `unidentified`: the number of sessions with an action, each
      with its largest reward, divided by the mean over the pairs.

        pairs_of(log, documents, fit_click_model(log.query, log.document, log.position,
                                                 log.reward > 0)).weights

    Args:
        log: n showings.
        documents: N vectors with ids, in the order of the log's document numbers.
        model: click model of this log, or None to count clicks.

    Raises:
        DualencError: no pair counts as relevant, or the model is of another log.
    """
    pairs, row = distinct_pairs(log.query, log.document)
    clicked = log.reward > 0
    if log.grades_are_relevance:
        weights = np.zeros(len(pairs))
        np.maximum.at(weights, row, log.reward)
    elif model is None or model.unidentified is not None:
        weights = _rewards_by_session(row, log.session, log.reward, len(pairs))
        if clicked.any():
            weights /= weights[weights > 0].mean()
    else:
        rewards = _mean_rewards(row[clicked], log.reward[clicked], pairs)
        weights = np.where(_relevance(model, pairs) > LEAST_RELEVANCE, rewards, 0)
    used = np.flatnonzero(weights > 0)
    if not len(used):
        reason = "no document has a click"
        if clicked.any():
            reason = "no clicked document is more likely relevant than not"
        if model is not None:
            reason = model.position_alone or reason
        raise DualencError(
            f"no pair of the log counts as relevant: {reason}",
            fix="give more showings, judgements, or propensities that are known",
        )
    queries, left_id = np.unique(pairs[used, 0], return_inverse=True)
    return PairDataset(
        Picked(log.queries.items, queries),
        VectorItems(documents.vectors),
        left_id,
        pairs[used, 1],
        weights=weights[used],
        left_modality=log.queries.modality,
        right_modality="vector",
    )


def _relevance(model: ClickModel, pairs: Integers) -> np.ndarray:
    """Return the probability of relevance of each pair, (P,)."""
    if not np.array_equal(model.pairs, pairs):
        raise DualencError("the click model is of another log", fix="fit it to this one")
    return model.relevance


def _rewards_by_session(
    row: Integers, session: Integers, reward: np.ndarray, num_pairs: int
) -> np.ndarray:
    """Sum over sessions the largest reward of each pair in a session, (P,)."""
    # Repeated clicks in a session count once.
    visits, visit = distinct_pairs(row, np.unique(session, return_inverse=True)[1])
    largest = np.zeros(len(visits))
    np.maximum.at(largest, visit, reward)
    return np.bincount(visits[:, 0], largest, num_pairs)


def _mean_rewards(row: Integers, reward: np.ndarray, pairs: Integers) -> np.ndarray:
    """Return the mean reward of each pair's clicked showings, (P,).

    It is 0 for a pair without a click, and else 1 where all rewards are equal.
    """
    number = np.bincount(row, minlength=len(pairs))
    if len(reward) and (reward == reward[0]).all():
        return (number > 0).astype(float)
    return np.bincount(row, reward, len(pairs)) / np.maximum(number, 1)
