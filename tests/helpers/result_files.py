"""Judgements and per-query logs, read without the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_qrels(file: Path) -> dict[str, dict[str, int]]:
    """Grades by query and document of a BEIR file, with or without its header."""
    qrels: dict[str, dict[str, int]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        query, document, grade = line.split("\t")
        if grade != "score":
            qrels.setdefault(query, {})[document] = int(grade)
    return qrels


def read_per_query(file: Path) -> dict[str, dict[str, Any]]:
    """The metrics of each query of a log, in the order of its lines."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {
        row.pop("query"): {name: value for name, value in row.items() if name != "dataset"}
        for row in rows
    }
