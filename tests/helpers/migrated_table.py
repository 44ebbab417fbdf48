"""A table of texts and old vectors that tests migrate, and models of several dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psycopg
from psycopg.sql import SQL, Identifier

from dualenc.data import Corpus
from dualenc.encoders import load_model
from dualenc.search.embed.encode import embed
from tests.helpers import toy

OLD_DIM = 8


def make_table(
    target: str,
    name: str,
    count: int = 60,
    kind: str = "vector",
    index: str = "hnsw",
    options: str = "WITH (m = 8, ef_construction = 32)",
) -> list[str]:
    """Create a table with columns id, body and embedding; returns its texts."""
    texts = toy.texts(count)
    vectors = np.random.default_rng(3).normal(size=(count, OLD_DIM)).astype(np.float32)
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        columns = SQL("id bigint PRIMARY KEY, body text, year int, embedding {}").format(
            SQL(f"{kind}({OLD_DIM})")
        )
        table = Identifier(name)
        connection.execute(SQL("CREATE TABLE {} ({})").format(table, columns))
        with connection.cursor() as cursor:
            cursor.executemany(
                SQL("INSERT INTO {} VALUES (%s, %s, %s, %s)").format(table),
                [
                    (row, text, 2000 + row % 7, str(vectors[row].tolist()))
                    for row, text in enumerate(texts)
                ],
            )
        if index:
            statement = "CREATE INDEX {} ON {} USING {} (embedding {}) {}"
            connection.execute(
                SQL(statement).format(
                    Identifier(f"{name}_vectors"),
                    table,
                    SQL(index),
                    SQL(f"{kind}_cosine_ops"),
                    SQL(options),
                )
            )
    return texts


def embedded(model: Path, texts: list[str]) -> np.ndarray:
    """The vectors (n, D) that the model gives to texts."""
    corpus = Corpus([str(row) for row in range(len(texts))], texts)
    return np.asarray(embed(load_model(str(model)).right, corpus, progress=False).vectors)


def check_vectors(target: str, name: str, model: Path, column: str = "embedding") -> int:
    """Each row has the model's vector of its text, and none if it has no text; returns their
    number."""
    with psycopg.connect(target) as connection:
        query = SQL("SELECT body, {}::text FROM {}").format(Identifier(column), Identifier(name))
        rows = connection.execute(query).fetchall()
    texts = [text for text, _ in rows if text and text.strip()]
    stored = [vector for text, vector in rows if text and text.strip()]
    assert all(vector is None for text, vector in rows if not (text and text.strip()))
    assert all(vector is not None for vector in stored)
    found = np.array([json.loads(vector) for vector in stored])
    np.testing.assert_allclose(found, embedded(model, texts), atol=2e-3)
    return len(rows)
