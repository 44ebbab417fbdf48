"""Logs with a row for a click, an impression, an event, or counts of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pyarrow.compute as pc

from dualenc.data.columns import Column, ItemColumn, read_column, read_ids
from dualenc.data.item_lists import Picked, VectorItems
from dualenc.data.logs import log_names as names
from dualenc.data.logs.action_weights import ActionWeights, is_showing_only, known_action
from dualenc.data.logs.click_log import LogColumns
from dualenc.data.logs.document_column import document_column
from dualenc.data.logs.log_part import LogPart, one_showing_each
from dualenc.data.logs.log_table import (
    LogTable,
    codes_of,
    number_queries,
    read_numbers,
    refuse_two,
)
from dualenc.data.logs.log_times import read_times
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.column_names import (
    QUERY_IDS,
    columns_named,
    first_of,
    is_none,
    normalized,
)
from dualenc.data.readers.column_pairs import paired_positions
from dualenc.data.readers.relevance import Labels, label_columns, named_labels, read_labels
from dualenc.data.readers.tables import DataTable, check_columns
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import Integers, Modality

logger = logging.getLogger("dualenc.data")

LABEL_OPTION = "label_column"
MAX_SHOWINGS = 20_000_000
"""Counts of more showings are sampled, since each showing is a row in memory."""
_NO_CLICKS = "are not clicks"
MAX_UNREAD = 8
"""Number of names of unread columns that are shown."""
_LEVEL = 5  # at this position there are clearly fewer clicks than at the first
_LEVEL_SHARE = 0.9
_LEVEL_ROWS = 20
_FROM_ZERO = 0.02  # more positions than this share are 0 only where positions count from 0
_WORDS = ("true", "false", "yes", "no", "0", "1", "t", "f")


@dataclass(frozen=True)
class Roles:
    """The columns of a log by role; None for roles that no column has."""

    query: str
    document: str
    named_label: str | None
    likely_labels: list[str]
    position: str | None
    sessions: list[str]
    users: list[str]
    time: str | None
    action: str | None
    impressions: str | None
    weight: str | None
    is_session_named: bool


def read_showings(
    table: LogTable,
    documents: Embeddings,
    columns: LogColumns,
    weights: ActionWeights,
) -> LogPart:
    """Read a log whose rows are clicks, impressions, events or counts.

    Args:
        table: the log.
        documents: the index.
        columns: columns that the user named.
        weights: weights of actions.

    Raises:
        DualencError: columns cannot be told apart, or nothing was clicked.
    """
    roles = find_roles(table, documents, columns)
    data, modality = _open(table, roles)
    left = read_column(data, roles.query, modality)
    right = read_ids(data, roles.document, documents.ids, VectorItems(documents.vectors))
    check_ids(data, roles.document, right, documents)
    labels = read_labels(data, roles.likely_labels, right, LABEL_OPTION, effect=_NO_CLICKS)
    if roles.named_label is not None:
        labels = named_labels(data, roles.named_label, right, LABEL_OPTION, _NO_CLICKS)
    entry_weights = None
    if roles.weight is not None:
        left, right, entry_weights = _with_weights(data, roles.weight, left, right)
    paired = paired_positions(left, right, labels)
    rows = right.rows[paired]
    items, query = number_queries(left, rows)
    reward, shape, is_graded, actions = _rewards(
        data, roles, labels, right, paired, weights, entry_weights
    )
    position, notes = _positions(data, roles.position, right, paired)
    if shape == "clicks" and labels is None and roles.action is None:
        _report_level_clicks(data.source, position)
    session, session_note = _sessions(data, roles, rows, query, paired)
    part = LogPart(
        items=items,
        modality=left.modality,
        shape=shape,
        rows=len(data),
        query=query,
        document=cast(Picked, right.items).positions[paired],
        reward=reward,
        position=position,
        session=session,
        time=row_times(data, roles.time, columns.time is not None)[rows],
        missing=missing_ids(data, roles.document, right),
        actions=actions,
        grades_are_relevance=is_graded,
        notes=[*notes, *session_note, *described_actions(actions, weights), *unread(table, data)],
    )
    counts = _counts(data, roles, labels, right, paired)
    if counts is not None and (counts != 1).any():
        shape = "counts of clicks"
        if roles.impressions is not None:
            shape += " and impressions"
        return _repeated(replace(part, shape=shape), *counts)
    return one_showing_each(part)


def find_roles(table: LogTable, documents: Embeddings, columns: LogColumns) -> Roles:
    """Find the column of each role that the user did not name."""
    kinds = table.kinds
    for name in vars(columns).values():
        if not is_none(name) and name is not None:
            check_columns(table.path, kinds, [name])
    given = {name for name in vars(columns).values() if name is not None}
    query = columns.query or query_column(table, given)
    free = [name for name in kinds if name != query and name not in given]
    position = _named_or(
        table, columns.position, free, names.POSITION, "positions", "position_column", False
    )
    if position is None and columns.position is None:
        _report_unread_positions(table, free)
    impressions = _named_or(
        table, columns.impressions, free, names.IMPRESSIONS, "counts of impressions",
        "impressions_column", True,
    )  # fmt: skip
    weight = _named_or(table, columns.weight, free, names.WEIGHT, "weights", "weight_column", False)
    action = action_column(table, columns.action, free)
    time = time_column(table, columns.time, free)
    sessions = [columns.session] if columns.session and not is_none(columns.session) else []
    users: list[str] = []
    if columns.session is None:
        sessions = columns_named(free, (*names.RESULTS_LIST, *QUERY_IDS, *names.SESSION))
        users = columns_named(free, names.USER)
    roles = (query, position, impressions, weight, action, time, columns.clicked)
    document = columns.document
    if document is None:
        others = {*roles, *sessions, *columns_named(free, names.RESULTS_LIST)}
        document = document_column(table, others, documents.ids)
    if position is not None and columns.position is None and table.holds_lists(position):
        position = position if table.holds_lists(document) else None
    likely: list[str] = []
    if columns.clicked is None:
        taken = {name for name in (document, *roles) if name is not None}
        likely = [name for name in label_columns(kinds, taken) if name != document]
        _report_unread_labels(table, likely, {*taken, *sessions, *users}, weight or action)
    named = None if is_none(columns.clicked) else columns.clicked
    if impressions is not None and not (likely or named or action):
        raise DualencError(
            f"column {impressions!r} counts what was shown, and no column says what was clicked",
            fix=f"name it as {LABEL_OPTION} (--label-column), or pass impressions_column=none",
            where=table.path,
        )
    return Roles(
        query, document, named, likely, position, [s for s in sessions if s != document],
        users, time, action, impressions, weight, columns.session is not None,
    )  # fmt: skip


def query_column(table: LogTable, but: Collection[str]) -> str:
    """Return the column of queries by its name."""
    name = first_of([name for name in table.kinds if name not in but], names.QUERY)
    if name is None:
        raise DualencError(
            "it is unclear which column is query_column",
            fix=f"name it (--query-column; columns: {', '.join(table.kinds)}){table.wrapper}",
            where=table.path,
        )
    return name


def query_modality(table: LogTable, name: str) -> tuple[ColumnKind, Modality | None]:
    """Return how to read a column of queries; modality None leaves it to the values."""
    kind = table.source.item_kind(name) if name not in table.nested else "value"
    return kind, "vector" if kind == "vector" else None


def _named_or(
    table: LogTable,
    named: str | None,
    free: Sequence[str],
    usual: Sequence[str],
    what: str,
    option: str,
    single: bool,
) -> str | None:
    """Return the column that the user named, or the only one of numbers with a usual name."""
    if named is not None:
        return None if is_none(named) else named
    found = [
        name
        for name in columns_named(free, usual)
        if table.holds_numbers(name) or (not single and table.holds_lists(name))
    ]
    refuse_two(found, what, option, table.path)
    return found[0] if found else None


def _report_unread_positions(table: LogTable, free: Sequence[str]) -> None:
    """Report a column that has the name of positions, and holds no numbers."""
    for name in columns_named(free, names.POSITION)[:1]:
        shown = next(iter(table.examined_values(name)), "")
        logger.warning(
            "%s: column %r is not read: %r is not a number", table.path, name, shown[:40]
        )


def action_column(table: LogTable, named: str | None, free: Sequence[str]) -> str | None:
    """Return the column of actions: one that the user named, or that holds a known action."""
    if named is not None:
        return None if is_none(named) else named
    columns = [name for name in columns_named(free, names.ACTION) if table.kinds[name] == "value"]
    actions = {name: sorted(set(map(normalized, table.examined_values(name)))) for name in columns}
    by_name = names.SHOWING_ONLY | names.CHOOSING | names.REJECTING
    found = [name for name in columns if by_name & set(actions[name])]
    found = found or [name for name in columns if any(map(known_action, actions[name]))]
    refuse_two(found, "actions", "action_column", table.path)
    for name in columns:
        if not found and len(actions[name]) > 1:
            logger.warning(
                "%s: column %r is not read, and all its rows count as clicks: %s; if it says what "
                "users did, name it as action_column (--action-column)",
                *(table.path, name, ", ".join(map(repr, actions[name][:4]))),
            )
    return found[0] if found else None


def time_column(table: LogTable, named: str | None, free: Sequence[str]) -> str | None:
    """Return the column of times: one that the user named, or the finest with a usual name."""
    if named is not None:
        return None if is_none(named) else named
    return next((n for n in columns_named(free, names.TIME) if table.kinds[n] == "value"), None)


def _report_unread_labels(
    table: LogTable, likely: Sequence[str], taken: Collection[str | None], has_rewards: str | None
) -> None:
    """Report columns of truth values that may be labels under names of their own."""
    if likely or has_rewards:
        return
    for name in table.kinds:
        if name in taken:
            continue
        values = {str(value).lower().removesuffix(".0") for value in table.examined_values(name)}
        if len(values) == 2 and values <= set(_WORDS):
            logger.warning(
                "%s: column %r holds %s and is not read; if it says what was clicked, name it as "
                "%s (--label-column)",
                table.path,
                name,
                " and ".join(sorted(values)),
                LABEL_OPTION,
            )


def _open(table: LogTable, roles: Roles) -> tuple[DataTable, Modality | None]:
    """Open the columns of the roles; return the modality of the queries."""
    kind, modality = query_modality(table, roles.query)
    opened: dict[str, ColumnKind] = {}
    if roles.position is not None:
        opened[roles.position] = table.label_kind(roles.position)
    for name in (roles.action, roles.impressions, roles.time):
        if name is not None:
            opened[name] = "value"
    opened |= dict.fromkeys((*roles.sessions, *roles.users), "value")
    labels = [*roles.likely_labels, *filter(None, [roles.named_label, roles.weight])]
    opened |= {name: table.label_kind(name) for name in labels}
    opened |= {roles.document: "list", roles.query: kind}
    for name in (*roles.sessions, *roles.users):
        if table.holds_lists(name):
            opened.pop(name)
    return table.open(opened), modality


def check_ids(data: DataTable, name: str, right: ItemColumn, documents: Embeddings) -> None:
    """Raise a `DualencError` if none of the values of a column is an id of the index."""
    if len(right.rows) and not right.usable().any():
        column = Column(data, name, "text", lists=True)
        filled = np.flatnonzero(column.filled())
        first = str(column[filled[0] if len(filled) else 0])
        raise DualencError(
            f"column {name!r} does not hold ids of documents (its first value is "
            f"{first[:60]!r}, and an id of the index is {documents.ids[0][:60]!r})",
            fix="name the column of ids",
            where=data.source,
        )


def missing_ids(data: DataTable, name: str, right: ItemColumn) -> set[str]:
    """Return the distinct ids that are not in the index."""
    is_missing = cast(Picked, right.items).positions < 0
    is_missing &= ~right.is_empty
    array = Column(data, name, "text", lists=True).array
    return {str(value) for value in array.filter(is_missing).unique().to_pylist()}


def _with_weights(
    data: DataTable, name: str, left: ItemColumn, right: ItemColumn
) -> tuple[ItemColumn, ItemColumn, np.ndarray]:
    """Return the columns with faults where there is no weight, and a weight for each right value.

    Raises:
        DualencError: a weight is negative, or lists have other lengths than those of the ids.
    """
    numbers, column = read_numbers(data, name)
    if (numbers < 0).any():
        value = float(numbers[numbers < 0][0])
        raise DualencError(
            f"column {name!r} holds a negative weight ({value:g})",
            fix="write 0 for a document that is not relevant",
            where=data.source,
        )
    fault = (f"no weight in column {name!r}", ~np.isfinite(numbers), "fill it in")
    if not column.is_list:
        return left.with_fault(*fault), right, numbers[right.rows]
    if not np.array_equal(column.rows, right.rows):
        raise DualencError(
            f"column {name!r} holds lists whose lengths differ from those of the ids",
            fix="give a weight for each id",
            where=data.source,
        )
    return left, right.with_fault(*fault), numbers


def _rewards(
    data: DataTable,
    roles: Roles,
    labels: Labels | None,
    right: ItemColumn,
    paired: Integers,
    weights: ActionWeights,
    entry_weights: np.ndarray | None,
) -> tuple[np.ndarray, str, bool, set[str]]:
    """Return the reward of each pair (n,), the shape, whether it is a grade, and the actions."""
    reward = np.ones(len(paired), np.float32)
    shape = "clicks"
    is_graded = False
    actions: set[str] = set()
    if labels is not None:
        matches = labels.of_pairs(right, paired)
        action = "purchase" if names.IS_PURCHASE.search(normalized(labels.name)) else "click"
        reward = np.where(matches > 0, weights.of(action), 0).astype(np.float32)
        actions.add(action)
        shape = "clicks" if (matches > 0).all() else "impressions"
        grades = _label_numbers(data, labels, right, paired)
        # A label of 3 is a grade, unless its column counts actions.
        if grades.max() > 1 and not names.IS_BEHAVIOR.search(normalized(labels.name)):
            return grades.astype(np.float32), "judgements", True, set()
    if roles.action is not None:
        array = data.column(roles.action)
        codes = array.dictionary_encode().combine_chunks()
        kinds = codes.dictionary.to_pylist()
        own = {str(kind) for kind in kinds if kind is not None}
        by_code = [weights.of(kind, f"{data.source}, column {roles.action!r}") for kind in kinds]
        numbers = codes.indices.fill_null(len(kinds)).to_numpy(zero_copy_only=False)
        acted = np.array([*by_code, 0.0], np.float32)[numbers][right.rows[paired]]
        reward = acted if labels is None else np.where(reward > 0, acted, 0).astype(np.float32)
        actions = own
        shape = "events" if len(own) > 1 or any(map(is_showing_only, own)) else "clicks"
    if entry_weights is not None:
        own_weights = entry_weights[paired].astype(np.float32)
        if labels is None and roles.action is None:
            return own_weights, "weighted pairs", True, set()
        reward = np.where(reward > 0, own_weights, 0).astype(np.float32)
    return reward, shape, is_graded, actions


def _label_numbers(
    data: DataTable, labels: Labels, right: ItemColumn, paired: Integers
) -> np.ndarray:
    """Return the numbers in a column of labels, 1 and 0 for words and negative numbers."""
    numbers, _ = read_numbers(data, labels.name)
    spelled = np.isfinite(numbers) & (numbers >= 0)
    return Labels(
        labels.name, np.where(spelled, numbers, labels.values), labels.of_entries
    ).of_pairs(right, paired)


def _counts(
    data: DataTable, roles: Roles, labels: Labels | None, right: ItemColumn, paired: Integers
) -> np.ndarray | None:
    """Return how often each pair was clicked, and shown without a click, (2, n).

    None if rows are single events.
    """
    if labels is None or not names.IS_BEHAVIOR.search(normalized(labels.name)):
        if roles.impressions is None:
            return None
        if labels is None:
            return None
    clicks = np.round(_label_numbers(data, labels, right, paired))
    if roles.impressions is None:
        # A row with a count of 0 was shown at least once.
        shown = np.maximum(clicks, 1)
    else:
        shown = read_numbers(data, roles.impressions)[0][right.rows[paired]]
        shown = np.maximum(np.round(np.nan_to_num(shown, nan=0.0)), clicks)
    if (clicks <= 1).all() and (shown == 1).all():
        return None
    return np.stack([clicks, shown - clicks])


def _repeated(part: LogPart, clicks: np.ndarray, others: np.ndarray) -> LogPart:
    """Return a showing for each of the counted ones, sampled if they are too many for memory."""
    notes = [*part.notes]
    total = clicks.sum() + others.sum()
    if total > MAX_SHOWINGS:
        share = MAX_SHOWINGS / total
        generator = np.random.default_rng(0)
        clicks = generator.binomial(clicks.astype(np.int64), share)
        others = generator.binomial(others.astype(np.int64), share)
        notes.append(f"{share:.2%} of its {total:,.0f} showings are sampled")
    rows = np.arange(len(part))
    pairs = np.stack([rows, rows], axis=1).ravel()
    number = np.stack([clicks, others], axis=1).ravel().astype(np.int64)
    rewards = np.stack([part.reward, np.zeros_like(part.reward)], axis=1).ravel()
    repeated = part.take(np.repeat(pairs, number))
    return replace(
        repeated,
        reward=np.repeat(rewards, number),
        # Every counted showing is from a results list of its own.
        session=np.arange(len(repeated)),
        notes=notes,
    )


def _positions(
    data: DataTable, name: str | None, right: ItemColumn, paired: Integers
) -> tuple[Integers, list[str]]:
    """Return the position of each pair (n,) from 1, 0 if unknown."""
    if name is None:
        return np.zeros(len(paired), np.int64), []
    numbers, column = read_numbers(data, name)
    if not column.is_list:
        return whole_positions(numbers[right.rows[paired]], name)
    if not np.array_equal(column.rows, right.rows):
        raise DualencError(
            f"column {name!r} holds lists whose lengths differ from those of the ids",
            fix="give a position for each id, or pass position_column=none",
            where=data.source,
        )
    return whole_positions(numbers[paired], name)


def whole_positions(numbers: np.ndarray, name: str) -> tuple[Integers, list[str]]:
    """Return positions from 1, 0 if unknown, and what was assumed about them."""
    is_whole = np.isfinite(numbers) & (numbers % 1 == 0) & (numbers >= 0)
    notes = []
    if (np.isfinite(numbers) & ~is_whole).any():
        # An average over several lists is not a position.
        notes.append(f"numbers in column {name!r} that are not positions count as unknown")
    positions = np.where(is_whole, numbers, -1).astype(np.int64)
    # Where positions count from 0, the first one is common; a rare 0 is not a position.
    if (positions == 0).sum() > _FROM_ZERO * is_whole.sum():
        notes.append(f"column {name!r} counts from 0")
        return positions + 1, notes
    return np.maximum(positions, 0), notes


def _sessions(
    data: DataTable, roles: Roles, rows: Integers, query: Integers, paired: Integers
) -> tuple[Integers, list[str]]:
    """Return the number of each pair's results list (n,), and where it comes from."""
    # The entries of a row's list belong together.
    own = rows if len(np.unique(rows)) < len(rows) else np.arange(len(paired))
    needs_link = _mixes_showings(data, roles, rows)
    for name in [*roles.sessions, *(roles.users if needs_link else [])]:
        if not data.has(name):
            continue
        codes = codes_of(data.column(name))[rows]
        if (codes < 0).all():
            continue
        is_guess = normalized(name) in QUERY_IDS and not roles.is_session_named
        if is_guess and not needs_link and not _divides(codes, query):
            # The id of a query's text, as in judgements: it says nothing about results lists.
            continue
        is_missing = codes < 0
        codes[is_missing] = codes.max() + 1 + own[is_missing]
        return codes, [f"results lists by column {name!r}"]
    if needs_link:
        raise DualencError(
            f"column {roles.action!r} has rows for impressions and rows for what was done with "
            "them, and no column says which belong together",
            fix="name a column of query ids, sessions or users as session_column "
            "(--session-column)",
            where=data.source,
        )
    return own, []


