"""Reports, galleries of the best and the worst, and tables on paper and in the terminal."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from dualenc.evaluation import plots, report
from dualenc.evaluation.report import (
    Entry,
    Figure,
    Gallery,
    Item,
    Table,
    as_text,
    best_and_worst,
    print_table,
    rank_galleries,
    retrieval_galleries,
    snippet,
    thumbnail,
    write_report,
)
from dualenc.evaluation.retrieval import Result

NASTY = "<script>document.title='owned'</script> & \"quotes\""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8))
    results = [Item(NASTY, note="d1 · 0.91", relevant=True), Item("a picture", picture, "d2", relevant=False)]
    return write_report(
        tmp_path / "report.html",
        "Retrieval on toy",
        facts={"model": "toy & co", "documents": 12345},
        tables=[Table("Metrics", [{"data": "toy", "ndcg@10": 0.5}, {"data": "mean", "ndcg@10": 0.25}])],
        figures=[
            Figure("Bars", plots.bars({"ours": {"ndcg": 0.5}, "BM25": {"ndcg": 0.25}})),
            Figure("Lines", plots.lines({"run": ([1, 2, 3], [3, 2, 1])}, log_y=True)),
            Figure("Histograms", plots.histograms({"positive": [0.5, 0.75], "none": []})),
        ],
        galleries=[Gallery("Best queries", [Entry(Item("what?", note="q1"), results)])],
    )


@pytest.mark.slow
def test_the_page_shows_what_it_was_given_and_loads_nothing(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    for expected in ("Retrieval on toy", "toy &amp; co", "12,345", "0.5000", "Best queries", "what?", "d1 · 0.91"):
        assert expected in html
    assert "<script" not in html
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', html)
    assert len(sources) == 4
    assert all(source.startswith("data:image/") for source in sources)


def test_the_same_content_gives_the_same_bytes() -> None:
    assert plots.as_svg(plots.bars({"a": {"x": 1.0}})) == plots.as_svg(plots.bars({"a": {"x": 1.0}}))


def test_histograms_of_sets_of_different_size_have_the_same_area() -> None:
    axes = plots.histograms({"few": [0.0, 1.0], "many": list(np.linspace(0, 1, 1000))}, bins=10).axes[0]
    heights = [patch.get_height() for patch in axes.patches]
    assert sum(heights[:10]) == pytest.approx(1)
    assert sum(heights[10:]) == pytest.approx(1)


@pytest.mark.slow
def test_a_failure_leaves_the_old_page(page: Path) -> None:
    before = page.read_bytes()
    with pytest.raises(TypeError):
        write_report(page, "Broken", tables=[Table("Bad", [None])])  # type: ignore[list-item]
    assert page.read_bytes() == before
    assert [file.name for file in page.parent.iterdir()] == ["report.html"]


def test_snippets_are_one_line_and_cut_at_a_word() -> None:
    assert snippet("a  b\nc") == "a b c"
    assert snippet("alpha beta gamma", 12) == "alpha beta …"


@pytest.mark.parametrize(("size", "shown"), [((640, 480), (160, 120)), ((32, 32), (128, 128)), ((1000, 1), (160, 1))])
def test_thumbnails_fit_and_tiny_pictures_are_enlarged(size: tuple[int, int], shown: tuple[int, int]) -> None:
    import base64
    import io

    uri = thumbnail(Image.new("L", size))
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == shown


@pytest.mark.slow
def test_a_browser_shows_every_image_and_asks_for_no_resource(page: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome in PATH; install one to look at the report in a browser")
    probe = """<script>addEventListener('load', () => {
        const images = [...document.images];
        document.body.innerHTML = JSON.stringify({
            title: document.title, shown: images.filter(image => image.naturalWidth > 0).length, all: images.length,
            loaded: performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length,
            overflow: document.documentElement.scrollWidth > document.documentElement.clientWidth});
    })</script></body>"""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--window-size=900,1200", "--dump-dom", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    expected = '"title":"Retrieval on toy","shown":4,"all":4,"loaded":0,"overflow":false'
    assert expected in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [r"$\frac{", "<script>", "\x1b[2J"])
def test_names_in_plots_stay_names(name: str) -> None:
    """Names of folders and systems are no mathematics and no markup."""
    drawn = [
        plots.bars({name: {name: 0.5, "x": 0.25}, "other": {name: 0.5, "x": 0.25}}),
        plots.lines({name: ([1, 2], [3, 4]), "other": ([1, 2], [3, 5])}),
        plots.histograms({name: [0.5], "other": [0.25, 0.5]}),
        plots.heat(np.eye(2), [name, "x"], ["a", name]),
    ]
    for figure in drawn:
        svg = plots.as_svg(figure)
        ElementTree.fromstring(svg)
        assert "<script" not in svg
        assert "\x1b" not in svg
    shown = "".join(ElementTree.fromstring(plots.as_svg(drawn[0])).itertext())
    assert name.replace("\x1b", r"\x1b") in shown


def test_control_characters_are_shown_as_text(tmp_path: Path) -> None:
    page = write_report(
        tmp_path / "report.html", "a\x1b[2J", facts={"f\x9b": "v\u202e"}, tables=[Table("c\x07", [{"n\x1b": "v\x00"}])]
    )
    html = page.read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", html)
    assert r"a\x1b[2J" in html


def test_best_and_worst_never_share_a_query() -> None:
    scores = {name: {"m": value} for name, value in zip("abcde", [0.1, 0.9, 0.5, 0.9, 0.0])}
    assert best_and_worst(scores, "m", 2) == (["b", "d"], ["e", "a"])
    assert best_and_worst(scores, "m", 10) == (["b", "d", "c"], ["e", "a"])
    assert best_and_worst({"a": {"m": 1.0}}, "m", 5) == (["a"], [])


def test_a_worst_query_shows_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SHOWN_QUERIES", 2)
    monkeypatch.setattr(report, "SHOWN_RESULTS", 2)
    run = {"good": {"d1": 0.9, "d2": 0.8}, "bad": {"d2": 0.9, "d3": 0.8, "d1": 0.7}, "lost": {"d2": 0.5}}
    qrels = {"good": {"d1": 1}, "bad": {"d1": 2}, "lost": {"d9": 1}}
    result = Result("model", "toy", run, qrels, 4)
    best, worst = retrieval_galleries(result, str.upper, lambda doc: f"text of {doc}")
    assert [entry.query.text for entry in best.entries] == ["GOOD", "BAD"]
    assert [item.relevant for item in best.entries[0].results] == [True, False]
    assert best.entries[0].results[0].note == "1. d1 · 0.900"
    missed = best.entries[1].results[-1]
    assert (missed.text, missed.relevant, missed.note) == ("text of d1", True, "relevant, missed: d1 · rank 3")
    assert worst.entries[0].results[-1].note == "relevant, missed: d9 · not in the first 1"


def test_a_query_that_the_run_lacks_is_shown_without_documents() -> None:
    result = Result("model", "toy", {}, {"q": {"d": 1}}, 1)
    best, _ = retrieval_galleries(result, str, str)
    assert [item.note for item in best.entries[0].results] == ["relevant, missed: d · not in the first 0"]


def test_ranks_show_the_nearest_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SHOWN_RESULTS", 2)
    queries, candidates = np.eye(2), np.array([[1.0, 0.0], [0.5, 0.5], [0.25, 0.0]])
    best, worst = rank_galleries(
        "image to text",
        np.array([1, 3]),
        queries,
        candidates,
        [[0], [2]],
        lambda row: Item(f"query {row}"),
        lambda column: Item(f"candidate {column}"),
    )
    assert best.entries[0].query == Item("query 0", note="right answer at rank 1")
    assert best.entries[0].results == [
        Item("candidate 0", note="1.000", relevant=True),
        Item("candidate 1", note="0.500", relevant=False),
    ]
    assert [item.text for item in worst.entries[0].results] == ["candidate 1", "candidate 0"]


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
