"""Recipes: sections, links, overrides, and errors that name the nearest valid key."""

import importlib
import itertools
import pkgutil
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from dualenc import cli
from dualenc.commands.train import next_commands
from dualenc.errors import DualencError
from dualenc.recipe.check import FILLED, PACKAGES, parameters
from dualenc.recipe.resolve import SECTIONS, _read_yaml, make_recipe, read_recipe
from dualenc.recipe.yaml_files import dump_recipe
from dualenc.training.log import read_metrics
from dualenc.training.trainer import Trainer
from tests.helpers import toy
from tests.helpers.fakes import tiny_pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BEIR folder of 16 queries and documents, and a tokenizer."""
    from dualenc.encoders import train_tokenizer

    folder = toy.write_beir(
        tmp_path_factory.mktemp("beir") / "toy", documents=32, queries=16, split="train"
    )
    train_tokenizer([" ".join(toy.WORDS)] * 3, 300).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def settings(folder, tmp_path):
    bert = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return {
        "model": {
            "class_path": "TextEncoder",
            "init_args": {
                "config": {**bert, "intermediate_size": 16},
                "tokenizer": str(folder / "tokenizer"),
            },
        },
        "data": {"class_path": "BeirPairs", "init_args": {"path": str(folder)}},
        "objective": {"class_path": "SogCLR", "init_args": {"temperature": 0.1}},
        "evaluator": {
            "class_path": "RetrievalEvaluator",
            "init_args": {"path": str(folder), "split": "train"},
        },
        "trainer": {
            "output": str(tmp_path / "run"),
            "batch_size": 4,
            "progress": False,
            "log_every": 2,
        },
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
    assert type(parts["objective"]).__name__ == "SogCLR"
    assert (
        parts["objective"].num_left,
        parts["objective"].num_right,
        parts["objective"].views,
    ) == (16, 32, False)
    assert (parts["batching"].num_pairs, parts["batching"].batch_size, parts["batching"].seed) == (
        16,
        4,
        5,
    )
    assert parts["objective"].seed == 5
    assert parts["evaluator"].primary == "ndcg@10"


@pytest.mark.slow
def test_first_weights_follow_the_seed(settings):
    def first_weight():
        return next(make_recipe(settings).build()["model"].parameters()).sum().item()

    assert first_weight() == first_weight()
    before = first_weight()
    settings["trainer"]["seed"] = 1
    assert first_weight() != before


def test_full_class_paths_and_nested_classes(settings, folder):
    pairs = {"class_path": "BeirPairs", "init_args": {"path": str(folder)}}
    settings["objective"] = {"class_path": "dualenc.objectives.DCL"}
    settings["evaluator"]["init_args"] = {"pairs": pairs}
    parts = make_recipe(settings).build()
    assert type(parts["objective"]).__name__ == "DCL"
    assert len(parts["evaluator"].collection.queries) == 16


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("model.query_prompt", "search for ", "search for "),
        ("model.query_prompt", "query: ", "query: "),
        ("model.query_prompt", "'3'", "3"),
        ("model.query_prompt", "null", None),
        ("evaluator.path", "a #b", "a #b"),
        ("evaluator.path", "*a", "*a"),
        ("evaluator.path", "007", "007"),
        ("trainer.max_steps", "", None),
        ("trainer.max_steps", "3 # three", 3),
        ("trainer.mixed_precision", "no", "no"),
        ("trainer.freeze", "left.*", "left.*"),
        ("trainer.learning_rate", "1e-3", 1e-3),
    ],
)
def test_an_override_is_yaml_or_text_as_typed(recipe, tmp_path, key, text, value):
    section, name = key.split(".")
    resolved = read_recipe(recipe, [f"{key}={text}"]).settings
    assert resolved[section].get("init_args", resolved[section])[name] == value
    (tmp_path / "again.yaml").write_text(dump_recipe(resolved), encoding="utf-8")
    assert read_recipe(tmp_path / "again.yaml").settings == resolved


def test_folders_below_home(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert (
        read_recipe(recipe, ["trainer.output=~/runs"]).settings["trainer"]["output"]
        == "/somewhere/runs"
    )


def test_an_override_within_an_earlier_one(recipe):
    changes = [
        "model.config={model_type: bert}",
        "model.config.hidden_size=8",
        "model.config.hidden_act=gelu",
    ]
    config = read_recipe(recipe, changes).settings["model"]["init_args"]["config"]
    assert config == {"model_type": "bert", "hidden_size": 8, "hidden_act": "gelu"}


@pytest.mark.parametrize(
    "objective", [{"class_path": "SogCLR", "init_args": None}, {"class_path": "SogCLR"}]
)
def test_an_override_of_a_class_without_arguments(settings, tmp_path, objective):
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(settings | {"objective": objective}))
    resolved = read_recipe(tmp_path / "short.yaml", ["objective.gamma=0.3"]).settings
    assert resolved["objective"]["init_args"]["gamma"] == 0.3


def test_another_class_drops_the_arguments_of_the_one_before(recipe, settings, caplog):
    settings["objective"] = {
        "class_path": "SogCLR",
        "init_args": {"temperature": 0.2, "gamma": 0.5, "positive_in_softmax": True},
    }
    Path(recipe).write_text(yaml.safe_dump(settings))
    changes = ["objective.class_path=ISogCLR", "objective.gamma=0.9"]
    assert read_recipe(recipe, changes).settings["objective"]["init_args"]["gamma"] == 0.9
    assert caplog.messages == [
        "ISogCLR starts from its defaults: objective.positive_in_softmax=false, not true; "
        "objective.temperature=0.07, not 0.2"
    ]
    caplog.clear()
    read_recipe(recipe, ["objective.class_path=SogCLR", "objective.gamma=0.9"])
    assert not caplog.messages
    resolved = read_recipe(recipe, ["objective.class_path=HCL", "evaluator=null"]).settings
    assert resolved["evaluator"] is None
    assert resolved["objective"]["class_path"] == "dualenc.objectives.HCL"
    assert resolved["objective"]["init_args"]["temperature"] == 0.07


def test_arguments_and_classes_may_be_overridden_in_any_order(recipe):
    changes = ["objective.class_path=Matryoshka", "objective.objective={class_path: HCL}"]
    changes += ["objective.objective.init_args.temperature=0.02", "objective.dims=[8]"]
    expected = read_recipe(recipe, changes).settings["objective"]
    assert expected["init_args"]["objective"]["init_args"]["temperature"] == 0.02
    assert read_recipe(recipe, changes[::-1]).settings["objective"] == expected


REFUSALS = [
    ("trainer.lr=1", r"trainer\.lr is not a key of Trainer \(did you mean learning_rate\?\)"),
    ("objective.temprature=1", r"temprature is not a key of SogCLR \(did you mean temperature\?\)"),
    (
        "objective.class_path=SogCRL",
        r"is 'SogCRL', which is not a class of type Objective in dualenc \(did you mean SogCLR\?\)",
    ),
    (
        "objective.class_path=my_losses.clip.SogCLR",
        "is 'my_losses.clip.SogCLR', outside dualenc; "
        "pass --allow-module my_losses if you trust its code",
    ),
    (
        "objective.class_path=dualenc.nowhere.SogCLR",
        r"'dualenc.nowhere.SogCLR', which is not a class of type Objective .* "
        r"\(did you mean SogCLR\?\)",
    ),
    (
        (
            "objective={class_path: Matryoshka, init_args: {dims: [], objective: {class_path: DCL, "
            "init_args: {seed: 3}}}}"
        ),
        "objective.objective.seed is filled in by the training",
    ),
    ("objective.num_left=3", "objective.num_left is filled in by the training"),
    ("objective.temperature=", "objective.temperature is None; it must be a valid number"),
    ("trainer.epochs=many", "trainer.epochs.*many"),
    ("trainer.epochs=true", "trainer.epochs is True; it must be a valid integer"),
    ("trainer.epochs=3.7", r"trainer.epochs.*3\.7"),
    ("trainer.overwrite=1", "trainer.overwrite.*bool"),
    ("trainer.mixed_precision=bf8", "trainer.mixed_precision is .bf8.;.*bf16"),
    ("trainer.freeze=[3]", r"trainer.freeze is \[3\]; it must be a valid string"),
    ("objective.temperature=warm", "objective.*temperature.*warm"),
    ("data=3", r"data is 3; it must name a class of type PairDataset by class_path"),
    ("data.init_args=3", "data has arguments 3; give those of BeirPairs by name"),
    ("data=null", "data is None; it must name a class of type PairDataset"),
    ("data={}", "data is {}; it must name a class of type PairDataset by class_path"),
    ("data.class_path=TablePairs", "data.path is missing; TablePairs needs it"),
    ("trainer.epochs", "is not a valid override; expected section.key=value"),
    ("objective.proposals=all", r"objective\.proposals is not a key of SogCLR"),
    (
        "objective={class_path: EMC2, init_args: {proposals: all}}",
        "objective.proposals is 'all'; it must be 'batch' or a valid integer",
    ),
    (
        "data={class_path: PairDataset, init_args: {left_items: {class_path: BeirPairs}}}",
        "data.left_items.class_path is 'BeirPairs', which is not a class of type Items in dualenc",
    ),
    # Of sources within a section:
    (
        "data={class_path: Mixture, init_args: {sources: {faq: {class_path: BeirPairs}}}}",
        "data.sources.faq.path is missing; BeirPairs needs it",
    ),
    (
        "data={class_path: Mixture, init_args: {sources: {faq: x}}}",
        "data.sources.faq is 'x'; it must name a class of type PairDataset",
    ),
    (
        "data={class_path: Mixture, init_args: {sources: [faq]}}",
        r"data.sources is \['faq'\]; it must name several",
    ),
    (
        "evaluator.pairs={class_path: BeirPairs, path: x}",
        "evaluator.pairs.path is an argument of BeirPairs; write evaluator.pairs.init_args.path",
    ),
    ("evaluator.pairs={class_path: BeirPairs, x: x}", "evaluator.pairs.x is not a key of a class"),
    ("trainer.temperature=1", r"trainer\.temperature is not a key of Trainer$"),
    (
        "trainer.freeze=[!!binary aGk=]",
        "trainer.freeze is not plain data .*bytes.*; give strings, numbers",
    ),
]


@pytest.mark.parametrize("base", FILLED)
def test_arguments_taken_from_the_training_exist(base):
    [section] = [path for path in SECTIONS.values() if path.endswith(f".{base}")]
    kind = pkgutil.resolve_name(section)
    packages = [vars(importlib.import_module(package)).values() for package in PACKAGES]
    kinds = [each for each in itertools.chain(*packages) if isinstance(each, type)]
    known = set().union(*(parameters(each) for each in kinds if issubclass(each, kind)))
    assert set(FILLED[base]) <= known


def test_equal_names_are_taken_in_one_way():
    """The parts of a recipe get them by name."""
    data = tiny_pairs(8)
    trainer = Trainer(output="run", batch_size=7, seed=6)
    taken = {}
    for takes in FILLED.values():
        for name, take in takes.items():
            assert taken.setdefault(name, take(trainer, data)) == take(trainer, data)


@pytest.mark.parametrize(("override", "message"), REFUSALS)
def test_mistakes_name_the_key_in_one_line(recipe, override, message):
    with pytest.raises(DualencError, match=message):
        read_recipe(recipe, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read .*line 1.*; name a recipe in YAML"),
        ("[" * 20_000, "cannot be read"),
        ("- 1", "is not a mapping of sections"),
        ("x: 1", "x is not a key of a recipe"),
        ("data:\n  path: a\n  path: a\n", "the key path is given twice in line 2"),
        ("{true: a, 1: b}", "is given twice in line 1"),
        ("model: &a {x: *a}", "aliases .* are not allowed"),
        ("é".encode("latin-1"), "cannot be read"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DualencError, match=message):
        read_recipe(path)
    with pytest.raises(
        DualencError, match="no such file; write it first: dualenc recipe text-pairs"
    ):
        read_recipe(tmp_path / "missing.yaml")
    # The own file, and no command that would write over it.
    with pytest.raises(DualencError, match=r"no such file \(did you mean broken.yaml\?\)$"):
        read_recipe(tmp_path / "broken.yml")


@pytest.fixture
def mixture(settings, folder):
    def source():
        return {"class_path": "BeirPairs", "init_args": {"path": str(folder)}}

    sources = {"first": source(), "second": source()}
    settings["data"] = {
        "class_path": "Mixture",
        "init_args": {"sources": sources, "weights": {"second": 2}},
    }
    return settings


@pytest.mark.slow
def test_several_sources_in_one_recipe(mixture, tmp_path, folder):
    path = tmp_path / "mixture.yaml"
    path.write_text(yaml.safe_dump(mixture))
    changes = [
        f"data.sources.first.init_args.path={folder}",
        "data.weights.first=0.5",
        "data.left_prompts.second=q: ",
        "objective.class_path=DCL",
    ]
    recipe = read_recipe(path, changes)
    assert make_recipe(recipe.settings).settings == recipe.settings
    parts = recipe.build()
    assert parts["data"].source_weights == {"first": 0.5, "second": 2.0}
    assert parts["data"][20].left.startswith("q: ")
    assert (parts["objective"].num_left, parts["objective"].num_right) == (32, 64)
    assert (
        parts["trainer"].fit(parts["model"], parts["data"], parts["objective"]).steps
        == (8 + 32) // 4
    )


def test_the_same_data_in_another_folder_is_resumed_and_other_data_is_not(
    mixture, tmp_path, folder
):
    path, moved = tmp_path / "mixture.yaml", tmp_path / "moved"
    path.write_text(yaml.safe_dump(mixture | {"evaluator": None}))
    shutil.copytree(folder, moved)
    changes = ["trainer.max_steps=1", f"data.sources.first.init_args.path={moved}"]
    read_recipe(path, changes[:1]).train()
    assert read_recipe(path, changes).train(resume=True).steps == 1
    queries = moved / "queries.jsonl"
    queries.write_text(queries.read_text().replace("a", "o"))
    with pytest.raises(DualencError, match=r"other data: data\.first\.left_items was"):
        read_recipe(path, changes).train(resume=True)


def test_plain_values_are_those_of_yaml_1_2(tmp_path):
    """In YAML 1.1, as PyYAML reads it, `no` is false, 1e-3 is text, 1:30 is 90, 010 is 8 and
    2001-01-01 a date."""
    path = tmp_path / "values.yaml"
    path.write_text(
        "{a: no, b: 1e-3, c: 1:30, d: 010, e: 2001-01-01, f: true, g: ~, h: -7, i: .5, j: 1_0, "
        "k: 0, l: +1.5e3}"
    )
    values = {"a": "no", "b": 1e-3, "c": "1:30", "d": "010", "e": "2001-01-01", "f": True}
    values |= {"g": None, "h": -7, "i": 0.5, "j": "1_0", "k": 0, "l": 1500.0}
    assert _read_yaml(path) == values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.gamma=7", "objective.gamma is 7"),
        ("trainer.seed=-1", "trainer.seed is -1"),
        ("data.path=nowhere/beir", "data.path: nowhere/beir: "),
        (
            "evaluator={class_path: RetrievalEvaluator, init_args: {pairs: {class_path: TablePairs,"
            " init_args: {path: nowhere/dev.csv, left_column: a, right_column: b}}}}",
            "evaluator.pairs.path: nowhere/dev.csv: ",
        ),
        (
            "data={class_path: Mixture, init_args: {sources: "
            "{faq: {class_path: BeirPairs, init_args: {path: nowhere/faq}}}}}",
            "data.sources.faq.path: nowhere/faq: ",
        ),
        (
            "evaluator={class_path: RetrievalEvaluator, init_args: {}}",
            "evaluator: RetrievalEvaluator: the data is missing or given twice; give either path",
        ),
    ],
)
def test_what_a_part_refuses_is_one_line_with_its_key(recipe, override, message, capsys, tmp_path):
    assert cli.main(["train", recipe, override]) == 2
    line = capsys.readouterr().err
    assert f"recipe.yaml: {message}" in line
    assert line.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_can_be_resumed_and_ends_with_commands_that_can_be_pasted(
    recipe, folder, tmp_path, capsys
):
    words = ["train", recipe, "trainer.max_steps=3", "trainer.save_every=2"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    run = tmp_path / "run"
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line] == [
        2,
        3,
    ]
    lines = [line.removeprefix("next:  ") for line in shown if line.startswith("next:")]
    assert lines == [
        f"dualenc report {run}",
        f"dualenc evaluate retrieval {run}/model {folder} --split train",
        f"dualenc index {run}/model {folder} --out {run}/index",
    ]
    for line in lines:
        out = ["--out", str(tmp_path / "evaluation")] if "evaluate" in line else []
        assert cli.main([*line.split()[1:], *out]) == 0
    assert cli.main([*words, "--resume"]) == 0


@pytest.mark.parametrize("progress", ["true", "false"])
def test_the_command_line_prints_the_lines_of_a_run_on_stderr(recipe, capfd, progress):
    words = ["train", recipe, "trainer.epochs=1", "trainer.max_steps=1"]
    assert cli.main([*words, f"trainer.progress={progress}"]) == 0
    line = "max_steps=1 overrides epochs=1"
    printed = capfd.readouterr()
    assert printed.err.splitlines().count(line) == 1
    assert line not in printed.out


RETRIEVAL = {"class_path": "dualenc.training.evaluators.RetrievalEvaluator"}
TABLE = {
    "class_path": "dualenc.data.TablePairs",
    "init_args": {"path": "my data.csv", "right_column": "b"},
}
MINED = {"class_path": "dualenc.data.MinedPairs", "init_args": {"path": "mined.jsonl"}}
DEV = {
    "path": "dev.csv",
    "left_column": "a",
    "right_column": "b",
    "right_modality": "text",
    "quotes": False,
}
DEV_OPTIONS = "dev.csv --left-column a --right-column b --right-modality text --no-quotes"
ON_DEV = RETRIEVAL | {"init_args": {"path": "a", "split": "dev"}}
HELD_OUT = RETRIEVAL | {"init_args": {"pairs": TABLE | {"init_args": DEV}}}


VIEWS = TABLE | {"init_args": {"path": "t.csv", "image_column": "photo", "label_column": "kind"}}
KNN = {
    "class_path": "KNNEvaluator",
    "init_args": {"train": VIEWS, "test": VIEWS | {"init_args": {"path": "v.csv"}}},
}


def with_arguments(**arguments):
    return TABLE | {
        "init_args": {"path": "d", "left_column": "a", "right_column": "b", **arguments}
    }


@pytest.mark.parametrize(
    ("kind", "data", "evaluator", "evaluated", "indexed"),
    [
        ("query-document", TABLE, None, "retrieval TEST-DATA", "'my data.csv' --text-column b"),
        (
            "query-document",
            TABLE,
            HELD_OUT,
            f"retrieval {DEV_OPTIONS}",
            "'my data.csv' --text-column b",
        ),
        ("query-document", MINED, ON_DEV, "retrieval a --split dev", "DOCUMENTS"),
        (
            "query-document",
            with_arguments(split="pairs"),
            None,
            "retrieval TEST-DATA",
            "d --split pairs --text-column b",
        ),
        (
            "query-document",
            with_arguments(quotes=True),
            None,
            "retrieval TEST-DATA",
            "d --quotes --text-column b",
        ),
        (
            "query-document",
            with_arguments(quotes=False),
            None,
            "retrieval TEST-DATA",
            "d --no-quotes --text-column b",
        ),
        ("vector", with_arguments(), None, "retrieval TEST-DATA", "d --vector-column b"),
        ("image", VIEWS, KNN, "probe v.csv --train t.csv", "t.csv --image-column photo"),
        (
            "image-text",
            with_arguments(path="c.csv"),
            None,
            "image-text c.csv --left-column a --right-column b",
            "c.csv --image-column a --id-column a",
        ),
        (
            "image-text",
            with_arguments(path="c.parquet", split="train"),
            None,
            "image-text c.parquet --left-column a --right-column b",
            "c.parquet --image-column a",
        ),
    ],
)
def test_next_commands_name_the_data_that_a_command_can_read(
    kind, data, evaluator, evaluated, indexed, tmp_path
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "dualenc.json").write_text(f'{{"kind": "{kind}"}}')
    words = next_commands(tmp_path / "model", {"data": data, "evaluator": evaluator})
    lines = [shlex.join(each) for each in words]
    task, _, options = evaluated.partition(" ")
    assert lines[1] == f"evaluate {task} {tmp_path}/model {options}"
    assert lines[2] == f"index {tmp_path}/model {indexed} --out {tmp_path}/index"


def test_the_only_split_of_a_file_is_not_named(tmp_path):
    (tmp_path / "dualenc.json").write_text('{"kind": "query-document"}')
    (tmp_path / "dev.csv").write_text("a,b\n1,2\n")
    for path, options in ((tmp_path / "dev.csv", ""), (tmp_path, " --split train")):
        dev = {"path": str(path), "split": "train"}
        evaluator = RETRIEVAL | {"init_args": {"pairs": TABLE | {"init_args": dev}}}
        words = next_commands(tmp_path, {"data": TABLE, "evaluator": evaluator})
        assert shlex.join(words[1]) == f"evaluate retrieval {tmp_path} {path}{options}"


@pytest.mark.parametrize(
    ("metric", "evaluated"),
    [
        ("knn_accuracy", "probe {} pics --label-column kind"),
        ("other_view_top1", "corrupted {} pics --limit 100"),
        ("", "probe {} TEST-DATA"),
    ],
)
def test_the_next_evaluation_of_images_depends_on_their_classes(metric, evaluated, tmp_path):
    pytest.importorskip("imagecorruptions")
    (tmp_path / "dualenc.json").write_text('{"kind": "image"}')
    views = TABLE | {"init_args": {"path": "pics", "label_column": None}}
    if metric == "knn_accuracy":
        views["init_args"]["label_column"] = "kind"
    words = next_commands(tmp_path, {"data": views, "evaluator": None}, [metric])
    assert shlex.join(words[1]) == "evaluate " + evaluated.format(tmp_path)
