"""What killed or unfinished commands have left: migrations, swaps, pushes, work folders."""

from __future__ import annotations

import os
from pathlib import Path

from dualenc.data.store.vector_shards import is_embeddings, read_provenance
from dualenc.errors import DualencError
from dualenc.io.files import is_written_now, left_by_killed
from dualenc.search.checks.findings import Finding, alarm, judged, ok, skipped
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.pushed_folder import is_pushed
from dualenc.search.migration.migration_folder import (
    embedded_count,
    has_begun,
    is_over,
    read_plan,
    read_record,
    work_folder,
)

SWAPS = "swaps"
MIGRATION = "migration"


def check_swaps(folder: Path) -> Finding:
    """Return an alarm if a writer was killed; call before the folder is opened, which repairs it.

    Args:
        folder: index, embeddings, or what `dualenc push` wrote.
    """
    if is_written_now(folder):
        return ok(SWAPS, "another process writes it now")
    left = left_by_killed(folder)
    target = Path(os.path.realpath(folder))
    building = target.with_name(f".{target.name}.building")
    if building.is_dir():
        left.append(str(building))
    if left:
        line = (
            f"a killed process has left {', '.join(left)}; the next command that writes removes it"
        )
        return alarm(SWAPS, line, left=left)
    if is_embeddings(folder) and not read_provenance(folder).complete:
        return alarm(SWAPS, "the embeddings are not finished; run the same `dualenc embed` again")
    return ok(SWAPS, "no writer was killed")


def check_engine(folder: Path, engine: Engine, swaps: Finding) -> list[Finding]:
    """Return the findings "swaps" and "migration" of a database.

    Args:
        folder: what `dualenc push` wrote.
        engine: the opened engine.
        swaps: the finding about the folder.
    """
    try:
        left = [] if is_written_now(folder) else engine.leftovers()
        is_unfinished, line = engine.migration()
    except DualencError as error:
        return [swaps, skipped(MIGRATION, str(error))]
    if left and swaps.state == "ok":
        problem = f"a push with --replace has left {', '.join(left)}"
        remedy = "the same push again ends it, or the next one of other embeddings removes it"
        swaps = alarm(SWAPS, f"{problem}; {remedy}", left=left)
    return [swaps, judged(MIGRATION, is_unfinished, line)]


def check_migration(folder: Path) -> Finding:
    """Return an alarm if a migration was interrupted, or its work folder is damaged or left over.

    Args:
        folder: the index.
    """
    if is_pushed(folder) or is_embeddings(folder):
        return skipped(MIGRATION, "only an index or a table is migrated")
    work = work_folder(folder)
    if is_written_now(work):
        return ok(MIGRATION, "`dualenc migrate` is running")
    try:
        plan = read_plan(folder)
    except DualencError as error:
        return skipped(MIGRATION, str(error))
    mapped = read_record(folder).mapped or 0
    back = f"dualenc migrate {folder} --rollback"
    if plan is None and mapped:
        line = f"{mapped:,} vectors are mapped, and the work folder of the migration is gone"
        return alarm(MIGRATION, line, mapped=mapped)
    if plan is None:
        return ok(MIGRATION, "none is under way")
    if not plan:
        return alarm(MIGRATION, f"{work} is damaged; end it: {back}", mapped=mapped)
    name = plan.get("name", "NEW_MODEL")
    if "ended" in plan:
        return alarm(MIGRATION, f"a killed process has left {work}; remove it: {back}")
    count = embedded_count(folder)
    numbers = {"embedded": count, "mapped": mapped}
    if is_over(plan):
        line = f"one to {name} was rolled back; {count:,} vectors are kept in {work.name}"
        return ok(MIGRATION, line, **numbers)
    if not has_begun(folder):
        return ok(MIGRATION, f"one to {name} has only measured", **numbers)
    line = f"half migrated to {name}: {count:,} vectors are embedded"
    return alarm(MIGRATION, f"{line}; finish: dualenc migrate {folder} {name}", **numbers)
