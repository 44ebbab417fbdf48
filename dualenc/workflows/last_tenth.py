"""The last tenth of a log: queries that a model of the earlier part is measured by."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dualenc.data.corpus import used_items
from dualenc.data.logs.click_model import ClickModel, KnownPropensities
from dualenc.data.logs.split_by_time import split_by_time
from dualenc.data.pairs import PairDataset
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.evaluation.feedback_queries import feedback_queries
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.adaptation_choice import KNOWN, NEW
from dualenc.workflows.adaptation_log import LearnedLog, document_ids, learn_log, log_rows
from dualenc.workflows.trained_pairs import Seen

logger = logging.getLogger("dualenc.workflows")

LATER = "last tenth"
MAX_QUERIES = 1000
"""Maximum number of queries in each part."""


@dataclass(frozen=True, eq=False)
class LastTenth:
    """The earlier pairs of a log, and evaluators of the queries after them.

        part = last_tenth(learned, documents)
        print(part.begins, list(part.tasks))

    Attributes:
        earlier: pairs before the last tenth of the results lists.
        later: pairs in it whose queries can be measured.
        evaluator: all later queries that are measured.
        tasks: evaluators of later queries by task: those of documents without an earlier pair, and
            the others.
        begins: when the last tenth begins, in seconds since 1970.
        num_seen: number of later queries that are not measured, since the model that training
            begins at was trained on one of their pairs.
    """

    earlier: PairDataset
    later: PairDataset
    evaluator: IndexEvaluator
    tasks: Mapping[str, IndexEvaluator]
    begins: float
    num_seen: int


def last_tenth(
    learned: LearnedLog, documents: Embeddings, seed: int = 0, seen: Seen | None = None
) -> LastTenth | None:
    """Divide a log by time; None if it has no times, or a part without pairs that can be used.

    Args:
        learned: the log and its click model, whose propensities both parts take.
        documents: N vectors with ids.
        seed: random seed of the queries that are measured, if there are many.
        seen: what the model that training begins at was trained on: later queries with such a pair
            are not measured, and its documents are not new.
    """
    split = split_by_time(learned.log)
    if split is None:
        return None
    known = _propensities(learned.click_model)
    try:
        earlier, later = (
            learn_log(part, documents, known).pairs for part in (split.earlier, split.later)
        )
    except DualencError as error:
        # One of the parts has no relevant pair.
        logger.info("the last tenth of the log measures nothing: %s", error)
        return None
    num_queries, measured_pairs = _num_queries(later), later
    trained_ids = document_ids(earlier, documents)
    if seen is not None:
        unseen = seen.may_be_known(later)[later.left_id]
        if not unseen.any():
            logger.info("the last tenth of the log measures nothing: all its pairs were trained on")
            return None
        measured_pairs = later.take(np.flatnonzero(unseen))
        trained_ids += seen.record.document_ids()
    evaluator = IndexEvaluator.of_pairs(measured_pairs, documents)
    known_qrels, new_qrels = divide_by_training(evaluator.qrels, trained_ids)
    draw = np.random.default_rng(seed)
    tasks = {}
    for part, qrels in ((NEW, new_qrels), (KNOWN, known_qrels)):
        if qrels:
            names = draw.permutation(list(qrels))[:MAX_QUERIES].tolist()
            tasks[f"{LATER}: {part}"] = evaluator.among(names)
    measured = evaluator.among([name for each in tasks.values() for name in each.qrels])
    num_seen = num_queries - _num_queries(measured_pairs)
    return LastTenth(earlier, measured_pairs, measured, tasks, split.begins, num_seen)


def scores_without_training(part: LastTenth, original: DualEncoder) -> dict[str, np.ndarray]:
    """Return nDCG@10 of later queries that are moved towards what was clicked for them before.

    Counterfactual Rocchio, see `feedback_queries`: what a log gives without any training. Queries
    that did not occur earlier stay as they are.

    Args:
        part: the last tenth.
        original: model before training.

    Returns:
        (Q,) scores of each task.
    """
    earlier_rows, later_rows = log_rows(part.earlier), rows_of_queries(part.later)
    weights = part.earlier.weights
    if weights is None:
        weights = np.ones(len(part.earlier))
    found = {}
    for task, evaluator in part.tasks.items():
        embedded = evaluator.embed(original, "left", evaluator.queries, "queries")
        place = {later_rows[name]: row for row, name in enumerate(embedded.ids)}
        pair_rows = earlier_rows[part.earlier.left_id].tolist()
        own = np.array([place.get(row, -1) for row in pair_rows])  # (M,)
        used = own >= 0
        moved = feedback_queries(
            np.asarray(embedded.vectors, np.float32),
            evaluator.documents.vectors,
            own[used],
            part.earlier.right_id[used],
            weights[used],
        )
        scores = score_queries(evaluator.qrels, evaluator.search(embedded.ids, moved))
        found[task] = np.array([scores[name][evaluator.primary] for name in scores])
    return found


def rows_of_queries(pairs: PairDataset) -> dict[str, int]:
    """Return the row in the log of each query of `IndexEvaluator.of_pairs`, by its id.

    Args:
        pairs: pairs of `pairs_of`, or a part of them.
    """
    queries, number = used_items(pairs, "left")
    rows = log_rows(pairs)[pairs.left_id].tolist()
    return dict(zip([queries.ids[own] for own in number.tolist()], rows, strict=True))


def _num_queries(pairs: PairDataset) -> int:
    return len(np.unique(pairs.left_id))


def _propensities(model: ClickModel | None) -> KnownPropensities | None:
    """Return the parameters of a fitted click model; None if clicks are counted."""
    if model is None or model.unidentified is not None:
        return None
    # No showing is at a position without an estimate.
    theta: Sequence[float] = np.where(np.isfinite(model.theta), model.theta, 1e-3).tolist()
    return KnownPropensities(tuple(theta), model.click_relevant, model.click_irrelevant)
