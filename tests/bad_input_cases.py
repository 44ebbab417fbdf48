"""What `tests/bad_inputs.py` drives through the commands: sound toys, and the table of what may be wrong with them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.bad_inputs import Box, Case, Change, Expected

# --- Toys: a sound example of everything that a command reads. -------------------------------------------------------

TRAINER = "trainer.output=run trainer.max_steps=2"


def make_toys(toys: Path) -> None:
    """Models, data in every format, embeddings, indexes, runs and evaluations, in seconds."""
    from dualenc.cli import main
    from tests.commands import toy
    from tests.commands.image_models import save_cifar_c, save_image_model, save_splits
    from tests.data.make import write_csv, write_jsonl

    toys.mkdir()
    os.chdir(toys)
    toy.text_model(toys / "text")
    toy.image_text_model(toys / "clip")
    toy.cross_encoder(toys / "judge")
    save_image_model(toys / "image")
    beir = toy.write_beir(toys / "beir", documents=24, queries=6)
    shutil.copy(beir / "qrels" / "test.tsv", beir / "qrels" / "train.tsv")
    toy.write_captioned(toys / "captioned")
    save_splits(toys / "classes", train=4, test=2)
    save_cifar_c(toys / "cifarc")
    shutil.copytree(toys / "captioned" / "pictures", toys / "pictures")
    rows = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    write_jsonl(toys / "docs.jsonl", [{"_id": row["_id"], "text": row["text"]} for row in rows])
    write_csv(toys / "docs.csv", ["_id", "text"], [[row["_id"], row["text"]] for row in rows])
    write_csv(toys / "docs.tsv", ["_id", "text"], [[row["_id"], row["text"]] for row in rows], "\t")
    (toys / "docs.txt").write_text("".join(row["text"] + "\n" for row in rows))
    (toys / "docs.jsonl.gz").write_bytes(gzip.compress((toys / "docs.jsonl").read_bytes()))
    write_jsonl(toys / "pairs.jsonl", [{"query": row["title"], "document": row["text"]} for row in rows])
    write_csv(toys / "pairs.csv", ["query", "document"], [[row["title"], row["text"]] for row in rows])
    mined = [{"query": row["title"], "pos": [row["text"]], "neg": [rows[i - 1]["text"]]} for i, row in enumerate(rows)]
    write_jsonl(toys / "mined.jsonl", mined)
    _parquet(toys / "docs.parquet", {"_id": [row["_id"] for row in rows], "text": [row["text"] for row in rows]})
    files = sorted((toys / "pictures").iterdir())
    contents = [file.read_bytes() for file in files]
    _parquet(toys / "images.parquet", {"image": contents, "label": [0, 1, 2] * 2, "caption": ["a", "b", "c"] * 2})
    with tarfile.open(toys / "pairs.tar", "w") as tar:
        for number, file in enumerate(files):
            tar.add(file, f"{number:03d}.png")
            (toys / "caption").write_text(f"picture {number}")
            tar.add(toys / "caption", f"{number:03d}.txt")
    (toys / "caption").unlink()
    (toys / "templates.txt").write_text("a photo of a {}.\na plain {}.\n")
    (toys / "names.txt").write_text("blue\ngreen\nred\n")
    save_vectors(toys)
    for name, recipe in recipes(toys).items():
        (toys / name).write_text(yaml.safe_dump(recipe, sort_keys=False))
    corrupted = "evaluate corrupted image classes --corruptions contrast,brightness"
    for line in (
        "embed text docs.jsonl --out emb",
        "index emb --out idx",
        "index emb --out ivf --factory IVF2,Flat --nprobe 1",
        "embed image pictures --out image-emb",
        "index image-emb --out image-idx",
        "train recipe.yaml trainer.output=run trainer.max_steps=4 trainer.save_every=2",
        "train image-recipe.yaml trainer.output=image-run trainer.max_steps=4 trainer.save_every=2",
        "evaluate retrieval text beir --out retrieval",
        f"{corrupted} --out corrupted --train classes --severities 1",
        "evaluate probe image classes --out probe",
        "evaluate zero-shot clip classes --out zero-shot",
        "evaluate image-text clip captioned --out image-text",
        "evaluate convergence image-run classes --out convergence --pairs 6",
        OBJECTIVES.replace("{", "").replace("}", "").replace("--out out", "--out objectives"),
    ):
        if main(line.split()) != 0:
            raise RuntimeError(f"dualenc {line}: the toys must be sound")
    # By another process: the cases are forks of this one, which the threads of an engine would not survive.
    push = ["push", "emb", "lance", "--to", "lancedb", "--out", "engine"]
    subprocess.run([sys.executable, "-m", "dualenc", *push], check=True, capture_output=True)
    # A baseline that makes errors: those of the other are divided by them.
    baseline = json.loads(Path("corrupted/metrics.json").read_text())
    baseline["robustness"]["errors"] = {name: {"1": 0.5} for name in ("contrast", "brightness")}
    Path("corrupted/metrics.json").write_text(json.dumps(baseline))
    shutil.copy("retrieval/run.trec", "a.trec")
    shutil.copy("retrieval/per_query.ndjson", "a.ndjson")
    shutil.copy("beir/qrels/test.tsv", "qrels.tsv")


def save_vectors(toys: Path) -> None:
    """Pairs of vectors with mined negatives: in columns, and in folders that mined ids name."""
    from dualenc.encoders import VectorEncoder
    from tests.data.make import write_jsonl

    rows = [[row / 7, 1.0, row % 3] for row in range(12)]
    VectorEncoder(3).save(toys / "adapter")
    write_jsonl(
        toys / "vectors.jsonl", [{"q": row, "d": [row[::-1]], "n": [rows[i - 1]]} for i, row in enumerate(rows)]
    )
    _parquet(toys / "named.parquet", {"_id": [f"v{i}" for i in range(12)], "vector": rows})
    mined = [{"query": f"v{i}", "pos": [f"v{i - 1}"], "neg": [f"v{i - 2}"]} for i in range(2, 12)]
    write_jsonl(toys / "mined-ids.jsonl", mined)


def warm_up(toys: Path) -> None:
    """Fill the tables, caches and compiled expressions that every process fills once, without starting a thread."""
    from dualenc.cli import main
    from dualenc.encoders import load_model
    from dualenc.evaluation.plots import as_svg, histograms

    for name in ("text", "clip", "image"):
        load_model(str(toys / name))
    with contextlib.redirect_stdout(io.StringIO()):
        main(["embed", "--help"])
    as_svg(histograms({"a": [0.0, 1.0]}))


def recipes(toys: Path) -> dict[str, dict[str, Any]]:
    """A recipe for each kind of model."""
    trainer = {"batch_size": 3, "max_steps": 2, "learning_rate": 1e-3, "progress": False, "log_every": 1}
    classes = {"class_path": "dualenc.data.ImageFolderViews", "init_args": {"path": str(toys / "classes" / "train")}}
    return {
        "recipe.yaml": {
            "model": {"class_path": "TextEncoder", "init_args": {"name": str(toys / "text")}},
            "data": {"class_path": "BeirPairs", "init_args": {"path": str(toys / "beir")}},
            "objective": {"class_path": "SogCLR", "init_args": {"temperature": 0.1}},
            "evaluator": {"class_path": "RetrievalEvaluator", "init_args": {"path": str(toys / "beir")}},
            "trainer": {"output": "run", **trainer},
        },
        "image-recipe.yaml": {
            "model": {
                "class_path": "ImageEncoder",
                "init_args": {
                    "backbone": "test_resnet",
                    "image_size": 32,
                    "projector_dim": 16,
                    "augment": {"class_path": "dualenc.data.views.SimCLR", "init_args": {"size": 32}},
                },
            },
            "data": classes,
            "objective": {"class_path": "InfoNCE", "init_args": {"temperature": 0.2}},
            "evaluator": {"class_path": "KNNEvaluator", "init_args": {"train": classes, "test": classes, "k": 2}},
            "trainer": {"output": "run", **trainer},
        },
        "vectors-recipe.yaml": {
            "model": {"class_path": "VectorEncoder", "init_args": {}},
            "data": {
                "class_path": "TablePairs",
                "init_args": {
                    "path": str(toys / "vectors.jsonl"),
                    "left_column": "q",
                    "right_column": "d",
                    "negative_column": "n",
                },
            },
            "objective": {"class_path": "DCL", "init_args": {"temperature": 0.1}},
            "trainer": {"output": "run", **trainer},
        },
        "clip-recipe.yaml": {
            "model": {"class_path": "ImageTextEncoder", "init_args": {"name": str(toys / "clip")}},
            "data": {
                "class_path": "TablePairs",
                "init_args": {
                    "path": str(toys / "captioned" / "test.jsonl"),
                    "left_column": "image",
                    "right_column": "captions",
                },
            },
            "objective": {"class_path": "InfoNCE", "init_args": {"temperature": 0.1}},
            "trainer": {"output": "run", **trainer},
        },
    }


def _parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table(columns), path)


# --- What may be wrong with a file. ----------------------------------------------------------------------------------

Spoil = Callable[[Path], object]


def remove(path: Path) -> None:
    (shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)(path)


def link_to(device: str) -> Spoil:
    def spoil(path: Path) -> None:
        remove(path)
        path.symlink_to(device)

    return spoil


def as_folder(path: Path) -> None:
    remove(path)
    path.mkdir()


def as_fifo(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def holding(content: bytes | str) -> Spoil:
    def spoil(path: Path) -> None:
        if path.is_dir():
            remove(path)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def huge(path: Path) -> None:
    """One line that takes no room on the disk; for one reader, and so for all, more than fits into memory."""
    os.truncate(path, 3 << 30 if path.name == "docs.txt" else 200 << 20)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(seed: int, count: int = 1) -> Spoil:
    """Some bits of some bytes turned over."""

    def spoil(path: Path) -> None:
        content, draw = bytearray(path.read_bytes()), random.Random(f"{seed} {path.name}")
        for _ in range(count):
            content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        path.write_bytes(content)

    return spoil


def saying(**values: Any) -> Spoil:
    """Other values in a JSON file."""

    def spoil(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


def cut(seed: int) -> Spoil:
    def spoil(path: Path) -> None:
        os.truncate(path, random.Random(f"{seed} {path.name}").randrange(path.stat().st_size))

    return spoil


NOISE = random.Random(0).randbytes(4096)
NOT_A_FILE: dict[str, Spoil] = {
    "missing": remove,
    "a folder": as_folder,
    "a pipe": as_fifo,
    "an endless device": link_to("/dev/zero"),
}
NOT_TEXT: dict[str, Spoil] = {
    "empty": holding(b""),
    "noise": holding(NOISE),
    "Latin-1": holding("é café ÿ\n".encode("latin-1") * 5),
}
NOT_JSON: dict[str, Spoil] = {
    "deep": holding(b"[" * 200_000),
    "a list": holding("[1, 2]"),
    "null": holding("null"),
    "a number": holding("3"),
    "another object": holding('{"a": [1]}'),
}


def spoil(name: str, how: Spoil) -> Change:
    return lambda box: how(box[name])


def may(be_read: bool) -> Expected:
    """How a case ends whose input may be sound, or is not."""
    return "either" if be_read else "error"


def files_of(folder: Path) -> list[str]:
    """Every file of a toy, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# --- The table. -----------------------------------------------------------------------------------------------------


