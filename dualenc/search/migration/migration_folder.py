"""The work folder of a migration, INDEX.migration: its plan and progress, and a guard for INDEX.

An index must not change while a migration embeds its documents, because the next swap would undo
the change. Commands that change an index call `check_unmigrated` first, under the lock of the
index, which a migration holds while it reads the index.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualenc.data.store.identity import digest_of
from dualenc.data.store.items import ITEMS, read_batches
from dualenc.data.store.vector_shards import is_embeddings
from dualenc.errors import DualencError
from dualenc.io.files import is_folder_of, is_locked, recover, remove, write_json
from dualenc.io.provenance import Provenance
from dualenc.io.reading import read_json_object
from dualenc.search.migration.vector_cache import VectorCache
from dualenc.types import StrPath

FORMAT = "dualenc migration"
PLAN = "plan.json"
INDEX_FORMAT = "dualenc index"
TEXTS = "texts"
_INDEXES = ("old", "next")
TEXTS_FORMAT = "dualenc texts"
TO_OLD = "to_old.safetensors"
"""Map of the new model's queries to the old space, which is there if the old model is gone."""
BY_CANDIDATES = "candidates"
"""Value of the plan's entry `serves` while searches answer by candidates."""
_EMBEDDINGS = re.compile(r"sample|embeddings-\d+")
_CACHE = re.compile(r"candidates-[0-9a-f]+\.sqlite(-journal)?")
_RECORDS = {"report.json": {"facts", "systems", "served"}, "documents.json": {"source"}}
"""JSON files with their entries, by which a work folder without a plan is recognized."""
_ARRAYS = ("documents.npy", "order.npy", "map.safetensors", TO_OLD)


def work_folder(folder: StrPath) -> Path:
    """Return the work folder beside an index, INDEX.migration.

    Args:
        folder: the index.
    """
    target = Path(os.path.realpath(folder))
    return target.with_name(f"{target.name}.migration")


def read_plan(folder: StrPath) -> dict[str, Any] | None:
    """Return the plan of an index's migration, or None.

    The remains of a finished migration whose process was killed count as none. A plan that is
    corrupt, or missing although the index is not finished, is {}.

    Args:
        folder: the index.

    Raises:
        DualencError: INDEX.migration is a file, or a folder that no migration wrote.
    """
    work = work_folder(folder)
    if not os.path.lexists(work):
        return None
    path = work / PLAN
    plan: dict[str, Any] | None = None
    if work.is_dir() and path.is_file():
        plan = _read_or_empty(path)
        if plan.get("format") == FORMAT:
            return plan
    if not _is_work(work, is_empty_ours=plan is None):
        raise DualencError(
            "exists and was not written by a migration", fix="move it away", where=work
        )
    if is_replaced(folder) and read_record(folder).mapped:
        return {}
    return None if plan is None else {}


def _is_work(work: Path, is_empty_ours: bool) -> bool:
    """Return True if a folder contains only what a migration writes."""
    if not work.is_dir() or work.is_symlink():
        return False
    is_known = False
    for path in work.iterdir():
        is_temporary = re.fullmatch(r"\..*\.part", path.name)
        if path.name in (PLAN, *_ARRAYS) or is_temporary or _CACHE.fullmatch(path.name):
            continue
        # The name alone proves nothing: users may have their own folder "old" or "next".
        # A killed process may leave a folder with nothing but its lock.
        is_bare = path.is_dir() and set(os.listdir(path)) <= {"create.lock"}
        if path.name in _INDEXES:
            is_own = is_bare or is_folder_of(path, INDEX_FORMAT)
        elif _EMBEDDINGS.fullmatch(path.name):
            is_own = is_bare or is_embeddings(path)
        elif path.name == TEXTS:
            is_own = is_folder_of(path, TEXTS_FORMAT)
        else:
            expected = _RECORDS.get(path.name)
            is_own = expected is not None and expected <= _read_or_empty(path).keys()
        if not is_own:
            return False
        is_known = True
    # A process killed at the start has left nothing, or the plan half-written.
    is_bare_work = all(re.fullmatch(rf"\.{PLAN}.*\.part", name) for name in os.listdir(work))
    return is_known or (is_empty_ours and is_bare_work)


