"""Nothing is ever half-written: whatever kills a writer, a complete old or a complete new version is found."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from dualenc import cli, files
from dualenc.data.beir import read_qrels
from dualenc.data.lines import read_records
from dualenc.data.skips import Skips
from dualenc.errors import DualencError
from dualenc.evaluation.runs import read_lines, read_trec
from dualenc.files import atomic_folder, atomic_path, recover, recover_inside, removed_if_refused
from dualenc.reading import read_json, read_json_object
from dualenc.recipe import _read_yaml

FORK = multiprocessing.get_context("fork")


def write_folder(target: Path, version: str) -> None:
    """A folder of three files, one of them deeper, that all say which version they belong to."""
    with atomic_folder(target, lambda folder: (folder / "a.txt").is_file(), "versions") as part:
        (part / "deep").mkdir(parents=True)
        for name in ("a.txt", "b.txt", "deep/c.txt"):
            (part / name).write_text(version)


def version_of(target: Path) -> str:
    """The version of a folder, if it is complete and of one version."""
    (version,) = {(target / name).read_text() for name in ("a.txt", "b.txt", "deep/c.txt")}
    return version


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Work in a process that is killed before its `step`-th call to the system; whether it was."""

    def work_and_die() -> None:
        calls = iter(range(10**6))

        def dying(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for name in ("mkdir", "open", "replace", "fsync", "rmdir", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        work()

    process = FORK.Process(target=work_and_die)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def dead_writer(target: Path, **written: str) -> Path:
    """What a killed writer left: a folder with a lock that nobody holds, and versions under `new` and `old`."""
    work = target.with_name(f".{target.name}.part-00c0ffee")
    work.mkdir()
    (work / "lock").touch()
    for stage, version in written.items():
        write_folder(work / f"{stage}-{target.name}", version)
    return work


def write_slowly(target: Path, ready: Path) -> None:
    with atomic_folder(target, lambda _: True, "versions") as part:
        part.mkdir()
        ready.touch()
        time.sleep(60)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


class TestKilledSwap:
    @pytest.mark.slow
    def test_at_every_step_a_complete_version_is_found(self, tmp_path: Path) -> None:
        seen, step = [], 0
        while True:
            target = tmp_path / str(step) / "index"
            write_folder(target, "old")
            killed = killed_at(step, lambda: write_folder(target, "new"))  # noqa: B023
            recover(target)
            seen.append(version_of(target))
            write_folder(target, "newest")
            assert version_of(target) == "newest"
            assert os.listdir(target.parent) == ["index"], "what dead writers left is removed"
            if not killed:
                break
            step += 1
        assert step >= 9
        assert seen == sorted(seen, reverse=True), "first the old version, later the new one"
        assert set(seen) == {"old", "new"}

    @pytest.mark.slow
    def test_without_an_old_version_there_is_the_new_one_or_none(self, tmp_path: Path) -> None:
        for step in range(100):
            target = tmp_path / str(step) / "index"
            killed = killed_at(step, lambda: write_folder(target, "new"))  # noqa: B023
            recover(target)
            assert not target.exists() or version_of(target) == "new"
            if not killed:
                break
        assert step >= 5

    @pytest.mark.slow
    def test_a_second_kill_at_every_step_of_the_recovery(self, tmp_path: Path) -> None:
        for step in range(100):
            target = tmp_path / str(step) / "index"
            target.parent.mkdir()
            dead_writer(target, old="old", new="new")
            killed = killed_at(step, lambda: recover(target))  # noqa: B023
            recover(target)
            assert version_of(target) == "new"
            if not killed:
                break
        assert step >= 5
        assert os.listdir(target.parent) == ["index"]

    def test_an_unfinished_folder_is_not_taken_for_a_complete_one(self, tmp_path: Path) -> None:
        work = dead_writer(tmp_path / "index", new="half")
        recover(tmp_path / "index")
        assert not (tmp_path / "index").exists()
        assert work.exists(), "a reader removes nothing unfinished"
        recover(tmp_path / "index", unfinished=True)
        assert not work.exists()

    def test_a_living_writer_is_left_alone_until_it_is_killed(self, tmp_path: Path) -> None:
        target = tmp_path / "index"
        living = FORK.Process(target=write_slowly, args=(target, tmp_path / "ready"))
        living.start()
        wait_for(tmp_path / "ready")
        (work,) = tmp_path.glob(".index.part-*")
        recover(target, unfinished=True)
        write_folder(target, "ours")
        assert (work / "new-index").is_dir()
        living.kill()
        living.join()
        recover(target, unfinished=True)
        assert sorted(os.listdir(tmp_path)) == ["index", "ready"]
        assert version_of(target) == "ours"

    @pytest.mark.slow
    def test_a_process_forked_by_a_writer_does_not_keep_its_lock(self, tmp_path: Path) -> None:
        """Data workers outlive a killed run by seconds."""

        def write_and_fork() -> None:
            with atomic_folder(tmp_path / "index", lambda _: True, "versions") as part:
                part.mkdir()
                if os.fork():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)
                os._exit(0)

        process = FORK.Process(target=write_and_fork)
        process.start()
        process.join()
        recover(tmp_path / "index", unfinished=True)
        assert os.listdir(tmp_path) == []

    def test_our_own_write_is_left_alone(self, tmp_path: Path) -> None:
        with atomic_folder(tmp_path / "index", lambda _: False, "index") as part:
            part.mkdir()
            recover(tmp_path / "index", unfinished=True)
            assert part.exists()
        assert (tmp_path / "index").exists()

    @pytest.mark.slow
    def test_threads_and_processes_write_one_file_without_waiting(self, tmp_path: Path) -> None:
        def write_often(number: int) -> None:
            for _ in range(30):
                files.write_json(tmp_path / "meta.json", [number] * 1000)

        processes = [FORK.Process(target=write_often, args=(number,)) for number in range(2)]
        for process in processes:
            process.start()
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(write_often, range(2, 5)))
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert len(set(read_json(tmp_path / "meta.json"))) == 1
        assert os.listdir(tmp_path) == ["meta.json"]

    @pytest.mark.slow
    def test_processes_write_one_folder_and_the_last_one_wins(self, tmp_path: Path) -> None:
        together = FORK.Barrier(3)

        def write_often(number: int) -> None:
            for name in range(20):
                together.wait(timeout=30)
                for _ in range(3):
                    write_folder(tmp_path / str(name), str(number))

        processes = [FORK.Process(target=write_often, args=(number,)) for number in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert all(version_of(tmp_path / str(name)) in ("0", "1", "2") for name in range(20))
        assert sorted(os.listdir(tmp_path)) == sorted(map(str, range(20)))

    @pytest.mark.slow
    def test_a_swap_that_ends_meanwhile_is_waited_for(self, tmp_path: Path) -> None:
        target = tmp_path / "index"
        work = dead_writer(target, old="old", new="new")

        def end_the_swap() -> None:
            with FileLock(work / "lock"):
                (tmp_path / "ready").touch()
                time.sleep(0.2)
                os.rename(work / "new-index", target)

        process = FORK.Process(target=end_the_swap)
        process.start()
        wait_for(tmp_path / "ready")
        recover(target)
        process.join()
        assert process.exitcode == 0
        assert version_of(target) == "new"

    def test_all_targets_in_a_folder(self, tmp_path: Path) -> None:
        dead_writer(tmp_path / "step-1", old="old")
        dead_writer(tmp_path / "step-2", new="half")
        dead_writer(tmp_path / "step-3", old="old")
        write_folder(tmp_path / "step-3", "new")
        (tmp_path / ".hidden").write_text("not ours")
        recover_inside(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [".hidden", "step-1", "step-3"]
        assert version_of(tmp_path / "step-3") == "new"
        recover_inside(tmp_path / "nowhere")

    def test_only_what_dualenc_wrote_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".index.part-00c0ffee").write_text("a file of the user's")
        (tmp_path / ".index.part-0badcafe").mkdir()
        (tmp_path / ".index.part-0badcafe" / "thesis.txt").touch()
        (tmp_path / ".index.old").mkdir()
        before = sorted(os.listdir(tmp_path))
        write_folder(tmp_path / "index", "new")
        recover_inside(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [*before, "index"]

    def test_an_error_in_the_swap_puts_the_old_folder_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "index"
        write_folder(target, "old")
        replace = os.replace

        def failing(source: Any, destination: Any) -> None:
            if "new-" in str(source):
                raise PermissionError(errno.EACCES, "not today", str(destination))
            replace(source, destination)

        monkeypatch.setattr(os, "replace", failing)
        with pytest.raises(PermissionError):
            write_folder(target, "new")
        assert version_of(target) == "old"
        assert os.listdir(tmp_path) == ["index"]

    def test_a_folder_that_cannot_be_put_back_at_once_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing can be renamed any more once the old folder has moved, as on a network disk that went away."""
        target = tmp_path / "index"
        write_folder(target, "old")
        replace = os.replace

        def failing(source: Any, destination: Any) -> None:
            if "part-" in str(source):
                raise OSError(errno.EIO, "disk gone")
            replace(source, destination)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            with pytest.raises(OSError, match="disk gone"):
                write_folder(target, "new")
            with pytest.raises(DualencError, match=r"index: a killed process left it as .*; rename it to index"):
                recover(target)
        recover(target)
        assert version_of(target) == "new"

    def test_a_relative_folder_and_the_current_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write_folder(Path("index"), "old")
        dead_writer(Path("index"), new="half")
        write_folder(Path("index"), "new")
        assert os.listdir() == ["index"]
        monkeypatch.chdir(tmp_path / "index")
        write_folder(Path(), "newer")
        assert version_of(tmp_path / "index") == "newer"

    def test_the_folder_behind_a_symbolic_link_is_replaced(self, tmp_path: Path) -> None:
        target, link = tmp_path / "disk" / "index", tmp_path / "link"
        write_folder(target, "old")
        link.symlink_to(target)
        write_folder(link, "new")
        assert link.is_symlink()
        assert version_of(target) == "new"
        dead_writer(target, old="old", new="newer")
        shutil.rmtree(target)
        recover(link)
        assert version_of(target) == "newer"


class TestFullDisk:
    @pytest.mark.parametrize("call", ["mkdir", "fsync", "replace"])
    def test_at_every_step_the_old_version_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
    ) -> None:
        def full(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        write_folder(tmp_path / "index", "old")
        monkeypatch.setattr(cli, "_dispatch", lambda _: write_folder(tmp_path / "index", "new"))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            assert cli.main([]) == 2
        assert capsys.readouterr().err == "dualenc: error: [Errno 28] No space left on device\n"
        assert version_of(tmp_path / "index") == "old"
        assert os.listdir(tmp_path) == ["index"]


class TestWhatIsThere:
    """What is written never takes the place of something else."""

    def test_a_file_replaces_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "report.html").mkdir()
        with pytest.raises(DualencError, match="is a folder, and a file is written here"):
            files.write_json(tmp_path / "report.html", {})
        assert os.listdir(tmp_path) == ["report.html"]

    @pytest.mark.parametrize("name", ["index", "index/thesis.txt", "index/.git"])
    def test_a_folder_replaces_no_other_kind(self, tmp_path: Path, name: str) -> None:
        target, path = tmp_path / "index", tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("years of work")
        with pytest.raises(DualencError, match="exists and holds no versions; choose a new or empty folder"):
            write_folder(target, "new")
        assert path.read_text() == "years of work"

    def test_an_empty_folder_and_one_of_its_kind_are_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "index").mkdir()
        for version in ("old", "new"):
            write_folder(tmp_path / "index", version)
            assert version_of(tmp_path / "index") == version

    def test_no_path_holds_a_nul(self, tmp_path: Path) -> None:
        with pytest.raises(DualencError, match="holds a NUL character"):
            files.write_json(f"{tmp_path}/a\0b", {})


class TestJson:
    @pytest.mark.parametrize("text", ["", "[" * 100_000, '{"a": ' * 50_000, "9" * 10_000, "\udcff", "{'a': 1}"])
    def test_malformed(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "meta.json"
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DualencError, match=r"meta\.json: not valid JSON") as error:
            read_json(path)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([1], "holds a list instead of an object"),
            (None, "holds null instead of an object"),
            ({"name": "a"}, "lacks 'count'"),
            ({"name": "a", "count": "7"}, "'count' is a text, not a whole number"),
            ({"name": "a", "count": True}, "'count' is true or false, not a whole number"),
            ({"name": {}, "count": 7}, "'name' is an object, not a text or null"),
        ],
    )
    def test_of_the_wrong_shape(self, tmp_path: Path, value: Any, message: str) -> None:
        (tmp_path / "meta.json").write_text(json.dumps(value))
        with pytest.raises(DualencError, match=rf"meta\.json: {message}"):
            read_json_object(tmp_path / "meta.json", {"count": int, "name": (str, type(None))})


def refused(folder: Path, written: dict[str, int], error: BaseException | None = None) -> None:
    """Write files of some sizes into a folder, and then be refused."""
    with removed_if_refused(folder, "shard-*.npy"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in written.items():
            (folder / name).write_bytes(bytes(size))
        raise error or DualencError("no")


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ({}, []),
        ({"meta.json": 10}, []),
        ({"meta.json": 10, "shard-0.npy": 128}, []),  # no rows
        ({"meta.json": 10, "shard-0.npy": 129}, ["new", "new/below", "new/below/meta.json", "new/below/shard-0.npy"]),
    ],
)
def test_a_refusal_leaves_finished_work_or_nothing(written: dict[str, int], left: list[str], tmp_path: Path) -> None:
    with pytest.raises(DualencError):
        refused(tmp_path / "new" / "below", written)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == left


def test_a_refusal_takes_no_folder_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(DualencError):
        refused(tmp_path / "old", {})

    def write() -> None:
        with atomic_path(tmp_path / "old" / "new" / "file") as part:
            part.write_text("half")
            raise DualencError("no")

    with pytest.raises(DualencError):
        write()
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]


def test_an_interruption_leaves_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        refused(tmp_path / "new", {"meta.json": 10}, KeyboardInterrupt())
    assert (tmp_path / "new" / "meta.json").is_file()


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("a.csv", "text,label\nx,1\n", lambda path: list(read_records(path, Skips(path)))),
        ("a.tsv", "text\tlabel\nx\t1\n", lambda path: list(read_records(path, Skips(path)))),
        ("a.jsonl", '{"text": "x"}\n', lambda path: list(read_records(path, Skips(path)))),
        ("a.json", '[{"text": "x"}]', lambda path: list(read_records(path, Skips(path)))),
        ("a.txt", "x\ny\n", lambda path: list(read_records(path, Skips(path)))),
        ("beir.tsv", "q\td\t1\n", read_qrels),
        ("trec.txt", "q 0 d 1\n", read_qrels),
        ("run.txt", "q Q0 d 1 0.5 tag\n", read_trec),
        ("lines.txt", "a photo of a {}\n", lambda path: [line for _, line in read_lines(path)]),
        ("modules.json", '{"a": 1}', read_json),
        ("recipe.yaml", "model: 1\n", _read_yaml),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, name: str, text: str, read: Any) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    plain = read(tmp_path / name)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / name) == plain