def described_actions(actions: Collection[str], weights: ActionWeights) -> list[str]:
    """Return notes on the actions that count as showings only, and on what others count."""
    by_weight = {name: weights.of(name) for name in sorted(actions)}
    chosen = [f"{name!r} {weight:g}" for name, weight in by_weight.items() if weight]
    shown = [repr(name) for name, weight in by_weight.items() if not weight]
    notes = [f"chosen: {', '.join(chosen)}"] if chosen and by_weight.keys() != {"click"} else []
    return [*notes, *([f"shown, not chosen: {', '.join(shown)}"] if shown else [])]


def unread(table: LogTable, data: DataTable) -> list[str]:
    """Return a note on the columns that are not read."""
    found = [repr(name) for name in table.kinds if name.strip() and not data.has(name)]
    more = f" and {len(found) - MAX_UNREAD:,} others" if len(found) > MAX_UNREAD else ""
    return [f"not read: {', '.join(found[:MAX_UNREAD])}{more}"] if found else []


def _report_level_clicks(source: object, position: Integers) -> None:
    """Report clicks that are as many at the fifth position as at the first."""
    counts = np.bincount(np.minimum(position, _LEVEL + 1), minlength=_LEVEL + 2)[1 : _LEVEL + 1]
    if counts.min() >= max(_LEVEL_ROWS, _LEVEL_SHARE * counts.max()):
        logger.warning(
            "%s: all rows count as clicks, and position %d has as many as position 1, unlike "
            "clicks; if rows are impressions, name the column of clicks as %s (--label-column)",
            *(source, _LEVEL, LABEL_OPTION),
        )


