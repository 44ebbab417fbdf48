"""End a migration: put the old index back, and keep or remove the vectors of the new model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from dualenc.errors import DualencError
from dualenc.io.files import locked, write_json
from dualenc.search.index.open import Index
from dualenc.search.migration.migration_folder import (
    FORMAT,
    PLAN,
    embedded_count,
    has_begun,
    is_over,
    is_replaced,
    read_plan,
    remove_work,
    work_folder,
)
from dualenc.search.migration.replacement import replace_index
from dualenc.types import StrPath


class RolledBack(NamedTuple):
    """What a rollback did.

    At most one of `kept` and `removed` is above 0.

        print(roll_back("index").kept, "vectors are kept for a resumption")

    Attributes:
        model: the new model, or None if unknown.
        replaced: whether the old index was put back; otherwise it had not been replaced.
        kept: number of vectors of the new model that are kept in the work folder.
        removed: number of vectors of the new model that were removed.
        was_over: whether the migration had already ended, and only its remains were removed.
    """

    model: str | None
    replaced: bool = False
    kept: int = 0
    removed: int = 0
    was_over: bool = False


def roll_back(folder: StrPath, discard: bool = False) -> RolledBack:
    """Put the old index back, and keep the embedded vectors for a resumption.

    If the migration has only measured, its sample and its measurements are removed.

    Args:
        folder: the index.
        discard: remove the embedded vectors, too.

    Raises:
        DualencError: no migration is under way, or the work folder was not written by one.
    """
    plan = read_plan(folder)
    work = work_folder(folder)
    if plan is None or "ended" in plan:
        # What a killed process has left of a migration that had ended.
        is_rest = work.exists()
        remove_work(folder)
        if is_rest and (plan is None or plan["ended"] == "rolled back"):
            return RolledBack(None, was_over=True)
        raise DualencError(
            "no migration is under way",
            fix="the old index of a finished one is gone; build it again",
            where=folder,
        )
    is_worth_keeping = is_over(plan) or has_begun(folder)
    with locked(folder):
        # INDEX is missing if somebody has removed it while it was migrated.
        replaced = not Path(folder).exists() or is_replaced(folder)
        if replaced:
            old = work / "old"
            replace_index(Path(os.path.realpath(folder)), old, Index.open(old).provenance)
    count = embedded_count(folder)
    model = plan.get("name")
    # A repeated migration to the same model then embeds only the rest.
    if is_worth_keeping and count and not discard:
        # Searches answer by the old vectors again; what they have embedded stays, too.
        kept = {name: value for name, value in plan.items() if name != "serves"}
        write_json(work / PLAN, {**kept, "format": FORMAT, "rolled_back": True})
        return RolledBack(model, replaced, kept=count)
    remove_work(folder, "rolled back")
    return RolledBack(model, replaced, removed=count)
