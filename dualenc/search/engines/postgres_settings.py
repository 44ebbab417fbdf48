"""Search settings of pgvector: defaults, a ladder of dearer ones, and statements that set them."""

from __future__ import annotations

from collections.abc import Iterator

from psycopg.sql import SQL, Composable, Identifier, Literal

from dualenc.search.engines.engine import IndexKind, Settings
from dualenc.search.engines.postgres_connection import compose

MAX_EF_SEARCH = 1000
"""pgvector's limit."""
OPTIONS = {"hnsw": {"ef_search": "ef_search"}, "ivfflat": {"nprobe": "probes"}}
"""Options of `search` with pgvector's names for them, by kind of index."""


def num_lists(count: int) -> int:
    """Return the number of IVF lists that pgvector's documentation recommends for N rows."""
    return max(count // 1000, 1) if count <= 1_000_000 else int(count**0.5)


def default_settings(kind: IndexKind, count: int, lists: int | None = None) -> Settings:
    """Return the default search settings of an index; scans continue until k rows meet the filter.

    Args:
        kind: kind of pgvector's index.
        count: N, the number of rows.
        lists: number of IVF lists; None takes that of an index that dualenc has built.
    """
    if kind == "hnsw":
        return {"ef_search": 100, **_iterative_scan(step=0)}
    if kind == "ivfflat":
        lists = lists or num_lists(count)
        return _probes(max(int(lists**0.5), 1), lists)
    return {}


def ladder(kind: IndexKind, settings: Settings) -> Iterator[Settings]:
    """Yield search settings that compare more and more rows.

    Args:
        kind: kind of pgvector's index.
        settings: current settings; their `max_probes` is the number of IVF lists.
    """
    if kind == "none":
        yield {}
    elif kind == "ivfflat":
        lists = settings["max_probes"]
        for step in range(lists.bit_length()):
            yield _probes(2**step, lists)
    else:
        for step, ef_search in enumerate((40, 80, 160, 320, 640, MAX_EF_SEARCH)):
            yield {"ef_search": ef_search, **_iterative_scan(step)}


def _probes(probes: int, lists: int) -> Settings:
    return {"probes": probes, "iterative_scan": "relaxed_order", "max_probes": lists}


def _iterative_scan(step: int) -> Settings:
    """Return limits of a graph scan that goes on until enough rows meet a filter."""
    # Relaxed order scans each row once; results are sorted after all of them have arrived.
    return {
        "iterative_scan": "relaxed_order",
        "max_scan_tuples": 20_000 * 4**step,
        "scan_mem_multiplier": 2**step,
    }


def set_settings(kind: IndexKind, settings: Settings | None) -> Composable:
    """Return statements that prepare a transaction for a search.

    Args:
        kind: kind of pgvector's index.
        settings: search settings; without them, no index is used.
    """
    if settings is None:
        # An exact search reads the whole table, which may take longer than any useful timeout.
        return SQL("SET LOCAL statement_timeout = '0'; SET LOCAL enable_indexscan = 'off'")
    # An exact search in the same transaction has changed the second.
    begin = "SET LOCAL statement_timeout = '60s'; SET LOCAL enable_indexscan TO DEFAULT"
    statements: list[Composable] = [SQL(begin)]
    for name, value in settings.items():
        parameter = Identifier(kind, name)
        statements.append(compose("SET LOCAL {} = {}", parameter, Literal(value)))
    return SQL("; ").join(statements)
