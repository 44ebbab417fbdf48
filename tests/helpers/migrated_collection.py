"""A collection of texts and old vectors that tests migrate, and clients that use it meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from qdrant_client import models

from dualenc.search.engines.qdrant_collection import KEY, MARK
from dualenc.workflows import migrate_collection as workflow
from tests.helpers import toy
from tests.helpers.migrated_table import OLD_DIM, embedded
from tests.helpers.working_clients import WorkingClients

URL = "http://server"
STABLE = 40
"""Points that clients leave alone."""


def old_vectors(count: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(count, OLD_DIM)).astype(np.float32)


def make_collection(
    client: Any, name: str, named: bool, count: int = 60, alias: str = "", **options: Any
) -> list[str]:
    """Create a collection with payload fields body and year; returns its texts."""
    texts = toy.texts(count)
    params = models.VectorParams(size=OLD_DIM, distance=models.Distance.COSINE)
    client.create_collection(name, {"old": params} if named else params, **options)
    points = [
        models.PointStruct(
            id=row,
            vector={"old": vector} if named else vector,
            payload={"body": text, "year": 2000 + row % 7},
        )
        for row, (text, vector) in enumerate(zip(texts, old_vectors(count).tolist()))
    ]
    client.upsert(name, points)
    if alias:
        create = models.CreateAlias(collection_name=name, alias_name=alias)
        client.update_collection_aliases([models.CreateAliasOperation(create_alias=create)])
    return texts


def migrate(name: str, model: Path, **options: Any) -> Any:
    options = {"progress": False, "device": "cpu", "batch_size": 4, **options}
    return workflow.migrate_collection(URL, name, str(model), **options)


def all_points(client: Any, name: str) -> list[Any]:
    return list(client.scroll(name, limit=10_000, with_payload=True, with_vectors=True)[0])


def searched(client: Any, name: str) -> tuple[str, str, bool]:
    """Collection and vector that clients search now, and whether they are new."""
    record = (client.get_collection(name).config.metadata or {}).get(KEY)
    if not record:
        named = isinstance(client.get_collection(name).config.params.vectors, dict)
        return name, "old" if named else "", False
    return record["collection"], record["vector"], record["model"] == record["new_model"]


def vector_in(point: Any, name: str) -> Any:
    return point.vector.get(name) if isinstance(point.vector, dict) else point.vector


def check_points(client: Any, name: str, model: Path, expected: dict[Any, str]) -> None:
    """The searched points have these texts, and the model's vectors of them."""
    collection, vector, is_new = searched(client, name)
    assert is_new
    points = all_points(client, collection)
    assert {point.id: point.payload["body"] for point in points} == expected
    stored = np.array([vector_in(point, vector) for point in points])
    texts = [point.payload["body"] for point in points]
    np.testing.assert_allclose(stored, embedded(model, texts), atol=2e-3)


def marks_of(client: Any, name: str) -> list[Any]:
    return [point.id for point in all_points(client, name) if MARK in point.payload]


class Clients(WorkingClients):
    """A client that writes 400 points and one that searches, each by the record of the moment."""

    def __init__(self, client: Any, name: str, model: Path, texts: list[str]) -> None:
        super().__init__()
        self.client = client
        self.name = name
        self.expected: dict[Any, str] = dict(enumerate(texts))
        self.pool = sorted(set(toy.texts(120)))
        self.new = embedded(model, self.pool)
        self.old = np.random.default_rng(7).normal(size=(len(self.pool), OLD_DIM))
        self.old_stable = old_vectors(STABLE)
        self.stable = embedded(model, texts[:STABLE])
        self.searches = {False: 0, True: 0}

    def write(self) -> None:
        random = np.random.default_rng(1)
        for number in range(400):
            row = int(random.integers(len(self.pool)))
            id = int(random.integers(STABLE, 400))
            collection, vector, is_new = searched(self.client, self.name)
            # The switch may happen in between.
            time.sleep(0.004)
            value: Any = (self.new if is_new else self.old)[row].tolist()
            value = {vector: value} if vector else value
            text = self.pool[row]
            if number % 3 == 0:
                self.client.delete(collection, models.PointIdsList(points=[id]))
                self.expected.pop(id, None)
            elif number % 3 == 1 and id in self.expected and number < 200:
                self.client.set_payload(collection, {"body": text}, points=[id])
                points = [models.PointVectors(id=id, vector=value)]
                self.client.update_vectors(collection, points)
                self.expected[id] = text
            else:
                point = models.PointStruct(id=id, vector=value, payload={"body": text})
                self.client.upsert(collection, [point])
                self.expected[id] = text
            self.written += 1

    def read(self) -> None:
        random = np.random.default_rng(2)
        while not self.done.is_set():
            row = int(random.integers(STABLE))
            collection, vector, is_new = searched(self.client, self.name)
            query = (self.stable if is_new else self.old_stable)[row].tolist()
            found = self.client.query_points(collection, query, using=vector or None, limit=5)
            assert len(found.points) == 5
            self.searches[is_new] += 1
            if is_new:
                # A client that writes a text before its vector may have come in between.
                assert self.expected[row] in {point.payload["body"] for point in found.points}