def all_cases(toys: Path) -> list[Case]:
    """Every case, under a name of its own."""
    groups = [
        sound(),
        files(),
        cut_files(toys),
        model_files(toys),
        options(),
        modalities(),
        outputs(),
        data(),
        vectors(),
        trees(toys),
    ]
    later = (recipe_keys(toys), mixtures(toys), filters(toys), serving(toys), evaluations(toys))
    return [case for group in (*groups, *later) for case in group]


RETRIEVAL = "evaluate retrieval {text} {beir} --out out"
ENGINE = f"{RETRIEVAL} --engine {{engine}}"
IMAGE_TEXT = "evaluate image-text {clip} {captioned} --out out"
ZERO_SHOT = "evaluate zero-shot {clip} {classes} --out out"
PROBE = "evaluate probe {image} {classes} --out out"
CORRUPTED = "evaluate corrupted {image} {classes} --out out --corruptions contrast,brightness"
CONVERGENCE = "evaluate convergence {image-run} {classes} --out out --pairs 4"
OBJECTIVES = (
    "evaluate objectives {text} {pairs.jsonl} --out out --pairs 4 --batch-size 2 --warm-up 0 --max-epochs 1"
    " --objectives InfoNCE"
)
COMPARE = "evaluate compare {retrieval} {retrieval} --out out --samples 100"
TREC = "evaluate compare {a.trec} {a.trec} --qrels {qrels.tsv}"
COMMANDS = {
    "embed": "embed {text} {docs.jsonl} --out out",
    "index": "index {emb} --out out",
    "mine": "mine {text} {pairs.jsonl} --out out --embeddings kept",
    "push": "push {emb} db --to lancedb --out out",
    "search": "search {idx} wing",
    "train": "train {recipe.yaml}",
    "retrieval": RETRIEVAL,
    "image-text": IMAGE_TEXT,
    "zero-shot": ZERO_SHOT,
    "probe": PROBE,
    "corrupted": CORRUPTED,
    "convergence": CONVERGENCE,
    "objectives": OBJECTIVES,
    "compare": COMPARE,
}
FORMATS = ("docs.jsonl", "docs.csv", "docs.tsv", "docs.txt", "docs.jsonl.gz", "docs.parquet")


def sound() -> Iterator[Case]:
    """Unspoilt, every command of the table works: its refusals are of what is spoilt."""
    for name, words in COMMANDS.items():
        yield Case(f"sound: {name}", words, expected="works")
    for file in FORMATS:
        yield Case(f"sound: embed {file}", f"embed {{text}} {{{file}}} --out out", expected="works")
    for words in (
        "embed {image} {pictures} --out out",
        "embed {clip} {pairs.tar} --out out",
        "embed {image} {images.parquet} --out out",
        "index {text} {docs.jsonl} --out out",
        "search {ivf} wing",
        "search {image-idx} {pictures}/0.png",
        "train {image-recipe.yaml}",
        "train {clip-recipe.yaml}",
        "train {recipe.yaml} trainer.output={run} trainer.max_steps=4 trainer.save_every=2 --resume",
        "evaluate convergence {run} {beir} --out out --pairs 4",
        "evaluate compare {a.trec} {a.trec} --qrels {qrels.tsv}",
        "evaluate corrupted {image} {cifarc} --out out",
        "evaluate zero-shot {clip} {classes} --out out --templates {templates.txt} --class-names {names.txt}",
        f"{CORRUPTED} --train {{classes}} --severities 1 --baseline {{corrupted}}/metrics.json",
        "quickstart --out out --max-docs 300 --test-docs 20 --steps 2 --vocab-size 300",
    ):
        change = (lambda box: box["run"]) if "--resume" in words else None
        yield Case(f"sound: {words}", words, change, expected="works")


def files() -> Iterator[Case]:
    """Single files that a command reads, spoilt in every way."""
    tables = {**NOT_A_FILE, **NOT_TEXT, "one huge line": huge}
    every: dict[str, tuple[str, dict[str, Spoil]]] = {
        "beir/corpus.jsonl": (RETRIEVAL, tables | NOT_JSON),
        "beir/queries.jsonl": (RETRIEVAL, tables | NOT_JSON),
        "beir/qrels/test.tsv": (RETRIEVAL, tables),
        "recipe.yaml": ("train {recipe.yaml}", {**tables, **NOT_JSON}),
        "templates.txt": (ZERO_SHOT + " --templates {templates.txt}", tables),
        "names.txt": (ZERO_SHOT + " --class-names {names.txt}", tables),
        "a.trec": (TREC + " --out out", tables),
        "qrels.tsv": (TREC + " --out out", tables),
        "a.ndjson": ("evaluate compare {a.ndjson} {a.ndjson} --out out", tables | NOT_JSON),
        "retrieval/per_query.ndjson": (COMPARE, tables | NOT_JSON),
        "captioned/test.jsonl": (IMAGE_TEXT, tables | NOT_JSON),
        "images.parquet": ("evaluate probe {image} {images.parquet} --split train --out out", tables),
        "pairs.jsonl": ("evaluate convergence {run} {pairs.jsonl} --pairs 4 --out out", tables | NOT_JSON),
        "pairs.tar": (IMAGE_TEXT.replace("captioned", "pairs.tar"), tables),
        "corrupted/metrics.json": (
            CORRUPTED + " --train {classes} --severities 1 --baseline {corrupted}/metrics.json",
            {
                **NOT_A_FILE,
                **NOT_TEXT,
                **NOT_JSON,
                "other corruptions": holding('{"robustness": {"errors": {"x": 1}}}'),
            },
        ),
        "cifarc/labels.npy": ("evaluate corrupted {image} {cifarc} --out out", {**NOT_A_FILE, **NOT_TEXT}),
        "cifarc/fog.npy": ("evaluate corrupted {image} {cifarc} --out out", {**NOT_A_FILE, **NOT_TEXT}),
    }
    every |= {name: (f"embed {{text}} {{{name}}} --out out", tables) for name in FORMATS}
    bomb = gzip.compress(b"x" * (100 << 20), 1)
    every["docs.jsonl.gz"] = (
        every["docs.jsonl.gz"][0],
        {**NOT_A_FILE, **NOT_TEXT, "100 MB in one line": holding(bomb)},
    )
    fine = {  # these may well be read
        "cifarc/labels.npy": {"missing"},
        "cifarc/fog.npy": {"missing", "a folder", "a pipe", "an endless device"},
        "docs.txt": {"Latin-1", "noise", "deep"},
    }
    for name, (words, ways) in every.items():
        for way, how in ways.items():
            sound = way == "one huge line" and name != "recipe.yaml"  # all lines but the last one
            expected = "either" if sound or way in fine.get(name, ()) else "error"
            yield Case(f"file {name}: {way}", words, spoil(name, how), expected)


