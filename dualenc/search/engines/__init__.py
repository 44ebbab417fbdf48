"""Vector search engines: push embeddings to one, search it with its own filters, compare it with exact search."""

from dualenc.search.engines.collection import CollectionInfo, Hit
from dualenc.search.engines.index import Engine, EngineIndex, is_engine, open_engine
from dualenc.search.engines.push import push
from dualenc.search.engines.where import Condition, column_kinds, named_columns, parse_conditions, rows_that_meet

__all__ = [
    "CollectionInfo",
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
