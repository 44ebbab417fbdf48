"""Nothing is ever half-written: whatever kills a writer, a complete old or a complete new version
is found."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualenc import cli
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.lines import read_records, read_texts
from dualenc.errors import DualencError
from dualenc.evaluation.zero_shot import read_templates
from dualenc.io.files import (
    atomic_folder,
    atomic_path,
    check_folder_target,
    is_written_now,
    left_by_killed,
    locked,
    recover,
    recover_inside,
    remove,
    removed_if_refused,
    write_json,
)
from dualenc.io.reading import read_json, read_json_object
from dualenc.recipe.resolve import _read_yaml

FORK = multiprocessing.get_context("fork")
FILES = ("a.txt", "b.txt", "deep/c.txt")


def write_folder(target: Path, version: str) -> None:
    """A folder of three files that all say which version they belong to."""
    with atomic_folder(target, lambda folder: (folder / "a.txt").is_file(), "versions") as part:
        (part / "deep").mkdir(parents=True)
        for name in FILES:
            (part / name).write_text(version)


def version_of(target: Path) -> str:
    """The version of a folder, if it is complete and of one version."""
    (version,) = {(target / name).read_text() for name in FILES}
    return version


def die_at(step: int) -> None:
    """From here on, this process is killed before its `step`-th call to the system."""
    calls = iter(range(10**6))

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("mkdir", "open", "replace", "fsync", "rmdir", "unlink"):
        setattr(os, name, dying(getattr(os, name)))


def is_killed(work: Callable[..., None], *arguments: Any) -> bool:
    """Whether work in a process of its own is killed."""
    process = FORK.Process(target=work, args=arguments)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def dead_writer(target: Path, **written: str) -> None:
    """What a killed writer left: a folder with a lock that nobody holds, and versions under `new`
    and `old`."""
    work = target.with_name(f".{target.name}.part")
    work.mkdir()
    (work / "lock").touch()
    for stage, version in written.items():
        write_folder(work / f"{stage}-{target.name}", version)


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0
) -> Iterator[None]:
    """`os` fails in a function, from its n-th call on."""
    function = getattr(os, name)
    calls = iter(range(10**6))

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "before"), [("replace", "old"), ("create", "none"), ("recover", "new")]
)
def test_a_kill_at_every_step_leaves_a_complete_version(
    tmp_path: Path, case: str, before: str
) -> None:
    def work(target: Path, step: int) -> None:
        die_at(step)
        recover(target) if case == "recover" else write_folder(target, "new")

    seen = []
    for step in range(100):
        target = tmp_path / str(step) / "index"
        target.parent.mkdir()
        if case == "replace":
            write_folder(target, "old")
        elif case == "recover":
            dead_writer(target, old="old", new="new")
        killed = is_killed(work, target, step)
        recover(target)
        seen.append(version_of(target) if target.exists() else "none")
        write_folder(target, "newest")
        assert version_of(target) == "newest"
        assert os.listdir(target.parent) == ["index"], "what dead writers left is removed"
        if not killed:
            break
    assert 5 <= step < 99
    switched = seen.index("new")
    assert seen == [before] * switched + ["new"] * (len(seen) - switched)


@pytest.mark.parametrize("name", ["meta.json", "settings.json"])
def test_a_kill_while_a_folder_is_removed_leaves_one_of_its_kind(tmp_path: Path, name: str) -> None:
    """At every step: what is left of the folder still has the file that says what it is."""

    def remove_and_die(step: int) -> None:
        die_at(step)
        remove(tmp_path / "folder")

    for step in range(100):
        write_folder(tmp_path / "folder", "old")
        (tmp_path / "folder" / name).write_text("{}")
        if not is_killed(remove_and_die, step):
            break
        left = [path for path in (tmp_path / "folder").rglob("*") if path.is_file()]
        assert not left or (tmp_path / "folder" / name) in left
        shutil.rmtree(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert step >= len(FILES)


def test_a_living_writer_is_left_alone_until_it_is_killed(tmp_path: Path) -> None:
    target = tmp_path / "index"

    def write_slowly() -> None:
        with atomic_folder(target, lambda _: True, "versions") as part:
            part.mkdir()
            # Data workers outlive a killed run by seconds.
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            (tmp_path / "ready").touch()
            time.sleep(60)

    living = FORK.Process(target=write_slowly)
    living.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    recover(target, unfinished=True)
    assert (tmp_path / ".index.part" / "new-index").is_dir()
    with (
        pytest.raises(DualencError, match="another dualenc process is writing"),
        locked(target, wait=False),
    ):
        pass
    living.kill()
    living.join()
    write_folder(target, "ours")
    assert sorted(os.listdir(tmp_path)) == ["index", "ready"]
    assert version_of(target) == "ours"


def test_a_writer_may_lock_and_recover_its_target(tmp_path: Path) -> None:
    target = tmp_path / "new" / "index"
    with locked(target), atomic_folder(target, lambda _: False, "index") as part:
        part.mkdir()
        recover(target, unfinished=True)
        assert part.exists()
    assert os.listdir(tmp_path / "new") == ["index"]


@pytest.mark.slow
def test_what_a_killed_writer_left_is_seen_and_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert not is_written_now(target)
    assert left_by_killed(target) == []
    with locked(target):
        assert is_written_now(target)
    assert os.listdir(tmp_path) == []
    part = tmp_path / ".target.part"
    (part / "new-target").mkdir(parents=True)
    (part / "lock").touch()
    assert not is_written_now(target)
    assert left_by_killed(target) == [str(part / "new-target")]
    assert sorted(os.listdir(part)) == ["lock", "new-target"]


def test_several_writers_take_turns_and_the_last_one_wins(tmp_path: Path) -> None:
    together = FORK.Barrier(3)

    def write_often(number: int) -> None:
        for name in range(10):
            together.wait(timeout=30)
            for _ in range(3):
                write_folder(tmp_path / f"folder-{name}", str(number))
                write_json(tmp_path / f"file-{name}", [number] * 1000)

    processes = [FORK.Process(target=write_often, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for name in range(10):
        assert version_of(tmp_path / f"folder-{name}") in ("0", "1", "2")
        assert len(set(read_json(tmp_path / f"file-{name}"))) == 1
    assert len(os.listdir(tmp_path)) == 20


def test_all_targets_in_a_folder(tmp_path: Path) -> None:
    dead_writer(tmp_path / "step-1", old="old")
    dead_writer(tmp_path / "step-2", new="half")
    dead_writer(tmp_path / "step-3", old="old")
    shutil.copytree(tmp_path / ".step-1.part" / "old-step-1", tmp_path / "step-3")
    (tmp_path / ".mine.part").mkdir()
    (tmp_path / ".mine.part" / "thesis.txt").touch()
    recover(tmp_path / "step-2")
    assert (tmp_path / ".step-2.part").exists(), "a reader removes nothing"
    recover_inside(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".mine.part", "step-1", "step-3"]
    assert os.listdir(tmp_path / ".mine.part") == ["thesis.txt"]
    recover_inside(tmp_path / "nowhere")


@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_version_and_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    write_folder(tmp_path / "index", "old")

    def fill() -> None:
        write_folder(tmp_path / "index", "new")

    module: Any = SimpleNamespace(fill=fill)
    monkeypatch.setitem(sys.modules, "dualenc.commands.fill", module)
    monkeypatch.setattr(cli, "COMMANDS", ("fill",))
    with failing(monkeypatch, call, errno.ENOSPC):
        assert cli.main(["fill"]) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(
        rf"dualenc: error: {tmp_path}/index: the disk is full \(.* MiB are free in .*\); free .*\n",
        told,
    )
    assert version_of(tmp_path / "index") == "old"
    assert os.listdir(tmp_path) == ["index"]


def test_a_folder_that_cannot_be_put_back_at_once_is_restored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be renamed any more once the old folder has moved, as on a network disk that went
    away."""
    target = tmp_path / "index"
    write_folder(target, "old")
    with (
        failing(monkeypatch, "replace", errno.EIO, after=1),
        pytest.raises(OSError, match="Input/output error"),
    ):
        write_folder(target, "new")
    with (
        failing(monkeypatch, "replace", errno.EIO),
        pytest.raises(DualencError, match="left it in"),
    ):
        recover(target)
    recover(target)
    assert version_of(target) == "new"