def cut_files(toys: Path) -> Iterator[Case]:
    """Bytes lost or turned over at random; of our own folders, every such fault is noticed by its checksum."""
    ours: dict[str, str] = {
        "emb": "index {emb} --out out",
        "idx": "search {idx} wing",
        "ivf": "search {ivf} wing",
    }
    for folder, words in ours.items():
        for file in files_of(toys / folder):
            for number in range(1):
                name = f"{folder}/{file}"
                # A changed note in meta.json, such as a path, cannot be told from a sound one.
                flips = "either" if file == "meta.json" else "error"
                yield Case(f"flipped {number}: {name}", words, spoil(name, flipped(number)), flips)
                yield Case(f"cut {number}: {name}", words, spoil(name, cut(number)))
            for way, how in {"missing": remove, "a pipe": as_fifo, "noise": holding(NOISE)}.items():
                # Snippets and a list of what was left out are optional.
                may = "either" if way == "missing" and "snippets" in file else "error"
                yield Case(f"{folder}/{file}: {way}", words, spoil(f"{folder}/{file}", how), may)
        for way, how in NOT_JSON.items():
            yield Case(f"{folder}/meta.json: {way}", words, spoil(f"{folder}/meta.json", how))
    for way, how in {**NOT_JSON, "cut": cut(0), "missing": remove, "a pipe": as_fifo}.items():
        yield Case(f"engine/meta.json: {way}", "search {engine} wing", spoil("engine/meta.json", how))
        yield Case(f"engine/meta.json: {way}, in an evaluation", ENGINE, spoil("engine/meta.json", how))
    wrong = {
        "engine": "x",
        "target": "/nowhere",
        "collection": "a/b",
        "count": -1,
        "columns": [],
        "model": 5,
        "side": 1,
    }
    for name, value in wrong.items():
        spoilt = spoil("engine/meta.json", saying(**{name: value}))
        yield Case(f"engine/meta.json: {name} is {value}", "search {engine} wing", spoilt)
    theirs = {
        "docs.jsonl": "embed {text} {docs.jsonl} --out out",
        "docs.csv": "embed {text} {docs.csv} --out out",
        "docs.parquet": "embed {text} {docs.parquet} --out out",
        "docs.jsonl.gz": "embed {text} {docs.jsonl.gz} --out out",
        "images.parquet": "embed {image} {images.parquet} --out out",
        "pairs.tar": "embed {clip} {pairs.tar} --out out",
        "pictures/0.png": "embed {image} {pictures} --out out",
        "captioned/test.jsonl": IMAGE_TEXT,
        "beir/corpus.jsonl": RETRIEVAL,
        "beir/qrels/test.tsv": RETRIEVAL,
        "cifarc/fog.npy": "evaluate corrupted {image} {cifarc} --out out",
        "cifarc/labels.npy": "evaluate corrupted {image} {cifarc} --out out",
        "a.trec": "evaluate compare {a.trec} {retrieval}/run.trec --qrels {qrels.tsv}",
        "a.ndjson": "evaluate compare {a.ndjson} {a.ndjson}",
        "recipe.yaml": "train {recipe.yaml}",
    }
    for file, words in theirs.items():
        for number in range(2):
            yield Case(f"flipped {number}: {file}", words, spoil(file, flipped(number, 4)), "either")
            yield Case(f"cut {number}: {file}", words, spoil(file, cut(number)), "either")
    resume = "train {recipe.yaml} trainer.output={run} trainer.max_steps=6 trainer.save_every=2 --resume"
    checkpoint = sorted((toys / "run" / "checkpoints").iterdir())[-1]
    for file in files_of(checkpoint):
        name = f"run/checkpoints/{checkpoint.name}/{file}"
        ways = {"flipped": flipped(0), "cut": cut(0), "empty": holding(b""), "noise": holding(NOISE), "missing": remove}
        if file.endswith(".json"):
            ways |= NOT_JSON
        for way, how in ways.items():
            # A damaged checkpoint is refused or, where that shows at once, passed over for the one before.
            yield Case(f"resume, {file}: {way}", resume, spoil(name, how), "either")


def model_files(toys: Path) -> Iterator[Case]:
    """Each file of a model folder, in turn; formats of others have no checksums, so a flipped weight may pass."""
    commands = {
        "text": "embed {text} {docs.jsonl} --out out",
        "image": "embed {image} {pictures} --out out",
        "clip": "embed {clip} {pictures} --out out",
    }
    for model, words in commands.items():
        for file in files_of(toys / model):
            if file == "README.md":
                continue
            name = f"{model}/{file}"
            ways = {"missing": remove, "noise": holding(NOISE), "cut": cut(0), "a folder": as_folder}
            ways |= {**NOT_JSON, "flipped": flipped(1)} if file.endswith(".json") else {}
            for way in random.Random(name).sample(sorted(ways), 3):
                yield Case(f"model {name}: {way}", words, spoil(name, ways[way]), "either")
        weights = next(file for file in files_of(toys / model) if file.endswith(".safetensors"))
        for way, how in {"missing": remove, "empty": holding(b""), "noise": holding(NOISE), "cut": cut(1)}.items():
            yield Case(f"weights {model}: {way}", words, spoil(f"{model}/{weights}", how))
        yield Case(f"weights {model}: other shapes", words, spoil(f"{model}/{weights}", _reshape))
        yield Case(f"weights {model}: a tensor lost", words, spoil(f"{model}/{weights}", _lose_tensor))
        yield Case(f"weights {model}: NaN", words, spoil(f"{model}/{weights}", _nan))
    for name in ("", "nowhere", "/nowhere", "/dev/null", "/dev/zero", ".", "..", "a␣b", "~nobody", "\\", "org/missing"):
        yield Case(f"model {name!r}", f"embed {name or '␣'} {{docs.jsonl}} --out out")
        yield Case(f"model {name!r} of an evaluation", f"evaluate retrieval {name or '␣'} {{beir}} --out out")


