"""Change the model of an index: open, sample, measure, embed, and replace the index."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.data import Corpus
from dualenc.encoders import DualEncoder, Tower, load_model
from dualenc.encoders.dual import Kind
from dualenc.errors import DualencError
from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.report_page import check_report_target, write_report
from dualenc.io.files import locked, remove, write_json
from dualenc.io.provenance import META, Provenance
from dualenc.search import Embeddings, Index
from dualenc.search.documents import open_documents
from dualenc.search.embed.encode import Known, embed, tower_checksum
from dualenc.search.engines.filter_recall import RESULT, VECTORS
from dualenc.search.engines.pushed_folder import is_pushed
from dualenc.search.index.build import new_index
from dualenc.search.migration import maps, rollback
from dualenc.search.migration.candidates import NUM_CANDIDATES
from dualenc.search.migration.migration_folder import (
    TO_OLD,
    cache_path,
    read_plan,
    remove_work,
    work_folder,
)
from dualenc.search.migration.stages import SHARES, Migration, order_by_hits, sample_rows
from dualenc.search.migration.stand_in import stand_in
from dualenc.search.migration.vector_cache import VectorCache
from dualenc.search.query_vectors import query_towers
from dualenc.search.searcher import check_encoder, recorded_model
from dualenc.types import Modality, OnError, Side
from dualenc.workflows.measured_sample import MeasuredSample
from dualenc.workflows.migration_documents import (
    Documents,
    check_same_images,
    open_migration_documents,
)
from dualenc.workflows.migration_questions import (
    Questions,
    document_questions,
    judged_questions,
    warm_seconds,
)
from dualenc.workflows.session import (
    open_model,
    recorded_name,
    report_skipped,
    start_processes,
)

logger = logging.getLogger("dualenc.workflows")

MIN_DOCUMENTS = 100
"""Fewer documents are too few to learn maps from, and embedding all of them takes seconds."""
MIGRATED: tuple[tuple[Kind, Modality, Side], ...] = (
    ("query-document", "text", "right"),
    ("image-text", "image", "left"),
    ("image-text", "text", "right"),
    ("image", "image", "right"),
    ("image", "image", "left"),
)
"""What an index that migrates may hold: kind of model, modality and side of the documents."""
TITLE = "Change of model"


@dataclass(frozen=True)
class MigrationReport(MeasuredSample):
    """Measurements of a migration on a sample, and how far it has come.

        report = migrate("index", "new-model", data="my_beir", report_only=True)
        print(report.verdict())

    Attributes:
        index: folder of the index.
        state: "unchanged" if the vectors were of the new model already, "measured" if nothing was
            replaced, "replaced" if all vectors are of the new model now.
        num_vectors: number of vectors in the index.
        model: the new model.
        old_model: the model that built the index.
        facts: settings and counts, as in the report.
        systems: a row per combination of queries and vectors: mean of each metric with its 95%
            interval.
        served: shares of new vectors, from 0 to 1, at which the index is replaced.
        meanwhile: "candidates" if the new model ranks the candidates of the old vectors until all
            documents are embedded; "index" if the index answers, by old or mapped vectors.
        page: path of the report; None if nothing was measured.
    """

    index: str
    state: Literal["unchanged", "measured", "replaced"]
    num_vectors: int
    model: str
    old_model: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    systems: Sequence[Mapping[str, Any]] = ()
    served: Sequence[float] = ()
    meanwhile: measures.Meanwhile = "index"
    page: Path | None = None

    def has_old(self) -> bool:
        """Return True if the old model was measured, False if it is gone."""
        return measures.has_old(self.systems)

    def candidates_verdict(self) -> str:
        """Return how candidates compare with the old and the new model on the sample."""
        return measures.candidates_verdict(self.systems)

    def is_judged(self) -> bool:
        """Return True if the sample was measured with relevance judgements."""
        return measures.is_judged(self.systems)


def migrate(
    index: str,
    new_model: str,
    *,
    data: str | None = None,
    queries: str | None = None,
    report_only: bool = False,
    anyway: bool = False,
    allow_outside: bool = False,
    batch_size: int = 32,
    device: str | None = None,
    progress: bool = True,
    on_report: Callable[[MigrationReport], None] | None = None,
) -> MigrationReport:
    """Start or resume the change of an index to a new model.

    A sample is embedded with the new model and measured; then the documents are embedded, those
    that queries find most often first, and the index is replaced step by step. If the old model is
    gone, queries of the new one, mapped into the old space, take the place of its queries. The same
    call resumes an interrupted migration.

        from dualenc import migrate

        report = migrate("index", "new-model", data="my_beir", report_only=True)
        if not report.is_worse():
            migrate("index", "new-model", data="my_beir")

    Args:
        index: an index of texts or images.
        new_model: model folder or name, of the kind of the old one: query-document, image-text or
            image.
        data: the documents, unless the index keeps their texts; None takes what the index records.
            With a BEIR folder that has test judgements, nDCG@10 is measured.
        queries: table of past queries, which decide the order; None takes those of the BEIR folder,
            or the sample.
        report_only: stop after the measurements.
        anyway: continue even if the new model finds significantly less than the old one; without
            judgements, answer by candidates or mapped vectors.
        allow_outside: whether image paths may lead out of the folder of a table that you trust.
            Searches never read such images, so candidates then do not answer.
        batch_size: number of documents per forward pass.
        device: name of the device, such as "cpu" or "cuda:0"; None takes a GPU if there is one.
        progress: show progress bars.
        on_report: function that gets the report before documents are embedded, which may take
            hours.

    Returns:
        The measurements and the state of the index.

    Raises:
        DualencError: the index cannot migrate, its documents are missing or have changed, another
            migration is under way, or the new model finds significantly less.
    """
    _check_single_process()
    # The work folder stays locked for hours; the index itself only while it is read or replaced.
    with locked(work_folder(index), wait=False, option="INDEX"):
        opened = _open(index, new_model, data, queries, allow_outside, device)
        if isinstance(opened, MigrationReport):
            return opened
        steps = _Steps(*opened, batch_size, progress)
        report = _report(index, steps, anyway, may_search_documents=not allow_outside)
        # Before hours of embedding, so that a user can stop them by what is measured.
        if on_report is not None:
            on_report(report)
        if report_only:
            return report
        if not anyway:
            measures.check_not_worse(report.systems, new_model)
        logger.info(
            "until the last replacement the old index comes back by: dualenc migrate %s --rollback",
            index,
        )
        if report.meanwhile == "candidates":
            corpus = steps.documents.corpus
            texts = (corpus[row] for row in range(len(corpus)))
            steps.migration.serve_candidates(texts if corpus.modality == "text" else None)
        steps.embed_all(report.served)
    return replace(report, state="replaced")


def roll_back(index: str, discard: bool = False) -> rollback.RolledBack:
    """Put the old index back and end its migration.

        from dualenc.workflows.migrate_model import roll_back

        print(roll_back("index").kept)

    Args:
        index: folder of the index.
        discard: remove the vectors of the new model too; otherwise another migration resumes with
            them.

    Returns:
        What was replaced, kept and removed.

    Raises:
        DualencError: no migration is under way.
    """
    _check_single_process()
    with locked(work_folder(index), wait=False, option="INDEX"):
        return rollback.roll_back(index, discard)


def _check_single_process() -> None:
    """Raise if `accelerate launch` has started several processes."""
    if distributed.launched() > 1:
        raise DualencError("dualenc migrate runs in one process", fix="start it without accelerate")


class _Opened(NamedTuple):
    """A migration that can start: its work folder, the documents and queries, and the new model."""

    migration: Migration
    documents: Documents
    encoder: DualEncoder


def _open(
    folder: str,
    name: str,
    data: str | None,
    queries: str | None,
    allow_outside: bool,
    device: str | None,
) -> _Opened | MigrationReport:
    """Open and check everything; return a report if there is nothing to migrate."""
    if is_pushed(folder):
        raise DualencError(
            "is in a database",
            fix="call migrate_table, or migrate_collection for Qdrant, of dualenc.workflows",
            where=folder,
        )
    # Hold the lock while the index is read and the migration recorded: a change comes either
    # before, or after and is refused.
    with locked(folder, wait=False, option="INDEX"):
        index = Index.open(folder)
        kind, side = _kind_and_side(folder, index.provenance)
        processor = start_processes(device)
        encoder = open_model(name, (kind,), processor)
        checksum = tower_checksum(encoder.tower(side))
        if index.provenance.model_checksum == checksum and not index.provenance.mapped:
            _clean_up(folder, checksum)
            model = recorded_name(name)
            return MigrationReport(folder, "unchanged", len(index), model, model)
        _check_can_migrate(folder, index, encoder.dim)
        takes = query_towers(encoder, side)
        documents = open_migration_documents(
            folder, index, data, queries, takes, allow_outside=allow_outside
        )
        notes = {
            "model": recorded_name(name),
            "model_checksum": checksum,
            "side": side,
            "kind": encoder.kind,
        }
        modality = documents.corpus.modality
        # Other documents or queries must not resume this migration.
        past = "" if documents.past is None else documents.past.identity()
        inputs = {f"{modality}s": documents.corpus.identity(), "queries": past}
        if modality == "image":
            # Searches by candidates read the images, too, and the next migration.
            notes["data"] = recorded_name(data or index.provenance.data or "")
            # Those of an interrupted migration were compared when it began.
            is_new = (read_plan(folder) or {}).get("images") != inputs["images"]
            if is_new and not index.provenance.mapped:
                check_same_images(folder, index, documents.corpus, processor)
        # Recorded last, when nothing more can be refused.
        migration = Migration(folder, notes, inputs)
    return _Opened(migration, documents, encoder)


def _kind_and_side(folder: str, about: Provenance) -> tuple[Kind, Side]:
    """Return kind and side of the model of an index; raise unless it migrates."""
    if about.modality is None:
        raise DualencError(
            "does not say which model made it",
            fix="build it from what `dualenc embed` writes",
            where=folder,
        )
    recorded = (about.kind, about.modality, about.side)
    # An entry that is not recorded is taken for granted.
    fitting = [
        each
        for each in MIGRATED
        if all(own in (None, entry) for own, entry in zip(recorded, each, strict=True))
    ]
    output = about.output or "embedding"
    if not fitting or output != "embedding":
        what = ", ".join(entry for entry in (*recorded, output) if entry)
        raise DualencError(
            f"holds {what}",
            fix="only documents of a query-document model, or images or texts of an image-text or "
            "image model, migrate",
            where=folder,
        )
    about.check(Path(folder) / META, ["factory"], "build the index again")
    kind, _, side = fitting[0]
    return kind, side


def _clean_up(folder: str, checksum: str) -> None:
    """Remove the rest of a migration to the model that the index has; keep any other."""
    try:
        plan = read_plan(folder)
    except DualencError:  # not a work folder of dualenc
        return
    if plan is None or "ended" in plan or plan.get("model") == checksum:
        remove_work(folder)
        return
    logger.info(
        "%s: a migration to %s stays; end it: dualenc migrate %s --rollback",
        work_folder(folder),
        plan.get("name", "another model"),
        folder,
    )


def _check_can_migrate(folder: str, index: Index, dim: int) -> None:
    """Raise unless an index can get vectors of a new dimension, and its report be written."""
    plan = read_plan(folder)
    check_report_target(_page(work_folder(folder)), "move it away")
    about = index.provenance
    # Mapped vectors can only be replaced with the documents and maps of their work folder.
    if about.mapped and (plan is None or "ended" in plan):
        raise DualencError(
            f"{about.mapped:,} vectors are mapped, and its work folder is gone",
            fix="rebuild it",
            where=folder,
        )
    if len(index) < MIN_DOCUMENTS:
        raise DualencError(
            f"{len(index)} documents are too few to learn maps from",
            fix="build the index again with the new model",
            where=folder,
        )
    # Raises if the kind of index does not fit the new dimension.
    new_index(dim, about.factory or "", about.metric, len(index))


def _page(work: Path) -> Path:
    """Return the path of the report beside a work folder, which is removed at the end."""
    return Path(f"{work}.html")


def _report(
    index: str, steps: _Steps, anyway: bool, *, may_search_documents: bool
) -> MigrationReport:
    """Measure, unless an interrupted run has, and write the page."""
    migration = steps.migration
    measured = migration.report
    if measured is None:
        measured = steps.measure()
    measures.check_report(measured, migration.work / "report.json")
    served = measured["served"]
    meanwhile = measured.get("meanwhile", "index")
    systems = measured["systems"]
    if measures.has_old(systems) and not measures.is_judged(systems):
        # Without judgements the old index stays, unless the user takes the risk.
        if not anyway:
            meanwhile = "index"
        elif meanwhile == "index":
            served = list(SHARES)
    if meanwhile == "candidates" and not may_search_documents:
        logger.warning(
            "%s: searches read no images outside of their table, so candidates do not answer",
            index,
        )
        meanwhile = "index"
    report = MigrationReport(
        index=index,
        state="measured",
        num_vectors=len(migration.old),
        model=migration.notes["model"],
        old_model=migration.old.provenance.model or "the old model",
        facts=measured["facts"],
        systems=systems,
        served=served,
        meanwhile=meanwhile,
        page=_page(migration.work),
    )
    write_report(_page(migration.work), TITLE, facts=report.facts, tables=[report.table()])
    return report


@dataclass(eq=False)
class _Steps:
    """Embedding and measuring with the new model."""

    migration: Migration
    documents: Documents
    encoder: DualEncoder
    batch_size: int
    progress: bool

    def __post_init__(self) -> None:
        work = self.migration.work
        self.side: Side = self.migration.notes["side"]
        self.query_towers = query_towers(self.encoder, self.side)
        path = cache_path(self.migration.folder, self.migration.plan)
        self.cache = VectorCache(path, self.encoder.dim)
        self.old = open_documents(work / "old", work)
        judged: set[str] = set()
        if self.documents.judged is not None:
            judged.update(*self.documents.judged[1].values())
        # Judged documents must be in the sample, or nDCG could not be measured on it.
        is_judged = [name in judged for name in self.documents.corpus.ids]
        self.rows = sample_rows(len(is_judged), np.flatnonzero(is_judged))
        started = time.perf_counter()
        self.is_resumed = (work / "sample").exists()
        self.sample = self._embed_documents(self.rows, "sample", "embed the sample")
        self.seconds = round(time.perf_counter() - started, 3)

    def _embed(
        self,
        tower: Tower,
        corpus: Corpus,
        out: Path | None,
        bar: str,
        dim: int | None = None,
        known: Known | None = None,
        on_error: OnError = "raise",
    ) -> Embeddings:
        """Embed with a progress bar of this name."""
        return embed(
            tower,
            corpus,
            out,
            batch_size=self.batch_size,
            dim=dim,
            on_error=on_error,
            progress=bar if self.progress else False,
            known=known,
        )

    def _embed_documents(self, rows: np.ndarray, name: str, bar: str) -> Embeddings:
        """Embed documents (n,) of the index into a folder of the work folder."""
        corpus = self.documents.corpus.take(rows)

        def known(places: Sequence[int]) -> dict[int, np.ndarray]:
            """Return the vectors that searches have embedded as candidates."""
            vectors = self.cache.get([corpus.ids[place] for place in places])
            return {
                place: vectors[corpus.ids[place]]
                for place in places
                if corpus.ids[place] in vectors
            }

        out = self.migration.work / name
        # Skipping is not an option: the index needs a vector of each document.
        return self._embed(self.encoder.tower(self.side), corpus, out, bar, known=known)

    def _embed_queries(
        self,
        towers: Mapping[Modality, Tower],
        queries: Corpus,
        dim: int | None = None,
        on_error: OnError = "raise",
    ) -> np.ndarray:
        """Return the vectors (Q, D) of queries."""
        options: dict[str, Any] = {"dim": dim, "on_error": on_error}
        made = self._embed(towers[queries.modality], queries, None, "embed queries", **options)
        report_skipped(made)
        return np.asarray(made.vectors)

    def measure(self) -> dict[str, Any]:
        """Choose and learn the map, order the documents and measure; write all of it."""
        old = np.asarray(self.old.vectors[self.rows], np.float32)
        new = np.asarray(self.sample.vectors[:], np.float32)
        old_towers = self._old_towers()
        finding = self._stand_in(old, new) if old_towers is None else old_towers
        # Documents stand in for queries if there are none.
        past = old
        if self.documents.past is not None:
            past = self._embed_queries(finding, self.documents.past, self.old.dim, "skip")
        # Documents that queries find often come first, so that quality recovers early.
        order = order_by_hits(self.migration.old, past)
        self.migration.save_order(order)
        # Each document is mapped by a map that was learned without it, as those outside the sample.
        fold = maps.folds(len(old))
        questions = self._questions(old, new, fold, finding, old_is_gone=old_towers is None)
        mapped = {kind: maps.out_of_fold(old, new, fold, kind) for kind in maps.KINDS}
        kind = questions.best_map(new, mapped)
        maps.fit(old, new, kind).save(self.migration.work / "map.safetensors")
        places = np.argsort(order)[self.rows]
        sample = measures.Sample(old, new, mapped[kind], places, len(order))
        scores = questions.all_scores(sample, kind)
        facts = self._facts(len(order), len(questions.new), questions.truth, len(past), kind)
        facts |= self._candidate_facts(finding, questions)
        systems = measures.summarize(scores)
        meanwhile = measures.best_meanwhile(scores)
        # Without the old model the old index cannot answer, so mapped vectors take its place.
        served = list(SHARES) if old_towers is None else measures.served_shares(systems)
        served = [1.0] if meanwhile == "candidates" else served
        report = {"facts": facts, "systems": systems, "served": served, "meanwhile": meanwhile}
        # Last: a resumed run takes the report as a sign that all of the above is written.
        write_json(self.migration.work / "report.json", report)
        return report

    def _questions(
        self,
        old: np.ndarray,
        new: np.ndarray,
        fold: np.ndarray,
        finding: Mapping[Modality, Tower],
        *,
        old_is_gone: bool,
    ) -> Questions:
        """Return the judged queries, or documents if there are none."""
        if self.documents.judged is None:
            sampled = self.documents.corpus.take(self.rows)
            return document_questions(old, new, fold, sampled, old_is_gone=old_is_gone)
        queries, qrels = self.documents.judged
        old_queries = self._embed_queries(finding, queries, self.old.dim)
        new_queries = self._embed_queries(self.query_towers, queries)
        found = (old_queries, new_queries, self.migration.old, self.rows)
        return judged_questions(queries, qrels, *found, old_is_gone=old_is_gone)

    def _facts(
        self, num_documents: int, num_queries: int, truth: str, num_past: int, kind: maps.MapKind
    ) -> dict[str, Any]:
        """Return the settings and counts that the report shows."""
        num_sampled = len(self.rows)
        facts = {
            "old model": self.migration.old.provenance.model,
            "new model": self.migration.notes["model"],
            "kind of index": self.migration.old.provenance.factory,
            "documents": num_documents,
            "sample": num_sampled,
            "queries": num_queries,
            "relevant are": truth,
            "queries that decide the order": num_past,
            "map": kind,
        }
        # After a resumption the time of the sample is unknown.
        if not self.is_resumed:
            facts["seconds for the sample"] = self.seconds
            rest = self.seconds * (num_documents / num_sampled - 1)
            facts["seconds for the others, estimated"] = rest
        return facts

    def _candidate_facts(
        self, finding: Mapping[Modality, Tower], questions: Questions
    ) -> dict[str, Any]:
        """Return where candidates come from, and the time of a query by candidates."""
        index, num_candidates = self.migration.old, min(NUM_CANDIDATES, len(self.migration.old))
        vectors = np.asarray(self.sample.vectors[:num_candidates], np.float32)
        modality = questions.few.modality
        towers = (finding[modality], self.query_towers[modality])
        warm = warm_seconds(questions.few, *towers, index, vectors)
        facts: dict[str, Any] = {"candidates are": questions.candidates_from}
        # After a resumption the time of the sample is unknown.
        if not self.is_resumed:
            cold = warm + num_candidates * self.seconds / len(self.rows)
            facts["seconds per query by candidates, cold"] = round(cold, 3)
        return facts | {"seconds per query by candidates, warm": round(warm, 4)}

    def _stand_in(self, old: np.ndarray, new: np.ndarray) -> Mapping[Modality, Tower]:
        """Return queries of the new model mapped into the old space, and keep their map."""
        to_old = maps.fit(new, old, "rescaled")
        to_old.save(self.migration.work / TO_OLD)
        return query_towers(stand_in(self.encoder, to_old), self.side)

    def _old_towers(self) -> Mapping[Modality, Tower] | None:
        """Return the query towers of the old model; None if it is gone or has changed."""
        index = self.migration.old
        device = next(self.encoder.parameters()).device
        try:
            encoder = load_model(recorded_model(index.provenance, self.migration.folder), device)
            check_encoder(encoder, index.provenance, index.dim, self.migration.folder)
        except DualencError as error:
            logger.info(
                "queries of the new model, mapped, find documents in the old vectors; the old "
                "model is of no use: %s",
                error,
            )
            return None
        # An interrupted run may have been without it.
        remove(self.migration.work / TO_OLD)
        return query_towers(encoder, self.side)

    def embed_all(self, served: Sequence[float]) -> None:
        """Embed the documents share by share; replace the index at each share in `served`."""
        # The sample is reused, never embedded again.
        embedded = [self.sample]
        for stage in self.migration.stages(self.rows):
            if len(stage.rows):
                name = f"embeddings-{stage.stop}"
                bar = f"embed up to {stage.share:.0%}"
                embedded.append(self._embed_documents(stage.rows, name, bar))
            # A resumed run must not replace the index by one with fewer new vectors.
            if stage.share in served and self.migration.is_ahead(stage.stop):
                if stage.share == 1:
                    self._check_unchanged()
                self._report_dropped()
                self.migration.swap(self.old, embedded, stage.stop)
                logger.info(
                    "%s of %s vectors are of the new model → %s",
                    f"{stage.stop:,}",
                    f"{len(self.old):,}",
                    self.migration.folder,
                )
        # Last: until here a rollback needs the old index.
        remove_work(self.migration.folder)

    def _check_unchanged(self) -> None:
        """Raise if images have changed since the migration began; searches may have read them."""
        corpus = self.documents.corpus
        if corpus.modality == "image" and corpus.identity() != self.migration.plan["images"]:
            raise DualencError(
                "images have changed since the migration began, so vectors may be of others",
                fix="restore them and repeat the command, or end it: "
                f"dualenc migrate {self.migration.folder} --rollback --discard",
                where=self.migration.notes["data"],
            )

    def _report_dropped(self) -> None:
        """Log which measurements of the index are of vectors that are about to be replaced."""
        folder = self.migration.folder
        dropped = " and ".join(name for name in (RESULT, VECTORS) if (folder / name).is_file())
        if dropped:
            logger.info(
                "%s are of the old vectors and are dropped, the settings stay; measure again: "
                "dualenc evaluate engine %s --filters FILE",
                dropped,
                folder,
            )
