"""Bad inputs driven through the real commands: each ends in one line with exit code 2, and leaves nothing half-written.

What a class refuses of its arguments is tested with the class; these are files and options, as users spoil them.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from dualenc.cli import main
from tests.commands import toy
from tests.commands.image_models import save_image_model, save_splits

pytestmark = pytest.mark.nightly
SECONDS = 60
PART = re.compile(r"\.part$")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|object at 0x|_io\.")

# `{name}` is a toy: the case's own copy if it spoils it.
RETRIEVAL = "evaluate retrieval {text} {beir} --out out"
PROBE = "evaluate probe {image} {classes} --out out"
ZERO_SHOT = "evaluate zero-shot {clip} {classes} --out out"
CORRUPTED = "evaluate corrupted {image} {classes} --out out --corruptions contrast,brightness"
TREC = "evaluate compare {a.trec} {a.trec} --qrels {beir}/qrels/test.tsv --out out"
RESUME = "train {recipe.yaml} trainer.output={run} trainer.max_steps=6 trainer.save_every=2 --resume"
COMMANDS = {
    "embed": "embed {text} {docs.jsonl} --out out",
    "embed-images": "embed {image} {pictures} --out out",
    "index": "index {emb} --out out",
    "mine": "mine {text} {pairs.jsonl} --out out",
    "search": "search {idx} wing",
    "train": "train {recipe.yaml}",
    "retrieval": RETRIEVAL,
    "image-text": "evaluate image-text {clip} {captioned} --out out",
    "zero-shot": ZERO_SHOT,
    "probe": PROBE,
    "corrupted": CORRUPTED,
    "compare": "evaluate compare {retrieval} {retrieval} --out out --samples 100",
}
FILES = {
    "docs.jsonl": COMMANDS["embed"],
    "docs.csv": "embed {text} {docs.csv} --out out",
    "docs.jsonl.gz": "embed {text} {docs.jsonl.gz} --out out",
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
OUR_FOLDERS = {"emb": COMMANDS["index"], "idx": COMMANDS["search"]}
MODELS = {
    "text": COMMANDS["embed"],
    "image": COMMANDS["embed-images"],
    "clip": "embed {clip} {pictures} --out out",
}
MISTAKES = (
    "embed {text} {pictures} --out out",
    "embed {image} {docs.jsonl} --out out",
    "embed {nowhere} {docs.jsonl} --out out",
    "embed /dev/zero {docs.jsonl} --out out",
    "embed org/missing {docs.jsonl} --out out",
    "embed {text} {docs.jsonl}",
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
    "evaluate retrieval {image} {beir} --out out",
    "evaluate probe {text} {classes} --out out",
    "evaluate zero-shot {text} {classes} --out out",
    "evaluate nothing",
    "train {recipe.yaml} --out x",
    "train {recipe.yaml} trainer.epocs=3",
    "train {recipe.yaml} objective.class_path=os.system",
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
    (toys / "docs.jsonl.gz").write_bytes(gzip.compress(documents.encode()))
    (toys / "docs.csv").write_text("_id,text\n" + "".join(f"{row['_id']},{row['text']}\n" for row in rows))
    pairs = "".join(json.dumps({"query": row["title"], "document": row["text"]}) + "\n" for row in rows)
    (toys / "pairs.jsonl").write_text(pairs)
    (toys / "names.txt").write_text("blue\ngreen\nred\n")
    save_parquet(toys / "docs.parquet", rows)
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


def save_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"_id": [row["_id"] for row in rows], "text": [row["text"] for row in rows]}), path)


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


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        remove(path)
        make(path)

    return spoil


WAYS: dict[str, Callable[[Path], object]] = {
    "missing": remove,
    "a folder": replaced_by(Path.mkdir),
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(4096)),
    "Latin-1": lambda path: path.write_bytes("é café ÿ\n".encode("latin-1") * 5),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "a list": lambda path: path.write_text("[1, 2]"),
    "a number": lambda path: path.write_text("3"),
    "another object": lambda path: path.write_text('{"a": [1]}'),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_valid_inputs_work(box: Box, command: str) -> None:
    assert box.run(COMMANDS[command])


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


@pytest.mark.parametrize("folder", OUR_FOLDERS)
def test_damage_to_our_folders_is_noticed(box: Box, toys: Path, folder: str) -> None:
    for file in sorted(path.relative_to(toys) for path in (toys / folder).rglob("*") if path.is_file()):
        for way in ("missing", "noise", "cut", "flipped"):
            if way == "missing" and "snippets" in file.name:
                continue  # optional
            path = box.copy(folder) / file.relative_to(folder)
            if way == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif way == "flipped" and file.name != "meta.json":
                content = bytearray(path.read_bytes())
                content[random.Random(str(file)).randrange(len(content))] ^= 255
                path.write_bytes(content)
            elif way in WAYS:
                WAYS[way](path)
            works = box.run(OUR_FOLDERS[folder])
            assert works == (way == "flipped" and file.name == "meta.json"), (file, way)
            for left in box.folder.iterdir():
                remove(left)


def change_json(value: Any, draw: random.Random) -> Any:
    """The value with another one at a random place."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        changed = value.copy()
        key = draw.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        changed[key] = change_json(value[key], draw)
        return changed
    return draw.choice([None, -1, 0, 1.5, True, "x", "", [], {}, ["x"], {"a": 1}])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("folder", ["emb", "idx", "text", "image", "clip", "run"])
def test_json_with_other_values(box: Box, toys: Path, folder: str, seed: int) -> None:
    draw = random.Random(f"{folder} {seed}")
    files = sorted(path for path in (toys / folder).rglob("*.json") if path.stat().st_size < 100_000)
    file = draw.choice(files)
    path = box.copy(folder) / file.relative_to(toys / folder)
    path.write_text(json.dumps(change_json(json.loads(path.read_text()), draw)))
    # Libraries read the files of models, whose errors may be of any kind.
    box.run({**OUR_FOLDERS, **MODELS, "run": RESUME}[folder], codes=(1, 2) if folder in MODELS else (2,))


@pytest.mark.parametrize("model", MODELS)
def test_spoilt_weights(box: Box, toys: Path, model: str) -> None:
    def lose_tensor(path: Path) -> None:
        tensors = load_file(path)
        del tensors[max(tensors, key=lambda name: tensors[name].numel())]
        save_file(tensors, path, {"format": "pt"})

    def flatten(path: Path) -> None:
        save_file({name: tensor.reshape(-1) for name, tensor in load_file(path).items()}, path, {"format": "pt"})

    weights = next(path for path in (toys / model).rglob("*.safetensors"))
    for spoil in (WAYS["missing"], WAYS["empty"], WAYS["noise"], lose_tensor, flatten):
        spoil(box.copy(model) / weights.relative_to(toys / model))
        assert not box.run(MODELS[model])
        remove(box.folder / model)