def _read_or_empty(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if it is corrupt."""
    try:
        return read_json_object(path)
    except DualencError:
        return {}


def is_replaced(folder: StrPath) -> bool:
    """Return True if the migration has replaced INDEX: it has the old items, but another model.

    Args:
        folder: the index.
    """
    old = work_folder(folder) / "old"
    if not is_folder_of(old, INDEX_FORMAT):
        return False
    # A process killed within the swap has left INDEX beside its place.
    recover(folder)
    before, after = (read_record(each) for each in (old, folder))
    # An index that somebody has appended to or rebuilt meanwhile has other items.
    same_items = before.files.get(ITEMS) == after.files.get(ITEMS)
    is_other_model = before.model_checksum != after.model_checksum
    return after.mapped is not None and same_items and is_other_model


def read_record(folder: StrPath) -> Provenance:
    """Return what the meta.json of an index records, without checking its files."""
    return Provenance.unchecked(folder, {"files": dict})


def has_begun(folder: StrPath) -> bool:
    """Return True if the migration has embedded more than its sample, or replaced the index.

    From the moment that searches may answer by candidates it has begun, too.

    Args:
        folder: the index.
    """
    patterns = ("embeddings-*", "candidates-*.sqlite")
    is_embedding = any(_found(work_folder(folder), pattern) for pattern in patterns)
    return is_embedding or is_replaced(folder)


def candidates_plan(folder: StrPath) -> dict[str, Any] | None:
    """Return the plan of a migration whose searches answer by candidates; None without any.

    That is so from the start of the embedding until INDEX has the new model's vectors.

    Args:
        folder: the index.
    """
    try:
        plan = read_plan(folder)
        if plan is None or is_over(plan) or plan.get("serves") != BY_CANDIDATES:
            return None
        # Candidates are rows of the old index, so INDEX must have its items and vectors.
        now, before = (read_record(each) for each in (folder, work_folder(folder) / "old"))
    except DualencError:  # not a folder of ours, or one that is being removed
        return None
    return plan if now.files == before.files else None


def cache_path(folder: StrPath, plan: Mapping[str, Any]) -> Path:
    """Return the file of `VectorCache` for the new model and the documents of a plan.

    Args:
        folder: the index.
        plan: its entries `model` and `texts` or `images`, which identify the vectors.
    """
    key = digest_of(str(plan.get("model")), str(plan.get("texts", plan.get("images"))))
    return work_folder(folder) / f"candidates-{key[:16]}.sqlite"


def embedded_count(folder: StrPath) -> int:
    """Return the number of vectors of the new model in the work folder.

    These are the sample, the embedded documents, and what searches have embedded.

    Args:
        folder: the index.
    """
    count = 0
    candidates: set[str] = set()
    for path in _found(work_folder(folder), "candidates-*.sqlite"):
        candidates |= VectorCache(path, dim=0).ids()
    for path in new_shards(work_folder(folder)):
        with suppress(DualencError):  # a corrupt shard is embedded again, so it does not count
            for batch in read_batches(path, "migrate again"):
                count += len(batch)
                candidates.difference_update(batch.column("id").to_pylist() if candidates else ())
    return count + len(candidates)


def new_shards(work: Path) -> list[Path]:
    """Return the finished shards of embeddings with the new model, sorted."""
    return _found(work, "embeddings-*/data-*.arrow") + _found(work, "sample/data-*.arrow")


def _found(work: Path, pattern: str) -> list[Path]:
    """Return what matches a pattern, sorted; a folder that is being removed has nothing."""
    # `Path.glob` fails where a folder goes away while it looks.
    return [work / name for name in sorted(glob.glob(pattern, root_dir=work))]


def check_unmigrated(folder: StrPath) -> None:
    """Raise if a migration of an index is running or was interrupted.

    Args:
        folder: the index, or a folder without one.

    Raises:
        DualencError: a migration is under way; the message says how to finish or roll it back.
    """
    if not is_folder_of(folder, INDEX_FORMAT):
        return
    work = work_folder(folder)
    back = f"dualenc migrate {folder} --rollback"
    if is_locked(work):
        raise DualencError(
            "`dualenc migrate` is changing its model, and would undo the change",
            fix=f"wait for its end, or stop it and run {back}",
            where=folder,
        )
    try:
        plan = read_plan(folder)
    except DualencError:  # not a folder of ours, so not our concern
        return
    # A migration that has only measured loses little: its next start begins again.
    if plan is not None and not is_over(plan) and has_begun(folder):
        name = plan.get("name", "NEW_MODEL")
        raise DualencError(
            f"its model is being changed to {name}, in {work.name}",
            fix=f"finish it: dualenc migrate {folder} {name}, or end it: {back}",
            where=folder,
        )


def is_over(plan: dict[str, Any]) -> bool:
    """Return True if a migration has ended or was rolled back, so it replaces nothing."""
    return "ended" in plan or bool(plan.get("rolled_back"))


def remove_work(folder: StrPath, ended: str = "finished") -> None:
    """Remove the work folder of an index.

    Args:
        folder: the index.
        ended: how the migration ended, for the plan.
    """
    work = work_folder(folder)
    # Mark the plan first: a removal that is killed halfway must not look like a migration.
    if read_plan(folder) is not None:
        write_json(work / PLAN, {"format": FORMAT, "ended": ended})
        # Searches that are still open must not write while the folder is removed.
        for path in _found(work, "candidates-*.sqlite"):
            VectorCache(path, dim=0).remove()
    remove(work)
