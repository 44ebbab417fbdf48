"""State of a migration on disk: an index whose vectors give way to those of another model, share by share.

Beside the index, in `INDEX.migration`, until all documents are embedded with the new model:

    plan.json           the new model, the items and their texts; a folder without it is debris
    old/                the index as it was, by hard links: for its vectors, and for a rollback
    documents.npy       its vectors (`dualenc.search.documents`)
    sample/             embeddings of a sample of the documents with the new model
    map.safetensors     the map from the old space to the new one (`dualenc.search.maps`)
    order.npy           rows in the order in which they are embedded
    report.json         the measurements; once it is there, so is everything above
    embeddings-50/ …    embeddings with the new model, a folder for each share, by the number of rows so far
    next/               the next index, before it is swapped in

INDEX is only ever replaced whole. Its meta.json names the model of its vectors, and `mapped` counts those that are
mapped from the old space. Every file is written atomically and is a function of the plan: the same command resumes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.items import ITEMS, ORDER, rows_of
from dualenc.data.vector_shards import Embeddings, ShardedVectors
from dualenc.errors import DualencError, explain
from dualenc.files import atomic_folder, atomic_path, recover_inside, remove, save_array, write_json
from dualenc.reading import read_json_object
from dualenc.search.documents import ReadRows
from dualenc.search.index import Index, is_index
from dualenc.search.lexical import FOLDER as BM25_FOLDER
from dualenc.search.maps import NEIGHBOURS, LinearMap
from dualenc.search.refined import REFINE, link
from dualenc.search.texts import FOLDER as TEXTS_FOLDER

FORMAT = "dualenc migration"
FORMAT_VERSION = 2
SHARES = (0.0, 0.05, 0.2, 0.5, 1.0)
"""Shares of documents with new vectors at which the index is replaced."""
SAMPLED_SHARE = 0.02
MIN_SAMPLE = 2000


class Stage(NamedTuple):
    """What is embedded until a share of the documents, the first `stop` of the order, has new vectors."""

    share: float
    stop: int
    rows: np.ndarray


class Migration:
    """A migration that is started or resumed; whoever does holds the lock of its work folder.

    Args:
        folder: the index.
        notes: entries of meta.json on the new model: `model`, `model_checksum`, `side`, `kind`.
        inputs: what must be equal to resume, beside the model and the items: checksums of `texts` and `queries`.

    Raises:
        DualencError: the work folder is of another migration that has begun to embed, or the items are others.
    """

    def __init__(self, folder: str | os.PathLike[str], notes: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.work = work_folder(folder)
        self.notes = dict(notes)
        plan = {"format": FORMAT, "version": FORMAT_VERSION, "items": Index.open(folder).items_checksum}
        plan |= {"model": self.notes["model_checksum"], **inputs}
        if not self._resumes(plan):
            remove(self.work)
            self.work.mkdir()
            write_json(self.work / "plan.json", plan)
        recover_inside(self.work)
        if not is_index(self.work / "old"):
            with atomic_folder(self.work / "old", is_index, "index") as part:
                _link_tree(self.folder, part)
        self.old = Index.open(self.work / "old")

    def _resumes(self, plan: Mapping[str, Any]) -> bool:
        """Whether the work folder is of this plan; one of another, which has only measured, gives way to it."""
        present = read_json_object(self.work / "plan.json") if is_started(self.folder) else {}
        different = [name for name, value in plan.items() if present.get(name) != value]
        # What was measured by judged queries is not measured again without them.
        loses_queries = "model" not in different and present.get("queries") and not plan["queries"]
        has_begun = is_replaced(self.folder) or any(self.work.glob("embeddings-*"))
        if present and different and (has_begun or loses_queries):
            what = "another model" if "model" in different else f"other {different[0]}"
            remedy = f"resume it with them, or end it: dualenc migrate {self.folder} --rollback"
            raise DualencError(f"{self.work}: a migration with {what} is under way; {remedy}")
        return not different

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
        with explain(f"{path}: corrupt", f"end the migration: dualenc migrate {self.folder} --rollback"):
            order = np.asarray(np.load(path, allow_pickle=False))
            if not np.array_equal(np.sort(order), np.arange(len(order))):
                raise ValueError("it is not an order of rows")
        return order

    def stages(self, sampled: np.ndarray) -> list[Stage]:
        """A stage for each of `SHARES`; rows of the sample (n,) have vectors, and are not embedded again."""
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
        return meta.get("model_checksum") != self.notes["model_checksum"] or len(self.old) - stop < mapped

    def swap(self, old: Embeddings, new: Sequence[Embeddings], stop: int) -> None:
        """Replace INDEX by an index of its kind in the new space: new vectors for the first `stop` rows of the order.

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
        embeddings = Embeddings(self.old.ids, vectors, embeddings_meta, self.old.snippets, self.old.columns)
        options = _build_options(old_meta, self.work / "old")
        target = self.work / "next"
        factory = old_meta["factory"]
        Index.build(embeddings, None, factory, metric=old_meta["metric"], folder=target, **options)
        meta = {**read_json_object(target / "meta.json"), "mapped": len(order) - stop}
        meta["requested_factory"] = old_meta.get("requested_factory", factory)
        # Texts and BM25 know their index by the checksum of the items' file, which is thus not written anew.
        for name in (ITEMS, ORDER):
            remove(target / name)
            link(self.work / "old" / name, target / name)
            for entry in ("files", "sizes"):
                meta[entry][name] = old_meta[entry][name]
        _replace(self.folder, target, meta)
        remove(target)


