"""A folder that records a table of PostgreSQL, while `dualenc migrate` changes its model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dualenc.data.store.identity import digest_of
from dualenc.errors import DualencError
from dualenc.io.files import remove
from dualenc.search.engines.column_names import TableColumnNames
from dualenc.search.engines.engine import State
from dualenc.search.engines.factory import is_postgres
from dualenc.search.engines.filter_recall import VECTORS
from dualenc.search.engines.migration_record import FILLING, Migration
from dualenc.search.engines.postgres import PostgresIndex
from dualenc.search.engines.postgres_names import written_name
from dualenc.search.engines.pushed_folder import MIGRATED, RESULT, migrated_entries, read_pushed
from dualenc.search.searcher import recorded_model
from dualenc.types import StrPath

logger = logging.getLogger("dualenc.workflows")


class TableFolder:
    """The folder of a table, which names the model of the moment.

        folder = TableFolder("emb-engine")
        folder.follow(record)

    Args:
        folder: folder that `dualenc push` or `dualenc index` wrote for PostgreSQL.

    Raises:
        DualencError: the folder is corrupt, of Qdrant, or not of documents of a text model.
    """

    def __init__(self, folder: StrPath) -> None:
        self.path = Path(folder)
        if not is_postgres(read_pushed(folder).target):
            raise DualencError(
                "only tables of PostgreSQL migrate in place",
                fix="embed with the new model, and push again with --replace",
                where=folder,
            )
        self.recorded = PostgresIndex.read(folder)
        self.is_foreign = bool(self.recorded.names)
        expected = {"modality": "text", "side": "right", "output": "embedding"}
        # An entry that is not recorded is taken for granted.
        actual = {**expected, **self.recorded.only(expected).entries()}
        if actual != expected:
            raise DualencError(
                f"holds {', '.join(map(str, actual.values()))}",
                fix="only documents of a query-document model migrate",
                where=folder,
            )

    @property
    def columns(self) -> TableColumnNames:
        """Names of the columns of the table."""
        names = {"id": "id", "text": "text", "vector": "embedding"}
        return TableColumnNames(**(self.recorded.names or names))

    @property
    def table(self) -> str:
        """Name of the table, as a command takes it."""
        return written_name(self.recorded.schema, self.recorded.collection)

    def old_model(self) -> str | None:
        """Return the model of the stored vectors; None if it is gone."""
        try:
            return recorded_model(self.recorded, self.path)
        except DualencError as error:
            logger.warning("%s; nothing is measured with it", error)
            return None

    def notes(self, checksum: str) -> dict[str, Any]:
        """Return what a migration records, in order to change the folder and to put it back.

        Args:
            checksum: checksum of the new model.
        """
        if self.is_foreign:
            return {}
        old = self.recorded.fingerprint
        return {
            "folder": self.recorded.only(MIGRATED).entries(),
            "old_fingerprint": old,
            "new_fingerprint": digest_of("migrated", old, checksum),
        }

    def follow(self, record: Migration | None, state: State | None) -> None:
        """Let the folder name the model that the table has now.

        A migration that was killed after the switch, or another folder of the same table, is behind
        the table.

        Args:
            record: the migration of the table; None if there is none.
            state: the state of the table.

        Raises:
            DualencError: the table holds other embeddings than the folder says.
        """
        if self.is_foreign:
            # It finds the model of the moment whenever it is opened.
            return
        now = None if state is None else str(state["fingerprint"])
        if record is not None and self.recorded.fingerprint != now:
            fingerprints = [record.notes.get(f"{each}_fingerprint") for each in ("old", "new")]
            if self.recorded.fingerprint in fingerprints and now in fingerprints:
                self._write(record)
        if self.recorded.fingerprint != now:
            raise DualencError(
                f"is gone, or holds other embeddings than {self.path} says",
                fix="name the folder of the last push",
                where=f"{self.recorded.target} {self.table!r}",
            )

    def _write(self, record: Migration) -> None:
        """Write the entries of the old model, or of the new one."""
        entries = record.notes["folder"]
        if record.state != FILLING:
            entries = migrated_entries(
                record.new_model,
                record.checksum,
                record.notes["dim"],
                record.notes["new_fingerprint"],
            )
        # From now on clients may have written rows, too.
        changed = self.recorded.without(MIGRATED).updated(**entries, live=True)
        changed.check(self.path, entries, "run `dualenc push` again")
        # Before the record: after a kill in between, the same command comes here again.
        measured = [name for name in (RESULT, VECTORS) if (self.path / name).is_file()]
        for name in measured:
            remove(self.path / name)
        if measured:
            logger.info(
                "%s %s of the old vectors and dropped, the settings stay; measure again: "
                "dualenc evaluate engine %s --filters FILE",
                " and ".join(measured),
                "are" if len(measured) > 1 else "is",
                self.path,
            )
        changed.write(self.path)
        self.recorded = changed
