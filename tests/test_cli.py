"""The `dualenc` command: help at once, errors in one line, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualenc import cli
from dualenc.errors import DualencError


class PanicException(BaseException):
    """As pyo3 raises it for a panic of Rust."""


def raises(error: BaseException) -> Any:
    def command(word: str = "") -> None:
        raise error

    return SimpleNamespace(command=command)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a command `fail` that raises the given error."""

    def install(error: BaseException) -> None:
        monkeypatch.setitem(sys.modules, "dualenc.commands.fail", raises(error))
        monkeypatch.setitem(cli.COMMANDS, "fail", cli.Command("fail", "command", ""))

    return install


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("quickstart", "train", "embed", "index", "search", "evaluate"):
        assert name in shown
    assert cli.main(["evaluate", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("retrieval", "image-text", "zero-shot", "probe", "corrupted", "objectives", "compare"):
        assert name in shown
    assert cli.main([]) == 0
    assert cli.main(["--version"]) == 0
    assert "dualenc 0" in capsys.readouterr().out


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    words = [["--help"], ["index", "--help"], ["evaluate", "probe", "--help"]]
    code = f"import sys; from dualenc.cli import main; [main(line) for line in {words}]"
    check = "; assert not {'torch', 'numpy', 'faiss', 'transformers'} & set(sys.modules), sys.modules.keys()"
    before = os.times()
    subprocess.run([sys.executable, "-c", code + check], check=True, capture_output=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1


def commands(table: cli.Commands) -> Iterator[cli.Command]:
    for entry in table.values():
        yield from [entry] if isinstance(entry, cli.Command) else commands(entry)


@pytest.mark.parametrize("command", list(commands(cli.COMMANDS)), ids=lambda command: command.function)
def test_every_command_is_there_and_has_help(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    from dualenc.arguments import run_function

    run_function(cli._load(command), f"dualenc {command.function}", ["--help"])
    shown = capsys.readouterr().out
    assert f"usage: dualenc {command.function}" in shown
    assert not re.search(r"Optional|Literal|Union|NoneType|list\[|--[a-z-]+\+|default: (None|True|False|\))|%%", shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("indx a b", "dualenc has no command 'indx' (did you mean index?); see dualenc --help"),
        ("evaluate retreival a", "dualenc evaluate has no command 'retreival' (did you mean retrieval?)"),
        ("embed a b --ouut c", "dualenc embed has no option '--ouut' (did you mean --out?)"),
        ("search", "dualenc search: missing a required argument: 'index'; see dualenc search --help"),
        ("search nowhere x", "nowhere: no such folder; make an index with `dualenc index"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dualenc: error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DualencError("data.csv: row 3 has no caption; give one"), "data.csv: row 3 has no caption; give one"),
        (DualencError("two\nlines"), "two lines"),
        (OSError(28, "No space left on device", "x.npy"), "[Errno 28] No space left on device: 'x.npy'"),
        (
            ModuleNotFoundError("No module named 'peft'", name="peft"),
            "No module named 'peft'; install the package that brings it (pip install peft)",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    failing: Any, error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(error)
    assert cli.main(["fail"]) == 2
    assert capsys.readouterr().err == f"dualenc: error: {message}\n"
    for words in (["--debug", "fail"], ["fail", "--debug"]):
        with pytest.raises(type(error)):
            cli.main(words)


class OutOfMemoryError(RuntimeError):
    """By its name, as torch's."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ZeroDivisionError("ours"), "unexpected error: ZeroDivisionError: ours; run again with --debug to see where"),
        (KeyError("a\nb"), "unexpected error: KeyError: 'a\\nb'; run again with --debug to see where"),
        (TypeError("two\nlines"), "unexpected error: TypeError: two lines; run again with --debug to see where"),
        (RecursionError(), "unexpected error: RecursionError; run again with --debug to see where"),
        (ValueError("x" * 900), f"unexpected error: ValueError: {'x' * 388}; run again with --debug to see where"),
        (
            PanicException("no entry found for key"),
            "unexpected error: PanicException: no entry found for key; run again with --debug to see where",
        ),
        (MemoryError(), "error: not enough memory (none left); make batch_size or chunk_size smaller"),
        (
            OutOfMemoryError("tried to allocate 2 GiB"),
            "error: not enough memory (tried to allocate 2 GiB); make batch_size or chunk_size smaller",
        ),
    ],
)
def test_what_nobody_foresaw_is_one_line_and_code_1(
    failing: Any, error: BaseException, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(error)
    assert cli.main(["fail"]) == 1
    assert capsys.readouterr().err == f"dualenc: {message}\n"
    with pytest.raises(type(error)):
        cli.main(["fail", "--debug"])


def test_control_characters_in_a_message_do_not_reach_the_terminal(
    failing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(DualencError("a\x1b[2Jb\x9bc\udc80: ümlaut"))
    assert cli.main(["fail"]) == 2
    assert capsys.readouterr().err == "dualenc: error: a\\x1b[2Jb\\x9bc\\udc80: ümlaut\n"


def test_ctrl_c(failing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failing(KeyboardInterrupt())
    assert cli.main(["fail"]) == 130
    assert capsys.readouterr().err == "dualenc: interrupted\n"


@pytest.mark.slow
def test_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("dualenc")
    for start in ([sys.executable, "-m", "dualenc"], [sys.executable, "-m", "dualenc.cli"], [str(script)]):
        done = subprocess.run([*start, "nonsense"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "dualenc: error: dualenc has no command 'nonsense'; see dualenc --help\n"


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "dualenc"], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert done.stderr == b""