def _mixes_showings(data: DataTable, roles: Roles, rows: Integers) -> bool:
    """Return True if some rows are impressions and other rows are actions on them."""
    if roles.action is None:
        return False
    kinds = pc.unique(data.column(roles.action).take(rows)).to_pylist()
    kinds = [kind for kind in kinds if kind is not None]
    return any(map(is_showing_only, kinds)) and not all(map(is_showing_only, kinds))


def _divides(codes: Integers, query: Integers) -> bool:
    """Return True if a query has several ids, which are then those of its searches."""
    keys = query * (int(codes.max()) + 2) + codes + 1
    return len(np.unique(keys)) > len(np.unique(query))


def row_times(data: DataTable, name: str | None, is_named: bool) -> np.ndarray:
    """Return the time of each row (len(data),) in seconds since 1970, NaN if unknown."""
    if name is None:
        return np.full(len(data), np.nan)
    found = read_times(data.column(name))
    if found is not None:
        logger.info("%s: column %r is read as times: %s", data.source, name, found[1])
        return found[0]
    if is_named:
        raise DualencError(
            f"column {name!r} does not hold times",
            fix="write ISO 8601 texts, or seconds or milliseconds since 1970",
            where=data.source,
        )
    values = data.column(name).drop_null()
    logger.warning(
        "%s: column %r is ignored: its values are not times such as 2026-03-01T08:00 or "
        "1772352000 (the first is %r)",
        *(data.source, name, str(values[0])[:40] if len(values) else ""),
    )
    return np.full(len(data), np.nan)