def _reshape(path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        name = max(tensors, key=lambda key: tensors[key].numel())
        tensors[name] = tensors[name].reshape(-1)[:12].reshape(3, 4).contiguous()

    _with_tensors(path, change)


def _lose_tensor(path: Path) -> None:
    _with_tensors(path, lambda tensors: tensors.pop(max(tensors, key=lambda key: tensors[key].numel())))


def _nan(path: Path) -> None:
    _with_tensors(
        path, lambda tensors: [value.fill_(float("nan")) for value in tensors.values() if value.is_floating_point()]
    )


def _with_tensors(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def options() -> Iterator[Case]:
    """Values of options that are out of range or of the wrong type."""
    numbers = {
        "embed": ("limit", "batch-size", "num-workers"),
        "index": ("nprobe", "ef-search", "target-recall", "recall-queries", "batch-size"),
        "push": ("batch-size", "recall-queries"),
        "search": ("k", "nprobe", "ef-search", "rerank-top"),
        "retrieval": ("depth", "batch-size", "rerank-top"),
        "image-text": ("batch-size",),
        "zero-shot": ("batch-size",),
        "probe": ("batch-size", "num-workers", "limit", "train-limit", "seed", "l2", "shots", "sgd-epochs"),
        "corrupted": ("severity", "severities", "num-workers", "limit", "seed", "train-limit"),
        "convergence": ("pairs", "temperature", "seed"),
        "objectives": ("pairs", "temperature", "seed", "warm-up", "max-epochs"),
        "compare": ("samples", "confidence", "seed"),
    }
    zero_is_fine = {"num-workers", "seed", "warm-up", "target-recall", "recall-queries"}
    huge_is_fine = {"limit", "train-limit", "depth", "k", "recall-queries", "ef-search", "nprobe", "pairs"}
    huge_is_fine |= {"batch-size", "l2"}
    for command, names in numbers.items():
        for name in names:
            words = COMMANDS[command].replace(" --pairs 4", "" if name == "pairs" else " --pairs 4")
            words = words.replace(" --samples 100", "" if name == "samples" else " --samples 100")
            if name == "sgd-epochs":
                words += " --sgd features"
            if name in ("severities", "train-limit") and command == "corrupted":
                words += " --train {classes}"
            if command == "index" and name in ("nprobe", "ef-search"):
                words += " --factory " + ("IVF2,Flat" if name == "nprobe" else "HNSW4")
            if command == "index" and name == "batch-size":
                words = "index {text} {docs.jsonl} --out out"
            if command == "search" and name == "nprobe":
                words = "search {ivf} wing"
            for value in ("-1", "0", "nan", "99999999999999999999"):
                fine = (value == "0" and name in zero_is_fine) or (value[0] == "9" and name in huge_is_fine)
                fine |= command == "search" and name == "ef-search"
                yield Case(f"{command} --{name}={value}", f"{words} --{name}={value}", expected=may(fine))
    for command, words in COMMANDS.items():
        if command not in ("compare", "index", "push", "train"):
            for device in ("foo", "cuda:9", "meta", ""):
                yield Case(f"{command} --device={device!r}", f"{words} --device={device}", expected=may(device == ""))
        yield Case(f"{command} --no-such-option", f"{words} --no-such-option 3")
        yield Case(f"{command} without arguments", words.split(" {")[0])
        if command != "train":
            yield Case(f"{command} --out without a value", words.split(" --out")[0] + " --out")
    choices = {
        "embed": ("side", "dtype", "output", "autocast", "on-error"),
        "index": ("metric", "side", "factory"),
        "mine": ("against", "pick", "form", "factory", "relative"),
        "push": ("to", "metric", "quantization"),
        "probe": ("sgd",),
        "corrupted": ("augmentation", "corruptions"),
        "convergence": ("augmentation",),
        "objectives": ("objectives",),
        "compare": ("metrics",),
    }
    for command, names in choices.items():
        for name in names:
            yield Case(f"{command} --{name}=foo", f"{COMMANDS[command]} --{name}=foo")
    factories = "Flat, IVF IVF0,Flat IVF-1,Flat IVF99999,Flat HNSW0 HNSW-4 IDMap,Flat PQ3 PQ0 PQ16x99 PCA0,Flat"
    factories += " PCA9999,Flat OPQ7,Flat SQ3 RQ0 LSH0 IVF2,HNSW0 ␣ IVF2,Flat,Refine( HNSW9999999999 IVF2(HNSW0),Flat"
    for factory in (*factories.split(" "), "Residual0", "ITQ0,LSH", "a" * 5000):
        words = f"index {{emb}} --out out --factory={factory}"
        yield Case(f"factory {factory[:20]!r}", words, expected=may(factory in ("RQ0", "LSH0")))
    for command in ("retrieval", "image-text", "zero-shot", "probe", "corrupted"):
        for split in ("nothing", "../test", "", "/"):
            # A folder of images without such a subfolder is taken whole.
            words = f"{COMMANDS[command]} --split={split}"
            yield Case(f"{command} --split={split!r}", words, expected=may(command != "retrieval"))
    for column in ("nothing", "label", ""):
        for command, option in (("image-text", "left"), ("image-text", "right"), ("embed", "text")):
            words = f"{COMMANDS[command]} --{option}-column={column}"
            yield Case(f"{command} --{option}-column={column!r}", words, expected=may(not column))
    words = "evaluate probe {image} {images.parquet} --split train --out out"
    for column in ("nothing", "image", "caption"):
        named = f"--label-column={column}"
        yield Case(f"probe {named}", f"{words} {named}", expected=may(column == "caption"))


def modalities() -> Iterator[Case]:
    """Models and data of different kinds."""
    models = ("text", "image", "clip")
    texts, images = ("beir", "docs.jsonl", "pairs.jsonl"), ("classes", "pictures", "captioned", "images.parquet")
    data = (*texts, *images, "pairs.tar", "cifarc")
    right = {
        "retrieval": {("text", "beir"), ("text", "pairs.jsonl")},
        "image-text": {("clip", "captioned"), ("clip", "pairs.tar"), ("clip", "images.parquet")},
        "zero-shot": {("clip", "classes")},
        "probe": {(model, place) for model in ("image", "clip") for place in ("classes", "images.parquet")},
        "corrupted": {
            (model, place)
            for model in ("image", "clip")
            for place in ("classes", "images.parquet", "cifarc", "pictures", "captioned", "pairs.tar")
        },
    }
    extra = {"corrupted": "--corruptions contrast,brightness --limit 2", "probe": "--split train"}
    for command, fine in right.items():
        for model in models:
            for place in data:
                # A folder of images may be found inside other data, and a split may be named otherwise.
                fits = (model, place) in fine or (model != "text" and command != "retrieval")
                words = f"evaluate {command} {{{model}}} {{{place}}} --out out {extra.get(command, '')}"
                yield Case(f"{command} of {model} on {place}", words, expected=may(fits))
    for run, places in {"run": (*images, "pairs.tar"), "image-run": texts}.items():
        for place in places:
            words = f"evaluate convergence {{{run}}} {{{place}}} --pairs 4 --out out"
            yield Case(f"convergence of {run} on {place}", words)
    for model, places in {"text": ("classes", "pictures"), "image": ("beir", "docs.jsonl", "docs.txt")}.items():
        for place in places:
            yield Case(f"embed {place} with {model}", f"embed {{{model}}} {{{place}}} --out out")
    for query in ("{pictures}/0.png", "wing", "nowhere.png", "{beir}", "{docs.jsonl}", "/dev/zero"):
        words = f"search {{image-idx}} {query}"
        yield Case(f"search images for {query}", words, expected=may("pictures" in query))
    for words in ("year>1", "year", "", "=", "year=,"):
        yield Case(
            f"search an engine --filter={words!r}", f"search {{engine}} wing --filter={words}", expected=may(not words)
        )
        yield Case(
            f"search an index --where={words!r}", f"search {{idx}} wing --where={words}", expected=may(not words)
        )
    for target in ("http://127.0.0.1:9", "http://127.0.0.1:port", "https://key@127.0.0.1", "{docs.jsonl}", "{beir}"):
        yield Case(f"push to {target}", f"push {{emb}} {target} --to qdrant --out out")
    for source in ("text", "idx", "beir", "docs.jsonl", "engine"):
        yield Case(f"push of {source}", f"push {{{source}}} out --to lancedb")
    for index in ("emb", "text", "run", "beir", "docs.jsonl", "nowhere"):
        yield Case(f"search in {index}", f"search {{{index}}} wing" if index != "nowhere" else "search nowhere wing")
    for model in ("image", "clip", "run", "nowhere"):
        yield Case(f"search --model {model}", f"search {{idx}} wing --model {{{model}}}")
    for source in ("text", "docs.jsonl", "idx", "run", "nowhere"):
        yield Case(f"index of {source}", f"index {{{source}}} --out out")
    yield Case("index with queries that are no embeddings", "index {emb} --out out --queries {docs.jsonl}")
    yield Case("index with queries of another dimension", "index {emb} --out out --queries {image-emb}")
    for memory in ("0", "1", "-1GiB", "nan", "", "2 apples"):
        yield Case(f"index --memory={memory}", f"index {{emb}} --out out --memory={memory}")
    yield Case("index in little memory", "index {emb} --out out --memory=16MiB", expected="works")
    yield Case("index without --out", "index {emb}")
    for source in ("text", "docs.jsonl", "run", "nowhere"):
        yield Case(f"index --verify of {source}", f"index {{{source}}} --verify")
        yield Case(f"index --remove of {source}", f"index {{{source}}} --remove {{docs.txt}}")
        yield Case(f"index --remove by {source}", f"index {{idx}} --remove {{{source}}}")
    yield Case("index --append of what is there", "index {emb} --out {idx} --append")
    yield Case("index --append of another dimension", "index {image-emb} --out {idx} --append")
    yield Case("index --append to nothing", "index {emb} --out out --append")


def outputs() -> Iterator[Case]:
    """Places that cannot be written to, and a disk that is full."""

    def file(box: Box) -> None:
        (box.folder / "file").write_text("mine")

    def folder(box: Box) -> None:
        (box.folder / "mine").mkdir()
        (box.folder / "mine" / "thesis.tex").write_text("years of work")

    for command, words in {
        **COMMANDS,
        "index of a model": "index {text} {docs.jsonl} --out out",
        "quickstart": "quickstart --out out --max-docs 300 --test-docs 20 --steps 2 --vocab-size 300",
    }.items():
        if command == "search":
            continue
        for place in ("file", "file/below", "/proc/nowhere", "a" * 300):
            there = words.replace("--out out", f"--out {place}")
            there += f" trainer.output={place}" if command == "train" else ""
            yield Case(f"{command} to {place[:20]}", there, file)
        if command in ("embed", "index", "index of a model", "quickstart"):
            yield Case(f"{command} to another's folder", words.replace("--out out", "--out mine"), folder)
        for size in (0, 3000):
            little = bool(size) and command in ("compare", "convergence")
            # Workers send tensors through files, too.
            alone = " --num-workers 0" if command in ("probe", "corrupted") else ""
            name = f"{command}, disk full after {size} bytes"
            yield Case(name, words + alone, expected=may(little), file_bytes=size)


def data() -> Iterator[Case]:
    """Sound files with contents that cannot be right."""

    def write(name: str, content: str | bytes) -> Change:
        return lambda box: holding(content)(box[name])

    def lines(*rows: Any) -> str:
        return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)

    def images(box: Box) -> Path:
        return box["classes"]

    embed = "embed {text} {docs.jsonl} --out out"
    for name, content, expected in (
        ("a repeated id", lines({"_id": "a", "text": "x"}, {"_id": "a", "text": "y"}), "either"),
        ("texts that are numbers", lines({"_id": "a", "text": 3}), "either"),
        ("texts that are objects", lines({"_id": "a", "text": {"b": 1}}), "error"),
        ("no text", lines({"_id": "a"}), "either"),
        ("empty texts", lines({"_id": "a", "text": ""}, {"_id": "b", "text": "  "}), "error"),
        ("ids that are objects", lines({"_id": {"a": 1}, "text": "x"}), "either"),
        ("an id with a line break", lines({"_id": "a\nb", "text": "x"}), "either"),
        ("an id with an escape", lines({"_id": "a\x1b[2J", "text": "x"}), "either"),
        ("a lone surrogate", '{"_id": "a", "text": "\\ud800"}\n', "either"),
        ("a number of 5000 digits", '{"_id": ' + "9" * 5000 + ', "text": "x"}\n', "either"),
        ("two keys", '{"_id": "a", "text": "x", "text": "y"}\n', "either"),
        ("lists on each line", "[1]\n[2]\n", "error"),
        ("words on each line", "one\ntwo\n", "error"),
    ):
        yield Case(f"jsonl with {name}", embed, write("docs.jsonl", content), expected)  # type: ignore[arg-type]
    for name, content in {
        "a repeated header": "_id,text,text\na,b,c\n",
        "a header alone": "_id,text\n",
        "rows of other lengths": "_id,text\na\nb,c,d,e\n",
        "an open quote": '_id,text\na,"b\n' * 3,
        "no header": "\n\n\n",
    }.items():
        expected = may(name in ("rows of other lengths", "an open quote"))
        yield Case(f"csv with {name}", "embed {text} {docs.csv} --out out", write("docs.csv", content), expected)
    judged = "query-id\tcorpus-id\tscore\n"
    for name, content, expected in (
        ("no judgement", judged, "error"),
        ("a grade of 10²³", judged + "d0\td1\t" + "1" + "0" * 23 + "\n", "error"),
        ("a grade that is a word", judged + "d0\td1\tgood\n", "error"),
        ("a grade of NaN", judged + "d0\td1\tnan\n", "error"),
        ("an infinite grade", judged + "d0\td1\tinf\n", "error"),
        ("a grade with a fraction", judged + "d0\td1\t0.5\n", "error"),
        ("negative grades alone", judged + "d0\td1\t-1\n", "either"),
        ("unknown queries", judged + "nobody\td1\t1\n", "error"),
        ("unknown documents", judged + "d0\tnothing\t1\n", "either"),
        ("two columns", judged + "d0\td1\n", "error"),
        ("a repeated judgement", judged + "d0\td1\t1\nd0\td1\t2\n", "either"),
    ):
        yield Case(f"qrels with {name}", RETRIEVAL, write("beir/qrels/test.tsv", content), expected)  # type: ignore[arg-type]
        if name not in ("unknown documents", "unknown queries"):
            expected = may(name.startswith(("negative", "a repeated")))
            yield Case(f"qrels of compare with {name}", TREC, write("qrels.tsv", content), expected)
    for name, content in {
        "five fields": "d0 Q0 d1 1 0.5\n",
        "a word as score": "d0 Q0 d1 1 high x\n",
        "NaN": "d0 Q0 d1 1 nan x\n",
        "a document twice": "d0 Q0 d1 1 2 x\nd0 Q0 d1 2 1 x\n",
    }.items():
        yield Case(f"TREC run with {name}", TREC, write("a.trec", content))
    for name, content in {
        "no query": '{"ndcg@10": 1}\n',
        "scores that are words": '{"query": "a", "ndcg@10": "high"}\n',
        "NaN": '{"query": "a", "ndcg@10": NaN}\n',
        "a query twice": '{"query": "a", "x": 1}\n{"query": "a", "x": 1}\n',
        "a query that is a list": '{"query": [1], "x": 1}\n',
        "no metric": '{"query": "a"}\n',
        "metrics that differ": '{"query": "a", "x": 1}\n{"query": "b", "y": 1}\n',
    }.items():
        words = "evaluate compare {a.ndjson} {a.ndjson} --out out"
        yield Case(f"per-query log with {name}", words, write("a.ndjson", content))
    yield Case(
        "compare a run with another collection",
        "evaluate compare {a.ndjson} {retrieval}/per_query.ndjson",
        write("a.ndjson", '{"query": "a", "ndcg@10": 1}\n'),
    )
    yield Case("compare without qrels", "evaluate compare {a.trec} {a.trec}")
    yield Case("compare with no metric", f"{COMPARE} --metrics=,")
    yield Case("compare folders without logs", "evaluate compare {beir} {beir}")
    templates = {"no place": "a photo\n", "two places": "{} {}\n", "a field": "a {name}\n", "blank": "\n \n"}
    for name, content in templates.items():
        words = f"{ZERO_SHOT} --templates {{templates.txt}}"
        yield Case(f"templates with {name}", words, write("templates.txt", content))
    for name, content in {"too few": "blue\n", "numbers": "0\n1\n2\n", "blank": "\n\n"}.items():
        yield Case(f"class names: {name}", f"{ZERO_SHOT} --class-names {{names.txt}}", write("names.txt", content))

    def every(spoil_one: Spoil) -> Change:
        return lambda box: [spoil_one(path) for path in images(box).rglob("*.png")]

    def some(spoil_one: Spoil) -> Change:
        return lambda box: spoil_one(images(box) / "test" / "red" / "00.png")

    def renamed(name: str, other: str) -> Change:
        return lambda box: (images(box) / name).rename((images(box) / name).with_name(other))

    def loop(box: Box) -> None:
        (images(box) / "test" / "loop").symlink_to("..")

    def empty(box: Box) -> None:
        (box.folder / "empty").mkdir()

    def one_class(box: Box) -> None:
        for part in ("train", "test"):
            for name in ("red", "green"):
                shutil.rmtree(images(box) / part / name)

    ways = {"noise": holding(NOISE), "empty": holding(b""), "cut": cut(0), "pipes": as_fifo}
    for command in ("probe", "corrupted", "zero-shot", "convergence"):
        words = COMMANDS[command]
        for way, how in {**ways, "devices": link_to("/dev/zero")}.items():
            yield Case(f"{command}, all images: {way}", words, every(how), may(way == "cut"))
            if command != "convergence":
                yield Case(f"{command}, one image: {way}", words, some(how), "either")
        if command != "convergence":
            for name in ("\udcff.png", "\x1b[2J.png", "$\\frac{.png", "<script>.png"):
                yield Case(f"{command}, an image named {name!r}", words, renamed("test/red/00.png", name), "either")
            for name in ("\udcff", "\x1b[2J", "$\\frac{", "<script>", "=cmd"):
                yield Case(f"{command}, a class named {name!r}", words, renamed("test/red", name), "either")
        yield Case(f"{command}, one class", words, one_class, may(command != "probe"))
        yield Case(f"{command}, no images", words, every(remove))
        yield Case(f"{command}, a loop of links", words, loop, "either")
    yield Case("probe, a class that training has not", PROBE, renamed("test/red", "pink"))
    yield Case("probe, more shots than images", f"{PROBE} --shots 100")
    yield Case("probe, no shots", f"{PROBE} --shots []", expected="either")
    yield Case("corrupted, an unknown corruption", CORRUPTED.replace("contrast", "rain"))
    yield Case("corrupted, a corruption twice", CORRUPTED.replace("brightness", "contrast"), expected="either")
    yield Case("corrupted, clean images of clean data", f"{CORRUPTED} --clean {{classes}}")
    yield Case(
        "corrupted, a baseline that is no file", f"{CORRUPTED} --train {{classes}} --severities 1 --baseline nowhere"
    )
    yield Case("convergence of an empty folder", "evaluate convergence empty {classes} --out out", empty)
    yield Case("convergence of a run without a model", CONVERGENCE, lambda box: remove(box["image-run/model"]))
    yield Case(
        "convergence of a run without checkpoints",
        CONVERGENCE,
        lambda box: (remove(box["image-run/checkpoints"]), remove(box["image-run/model"])),
    )
    yield Case(
        "convergence of runs of two kinds", "evaluate convergence {image-run} {classes} {run} --out out --pairs 4"
    )
    for kind in ("docs.jsonl", "beir", "classes", "pairs.tar", "captioned"):
        target = {"classes": "image", "pairs.tar": "clip", "captioned": "clip"}.get(kind, "text")
        yield Case(f"data {kind}: a path through a file", f"embed {{{target}}} {{docs.jsonl}}/{kind} --out out")
    for place in ("nowhere", "/dev/null", "/dev/zero", ".", "␣", "hub/nothing", "*.jsonl", "x.xyz"):
        yield Case(f"data {place}", f"embed {{text}} {place} --out out")
        yield Case(f"data of an evaluation: {place}", f"evaluate image-text {{clip}} {place} --out out")
    yield Case("an empty folder as data", "embed {text} empty --out out", empty)

    def pointing(target: str) -> Change:
        rows = [{"image": target, "captions": ["a"]}]
        return lambda box: (box["captioned/test.jsonl"]).write_text(lines(*rows))

    for target in ("/dev/zero", "../../../../etc/hostname", "/etc/hostname", "nowhere.png", "", "pictures", "\0", 7):
        yield Case(f"a table of the image {target!r}", IMAGE_TEXT, pointing(target))  # type: ignore[arg-type]


def vectors() -> Iterator[Case]:
    """Vectors in columns, and mined negatives that name vectors, with contents that cannot be right."""
    train = "train {vectors-recipe.yaml} data.path={vectors.jsonl}"
    mined = "train {vectors-recipe.yaml} data={class_path:␣MinedPairs,␣init_args:␣{path:␣{mined-ids.jsonl}"
    named = f"{mined},␣queries:␣{{named.parquet}},␣documents:␣{{named.parquet}}}}}}"
    yield Case("sound: train on columns of vectors", train, expected="works")
    yield Case("sound: train on mined ids of vectors", named, expected="works")

    def row(**changed: Any) -> str:
        return json.dumps({"q": [0.5, 1.0], "d": [[1.0, 0.5]], "n": [[2.0, 0.5]]} | changed) + "\n"

    def write(name: str, content: str) -> Change:
        return lambda box: holding(content)(box[name])

    rest = "".join(row(q=[0.5, float(number)]) for number in range(4))
    for name, value in (
        ("null", None),
        ("no numbers", []),
        ("nulls", [None, None]),
        ("words", ["a", "b"]),
        ("a word", "a"),
        ("an object", {"a": 1.0}),
        ("truth values", [True, False]),
        ("three numbers", [1.0, 2.0, 3.0]),
        ("zeros", [0.0, 0.0]),
        ("infinity", [float("inf"), 1.0]),
        ("a number of 400 digits", [10**400, 1.0]),
        ("lists three deep", [[[1.0, 2.0]]]),
        ("lists 500 deep", json.loads("[" * 500 + "1.5" + "]" * 500)),
    ):
        for column in "qdn":
            some = write("vectors.jsonl", row(**{column: value}) + rest)
            yield Case(f"one {column} of vectors is {name}", train, some, expected="works")  # that row is left out
            every = write("vectors.jsonl", row(**{column: value}) * 5)
            # Without negatives there are still pairs, and any list of numbers that is finite is a vector.
            may_train = column == "n" or name == "three numbers"
            yield Case(f"every {column} of vectors is {name}", train, every, may(may_train))
    for name, content in {
        "unknown ids": '{"query": "no", "pos": ["none"], "neg": []}\n',
        "ids that are objects": '{"query": {"a": 1}, "pos": ["v1"], "neg": []}\n',
        "nothing": "",
        "no positives": '{"query": "v1", "neg": ["v2"]}\n',
    }.items():
        yield Case(f"mined ids with {name}", named, write("mined-ids.jsonl", content))
    yield Case("mined ids without documents", f"{mined},␣queries:␣{{named.parquet}}}}}}")
    yield Case("mined ids of texts", named.replace("{named.parquet}", "{docs.parquet}"))
    yield Case("mined ids of a lost file", named.replace("{named.parquet}", "lost.npy"))
    yield Case("embed with three columns of vectors", "embed {adapter} {vectors.jsonl} --out out", expected="either")


def trees(toys: Path) -> Iterator[Case]:
    """Unfinished work of evaluations, and our own folders in shapes that we never write."""
    finished = {
        "corrupted": "evaluate corrupted {image} {classes} --out {corrupted} --corruptions contrast,brightness",
        "convergence": "evaluate convergence {image-run} {classes} --out {convergence} --pairs 6",
        "objectives": OBJECTIVES.replace("--out out", "--out {objectives}"),
        "probe": "evaluate probe {image} {classes} --out {probe}",
        "zero-shot": "evaluate zero-shot {clip} {classes} --out {zero-shot}",
        "retrieval": "evaluate retrieval {text} {beir} --out {retrieval}",
        "image-text": "evaluate image-text {clip} {captioned} --out {image-text}",
    }
    for toy, words in finished.items():
        inner = [
            file
            for file in files_of(toys / toy)
            if "/" in file and file.endswith((".ndjson", ".npy", ".arrow", "meta.json"))
        ]
        for file in inner[:2]:
            ways = {"noise": holding(NOISE), "empty": holding(b""), "flipped": flipped(0), "a folder": as_folder}
            ways |= NOT_JSON if file.endswith(("json", "ndjson")) else {}
            for way in random.Random(file).sample(sorted(ways), 3):
                yield Case(f"again into {toy}, {file}: {way}", words, spoil(f"{toy}/{file}", ways[way]), "either")
        yield Case(
            f"again into {toy}, over a folder report.html", words, spoil(f"{toy}/report.html", as_folder), "either"
        )


def recipe_keys(toys: Path) -> Iterator[Case]:
    """Values of a recipe that cannot be, one at a time."""
    known = recipes(toys)["recipe.yaml"]

    def recipe(change: Callable[[dict[str, Any]], object]) -> Change:
        def write(box: Box) -> None:
            settings = json.loads(json.dumps(known))
            change(settings)
            (box.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))

        return write

    def value_of(section: str, key: str, value: Any) -> Change:
        def change(settings: dict[str, Any]) -> None:
            part = settings[section]
            (part if section == "trainer" else part.setdefault("init_args", {}))[key] = value

        return recipe(change)

    trainer: dict[str, tuple[Any, ...]] = {
        "output": ([1], {}, 3, "", None, "/dev/null/x"),
        "batch_size": (0, -1, 1.5, "many", None, [3], 10**12),
        "epochs": (0, -1, "ten", 0.5),
        "max_steps": (-1, "all", 0),
        "learning_rate": (-1, "fast", float("nan"), float("inf"), [1]),
        "optimizer": ("sdg", 3, None),
        "weight_decay": (-1, "x", float("nan")),
        "momentum": (-1, 2, "x"),
        "betas": ([2, 3], [0.9], 3, "x", [-1, 0.9]),
        "warmup": (-1, "x"),
        "schedule": ("cos", 1),
        "final_fraction": (-1, 2, "x"),
        "max_gradient_norm": (-1, 0, "x"),
        "mixed_precision": ("fp8", 16),
        "gradient_accumulation": (0, -1),
        "chunk_size": (0, -1, "x"),
        "evaluate_every": (0, -1),
        "save_every": (0, -1),
        "keep_checkpoints": (0, -1),
        "log_every": (0, -1),
        "seed": (-1, "x", 1.5, 10**30),
        "num_workers": (-1, "x", 10**6),
        "on_error": ("ignore", 1),
        "selection_embeddings": ("old",),
        "tracker": ("nothing", 3),
        "deterministic": ("perhaps",),
        "overwrite": ("perhaps",),
        "no_such_key": (1,),
    }
    for key, values in trainer.items():
        for value in values:
            yield Case(f"trainer.{key}={value!r}", "train recipe.yaml", value_of("trainer", key, value))
    others: dict[str, dict[str, tuple[Any, ...]]] = {
        "objective": {
            "temperature": (0, -1, "hot", float("nan"), 1e-9),
            "gamma": (0, -1, 2, "x"),
            "no_such_key": (1,),
            "seed": (-1,),
        },
        "data": {
            "path": ("/nope", "", 3, "/dev/null", None, "/dev/zero"),
            "split": ("nope", 3, "../x"),
            "on_error": ("x",),
            "no_such_key": (1,),
        },
        "model": {
            "name": ("nowhere", "/nope", 3, "", "/dev/null"),
            "max_length": (0, -1, "x"),
            "pooling": ("x",),
            "no_such_key": (1,),
            "config": (3, {"model_type": "nothing"}),
        },
        "evaluator": {
            "path": ("/nope", None, ""),
            "split": ("nope",),
            "primary": ("foo", "", 3),
            "batch_size": (0, -1),
            "max_queries": (0, -1),
            "no_such_key": (1,),
        },
    }
    for section, keys in others.items():
        for key, values in keys.items():
            for value in values:
                yield Case(f"{section}.{key}={value!r}", "train recipe.yaml", value_of(section, key, value))
        for path in ("os.system", "nothing.at.All", "dualenc.errors.DualencError", "", 3, "TextEncoderr", "evil.X"):
            yield Case(
                f"{section}.class_path={path!r}",
                "train recipe.yaml",
                recipe(lambda s, section=section, path=path: s[section].update(class_path=path)),
            )
        yield Case(
            f"{section} is a list", "train recipe.yaml", recipe(lambda s, section=section: s.update({section: [1]}))
        )
        yield Case(
            f"{section} is null",
            "train recipe.yaml",
            recipe(lambda s, section=section: s.update({section: None})),
            "either" if section == "evaluator" else "error",
        )
        yield Case(
            f"no {section}",
            "train recipe.yaml",
            recipe(lambda s, section=section: s.pop(section)),
            "either" if section == "evaluator" else "error",
        )
        yield Case(
            f"{section}.init_args is a list",
            "train recipe.yaml",
            recipe(lambda s, section=section: s[section].update(init_args=[1])),
        )
    classes: dict[str, dict[str, dict[str, Any]]] = {
        "objective": {
            "EMC2": {"burn_in": 2, "proposals": -1, "recent": -1, "score": "old"},
            "ISIR": {"kernel": "isir", "recent": -1},
            "HCL": {"hardness": -1, "class_prior": 1, "annealing_steps": -1},
            "SACLR": {"alpha": 2, "rho": -1, "form": "x", "negatives": 0, "kernel": "x"},
            "GlobalCache": {"extra_encodes": -1},
            "NegativeCache": {"refresh": 2},
            "MomentumQueue": {"queue_size": 0, "momentum": 1},
            "ISogCLR": {"radius": -1, "min_temperature": 2, "temperature_momentum": 1},
            "ExactGlobal": {"corpus_chunk_size": 0},
        },
        "batching": {
            "SpectralBatches": {"num_clusters": 0, "no_such_key": 1},
            "OSGDBatches": {"no_such_key": 1},
            "RandomBatches": {"no_such_key": 1},
        },
    }
    for section, named in classes.items():
        for name, arguments in named.items():
            for key, value in arguments.items():
                given = {"temperature": 0.1, key: value} if section == "objective" else {key: value}
                part = {section: {"class_path": name, "init_args": given}}
                yield Case(f"{name}({key}={value!r})", "train recipe.yaml", recipe(lambda s, p=part: s.update(p)))
    overrides = "x = trainer=3 trainer. .epochs=1 trainer.epochs nothing.x=1 trainer.epochs=[ model.init_args=3"
    for override in (*overrides.split(), "trainer.epochs.deep=3", "data.path.deep=3"):
        yield Case(f"override {override}", f"train {{recipe.yaml}} {override}")
    views = "data.class_path=ImageFolderViews data.path={pictures}"
    yield Case("train a text model on images", f"train {{recipe.yaml}} {views}")
    yield Case("train an image model on texts", "train {image-recipe.yaml} data.class_path=BeirPairs data.path={beir}")
    yield Case(
        "train an image-text model on texts", "train {clip-recipe.yaml} data.class_path=BeirPairs data.path={beir}"
    )
    yield Case(
        "train an image-text model on images",
        "train {clip-recipe.yaml} data.class_path=ImageFolderViews data.path={pictures}",
    )
    yield Case(
        "evaluate training of texts on images",
        "train recipe.yaml",
        recipe(lambda s: s.update(evaluator=recipes(toys)["image-recipe.yaml"]["evaluator"])),
    )
    yield Case("train into a run", "train {recipe.yaml} trainer.output={run}", lambda box: box["run"])
    yield Case(
        "resume with another recipe",
        "train {recipe.yaml} trainer.output={run} trainer.learning_rate=0.5 trainer.max_steps=6 --resume",
        lambda box: box["run"],
    )
    yield Case(
        "resume with other data",
        "train {recipe.yaml} data.path={beir} trainer.output={run} trainer.max_steps=6 trainer.save_every=2 --resume",
        lambda box: (box["run"], holding("query-id\tcorpus-id\tscore\nd0\td1\t1\n")(box["beir/qrels/train.tsv"])),
    )
    run_code = "a: !!python/object/apply:os.system [x]"
    for text in ("a: [", run_code, "&a [*a]", "{[}", "- 1", "a: b: c", "\t", "model: &m {x: *m}"):
        yield Case(f"recipe of {text!r}", "train {recipe.yaml}", spoil("recipe.yaml", holding(text)))
    for name in ("beir/corpus.jsonl", "beir/queries.jsonl", "beir/qrels/train.tsv"):
        for way, how in {**NOT_A_FILE, **NOT_TEXT}.items():
            yield Case(f"train on {name}: {way}", "train {recipe.yaml} data.path={beir}", spoil(name, how))


