"""Bad inputs driven through the real commands: each ends in one line with exit code 2, and leaves nothing half-written.

What a class refuses of its arguments is tested with the class; these are files and options, as users spoil them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dualenc.cli import main
from tests.commands import toy
from tests.commands.image_models import save_image_model, save_splits

pytestmark = pytest.mark.nightly
SECONDS = 60
PART = re.compile(r"\.part$")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|object at 0x|_io\.")

# `{name}` is a toy: the case's own copy if it spoils it.
RETRIEVAL = "evaluate retrieval {text} {beir} --out out"
ZERO_SHOT = "evaluate zero-shot {clip} {classes} --out out"
TREC = "evaluate compare {a.trec} {a.trec} --qrels {beir}/qrels/test.tsv --out out"
RESUME = "train {recipe.yaml} trainer.output={run} trainer.max_steps=6 trainer.save_every=2 --resume"
COMMANDS = {
    "embed": "embed {text} {docs.jsonl} --out out",
    "index": "index {emb} --out out",
    "mine": "mine {text} {pairs.jsonl} --out out",
    "search": "search {idx} wing",
    "train": "train {recipe.yaml}",
    "image-text": "evaluate image-text {clip} {captioned} --out out",
    "compare": "evaluate compare {retrieval} {retrieval} --out out --samples 100",
}
FILES = {
    "docs.jsonl": COMMANDS["embed"],
    "docs.parquet": "embed {text} {docs.parquet} --out out",
    "pairs.jsonl": COMMANDS["mine"],
    "beir/corpus.jsonl": RETRIEVAL,
    "beir/queries.jsonl": RETRIEVAL,
    "beir/qrels/test.tsv": RETRIEVAL,
    "captioned/test.jsonl": COMMANDS["image-text"],
    "recipe.yaml": COMMANDS["train"],
    "names.txt": ZERO_SHOT + " --class-names {names.txt}",
    "a.trec": TREC,
    "retrieval/per_query.ndjson": COMMANDS["compare"],
    "emb/meta.json": COMMANDS["index"],
    "idx/meta.json": COMMANDS["search"],
}
READERS = {
    "emb": COMMANDS["index"],
    "idx": COMMANDS["search"],
    "run": RESUME,
    "text": COMMANDS["embed"],
    "image": "embed {image} {pictures} --out out",
    "clip": "embed {clip} {pictures} --out out",
}
MISTAKES = (
    "embed {text} {pictures} --out out",
    "embed {image} {docs.jsonl} --out out",
    "embed {nowhere} {docs.jsonl} --out out",
    "embed {text} {docs.jsonl} --out {docs.jsonl}",
    "embed {text} {docs.jsonl} --out {beir}",
    "embed {text} {docs.jsonl} --out=",
    "index {text} --out out",
    "index {docs.jsonl} --out out",
    "index {emb} --out out --queries {docs.jsonl}",
    "index {emb} --out {idx} --append",
    "index {emb} --out out --append",
    "index {idx} --remove {nowhere}",
    "search {emb} wing",
    "search {beir} wing",
    "search nowhere wing",
    "search {idx} ␣",
    "serve {text} --port=0",
    "serve {idx} --port=99999",
    "serve {idx} --port=0 --rerank={text}",
    "train {recipe.yaml} --out x",
    "quickstart --steps=0 --out out",
    "quickstart --steps=x --out out",
)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid example of everything that the commands read."""
    toys = tmp_path_factory.mktemp("toys")
    toy.text_model(toys / "text")
    toy.image_text_model(toys / "clip")
    save_image_model(toys / "image")
    toy.write_beir(toys / "beir", documents=24, queries=6)
    shutil.copy(toys / "beir/qrels/test.tsv", toys / "beir/qrels/train.tsv")
    toy.write_captioned(toys / "captioned")
    save_splits(toys / "classes", train=4, test=2)
    shutil.copytree(toys / "captioned" / "pictures", toys / "pictures")
    rows = [json.loads(line) for line in (toys / "beir" / "corpus.jsonl").read_text().splitlines()]
    documents = "".join(json.dumps({"_id": row["_id"], "text": row["text"]}) + "\n" for row in rows)
    (toys / "docs.jsonl").write_text(documents)
    pairs = "".join(json.dumps({"query": row["title"], "document": row["text"]}) + "\n" for row in rows)
    (toys / "pairs.jsonl").write_text(pairs)
    (toys / "names.txt").write_text("blue\ngreen\nred\n")
    columns = {name: [row[name] for row in rows] for name in ("_id", "text")}
    pq.write_table(pa.table(columns), toys / "docs.parquet")
    recipe = {
        "model": {"class_path": "TextEncoder", "init_args": {"name": str(toys / "text")}},
        "data": {"class_path": "BeirPairs", "init_args": {"path": str(toys / "beir")}},
        "objective": {"class_path": "SogCLR", "init_args": {"temperature": 0.1}},
        "evaluator": {"class_path": "RetrievalEvaluator", "init_args": {"path": str(toys / "beir")}},
        "trainer": {"output": "run", "batch_size": 3, "max_steps": 2, "progress": False},
    }
    (toys / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for line in (
        COMMANDS["embed"].replace("--out out", "--out {emb}"),
        "index {emb} --out {idx}",
        "train {recipe.yaml} trainer.output={run} trainer.max_steps=4 trainer.save_every=2",
        RETRIEVAL.replace("--out out", "--out {retrieval}"),
    ):
        assert main(words(line, toys)) == 0
    shutil.copy(toys / "retrieval" / "run.trec", toys / "a.trec")
    return toys


def words(line: str, toys: Path, own: dict[str, Path] | None = None) -> list[str]:
    """A command line: `{name}` is the case's own copy of a toy if there is one, "␣" a space within a word."""

    def path(match: re.Match[str]) -> str:
        name = match[1]
        return str((own or {}).get(name, toys / name))

    return [re.sub(r"\{([\w.-]+)\}", path, word).replace("␣", " ") for word in line.split()]


class Box:
    """A folder of a case's own, and the commands run in it."""

    def __init__(self, folder: Path, toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.toys = toys
        self.capsys = capsys
        self.own: dict[str, Path] = {}

    def copy(self, name: str) -> Path:
        """The case's own copy of a file; a whole folder is copied with it."""
        top = name.split("/")[0]
        self.own[top] = self.folder / top
        if (self.toys / top).is_dir():
            shutil.copytree(self.toys / top, self.folder / top)
        else:
            shutil.copy(self.toys / top, self.folder / top)
        return self.folder / name

    def run(self, line: str, codes: tuple[int, ...] = (2,)) -> bool:
        """Whether a command works; otherwise it must end in one line with one of the exit codes."""
        code = main(words(line, self.toys, self.own))
        stderr = self.capsys.readouterr().err
        leftovers = [path.name for path in self.folder.rglob("*") if PART.search(path.name)]
        assert not leftovers
        if code == 0:
            return True
        errors = [text for text in re.split(r"[\r\n]+", stderr) if text.startswith("dualenc: ")]
        assert code in codes, stderr
        assert len(errors) == 1, stderr
        assert len(errors[0]) < 1500
        assert not CONTROL.search(errors[0])
        assert "Traceback" not in stderr
        if code == 2 and line.split()[0] in ("embed", "index", "mine"):
            assert not (self.folder / "out").exists()
        return False


@pytest.fixture
def box(
    toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Box]:
    def too_slow(*arguments: Any) -> None:
        raise AssertionError(f"more than {SECONDS} s")

    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    yield Box(tmp_path, toys, capsys)
    signal.alarm(0)


WAYS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(4096)),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "a list": lambda path: path.write_text("[1, 2]"),
    "another object": lambda path: path.write_text('{"a": [1]}'),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FILES)
