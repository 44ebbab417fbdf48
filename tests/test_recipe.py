"""Recipes: sections, links, overrides, and errors that name the nearest valid key."""

import json

import pytest
import yaml

from dualenc import cli
from dualenc.errors import DualencError
from dualenc.recipe import make_recipe, read_recipe
from dualenc.training.run_log import read_metrics

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BEIR folder of 16 queries and documents, and a tokenizer."""
    from dualenc.encoders import train_tokenizer

    folder = tmp_path_factory.mktemp("beir")
    (folder / "qrels").mkdir()
    texts = {"queries": lambda i: f"{WORDS[i]} what", "corpus": lambda i: f"{WORDS[i]} {WORDS[i]} that is"}
    for name, text in texts.items():
        rows = [{"_id": f"{name[0]}{i}", "text": text(i)} for i in range(16)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\tc{i}\t1" for i in range(16))]
    (folder / "qrels" / "train.tsv").write_text("\n".join(lines))
    train_tokenizer([f"{word} what that is" for word in WORDS] * 3, 60).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def settings(folder, tmp_path):
    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {
        "model": {
            "class_path": "TextEncoder",
            "init_args": {"config": {**bert, "intermediate_size": 16}, "tokenizer": str(folder / "tokenizer")},
        },
        "data": {"class_path": "BeirPairs", "init_args": {"path": str(folder)}},
        "objective": {"class_path": "SogCLR", "init_args": {"temperature": 0.1}},
        "evaluator": {"class_path": "RetrievalEvaluator", "init_args": {"path": str(folder), "split": "train"}},
        "trainer": {"output": str(tmp_path / "run"), "batch_size": 4, "progress": False, "log_every": 2},
    }


@pytest.fixture
def recipe(settings, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_parts_know_of_one_another_through_links(settings):
    settings["batching"] = {"class_path": "RandomBatches"}
    settings["trainer"]["seed"] = 5
    parts = make_recipe(settings).build()
    assert type(parts.objective).__name__ == "SogCLR"
    assert (parts.objective.num_left, parts.objective.num_right, parts.objective.views) == (16, 16, False)
    assert (parts.batching.num_pairs, parts.batching.batch_size, parts.batching.seed) == (16, 4, 5)
    assert parts.objective.seed == 5
    assert parts.evaluator.primary == "ndcg@10"


def test_first_weights_follow_the_seed(settings):
    def first_weight():
        return next(make_recipe(settings).build().model.parameters()).sum().item()

    assert first_weight() == first_weight()
    before = first_weight()
    settings["trainer"]["seed"] = 1
    assert first_weight() != before


def test_full_class_paths_and_nested_classes(settings, folder):
    pairs = {"class_path": "BeirPairs", "init_args": {"path": str(folder)}}
    settings["objective"] = {"class_path": "dualenc.objectives.DCL"}
    settings["evaluator"]["init_args"] = {"pairs": pairs}
    parts = make_recipe(settings).build()
    assert type(parts.objective).__name__ == "DCL"
    assert len(parts.evaluator.collection.queries) == 16


def test_overrides(recipe):
    changes = ["trainer.epochs=3", "trainer.learning_rate=1e-3", "objective.temperature=0.2", "evaluator=null"]
    resolved = read_recipe(recipe, changes).settings
    assert (resolved["trainer"]["epochs"], resolved["trainer"]["learning_rate"]) == (3, 1e-3)
    assert resolved["objective"]["init_args"]["temperature"] == 0.2
    assert resolved["evaluator"] is None


def test_another_class_drops_the_arguments_of_the_one_before(recipe):
    resolved = read_recipe(recipe, ["objective.gamma=0.3", "objective.class_path=HCL"]).settings
    assert resolved["objective"]["class_path"] == "dualenc.objectives.HCL"
    assert "gamma" not in resolved["objective"]["init_args"]


def test_the_resolved_recipe_makes_the_same_recipe(recipe):
    resolved = read_recipe(recipe, ["trainer.save_every=null"]).settings
    assert resolved["trainer"]["save_every"] is None
    assert make_recipe(resolved).settings == resolved


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rat=1", r"unknown key trainer\.learning_rat \(did you mean learning_rate\?\)"),
        ("objective.temprature=1", r"unknown key objective\.init_args\.temprature \(did you mean temperature\?\)"),
        ("objectiv.temperature=1", r"no section 'objectiv' \(did you mean objective\?\)"),
        ("objective.class_path=SogCRL", r"no class 'SogCRL' in dualenc.objectives \(did you mean SogCLR\?\)"),
        ("objective.class_path=nowhere.SogCLR", "cannot import nowhere"),
        ("objective.num_left=3", "objective.init_args.num_left is filled in by the training; leave it out"),
        ("trainer.epochs=many", r"trainer.epochs: Expected a int. Given value: many"),
        ("objective.temperature=warm", "objective.temperature: .*warm"),
        ("data.path=", "data"),
        ("trainer.epochs", "is no override; write section.key=value"),
        ("data=null", "section 'data' is missing"),
        ("data.class_path=TablePairs", "data: .*required"),
        ("objective.init_args.x.class_path=y", "unknown key objective.init_args.x"),
    ],
)
def test_mistakes_name_the_key_in_one_line(recipe, override, message):
    with pytest.raises(DualencError, match=message) as raised:
        read_recipe(recipe, [override])
    assert "\n" not in str(raised.value)


def test_files_that_are_no_recipe(tmp_path):
    for text, message in (("a: [", "not valid YAML"), ("- 1", "holds no sections"), ("x: 1", "unknown section")):
        path = tmp_path / "broken.yaml"
        path.write_text(text)
        with pytest.raises(DualencError, match=message):
            read_recipe(path)
    with pytest.raises(DualencError, match="cannot be read"):
        read_recipe(tmp_path / "missing.yaml")


def test_the_command_trains_and_resumes(recipe, tmp_path, capsys):
    assert cli.main(["train", recipe, "trainer.max_steps=3", "trainer.save_every=2"]) == 0
    told = capsys.readouterr().out
    assert "3 steps in" in told
    assert "ndcg@10" in told
    assert "dualenc index" in told
    run = tmp_path / "run"
    assert read_recipe(run / "recipe.yaml").settings["trainer"]["max_steps"] == 3
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line] == [2, 3]
    assert cli.main(["train", recipe, "trainer.max_steps=3", "trainer.save_every=2", "--resume"]) == 0


def test_the_command_ends_with_code_2_and_one_line(recipe, capsys):
    assert cli.main(["train", recipe, "trainer.epoch=3"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "did you mean epochs?" in told
    assert cli.main(["train", recipe, "objective.class_path=DCL", "trainer.max_steps=2"]) == 0
    assert cli.main(["train", recipe, "trainer.max_steps=2", "--resume"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "another recipe" in told
    assert "objective was 'DCL" in told