def mixed_vectors(old: Any, to_new: LinearMap, new: Any, new_row: np.ndarray) -> ReadRows:
    """(N, D) vectors in a new model's space: row `new_row[i]` of `new` (n, D); for -1 row i of `old` (N, E), mapped."""
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


def work_folder(folder: str | os.PathLike[str]) -> Path:
    """The work folder beside an index, INDEX.migration."""
    target = Path(os.path.realpath(folder))
    return target.with_name(f"{target.name}.migration")


def is_started(folder: str | os.PathLike[str]) -> bool:
    """Whether a migration of an index is under way."""
    return (work_folder(folder) / "plan.json").is_file()


def remove_work(folder: str | os.PathLike[str]) -> None:
    """Remove the work folder of an index; the plan goes first, so that nothing resumes what is half removed."""
    remove(work_folder(folder) / "plan.json")
    remove(work_folder(folder))


def is_replaced(folder: str | os.PathLike[str]) -> bool:
    """Whether the migration that is under way has replaced the index."""
    plan = work_folder(folder) / "plan.json"
    return plan.is_file() and Index.open(folder).meta.get("model_checksum") == read_json_object(plan)["model"]


def roll_back(folder: str | os.PathLike[str]) -> bool:
    """Put the old index back, and remove the work folder; whether it was replaced.

    Raises:
        DualencError: no migration is under way.
    """
    if not is_started(folder):
        remedy = "a finished one has no old index; build it again"
        raise DualencError(f"{folder}: no migration is under way; {remedy}")
    replaced = is_replaced(folder)
    if replaced:
        old = work_folder(folder) / "old"
        _replace(Path(os.path.realpath(folder)), old, Index.open(old).meta)
    remove_work(folder)
    return replaced


def embedded_at(share: float, count: int) -> int:
    """How many of N documents are a share of them, rounded up."""
    return int(np.ceil(round(share * count, 6)))


def sample_rows(count: int, judged: np.ndarray, seed: int = 0) -> np.ndarray:
    """Rows of the sample, ascending: 2 % of N documents, at least 2,000 if there are, and the judged ones (n,)."""
    size = min(count, max(MIN_SAMPLE, embedded_at(SAMPLED_SHARE, count)))
    drawn = np.random.default_rng(seed).choice(count, size, replace=False)
    return np.union1d(drawn, judged).astype(np.int64)


def order_by_hits(index: Index, queries: np.ndarray) -> np.ndarray:
    """Rows (N,) by how often they are among the 10 results of queries (Q, D), most found first, ties by row."""
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
    """Options to build an index like the old one: tuned and measured if it was, refined by a file if it was."""
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
