"""The page of a report, its plots, and tables on paper and in the terminal."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.cells import cell_len

from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation import plots
from dualenc.evaluation.layout import lay_out, shorten
from dualenc.evaluation.report_page import (
    Figure,
    Table,
    as_interval,
    as_text,
    print_table,
    write_report,
)
from dualenc.search.migration.stages import SHARES

NASTY = "<script>document.title='owned'</script> & \"quotes\" \x1b[2J"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    figures = [
        Figure("Lines", plots.lines({"run": ([1, 2, 3], [3, 2, 1]), NASTY: ([1, 2], [2, 3])})),
    ]
    tables = [
        Table("Metrics", [{"data": NASTY, "ndcg@10": 0.5}, {"data": "mean", "ndcg@10": 0.25}])
    ]
    path = tmp_path / "report.html"
    write_report(
        path,
        "Retrieval on toy",
        facts={"model": "toy & co", "size": 12345},
        figures=figures,
        tables=tables,
    )
    return path


@pytest.mark.slow
def test_the_page_shows_everything_escaped_and_loads_nothing(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    for expected in (
        "Retrieval on toy",
        "toy &amp; co",
        "12,345",
        "0.5000",
        "&lt;script&gt;",
        r"\x1b[2J",
    ):
        assert expected in html
    assert "<script" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", html)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', html)
    assert len(sources) == 1
    assert all(source.startswith("data:image/") for source in sources)


@pytest.mark.slow
def test_on_paper_a_table_has_all_its_rows_and_a_curve_its_heading(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    # A table that scrolls would be cut off on paper; none hides rows on a screen either.
    [printed] = re.findall(r"@media print \{(.*?)\n  \}", html, flags=re.DOTALL)
    assert re.search(r"\.scroll \{[^}]*overflow: visible", printed)
    assert "max-height" not in html
    assert re.search(r"<figure><figcaption>Lines</figcaption><img ", html)


@pytest.mark.parametrize("name", [r"$\frac{", "<script>", "\x1b[2J"])
def test_names_in_plots_stay_names(name: str) -> None:
    """Names of folders are no mathematics and no markup."""
    svg = plots.as_svg(plots.lines({name: ([1, 2], [0.5, 0.25]), "other": ([1, 2], [0.5, 0.25])}))
    assert "<script" not in svg
    assert name.replace("\x1b", r"\x1b") in "".join(ElementTree.fromstring(svg).itertext())


def test_nine_curves_differ_and_their_legend_covers_none() -> None:
    names = [f"run {number}" for number in range(9)]
    figure = plots.lines({name: ([1, 2], [1, 2]) for name in names})
    drawn = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == len(names)
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())
    assert [text.get_text() for text in legend.get_texts()] == names


@pytest.mark.parametrize(
    ("rates", "labels"),
    [
        ([0.003, 0.06], ["0.005", "0.01", "0.02", "0.05"]),
        ([1e-5, 0.1], ["1e−05", "0.0001", "0.001", "0.01", "0.1"]),
    ],
)
def test_points_have_plain_rates_below_them_and_a_legend_covers_none(
    rates: list[float], labels: list[str]
) -> None:
    figure = plots.points({"a": (rates, [1, 2]), "b": (rates, [2, 1])})
    figure.draw_without_rendering()
    low, high = figure.axes[0].get_xlim()
    ticks = figure.axes[0].xaxis.get_major_ticks()
    assert [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high] == labels
    [legend] = figure.legends
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.64512, "0.6451"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (None, "–"),
        ("x", "x"),
        (True, "True"),
    ],
)
def test_values_as_a_reader_wants_them(value: object, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("values", "signed", "text"),
    [
        ((0.12749, 0.0941, 0.1605), False, "0.127 [0.094, 0.161]"),
        ((0.0633, -0.0045, 0.0829), True, "+0.063 [-0.004, +0.083]"),
        ((0.5, 0.5, 0.5), False, "0.500"),
    ],
)
def test_an_interval_in_one_column(values: Any, signed: bool, text: str) -> None:
    assert as_interval(*values, signed=signed) == text


@pytest.mark.parametrize("reference", [measures.OLD, measures.MAPPED_QUERIES])
def test_the_table_of_a_migration_fits_80_columns_in_a_pipe(
    capsys: pytest.CaptureFixture[str], reference: str
) -> None:
    """With every system there is; means and the differences that matter, as in the full table."""
    generator = np.random.default_rng(0)
    names = [reference, measures.MAPPED_QUERIES, measures.CANDIDATES, measures.OF_MAPPED]
    names += [measures.mixed_name(share) for share in SHARES]
    scores = {name: {metric: generator.random(50) for metric in measures.METRICS} for name in names}
    rows = measures.summarize(scores)
    print_table(measures.short_table(rows))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    full = measures.sample_table(rows).rows
    for row, cells in zip(rows, full, strict=True):
        short = row["system"].removeprefix("new model, ")
        [line] = [line for line in lines if line.startswith(f" {short}  ")]
        assert f" {row['ndcg@10'][0]:.3f} " in line
        assert f" {row['recall@10'][0]:.3f} " in line
        assert (str(cells["ndcg@10 - old"]) in line) == (row["system"] != reference)


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


PATH = "/home/someone/projects/retrieval/runs/2026-11-29/" + "long-name-" * 6 + "/model"
SCORES = dict.fromkeys(("ndcg@10", "recall@10", "recall@100", "mrr@10", "map@100"), 0.1234)
INTERVAL = "+0.123 [+0.012, +0.234]"
TABLES = {
    "a long path among values": Table(
        "Change of model",
        [
            {"what": "old model", "value": PATH},
            {"what": "documents", "value": 3000},
            {"what": "s", "value": 1.5},
        ],
    ),
    "results": Table(
        "Retrieval",
        [{"data": "questions-and-answers", "system": "a model", "documents": 16000, **SCORES}] * 2,
    ),
    "intervals": Table(
        "Sample",
        [{"": "mapped vectors", **{f"{name} - old": INTERVAL for name in SCORES}}] * 2,
    ),
    "CJK": Table(
        "東京" * 60,
        [{"id": 1, "score": 0.5, "snippet": "東京タワー" * 20 + " and more words" * 5}] * 2,
    ),
    "many columns": Table(
        "Many",
        [{"name": PATH} | {f"some-long-metric@{k}": 0.1234 for k in range(30)}] * 2,
    ),
    "one long word": Table("Word", [{"number": 1.5, "word": "x" * 300}]),
}


@pytest.mark.parametrize("width", [20, 60, 80, 120])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_terminal_and_lose_no_value(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = TABLES[name]
    lines = printed_lines(table, width, monkeypatch, capsys)
    assert max(map(cell_len, lines)) <= width
    printed = " ".join(lines)
    for value, count in Counter(value for row in table.rows for value in row.values()).items():
        if isinstance(value, int | float) or (value == INTERVAL and width > 30):
            assert printed.count(as_text(value)) >= count
        elif value != PATH and name != "results":
            # Wrapped, and nothing of it is gone.
            left = iter(printed)
            assert all(character in left for character in str(value) if not character.isspace())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_path_is_shortened_in_the_middle(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed_lines(TABLES["a long path among values"], width, monkeypatch, capsys)
    [line] = [line for line in lines if "old model" in line]
    assert re.search(r"/home/\S*…\S*/model", line)
    numbers = [line for line in lines if line.startswith((" documents", " s "))]
    assert [line.split()[-1] for line in numbers] == ["3,000", "1.5000"]


@pytest.mark.parametrize("text", ["word " * 60, "如何恢复中断的训练运行" * 20])
def test_beginnings_of_texts_take_three_lines(text: str) -> None:
    """Of other columns nothing is lost, and a text that fits stays whole."""
    rows = [["a long venue " * 6, text], ["x", "short"]]
    [block] = lay_out(["venue", "snippet"], rows, 80, beginnings="snippet")
    lines = block.rows[0][1].split("\n")
    assert len(lines) == 3
    assert text.startswith(lines[0])
    assert lines[-1].endswith("…")
    assert max(map(cell_len, lines)) <= block.widths[1]
    assert block.rows[0][0].split() == rows[0][0].split()
    assert block.rows[1] == ["x", "short"]


def test_a_row_keeps_its_lines_together_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Further columns follow below, with the names of the rows, instead of cells of three lines."""
    lines = printed_lines(TABLES["intervals"], 80, monkeypatch, capsys)
    assert sum(line.count(INTERVAL) for line in lines) == 2 * len(SCORES)
    assert all("mapped vectors" in line for line in lines if INTERVAL in line)


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("/a/b/c", 6, "/a/b/c"),
        ("/home/someone/model", 13, "/hom…ne/model"),
        ("/東京/東京/東京/模型", 12, "/東…京/模型"),
    ],
)
def test_shortened_texts(text: str, width: int, short: str) -> None:
    assert shorten(text, width) == short
    assert cell_len(short) <= width


def printed_lines(
    table: Table, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines of a table in a terminal of this width, without its styles."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(table)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def test_control_characters_of_names_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(Table("of \x1b]0;title\x07", [{"id\x9b": "\x1b[31mred :bug:", "score": 0.5}]))
    printed = capsys.readouterr().out
    assert not any(character in printed for character in "\x1b\x07\x9b")
    assert r"\x1b[31mred :bug:" in printed
