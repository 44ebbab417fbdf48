"""The steps of `dualenc migrate`: open, sample, measure, embed, and replace the index."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.commands.options import SourceOptions
from dualenc.data import Corpus
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.beir import read_judged_queries
from dualenc.data.readers.sources import open_corpus
from dualenc.encoders import DualEncoder, Tower, load_model
from dualenc.errors import DualencError
from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.metrics import Qrels
from dualenc.evaluation.report_page import Table, check_report_target, print_table, write_report
from dualenc.io.files import locked, write_json
from dualenc.io.reading import check_fields
from dualenc.io.terminal import printable
from dualenc.search import Embeddings, Index
from dualenc.search.documents import open_documents
from dualenc.search.embed.encode import embed, tower_checksum
from dualenc.search.engines.engine import is_pushed
from dualenc.search.engines.filter_recall import RESULT, VECTORS
from dualenc.search.index.build import new_index
from dualenc.search.index.open import rows_in
from dualenc.search.migration import maps
from dualenc.search.migration.migration_folder import read_plan, remove_work, work_folder
from dualenc.search.migration.stages import SHARES, Migration, order_by_hits, sample_rows
from dualenc.search.searcher import check_encoder, recorded_model
from dualenc.search.texts import TextStore, has_texts
from dualenc.workflows.session import open_model, recorded_name, start_processes

MIN_DOCUMENTS = 100
"""Below, maps cannot be learned, and embedding everything takes seconds."""
MAX_JUDGED = 500
"""Queries that the report measures with."""
MAX_QUERIES = 10_000
"""Queries that decide the order."""
MIN_OTHER_QUERIES = 100
"""From this many on, queries that the report measures with do not decide the order, too."""


class Texts(NamedTuple):
    """The documents in the order of the index; judged queries, and queries that decide the order,
    if there are any."""

    corpus: Corpus
    judged: tuple[Corpus, Qrels] | None
    past: Corpus | None


def migrate_index(
    folder: str,
    name: str,
    data: str | None,
    queries: str | None,
    *,
    report_only: bool,
    anyway: bool,
    batch_size: int,
    device: str | None,
) -> None:
    """Start or resume a migration, whose work folder is locked; the arguments are those of the
    command."""
    if is_pushed(folder):
        raise DualencError(
            f"{folder}: an engine does not migrate; migrate the embeddings and push again"
        )
    # Whoever changes the index comes before this, and is refused afterwards.
    with locked(folder, wait=False, option="INDEX"):
        index = Index.open(folder)
        _check_kind(folder, index.meta)
        encoder = open_model(name, ("query-document",), start_processes(device))
        checksum = tower_checksum(encoder.right)
        mapped = index.meta.get("mapped", 0)
        if index.meta.get("model_checksum") == checksum and not mapped:
            _clean_up(folder, checksum)
            print(printable(f"all {len(index):,} vectors are of this model → {folder}"))
            return
        plan = read_plan(folder)
        page = Path(f"{work_folder(folder)}.html")
        check_report_target(page, "move it away")
        if mapped and (plan is None or "ended" in plan):
            problem = f"{mapped:,} vectors are mapped, and its work folder is gone"
            raise DualencError(f"{folder}: {problem}; rebuild it")
        if len(index) < MIN_DOCUMENTS:
            problem = f"{len(index)} documents are too few to learn maps from"
            raise DualencError(f"{folder}: {problem}; build the index again with the new model")
        # The kind of index must fit the new dimension, too.
        new_index(encoder.right.dim, index.meta["factory"], index.meta["metric"], len(index))
        texts = _open_texts(folder, index, data, queries)
        notes = {"model": recorded_name(name), "model_checksum": checksum}
        notes |= {"side": "right", "kind": encoder.kind}
        past = "" if texts.past is None else texts.past.identity()
        migration = Migration(folder, notes, {"texts": texts.corpus.identity(), "queries": past})
    steps = _Steps(migration, texts, encoder, batch_size)
    report = migration.report
    report = steps.measure() if report is None else report
    measures.check_report(report, migration.work / "report.json")
    systems = report["systems"]
    if anyway and not measures.is_judged(systems):
        report["served"] = list(SHARES)
    _show(report, page)
    model = migration.notes["model"]
    if report_only:
        verdict = f"{model}: {measures.verdict(systems)}; nothing is replaced"
        print(printable(f"{verdict}; next: dualenc migrate {folder} {name}"))
        return
    if measures.is_below(systems, measures.NEW) and not anyway:
        remedy = "choose another model, or go on with --anyway"
        raise DualencError(f"{name}: finds significantly less than the old model; {remedy}")
    back = f"dualenc migrate {folder} --rollback"
    print(printable(f"until the last replacement the old index comes back by: {back}"))
    steps.embed_all(report["served"])
    old = migration.old.meta.get("model", "the old model")
    verdict = f"{model} has replaced {old}: {measures.verdict(systems)}"
    rest = "the old index is removed, and no rollback is left"
    print(printable(f'{verdict}; {rest}; next: dualenc search {folder} "…"'))


def _check_kind(folder: str, meta: Mapping[str, Any]) -> None:
    """Refuse an index that is not of a query-document model's documents, or lacks a factory
    string."""
    if "modality" not in meta:
        raise DualencError(
            f"{folder}: does not say which model made it; build it from what `dualenc embed` writes"
        )
    expected = {
        "kind": "query-document",
        "modality": "text",
        "side": "right",
        "output": "embedding",
    }
    about = {name: meta.get(name, value) for name, value in expected.items()}
    if about != expected:
        what = ", ".join(map(str, about.values()))
        raise DualencError(
            f"{folder}: holds {what}; only documents of a query-document model migrate"
        )
    check_fields(meta, {"factory": str}, Path(folder) / "meta.json")


def _clean_up(folder: str, checksum: str) -> None:
    """Remove what is left of the migration to a model that the index has; anything else stays."""
    try:
        plan = read_plan(folder)
    except DualencError:  # somebody else's
        return
    if plan is None or "ended" in plan or plan.get("model") == checksum:
        remove_work(folder)
        return
    stays = f"{work_folder(folder)}: a migration to {plan.get('name', 'another model')} stays"
    print(printable(f"{stays}; end it: dualenc migrate {folder} --rollback"))


class _Steps:
    """The work of a migration with the new model."""

    def __init__(
        self, migration: Migration, texts: Texts, encoder: DualEncoder, batch_size: int
    ) -> None:
        self.migration = migration
        self.texts = texts
        self.encoder = encoder
        self.batch_size = batch_size
        self.old = open_documents(migration.work / "old", migration.work)
        judged: set[str] = set()
        if texts.judged is not None:
            judged.update(*texts.judged[1].values())
        is_judged = [name in judged for name in texts.corpus.ids]
        self.rows = sample_rows(len(is_judged), np.flatnonzero(is_judged))
        started = time.perf_counter()
        self.is_resumed = (migration.work / "sample").exists()
        self.sample = self._embed_documents(self.rows, "sample", "embed the sample")
        self.seconds = round(time.perf_counter() - started, 3)

    def _embed(self, tower: Tower, corpus: Corpus, out: Path | None, **options: Any) -> Embeddings:
        # No text is skipped: the index has a vector of each.
        return embed(tower, corpus, out, batch_size=self.batch_size, on_error="raise", **options)

    def _embed_documents(self, rows: np.ndarray, name: str, bar: str) -> Embeddings:
        corpus = self.texts.corpus.take(rows)
        return self._embed(self.encoder.right, corpus, self.migration.work / name, progress=bar)

    def _embed_queries(self, tower: Tower, queries: Corpus, dim: int | None = None) -> np.ndarray:
        return np.asarray(
            self._embed(tower, queries, None, dim=dim, progress="embed queries").vectors
        )

    def measure(self) -> dict[str, Any]:
        """Learn the map, order the documents, measure, and write all this into the work folder."""
        old = np.asarray(self.old.vectors[self.rows], np.float32)
        new = np.asarray(self.sample.vectors[:], np.float32)
        maps.fit(old, new).save(self.migration.work / "map.safetensors")
        needs_queries = self.texts.judged is not None or self.texts.past is not None
        old_tower = self._old_tower() if needs_queries else None
        past = old
        if old_tower is not None and self.texts.past is not None:
            past = self._embed_queries(old_tower, self.texts.past, self.old.dim)
        order = order_by_hits(self.migration.old, past)
        self.migration.save_order(order)
        fold = maps.folds(len(old))
        mapped = maps.out_of_fold(old, new, fold)
        sample = measures.Sample(old, new, mapped, np.argsort(order)[self.rows], len(order))
        if old_tower is not None and self.texts.judged is not None:
            truth = "judged documents"
            queries, qrels = self.texts.judged
            old_queries = self._embed_queries(old_tower, queries, self.old.dim)
            new_queries = self._embed_queries(self.encoder.left, queries)
            mapped_queries = maps.fit(new, old)(new_queries)
            systems = measures.compared(sample, old_queries, mapped_queries, new_queries)
            scores = measures.judged_scores(systems, queries.ids, self.sample.ids, qrels)
        else:
            truth = "the new model's neighbours of documents"
            rows = np.flatnonzero(fold == 0)[:MAX_JUDGED]
            mapped_queries = maps.fit(new[fold != 0], old[fold != 0])(new[rows])
            systems = measures.compared(sample, old[rows], mapped_queries, new[rows])
            scores = measures.neighbour_scores(systems, rows)
        systems_rows = measures.summarize(scores)
        facts = {
            "old model": self.migration.old.meta.get("model"),
            "new model": self.migration.notes["model"],
            "kind of index": self.migration.old.meta["factory"],
            "documents": len(order),
            "sample": len(old),
            "queries": len(scores[measures.NEW]["recall@10"]),
            "relevant are": truth,
            "queries that decide the order": len(past),
        }
        if not self.is_resumed:
            rest = self.seconds * (len(order) / len(old) - 1)
            facts |= {
                "seconds for the sample": self.seconds,
                "seconds for the others, estimated": rest,
            }
        report = {
            "facts": facts,
            "systems": systems_rows,
            "served": measures.served_shares(systems_rows),
        }
        write_json(self.migration.work / "report.json", report)
        return report

    def _old_tower(self) -> Tower | None:
        """The query tower of the old model; None where it is gone or has changed."""
        index = self.migration.old
        device = next(self.encoder.parameters()).device
        try:
            encoder = load_model(recorded_model(index.meta, self.migration.folder), device)
            check_encoder(encoder, index.meta, index.dim, self.migration.folder)
            return encoder.left
        except DualencError as error:
            print(
                printable(
                    f"documents take the place of queries; the old model is of no use: {error}"
                )
            )
            return None

    def embed_all(self, served: list[float]) -> None:
        """Embed the documents share by share, and replace the index at each share that is
        `served`."""
        embedded = [self.sample]
        for stage in self.migration.stages(self.rows):
            if len(stage.rows):
                name = f"embeddings-{stage.stop}"
                embedded.append(
                    self._embed_documents(stage.rows, name, f"embed up to {stage.share:.0%}")
                )
            if stage.share in served and self.migration.is_ahead(stage.stop):
                self._report_dropped()
                self.migration.swap(self.old, embedded, stage.stop)
                done = f"{stage.stop:,} of {len(self.old):,} vectors are of the new model"
                print(printable(f"{done} → {self.migration.folder}"))
        remove_work(self.migration.folder)

    def _report_dropped(self) -> None:
        """Say which measurements of the index are of vectors that it will not have any more."""
        folder = self.migration.folder
        dropped = " and ".join(name for name in (RESULT, VECTORS) if (folder / name).is_file())
        if dropped:
            again = f"measure again: dualenc evaluate engine {folder} --filters FILE"
            problem = f"{dropped} are of the old vectors and are dropped, the settings stay"
            print(printable(f"{problem}; {again}"))


def _open_texts(folder: str, index: Index, data: str | None, queries: str | None) -> Texts:
    """Open the documents that an index was made of, checked against it, and queries."""
    source = data or str(index.meta.get("data", ""))
    if has_texts(folder):
        if data is not None and not Path(data).exists():
            remedy = "name a BEIR folder, or leave --data out"
            raise DualencError(f"--data {data}: no such file or folder; {remedy}")
        store = TextStore(folder, index.items_checksum)
        corpus = Corpus(store.ids, store.texts)
    elif data or (source and Path(source).exists()):
        corpus = open_corpus(source, modality="text", **SourceOptions.recorded(index.meta, folder))
        corpus = corpus.take(rows_in(corpus, index, folder))
    else:
        raise DualencError(
            f"{folder}: keeps no texts, and its data {source} is gone; name it by --data"
        )
    judged = _open_judged(Path(source), corpus.ids)
    if data is not None and judged is None:
        without = "no test judgements of these documents (qrels/test.tsv)"
        print(printable(f"{data}: has {without}; what is measured does without"))
    past = None
    if queries is not None:
        past = open_corpus(queries, part="queries", modality="text")
    elif judged is not None:
        past = open_corpus(source, part="queries", modality="text")
        measured = set(judged[0].ids)
        others = [row for row, name in enumerate(past.ids) if name not in measured]
        if len(others) >= MIN_OTHER_QUERIES:
            past = past.take(others)
    return Texts(
        corpus, judged, None if past is None else past.take(_drawn(len(past), MAX_QUERIES))
    )


def _open_judged(folder: Path, indexed_ids: Sequence[str]) -> tuple[Corpus, Qrels] | None:
    """Up to 500 test queries of a BEIR folder with a relevant document in the index, and their
    judgements."""
    if not (folder / "qrels" / "test.tsv").is_file():
        return None
    bad_rows = BadRows(folder)
    queries, qrels = read_judged_queries(folder, "test", indexed_ids, bad_rows)
    bad_rows.report()
    indexed = set(indexed_ids)
    judged: dict[str, dict[str, int]] = {}
    for query, grades in qrels.items():
        own = {name: grade for name, grade in grades.items() if name in indexed}
        if max(own.values(), default=0) > 0:
            judged[query] = own
    if not judged or queries.modality != "text":
        return None
    rows = np.flatnonzero([name in judged for name in queries.ids])
    chosen = queries.take(rows[_drawn(len(rows), MAX_JUDGED)])
    return chosen, {name: judged[name] for name in chosen.ids}


def _drawn(count: int, maximum: int) -> np.ndarray:
    """All rows, or a seeded sample of so many, ascending."""
    return np.sort(np.random.default_rng(0).choice(count, min(count, maximum), replace=False))


def _show(report: Mapping[str, Any], page: Path) -> None:
    """Print the measurements, and write them as a page."""
    facts = report["facts"]
    systems = Table("On the sample [95 % interval]", measures.table_rows(report["systems"]))
    write_report(page, "Change of model", facts=facts, tables=[systems])
    print_table(
        Table("Change of model", [{"what": name, "value": value} for name, value in facts.items()])
    )
    print_table(systems)
    share = min(report["served"])
    if share > 0:
        problem = "mapped vectors find significantly less than the old model"
        if not measures.is_judged(report["systems"]):
            remedy = "name a BEIR folder by --data, or serve them by --anyway"
            problem = f"without judgements nothing tells what mapped vectors find beside the old model ({remedy})"
        print(f"{problem}: the index stays the old one until {share:.0%} of it are embedded anew")
    if measures.is_below(report["systems"], measures.NEW):
        print("the new model finds significantly less than the old one")
    print(printable(f"report: {page}"))
