"""`dualenc migrate`: options and checks; `migrate_index.py` does the work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dualenc.commands.options import BatchSize, refuse_together
from dualenc.errors import DualencError
from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from dualenc.search.migration.stages import RolledBack


def migrate(
    index: str,
    new_model: str | None = None,
    *,
    data: str | None = None,
    queries: str | None = None,
    report_only: bool = False,
    anyway: bool = False,
    rollback: bool = False,
    discard: bool = False,
    batch_size: BatchSize = 32,
    device: str | None = None,
) -> None:
    """Change the model of an index: measure what is to be expected, then embed its documents again,
    most found first.

    A sample is embedded with the new model, and maps between the two spaces are learned from it.
    The report compares the old model, mapped vectors and the new model. Then the index answers with
    the new model over mapped vectors, which give way to new ones as documents are embedded; where
    mapped vectors find significantly less, or no judgements tell, it stays the old one until enough
    are. The same command resumes an interrupted migration. Until it has ended the index takes no
    other change. The work folder is INDEX.migration, the report INDEX.migration.html.

    Args:
        index: an index of texts.
        new_model: model folder or name, of kind query-document.
        data: the documents, unless `dualenc index INDEX --texts` has kept them; by default what the
            index was made of. With a BEIR folder that has test judgements the report measures
            nDCG@10.
        queries: table of past queries, which decide the order; by default those of the BEIR folder,
            else the sample.
        report_only: stop after the report; the same command without it goes on.
        anyway: go on although the report shows that the new model finds significantly less than the
            old one; without judgements, serve mapped vectors.
        rollback: put the old index back and end the migration; what was embedded stays, to go on
            later.
        discard: with --rollback, remove these vectors, too.
        batch_size: texts per forward pass.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    if rollback:
        going_on = {"--report-only": report_only, "--anyway": anyway}
        refuse_together("--rollback", {**going_on, "--data": data, "--queries": queries})
    if report_only:
        refuse_together("--report-only", {"--anyway": anyway})
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DualencError("dualenc migrate runs in one process; start it without accelerate")
    if new_model is None and not rollback:
        raise DualencError(
            "dualenc migrate needs a model; name it: dualenc migrate INDEX NEW_MODEL"
        )
    if discard and not rollback:
        problem = "--discard removes what a migration has embedded"
        raise DualencError(f"{problem}; give it with --rollback, or leave it out")
    from dualenc.commands.migrate_index import migrate_index
    from dualenc.io.files import locked
    from dualenc.search.migration.migration_folder import work_folder
    from dualenc.search.migration.stages import roll_back

    with locked(work_folder(index), wait=False, option="INDEX"):
        if rollback or new_model is None:
            print(printable(f"{_told(index, roll_back(index, discard))} → {index}"))
        else:
            migrate_index(
                index,
                new_model,
                data,
                queries,
                report_only=report_only,
                anyway=anyway,
                batch_size=batch_size,
                device=device,
            )


def _told(index: str, done: RolledBack) -> str:
    """Return what a rollback did and left."""
    if done.was_over:
        return "the rest of an ended migration is removed, the index is as it was"
    state = "nothing had been replaced, the index is as it was"
    if done.replaced:
        state = "the old index is back"
    name = done.model or "NEW_MODEL"
    if done.kept:
        again = f"go on: dualenc migrate {index} {name}"
        remove = f"remove them: dualenc migrate {index} --rollback --discard"
        kept = f"{done.kept:,} vectors of {name} stay in {index}.migration"
        return f"{state}; {kept}; {again}, or {remove}"
    return f"{state}; removed: the measurements and {done.removed:,} vectors of {name}"
