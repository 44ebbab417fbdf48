"""A recipe is untrusted: whatever it names, nothing outside dualenc is imported, called or opened before it is refused.

Each payload would leave a canary file behind, or import a module that does, if it had its way.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualenc import cli
from dualenc.errors import DualencError
from dualenc.recipe import make_recipe, read_recipe
from dualenc.recipe_check import Check, argument_types

EVIL = "dualenc_evil_canary"
"""A module that exists in each test, and writes the canary when it is imported."""


class Canary:
    """Where a payload would show that it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "canary"
        self.shell = f"touch {self.path}"
        self.python = f"open({str(self.path)!r}, 'w')"

    def assert_silent(self) -> None:
        assert not self.path.exists()
        assert EVIL not in sys.modules


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Canary:
    found = Canary(tmp_path)
    body = f"{found.python}\nclass X:\n    def __init__(self, **arguments): pass\ndef run(*a, **k): pass\n"
    (tmp_path / f"{EVIL}.py").write_text(body)
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump({"class_path": f"{EVIL}.X"}))
    (tmp_path / "tokenizer.yaml").write_text(yaml.safe_dump({"class_path": f"{EVIL}.X"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(EVIL, None)  # of a test that failed
    return found


def recipe() -> dict[str, Any]:
    return {
        "model": {"class_path": "ImageEncoder", "init_args": {"image_size": 32}},
        "data": {"class_path": "TableViews", "init_args": {"path": "nowhere.parquet"}},
        "objective": {"class_path": "DCL"},
        "trainer": {"output": "run", "progress": False},
    }


def call(function: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": function, "init_args": arguments}


SHELL = "{shell}"
"""Replaced by a command that makes the canary."""
CODE = "{python}"
"""Replaced by a Python expression that makes it."""
TEXT = {"class_path": "TextEncoder", "init_args": {"config": {"model_type": "bert"}, "tokenizer": "t"}}


def text_with(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "TextEncoder", "init_args": {**TEXT["init_args"], **arguments}}  # type: ignore[dict-item]


# place in the recipe: the payload
PAYLOADS: dict[str, tuple[str, Any]] = {
    "os.system as augmentation": ("model.init_args.augment", call("os.system", command=SHELL)),
    "os.popen": ("model.init_args.augment", call("os.popen", cmd=SHELL)),
    "posix.system": ("model.init_args.augment", call("posix.system", command=SHELL)),
    "subprocess.Popen": ("model.init_args.augment", call("subprocess.Popen", args=SHELL, shell=True)),
    "timeit.timeit": ("model.init_args.augment", call("timeit.timeit", stmt=CODE, number=1)),
    "builtins.eval": ("model.init_args.augment", call("builtins.eval", source=CODE)),
    "runpy.run_path": ("model.init_args.augment", call("runpy.run_path", path_name=f"{EVIL}.py")),
    "importlib.import_module": ("model.init_args.augment", call("importlib.import_module", name=EVIL)),
    "torch.load": ("model.init_args.augment", call("torch.load", f="evil.pt", weights_only=False)),
    "pickle.Unpickler": ("model.init_args.augment", call("pickle.Unpickler", file="evil.pt")),
    "functools.partial": ("model.init_args.augment", call("functools.partial", func="os.system")),
    "numpy.load": ("data.init_args.path", call("numpy.load", file="evil.npy", allow_pickle=True)),
    "own module as objective": ("objective.class_path", f"{EVIL}.X"),
    "own module as model": ("model", call(f"{EVIL}.X")),
    "own module as batching": ("batching", call(f"{EVIL}.X")),
    "own module as evaluator": ("evaluator", call(f"{EVIL}.X")),
    "a module as section": ("evaluator.class_path", EVIL),
    "two levels down": (
        "evaluator",
        call("RetrievalEvaluator", pairs=call("TablePairs", path="x", left_column=call(f"{EVIL}.X"))),
    ),
    "in evaluator.pairs": ("evaluator", call("RetrievalEvaluator", pairs=call(f"{EVIL}.X"))),
    "in a list": ("model.init_args.mean", [0.5, call(f"{EVIL}.X"), 0.5]),
    "in a dict": ("model.init_args.backbone_args", {"act_layer": call(f"{EVIL}.X")}),
    "deep in a dict": ("model.init_args.backbone_args", {"a": {"b": [{"c": call("os.system", command=SHELL)}]}}),
    "in a configuration": ("model", text_with(config={"model_type": call(f"{EVIL}.X")})),
    "as text that is YAML": ("model.init_args.augment", "{class_path: " + EVIL + ".X}"),
    "as text in a dict": ("model.init_args.backbone_args", "{class_path: " + EVIL + ".X}"),
    "as the name of a function": ("model.init_args.augment", "os.system"),
    "as the name of a function of ours": ("model.init_args.augment", f"{EVIL}.run"),
    "as a file to include": ("model.init_args.augment", "inner.yaml"),
    "as a section to include": ("objective", "inner.yaml"),
    "as a path in a section": ("objective.__path__", "inner.yaml"),
    "dict_kwargs": ("objective.dict_kwargs", {"x": call(f"{EVIL}.X")}),
    "trainer": ("trainer.class_path", f"{EVIL}.X"),
    "trainer's output": ("trainer.output", call(f"{EVIL}.X")),
    "a number": ("trainer.epochs", call(f"{EVIL}.X")),
    "through a module of ours": ("model.init_args.augment", call("dualenc.cli.os.system", command=SHELL)),
    "an import of a module of ours": ("model.init_args.augment", call("dualenc.training.checkpoint.Path")),
    "a function of ours": ("model.init_args.augment", call("dualenc.files.remove", path="keep")),
    "a class of ours for another place": ("model.init_args.augment", call("dualenc.data.TableViews", path="x")),
    "the command line of ours": ("objective.class_path", "dualenc.__main__.main"),
    "a method of ours": ("model.class_path", "dualenc.encoders.ImageEncoder.from_folder"),
    "a private name": ("objective.class_path", "dualenc.objectives.__loader__"),
    "a path that is no name": ("objective.class_path", "../evil.X"),
    "a class path that is no text": ("objective.class_path", ["os", "system"]),
    "the interpolation of other tools": ("trainer.batch_size", "${oc.env:HOME}"),
    "a tracker": ("trainer.tracker", call(f"{EVIL}.X")),
    "an optimizer": ("trainer.optimizer", f"{EVIL}.X"),
}


def placed(place: str, payload: Any, canary: Canary) -> dict[str, Any]:
    """The recipe with a payload in place, its placeholders filled in."""
    text = json.dumps(payload).replace(SHELL, json.dumps(canary.shell)[1:-1])
    text = text.replace(CODE, json.dumps(canary.python)[1:-1])
    settings = recipe()
    *parents, last = place.split(".")
    here = settings
    for name in parents:
        here = here.setdefault(name, {})
    here[last] = json.loads(text)
    return settings


def assert_refused(words: list[str], canary: Canary, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["train", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("dualenc: error: ")
    assert told.count("\n") == 1
    canary.assert_silent()
    assert not (canary.folder / "run").exists()
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_refused_before_anything_runs(
    name: str, canary: Canary, capsys: pytest.CaptureFixture[str]
) -> None:
    (canary.folder / "keep").write_text("")
    settings = placed(*PAYLOADS[name], canary)
    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    assert_refused(["recipe.yaml"], canary, capsys)
    assert (canary.folder / "keep").exists()
    with pytest.raises(DualencError):
        make_recipe(settings)
    canary.assert_silent()


def test_the_payloads_would_run(canary: Canary) -> None:
    """The table above proves nothing unless its module and its commands do leave the canary."""
    os.system(canary.shell)
    assert canary.path.exists()
    canary.path.unlink()
    __import__(EVIL)
    assert canary.path.exists()
    del sys.modules[EVIL]


def test_there_are_many_payloads() -> None:
    assert len(PAYLOADS) >= 40


@pytest.mark.parametrize(
    "override",
    [
        f"objective.class_path={EVIL}.X",
        f"model.augment={{class_path: {EVIL}.X}}",
        "model.augment.class_path=os.system",
        f"model.augment={EVIL}.run",
        f"evaluator.class_path={EVIL}.X",
        f"trainer.epochs=!!python/object/apply:{EVIL}.run []",
        f"model.backbone_args.x.class_path={EVIL}.X",
    ],
)
def test_overrides_are_checked_likewise(override: str, canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe()))
    assert_refused(["recipe.yaml", override], canary, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        f"model: !!python/object/apply:{EVIL}.run []",
        f"model: !!python/name:{EVIL}.run",
        f"model: !!python/module:{EVIL}",
        "model: !include inner.yaml",
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "\n".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi"))
        + "\nmodel: *i",
        "model: &a {x: *a}",
        "model: &a [*a]",
        "[" * 20_000,
        "model: {a: " * 2_000,
        "model: [" + "1," * 11_000 + "]",
        "model: " + "9" * 10_000,
        "#" * 300_000,
        "objective: {class_path: DCL}\nobjective: {class_path: os.system}",
        "? [1, 2]\n: x",
        "1: x",
        "- 1",
        "",
        "model",
        "model: 2001-13-45",
        "model: !!binary aGk=",
    ],
)
def test_yaml_that_is_no_recipe(text: str, canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    (canary.folder / "recipe.yaml").write_text(text)
    assert len(assert_refused(["recipe.yaml"], canary, capsys)) < 700


def test_files_that_are_no_recipe(canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(canary.folder / "pipe")
    (canary.folder / "latin").write_bytes("model: é".encode("latin-1"))
    for name in (".", "missing.yaml", "latin", "a\0b"):
        assert_refused([name], canary, capsys)


MODULES = ("os", "subprocess", "builtins", "torch", "functools", "pickle", "timeit", "operator")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model.init_args.augment", "objective", "evaluator", "data"])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("os.system", {"command": SHELL}),
        ("os.popen", {"cmd": SHELL}),
        ("subprocess.Popen", {"args": SHELL, "shell": True}),
        ("builtins.exec", {"source": CODE}),
        ("torch.load", {"f": "evil.pt", "weights_only": False}),
        ("torch.nn.Linear", {"in_features": 2, "out_features": 2}),
        ("functools.partial", {"func": "os.system"}),
        ("timeit.Timer", {"stmt": CODE}),
    ],
)
def test_an_allowed_module_gives_only_classes_of_the_expected_type(
    function: str, arguments: dict[str, Any], place: str, canary: Canary, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = placed(place, call(function, **arguments), canary)
    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    allowed = [word for name in MODULES for word in ("--allow-module", name)]
    assert "is not a class" in assert_refused(["recipe.yaml", *allowed], canary, capsys)


def test_a_class_that_an_allowed_module_only_imports_is_not_its_own(canary: Canary) -> None:
    (canary.folder / "dualenc_thin_module.py").write_text("from torch.nn import Linear\nfrom os import system\n")
    for name in ("Linear", "system"):
        settings = recipe() | {"objective": call(f"dualenc_thin_module.{name}")}
        with pytest.raises(DualencError, match=f"'{name}' is not a class derived from dualenc"):
            make_recipe(settings, allow_modules=["dualenc_thin_module"])


@pytest.mark.parametrize("name", ["", ".", "../x", "os system", "a-b", "*", "x."])
def test_allow_module_takes_names_of_modules(name: str, canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe()))
    assert_refused(["recipe.yaml", f"--allow-module={name}"], canary, capsys)


OWN = """
from PIL import Image
from torch import Tensor
from dualenc.objectives import DCL
from dualenc.data.views import SimCLR

class Mine(DCL):
    def __init__(self, *, sharpness: float = 1.0, **common):
        super().__init__(**common)
        self.sharpness = sharpness

class View:
    def __init__(self, inner: SimCLR | None = None):
        self.inner = inner
    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        return self.inner(image, seed)

class Untyped:
    def __call__(self, image, seed):
        return image
"""


@pytest.mark.slow
def test_modules_that_the_user_allows(canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    package = canary.folder / "dualenc_own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(OWN)
    settings = recipe()
    settings["objective"] = call("dualenc_own_package.parts.Mine", sharpness=2)
    inner = call("dualenc.data.views.SimCLR", size=32)
    settings["model"]["init_args"]["augment"] = call("dualenc_own_package.parts.View", inner=inner)
    with pytest.raises(DualencError, match="--allow-module dualenc_own_package"):
        make_recipe(settings)
    assert "dualenc_own_package" not in sys.modules
    for allowed in (["dualenc_own_package"], ["os", "dualenc_own_package.parts"]):
        config = make_recipe(settings, allow_modules=allowed).settings
        assert config["objective"]["init_args"]["sharpness"] == 2
    for prefix in ("dualenc_own", "dualenc_own_package.par"):
        with pytest.raises(DualencError, match="--allow-module dualenc_own_package"):
            make_recipe(settings, allow_modules=[prefix])

    wrong = copy.deepcopy(settings)
    wrong["objective"]["init_args"]["sharpness"] = "2"
    with pytest.raises(DualencError, match=r"objective.sharpness is '2'; it must be float"):
        make_recipe(wrong, allow_modules=["dualenc_own_package"])
    wrong = copy.deepcopy(settings)
    wrong["model"]["init_args"]["augment"] = call("dualenc_own_package.parts.Untyped")
    with pytest.raises(DualencError, match=r"a class whose __call__ is annotated as \[\[PIL.Image.Image, int\]"):
        make_recipe(wrong, allow_modules=["dualenc_own_package"])

    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    words = ["recipe.yaml", "--allow-module", "os", "--allow-module", "dualenc_own_package"]
    told = assert_refused(words, canary, capsys)  # everything is allowed; the table is missing
    assert "recipe.yaml: data: nowhere.parquet: no such file" in told


class Bomb:
    """Pickles to a call that makes the canary."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"model": call("ImageEncoder", backbone="resnet18", backbone_args={"checkpoint_path": "evil.pt"})},
        {"model": call("ImageEncoder", backbone="resnet18", backbone_args={"pretrained_cfg": {"file": "evil.pt"}})},
        {"model": call("ImageEncoder", backbone="resnet18", backbone_args={"pretrained_cfg_overlay": {"file": "e"}})},
        {"model": call("ImageEncoder", backbone="evil.pt")},
        {"model": call("ImageEncoder", backbone="folder")},
        {"model": call("ImageTextEncoder", name="ViT-B-32", pretrained="evil.pt")},
        {"model": call("ImageTextEncoder", name="ViT-B-32", pretrained="evil.npz")},
        {"model": call("ImageTextEncoder", name="folder")},
        {"model": call("TextEncoder", name="folder")},
        {"model": text_with(tokenizer="evil.pt")},
        {"model": text_with(tokenizer="/dev/zero")},
        {"model": text_with(tokenizer="tokenizer.yaml")},
        {"model": text_with(tokenizer="{class_path: " + EVIL + ".X}")},
        {"data": call("TableViews", path="evil.pt")},
        {"data": call("TableViews", path="evil.npy")},
        {"data": call("TableViews", path="script")},
        {"data": call("TableViews", path="script/script.py")},
        {"data": call("WebDatasetPairs", path="evil.pt")},
    ],
    ids=lambda change: json.dumps(change)[:70],
)
def test_files_that_are_code_are_not_run(
    change: dict[str, Any], canary: Canary, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pickles as weights, tokenizers and data, and scripts of data sets: refused when the parts are made."""
    bomb = pickle.dumps(Bomb(canary.shell))
    for name in ("evil.pt", "evil.npz", "evil.npy", "folder/pytorch_model.bin", "folder/open_clip_pytorch_model.bin"):
        (canary.folder / name).parent.mkdir(exist_ok=True)
        (canary.folder / name).write_bytes(bomb)
    config = {"architecture": "resnet18", "model_type": "bert", "model_cfg": {"embed_dim": 8}}
    for name in ("config.json", "open_clip_config.json"):
        (canary.folder / "folder" / name).write_text(json.dumps(config))
    (canary.folder / "script").mkdir()
    (canary.folder / "script" / "script.py").write_text(f"import {EVIL}")
    settings = recipe() | change
    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    assert_refused(["recipe.yaml"], canary, capsys)


@pytest.mark.slow
def test_plain_recipes_pass(canary: Canary) -> None:
    """The checks refuse nothing that the parts take: nested classes, lists, free configurations, null."""
    settings = recipe()
    settings["model"]["init_args"] |= {
        "augment": call("dualenc.data.views.SimCLR", size=32),
        "mean": [0.5, 0.5, 1],
        "backbone_args": {"drop_rate": 0.1, "nested": {"a.b": [1, "on", None, True]}},
        "std": None,
    }
    settings["evaluator"] = call("KNNEvaluator", train=call("TableViews", path="x"), test=call("TableViews", path="y"))
    resolved = make_recipe(settings).settings
    assert resolved["model"]["init_args"]["augment"]["class_path"] == "dualenc.data.views.SimCLR"
    assert resolved["model"]["init_args"]["mean"] == [0.5, 0.5, 1]
    assert resolved["model"]["init_args"]["backbone_args"]["drop_rate"] == 0.1
    assert make_recipe(resolved).settings == resolved
    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    assert read_recipe("recipe.yaml").settings == resolved


def test_types_that_only_type_checkers_know() -> None:
    """A recipe can set what else such a parameter takes, such as null, and name no class there."""

    class Part:
        def __init__(self, *, a: int | made.up[str] | None = None, **more: Any) -> None:  # type: ignore[name-defined]  # noqa: F821
            """Annotated with what is not imported."""

    hints = argument_types(Part)
    assert list(hints) == ["a"]
    check = Check("recipe")
    assert check._value(None, hints["a"], "a") is None
    assert check._value(3, hints["a"], "a") == 3
    for value in ("x", call("dualenc.data.TableViews", path="x"), [1]):
        with pytest.raises(DualencError, match=r"recipe: a"):
            check._value(value, hints["a"], "a")


def test_one_name_of_a_module_need_not_be_a_list() -> None:
    assert make_recipe(recipe(), allow_modules="dualenc_own_package").settings["trainer"]["output"] == "run"
