"""The record of a migration that an engine keeps beside the vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dualenc.errors import DualencError

FILLING, SWITCHED, FINISHED = STATES = ("filling", "switched", "finished")
UNKNOWN = "the old model"
"""What is recorded of a model that nobody has named."""


class Migration(NamedTuple):
    """The migration of vectors to another model, as recorded in the database.

    Attributes:
        model: model of the vectors that searches find now.
        new_model: the model that the vectors get.
        checksum: checksum of the new model's tower of documents.
        state: "filling", "switched" or "finished".
        notes: `dim`, `old_model`, measurements, and what an engine needs.
    """

    model: str
    new_model: str
    checksum: str
    state: str
    notes: dict[str, Any]


REVERSIBLE = "the old vectors stay until --finish, and come back by --rollback"
"""What holds of vectors that were switched."""
Whole = Callable[[str, str | None], str | None]
"""Returns the whole text of a row by its id and its stored text."""


def as_stored(_: str, stored: str | None) -> str | None:
    """Return a stored text, which is whole."""
    return stored


class SampledRow(NamedTuple):
    """A row that measures a migration.

    Attributes:
        id: its id.
        text: its text.
        vector: (D,) its vector of the old model.
    """

    id: str
    text: str
    vector: Sequence[float]


def resumed(record: Migration | None, checksum: str, location: str) -> Migration | None:
    """Return the record of the migration to a model; None if it has to begin.

    Args:
        record: what the database records.
        checksum: checksum of the model's tower of documents.
        location: the table or collection, for errors.

    Raises:
        DualencError: a migration to another model is under way.
    """
    if record is None or record.checksum == checksum:
        return record
    if record.state == FINISHED:
        return None
    raise DualencError(
        f"a migration to {record.new_model} is under way",
        fix="resume it with that model, or end it: --finish, or --rollback --discard",
        where=location,
    )


def recorded(record: Migration | None, location: str) -> Migration:
    """Return the record of a migration; raise if there is none."""
    if record is None:
        raise DualencError(
            "no migration is under way",
            fix="migrate first, or name other vectors: --vector",
            where=location,
        )
    return record


def switched(record: Migration | None, location: str) -> Migration:
    """Return the record of a migration that can be finished; raise before its switch."""
    known = recorded(record, location)
    if known.state == FILLING:
        raise DualencError(
            f"the vectors of {known.new_model} are not searched yet",
            fix=f"resume the migration: dualenc migrate … {known.new_model}",
            where=location,
        )
    return known


def reversible(record: Migration | None, location: str) -> Migration:
    """Return the record of a migration that can be rolled back; raise after its end."""
    known = recorded(record, location)
    if known.state == FINISHED:
        raise DualencError(
            "the old vectors are gone", fix="migrate to the old model", where=location
        )
    return known
