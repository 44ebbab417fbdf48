"""The cells of tables in docs/results.md are what the stores of `small_batch.py` give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.eval_scripts import load_script

comparison = load_script("comparison.py")
PAGE = Path(__file__).parents[2] / "docs" / "results.md"
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
"""Number of cells of each section that are compared."""
NOT_KEPT = {
    ("GlobalCache: pool vs. control variate", None, "by memory"),
    ("Published encoders and images", "GlobalCache, 32", "Flickr8k"),
}
"""Section, row and column of cells whose runs are not in a store: of estimators that have gone."""


def rows_of_page() -> dict[str, list[list[str]]]:
    """Return the rows of each section's last table, as the cells that a store has."""
    text = PAGE.read_text(encoding="utf-8")
    sections = {}
    for part in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        for block in re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE):
            header, _, *lines = (line.split("|")[1:-1] for line in block.splitlines())
            names = [name.strip() for name in header]
            sections[heading] = [
                [
                    cell
                    for name, cell in zip(names, line, strict=True)
                    if not {(heading, None, name), (heading, line[0].strip(), name)} & NOT_KEPT
                ]
                for line in lines
            ]
    return sections


@pytest.fixture(scope="module")
def rows_of_stores() -> dict[str, list[list[str]]]:
    """Return the rows of each section, as the stores give them."""
    rows: dict[str, list[list[str]]] = {}
    for path in (comparison.VECTORS, comparison.ENCODERS, comparison.FINE_TUNING):
        for table in comparison.page_tables(comparison.Store(path)):
            own = [list(map(str, row.values())) for row in table.rows]
            rows.setdefault(table.caption, []).extend(own)
    return rows


@pytest.mark.parametrize("section", CELLS)
def test_a_table_of_the_page_is_that_of_the_stores(
    section: str, rows_of_stores: dict[str, list[list[str]]]
) -> None:
    pattern = POINTS if section == "Fine-tuning" else SPREAD

    def cells(row: list[str]) -> list[str]:
        return pattern.findall("|".join(row[1:]))

    page, stores = rows_of_page()[section], rows_of_stores[section]
    assert [cells(row) for row in page] == [cells(row) for row in stores]
    assert sum(len(cells(row)) for row in page) == CELLS[section]
