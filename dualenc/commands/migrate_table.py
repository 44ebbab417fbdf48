"""`dualenc migrate postgresql://…`: change the model of a table of PostgreSQL."""

from __future__ import annotations

import importlib
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dualenc.commands.options import TableNames
from dualenc.commands.output import print_line
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.workflows.migrate_table import TableReport, TableRolledBack


@dataclass(frozen=True)
class TableOptions(TableNames):
    """A table of PostgreSQL, for a URL or the folder of a table in place of INDEX.

    Args:
        old_model: model of the old vectors, for --data and --queries; by default the one that the
            folder of a table records.
        where: condition on the rows that get new vectors, such as year>=2020; may be repeated. The
            others have no vector after the switch.
        finish: after the switch, drop the old vectors; no rollback is left.
    """

    old_model: str | None = None
    where: Annotated[list[str] | None, Parameter(negative_iterable="")] = None
    finish: bool = False


def migrate_table(
    target: str,
    new_model: str | None,
    options: TableOptions,
    settings: dict[str, Any],
    *,
    rollback: bool,
    discard: bool,
) -> None:
    """Migrate a table of PostgreSQL, finish its migration, or roll it back.

    Args:
        target: URL of the database, or folder of a table.
        new_model: the new model, unless the migration is finished or rolled back.
        options: the table.
        settings: further arguments of `dualenc.workflows.migrate_table.migrate_table`.
        rollback: put the old vectors back.
        discard: drop the new vectors too.
    """
    from dualenc.search.engines.factory import is_postgres

    if "://" in target and not is_postgres(target):
        raise DualencError(
            "only tables of PostgreSQL migrate in place",
            fix="write postgresql://user@host/database, or push again with --replace",
        )
    try:
        workflow = importlib.import_module("dualenc.workflows.migrate_table")
    except ImportError as error:
        raise DualencError(str(error), fix="pip install 'dualenc[postgres]'") from None
    columns = options.columns()
    if options.finish:
        report = workflow.finish_table(target, options.table, columns=columns)
        print_line(f"{report.location}: the old vectors are dropped{_describe_missing(report)}")
    elif rollback or new_model is None:
        done = workflow.roll_back_table(target, options.table, columns=columns, discard=discard)
        print_line(f"{done.location}: {_describe_table_rollback(done)}")
    else:
        report = workflow.migrate_table(
            target,
            options.table,
            new_model,
            columns=columns,
            old_model=options.old_model,
            where=options.where or (),
            on_report=_print_table_report,
            **settings,
        )
        print_line(_describe_table(report, _place(target, options)))


def _place(target: str, options: TableOptions) -> str:
    """Return how a command names the table, without the password of a URL."""
    words = [target] if options.table is None else ["URL", "--table", options.table]
    return shlex.join(words)


def _print_table_report(report: TableReport) -> None:
    """Print the measurements of a table's sample."""
    from dualenc.evaluation.report_page import Table, print_table

    facts = [{"what": name, "value": value} for name, value in report.facts.items()]
    print_table(Table("Change of model", facts))
    if report.systems:
        print_table(report.table())


def _describe_table(report: TableReport, place: str) -> str:
    """Return what has become of a table, and the next command."""
    if report.state == "measured":
        measured = report.verdict() if report.systems else "there are too few rows to measure"
        return f"{report.location}: {report.model}: {measured}; nothing is changed"
    if report.state == "finished":
        return f"{report.location}: all vectors are of {report.model}"
    found = f"{report.location}: searches find the vectors of {report.model} now"
    again = f"dualenc migrate {place}"
    rest = f"the old ones stay until {again} --finish, and come back by {again} --rollback"
    return f"{found}{_describe_missing(report)}; {rest}"


def _describe_missing(report: TableReport) -> str:
    """Return how many rows have no vector."""
    return f"; {report.missing:,} rows have no vector" if report.missing else ""


def _describe_table_rollback(done: TableRolledBack) -> str:
    """Return what a rollback of a table has changed."""
    state = "searches find the old vectors again" if done.switched else "nothing had been switched"
    if done.missing:
        state += f"; {done.missing:,} rows have no old vector, since their texts are newer"
    rest = (
        "those of {} are dropped" if done.discarded else "those of {} stay (--discard drops them)"
    )
    return f"{state}; {rest.format(done.model)}"
