"""`dualenc migrate URL`: change the model of a table of PostgreSQL or a collection of Qdrant."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from dualenc.commands.options import TableNames
from dualenc.commands.output import print_line
from dualenc.errors import DualencError
from dualenc.io.terminal import without_credentials

if TYPE_CHECKING:
    from dualenc.workflows.table_report import TableReport, TableRolledBack


@dataclass(frozen=True)
class TableOptions(TableNames):
    """A table of PostgreSQL or a collection of Qdrant, for a URL or its folder in place of INDEX.

    Args:
        old_model: model of the old vectors, for --data and --queries; by default the one that a
            folder records.
        where: condition on the rows of a table that get new vectors, such as year>=2020; may be
            repeated. The others have no vector after the switch.
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
    """Migrate a table or collection, finish its migration, or roll it back.

    Args:
        target: URL of the database, or the folder of a table or collection.
        new_model: the new model, unless the migration is finished or rolled back.
        options: the table or collection.
        settings: further arguments of `migrate_table` and `migrate_collection` in
            `dualenc.workflows`.
        rollback: put the old vectors back.
        discard: drop the new vectors too.
    """
    if "://" in target:
        if options.table is None:
            raise DualencError("a database has many tables", fix="name one: --table TABLE")
    elif given := [name for name, value in _of_columns(options).items() if value is not None]:
        raise DualencError(f"{given[0]} is recorded in {target}", fix="leave it out")
    engine = _engine_of(target, options)
    if options.finish:
        report = engine.finish()
        print_line(f"{report.location}: the old vectors are dropped{_describe_missing(report)}")
    elif rollback or new_model is None:
        done = engine.roll_back(discard=discard)
        print_line(f"{done.location}: {_describe_table_rollback(done)}")
    else:
        report = engine.migrate(new_model, on_report=_print_table_report, **settings)
        print_line(_describe_table(report, _again(target, options)))


def _again(target: str, options: TableOptions) -> str:
    """Return the command for the same table or collection, without passwords."""
    from dualenc.search.engines.factory import is_postgres

    shown = without_credentials(target)
    if is_postgres(target):
        # Needs psycopg.
        from dualenc.search.engines.postgres_url import without_secrets

        shown = without_secrets(target)
    words = ["dualenc", "migrate", shown]
    for name, value in _of_columns(options).items():
        words += [name, value] if value is not None else []
    return shlex.join(words)


def _of_columns(options: TableOptions) -> dict[str, str | None]:
    """Return the options that a pushed folder makes superfluous."""
    return {f"--{name}": getattr(options, name) for name in ("table", "id", "text", "vector")}


class _Engine(NamedTuple):
    """The functions of a workflow for a table or collection."""

    migrate: Callable[..., TableReport]
    finish: Callable[[], TableReport]
    roll_back: Callable[..., TableRolledBack]


def _engine_of(target: str, options: TableOptions) -> _Engine:
    """Return the functions that migrate a table of PostgreSQL, or a collection of Qdrant."""
    from dualenc.search.engines.factory import is_postgres
    from dualenc.search.engines.pushed_folder import is_pushed, read_pushed

    url = read_pushed(target).target if is_pushed(target) else target
    name = "postgres" if is_postgres(url) else "qdrant"
    kind = "table" if name == "postgres" else "collection"
    try:
        workflow = importlib.import_module(f"dualenc.workflows.migrate_{kind}")
    except ImportError as error:
        raise DualencError(str(error), fix=f"pip install 'dualenc[{name}]'") from None
    table, old, columns = options.table, options.old_model, options.columns()
    if name == "qdrant":
        if options.where:
            raise DualencError("--where is of PostgreSQL", fix="leave it out")
        return _Engine(
            partial(workflow.migrate_collection, target, table, columns=columns, old_model=old),
            partial(workflow.finish_collection, target, table),
            partial(workflow.roll_back_collection, target, table),
        )
    return _Engine(
        partial(
            workflow.migrate_table,
            target,
            table,
            columns=columns,
            where=options.where or (),
            old_model=old,
        ),
        partial(workflow.finish_table, target, table, columns=columns),
        partial(workflow.roll_back_table, target, table, columns=columns),
    )


def _print_table_report(report: TableReport) -> None:
    """Print the measurements of a table's sample."""
    from dualenc.evaluation.report_page import Table, print_table

    facts = [{"what": name, "value": value} for name, value in report.facts.items()]
    print_table(Table("Change of model", facts))
    if report.systems:
        print_table(report.short_table())


def _describe_table(report: TableReport, again: str) -> str:
    """Return what has become of a table or collection, and the next command."""
    if report.state == "measured":
        measured = report.verdict() if report.systems else "there are too few rows to measure"
        return f"{report.location}: {report.model}: {measured}; nothing is changed"
    if report.state == "finished":
        return f"{report.location}: all vectors are of {report.model}"
    found = f"{report.location}: searches find the vectors of {report.model} now"
    if report.place:
        found = f"{report.location}: search {report.place} with {report.model} now"
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
