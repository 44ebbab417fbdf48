"""Embeddings in a vector search engine: push them there, search them with filters, compare with exact search."""

from dualenc.search.engines.contract import About, Engine, Hit
from dualenc.search.engines.push import EngineIndex, is_engine, open_engine, push
from dualenc.search.engines.where import Condition, column_kinds, named_columns, parse_conditions, rows_that_meet

__all__ = [
    "About",
    "Condition",
    "Engine",
    "EngineIndex",
    "Hit",
    "column_kinds",
    "is_engine",
    "named_columns",
    "open_engine",
    "parse_conditions",
    "push",
    "rows_that_meet",
]
