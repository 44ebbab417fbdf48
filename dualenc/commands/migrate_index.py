"""The steps of `dualenc migrate`: open, sample, measure, serve mapped vectors, embed and swap."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.commands.output import open_model, start_processes
from dualenc.data import Corpus, RetrievalSet
from dualenc.data.beir import read_beir
from dualenc.data.sources import open_corpus
from dualenc.data.urls import is_url
from dualenc.encoders import Tower, load_model
from dualenc.errors import DualencError
from dualenc.evaluation.migration import (
    Sample,
    compared_systems,
    judged_scores,
    neighbour_scores,
    served_shares,
    summarize,
    table_rows,
)
from dualenc.evaluation.report import Table, print_table, write_report
from dualenc.files import write_json
from dualenc.reading import read_json_object
from dualenc.search import Embeddings, Index
from dualenc.search.documents import open_documents
from dualenc.search.embed import embed, tower_checksum
from dualenc.search.index import rows_in
from dualenc.search.maps import FITS, choose, folds, out_of_fold, save_maps
from dualenc.search.migrate import (
    Migration,
    is_started,
    order_by_hits,
    remove_work,
    sample_rows,
    work_folder,
)
from dualenc.search.qdrant import is_pushed
from dualenc.search.searcher import recorded_model
from dualenc.search.texts import TextStore, has_texts
from dualenc.terminal import printable

MIN_DOCUMENTS = 100
"""Below, maps cannot be learned, and embedding everything takes seconds."""
MAX_JUDGED = 500
"""Queries that the report measures with."""
MAX_QUERIES = 10_000
"""Queries that decide the order."""
MIN_OTHER_QUERIES = 100
"""From this many on, queries that the report measures with do not decide the order, too."""
_EXACT = re.compile(r"(IVF\d+(_HNSW\d+)?,)?(Flat|HNSW\d+(,Flat)?)")
"""Factories that keep whole vectors."""


class Texts(NamedTuple):
    """The documents in the order of the index; judged queries, and queries that decide the order, if there are any."""

    corpus: Corpus
    judged: RetrievalSet | None
    past: Corpus | None


def check_index(folder: str) -> None:
    """Refuse what is no index of documents by a query-document model."""
    if is_pushed(folder):
        raise DualencError(f"{folder}: an engine does not migrate; migrate the embeddings and push again")
    meta = Index.open(folder).meta
    about = [meta.get("kind"), meta.get("modality"), meta.get("side"), meta.get("output")]
    if about != ["query-document", "text", "right", "embedding"]:
        what = ", ".join(str(value) for value in about)
        remedy = "only documents of a query-document model migrate; build the index again"
        raise DualencError(f"{folder}: holds {what}; {remedy}")


def migrate_index(
    folder: str,
    name: str,
    sources: tuple[str | None, str | None],
    *,
    report_only: bool,
    batch_size: int,
    device: str | None,
) -> None:
    """Start or resume a migration, whose work folder is locked; `sources` are those of documents and queries."""
    encoder = open_model(name, ("query-document",), start_processes(device))
    checksum = tower_checksum(encoder.right)
    present = Index.open(folder)
    mapped = present.meta.get("mapped", 0)
    if present.meta.get("model_checksum") == checksum and not mapped:
        remove_work(folder)
        return print(printable(f"all {len(present):,} vectors are of this model → {folder}"))
    if mapped and not is_started(folder):
        problem = f"{mapped:,} of its vectors are mapped, and {work_folder(folder)} is gone"
        raise DualencError(f"{folder}: {problem}; build the index again")
    if len(present) < MIN_DOCUMENTS:
        remedy = "build the index again with the new model"
        raise DualencError(f"{folder}: {len(present)} documents are too few to learn maps from; {remedy}")
    texts = _open_texts(folder, present, *sources)
    plan = {"model_checksum": checksum, "texts": texts.corpus.identity()}
    plan["queries"] = "" if texts.past is None else texts.past.identity()
    path = Path(name).expanduser()
    recorded = str(path.resolve()) if path.is_dir() else name
    about = {"model": recorded, "model_checksum": checksum, "side": "right", "kind": encoder.kind}
    migration = Migration(folder, plan, about)
    steps = _Steps(migration, texts, encoder.left, encoder.right, batch_size)
    report = migration.report or steps.measure()
    _show(report, Path(f"{migration.work}.html"))
    if not report_only:
        steps.embed_all(report["served"])
    return None


class _Steps:
    """The work of a migration with the new model's towers."""

    def __init__(
        self, migration: Migration, texts: Texts, queries: Tower, documents: Tower, batch_size: int
    ) -> None:
        self.migration = migration
        self.texts = texts
        self.queries = queries
        self.documents = documents
        self.batch_size = batch_size
        self.old = open_documents(migration.work / "old", migration.work)
        self.sample = self._embed_sample()
        self.rows: np.ndarray = migration.old.ids.rows(self.sample.ids)  # type: ignore[attr-defined]

    def _embed(self, tower: Tower, corpus: Corpus, out: Path | None, **options: Any) -> Embeddings:
        # No text is skipped: the index has a vector of each.
        return embed(tower, corpus, out, batch_size=self.batch_size, on_error="raise", **options)

    def _embed_sample(self) -> Embeddings:
        corpus = self.texts.corpus
        judged: set[str] = set()
        if self.texts.judged is not None:
            judged = {name for grades in self.texts.judged.qrels.values() for name in grades}
        rows = sample_rows(len(corpus), np.flatnonzero([name in judged for name in corpus.ids]))
        folder = self.migration.work / "sample"
        is_new = not folder.exists()
        started = time.perf_counter()
        sample = self._embed(self.documents, corpus.take(rows), folder, progress="embed the sample")
        if is_new:
            seconds = round(time.perf_counter() - started, 3)
            write_json(self.migration.work / "seconds.json", {"seconds": seconds})
        return sample

    def measure(self) -> dict[str, Any]:
        """Learn the maps, order the documents, measure, and write all this into the work folder."""
        old = np.asarray(self.old.vectors[self.rows], np.float32)
        new = np.asarray(self.sample.vectors[:], np.float32)
        fold = folds(len(old))
        to_new = choose(old, new, fold, maps_queries=False)
        to_old = choose(new, old, fold, maps_queries=True)
        maps = {"documents": FITS[to_new.kind](old, new), "queries": FITS[to_old.kind](new, old)}
        save_maps(self.migration.work / "maps.safetensors", maps)
        old_tower = self._old_tower()
        order_queries = old
        if old_tower is not None and self.texts.past is not None:
            order_queries = self._embed_queries(old_tower, self.texts.past, self.old.dim)
        order = order_by_hits(self.migration.old, order_queries)
        self.migration.save_order(order)
        mapped = out_of_fold(to_new.kind, old, new, fold)
        sample = Sample(old, new, mapped, np.argsort(order)[self.rows], len(order))
        judged = None if old_tower is None else self.texts.judged
        if old_tower is not None and judged is not None:
            old_queries = self._embed_queries(old_tower, judged.queries, self.old.dim)
            new_queries = self._embed_queries(self.queries, judged.queries)
            systems = compared_systems(sample, old_queries, maps["queries"](new_queries), new_queries)
            scores = judged_scores(systems, judged.queries.ids, self.sample.ids, judged.qrels)
        else:
            held_out = np.flatnonzero(fold == 0)[:MAX_JUDGED]
            mapped_queries = out_of_fold(to_old.kind, new, old, fold)[held_out]
            systems = compared_systems(sample, old[held_out], mapped_queries, new[held_out])
            scores = neighbour_scores(systems, held_out)
        rows = summarize(scores)
        seconds = self.migration.work / "seconds.json"
        report = {
            "old model": self.migration.old.meta.get("model"),
            "new model": self.migration.about["model"],
            "factory": self.migration.old.meta["factory"],
            "documents": len(order),
            "sample": len(old),
            "queries": len(scores[rows[0]["system"]]["recall@10"]),
            "judged": judged is not None,
            "queries for the order": len(order_queries),
            "seconds": read_json_object(seconds)["seconds"] if seconds.is_file() else None,
            "maps": {"documents": to_new._asdict(), "queries": to_old._asdict()},
            "systems": rows,
            "served": served_shares(rows),
        }
        write_json(self.migration.work / "report.json", report)
        return report

    def _old_tower(self) -> Tower | None:
        """The query tower of the old model; None where no queries need it, or the model is gone or has changed."""
        if self.texts.judged is None and self.texts.past is None:
            return None
        meta = self.migration.old.meta
        try:
            encoder = load_model(recorded_model(self.migration.old, self.migration.folder))
            if tower_checksum(encoder.right) != meta.get("model_checksum"):
                raise DualencError(f"{meta.get('model')}: has other weights than the index was made with")
        except DualencError as error:
            print(printable(f"documents take the place of queries, as the old model cannot: {error}"))
            return None
        return encoder.left.to(next(self.queries.parameters()).device)

    def _embed_queries(self, tower: Tower, queries: Corpus, dim: int | None = None) -> np.ndarray:
        vectors = self._embed(tower, queries, None, dim=dim, progress="embed queries").vectors
        return np.asarray(vectors)

    def embed_all(self, served: Sequence[float]) -> None:
        """Serve mapped vectors, embed share by share, and replace the index at each share that is `served`."""
        migration = self.migration
        embedded = [self.sample]
        for stage in migration.stages(self.rows):
            if len(stage.rows):
                folder = migration.work / f"embeddings-{stage.stop}"
                corpus = self.texts.corpus.take(stage.rows)
                bar = f"embed up to {stage.share:.0%}"
                embedded.append(self._embed(self.documents, corpus, folder, progress=bar))
            if stage.share in served and migration.is_ahead(stage.stop):
                migration.swap(self.old, embedded, stage.stop)
                done = f"{stage.stop:,} of {len(self.old):,} vectors are of the new model"
                print(printable(f"{done} → {migration.folder}"))
        remove_work(migration.folder)