def mixtures(toys: Path) -> Iterator[Case]:
    """Sources of pairs that do not go together, and what else a mixture may be told wrongly."""

    def of(name: str, /, **arguments: Any) -> dict[str, Any]:
        return {"class_path": name, "init_args": arguments}

    beir, mined = of("BeirPairs", path=str(toys / "beir")), of("MinedPairs", path=str(toys / "mined.jsonl"))
    columns = {"left_column": "q", "right_column": "d"}
    vectors = of("TablePairs", path=str(toys / "vectors.jsonl"), **columns)
    captions = {"left_column": "image", "right_column": "captions"}
    captioned = of("TablePairs", path=str(toys / "captioned" / "test.jsonl"), **captions)
    classes = of("ImageFolderViews", path=str(toys / "classes" / "train"))

    def mixture(recipe: str = "recipe.yaml", more: dict[str, Any] | None = None, **given: Any) -> Change:
        """A recipe of two sources; `given` are other arguments of the mixture, `more` other parts of the recipe."""

        def write(box: Box) -> None:
            settings = json.loads(json.dumps(recipes(toys)[recipe]))
            settings["data"] = of("Mixture", **{"sources": {"first": beir, "second": mined}, **given})
            settings["objective"] = of("InfoNCE", temperature=0.1)
            (box.folder / "recipe.yaml").write_text(yaml.safe_dump(settings | (more or {}), sort_keys=False))

        return write

    yield Case("sound: mixture", "train recipe.yaml", mixture(), "works")
    weights = {"first": 2, "second": 0.5}
    yield Case(
        "sound: mixture with weights", "train recipe.yaml", mixture(weights=weights, batches="one_source"), "works"
    )
    arguments: dict[str, tuple[Any, ...]] = {
        "sources": (
            {},
            [],
            [beir, mined],
            "x",
            3,
            None,
            {"first": None},
            {"first": str(toys / "beir")},
            {"first": [beir]},
        ),
        "weights": ([1, 2], 3, "x", {"third": 1}, {"first": "x"}, {"first": [1]}, {"first": None}, {3: 1}),
        "left_prompts": ("q: ", ["q: "], 3, {"third": "q: "}, {"first": 3}, {"first": ["q: "]}, {"first": None}),
        "right_prompts": (True, {"first": {"a": "b"}}, {"first": 1.5}),
        "batches": ("one", 3, None, ["mixed"]),
        "wieghts": ({"first": 1},),
    }
    for key, values in arguments.items():
        for value in values:
            yield Case(f"mixture {key}={str(value)[:60]!r}", "train recipe.yaml", mixture(**{key: value}))
    for weight in (0, -1, float("nan"), float("inf"), 1e-300, 1e300, 10**400, True):
        change, fine = mixture(weights={"first": weight}), weight is True
        yield Case(f"mixture with a weight of {str(weight)[:8]}", "train recipe.yaml", change, may(fine))
    for name in ("", "a b", "a/b", "..", "a.b", "é\n", "x" * 5000, 3):
        change, fine = mixture(sources={name: beir, "second": mined}), name == "x" * 5000
        yield Case(f"mixture with a source called {str(name)[:9]!r}", "train recipe.yaml", change, may(fine))
    others = {
        "of another class": of("TextEncoder", name=str(toys / "text")),
        "of no class": of("BeerPairs"),
        "that runs code": of("os.system", command="x"),
        "without a path": of("BeirPairs"),
        "with an unknown key": of("BeirPairs", path=str(toys / "beir"), pth="x"),
        "with an unknown split": of("BeirPairs", path=str(toys / "beir"), split="nope"),
        "that is nowhere": of("MinedPairs", path="/nope"),
        "that is a mixture": of("Mixture", sources={"inner": beir}),
        "of vectors": vectors,
        "of captioned images": captioned,
        "of images alone": classes,
        "of mined ids without vectors": of("MinedPairs", path=str(toys / "mined-ids.jsonl")),
    }
    for what, other in others.items():
        fine = what == "of mined ids without vectors"  # ids are texts
        yield Case(
            f"mixture with a source {what}",
            "train recipe.yaml",
            mixture(sources={"first": beir, "other": other}),
            may(fine),
        )
        first = mixture(sources={"other": other, "first": beir})
        yield Case(f"mixture that begins with a source {what}", "train recipe.yaml", first, may(fine))
    for name in ("empty", "noise", "Latin-1", "missing", "a folder", "a pipe", "an endless device"):
        spoil_one = {**NOT_A_FILE, **NOT_TEXT}[name]

        def spoiled(box: Box, spoil_one: Spoil = spoil_one) -> None:
            spoil_one(box["mined.jsonl"])
            mixture(sources={"first": beir, "second": of("MinedPairs", path=str(box["mined.jsonl"]))})(box)

        yield Case(f"mixture with a file of a source: {name}", "train recipe.yaml", spoiled)

    def without_pairs(box: Box) -> None:
        holding("query-id\tcorpus-id\tscore\n")(box["beir/qrels/train.tsv"])
        mixture(sources={"first": of("BeirPairs", path=str(box["beir"])), "second": mined})(box)

    yield Case("mixture with a source without pairs", "train recipe.yaml", without_pairs)
    shorter = of("TablePairs", path="short.jsonl", **columns)

    def two_dimensions(box: Box) -> None:
        (box.folder / "short.jsonl").write_text(json.dumps({"q": [1.0, 2.5], "d": [[2.5, 1.0]]}) + "\n")
        mixture("vectors-recipe.yaml", sources={"first": vectors, "second": shorter})(box)

    yield Case("mixture of vectors of two dimensions", "train recipe.yaml", two_dimensions)
    prompted = mixture("clip-recipe.yaml", sources={"first": captioned}, left_prompts={"first": "a: "})
    yield Case("mixture with prompts for images", "train recipe.yaml", prompted)
    for model, source in {"recipe.yaml": captioned, "clip-recipe.yaml": beir, "image-recipe.yaml": beir}.items():
        yield Case(f"mixture for the model of {model}", "train recipe.yaml", mixture(model, sources={"first": source}))
    objectives = ("GlobalCache", {}), ("ISIR", {"proposals": "batch"}), ("EMC2", {"proposals": "batch"})
    for name, given in objectives:
        other = {"objective": of(name, temperature=0.1, **given)}
        change = mixture(more=other, weights=weights)
        yield Case(f"mixture with weights under {name}", "train recipe.yaml", change)
    batching = {"batching": of("SpectralBatches")}
    for given in ({"weights": weights}, {"batches": "one_source"}):
        yield Case(f"mixture with {given} in selected batches", "train recipe.yaml", mixture(more=batching, **given))
    for words in ("data.sources=3", "data.sources.first=3", "data.sources.third.init_args.path=x", "data.weights=3"):
        yield Case(f"mixture with {words}", f"train recipe.yaml {words}", mixture())
    evaluator = {"evaluator": of("RetrievalEvaluator", pairs=of("Mixture", sources={}))}
    yield Case("evaluation on an empty mixture", "train recipe.yaml", mixture(more=evaluator))
    evaluator = {"evaluator": of("RetrievalEvaluator", pairs=of("BeirPairs", path="nowhere"))}
    yield Case("evaluation on pairs that are nowhere", "train recipe.yaml", mixture(more=evaluator))
    for where in ("title=a", ["year>1"], ["title"], [3], {"a": 1}, ["title=nothing"]):
        evaluator = {"evaluator": of("RetrievalEvaluator", path=str(toys / "beir"), where=where)}
        yield Case(f"evaluation where {where}", "train recipe.yaml", mixture(more=evaluator))


