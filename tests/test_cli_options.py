"""Options of commands, made from typed functions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from cyclopts import Parameter, ValidationError

from dualenc import cli
from dualenc.commands.options import COMMAS


@dataclass(frozen=True)
class Shown:
    """Options that several commands share.

    Args:
        columns: what is shown, all of it
            in 100 % of its glory.
        k: how many.
    """

    columns: Annotated[list[str] | None, COMMAS] = None
    k: Annotated[int, Parameter(alias="-k")] = 10


DEFAULT_SHOWN = Shown()
CALLS: list[dict[str, Any]] = []


def build(
    source: str,
    data: str | None = None,
    *,
    out: str,
    batch_size: int = 32,
    rate: float = 0.5,
    json: bool = False,
    quotes: bool | None = None,
    side: Literal["left", "right"] = "left",
    cutoffs: Annotated[list[int] | None, COMMAS] = None,
    limit: float | None = 0.9,
    shown: Shown = DEFAULT_SHOWN,
) -> None:
    """Build a thing.

    And more about it.

    Args:
        source: where it comes from.
        batch_size: how many at once.
    """
    CALLS.append(dict(locals()))


def train(recipe: str, *overrides: str, resume: bool = False) -> None:
    """Train it."""
    CALLS.append({"recipe": recipe, "overrides": overrides, "resume": resume})


def run_function(function: Any, *words: str) -> int:
    """Run `dualenc NAME WORDS…` with the function as the only command."""
    name = function.__name__
    module: Any = SimpleNamespace(**{name: function})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, f"dualenc.commands.{name}", module)
        patch.setattr(cli, "COMMANDS", (name,))
        return cli.main([name, *words])


def called(function: Any, *words: str) -> dict[str, Any]:
    CALLS.clear()
    assert run_function(function, *words) == 0
    assert len(CALLS) == 1
    return CALLS[0]


DEFAULTS = {
    "source": "m",
    "data": None,
    "out": "o",
    "batch_size": 32,
    "rate": 0.5,
    "json": False,
    "quotes": None,
}
DEFAULTS |= {"side": "left", "cutoffs": None, "limit": 0.9, "shown": Shown()}


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("m --out o", {}),
        ("--out o m", {}),
        ("m --out o d", {"data": "d"}),
        ("m d --out=o", {"data": "d"}),
        ("m --out o --batch_size=8", {"batch_size": 8}),
        ("m --out o --rate -3", {"rate": -3.0}),
        ("m --out o -5,3", {"data": "-5,3"}),
        ("-20° --out o -- -20", {"source": "-20°", "data": "-20"}),
        ("m --out=-1: -1:2", {"out": "-1:", "data": "-1:2"}),
        ("m --out o --columns -1:2,x", {"shown": Shown(["-1:2", "x"])}),
        ("m --json --out o d", {"json": True, "data": "d"}),
        ("m --out o --no-quotes", {"quotes": False}),
        ("m --side right --out o", {"side": "right"}),
        ("m --out o -- --json", {"data": "--json"}),
        ("m --out a --out o", {}),
        ("m --out o --cutoffs 1,5 --cutoffs 10", {"cutoffs": [1, 5, 10]}),
        ("m --out o --limit null", {"limit": None}),
        ("m --out o -k 3", {"shown": Shown(k=3)}),
        ("m --out o --columns a,2020 --columns=no --k 4", {"shown": Shown(["a", "2020", "no"], 4)}),
    ],
)
def test_options_stand_anywhere(words: str, changed: dict[str, Any]) -> None:
    assert called(build, *words.split()) == {**DEFAULTS, **changed}


@pytest.mark.parametrize(
    "text", ["[1, 2]", "{x: 1}", "null", "#note", "", "a=b", " a\t", "-", "--- my_text"]
)
def test_texts_are_taken_as_they_are(text: str) -> None:
    end_of_options = ["--"] if text.startswith("-") else []
    assert called(build, "--out", "o", *end_of_options, text)["source"] == text


def test_double_quotes_protect_the_comma_of_a_text_in_a_list() -> None:
    found = called(build, "m", "--out", "o", '--columns="Last, First", year ', '--columns="[b]"')
    assert found["shown"].columns == ["Last, First", "year", "[b]"]


@pytest.mark.parametrize("text", ["-20 degrees", "-5,3", "- a list", "-°C", "-1: one"])
def test_texts_that_begin_with_a_hyphen_and_no_letter_are_values(text: str) -> None:
    found = called(build, "m", text, "--out", text, "-k", "3", "--columns", text)
    assert (found["source"], found["data"], found["out"]) == ("m", text, text)
    assert found["shown"] == Shown(text.split(","), 3)
    assert called(train, "r.yaml", "a.b=1", text)["overrides"] == ("a.b=1", text)


def test_the_rest_is_passed_on() -> None:
    found = called(train, "r.yaml", "a.b=1", "--resume", "c=[x, y]")
    assert found == {"recipe": "r.yaml", "overrides": ("a.b=1", "c=[x, y]"), "resume": True}
    assert called(train, "r.yaml")["overrides"] == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "m --out o --batch-sise 8",
            "Unknown option: --batch-sise (did you mean --batch-size?). See dualenc build",
        ),
        ("m --out o --limes 8", "Unknown option: --limes. See dualenc build"),
        ("m --out o -hot", "Unknown option: -hot. If it is a value, write it last, after --: dual"),
        ("m --out o -", "after --: dualenc build … -- -. See dualenc build --help"),
        ("m --out o -- -hot -k 3", "-k comes after --, where no options are; write options before"),
        ("m --out -hot", "--out requires an argument; if -hot is its value, write --out=-hot."),
        ("m", "parameter --out requires an argument."),
        ("--out o", "parameter --source requires an argument."),
        ("m d e --out o", "Unused Tokens: ['e']."),
        ("m --out --json", "parameter --out requires an argument."),
        ("m --out=", "--out is empty"),
        (
            "m --out o --batch-size many",
            'Invalid value for --batch-size: unable to convert "many" into int.',
        ),
        ("m --out o --side top", 'Invalid value "top" for --side. Choose from: "left", "right".'),
        ("m --out o --cutoffs 1,x", 'Invalid value for CUTOFFS: unable to convert "x" into int.'),
        ("m --out o --limit x", 'Invalid value for --limit: unable to convert "x" into float.'),
    ],
)
def test_mistakes_are_named_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    CALLS.clear()
    assert run_function(build, *words.split()) == 2
    assert not CALLS
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


RANGES = {
    "MINUTES": ("0.1 20", "0 -1"),
    "TRIALS": ("2 12", "1 0"),
    "COUNT": ("1 1000000000000", "0 -1"),
    "BATCH": ("1 1048576", "0 1048577"),
    "CANDIDATES": ("1 16777216", "0 16777217"),
    "QUERIES": ("0 1048576", "-1 1048577"),
    "SEED": ("0 4294967295", "-1 4294967296"),
    "WORKERS": ("0 1024", "-1 1025"),
    "SEVERITY": ("1 5", "0 6"),
    "SHARE": ("0 1", "-0.1 1.1 nan"),
    "HELD_OUT": ("0 0.9", "-0.1 0.91 nan"),
    "TEMPERATURE": ("0.001 10", "0 0.0009 10.1 nan"),
}
"""Valid and invalid values."""


@pytest.mark.parametrize(
    "line",
    [
        "search INDEX QUERY -k COUNT",
        "search INDEX QUERY --nprobe CANDIDATES",
        "search INDEX QUERY --ef-search CANDIDATES",
        "search INDEX QUERY --weight SHARE",
        "embed MODEL DATA --out OUT --batch-size BATCH",
        "embed MODEL DATA --out OUT --dim COUNT",
        "embed MODEL DATA --out OUT --num-workers WORKERS",
        "index MODEL DATA --out OUT --batch-size BATCH",
        "index EMBEDDINGS --out OUT --dim COUNT",
        "index EMBEDDINGS --out OUT --target-recall SHARE",
        "index EMBEDDINGS --out OUT --recall-queries QUERIES",
        "migrate INDEX MODEL --batch-size BATCH",
        "mine MODEL DATA --out OUT --batch-size BATCH",
        "push EMBEDDINGS TARGET --recall SHARE",
        "quickstart --test-docs COUNT",
        "quickstart --steps COUNT",
        "quickstart --seed SEED",
        "tune RECIPE --minutes MINUTES",
        "tune RECIPE --trials TRIALS",
        "tune RECIPE --seed SEED",
        "adapt INDEX CLICKS --out OUT --epochs COUNT",
        "adapt INDEX CLICKS --out OUT --batch-size BATCH",
        "adapt INDEX CLICKS --out OUT --temperature TEMPERATURE",
        "adapt INDEX CLICKS --out OUT --held-out HELD_OUT",
        "adapt INDEX CLICKS --out OUT --keep SHARE",
        "adapt INDEX CLICKS --out OUT --seed SEED",
        "evaluate engine FOLDER --recall SHARE",
        "evaluate retrieval MODEL DATA --batch-size BATCH",
        "evaluate retrieval MODEL DATA --weight SHARE",
        "evaluate image-text MODEL DATA --batch-size BATCH",
        "evaluate zero-shot MODEL DATA --batch-size BATCH",
        "evaluate probe MODEL DATA --batch-size BATCH",
        "evaluate probe MODEL DATA --limit COUNT",
        "evaluate probe MODEL DATA --train-limit COUNT",
        "evaluate probe MODEL DATA --seed SEED",
        "evaluate probe MODEL DATA --num-workers WORKERS",
        "evaluate corrupted MODEL DATA --num-workers WORKERS",
        "evaluate corrupted MODEL DATA --severity SEVERITY",
    ],
)
def test_numbers_outside_their_range_are_refused(line: str) -> None:
    *words, name = line.split()
    app = cli.build_app(words[:1])
    valid, invalid = RANGES[name]
    for value in valid.split():
        app.parse_args([*words, value])
    for value in invalid.split():
        with pytest.raises(ValidationError, match=f"for {words[-1]}. Must be"):
            app.parse_args([*words, value])


def test_help_has_a_line_for_each_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run_function(build, "-h")
    lines = [" ".join(line.strip("│").split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "Usage: dualenc build --out STR [OPTIONS] SOURCE [ARGS]",
        "And more about it.",
        "* SOURCE --source where it comes from. [required]",
        "--batch-size INT how many at once. [default: 32]",
        "--quotes --no-quotes",
        "--side CHOICE [choices: left, right] [default: left]",
        "--columns STR what is shown, all of it in 100 % of its glory.",
    ):
        assert line in lines
    run_function(train, "--help")
    assert "Usage: dualenc train [OPTIONS] RECIPE [ARGS...]" in capsys.readouterr().out


def test_texts_of_a_sequence_are_not_split_at_commas() -> None:
    conditions: list[Any] = []

    def search(*, where: Sequence[str] | None = None) -> None:
        conditions.append(where)

    run_function(search, "--where", 'by="Doe, Jane"', "--where=[a],b")
    assert conditions == [['by="Doe, Jane"', "[a],b"]]