def _open_texts(folder: str, present: Index, data: str | None, queries: str | None) -> Texts:
    """Open the documents that an index was made of, checked against it, and queries."""
    source = data or str(present.meta.get("data", ""))
    if has_texts(folder):
        store = TextStore(folder, present.items_checksum)
        corpus = Corpus(store.ids, store.texts)
    elif data or is_url(source) or (source and Path(source).exists()):
        corpus = open_corpus(source, modality="text")
        corpus = corpus.take(rows_in(corpus, present, folder))
    else:
        problem = f"keeps no texts, and its data {source} is gone"
        raise DualencError(f"{folder}: {problem}; name its documents by --data")
    judged = _open_judged(Path(source), corpus)
    past = None
    if queries is not None:
        past = open_corpus(queries, part="queries", modality="text")
    elif judged is not None:
        past = open_corpus(source, part="queries", modality="text")
        measured = set(judged.queries.ids)
        others = [row for row, name in enumerate(past.ids) if name not in measured]
        if len(others) >= MIN_OTHER_QUERIES:
            past = past.take(others)
    return Texts(corpus, judged, None if past is None else past.take(_drawn(len(past), MAX_QUERIES)))


def _open_judged(folder: Path, corpus: Corpus) -> RetrievalSet | None:
    """Up to 500 test queries of a BEIR folder with a relevant document in the index, and their judgements."""
    if not (folder / "qrels" / "test.tsv").is_file():
        return None
    queries, _, qrels = read_beir(folder)
    indexed = set(corpus.ids)
    judged = {}
    for query, grades in qrels.items():
        own = {name: grade for name, grade in grades.items() if name in indexed}
        if max(own.values(), default=0) > 0:
            judged[query] = own
    rows = np.flatnonzero([name in judged for name in queries.ids])
    if not len(rows) or queries.modality != "text":
        return None
    chosen = queries.take(rows[_drawn(len(rows), MAX_JUDGED)])
    return RetrievalSet(chosen, corpus, {name: judged[name] for name in chosen.ids})


