"""A column of pgvector: the types in which it is stored and compared, operators and binary form."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
from psycopg.sql import SQL, Composed, Literal
from psycopg.types.string import BytesBinaryDumper

from dualenc.search.engines.postgres_connection import PostgresConnection, compose

MAX_DIM = {"vector": 2000, "halfvec": 4000}
"""Largest dimensions that pgvector can index, by type."""
VALUE_TYPES: dict[str, Any] = {"halfvec": np.dtype(">f2"), "vector": np.dtype(">f4")}
OPERATORS = {"cosine": "<=>", "ip": "<#>", "l2": "<->", "l1": "<+>"}


class VectorColumn(NamedTuple):
    """A column of vectors (D,) with the metric that compares them.

        column = VectorColumn(database, "embedding", "vector", 2, "cosine", is_indexed=True)
        statement = "SELECT id FROM papers ORDER BY {} LIMIT 5"
        database.run(statement, column.distance, values={"query": "[0.6, 0.8]"})

    Attributes:
        database: connection, which has the schema of pgvector.
        name: name of the column.
        stored: type in which vectors are stored, "vector" (float32) or "halfvec" (float16).
        dim: D.
        metric: "cosine", "ip", or "l2" for vectors of length one.
        is_indexed: whether searches use an index.
        indexed_type: type in which an index of others compares; "" for an index of dualenc.
    """

    database: PostgresConnection
    name: str
    stored: str
    dim: int
    metric: str
    is_indexed: bool
    indexed_type: str = ""

    @property
    def compared(self) -> str:
        """Type in which vectors are compared and indexed."""
        if self.indexed_type:
            return self.indexed_type
        # Vectors too long for pgvector's float32 index are compared in half precision.
        is_cast = self.is_indexed and self.dim > MAX_DIM["vector"]
        return "halfvec" if is_cast else self.stored

    def sql_type(self, kind: str) -> Composed:
        """Return "vector" or "halfvec" in SQL, with the dimension."""
        return compose("{}({})", self.database.type(kind), Literal(self.dim))

    @property
    def expression(self) -> Composed:
        """SQL expression that is compared and indexed.

        A query uses the index only if it repeats the indexed expression exactly.
        """
        if self.compared == self.stored:
            return compose("{}", self.name)
        return compose("({}::{})", self.name, self.sql_type(self.compared))

    @property
    def distance(self) -> Composed:
        """SQL expression for the distance from the parameter `query`."""
        return compose(
            "{} OPERATOR({}.{}) %(query)s::{}",
            self.expression,
            self.database.extension,
            SQL(OPERATORS[self.metric]),
            self.sql_type(self.compared),
        )

    def similarity(self, distance: float) -> float:
        """Convert pgvector's distance to a similarity."""
        # pgvector's <#> is the negative inner product, because index scans only ascend.
        if self.metric == "ip":
            return -distance
        if self.metric == "l2":
            # |a - b|² = 2 - 2 a·b for vectors of length one.
            return 1 - distance**2 / 2
        # The cosine distance of a zero vector is NaN.
        return 0.0 if math.isnan(distance) else 1 - distance

    @property
    def indexed(self) -> Composed:
        """Expression and operator class, as CREATE INDEX takes them."""
        operators = self.database.type(f"{self.compared}_{self.metric}_ops")
        return compose("{} {}", self.expression, operators)

    def register(self) -> int:
        """Let the connection send vectors in binary form; return the oid of their type."""
        connection = self.database.connection
        name = self.database.type(self.stored).as_string(connection)
        [(oid,)] = self.database.run("SELECT %s::regtype::oid", values=[name])
        # The oid differs by database, so each connection gets a class of its own, which sends
        # bytes unchanged.
        adapter = type("VectorDumper", (BytesBinaryDumper,), {"oid": oid})
        connection.adapters.register_dumper(None, adapter)
        return oid

    def encode(self, vectors: np.ndarray) -> list[bytes]:
        """Return vectors (n, D) in pgvector's binary form."""
        # Dimension and a reserved int16, then big-endian floats.
        head = struct.pack(">HH", self.dim, 0)
        return [head + row.tobytes() for row in vectors.astype(VALUE_TYPES[self.stored])]

    def decode(self, stored: bytes) -> np.ndarray:
        """Return the vector (D,) of a binary form."""
        return np.frombuffer(stored, VALUE_TYPES[self.stored], offset=4)
