"""`dualenc migrate`: change the model of an index, or of a table or collection of an engine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from dualenc.commands.migrate_table import TableOptions, migrate_table
from dualenc.commands.options import BatchSize, given_options, refuse_together
from dualenc.commands.output import print_line
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.search.migration.rollback import RolledBack
    from dualenc.workflows.migrate_model import MigrationReport


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
    allow_outside: bool = False,
    batch_size: BatchSize = 32,
    device: str | None = None,
    options: TableOptions,
) -> None:
    """Change the model of an index or a table: measure first, then embed its documents again.

    A sample is embedded with the new model, and maps between the two spaces are learned from it.
    The report compares the old model, candidates, mapped vectors and the new model. Then documents
    are embedded, those that queries find most often first, and what the report found best answers
    meanwhile: the new model over candidates that the old model finds, or over mapped vectors. If
    neither is better, or without judgements, the old index stays until enough documents are
    embedded. If the old model is gone, queries of the new one that are mapped into the old vectors
    find the candidates. The same command resumes an interrupted migration. Until it ends, the index
    takes no other change. The work folder is INDEX.migration, the report INDEX.migration.html.

    A table of PostgreSQL gets a second column of vectors, which is filled and indexed while clients
    read and write, and then takes the place of the first in a short transaction. Afterwards the
    same command fills rows that clients have written without a vector.

    Args:
        index: an index of texts or images, the folder of a table of PostgreSQL (`dualenc push`), or
            postgresql://user@host/database with --table.
        new_model: model folder or name, of the kind of the old one: query-document, image-text or
            image.
        data: the documents, unless the index keeps their texts (`dualenc index --texts`); by
            default what the index was made of. With a BEIR folder that has test judgements the
            report measures nDCG@10.
        queries: table of past queries, which decide the order; by default those of the BEIR folder,
            or the sample.
        report_only: stop after the report; the same command without it continues.
        anyway: continue although the new model finds significantly less than the old one; without
            judgements, answer by candidates or mapped vectors.
        rollback: put the old index back and end the migration; embedded vectors stay, for a later
            migration.
        discard: with --rollback, remove these vectors too.
        allow_outside: image paths may lead out of the folder of a table that you trust; candidates
            then do not answer, since searches never read such images.
        batch_size: texts or images per forward pass.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """
    if options.finish:
        others = {"--report-only": report_only, "--anyway": anyway, "--rollback": rollback}
        others |= {"--allow-outside": allow_outside}
        refuse_together("--finish", {**others, "--data": data, "--queries": queries})
    if rollback:
        others = {"--report-only": report_only, "--anyway": anyway}
        others |= {"--allow-outside": allow_outside}
        refuse_together("--rollback", {**others, "--data": data, "--queries": queries})
    # The report never replaces anything, so there is nothing to go on with anyway.
    if report_only:
        refuse_together("--report-only", {"--anyway": anyway})
    if discard and not rollback:
        raise DualencError(
            "--discard removes what a migration has embedded",
            fix="give it with --rollback, or leave it out",
        )
    if new_model is None and not rollback and not options.finish:
        raise DualencError(
            "dualenc migrate needs a model", fix="name it: dualenc migrate INDEX NEW_MODEL"
        )
    settings: dict[str, Any] = {"data": data, "queries": queries, "report_only": report_only}
    settings |= {"anyway": anyway, "batch_size": batch_size, "device": device}
    from dualenc.search.engines.pushed_folder import is_pushed

    if "://" in index or is_pushed(index):
        refuse_together("a table or collection", {"--allow-outside": allow_outside})
        migrate_table(index, new_model, options, settings, rollback=rollback, discard=discard)
        return
    given = [option for option, is_given in given_options(options).items() if is_given]
    if given:
        raise DualencError(
            f"{given[0]} is of a table of PostgreSQL or a collection of Qdrant",
            fix="leave it out, or name postgresql://user@host/database in place of INDEX",
        )
    from dualenc.workflows import migrate_model

    if rollback or new_model is None:
        done = migrate_model.roll_back(index, discard)
        print_line(f"{_describe_rollback(index, done)} → {index}")
        return
    report = migrate_model.migrate(
        index,
        new_model,
        **settings,
        allow_outside=allow_outside,
        # Shown before the documents are embedded, which may take hours.
        on_report=_print_report,
    )
    _print_outcome(index, new_model, report)


def _describe_rollback(index: str, done: RolledBack) -> str:
    """Return what a rollback has replaced, kept and removed."""
    if done.was_over:
        return "the rest of an ended migration is removed, the index is unchanged"
    state = "nothing had been replaced, the index is unchanged"
    if done.replaced:
        state = "the old index is back"
    name = done.model or "NEW_MODEL"
    if done.kept:
        again = f"go on: dualenc migrate {index} {name}"
        remove = f"remove them: dualenc migrate {index} --rollback --discard"
        kept = f"{done.kept:,} vectors of {name} stay in {index}.migration"
        return f"{state}; {kept}; {again}, or {remove}"
    return f"{state}; removed: the measurements and {done.removed:,} vectors of {name}"


def _print_report(report: MigrationReport) -> None:
    """Print the measurements, and what they mean for the index."""
    from dualenc.evaluation.report_page import Table, print_table

    facts = [{"what": name, "value": value} for name, value in report.facts.items()]
    print_table(Table("Change of model", facts))
    print_table(report.short_table())
    # The first share of new vectors at which the index answers with the new model.
    share = min(report.served)
    if report.meanwhile == "candidates":
        print_line(_describe_candidates(report))
    elif share > 0:
        problem = (
            "mapped vectors find significantly less than the old model, and candidates not "
            "significantly more"
        )
        if not report.is_judged():
            problem = (
                "without judgements mapped vectors cannot be compared with the old model "
                "(name a BEIR folder by --data, or serve them by --anyway)"
            )
        print(f"{problem}: the old index stays until {share:.0%} of it is re-embedded")
    if report.is_worse():
        other = "the old one" if report.has_old() else "its queries mapped into the old vectors"
        print(f"the new model finds significantly less than {other}")
    print_line(f"report: {report.page}")


def _describe_candidates(report: MigrationReport) -> str:
    """Return what candidates find, how long they take, and how to search without them."""
    took = ""
    for when in ("cold", "warm"):
        seconds = report.facts.get(f"seconds per query by candidates, {when}")
        # After a resumption the time of the sample, and so of a cold query, is unknown.
        if isinstance(seconds, float):
            took += f", {when} {seconds:.2g} s per query"
    found = f"({report.candidates_verdict()}{took})"
    begin = "until all documents are embedded, the new model ranks the candidates of"
    if not report.has_old():
        return f"{begin} its own queries, mapped into the old vectors {found}"
    alone = f'dualenc search {report.index} --model {report.old_model} "…"'
    return f"{begin} the old one {found}; the old index alone: {alone}"


def _print_outcome(index: str, new_model: str, report: MigrationReport) -> None:
    """Print what has become of the index, and the next command."""
    if report.state == "unchanged":
        print_line(f"all {report.num_vectors:,} vectors are of this model → {index}")
    elif report.state == "measured":
        verdict = f"{report.model}: {report.verdict()}; nothing is replaced"
        if report.meanwhile == "candidates":
            verdict += ", and after the next command searches answer by the new model at once"
        # At the end, so that it can be copied.
        print_line(f"{verdict}; next: {shlex.join(['dualenc', 'migrate', index, new_model])}")
    else:
        verdict = f"{report.model} has replaced {report.old_model}: {report.verdict()}"
        rest = "the old index is removed, and no rollback is left"
        print_line(f'{verdict}; {rest}; next: dualenc search {shlex.quote(index)} "…"')
