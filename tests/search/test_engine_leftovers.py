"""`dualenc check` names what killed pushes and migrations have left in a database."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dualenc.io.files import locked
from dualenc.search.checks.findings import Finding
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.engines.postgres_migration import TableMigration
from dualenc.workflows.check_vectors import check
from dualenc.workflows.migrate_table import finish_table, migrate_table, roll_back_table
from dualenc.workflows.record_table import record_table
from tests.helpers.migrated_table import make_table
from tests.helpers.postgres_rows import execute
from tests.helpers.pushed import embeddings

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")


def dies_before(kind: type, function: str, action: Any) -> None:
    """Run an action in another process, which is killed when it calls a function."""

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        setattr(kind, function, killed)
        action()

    child = FORK.Process(target=act)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def finding(folder: Path, name: str) -> Finding:
    [found] = [each for each in check(folder).findings if each.name == name]
    return found


def test_the_second_table_of_a_killed_replacement(postgres: str, tmp_path: Path) -> None:
    push_embeddings(embeddings(), postgres, "docs")[0].save(tmp_path)
    assert finding(tmp_path, "swaps").state == "ok"
    others = embeddings(seed=1)

    def replace() -> None:
        push_embeddings(others, postgres, "docs", replace=True)

    dies_before(Engine, "finish", replace)
    [(left,)] = execute(postgres, "SELECT tablename FROM pg_tables WHERE tablename LIKE 'docs-%'")
    found = finding(tmp_path, "swaps")
    assert found.state == "alarm"
    assert f"a push with --replace has left {left}; the same push again" in found.line
    assert found.numbers == {"left": [left]}
    # One that is running holds the folder.
    with locked(tmp_path):
        assert finding(tmp_path, "swaps").state == "ok"
    engine = push_embeddings(others, postgres, "docs", replace=True)[0]
    engine.save(tmp_path)
    assert finding(tmp_path, "swaps").state == "ok"


def test_a_migration_of_a_table_from_its_beginning_to_its_end(
    postgres: str, toy_text: Path, tmp_path: Path
) -> None:
    make_table(postgres, "docs_of_others")
    record_table(postgres, "docs_of_others", tmp_path / "docs")
    assert finding(tmp_path / "docs", "migration").line == "none is under way"

    def migrate() -> None:
        options: dict[str, Any] = {"progress": False, "device": "cpu"}
        if not running:
            options["on_report"] = lambda _: running.append(finding(tmp_path / "docs", "migration"))
        migrate_table(postgres, "docs_of_others", str(toy_text), **options)

    running: list[Any] = [None]
    dies_before(TableMigration, "build_indexes", migrate)
    half = finding(tmp_path / "docs", "migration")
    assert half.state == "alarm"
    assert half.line.startswith(f"half migrated to {toy_text}; the same `dualenc migrate` resumes")
    running.clear()
    migrate()
    assert [(each.state, each.line) for each in running] == [("ok", "`dualenc migrate` is running")]
    switched = finding(tmp_path / "docs", "migration")
    assert (switched.state, "has replaced the old model" in switched.line) == ("ok", True)
    roll_back_table(postgres, "docs_of_others")
    back = finding(tmp_path / "docs", "migration")
    assert (back.state, "was rolled back; its vectors are kept" in back.line) == ("ok", True)
    migrate()
    finish_table(postgres, "docs_of_others")
    assert finding(tmp_path / "docs", "migration").line == "none is under way"
