"""Bad inputs driven through the real commands: each must end in one line, and leave nothing half-written.

    python -m tests.bad_inputs [--only WORD] [--jobs 2] [--report FILE]

One process imports everything once and forks a child for each case: no case sees another's memory, and one that
aborts, hangs or eats memory costs only itself. The children run `dualenc.cli.main` in a folder of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

# Before torch, datasets or transformers are imported: they read these once. One thread, since children are forked.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

Expected = Literal["error", "either", "works"]
"""A refusal; a refusal or a sound result, as a byte of a text may be any; a sound result."""

SECONDS = 60
MEMORY_BYTES = 3 << 30
PIPE_BYTES = 1 << 20
ERROR_PREFIX = "dualenc: error:"
LEFTOVER = re.compile(r"\.(part|old)-[0-9a-f]+")
UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|object at 0x|_io\.")
LONGEST_LINE = 1500


class Box:
    """The folder that a case works in; what it changes of the toys is copied here first.

    Args:
        folder: of the case.
        toys: sound models, data and outputs, shared by all cases.
    """

    def __init__(self, folder: Path, toys: Path) -> None:
        self.folder, self.toys = folder, toys
        self.own: set[str] = set()

    def __getitem__(self, name: str) -> Path:
        """A file or folder of the case's own: `model/config.json` is that of a copy of the toy `model`."""
        top = name.split("/")[0]
        toy = self.toys / top
        if top not in self.own and toy.exists():
            (shutil.copytree if toy.is_dir() else shutil.copy)(toy, self.folder / top)
        self.own.add(top)
        return self.folder / name

    def words(self, template: str) -> list[str]:
        """A command line: `{name}` is the case's own copy of a toy if there is one, otherwise the toy."""

        def place(found: re.Match[str]) -> str:
            return str((self.folder if found[1] in self.own else self.toys) / found[1])

        return [re.sub(r"\{([\w.-]+)\}", place, word).replace("␣", " ") for word in template.split()]


Change = Callable[[Box], object]


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        name: what is wrong, unique.
        words: the command line, see `Box.words`.
        change: makes the bad input in the case's box.
        expected: how the command must end.
        codes: exit codes of a refusal.
        file_bytes: no file may grow beyond it, as on a disk that is full.
    """

    name: str
    words: str
    change: Change | None = None
    expected: Expected = "error"
    codes: tuple[int, ...] = (2,)
    file_bytes: int | None = None


class Outcome(NamedTuple):
    """What became of a case; `problem` is empty if it ended as it must."""

    name: str
    problem: str
    line: str
    place: str
    seconds: float


class Running(NamedTuple):
    """A child at work."""

    case: Case
    box: Box
    before: frozenset[str]
    started: float
    stderr: int


def run_cases(cases: Iterable[Case], toys: Path, scratch: Path, jobs: int = 2) -> Iterator[Outcome]:
    """Run every case in a forked child, `jobs` at a time."""
    waiting, running = list(cases)[::-1], dict[int, Running]()
    gc.collect()
    gc.freeze()
    while waiting or running:
        while waiting and len(running) < jobs:
            case = waiting.pop()
            pid, child = _start(case, toys, scratch)
            running[pid] = child
        for pid, child in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() - child.started > SECONDS
            if not done and not late:
                continue
            # Workers of the child are in its group; none may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if not done:
                os.waitpid(pid, 0)
            yield _judge(running.pop(pid), os.waitstatus_to_exitcode(status) if done else None)
            shutil.rmtree(child.box.folder.parent, ignore_errors=True)
        time.sleep(0.002)


def _start(case: Case, toys: Path, scratch: Path) -> tuple[int, Running]:
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "box"
    folder.mkdir()
    box = Box(folder, toys)
    if case.change is not None:
        case.change(box)
    before, started = _listing(folder), time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    # No file, since those may be forbidden to grow; read when the child has ended.
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    pid = os.fork()
    if pid == 0:
        _child(case, box, write_end)
    os.close(write_end)
    os.set_blocking(read_end, False)
    return pid, Running(case, box, before, started, read_end)


def _child(case: Case, box: Box, stderr: int) -> None:
    """Be the process of one command; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(box.folder)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, target in ((0, nothing), (1, nothing), (2, stderr)):
            os.dup2(target, descriptor)
        # Whoever imports this may have put other streams in the place of these.
        faulthandler.disable()
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
        if case.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case.file_bytes, case.file_bytes))
        faulthandler.dump_traceback_later(SECONDS - 5)
        from dualenc.cli import main

        code = main(box.words(case.words))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _judge(run: Running, code: int | None) -> Outcome:
    case, box = run.case, run.box
    stderr = ""
    with contextlib.suppress(BlockingIOError):
        stderr = os.read(run.stderr, PIPE_BYTES).decode("utf-8", errors="replace")
    os.close(run.stderr)
    lines = [line for line in re.split(r"[\r\n]+", stderr) if line.startswith(ERROR_PREFIX)]
    line = lines[-1] if lines else next(iter(stderr.strip().splitlines()[-1:]), "")
    after = _listing(box.folder)
    new, gone = _unfinished(box.folder, after - run.before), sorted(run.before - after)
    if code is None:
        problem = f"hangs: more than {SECONDS} s"
    elif code < 0:
        problem = f"aborts: {signal.Signals(-code).name}"
    elif "Traceback" in stderr:
        problem = "traceback"
    elif any(LEFTOVER.search(name) for name in after):
        problem = f"leaves {next(name for name in new if LEFTOVER.search(name))}"
    elif code == 0:
        problem = "accepted" if case.expected == "error" else ""
    elif case.expected == "works":
        problem = f"refused, exit code {code}"
    elif code not in case.codes:
        problem = f"exit code {code}"
    elif len(lines) != 1:
        problem = f"{len(lines)} error lines"
    elif UNREADABLE.search(line) or len(line) > LONGEST_LINE:
        problem = "unreadable line"
    elif new or gone:
        problem = f"half-written: {', '.join(new[:3])}" if new else f"removed: {', '.join(gone[:3])}"
    else:
        problem = ""
    return Outcome(case.name, problem, line[:400], _place(stderr), time.monotonic() - run.started)


