"""Every recipe of the repository names classes and arguments that exist."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from dualenc.cli import main
from dualenc.encoders import TextEncoder, load_model, train_tokenizer
from dualenc.recipe.resolve import read_recipe
from dualenc.search import Index
from dualenc.training.log import read_metrics
from tests.helpers import toy
from tests.helpers.image_models import save_classes

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_is_valid_and_writes_to_a_folder_of_its_own_name(path: Path) -> None:
    settings = read_recipe(path).settings
    assert settings["trainer"]["output"] == f"runs/{path.stem}"
    assert path.read_text().startswith("# ")


@pytest.mark.slow
def test_recipes_for_fine_tuning_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, on a small model and small data in place of those they name."""
    monkeypatch.chdir(tmp_path)
    model, data = (
        toy.text_model(tmp_path / "model"),
        toy.write_beir(tmp_path / "beir", split="train"),
    )
    for split in ("dev", "test"):
        shutil.copy(data / "qrels" / "train.tsv", data / "qrels" / f"{split}.tsv")
    assert main(["mine", str(model), str(data), "--out", "mined.jsonl", "--relative", "null"]) == 0

    def train(name: str, *changes: str, base: str = "name") -> dict[str, Any]:
        words = [
            f"model.{base}={model}",
            f"trainer.output={tmp_path / name}",
            "trainer.batch_size=4",
            *changes,
        ]
        assert main(["train", str(FOLDER / f"{name}.yaml"), *words, "trainer.progress=false"]) == 0
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert isinstance(load_model(tmp_path / name / "model"), TextEncoder)
        return {key: value for line in lines for key, value in line.items()}

    mined = ("data.path=mined.jsonl", "model.max_length=32", "trainer.mixed_precision=no")
    assert train("mined_negatives", *mined)["step"] == 2, "8 queries in batches of 4"
    rows = [
        f"{' '.join(words[:5])},{' '.join(words)}"
        for words in map(str.split, toy.texts(60))
        if len(words) > 5
    ]
    Path("pairs.csv").write_text("\n".join(["question,answer", *rows]))
    assert train("static", "trainer.held_out=0", base="words")["step"] == 5 * (len(rows) // 4)
    assert type(SentenceTransformer(str(tmp_path / "static" / "model"))[0]) is StaticEmbedding
    paths = (f"data.path={data}", f"evaluator.path={data}")
    assert "accuracy@8" in train("scifact_matryoshka", *paths, "objective.dims=[8, 32]")
    changes = ("trainer.epochs=10", "trainer.evaluate_every=1", "trainer.learning_rate=1e-9")
    summary = train("papers_careful", *paths, *changes)
    assert summary["step"] <= 8  # of 20: nothing gains at this rate, and the patience is 3


@pytest.mark.slow
def test_the_recipe_of_a_decoder_runs_on_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Qwen3 from scratch in place of the one named; the folder has its adapters merged, in
    bfloat16."""
    pytest.importorskip("peft", reason="peft is not installed: pip install 'dualenc[lora]'")
    from sentence_transformers import SentenceTransformer

    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": f"what is {number}", "answer": f"{number} is a number"} for number in range(20)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer([text for row in rows for text in row.values()], vocab_size=300)
    tokenizer.padding_side = "left"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16, **sizes}
    TextEncoder(config=config, tokenizer=tokenizer, pooling="last").save(tmp_path / "base")
    changes = (
        "data.path=pairs.jsonl",
        "model.name=base",
        "trainer.epochs=2",
        "trainer.progress=false",
    )
    changes += ("trainer.batch_size=8", "trainer.chunk_size=4")
    assert main(["train", str(FOLDER / "decoder_lora.yaml"), *changes]) == 0
    folder = tmp_path / "runs" / "decoder_lora" / "model"
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {
        torch.bfloat16
    }
    model = load_model(folder)
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    assert theirs.prompts["query"].startswith("Instruct: ")
    questions = [row["question"] for row in rows]
    np.testing.assert_allclose(
        model.encode_query(questions), theirs.encode_query(questions), atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("has_classes", [True, False])
def test_the_recipe_of_a_folder_of_images_runs_with_its_next_commands(
    has_classes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With small random weights in place of the published ones."""
    pytest.importorskip("imagecorruptions", reason="pip install 'dualenc[corruptions]'")
    pytest.importorskip("matplotlib", reason="pip install 'dualenc[plots]'")
    monkeypatch.chdir(tmp_path)
    save_classes(Path("pics"), per_class=8)
    if not has_classes:
        for path in list(Path("pics").rglob("*.png")):
            path.rename(Path("pics") / f"{path.parent.name}-{path.name}")
    changes = ("model.backbone=resnet10t", "model.pretrained=false", "model.image_size=32")
    changes += ("model.augment.init_args.size=32", "trainer.batch_size=8", "trainer.epochs=1")
    changes += ("trainer.num_workers=0", "trainer.progress=false", "data.path=pics")
    assert main(["train", str(FOLDER / "image_folder.yaml"), *changes]) == 0
    printed = capsys.readouterr().out
    assert ("knn_accuracy" if has_classes else "other_view_top1") in printed
    commands = [
        shlex.split(line.partition("dualenc ")[2])
        for line in printed.splitlines()
        if line.startswith("next:")
    ]
    assert [words[0] for words in commands] == ["report", "evaluate", "index"]
    assert commands[1][1] == ("probe" if has_classes else "corrupted")
    # Fewer corruptions than all: each takes as long as the training.
    commands[1] += [] if has_classes else ["--corruptions", "contrast,saturate"]
    for words in commands:
        assert main(words) == 0
    assert len(Index.open("runs/image_folder/index")) == 24


@pytest.mark.slow
def test_the_recipe_of_a_folder_of_captions_runs_on_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_classes(Path("photos"), per_class=8)
    for path in list(Path("photos").rglob("*.png")):
        path.with_suffix(".txt").write_text(f"a {path.parent.name} picture\nnumber {path.stem}\n")
    toy.image_text_model(tmp_path / "clip")
    changes = ("model.name=clip", "model.pretrained=null", "trainer.batch_size=8")
    changes += ("trainer.num_workers=0", "trainer.progress=false", "data.path=photos")
    assert main(["train", str(FOLDER / "image_folder_captions.yaml"), *changes]) == 0
    printed = capsys.readouterr().out
    assert "mean_recall" in printed
    (index,) = [line for line in printed.splitlines() if line.startswith("next:  dualenc index")]
    assert main(shlex.split(index.partition("dualenc ")[2])) == 0
