"""The cells of tables in docs/results.md are what the stores give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.eval_scripts import load_script

comparison = load_script("comparison.py")
PAGE = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
SPREAD = re.compile(r"\d\.\d+ ± \d\.\d+")
POINTS = re.compile(r"−?\d\.\d(?!\d)")
CELLS = {
    "Small batches at equal pairs seen": 48,
    "GlobalCache: pool vs. control variate": 5,
    "A transformer from scratch": 20,
    "Published encoders and images": 44,
    "Compared with momentum queues, hard negatives and larger batches": 26,
    "Fine-tuning": 68,
}
"""Compared cells of each section."""
ADAPTED = [("medquad", "all"), ("medquad", "new"), ("papers", "new")]
ADAPTED += [("scifact", group) for group in ("all", "seen", "new")]
MAPS = ("ridge", "rescaled")
"""Maps of queries in the table of migrations without the old model."""
NOT_KEPT = {
    ("GlobalCache: pool vs. control variate", None, "by memory"),
    ("Published encoders and images", "GlobalCache, 32", "Flickr8k"),
}
"""Section, row and column of cells whose runs are not in a store: of estimators that have gone."""


def rows_of_page(heading: str) -> list[list[str]]:
    """Return the rows of a section's last table, without the cells that no store has."""
    section = PAGE.partition(f"## {heading}\n")[2]
    body = re.split(r"^#{2,3} ", section, flags=re.MULTILINE)[0]
    table = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)[-1]
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    )

    def is_kept(row: list[str], name: str) -> bool:
        return not {(heading, None, name), (heading, row[0], name)} & NOT_KEPT

    return [[cell for name, cell in zip(header, row) if is_kept(row, name)] for row in rows]


@pytest.fixture(scope="module")
def rows_of_stores() -> dict[str, list[list[str]]]:
    """Return the rows of each section, as the stores give them."""
    rows: dict[str, list[list[str]]] = {}
    for path in (comparison.VECTORS, comparison.ENCODERS, comparison.FINE_TUNING):
        for table in comparison.page_tables(comparison.Store(path)):
            rows.setdefault(table.caption, []).extend(table.cells())
    return rows


@pytest.mark.parametrize(("section", "count"), CELLS.items())
def test_a_table_of_the_page_is_that_of_the_stores(
    section: str, count: int, rows_of_stores: dict[str, list[list[str]]]
) -> None:
    pattern = POINTS if section == "Fine-tuning" else SPREAD

    def cells(rows: list[list[str]]) -> list[list[str]]:
        return [pattern.findall("|".join(row[1:])) for row in rows]

    page = cells(rows_of_page(section))
    assert page == cells(rows_of_stores[section])
    assert sum(map(len, page)) == count


@pytest.mark.parametrize(
    ("name", "section"), [("fine_tuning", "Fine-tuning"), ("static", "Static encoders")]
)
def test_a_table_of_equal_seconds_is_that_of_its_store(name: str, section: str) -> None:
    script = load_script(f"{name}.py")
    side_by_side = load_script("fine_tuning.py").side_by_side
    shown = side_by_side(script.Store(script.STORE), script.SHOWN, script.COLUMNS)
    table = PAGE.split(f"\n## {section}\n")[1].split("\n\n")[1]
    columns = list(zip(*(line.split("|")[2:-1] for line in table.splitlines()), strict=True))
    # Quality and steps by turns; the last column holds what two columns show.
    of_docs = dict(zip(("papers", "medquad", "scifact", "8e-5"), columns[::2], strict=False))
    for title, cells in of_docs.items():
        own = {row[name] for row in shown for name in script.COLUMNS if name.endswith(title)}
        assert set(SPREAD.findall(" ".join(cells))) <= own


def test_the_table_of_adapted_queries_is_that_of_its_store() -> None:
    script = load_script("adapting.py")
    derived = set()
    for runs in script.frame.by_seed(script.Store(script.STORE).runs):
        for group in {"all", "seen", "new"} & runs[0].outcome.keys():
            values = [each.outcome[group] for each in runs]
            if len(values) > 1:
                task = runs[0].settings["task"]
                derived.add((task, group, script.frame.spread(values)))
    section = PAGE.split("## Adapting queries to an index")[1].split("\n##")[0]
    rows = [line.strip("|").split("|")[1:] for line in section.splitlines() if "±" in line]
    cells = [(*at, cell.strip()) for row in rows for at, cell in zip(ADAPTED, row) if "±" in cell]
    assert len(cells) == 33
    assert set(cells) <= derived


def test_the_tables_of_migrations_are_those_of_their_store() -> None:
    script = load_script("migrating.py")
    names = {"minilm": "MiniLM", "e5": "e5", "l3": "L3", "scifact": "SciFact"}
    outcomes: dict[tuple[object, ...], list[dict[str, float]]] = {}
    for run in script.Store(script.STORE).runs:
        own = run.settings
        # Maps of documents are shown from the most pairs.
        if "sample" in own or (own["way"] == "ridge" and own["pairs"] not in (1000, 4000)):
            continue
        pairs = own.get("pairs") if own["way"] == "ridge" else None
        way = (own["way"], own.get("map"), own.get("candidates"), pairs)
        ends = (names.get(own["data"], own["data"].capitalize()), names[own["old"]])
        outcomes.setdefault((*ends, names[own["new"]], *way), []).append(run.outcome)

    def cell(*key: object) -> str:
        found = outcomes[tuple(key)]
        return f"{sum(each['ndcg@10'] for each in found) / len(found):.3f}"

    pages = (("Changing the model of an index", 0), ("Without the old model", 1))
    for heading, kind in pages:
        section = PAGE.split(f"# {heading}\n")[1].split("\n#")[0]
        rows = [line.strip("|").split("|") for line in section.splitlines() if " → " in line]
        rows = [[each.strip(" *") for each in row] for row in rows[1:]]
        assert len(rows) == (18, 12)[kind]
        for data, change, *cells in rows:
            at = (data.replace("medquad", "Medquad"), *change.split(" → "))
            new = cell(*at, "new model", None, None, None)
            if kind == 0:
                pairs = 1000 if data == "Cranfield" else 4000
                wanted = [cell(*at, "old model", None, None, None), new]
                wanted += [cell(*at, "candidates", None, 200, None)]
                shown = [*cells[:2], cells[2].split("*")[0]]
                assert cells[4] == cell(*at, "ridge", None, None, pairs)
            else:
                wanted = [new, *(cell(*at, "mapped queries", own, None, None) for own in MAPS)]
                of_mapped = "candidates of mapped queries"
                wanted += [cell(*at, of_mapped, MAPS[1], depth, None) for depth in (200, 1000)]
                shown = [*cells[:3], cells[3].split("*")[0], cells[4]]
            assert shown == wanted, (data, change)
