"""The page of a report, its plots, and tables on paper and in the terminal."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dualenc.evaluation import plots
from dualenc.evaluation.report import Figure, Table, as_text, print_table, write_report

NASTY = "<script>document.title='owned'</script> & \"quotes\" \x1b[2J"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    figures = [
        Figure("Lines", plots.lines({"run": ([1, 2, 3], [3, 2, 1]), NASTY: ([1, 2], [2, 3])})),
    ]
    tables = [Table("Metrics", [{"data": NASTY, "ndcg@10": 0.5}, {"data": "mean", "ndcg@10": 0.25}])]
    path = tmp_path / "report.html"
    write_report(path, "Retrieval on toy", facts={"model": "toy & co", "size": 12345}, figures=figures, tables=tables)
    return path


@pytest.mark.slow
def test_the_page_shows_everything_escaped_and_loads_nothing(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    for expected in ("Retrieval on toy", "toy &amp; co", "12,345", "0.5000", "&lt;script&gt;", r"\x1b[2J"):
        assert expected in html
    assert "<script" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", html)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', html)
    assert len(sources) == 1
    assert all(source.startswith("data:image/") for source in sources)


@pytest.mark.parametrize("name", [r"$\frac{", "<script>", "\x1b[2J"])
def test_names_in_plots_stay_names(name: str) -> None:
    """Names of folders are no mathematics and no markup."""
    svg = plots.as_svg(plots.lines({name: ([1, 2], [0.5, 0.25]), "other": ([1, 2], [0.5, 0.25])}))
    assert "<script" not in svg
    assert name.replace("\x1b", r"\x1b") in "".join(ElementTree.fromstring(svg).itertext())


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
    print_table(Table("of \x1b]0;title\x07", [{"id\x9b": "\x1b[31mred :bug:", "score": 0.5}]))
    printed = capsys.readouterr().out
    assert not any(character in printed for character in "\x1b\x07\x9b")
    assert r"\x1b[31mred :bug:" in printed
