"""Nothing is ever half-written: whatever kills a writer, a complete old or a complete new version stands there."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import safetensors.torch
import torch

from dualenc import files
from dualenc.errors import DiskFull, DualencError
from dualenc.files import (
    atomic_folder,
    atomic_path,
    explain_full_disk,
    is_running,
    read_json,
    read_json_object,
    recover,
    recover_inside,
    removed_if_refused,
)
from dualenc.search import Index
from dualenc.search.embeddings import Embeddings, EmbeddingWriter

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


def killed_at(step: int, target: Path, version: str) -> bool:
    """Write a folder in a process that is killed before its `step`-th call to the system; whether it was."""

    def write() -> None:
        calls = iter(range(10**6))

        def dying(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for name in ("mkdir", "replace", "fsync", "rmdir", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        write_folder(target, version)

    process = FORK.Process(target=write)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


class TestKilledSwap:
    @pytest.fixture(autouse=True)
    def hardly_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For a swap on another machine: there is none, but in the one test that sets the time itself."""
        monkeypatch.setattr(files, "_SWAP_SECONDS", 0.02)

    def test_at_every_step_a_complete_version_is_found(self, tmp_path: Path) -> None:
        seen, step = [], 0
        while True:
            target = tmp_path / str(step) / "index"
            write_folder(target, "old")
            killed = killed_at(step, target, "new")
            recover(target)
            seen.append(version_of(target))
            write_folder(target, "newest")
            assert version_of(target) == "newest"
            assert os.listdir(target.parent) == ["index"], "leftovers of the dead are cleaned up"
            if not killed:
                break
            step += 1
        assert step >= 9
        assert seen == sorted(seen, reverse=True), "first the old version, later the new one"
        assert set(seen) == {"old", "new"}

    def test_without_an_old_version_there_is_the_new_one_or_none(self, tmp_path: Path) -> None:
        step = 0
        while killed_at(step, target := tmp_path / str(step) / "index", "new"):
            recover(target)
            assert not target.exists() or version_of(target) == "new"
            step += 1
        assert step >= 5

    def test_a_second_kill_during_the_recovery(self, tmp_path: Path) -> None:
        """Only `.old` and an unfinished part are left, as older versions of this program left them."""
        target = tmp_path / "index"
        write_folder(target, "old")
        os.rename(target, tmp_path / ".index.old-999999999")
        (tmp_path / ".index.part-999999999").mkdir()
        recover(target)
        assert version_of(target) == "old"

    def test_a_part_is_never_taken_for_a_whole(self, tmp_path: Path) -> None:
        part = tmp_path / ".index.part-999999999"
        part.mkdir()
        (part / "a.txt").write_text("new")
        recover(tmp_path / "index")
        assert not (tmp_path / "index").exists()
        assert part.exists(), "whoever only reads removes nothing: the writer may live on another machine"
        recover(tmp_path / "index", unfinished=True)
        assert not part.exists()

    def test_a_living_process_is_left_alone(self, tmp_path: Path) -> None:
        target = tmp_path / "index"
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
            leftovers = [tmp_path / f".index.{stage}-{living.pid}" for stage in ("part", "new", "old")]
            for leftover in leftovers:
                write_folder(leftover, "theirs")
            recover(target, unfinished=True)
            assert not target.exists()
            assert all(leftover.exists() for leftover in leftovers)
            write_folder(target, "ours")
            assert all(leftover.exists() for leftover in leftovers)
            living.kill()
        recover(target, unfinished=True)
        assert os.listdir(tmp_path) == ["index"]
        assert version_of(target) == "ours"

    def test_our_own_write_is_left_alone(self, tmp_path: Path) -> None:
        with atomic_folder(tmp_path / "index", lambda _: False, "index") as part:
            part.mkdir()
            recover(tmp_path / "index", unfinished=True)
            assert part.exists()
        assert (tmp_path / "index").exists()

    def test_a_process_that_reuses_the_number_does_not_keep_the_index(self, tmp_path: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
            assert is_running(later.pid)
            if not is_running(later.pid, time.time() - 3600):
                assert is_running(later.pid, time.time())
            else:
                pytest.skip("this system does not tell when a process began")
            later.kill()
        assert not is_running(later.pid)

    def test_a_swap_that_ends_meanwhile_is_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A writer on another machine looks dead from here; its two renames take less than we wait."""
        monkeypatch.undo()
        target, old, new = tmp_path / "index", tmp_path / ".index.old-999999999", tmp_path / ".index.new-999999999"
        write_folder(old, "old")
        write_folder(new, "new")

        def end_the_swap() -> None:
            time.sleep(0.1)
            os.rename(new, target)

        process = FORK.Process(target=end_the_swap)
        process.start()
        recover(target)
        process.join()
        assert process.exitcode == 0
        assert version_of(target) == "new"

    def test_all_that_is_in_a_folder(self, tmp_path: Path) -> None:
        write_folder(tmp_path / ".step-1.old-999999999", "old")
        write_folder(tmp_path / ".step-2.part-999999999", "part")
        write_folder(tmp_path / ".step-3.old-999999999", "old")
        write_folder(tmp_path / "step-3", "new")
        (tmp_path / ".hidden").write_text("not ours")
        recover_inside(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [".hidden", "step-1", "step-3"]
        assert version_of(tmp_path / "step-3") == "new"
        recover_inside(tmp_path / "nowhere")

    def test_an_error_in_the_swap_puts_the_old_folder_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "index"
        write_folder(target, "old")
        replace = os.replace

        def failing(source: Any, destination: Any) -> None:
            if ".new-" in str(source):
                raise PermissionError(errno.EACCES, "not today", str(destination))
            replace(source, destination)

        monkeypatch.setattr(os, "replace", failing)
        with pytest.raises(PermissionError):
            write_folder(target, "new")
        assert version_of(target) == "old"
        assert os.listdir(tmp_path) == ["index"]


def numpy_saves(path: Path) -> None:
    with open(path, "wb") as stream:
        np.save(stream, np.zeros(100_000))


def our_array(path: Path) -> None:
    files.save_array(path, np.zeros(100_000))


def arrow_writes(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": np.random.default_rng(0).normal(size=100_000)}), path)


def tokenizers_save(path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"word{i}": i for i in range(20_000)}, "word0")).save(str(path))


def faiss_writes(path: Path) -> None:
    index = faiss.IndexFlatIP(10)
    index.add(np.zeros((10_000, 10), np.float32))
    faiss.write_index(index, str(path))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("a" * 400_000),
    "numpy": numpy_saves,
    "save_array": our_array,
    "save_tensors": lambda path: files.save_tensors(path, {"a": torch.randn(100_000)}),
    "torch": lambda path: torch.save({"a": torch.randn(100_000)}, path),
    "safetensors": lambda path: safetensors.torch.save_file({"a": torch.randn(100_000)}, path),
    "faiss": faiss_writes,
    "arrow": arrow_writes,
    "tokenizers": tokenizers_save,
}


class TestFullDisk:
    @pytest.mark.parametrize("writer", WRITERS)
    def test_a_real_one_is_told_in_a_line_by_every_library(self, tiny_disk: Path, writer: str) -> None:
        (tiny_disk / "out").write_text("what stood there before")
        with (
            pytest.raises(DiskFull, match="no space left on the disk") as error,
            atomic_path(tiny_disk / "out") as path,
        ):
            WRITERS[writer](path)
        assert str(error.value).startswith(f"{tiny_disk}/out: could not be written")
        assert str(error.value).endswith("make room there or choose another folder, then run the same command again")
        assert f"MiB free in {tiny_disk}" in str(error.value)
        assert "\n" not in str(error.value)
        assert os.listdir(tiny_disk) == ["out"]
        assert (tiny_disk / "out").read_text() == "what stood there before"

    def test_embeddings_and_index_on_a_real_one(self, tiny_disk: Path) -> None:
        """Told in a line; with more room, embedding goes on with the shards that are there."""
        vectors = np.random.default_rng(0).normal(size=(2500, 16)).astype(np.float32)

        def embedded() -> list[int]:
            writer = EmbeddingWriter(tiny_disk / "emb", [str(row) for row in range(2500)], 16, "float32", {})
            missing = writer.missing()
            for number in missing:
                writer.write(number, vectors[writer.ranges[number].start : writer.ranges[number].stop])
            writer.finish()
            return missing

        with pytest.raises(DiskFull, match=f"^{tiny_disk}/emb/data-00001.arrow: could not be written, no space left"):
            embedded()
        grow = ["mount", "-o", "remount,size=250k", "tmpfs", str(tiny_disk)]
        subprocess.run(grow, check=True)
        assert embedded() == [1, 2], "the first shard was kept"
        index = Index.build(Embeddings.open(tiny_disk / "emb"))
        with pytest.raises(DiskFull, match=f"^{tiny_disk}/index: could not be written, no space left"):
            index.save(tiny_disk / "index")
        assert os.listdir(tiny_disk) == ["emb"]
        assert len(Embeddings.open(tiny_disk / "emb")) == 2500

    @pytest.mark.parametrize("share", [0, 0.1, 1])
    @pytest.mark.parametrize("writer", WRITERS)
    def test_a_limit_on_the_size_of_files(self, tmp_path: Path, writer: str, share: float) -> None:
        """Needs no root: a process may lower its own limit, and the system then refuses to write on.

        The last byte is what a library misses that does not look at what closing a file returns.
        """
        if share == 1 and writer in ("faiss", "numpy", "torch"):
            pytest.skip(
                "they take it for written; save_array, save_tensors and Index.save go around their file writers"
            )
        WRITERS[writer](tmp_path / "warmed up")
        limit = max(0, int(share * (tmp_path / "warmed up").stat().st_size) - 1)
        (tmp_path / "warmed up").unlink()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(DiskFull, match="could not be written"), atomic_path(tmp_path / "out") as path:
                WRITERS[writer](path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("call", ["mkdir", "fsync", "replace"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_at_every_step_of_a_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
    ) -> None:
        def full(*arguments: Any, **options: Any) -> None:
            raise OSError(number, os.strerror(number))

        target = tmp_path / "new folder" / "index" if call == "mkdir" else tmp_path / "index"
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(DiskFull, match="could not be written"):
                files.write_json(target, {})
        assert os.listdir(tmp_path) == []

    def test_a_folder_with_files_in_it_names_the_folder_that_was_wanted(self, tmp_path: Path) -> None:
        def write(target: Path) -> None:
            with atomic_folder(target, lambda _: False, "folder") as part:
                part.mkdir()
                with atomic_path(part / "meta.json"):
                    raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(DiskFull, match=f"^{tmp_path}/index: could not") as error:
            write(tmp_path / "index")
        assert "part-" not in str(error.value)
        assert os.listdir(tmp_path) == []

    def test_a_signal_in_a_write_is_no_full_disk(self, tmp_path: Path) -> None:
        """torch closes its archive over the interruption, and then complains of a short file."""

        class Interrupted:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def write(self, block: bytes) -> int:
                signal.raise_signal(signal.SIGINT)
                return self.stream.write(block)

            def flush(self) -> None:
                self.stream.flush()

        with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "out") as part, open(part, "wb") as stream:
            torch.save({"a": torch.randn(100_000)}, Interrupted(stream))
        assert os.listdir(tmp_path) == []

    def test_other_errors_stay_what_they_are(self, tmp_path: Path) -> None:
        for error in (PermissionError(errno.EACCES, "denied"), RuntimeError("size mismatch"), DualencError("no ids")):
            with pytest.raises(type(error), match=str(error.args[-1])), explain_full_disk(tmp_path):
                raise error


class TestWhatIsThere:
    """What is written never takes the place of something else."""

    def test_a_file_replaces_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "report.html").mkdir()
        with pytest.raises(DualencError, match="is a folder, and a file is written here"):
            files.write_json(tmp_path / "report.html", {})
        assert os.listdir(tmp_path) == ["report.html"]

    @pytest.mark.parametrize("there", ["a file", "a folder", "a hidden file in a folder"])
    def test_a_folder_replaces_no_other_kind(self, tmp_path: Path, there: str) -> None:
        target = tmp_path / "index"
        path = {"a file": target, "a folder": target / "thesis.txt"}.get(there, target / ".git")
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
    @pytest.mark.parametrize(
        "text", ["", "{", "[" * 100_000, '{"a": ' * 50_000, "9" * 10_000, "\udcff", "nul", "{'a': 1}"]
    )
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
