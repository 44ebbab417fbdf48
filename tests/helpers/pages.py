"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def code(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order, without the indentation of tabs."""
    blocks = re.findall(
        rf"^([ ]*)```{language}\n(.*?)^\1```", page.read_text("utf-8"), flags=re.M | re.S
    )
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in blocks]