def filters(toys: Path) -> Iterator[Case]:
    """Conditions on columns in an evaluation without an engine."""
    del toys
    for words in ("year>1", "year", "", "=", "title=", "title>a", "_id=d1", "text=nothing", ",", "title=a,b=", "é=1"):
        fine = may(not words)
        yield Case(f"retrieval --where={words!r}", f"{RETRIEVAL} --where={words}", expected=fine)
    yield Case("sound: retrieval --where", f"{RETRIEVAL} --where=title!=none --bm25", expected="works")
    yield Case("retrieval of an engine --where", f"{ENGINE} --where=year>1")
    yield Case("retrieval of an engine --filter", f"{ENGINE} --filter=year>1")
    yield Case("retrieval on vectors --where", "evaluate retrieval {adapter} {emb} --out out --where=year>1")
    nested = json.dumps({"_id": "d1", "text": "wing", "year": {"a": [1]}}) + "\n"
    where = "evaluate retrieval {text} {beir} --out out --where=year>1"
    yield Case("retrieval --where a column holds records", where, spoil("beir/corpus.jsonl", holding(nested)))


def serving(toys: Path) -> Iterator[Case]:
    """What `dualenc serve` refuses to start with; tests/serve/test_app.py has the requests."""
    del toys
    serve = "serve {idx} --port=0"
    for place in ("text", "emb", "run", "beir", "docs.jsonl", "pictures", "judge", "retrieval"):
        yield Case(f"serve {place}", f"serve {{{place}}} --port=0")
    for place in ("nowhere", "/dev/null", "/dev/zero", "/", "␣", "a" * 300):
        yield Case(f"serve {place[:20]!r}", f"serve {place} --port=0")
    yield Case("serve without arguments", "serve")
    yield Case("serve --no-such-option", f"{serve} --no-such-option 3")
    for name, values in {
        "port": ("-1", "65536", "99999999999999999999", "x", "1.5", ""),
        "rerank-top": ("0", "-1", "1001", "x"),
        "nprobe": ("0", "-1", "99999999999999999999", "x"),
        "ef-search": ("0", "-1", "99999999999999999999", "x"),
        "device": ("foo", "cuda:9", "meta"),
        "host": ("no.such.host.invalid", "999.1.1.1", "127.0.0.1:80", "http://127.0.0.1", "a" * 300),
        "model": ("nowhere", "{image}", "{clip}", "{run}", "{judge}", "{docs.jsonl}", "/dev/zero"),
        "rerank": ("nowhere", "{text}", "{image}", "{clip}", "{docs.jsonl}", "{idx}", "{judge}", "/dev/zero"),
    }.items():
        for value in values:
            yield Case(
                f"serve --{name}={value[:20]!r}",
                f"serve {{idx}} --{'' if name == 'port' else 'port=0 --'}{name}={value}",
            )
    for index in ("image-idx", "engine"):
        yield Case(f"serve {index} with a cross-encoder", f"serve {{{index}}} --port=0 --rerank={{judge}}")
    gone = {"model gone": saying(model="/gone/model"), "no model": saying(model=None), "a number": saying(model=3)}
    for way, how in {**gone, **NOT_A_FILE, **NOT_TEXT, **NOT_JSON}.items():
        yield Case(f"serve with meta.json: {way}", serve, spoil("idx/meta.json", how))


def evaluations(toys: Path) -> Iterator[Case]:
    """What remains: commands that are none."""
    yield Case("dualenc evaluate", "evaluate", expected="works")
    for words in (
        *("nothing", "evaluate nothing", "evaluate retrieval", "--nothing", "embed a b c d --out e", "search", "train"),
        "train {recipe.yaml} --out x",
    ):
        yield Case(f"dualenc {words}", words)
    for option, values in {
        "steps": (0, -1, "x"),
        "max-docs": (0, -1),
        "test-docs": (-1, 99999999),
        "vocab-size": (0, -5),
        "seed": (-1,),
    }.items():
        fast = "".join(f" --{name}={value}" for name, value in {"max-docs": 300, "steps": 2}.items() if name != option)
        for value in values:
            yield Case(f"dualenc quickstart --{option}={value}", f"quickstart --{option}={value} --out out{fast}")
