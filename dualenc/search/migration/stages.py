"""State of a migration on disk: the vectors of an index are replaced in stages by a new model's.

The folder `INDEX.migration` beside the index exists until all documents are embedded with the new
model:

    plan.json           the new model, the items and their texts or images; where images are;
                        whether searches answer by candidates, and whether the migration was rolled
                        back or has ended
    old/                the index before the migration, by hard links, for its vectors and for a
                        rollback
    candidates-*.sqlite vectors that searches have embedded (`dualenc.search.migration.candidates`)
    texts/              texts for them, if the index stores none
    documents.npy       its vectors (`dualenc.search.documents`)
    sample/             embeddings of a sample of the documents with the new model
    map.safetensors     the map from the old space to the new one (`dualenc.search.migration.maps`)
    to_old.safetensors  the map of new queries to the old space, if the old model is gone
                        (`dualenc.search.migration.stand_in`)
    order.npy           rows in the order in which they are embedded
    report.json         the measurements, written after everything above
    embeddings-50/ …    embeddings with the new model, a folder per stage, named by the number of
                        rows so far
    next/               the next index, before it is swapped in

INDEX is only ever replaced as a whole. Its meta.json names the model of its vectors, and `mapped`
counts those that are mapped from the old space. Every file is written atomically and depends on the
plan alone, so the same command resumes. Other changes of INDEX are rejected meanwhile
(`dualenc.search.migration.migration_folder`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.store.items import ITEMS, ORDER, rows_of
from dualenc.data.store.vector_shards import Embeddings, ShardedVectors
from dualenc.errors import DualencError, explain
from dualenc.io.files import (
    atomic_folder,
    atomic_path,
    locked,
    recover_inside,
    remove,
    save_array,
    write_json,
)
from dualenc.io.reading import read_json_object
from dualenc.search.index.open import Index, is_index
from dualenc.search.index.refined import link
from dualenc.search.migration.maps import NEIGHBORS, LinearMap
from dualenc.search.migration.migration_folder import (
    BY_CANDIDATES,
    FORMAT,
    PLAN,
    cache_path,
    embedded_count,
    has_begun,
    is_over,
    is_replaced,
    read_plan,
    read_record,
    remove_work,
    work_folder,
)
from dualenc.search.migration.replacement import (
    build_options,
    link_tree,
    mixed_vectors,
    replace_index,
)
from dualenc.search.migration.vector_cache import VectorCache
from dualenc.search.texts import has_texts, write_texts
from dualenc.types import StrPath

logger = logging.getLogger("dualenc.search")

FORMAT_VERSION = 2
SHARES = (0.0, 0.05, 0.2, 0.5, 1.0)
"""Fractions of documents with new vectors at which the index is replaced."""
SAMPLED_SHARE = 0.02
MIN_SAMPLE = 2000


class Stage(NamedTuple):
    """The rows to embed until a fraction of the documents has new vectors.

    A migration goes through a stage for each of `SHARES`.

        for stage in migration.stages(sampled):
            embed(stage.rows)

    Attributes:
        share: fraction of documents with new vectors at the end of the stage.
        stop: number of those documents, the first ones of the order.
        rows: (n,) rows to embed, without those of the sample.
    """

    share: float
    stop: int
    rows: np.ndarray


class Migration:
    """A migration of an index to another model, started or resumed.

    Hold the locks of the work folder and of the index while creating one.

        migration = Migration("index", notes, {"texts": checksum, "queries": None})
        for stage in migration.stages(sampled):
            migration.swap(old_vectors, new_embeddings, stage.stop)

    Args:
        folder: the index.
        notes: entries of meta.json on the new model: `model`, `model_checksum`, `side`, `kind`; for
            images also `data`, where they are now.
        inputs: what must be unchanged to resume, apart from the model and the items: checksums of
            `texts` or `images`, and of `queries`.

    Raises:
        DualencError: the work folder was not written by a migration, or belongs to another one that
            has begun to embed, or the items or vectors of the index have changed.
    """

    def __init__(
        self, folder: StrPath, notes: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.work = work_folder(folder)
        self.notes = dict(notes)
        plan = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "items": Index.open(folder).items_checksum,
            "model": self.notes["model_checksum"],
            **inputs,
        }
        if not self._resumes(plan):
            remove_work(folder)
            self.work.mkdir()
        present = read_plan(folder) or {}
        kept = {"serves": present["serves"]} if "serves" in present else {}
        place = {"data": self.notes["data"]} if "data" in self.notes else {}
        self.plan = {**plan, "name": self.notes.get("model"), **place, **kept}
        write_json(self.work / PLAN, self.plan)
        # A killed process may have left half-swapped folders.
        recover_inside(self.work)
        if not is_index(self.work / "old"):
            with atomic_folder(self.work / "old", is_index, "index") as part:
                link_tree(self.folder, part)
        self.old = Index.open(self.work / "old")

    def _resumes(self, plan: Mapping[str, Any]) -> bool:
        """Return True if the work folder has this plan; raise if it has another one worth keeping.

        Another migration that has only measured is replaced, with a warning.
        """
        present = read_plan(self.folder)
        if present is None or "ended" in present:
            return False
        different = [name for name, value in plan.items() if present.get(name) != value]
        if not different:
            if self._is_as_planned():
                return True
            different = ["vectors"]
        # A report by judged queries must not be replaced by one without them.
        loses_queries = "model" not in different and present.get("queries") and not plan["queries"]
        count = embedded_count(self.folder)
        what = "another model" if "model" in different else f"other {different[0]}"
        if not present:
            what = f"a damaged {PLAN}"
        if has_begun(self.folder) or is_over(present) or loses_queries:
            back = f"dualenc migrate {self.folder} --rollback"
            problem = f"a migration with {what} is under way"
            remedy = f"resume it with them, or end it: {back}" if present else f"end it: {back}"
            if is_over(present):
                problem = f"holds {count:,} vectors of a migration with {what} that was rolled back"
                remedy = f"remove them: {back} --discard"
            raise DualencError(problem, fix=remedy, where=self.work)
        message = "%s: discarding the report of %s and its sample of %d vectors"
        logger.warning(message, self.work, what, count)
        return False

    def _is_as_planned(self) -> bool:
        """Return True if INDEX is the old index, or one that this migration swapped in."""
        old = self.work / "old"
        if not is_index(old) or is_replaced(self.folder):
            return True
        # Checksums of the files, which an append or a rebuild changes.
        now, before = (read_record(each) for each in (self.folder, old))
        return now.files == before.files

    @property
    def report(self) -> dict[str, Any] | None:
        """Measurements of report.json; None before it is written."""
        path = self.work / "report.json"
        return read_json_object(path) if path.is_file() else None

    def serve_candidates(self, texts: Iterable[str] | None) -> None:
        """Let searches that open INDEX from now on answer by candidates, until the last swap.

        Args:
            texts: (N,) texts in the order of the index, which are stored unless it stores them;
                None for images, which searches read where the plan says.
        """
        VectorCache(cache_path(self.folder, self.plan), dim=0).create()
        if texts is not None and not has_texts(self.work / "old") and not has_texts(self.work):
            write_texts(self.work, self.old.ids, texts, self.old.items_checksum)
        self.plan["serves"] = BY_CANDIDATES
        write_json(self.work / PLAN, self.plan)

    def save_order(self, order: np.ndarray) -> None:
        """Write the order in which rows (N,) are embedded."""
        with atomic_path(self.work / "order.npy") as part:
            save_array(part, order)

    def _order(self) -> np.ndarray:
        path = self.work / "order.npy"
        remedy = f"end the migration: dualenc migrate {self.folder} --rollback"
        with explain(f"{path}: corrupt", remedy):
            order = np.asarray(np.load(path, allow_pickle=False))
            if not np.array_equal(np.sort(order), np.arange(len(order))):
                raise ValueError("it is not an order of rows")
        return order

    def stages(self, sampled: np.ndarray) -> list[Stage]:
        """Return a stage for each of `SHARES`.

        Args:
            sampled: (n,) rows of the sample, which already have new vectors.
        """
        order = self._order()
        stages = []
        start = 0
        for share in SHARES:
            stop = embedded_at(share, len(order))
            rows = order[start:stop]
            stages.append(Stage(share, stop, rows[~np.isin(rows, sampled)]))
            start = stop
        return stages

    def is_ahead(self, stop: int) -> bool:
        """Return True if INDEX is still the old index, or has fewer than `stop` new vectors."""
        served = Index.open(self.folder).provenance
        if served.model_checksum != self.notes["model_checksum"]:
            return True
        return len(self.old) - (served.mapped or 0) < stop

    def swap(self, old: Embeddings, new: Sequence[Embeddings], stop: int) -> None:
        """Replace INDEX by one of the same kind in the new space.

        The first `stop` rows of the order get new vectors, and the others are mapped. Ids and their
        order, snippets, columns, BM25 and whole texts are kept.

        Args:
            old: the N vectors of the old index.
            new: embeddings with the new model, of those rows and possibly of others.
            stop: number of new vectors.

        Raises:
            DualencError: something else has changed INDEX.
        """
        order = self._order()
        to_new = LinearMap.load(self.work / "map.safetensors")
        # (n,) rows in the index of the new vectors, part after part.
        rows = rows_of(self.old.ids, [name for part in new for name in part.ids])
        # (N,) row in `new`, -1 for rows to map. A resumed migration may have embedded rows beyond
        # `stop`; mapping them makes the index a function of the plan.
        new_row = np.full(len(order), -1)
        new_row[rows] = np.arange(len(rows))
        new_row[order[stop:]] = -1
        new_vectors = ShardedVectors([part.vectors for part in new])
        vectors = mixed_vectors(old.vectors, to_new, new_vectors, new_row)
        replaced = self.old.provenance
        about = replaced.updated(**self.notes, normalized=True)
        items = (self.old.snippets, self.old.columns)
        embeddings = Embeddings(self.old.ids, vectors, about, *items)
        options = build_options(replaced, self.work / "old")
        target = self.work / "next"
        factory = replaced.factory or ""
        Index.build(embeddings, None, factory, metric=replaced.metric, folder=target, **options)
        # Texts and BM25 identify their index by the checksum of the items file: link the old one.
        kept = (ITEMS, ORDER)
        for name in kept:
            remove(target / name)
            link(self.work / "old" / name, target / name)
        built = read_record(target)
        provenance = built.updated(
            mapped=len(order) - stop,
            requested_factory=replaced.requested_factory or factory,
            files={**built.files, **{name: replaced.files[name] for name in kept}},
            sizes={**built.sizes, **{name: replaced.sizes[name] for name in kept}},
        )
        # Only now, since building takes long: the index stays open to other commands meanwhile.
        with locked(self.folder):
            if not self._is_as_planned():
                raise DualencError(
                    "something else has replaced it while its model was being changed, so it is "
                    "left unchanged",
                    fix=f"end the migration: dualenc migrate {self.folder} --rollback --discard",
                    where=self.folder,
                )
            # Filter settings may have been tuned during the migration.
            tuned = read_record(self.folder).only(["settings"]).entries()
            replace_index(self.folder, target, provenance.updated(**tuned))
        remove(target)


def embedded_at(share: float, count: int) -> int:
    """Return how many of N documents are a given fraction, rounded up.

    Args:
        share: fraction, 0 to 1.
        count: N.
    """
    # Rounding first keeps 0.07 · 100 = 7.000000000000001 from becoming 8.
    return int(np.ceil(round(share * count, 6)))


def sample_size(count: int) -> int:
    """Return how many of N documents are sampled: 2%, at least 2,000 if there are as many."""
    return min(count, max(MIN_SAMPLE, embedded_at(SAMPLED_SHARE, count)))


def sample_rows(count: int, judged: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return the rows of the sample, ascending: 2% of the documents, and the judged ones.

    Args:
        count: N, the number of documents; at least 2,000 of them are sampled if there are as many.
        judged: (n,) rows of judged documents.
        seed: random seed.
    """
    drawn = np.random.default_rng(seed).choice(count, sample_size(count), replace=False)
    return np.union1d(drawn, judged).astype(np.int64)


def order_by_hits(index: Index, queries: np.ndarray) -> np.ndarray:
    """Return the rows (N,) by how often they are among the 10 best results, most frequent first.

    Ties are in ascending order of rows.

    Args:
        index: the index to search.
        queries: (Q, D) vectors.
    """
    rows = index.search_rows(queries, min(NEIGHBORS, len(index)))[1]
    counts = np.bincount(rows[rows >= 0], minlength=len(index))
    return np.argsort(-counts, kind="stable")
