"""The `dualenc` command: help at once, errors in one line, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualenc import cli
from dualenc.errors import DualencError


def fail(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a command `fail` that raises the error."""

    def fail() -> None:
        raise error

    monkeypatch.setitem(sys.modules, "dualenc.commands.fail", SimpleNamespace(fail=fail))  # type: ignore[misc]
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, "fail"))


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name.partition(" ")[0] in shown for name in cli.COMMANDS)
    assert cli.main(["evaluate", "--help"]) == 0
    assert "image-text" in capsys.readouterr().out
    assert cli.main([]) == 0
    assert cli.main(["--version"]) == 0
    assert "dualenc 0" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from dualenc.cli import main
try:
    main(sys.argv[1:])
finally:
    assert not {"torch", "faiss", "transformers"} & set(sys.modules)
"""
    for words in (["--help"], ["index", "--help"], ["evaluate", "probe", "--help"]):
        subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)


def test_a_command_imports_no_other() -> None:
    code = """
import sys
from dualenc.cli import main
assert main(["report", "--help"]) == 0
assert not {"numpy", "dualenc.commands.quickstart", "dualenc.commands.evaluate"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: dualenc {command}" in shown
    assert not re.search(
        r"Optional|Literal|Union|NoneType|list\[|--[a-z-]+\+|default: None|%%", shown
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("indx a b", 'Unknown command "indx". Did you mean "index"?'),
        ("evaluate retreival a", 'Unknown command "retreival". Did you mean "retrieval"?'),
        (
            "embed a b --ouut c",
            'Command "embed" parameter --out requires an argument. '
            "Did you mean --out instead of --ouut? See ",
        ),
        (
            "search",
            'Command "search" parameter --index requires an argument. See dualenc search --help',
        ),
        ("search nowhere x", "nowhere: no such folder; make an index with `dualenc index"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dualenc: error: {message}")
    assert captured.err.count("\n") == 1


class OutOfMemoryError(RuntimeError):
    """By its name, as torch's."""


class PanicException(BaseException):
    """As pyo3 raises it for a panic of Rust."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DualencError("two\nlines"), 2, "error: two lines"),
        (DualencError("a\x1b[2Jb\x9bc\udc80: ümlaut"), 2, "error: a\\x1b[2Jb\\x9bc\\udc80: ümlaut"),
        (DualencError("https://me:secret@h/x?key=secret: no"), 2, "error: https://h/x: no"),
        (
            OSError(28, "No space left on device", "x.npy"),
            2,
            "error: [Errno 28] No space left on device: 'x.npy'",
        ),
        (
            ModuleNotFoundError("No module named 'peft'", name="peft"),
            2,
            "error: No module named 'peft'; install",
        ),
        (
            MemoryError(),
            1,
            "error: not enough memory (none left); make batch_size or chunk_size smaller",
        ),
        (
            OutOfMemoryError("2 GiB"),
            1,
            "error: not enough memory (2 GiB); make batch_size or chunk_size smaller",
        ),
        (
            ZeroDivisionError("ours"),
            1,
            "unexpected error: ZeroDivisionError: ours; run again with --debug",
        ),
        (
            PanicException("no entry"),
            1,
            "unexpected error: PanicException: no entry; run again with --debug",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail(error, monkeypatch)
    assert cli.main(["fail"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dualenc: {message}")
    assert captured.err.count("\n") == 1
    with pytest.raises(type(error)):
        cli.main(["fail", "--debug"])


def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fail(KeyboardInterrupt(), monkeypatch)
    assert cli.main(["fail"]) == 130
    assert capsys.readouterr().err == "dualenc: interrupted\n"


@pytest.mark.slow
def test_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("dualenc")
    for start in ([sys.executable, "-m", "dualenc"], [str(script)]):
        done = subprocess.run([*start, "nonsense"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith('dualenc: error: Unknown command "nonsense".')


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "dualenc", "recipe"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 0
    assert done.stderr == b""