def test_spoilt_files(box: Box, name: str, way: str) -> None:
    WAYS[way](box.copy(name))
    is_optional = (name, way) == ("docs.jsonl", "another object")
    assert not box.run(FILES[name]) or is_optional


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(box: Box, line: str) -> None:
    for name in ("docs.jsonl", "beir", "idx"):
        if f"--out {{{name}}}" in line:
            box.copy(name)
    assert not box.run(line)


def change_json(value: Any, draw: random.Random) -> Any:
    """The value with another one at a random place."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        changed = value.copy()
        key = draw.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        changed[key] = change_json(value[key], draw)
        return changed
    return draw.choice([None, -1, 0, 1.5, True, "x", "", [], {}, ["x"], {"a": 1}])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("folder", READERS)
def test_json_with_other_values(box: Box, toys: Path, folder: str, seed: int) -> None:
    draw = random.Random(f"{folder} {seed}")
    files = sorted(path for path in (toys / folder).rglob("*.json") if path.stat().st_size < 100_000)
    file = draw.choice(files)
    path = box.copy(folder) / file.relative_to(toys / folder)
    path.write_text(json.dumps(change_json(json.loads(path.read_text()), draw)))
    # Libraries read the files of models, whose errors may be of any kind.
    box.run(READERS[folder], codes=(1, 2) if folder in ("text", "image", "clip") else (2,))
