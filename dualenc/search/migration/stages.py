"""State of a migration on disk: an index whose vectors give way to those of another model, share by
share.

Beside the index, in `INDEX.migration`, until all documents are embedded with the new model:

    plan.json           the new model, the items, their texts; whether it was rolled back, or has
    ended old/                the index as it was, by hard links: for its vectors, and for a
    rollback documents.npy       its vectors (`dualenc.search.documents`)
    sample/             embeddings of a sample of the documents with the new model
    map.safetensors     the map from the old space to the new one (`dualenc.search.migration.maps`)
    order.npy           rows in the order in which they are embedded
    report.json         the measurements; once it is there, so is everything above
    embeddings-50/ …    embeddings with the new model, a folder for each share, by the number of
    rows so far next/               the next index, before it is swapped in

INDEX is only ever replaced whole. Its meta.json names the model of its vectors, and `mapped` counts
those that are mapped from the old space. Every file is written atomically and is a function of the
plan: the same command resumes. What would change INDEX meanwhile is refused
(`dualenc.search.migration.migration_folder`).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.store.items import ITEMS, ORDER, read_batches, rows_of
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
from dualenc.search.documents import ReadRows
from dualenc.search.index.open import Index, is_index
from dualenc.search.index.refined import REFINE, link
from dualenc.search.lexical import FOLDER as BM25_FOLDER
from dualenc.search.migration.maps import NEIGHBOURS, LinearMap
from dualenc.search.migration.migration_folder import (
    FORMAT,
    PLAN,
    has_begun,
    is_over,
    is_replaced,
    read_plan,
    remove_work,
    work_folder,
)
from dualenc.search.texts import FOLDER as TEXTS_FOLDER

logger = logging.getLogger("dualenc.search")

FORMAT_VERSION = 2
SHARES = (0.0, 0.05, 0.2, 0.5, 1.0)
"""Shares of documents with new vectors at which the index is replaced."""
SAMPLED_SHARE = 0.02
MIN_SAMPLE = 2000


class Stage(NamedTuple):
    """What is embedded until a share of the documents, the first `stop` of the order, has new
    vectors."""

    share: float
    stop: int
    rows: np.ndarray


class Migration:
    """A migration that is started or resumed, under the locks of its work folder and of the index.

    Args:
        folder: the index.
        notes: entries of meta.json on the new model: `model`, `model_checksum`, `side`, `kind`.
        inputs: what must be equal to resume, beside the model and the items: checksums of `texts`
            and `queries`.

    Raises:
        DualencError: the work folder is somebody else's, or of another migration that has begun to
            embed, or the items or the vectors of the index are others.
    """

    def __init__(
        self, folder: str | os.PathLike[str], notes: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.work = work_folder(folder)
        self.notes = dict(notes)
        plan = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "items": Index.open(folder).items_checksum,
        }
        plan |= {"model": self.notes["model_checksum"], **inputs}
        if not self._resumes(plan):
            remove_work(folder)
            self.work.mkdir()
        write_json(self.work / PLAN, {**plan, "name": self.notes.get("model")})
        recover_inside(self.work)
        if not is_index(self.work / "old"):
            with atomic_folder(self.work / "old", is_index, "index") as part:
                _link_tree(self.folder, part)
        self.old = Index.open(self.work / "old")

    def _resumes(self, plan: Mapping[str, Any]) -> bool:
        """Whether the work folder is of this plan; one of another, which has only measured, gives
        way to it."""
        present = read_plan(self.folder)
        if present is None or "ended" in present:
            return False
        different = [name for name, value in plan.items() if present.get(name) != value]
        if not different and not self._is_as_planned():
            different = ["vectors"]
        if not different:
            return True
        # What was measured by judged queries is not measured again without them.
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
        message = "%s: the report of %s and its sample of %d vectors give way"
        logger.warning(message, self.work, what, count)
        return not different

    def _is_as_planned(self) -> bool:
        """Whether INDEX is the old index, or one that this migration has put there."""
        old = self.work / "old"
        if not is_index(old) or is_replaced(self.folder):
            return True
        now, before = (read_json_object(each / "meta.json") for each in (self.folder, old))
        return now.get("files") == before.get("files")

    @property
    def report(self) -> dict[str, Any] | None:
        """The measurements of report.json; None before they are there."""
        path = self.work / "report.json"
        return read_json_object(path) if path.is_file() else None

    def save_order(self, order: np.ndarray) -> None:
        """Write the order of embedding, rows (N,)."""
        with atomic_path(self.work / "order.npy") as part:
            save_array(part, order)

    def _order(self) -> np.ndarray:
        path = self.work / "order.npy"
        with explain(
            f"{path}: corrupt", f"end the migration: dualenc migrate {self.folder} --rollback"
        ):
            order = np.asarray(np.load(path, allow_pickle=False))
            if not np.array_equal(np.sort(order), np.arange(len(order))):
                raise ValueError("it is not an order of rows")
        return order

    def stages(self, sampled: np.ndarray) -> list[Stage]:
        """A stage for each of `SHARES`; rows of the sample (n,) have vectors, and are not embedded
        again."""
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
        """Whether INDEX has fewer new vectors than `stop`, or is still the old one."""
        meta = Index.open(self.folder).meta
        mapped = meta.get("mapped", 0)
        return (
            meta.get("model_checksum") != self.notes["model_checksum"]
            or len(self.old) - stop < mapped
        )

    def swap(self, old: Embeddings, new: Sequence[Embeddings], stop: int) -> None:
        """Replace INDEX by an index of its kind in the new space: new vectors for the first `stop`
        rows of the order.

        The others are mapped. Ids and their order, snippets, columns, BM25 and whole texts stay.

        Args:
            old: the N vectors of the old index.
            new: embeddings with the new model, of those rows and perhaps of others.
            stop: how many vectors are new.
        """
        order = self._order()
        to_new = LinearMap.load(self.work / "map.safetensors")
        rows = rows_of(self.old.ids, [name for part in new for name in part.ids])
        new_row = np.full(len(order), -1)
        new_row[rows] = np.arange(len(rows))
        new_row[order[stop:]] = -1
        new_vectors = ShardedVectors([part.vectors for part in new])
        vectors = mixed_vectors(old.vectors, to_new, new_vectors, new_row)
        old_meta = self.old.meta
        embeddings_meta = {**old_meta, **self.notes, "normalized": True}
        embeddings = Embeddings(
            self.old.ids, vectors, embeddings_meta, self.old.snippets, self.old.columns
        )
        options = _build_options(old_meta, self.work / "old")
        target = self.work / "next"
        factory = old_meta["factory"]
        Index.build(embeddings, None, factory, metric=old_meta["metric"], folder=target, **options)
        meta = {**read_json_object(target / "meta.json"), "mapped": len(order) - stop}
        meta["requested_factory"] = old_meta.get("requested_factory", factory)
        # Texts and BM25 know their index by the checksum of the items' file, which is thus not
        # written anew.
        for name in (ITEMS, ORDER):
            remove(target / name)
            link(self.work / "old" / name, target / name)
            for entry in ("files", "sizes"):
                meta[entry][name] = old_meta[entry][name]
        with locked(self.folder):
            if not self._is_as_planned():
                problem = "something else has replaced it while its model was being changed"
                back = f"dualenc migrate {self.folder} --rollback --discard"
                problem += ", and it stays as it is"
                raise DualencError(problem, fix=f"end the migration: {back}", where=self.folder)
            settings = read_json_object(self.folder / "meta.json").get("settings")
            if settings is not None:
                meta["settings"] = settings
            _replace(self.folder, target, meta)
        remove(target)


def mixed_vectors(old: Any, to_new: LinearMap, new: Any, new_row: np.ndarray) -> ReadRows:
    """(N, D) vectors in a new model's space: row `new_row[i]` of `new` (n, D); for -1 row i of
    `old` (N, E), mapped."""
    dim = len(to_new.bias)

    def read(rows: np.ndarray) -> np.ndarray:
        new_rows = new_row[rows]
        is_new = new_rows >= 0
        vectors = np.empty((len(rows), dim), np.float32)
        vectors[is_new] = new[new_rows[is_new]]
        if not is_new.all():
            vectors[~is_new] = to_new(old[rows[~is_new]])
        return vectors

    return ReadRows(len(old), dim, read)


class RolledBack(NamedTuple):
    """What a rollback did.

    Attributes:
        model: the new model, where it is known.
        replaced: whether the old index was put back; otherwise it was there.
        kept: vectors of the new model that stay in the work folder.
        removed: vectors of the new model that are gone.
        was_over: whether the migration had ended, and only its rest was removed.
    """

    model: str | None
    replaced: bool = False
    kept: int = 0
    removed: int = 0
    was_over: bool = False


def roll_back(folder: str | os.PathLike[str], discard: bool = False) -> RolledBack:
    """Put the old index back; what was embedded stays for a resumption, unless it is to be
    discarded.

    The sample of a migration that has only measured is removed with the measurements.

    Raises:
        DualencError: no migration is under way, or the work folder is somebody else's.
    """
    plan = read_plan(folder)
    if plan is None or "ended" in plan:
        is_rest = work_folder(folder).exists()
        remove_work(folder)
        if is_rest and (plan is None or plan["ended"] == "rolled back"):
            return RolledBack(None, was_over=True)
        raise DualencError(
            "no migration is under way",
            fix="a finished one has no old index; build it again",
            where=folder,
        )
    work = work_folder(folder)
    is_worth_keeping = is_over(plan) or has_begun(folder)
    with locked(folder):
        replaced = not Path(folder).exists() or is_replaced(folder)
        if replaced:
            old = work / "old"
            _replace(Path(os.path.realpath(folder)), old, Index.open(old).meta)
    count = embedded_count(folder)
    model = plan.get("name")
    if is_worth_keeping and count and not discard:
        write_json(work / PLAN, {**plan, "format": FORMAT, "rolled_back": True})
        return RolledBack(model, replaced, kept=count)
    remove_work(folder, "rolled back")
    return RolledBack(model, replaced, removed=count)


def embedded_count(folder: str | os.PathLike[str]) -> int:
    """How many vectors of the new model are in the work folder, those of the sample included."""
    count = 0
    for name in ("sample", "embeddings-*"):
        for path in work_folder(folder).glob(f"{name}/data-*.arrow"):
            with suppress(DualencError):  # a damaged one is embedded again
                count += sum(map(len, read_batches(path, "migrate again")))
    return count


def embedded_at(share: float, count: int) -> int:
    """How many of N documents are a share of them, rounded up."""
    return int(np.ceil(round(share * count, 6)))


def sample_rows(count: int, judged: np.ndarray, seed: int = 0) -> np.ndarray:
    """Rows of the sample, ascending: 2 % of N documents, at least 2,000 if there are, and the
    judged ones (n,)."""
    size = min(count, max(MIN_SAMPLE, embedded_at(SAMPLED_SHARE, count)))
    drawn = np.random.default_rng(seed).choice(count, size, replace=False)
    return np.union1d(drawn, judged).astype(np.int64)


def order_by_hits(index: Index, queries: np.ndarray) -> np.ndarray:
    """Rows (N,) by how often they are among the 10 results of queries (Q, D), most found first,
    ties by row."""
    rows = index.search_rows(queries, min(NEIGHBOURS, len(index)))[1]
    counts = np.bincount(rows[rows >= 0], minlength=len(index))
    return np.argsort(-counts, kind="stable")


def _replace(folder: Path, source: Path, meta: dict[str, Any]) -> None:
    """Replace an index by that of `source` with a meta.json; its own texts and BM25 stay."""
    with atomic_folder(folder, is_index, "index") as part:
        _link_tree(source, part)
        for name in (TEXTS_FOLDER, BM25_FOLDER):
            if (folder / name).is_dir():
                remove(part / name)
                _link_tree(folder / name, part / name)
        write_json(part / "meta.json", meta)


def _build_options(meta: Mapping[str, Any], old: Path) -> dict[str, Any]:
    """Options to build an index like the old one: tuned and measured if it was, refined by a file
    if it was."""
    measured = meta.get("when_built", meta)
    options: dict[str, Any] = {}
    if "recall_at_10" not in measured:
        options["recall_queries"] = 0
    if "target_recall" in measured:
        options["target_recall"] = measured["target_recall"]
    if (old / REFINE).exists():
        options["memory"] = (old / REFINE).stat().st_size
    return options


def _link_tree(source: Path, target: Path) -> None:
    """A folder with the same files, which nothing changes in place."""
    shutil.copytree(source, target, copy_function=link)
