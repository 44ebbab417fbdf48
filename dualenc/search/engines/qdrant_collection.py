"""Any collection of Qdrant, as a migration reads it: points, vectors, aliases, and its record.

The record is in the metadata of the collection, under `dualenc_migration`:

    model, collection, vector     what to search: by which model, where, and `using` which vector
    new_model, checksum, state    the migration, see `dualenc.search.engines.migration_record`
    notes                         names of fields, vectors and collections; measurements
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from qdrant_client import models

from dualenc.errors import DualencError, nearest
from dualenc.io.terminal import without_credentials
from dualenc.search.engines.engine import RESUME
from dualenc.search.engines.migration_record import FILLING, STATES, Migration
from dualenc.search.engines.qdrant_connection import connect, one_line_errors

KEY = "dualenc_migration"
MARK = "dualenc_checksum"
"""Field of the payload with the checksum of what a new vector or point was made of."""
PAGE = 512
"""Points per request."""
MIN_VERSION = (1, 16)
"""Collections have metadata, and updates conditions, since this version of the server."""
NAMED_VERSION = (1, 18)
"""A collection takes further named vectors since this version."""


class QdrantCollection:
    """A collection, by its name or an alias.

        collection = QdrantCollection(client, "docs", "http://localhost:6333 'docs'")
        print(collection.name, collection.aliases())

    Args:
        client: client of the server.
        name: name or alias of the collection.
        location: server and collection, for errors.

    Raises:
        DualencError: there is no such collection, or the server is too old.
    """

    def __init__(self, client: Any, name: str, location: str) -> None:
        self.client = client
        self.location = location
        self.given_name = name
        version = str(client.info().version)
        numbers = re.match(r"(\d+)\.(\d+)", version)
        self.version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if self.version < MIN_VERSION:
            raise DualencError(
                f"Qdrant {version} keeps no record of a migration",
                fix="update the server to 1.16 or later",
                where=location,
            )
        of_alias = {each.alias_name: each.collection_name for each in client.get_aliases().aliases}
        self.name = of_alias.get(name, name)
        if not client.collection_exists(self.name):
            self.name = self._replacement()

    def _replacement(self) -> str:
        """Return the collection that has replaced this one and has yet to get its name."""
        for collection in self.client.get_collections().collections:
            metadata = self.client.get_collection(collection.name).config.metadata or {}
            notes = (metadata.get(KEY) or {}).get("notes", {})
            if (notes.get("source"), notes.get("target")) == (self.given_name, collection.name):
                return str(collection.name)
        raise DualencError(
            "there is no such collection", fix="name it: --table", where=self.location
        )

    def info(self) -> Any:
        """Return what the server knows of the collection."""
        return self.client.get_collection(self.name)

    def aliases(self, name: str = "") -> list[str]:
        """Return the aliases of the collection, or of another one."""
        pairs = self.client.get_aliases().aliases
        return sorted(e.alias_name for e in pairs if e.collection_name == (name or self.name))

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the collection."""
        return self.info().config.metadata or {}

    def record(self) -> Migration | None:
        """Return the recorded migration; None without one."""
        entries = self.metadata().get(KEY)
        if not entries:
            return None
        try:
            record = Migration(**{name: entries[name] for name in Migration._fields})
            names = [record.notes[name] for name in ("source", "target", "old", "new", "text")]
            is_valid = record.state in STATES and all(isinstance(name, str) for name in names)
            is_valid = is_valid and isinstance(record.notes["dim"], int)
        except (KeyError, TypeError):
            is_valid = False
        if not is_valid:
            raise DualencError(
                f"its metadata has a corrupt {KEY!r}", fix="remove it", where=self.location
            )
        return record

    def write(self, name: str, record: Migration | None) -> None:
        """Write the record into the metadata of a collection; None removes it."""
        self.client.update_collection(name, metadata={KEY: record and entries_of(record)})

    def points(
        self,
        name: str,
        payload: bool | Sequence[str] = False,
        vectors: bool | Sequence[str] = False,
        condition: models.Filter | None = None,
    ) -> Iterator[list[Any]]:
        """Yield all points of a collection in the order of their ids, page by page.

        Args:
            name: name of the collection.
            payload: whether to read the payload, or which fields.
            vectors: whether to read the vectors, or which.
            condition: only points that meet it.
        """
        offset = None
        wanted = quoted(payload)
        while True:
            page, offset = self.client.scroll(
                name, condition, PAGE, offset=offset, with_payload=wanted, with_vectors=vectors
            )
            if page:
                yield page
            if offset is None:
                return

    def retrieve(
        self,
        name: str,
        ids: Sequence[Any],
        payload: bool | Sequence[str] = False,
        vectors: bool | Sequence[str] = False,
    ) -> dict[Any, Any]:
        """Return those of the points with these ids that are stored, by id."""
        found = {}
        for start in range(0, len(ids), PAGE):
            part = list(ids[start : start + PAGE])
            for point in self.client.retrieve(name, part, quoted(payload), vectors):
                found[point.id] = point
        return found

    def unchanged(self, values: Sequence[tuple[Any, str, str]]) -> models.Filter | None:
        """Return the condition that fields of points have known values, for an update.

        None if the server may refuse conditions on fields without an index (strict mode).

        Args:
            values: id of a point, field and value.
        """
        strict = self.info().config.strict_mode_config
        if strict is not None and strict.enabled:
            return None
        parts: list[Any] = []
        for id, field, value in values:
            match = models.FieldCondition(key=field, match=models.MatchValue(value=value))
            has_id = models.HasIdCondition(has_id=[id])
            parts.append(models.Filter(must=[has_id, match]))
        return models.Filter(should=parts)

    def find_vector(self, name: str | None) -> tuple[str, Any]:
        """Return name and parameters of the vectors to migrate; "" for the unnamed vector.

        Args:
            name: name of the vector; None takes the only one.

        Raises:
            DualencError: there is none, or several, or it is of another kind.
        """
        params = self.info().config.params
        if params.sharding_method == models.ShardingMethod.CUSTOM:
            raise DualencError(
                "its shards are chosen by keys", fix="fill a second one", where=self.location
            )
        stored = params.vectors or {}
        vectors = dict(stored) if isinstance(stored, dict) else {"": stored}
        chosen = self._choose("--vector", name, list(vectors))
        parameters = vectors[chosen]
        if parameters.multivector_config is not None or parameters.datatype == "uint8":
            kind = "several per point" if parameters.multivector_config else "of bytes"
            raise DualencError(
                f"its vectors are {kind}", fix="name another: --vector", where=self.location
            )
        return chosen, parameters

    def find_text(self, name: str | None, id: str | None) -> str:
        """Return the field with the texts.

        Args:
            name: name of the field; None takes the only one that has nothing but texts in the
                first points.
            id: field that is not it.
        """
        first = self.client.scroll(self.name, limit=PAGE, with_payload=True)[0]
        kinds: dict[str, set[bool]] = {}
        for point in first:
            for field, value in (point.payload or {}).items():
                kinds.setdefault(field, set()).add(isinstance(value, str))
        texts = [field for field, are in kinds.items() if are == {True}]
        if name is not None and name in kinds and name not in texts:
            texts.append(name)
        candidates = [field for field in texts if field not in (MARK, id) or field == name]
        return self._choose("--text", name, candidates)

    def _choose(self, option: str, name: str | None, candidates: Sequence[str]) -> str:
        """Return the named candidate, or the only one."""
        if name is not None and name in candidates:
            return name
        fitting = ", ".join(map(repr, sorted(candidates))) or "none"
        if name is not None:
            raise DualencError(
                f"has no {name!r}{nearest(name, candidates)}",
                fix=f"{option} can be: {fitting}",
                where=self.location,
            )
        if len(candidates) == 1:
            return candidates[0]
        problem = f"{fitting} could be {option}" if candidates else f"has nothing for {option}"
        raise DualencError(problem, fix=f"name it: {option} NAME", where=self.location)


@contextmanager
def opened_collection(target: str, name: str) -> Iterator[QdrantCollection]:
    """Connect to a collection in this context; errors are in one line.

    Args:
        target: URL of the server.
        name: name or alias of the collection.
    """
    location = f"{without_credentials(target)} {name!r}"
    client = connect(target, location)
    try:
        with one_line_errors(location, RESUME):
            yield QdrantCollection(client, name, location)
    finally:
        client.close()


def entries_of(record: Migration) -> dict[str, Any]:
    """Return the entries of a record in the metadata, with what clients search now."""
    searched = "new" if record.state != FILLING else "old"
    place = {"new": "target", "old": "source"}[searched]
    notes = record.notes
    return {"collection": notes[place], "vector": notes[searched], **record._asdict()}


def quoted(fields: bool | Sequence[str]) -> bool | list[str]:
    """Return names of fields as paths: Qdrant would split them at dots, and refuse spaces."""
    return fields if isinstance(fields, bool) else [f'"{field}"' for field in fields]


def vector_of(point: Any, name: str) -> Any:
    """Return a vector of a point, or None; "" names the unnamed vector."""
    vectors = point.vector
    if isinstance(vectors, dict):
        return vectors.get(name)
    return vectors or None
