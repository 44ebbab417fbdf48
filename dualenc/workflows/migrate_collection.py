"""Change the model of a collection of Qdrant: measure, fill new vectors, and switch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from tqdm.auto import tqdm

from dualenc.data.readers.beir import has_test_judgements
from dualenc.data.store.identity import digest_of
from dualenc.encoders import DualEncoder
from dualenc.errors import DualencError
from dualenc.evaluation import migration_measures as measures
from dualenc.io.files import locked
from dualenc.io.provenance import Provenance
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.engines.column_names import TableColumnNames
from dualenc.search.engines.migration_record import (
    FILLING,
    FINISHED,
    SWITCHED,
    UNKNOWN,
    Migration,
    as_stored,
    resumed,
    reversible,
    switched,
)
from dualenc.search.engines.pushed_folder import MIGRATED, migrated_entries, read_pushed
from dualenc.search.engines.qdrant import QdrantIndex
from dualenc.search.engines.qdrant_collection import (
    NAMED_VERSION,
    QdrantCollection,
    opened_collection,
)
from dualenc.search.engines.qdrant_migration import PendingPoint, PointMigration
from dualenc.search.engines.qdrant_named_vector import NamedVectorMigration
from dualenc.search.engines.qdrant_owner import Owner, only_migration
from dualenc.search.engines.qdrant_sample import QdrantSample
from dualenc.search.engines.qdrant_second_collection import SecondCollectionMigration
from dualenc.workflows.measure_table import TableSample, most_retrieved
from dualenc.workflows.row_texts import RowTexts
from dualenc.workflows.session import open_model, recorded_name, short_name, start_processes
from dualenc.workflows.table_report import TableReport, TableRolledBack, new_record, report_of
from dualenc.workflows.text_vectors import RowVectors

logger = logging.getLogger("dualenc.workflows")

POINTS_AT_ONCE = 4
"""Points of a request, in batches of the model."""


def migrate_collection(
    target: str,
    collection: str | None,
    new_model: str,
    *,
    columns: TableColumnNames | None = None,
    old_model: str | None = None,
    data: str | None = None,
    queries: str | None = None,
    report_only: bool = False,
    anyway: bool = False,
    batch_size: int = 32,
    device: str | None = None,
    progress: bool = True,
    on_report: Callable[[TableReport], None] | None = None,
) -> TableReport:
    """Start or resume the change of a collection's vectors to a new model, while clients use it.

    A collection with named vectors gets another one, if the server is 1.18 or later. Otherwise a
    second collection is filled, and the aliases of the first are switched to it. Same as
    `dualenc migrate http://…`.

        report = migrate_collection("http://localhost:6333", "docs", "new-model")
        finish_collection("http://localhost:6333", "docs")

    Args:
        target: URL of a server, whose key is in the environment variable QDRANT_API_KEY, or the
            folder that `dualenc push` wrote.
        collection: name or alias of the collection; None for a folder, which records it.
        new_model: model folder or name, of kind query-document.
        columns: names of the vectors and of the fields of texts and ids, where there is a choice.
        old_model: model of the old vectors, to measure with judged queries and to order by past
            queries.
        data: BEIR folder with test judgements of these points, to measure nDCG@10 with; for a
            folder, the data that was embedded.
        queries: table of past queries: points that they find most often are filled first.
        report_only: stop after the measurements.
        anyway: continue even if the new model finds significantly less than the old one.
        batch_size: texts per forward pass.
        device: name of the device; None takes a GPU if there is one.
        progress: show a progress bar.
        on_report: function that gets the report before points are filled, which may take hours.

    Returns:
        The measurements and the state of the collection.

    Raises:
        DualencError: the collection cannot migrate, another migration is under way, or the new
            model finds significantly less.
    """
    with _opened(target, collection, is_read=report_only) as opened:
        encoder = open_model(new_model, ("query-document",), start_processes(device))
        checksum = tower_checksum(encoder.right)
        record = resumed(opened.record, checksum, opened.location)
        texts = opened.texts(data)
        old = old_model or opened.old_model()
        if record is None:
            judged = data
            # The data of a pushed folder are its whole texts, which need not be judged.
            if opened.folder is not None and not (data and has_test_judgements(data)):
                judged = None
            notes = opened.plan(encoder, columns or TableColumnNames(), recorded_name(new_model))
            rows = QdrantSample(opened.migration(notes, texts), opened.parameters(notes))
            sample = TableSample(rows, encoder, old, judged, batch_size, progress)
            record = _measured(opened, sample, texts, notes, new_model)
        elif record.state == FINISHED or (record.state == SWITCHED and report_only):
            return opened.report(record)
        _check_names(record, columns or TableColumnNames(), opened.location)
        migration = opened.migration(record.notes, texts)
        report = report_of(opened.location, record, state="measured")
        if record.state == FILLING:
            if on_report is not None:
                on_report(report)
            if report_only:
                return report
            if not anyway:
                measures.check_not_worse(report.systems, new_model)
        filling = _Filling(opened, migration, encoder, batch_size, progress)
        first: Sequence[Any] = ()
        if queries is not None and record.state == FILLING:
            rows = QdrantSample(migration, opened.parameters(record.notes))
            names = most_retrieved(rows, encoder, old, queries, batch_size, progress)
            first = [rows.point_of[name] for name in names]
        record = filling.run(record, first)
        if texts is not None:
            texts.report(opened.location)
        return opened.report(record)


def _measured(
    opened: _Opened,
    sample: TableSample,
    texts: RowTexts | None,
    notes: dict[str, Any],
    new_model: str,
) -> Migration:
    """Measure a sample, and return the record of a migration that begins."""
    measured = sample.measure()
    if texts is not None:
        texts.check(opened.location)
    checksum = tower_checksum(sample.encoder.right)
    old = sample.old_model
    return new_record(recorded_name(new_model), checksum, old, {**notes, **measured})


def _check_names(record: Migration, given: TableColumnNames, location: str) -> None:
    """Raise if fields or vectors are named that differ from those of the migration under way."""
    names = {"--vector": ("old", given.vector), "--text": ("text", given.text)}
    names["--id"] = ("id", given.id)
    for option, (note, name) in names.items():
        if name is not None and name != record.notes.get(note):
            raise DualencError(
                f"the migration under way has {option} {record.notes.get(note)!r}",
                fix="end it first: --finish, or --rollback --discard",
                where=location,
            )


def finish_collection(target: str, collection: str | None) -> TableReport:
    """Remove the old vectors of a collection after the switch; no rollback is left.

    Args:
        target: URL of a server, or the folder that `dualenc push` wrote.
        collection: name or alias of the collection; None for a folder.

    Returns:
        The state of the collection.

    Raises:
        DualencError: the collection has not been switched.
    """
    with _opened(target, collection) as opened:
        record = switched(opened.record, opened.location)
        opened.migration(record.notes).finish(record)
        return opened.report(record._replace(state=FINISHED))


def roll_back_collection(
    target: str, collection: str | None, *, discard: bool = False
) -> TableRolledBack:
    """Let searches find the old vectors of a collection again.

    Args:
        target: URL of a server, or the folder that `dualenc push` wrote.
        collection: name or alias of the collection; None for a folder.
        discard: remove the new vectors; otherwise another migration resumes with them.

    Returns:
        What was changed.

    Raises:
        DualencError: no migration is under way, or its old vectors are gone.
    """
    with _opened(target, collection) as opened:
        record = reversible(opened.record, opened.location)
        migration = opened.migration(record.notes)
        is_switched = record.state == SWITCHED
        missing = 0
        if is_switched:
            migration.switch_back(record)
            missing = migration.count_missing(record._replace(state=FILLING))
        # Also what a killed rollback has left.
        opened.describe(record, "old_entries")
        if discard:
            migration.discard()
        return TableRolledBack(opened.location, record.new_model, is_switched, discard, missing)


class _Opened:
    """A collection that is owned, its recorded migration, and the folder that records it."""

    def __init__(self, collection: QdrantCollection, owner: Owner, folder: str | None) -> None:
        self.collection = collection
        self.owner = owner
        self.folder = folder
        self.location = collection.location
        self.record = collection.record()
        if folder is None and "dualenc" in collection.metadata():
            raise DualencError(
                "was filled by `dualenc push`, which cuts texts",
                fix="name the folder that it wrote in place of the URL",
                where=self.location,
            )

    def texts(self, data: str | None) -> RowTexts | None:
        """Return the whole texts of a pushed collection, which stores their beginnings."""
        if self.folder is None:
            return None
        return RowTexts.open(self.folder, read_pushed(self.folder), data)

    def old_model(self) -> str | None:
        """Return the model of the old vectors, if it is known."""
        if self.record is not None and self.record.model != UNKNOWN:
            return self.record.model
        return read_pushed(self.folder).model if self.folder is not None else None

    def plan(self, encoder: DualEncoder, columns: TableColumnNames, model: str) -> dict[str, Any]:
        """Return the notes of a migration that begins: names of collections, vectors and fields."""
        collection = self.collection
        fields = columns
        if self.folder is not None:
            fields = TableColumnNames("id", "text", "")
        vector, _ = collection.find_vector(fields.vector)
        text = collection.find_text(fields.text, fields.id)
        dim, checksum = encoder.right.dim, tower_checksum(encoder.right)
        notes: dict[str, Any] = {"dim": dim, "source": collection.name, "old": vector, "text": text}
        notes |= {"id": fields.id, "aliases": collection.aliases()}
        shown = vector or "(unnamed)"
        logger.info("%s: text %s, vector %s", self.location, text, shown)
        if vector and collection.version >= NAMED_VERSION:
            beginning = re.sub(r"[^A-Za-z0-9_.-]+", "-", short_name(model))[:60].strip("-.")
            name = f"{beginning}-{checksum[:8]}"
            return notes | {"target": collection.name, "new": name}
        notes |= {"new": vector}
        if self.folder is None:
            return notes | {"target": f"{collection.given_name[:200]}-{checksum[:12]}"}
        return notes | self._pushed(read_pushed(self.folder), encoder, model)

    def _pushed(self, known: Provenance, encoder: DualEncoder, model: str) -> dict[str, Any]:
        """Return the notes for a pushed collection: what its folder says before and afterwards."""
        is_text = known.side in (None, "right") and known.modality in (None, "text")
        if not is_text or not self.collection.aliases():
            raise DualencError(
                "its vectors are not of documents" if not is_text else "its name is no alias",
                fix="embed with the new model, and push with --replace",
                where=self.location,
            )
        checksum = tower_checksum(encoder.right)
        fingerprint = digest_of(known.fingerprint, checksum)
        entries = migrated_entries(model, checksum, encoder.right.dim, fingerprint)
        changed = known.without(MIGRATED).updated(**entries, settings={})
        # The name that a push of these embeddings would use, which removes abandoned ones.
        name = f"{self.collection.given_name}-{fingerprint[:12]}"
        return {
            "target": name,
            "metadata": {"dualenc": fingerprint},
            "old_entries": known.entries(),
            "new_entries": changed.entries(),
        }

    def parameters(self, notes: dict[str, Any]) -> Any:
        """Return the parameters of the old vectors."""
        return self.collection.find_vector(notes["old"])[1]

    def migration(self, notes: dict[str, Any], texts: RowTexts | None = None) -> PointMigration:
        """Return the planned or recorded migration."""
        whole = as_stored if texts is None else texts.whole
        is_named = notes["source"] == notes["target"]
        kind = NamedVectorMigration if is_named else SecondCollectionMigration
        return kind(self.collection, self.owner, notes, whole)

    def describe(self, record: Migration, entries: str) -> None:
        """Let the folder describe the vectors that searches find, as the notes have them."""
        if self.folder is None:
            return
        current = read_pushed(self.folder)
        known = Provenance.from_entries(record.notes[entries])
        # The key is sent to the server that the folder names, whatever a server records.
        known = known.updated(target=current.target, collection=current.collection)
        if entries == "new_entries":
            # Clients may have added and deleted points since the push.
            known = known.updated(count=self.collection.client.count(record.notes["target"]).count)
        if current.fingerprint != known.fingerprint:
            with closing(QdrantIndex(known)) as engine:
                engine.save(self.folder)

    def report(self, record: Migration) -> TableReport:
        """Return the report of a migration that was switched."""
        missing = self.migration(record.notes).count_missing(record)
        notes = record.notes
        places = [f"vector {notes['new']!r}"] if notes["new"] != notes["old"] else []
        # Whoever searches by the alias finds the second collection.
        given = self.collection.given_name
        if given == notes["source"] != notes["target"]:
            places.append(f"collection {notes['target']!r}")
        place = " and ".join(places)
        return report_of(self.location, record, missing=missing, place=place)


@contextmanager
def _opened(target: str, collection: str | None, *, is_read: bool = False) -> Iterator[_Opened]:
    """Connect, and own the migration of the collection, unless it is only read."""
    with ExitStack() as stack:
        folder = target if collection is None else None
        if collection is None:
            stack.enter_context(locked(target, wait=False))
            known = read_pushed(target)
            target, collection = known.target, known.collection
        found = stack.enter_context(opened_collection(target, collection))
        owner = Owner(found) if is_read else stack.enter_context(only_migration(found))
        yield _Opened(found, owner, folder)


class _Filling:
    """The steps that give a collection its new vectors."""

    def __init__(
        self,
        opened: _Opened,
        migration: PointMigration,
        encoder: DualEncoder,
        batch_size: int,
        progress: bool,
    ) -> None:
        self.opened = opened
        self.migration = migration
        self.size = POINTS_AT_ONCE * batch_size
        self.progress = progress
        self.vectors = RowVectors(encoder.right, batch_size)

    def run(self, record: Migration, first: Sequence[Any]) -> Migration:
        """Fill and switch; each step continues what a killed run has left.

        Args:
            record: the record of the migration.
            first: ids of points to fill first.
        """
        migration = self.migration
        total = migration.client.count(migration.source).count
        with tqdm(total=total, desc="migrate", unit=" points", disable=not self.progress) as bar:
            if record.state == FILLING:
                migration.start(record)
                self._pass(bar, first)
                migration.repeat(lambda: self._pass(bar))
                if not migration.wait_for_index():
                    logger.warning("%s: the index is not built yet", self.opened.location)
                # Clients have written while the index was built.
                migration.repeat(lambda: self._pass(bar))
            migration.switch(record)
            self.opened.describe(record, "new_entries")
            if not migration.settle(lambda: self._pass(bar)):
                logger.warning(
                    "%s: clients still change texts without their vectors; run it again",
                    self.opened.location,
                )
        self.vectors.report()
        return record._replace(state=SWITCHED, model=record.new_model)

    def _pass(self, bar: tqdm, ids: Sequence[Any] | None = None) -> int:
        """Fill the pending points; return how many there were."""
        found = 0
        for rows in self.migration.pending(self.size, ids):
            self._store(rows)
            found += len(rows)
            bar.update(len(rows))
        return found + (self.migration.remove_deleted() if ids is None else 0)

    def _store(self, rows: Sequence[PendingPoint]) -> None:
        vectors = self.vectors.embed([row.name for row in rows], [row.text for row in rows])
        self.migration.store(rows, vectors)
