"""What an adaptation learns from: logs, what their clicks mean, and the training pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from dualenc.data.corpus import Corpus
from dualenc.data.item_lists import Picked
from dualenc.data.logs.click_log import ClickLog
from dualenc.data.logs.click_model import ClickModel, KnownPropensities, fit_click_model
from dualenc.data.logs.relevance_of_clicks import LEAST_RELEVANCE, pairs_of
from dualenc.data.pairs import PairDataset
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.types import Integers
from dualenc.workflows.adapting import QuerySide

SHOWN_POSITIONS = 3
"""Number of positions whose examination is stated."""


@dataclass(frozen=True, eq=False)
class LearnedLog:
    """A log with the relevance of its pairs.

        learned = learn_log(open_log("events.parquet", documents), documents)
        print(learned.findings, len(learned.pairs))

    Attributes:
        log: the showings.
        click_model: what clicks say about relevance; None if clicks are counted as they are.
        pairs: weighted training pairs.
        findings: what was inferred, a line each.
    """

    log: ClickLog
    click_model: ClickModel | None
    pairs: PairDataset
    findings: list[str]


def learn_log(
    log: ClickLog, documents: Embeddings, known: KnownPropensities | None = None
) -> LearnedLog:
    """Infer the relevance of the pairs of a log.

    Args:
        log: the showings.
        documents: N vectors with ids.
        known: parameters of the click model; None estimates them from the log.

    Raises:
        DualencError: no pair counts as relevant.
    """
    if log.grades_are_relevance:
        return LearnedLog(log, None, pairs_of(log, documents, None), [])
    model = fit_click_model(log.query, log.document, log.position, log.reward > 0, known=known)
    pairs = pairs_of(log, documents, model)
    return LearnedLog(log, model, pairs, _described(model, pairs))


def with_inputs(log: ClickLog, side: QuerySide) -> ClickLog:
    """Return a log whose queries are inputs of the trained model, each embedded once.

    Queries without a click are in no pair, so they are not embedded; showings of queries that
    cannot be embedded, such as unreadable images, are left out.

    Args:
        log: the showings.
        side: the query side of the index.
    """
    clicked = np.unique(log.query[log.reward > 0])
    inputs = side.inputs(log.queries.take(clicked), "queries", on_error="skip")
    rows = rows_of(inputs.ids, log.queries.ids)  # (Q,), -1 without a vector
    lost = clicked[rows[clicked] < 0]
    queries = Corpus(log.queries.ids, Picked(inputs.items, rows), inputs.modality)
    return replace(log.take(~np.isin(log.query, lost)), queries=queries)


def document_ids(pairs: PairDataset, documents: Embeddings) -> list[str]:
    """Return the ids of the documents in pairs, in the order of the index."""
    return [documents.ids[row] for row in np.unique(pairs.right_id).tolist()]


def log_rows(pairs: PairDataset) -> Integers:
    """Return the row in the log of each left item of `pairs_of`.

    Args:
        pairs: pairs of `pairs_of`, or a part of them.
    """
    assert isinstance(pairs.left_items, Picked)
    return pairs.left_items.positions


def day_of(seconds: float) -> str:
    """Return the time in UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _described(model: ClickModel, pairs: PairDataset) -> list[str]:
    """Return what clicks say about relevance, a line each."""
    if model.unidentified is not None:
        return [f"clicks are counted as they are: {model.unidentified}"]
    rates = (
        f"click model: at position 1 a relevant document is clicked with {model.click_relevant:.2f}"
        f", another with {model.click_irrelevant:.2f}"
    )
    places = range(1, min(len(model.theta), 1 + SHOWN_POSITIONS))
    examined = [
        f"position {place + 1}: {_with_interval(model, place)}"
        for place in places
        if np.isfinite(model.theta[place])
    ]
    lines = [rates]
    if examined:
        lines.append(f"examined as often as position 1, times: {', '.join(examined)}")
    relevant = int((model.relevance > LEAST_RELEVANCE).sum())
    lines.append(
        f"{relevant:,} of {len(model.pairs):,} pairs shown are more likely relevant than not "
        f"({model.moved:,} were seen at several positions); {len(pairs):,} of them were clicked"
    )
    if not model.moved and np.isfinite(model.theta_low).any():
        lines.append(
            "every pair was shown at one position only: relevance is inferred from how often pairs "
            "were clicked at the same position, and that is less certain"
        )
    return lines


def _with_interval(model: ClickModel, place: int) -> str:
    """Return θ of a position with its 95% interval; without one where it was given."""
    low, high = model.theta_low[place], model.theta_high[place]
    if not np.isfinite(low + high) or low == high:
        return f"{model.theta[place]:.2f}"
    return f"{model.theta[place]:.2f} [{low:.2f}, {high:.2f}]"
