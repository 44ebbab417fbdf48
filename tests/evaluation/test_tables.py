"""Tables: columns of all rows, numbers readable, nothing cut off in a pipe."""

from __future__ import annotations

import re

import pytest

from dualenc.evaluation.report import Table, as_text, print_table


def test_columns_are_those_of_all_rows_in_order() -> None:
    table = Table("", [{"name": "a", "ndcg@10": 0.5}, {"name": "b", "map@10": 0.25}])
    assert table.columns == ["name", "ndcg@10", "map@10"]
    assert table.cells() == [["a", "0.5000", ""], ["b", "", "0.2500"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.64512, "0.6451"), (12345, "12,345"), (12345.6, "12,346"), (None, "–"), ("x", "x"), (True, "True")],
)
def test_values_as_a_reader_wants_them(value: object, text: str) -> None:
    assert as_text(value) == text


def test_a_wide_table_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"some-long-metric@{k}" for k in range(30)]
    print_table(Table("Wide [bold]", [dict.fromkeys(names, 0.125)]))
    printed = capsys.readouterr().out
    assert "Wide [bold]" in printed
    assert all(name in printed for name in names)
    assert printed.count("0.1250") == 30


def test_numbers_stay_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    row = {"data": "a collection with a long name", **{f"metric@{k}": 0.1234 for k in range(8)}}
    print_table(Table("Narrow", [row]))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert sum(line.count("0.1234") for line in lines) == 8
    assert max(map(len, lines)) <= 72


def test_control_characters_of_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table("of \x1b]0;title\x07", [{"id\x9b": "\x1b[31mred \u202e:bug:", "score": 0.5}]))
    printed = capsys.readouterr().out
    assert not any(character in printed for character in "\x1b\x07\x9b\u202e")
    assert r"\x1b[31mred \u202e:bug:" in printed