def test_relative_and_current_folders_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("index").mkdir()
    Path("link").symlink_to("index")
    for path, version in (("index", "1"), ("link", "2"), ("index/../index", "3")):
        write_folder(Path(path), version)
        assert version_of(tmp_path / "index") == version
    monkeypatch.chdir(tmp_path / "index")
    write_folder(Path(), "4")
    assert version_of(tmp_path / "index") == "4"
    assert (tmp_path / "link").is_symlink()
    shutil.rmtree(tmp_path / "index")
    dead_writer(tmp_path / "index", old="old", new="new")
    recover(tmp_path / "link")
    assert version_of(tmp_path / "index") == "new"


@pytest.mark.parametrize("name", ["index", "index/thesis.txt"])
def test_a_folder_replaces_no_other_kind(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("years of work")
    with pytest.raises(DualencError, match="exists and holds no versions"):
        write_folder(tmp_path / "index", "new")
    with pytest.raises(DualencError, match="is a folder"):
        write_json(path.parent, {})
    assert path.read_text() == "years of work"


def test_a_mount_point_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be renamed; files may be written into it."""
    monkeypatch.setattr(
        os.path, "ismount", lambda path: os.fspath(path) == os.path.realpath(tmp_path / "volume")
    )
    (tmp_path / "volume").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "volume")
    for name in ("volume", "link"):
        with pytest.raises(
            DualencError, match="is a mount point, which cannot be replaced; name a folder in it"
        ):
            write_folder(tmp_path / name, "new")
        check_folder_target(tmp_path / name, lambda folder: False, "run")
    write_folder(tmp_path / "volume" / "inside", "new")
    assert version_of(tmp_path / "volume" / "inside") == "new"


@pytest.mark.parametrize(
    ("files", "error", "left"),
    [
        ([], DualencError, []),
        (["meta.json"], DualencError, []),
        (["meta.json", "shard-0.npy"], DualencError, ["new", "new/meta.json", "new/shard-0.npy"]),
        (["meta.json"], KeyboardInterrupt, ["new", "new/meta.json"]),
    ],
)
def test_a_refusal_leaves_finished_work_or_nothing(
    files: list[str], error: type[BaseException], left: list[str], tmp_path: Path
) -> None:
    def write() -> None:
        with removed_if_refused(tmp_path / "new", "shard-*.npy"):
            for name in files:
                write_json(tmp_path / "new" / name, {})
            with atomic_path(tmp_path / "new" / "half"):
                raise error("refused")

    with pytest.raises(error):
        write()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "holds a list instead of an object"),
        ('{"name": "a"}', "lacks 'count'"),
        ('{"name": "a", "count": true}', "'count' is true or false, not an integer or null"),
    ],
)
def test_json_of_the_wrong_shape(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DualencError, match=message):
        read_json_object(tmp_path / "meta.json", {"count": (int, type(None))})


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("a.csv", "text,label\nx,1\n", lambda path: list(read_records(path, BadRows(path)))),
        ("beir.tsv", "q\td\t1\n", lambda path: list(read_texts(path, BadRows(path)))),
        ("templates.txt", "a {}\n", read_templates),
        ("modules.json", '{"a": 1}', read_json),
        ("recipe.yaml", "model: 1\n", _read_yaml),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_text(
    tmp_path: Path, name: str, text: str, read: Any
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    plain = read(tmp_path / name)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / name) == plain