def _unfinished(folder: Path, new: frozenset[str]) -> list[str]:
    """What is neither a whole file nor the way to one: finished work may stay, the next run goes on from there."""
    new = frozenset(name for name in new if not name.endswith(".lock"))  # which stay beside the folder of an index
    whole = {name for name in new if (folder / name).is_file() and _is_whole(folder / name)}
    for name in sorted(new):
        meta = folder / name / "meta.json"
        if meta.is_file() and b'"complete": true' in meta.read_bytes():
            whole |= {other for other in new if other.startswith(f"{name}/")}
    ways = {parent.as_posix() for name in whole for parent in Path(name).parents}
    return sorted(new - whole - ways)


def _is_whole(file: Path) -> bool:
    """Whether the end of a file that holds results is there; meta.json speaks for its folder and is judged with it."""
    content = file.read_bytes()
    if not content:
        return False
    try:
        if file.name == "meta.json":
            # Of a run it marks the folder only, and the next run goes on there.
            return bool(json.loads(content).get("format") == "dualenc-run")
        if file.suffix in (".ndjson", ".jsonl"):
            return all(json.loads(line) for line in content.splitlines() if line) and content.endswith(b"\n")
        if file.suffix == ".json":
            return isinstance(json.loads(content), dict)
    except ValueError:
        return False
    return file.suffix in (".trec", ".html", ".yaml") and content.endswith((b"\n", b"</html>"))


def _place(stderr: str) -> str:
    """The deepest line of the package in the last traceback."""
    frames = re.findall(r'File "[^"]*?/(dualenc/[\w/]+\.py)", line (\d+)', stderr)
    # Of a process that hangs the innermost comes first.
    return ":".join(frames[0 if "most recent call first" in stderr else -1]) if frames else ""


def _listing(folder: Path) -> frozenset[str]:
    found = set()
    for parent, folders, files in os.walk(folder):
        found |= {os.path.relpath(os.path.join(parent, name), folder) for name in (*folders, *files)}
    return frozenset(found)


def prepare(make: Callable[[Path], None], warm_up: Callable[[Path], None], toys: Path) -> None:
    """Make the toys in a child; here import what it needed and warm up: what each case would do again."""
    names = toys.with_suffix(".modules")
    pid = 0 if toys.is_dir() else os.fork()
    if not toys.is_dir() and pid == 0:
        code = 1
        try:
            make(toys)
            names.write_text("\n".join(sorted(sys.modules)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if pid and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise SystemExit("the toys cannot be made")
    for name in names.read_text().splitlines():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    warm_up(toys)
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Bring this process's memory into huge pages, where Linux has them: copying its page tables takes half as long."""
    huge_page, collapse, maps = 2 << 20, 25, Path("/proc/self/maps")  # MADV_COLLAPSE
    for line in maps.read_text().splitlines() if maps.exists() else ():
        place, access, *_, name = line.split()
        start, end = (int(address, 16) for address in place.split("-"))
        if access == "rw-p" and name in ("0", "[heap]") and end - start >= huge_page:  # "0" where it is not named
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), collapse)


def main(argv: list[str] | None = None) -> int:
    """Run the cases, print what is wrong, and tell by the exit code whether anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", type=Path, help="JSON file for all outcomes")
    parser.add_argument("--toys", type=Path, help="folder to keep the toys in, made if it is not there")
    given = parser.parse_args(argv)
    from tests.bad_input_cases import all_cases, make_toys, warm_up

    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="bad-inputs-"))
    os.environ["HF_DATASETS_CACHE"] = str(scratch / "datasets")
    toys = given.toys or scratch / "toys"
    prepare(make_toys, warm_up, toys)
    cases = [case for case in all_cases(toys) if given.only in case.name]
    random.Random(0).shuffle(cases)  # slow ones are evenly spread
    repeated = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    assert not repeated, f"names must be distinct: {repeated}"
    outcomes = []
    for outcome in run_cases(cases[:: given.every], toys, scratch, given.jobs):
        outcomes.append(outcome)
        if outcome.problem:
            print(f"{outcome.name}\n    {outcome.problem} {outcome.place}\n    {outcome.line}", flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
    failures = [outcome for outcome in outcomes if outcome.problem]
    if given.report:
        given.report.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1, ensure_ascii=False))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    computing = sum(one.ru_utime + one.ru_stime for one in used)
    seconds = time.monotonic() - started
    print(f"{len(outcomes)} cases, {len(failures)} failures, {seconds:.0f} s, {computing:.0f} s of computing")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
