"""Put the pages of eval/results into the site: links between them and docs/ then work there as in
the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs with the files of docs/: add `eval/results/*.md` under their own paths."""
    root = Path(config.config_file_path).parent
    for page in sorted((root / "eval" / "results").glob("*.md")):
        files.append(
            File.generated(config, page.relative_to(root).as_posix(), abs_src_path=str(page))
        )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page: in the site docs/ is the root, and eval/ lies in it."""
    return markdown.replace("](../eval/", "](eval/").replace("](../../docs/", "](../../")
