"""What a migration of a table or collection has measured and changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dualenc.search.engines.migration_record import FILLING, UNKNOWN, Migration
from dualenc.workflows.measured_sample import MeasuredSample
from dualenc.workflows.session import recorded_name


@dataclass(frozen=True)
class TableReport(MeasuredSample):
    """Measurements of a table's migration on a sample, and how far it has come.

        report = migrate_table("postgresql://me@localhost/db", "docs", "new-model")
        print(report.state, report.missing)

    Attributes:
        location: server with table or collection, without credentials.
        state: "measured" if nothing was changed, "switched" if searches find the new vectors and
            the old ones are kept, "finished" if these are gone.
        model: the new model.
        old_model: the model of the old vectors.
        facts: columns and counts.
        systems: a row per model: mean of each metric with its 95% interval.
        missing: number of rows without a vector: NULL or blank texts, and rows outside of `where`.
        place: where clients find the new vectors, if not where the old ones were.
    """

    location: str
    state: Literal["measured", "switched", "finished"]
    model: str
    old_model: str
    facts: dict[str, Any] = field(default_factory=dict)
    systems: Sequence[dict[str, Any]] = ()
    missing: int = 0
    place: str = ""


@dataclass(frozen=True)
class TableRolledBack:
    """What a rollback has changed.

    Attributes:
        location: server with table or collection, without credentials.
        model: the model that was to replace the old one.
        switched: whether searches found its vectors, and find the old ones again.
        discarded: whether its vectors were dropped.
        missing: number of rows without an old vector, if `switched`.
    """

    location: str
    model: str
    switched: bool
    discarded: bool
    missing: int


def report_of(
    location: str, record: Migration, *, state: str = "", missing: int = 0, place: str = ""
) -> TableReport:
    """Return the report of a recorded migration.

    Args:
        location: the table or collection, without credentials.
        record: the record.
        state: state to report in place of the recorded one.
        missing: number of rows without a vector.
        place: where clients find the new vectors, if not where the old ones were.
    """
    return TableReport(
        location,
        state or record.state,  # type: ignore[arg-type]
        record.new_model,
        record.notes.get("old_model", UNKNOWN),
        record.notes.get("facts", {}),
        record.notes.get("systems", ()),
        missing,
        place,
    )


def new_record(name: str, checksum: str, old: str | None, notes: dict[str, Any]) -> Migration:
    """Return the record of a migration that begins.

    Args:
        name: name of the new model.
        checksum: checksum of its tower of documents.
        old: name of the old model; None if it is unknown.
        notes: further notes.
    """
    old_name = recorded_name(old) if old else UNKNOWN
    return Migration(old_name, name, checksum, FILLING, {"old_model": old_name, **notes})
