"""What the documents say about files, links and code is so."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.eval_scripts import OLD_BLOCK
from tests.helpers.pages import ROOT, code

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "eval" / "results").glob("*.md")),
]
RESULTS = [ROOT / "docs" / "results.md", *sorted((ROOT / "eval" / "results").glob("*.md"))]
FOLDERS = ("docs", "dualenc", "eval", "examples", "recipes", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")


def anchors(page: Path) -> set[str]:
    """The names by which headings can be linked to, as GitHub and mkdocs both make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {
        re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Paths in text, code and commands; NAME in capitals stands for any."""
    text = OLD_BLOCK.sub("", page.read_text("utf-8"))
    names = {name for name in NAMED_FILE.findall(text) if "NAME" not in name}
    assert not {name for name in names if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_python(page: Path) -> None:
    for block in code(page, "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_tables_of_results_name_their_command(page: Path) -> None:
    """Either in their section, as text or as a link, or for the whole page in its introduction."""
    named = r"python\s+eval/|dualenc\s+[a-z]+ |\[command\]|a\s+program\s+that\s+is\s+not\s+kept"
    command = re.compile(named)
    introduction, *sections = re.split(r"^(?=#{2,} )", page.read_text("utf-8"), flags=re.M)
    for section in [introduction, *sections]:
        if "\n|" in section and not command.search(introduction):
            assert command.search(section), section.splitlines()[0]


def test_files_of_the_architecture_exist() -> None:
    tree = next(
        block for block in code(ROOT / "docs" / "design.md", "text") if block.startswith("dualenc/")
    )
    folders: list[Path] = [ROOT]
    missing = []
    for line in tree.splitlines():
        name = re.match(r"( *)(\w+)/", line)
        if name:
            depth = len(name[1]) // 2
            folders = [*folders[: depth + 1], folders[depth] / name[2]]
            missing += [] if folders[-1].is_dir() else [folders[-1]]
        inside = folders if name else folders[: (len(line) - len(line.lstrip())) // 2 + 1]
        files = re.findall(r"\b\w+\.py\b", line)
        missing += [inside[-1] / file for file in files if not (inside[-1] / file).is_file()]
    assert not missing


def test_objective_of_the_contributing_guide_is_its_softmax() -> None:
    """Over the batch and the hardest negative that the anchor has met."""
    definition, imports = code(ROOT / "CONTRIBUTING.md", "python")[:2]
    names: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + imports + definition, names)
    generator = torch.Generator().manual_seed(0)
    tables = torch.nn.functional.normalize(
        torch.randn(2, 9, 5, generator=generator, dtype=torch.float64), dim=2
    )
    left, right = tables[0].requires_grad_(), tables[1].requires_grad_()
    criterion = names["HardestMet"](num_left=9, temperature=0.2)

    def loss(ids: list[int]) -> torch.Tensor:
        rows = torch.tensor(ids)
        return criterion(
            left[rows], right[rows], rows, encode=lambda s, i: (left if s == "left" else right)[i]
        ).loss

    met: dict[tuple[str, int], int] = {}
    for ids in ([0, 1, 2, 3], [4, 5, 6], [0, 4, 7], [8, 0, 5]):
        expected = []
        for side, own, others in (("left", left, right), ("right", right, left)):
            for i in ids:
                negatives = {j for j in [*ids, met.get((side, i), i)] if j != i}
                scores = {j: own[i] @ others[j] / 0.2 for j in negatives}
                expected.append(
                    torch.stack(list(scores.values())).logsumexp(0) - own[i] @ others[i] / 0.2
                )
                met[side, i] = max(scores, key=lambda j: float(scores[j].detach()))
        found, slow = loss(ids), torch.stack(expected).mean()
        torch.testing.assert_close(found, slow, rtol=1e-6, atol=1e-7)
        gradients = [
            torch.cat(torch.autograd.grad(value, [left, right])) for value in (found, slow)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_experiment_of_the_contributing_guide_passes_its_check(tmp_path: Path) -> None:
    script = tmp_path / "batches.py"
    script.write_text(code(ROOT / "CONTRIBUTING.md", "python")[2], "utf-8")
    path = os.pathsep.join([str(ROOT / "eval"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), "--check"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["B = 8", "B = 32"]


def test_llms_txt_lists_every_page_of_the_site() -> None:
    listed = LINK.findall((ROOT / "docs" / "llms.txt").read_text("utf-8"))
    pages = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), flags=re.M)
    assert sorted(listed) == sorted(set(pages) - {"index.md"})


@pytest.mark.slow
def test_entry_points_have_the_signatures_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import entry_points

    assert entry_points.PAGE.read_text("utf-8") == entry_points.page(), (
        "run python docs/entry_points.py"
    )
    stub = entry_points.stub(Changed, "open")
    signature = "def open(cls, folder: str, *, verify: bool = True, **more: int) -> Changed: ..."
    assert stub == f"    @classmethod\n    {signature}"


class Changed:
    @classmethod
    def open(cls, folder: str, *, verify: bool = True, **more: int) -> Changed:
        return cls()


def test_redirects_lead_to_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import hooks

    for directories, file, link in (
        (True, "growing/index.html", "../scaling-up/"),
        (False, "growing.html", "scaling-up.html"),
    ):
        site = tmp_path / str(directories)
        hooks.on_post_build({"site_dir": str(site), "use_directory_urls": directories})
        written = (site / file).read_text("utf-8")
        assert f'<link rel="canonical" href="{link}">' in written
        assert f'content="0; url={link}"' in written
    for old, new in hooks.REDIRECTS.items():
        assert (ROOT / "docs" / f"{new}.md").is_file(), new
        assert not (ROOT / "docs" / f"{old}.md").exists(), old


def test_options_stay_on_one_line_and_long_cells_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import hooks

    unbroken = '<code>push emb <span class="unbroken">--top-k</span> 3 a_b</code>'
    assert (
        hooks.on_page_content("<p><code>push emb --top-k 3 a_b</code></p>") == f"<p>{unbroken}</p>"
    )
    long_name = "a-" * 20
    for unchanged in ("<pre><code>push --top-k 3</code></pre>", f"<code>{long_name}</code>"):
        assert hooks.on_page_content(unchanged) == unchanged
    row = f"<td>1 ± 2</td><td><a href='{'x' * 99}'>short</a></td><td>{'word ' * 20}</td>"
    expected = row.replace("± ", "±&nbsp;").replace("<td>word", '<td class="long">word')
    assert hooks.on_page_content(row) == expected


@pytest.mark.nightly
def test_site_builds_without_warning_and_asks_nobody(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason='the site needs pip install ".[docs]"')
    for name in ("mkdocs.yml", "docs", "dualenc", "eval"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fetched = re.compile(
        r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+stylesheet[^>]+//"""
    )
    assert not [
        page
        for page in (tmp_path / "site").rglob("*.html")
        if fetched.search(page.read_text("utf-8"))
    ]
    # All commands with their arguments, from the program itself.
    commands = (tmp_path / "site" / "commands" / "index.html").read_text("utf-8")
    shown = " ".join(html.unescape(re.sub(r"<[^>]+>", "", commands)).split())
    for part in ("dualenc evaluate zero-shot", "dualenc embed --out STR", "--batch-size INT"):
        assert part in shown
    assert "items per forward pass. [default: 32]" in shown
    assert not list((tmp_path / "site").glob("*.py"))
    # What llms.txt links to is published as Markdown, with the commands filled in.
    for link in LINK.findall((tmp_path / "site" / "llms.txt").read_text("utf-8")):
        assert (tmp_path / "site" / link).is_file(), link
    assert "## dualenc evaluate zero-shot" in (tmp_path / "site" / "commands.md").read_text("utf-8")
