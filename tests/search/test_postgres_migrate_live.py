"""A table of PostgreSQL migrates while clients read and write, processes die and the server
restarts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from dualenc.errors import DualencError
from dualenc.search.engines import postgres_locks
from dualenc.search.engines.postgres_migration import TableMigration
from dualenc.workflows import migrate_table as workflow
from tests.helpers import toy
from tests.helpers.migrated_table import OLD_DIM, check_vectors, embedded, make_table
from tests.helpers.postgres_rows import execute
from tests.helpers.postgres_server import own_server
from tests.helpers.waiting import wait_for
from tests.helpers.working_clients import WorkingClients

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
STABLE = 40
"""Rows that clients leave alone."""


def migrate(target: str, table: str, model: Path, **options: Any) -> Any:
    options = {"progress": False, "device": "cpu", "batch_size": 4, **options}
    return workflow.migrate_table(target, table, str(model), **options)


class Clients(WorkingClients):
    """A client that writes 1,000 rows and one that searches, each by the model of the moment."""

    def __init__(self, target: str, table: str, model: Path) -> None:
        super().__init__()
        self.target = target
        self.table = table
        self.pool = sorted(set(toy.texts(120)))
        self.new = embedded(model, self.pool)
        self.old = np.random.default_rng(7).normal(size=(len(self.pool), OLD_DIM))
        self.stable = embedded(model, toy.texts(STABLE))
        self.searches = {OLD_DIM: 0, self.new.shape[1]: 0}
        self.longest = 0.0

    def dim(self, connection: psycopg.Connection, mode: str) -> int:
        """Lock the table against the switch, and ask which vectors it has."""
        connection.execute(f"LOCK TABLE {self.table} IN {mode} MODE")
        query = "SELECT atttypmod FROM pg_attribute WHERE attrelid = %s::regclass AND attname = %s"
        [dim] = connection.execute(query, [self.table, "embedding"]).fetchone() or [0]
        return dim

    def write(self) -> None:
        random = np.random.default_rng(1)
        with psycopg.connect(self.target) as connection:
            for number in range(1000):
                row = int(random.integers(len(self.pool)))
                id = int(random.integers(STABLE, 400))
                with connection.transaction():
                    is_old = self.dim(connection, "ROW EXCLUSIVE") == OLD_DIM
                    vector = str((self.old if is_old else self.new)[row].tolist())
                    if number % 3 == 0:
                        statement = f"DELETE FROM {self.table} WHERE id = %s"
                        connection.execute(statement, [id])  # type: ignore[call-overload]
                    else:
                        statement = f"""
                            INSERT INTO {self.table} (id, body, embedding) VALUES (%s, %s, %s)
                            ON CONFLICT (id) DO UPDATE
                            SET body = excluded.body, embedding = excluded.embedding
                        """
                        values = [id, self.pool[row], vector]
                        connection.execute(statement, values)  # type: ignore[call-overload]
                self.written += 1
                time.sleep(0.003)

    def read(self) -> None:
        random = np.random.default_rng(2)
        search = f"SELECT body FROM {self.table} ORDER BY embedding <=> %s::vector LIMIT 5"
        with psycopg.connect(self.target) as connection:
            while not self.done.is_set():
                row = int(random.integers(STABLE))
                started = time.monotonic()
                with connection.transaction():
                    dim = self.dim(connection, "ACCESS SHARE")
                    is_old = dim == OLD_DIM
                    vector = str((self.old if is_old else self.stable)[row].tolist())
                    found = connection.execute(search, [vector]).fetchall()  # type: ignore[call-overload]
                self.longest = max(self.longest, time.monotonic() - started)
                assert len(found) == 5
                self.searches[dim] += 1
                if not is_old:
                    # The row itself, or one of the same text.
                    assert found[0][0] == toy.texts(STABLE)[row]


def test_clients_read_and_write_while_it_runs(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "written_texts", 400)
    clients = Clients(postgres, "written_texts", toy_text)
    report = clients.run(lambda: migrate(postgres, "written_texts", toy_text))
    assert clients.errors == []
    assert report.state == "switched"
    assert clients.written == 1000
    assert min(clients.searches.values()) > 5
    check_vectors(postgres, "written_texts", toy_text)


KILLS = [
    ("_add_columns", 1),
    ("_copy_grants", 1),
    ("pending", 1),
    ("store", 1),
    ("store", 2),
    ("store", 4),
    ("count_pending", 2),
    ("build_indexes", 1),
    ("switch", 1),
    ("_rename", 1),
    ("_rename", 2),
    ("_rename_indexes", 2),
    ("_record", 1),
    ("count_missing", 1),
]


def dies_at(target: str, table: str, model: Path, function: str, call: int) -> None:
    """Migrate, and die at a call of a function."""
    original = getattr(TableMigration, function)
    calls: list[int] = []

    def dying(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(TableMigration, function, dying)
    migrate(target, table, model)


@pytest.mark.parametrize(("function", "call"), KILLS)
def test_the_same_command_resumes_after_a_kill(
    postgres: str, toy_text: Path, function: str, call: int
) -> None:
    table = f"killed_{function}_{call}"
    make_table(postgres, table)
    child = FORK.Process(target=dies_at, args=(postgres, table, toy_text, function, call))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    query = (
        f"SELECT count(*), min(vector_dims(embedding)), max(vector_dims(embedding)) FROM {table}"
    )
    [(count, low, high)] = execute(postgres, query)
    assert (count, low) == (60, high)
    assert migrate(postgres, table, toy_text).state == "switched"
    check_vectors(postgres, table, toy_text)
    left = f"SELECT count(*) FROM pg_index WHERE indrelid = '{table}'::regclass AND NOT indisvalid"
    assert execute(postgres, left) == [(0,)]
    workflow.finish_table(postgres, table)


def dies_in(target: str, table: str, action: Callable[..., Any], function: str) -> None:
    """Finish or roll back, and die after a step of it."""
    original = getattr(TableMigration, function)

    def dying(*arguments: Any) -> None:
        original(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(TableMigration, function, dying)
    action(target, table)


@pytest.mark.parametrize(
    ("action", "function"),
    [
        (workflow.finish_table, "_require_vectors"),
        (workflow.finish_table, "_record"),
        (workflow.roll_back_table, "_rename"),
        (workflow.roll_back_table, "_record"),
        (workflow.roll_back_table, "_require_vectors"),
    ],
)
def test_a_killed_end_leaves_the_way_back(
    postgres: str, toy_text: Path, action: Callable[..., Any], function: str
) -> None:
    table = f"ended_{action.__name__}{function}"
    make_table(postgres, table)
    execute(postgres, f"ALTER TABLE {table} ALTER embedding SET NOT NULL")
    rows = f"SELECT id, embedding::text FROM {table} ORDER BY id"
    before = execute(postgres, rows)
    migrate(postgres, table, toy_text)
    child = FORK.Process(target=dies_in, args=(postgres, table, action, function))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    workflow.roll_back_table(postgres, table)
    assert execute(postgres, rows) == before
    # Clients that know nothing of the new column can write.
    vector = str([1.0] * OLD_DIM)
    execute(postgres, f"INSERT INTO {table} (id, body, embedding) VALUES (999, 'ant', %s)", vector)
    migrate(postgres, table, toy_text)
    workflow.finish_table(postgres, table)
    check_vectors(postgres, table, toy_text)
    with pytest.raises(psycopg.errors.NotNullViolation):
        execute(postgres, f"INSERT INTO {table} (id, body) VALUES (1000, 'ant')")


@pytest.mark.nightly
def test_thirty_kills_at_random_moments(
    postgres: str, toy_text: Path, record_property: Callable[[str, object], None]
) -> None:
    random = np.random.default_rng(int(os.environ.get("DUALENC_TEST_SEED", "0")))
    kills = tables = 0
    while kills < 30:
        tables += 1
        table = f"random_kills_{tables}"
        make_table(postgres, table, 300)
        status: int | None = -1
        while status:
            child = FORK.Process(target=migrate, args=(postgres, table, toy_text))
            child.start()
            child.join(random.uniform(0.05, 2.0))
            child.kill()
            child.join()
            status = child.exitcode
            kills += status == -signal.SIGKILL
            assert status in (0, -signal.SIGKILL)
            query = f"SELECT id FROM {table} ORDER BY embedding <=> (SELECT embedding FROM {table} "
            found = execute(postgres, f"{query} WHERE id = 5) LIMIT 3")
            assert len(found) == 3
            execute(postgres, f"UPDATE {table} SET body = 'hen ' || body WHERE id = %s", kills)
        # Rows that were written after the switch had been made are the clients' own.
        workflow.roll_back_table(postgres, table)
        migrate(postgres, table, toy_text)
        check_vectors(postgres, table, toy_text)
    record_property("tables", tables)


def test_a_build_whose_client_was_killed_does_not_block_the_next(
    postgres: str, toy_text: Path
) -> None:
    make_table(postgres, "building", 100)
    child = FORK.Process(target=dies_at, args=(postgres, "building", toy_text, "build_indexes", 1))
    child.start()
    child.join()
    with psycopg.connect(postgres) as client:
        # An open transaction that has written keeps the build waiting.
        client.execute("UPDATE building SET year = 1 WHERE id = 1")
        child = FORK.Process(target=migrate, args=(postgres, "building", toy_text))
        child.start()
        building = "SELECT count(*) FROM pg_stat_progress_create_index"
        wait_for(lambda: execute(postgres, building) == [(1,)])
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        client.commit()
    assert migrate(postgres, "building", toy_text).state == "switched"
    check_vectors(postgres, "building", toy_text)


def test_two_at_once_are_refused(
    postgres: str, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_locks, "LOCK_SECONDS", 0.3)
    make_table(postgres, "contended")
    said = []

    def second(_: Any) -> None:
        with pytest.raises(DualencError) as error:
            migrate(postgres, "contended", toy_text)
        said.append(str(error.value))

    migrate(postgres, "contended", toy_text, on_report=second)
    assert len(said) == 1
    assert "another migration of this table is running; wait for its end" in said[0]


def test_another_model_is_refused_until_the_end(
    postgres: str, toy_text: Path, tmp_path: Path
) -> None:
    toy.text_model(tmp_path / "third", seed=5)
    make_table(postgres, "third")
    migrate(postgres, "third", toy_text)
    with pytest.raises(DualencError, match=r"a migration to .* is under way; resume it with that"):
        migrate(postgres, "third", tmp_path / "third")
    workflow.finish_table(postgres, "third")
    migrate(postgres, "third", tmp_path / "third")
    check_vectors(postgres, "third", tmp_path / "third")


def test_the_server_restarts_in_each_phase(toy_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [("store", 2), ("build_indexes", 1), ("switch", 1), ("_rename", 2)]
    with own_server() as server:
        make_table(server.target, "restarted")
        calls: list[int] = []

        def restart(function: str, call: int) -> Callable[..., Any]:
            original = getattr(TableMigration, function)

            def stopping(*arguments: Any, **options: Any) -> Any:
                calls.append(1)
                if len(calls) == call:
                    server.stop()
                    server.start()
                return original(*arguments, **options)

            return stopping

        for number, (function, call) in enumerate(phases):
            calls.clear()
            with monkeypatch.context() as patch, pytest.raises(DualencError) as error:
                patch.setattr(TableMigration, function, restart(function, call))
                migrate(server.target, "restarted", toy_text)
            assert len(calls) == call
            assert "the same command again resumes" in str(error.value)
            assert "\n" not in str(error.value)
            # What clients write in between is filled, too.
            insert = "INSERT INTO restarted (id, body, embedding) SELECT %s, 'owl hen', embedding"
            execute(server.target, f"{insert} FROM restarted WHERE id = 1", 1000 + number)
        assert migrate(server.target, "restarted", toy_text).state == "switched"
        assert check_vectors(server.target, "restarted", toy_text) == 60 + len(phases)


def test_a_client_that_holds_the_table_delays_it_and_no_reader(
    postgres: str, toy_text: Path
) -> None:
    make_table(postgres, "held")
    with psycopg.connect(postgres) as client:
        client.execute("UPDATE held SET body = 'ant bee' WHERE id < 3")
        thread = threading.Thread(target=migrate, args=(postgres, "held", toy_text))
        thread.start()
        # The columns are added once it lets go of the table; readers wait two seconds at most.
        time.sleep(2.5)
        assert thread.is_alive()
        assert execute(postgres, "SELECT count(embedding) FROM held") == [(60,)]
        client.commit()
        thread.join()
    check_vectors(postgres, "held", toy_text)