def _drawn(count: int, maximum: int) -> np.ndarray:
    """All rows, or a seeded sample of so many, ascending."""
    return np.sort(np.random.default_rng(0).choice(count, min(count, maximum), replace=False))


def _show(report: Mapping[str, Any], page: Path) -> None:
    """Print the measurements, and write them as a page."""
    truth = "judged documents" if report["judged"] else "the new model's neighbours"
    sizes = f"{report['sample']:,} documents, {report['queries']:,} queries"
    kinds = []
    for name, choice in report["maps"].items():
        kinds.append({"map of": name, "chosen": choice["kind"], **choice["recalls"]})
    tables = [
        Table(f"A sample of {sizes}: {truth} [95 % interval]", table_rows(report["systems"])),
        Table("Maps: recall@10 of neighbours on held-out pairs", kinds),
    ]
    names = ("old model", "new model", "factory", "documents", "sample", "queries for the order")
    facts = {name: report[name] for name in names}
    lines = []
    if not _EXACT.fullmatch(report["factory"]):
        lines.append(f"old vectors are what the codes of {report['factory']} stand for")
    if report["seconds"] is not None:
        rest = report["seconds"] * (report["documents"] / report["sample"] - 1)
        facts |= {"seconds of the sample": report["seconds"], "seconds of the others, estimated": rest}
        lines.append(
            f"the sample took {report['seconds']:,.0f} s; the others will take about {rest:,.0f} s"
        )
    first = min(report["served"])
    if first > 0:
        problem = "mapped vectors find significantly less than the old model"
        lines.append(f"{problem}: the index stays the old one until {first:.0%} of it are embedded anew")
    write_report(page, "Change of model", facts=facts, tables=tables)
    for table in tables:
        print_table(table)
    for line in [*lines, f"report: {page}"]:
        print(printable(line))
