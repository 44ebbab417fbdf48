"""A recipe is untrusted: whatever it names, nothing outside dualenc is imported, called or opened
before it is refused.

Each payload would leave a canary file behind, or import a module that does, if it had its way.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualenc import cli
from dualenc.errors import DualencError
from dualenc.recipe.check import build, parameters
from dualenc.recipe.resolve import SECTIONS, make_recipe, read_recipe

EVIL = "dualenc_evil_canary"
"""A module that exists in each test, and writes the canary when it is imported."""


class Canary:
    """Where a payload would show that it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "canary"
        self.shell = f"touch {self.path}"

    def assert_silent(self) -> None:
        assert not self.path.exists()
        assert EVIL not in sys.modules


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Canary:
    canary = Canary(tmp_path)
    body = (
        f"open({str(canary.path)!r}, 'w')\n"
        "class X:\n    def __init__(self, **arguments): pass\n"
        "def run(): pass\n"
    )
    (tmp_path / f"{EVIL}.py").write_text(body)
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump({"class_path": f"{EVIL}.X"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(EVIL, None)  # of a test that failed
    return canary


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

PAYLOADS: dict[str, tuple[str, Any]] = {
    "os.system": ("model.init_args.augment", call("os.system", command=SHELL)),
    "numpy.load as a path": (
        "data.init_args.path",
        call("numpy.load", file="evil.npy", allow_pickle=True),
    ),
    "a class": ("objective.class_path", f"{EVIL}.X"),
    "in a list": ("trainer.freeze", ["left.*", call(f"{EVIL}.X")]),
    "deep in a dict": (
        "model.init_args.backbone_args",
        {"a": {"b": [{"c": call("os.system", command=SHELL)}]}},
    ),
    "as the name of a function": ("model.init_args.augment", f"{EVIL}.run"),
    "as a file to include": ("model.init_args.augment", "inner.yaml"),
    "as a section to include": ("objective", "inner.yaml"),
    "as free data": (
        "model.init_args.backbone_args",
        call("subprocess.Popen", args=SHELL, shell=True),
    ),
    "as free data without arguments": (
        "model.init_args.backbone_args",
        {"class_path": f"{EVIL}.X"},
    ),
    "dict_kwargs": ("objective.dict_kwargs", {"x": call(f"{EVIL}.X")}),
    "through a module of ours": (
        "model.init_args.augment",
        call("dualenc.cli.os.system", command=SHELL),
    ),
    "a function of ours": ("model.init_args.augment", call("dualenc.io.files.remove", path="keep")),
    "a class of ours for another place": (
        "model.init_args.augment",
        call("dualenc.data.TableViews", path="x"),
    ),
    "the command line of ours": ("objective.class_path", "dualenc.__main__.main"),
    "a path that is no name": ("objective.class_path", "../evil.X"),
    "a class path that is no text": ("objective.class_path", ["os", "system"]),
}


def placed(place: str, payload: Any, canary: Canary) -> dict[str, Any]:
    """The recipe with a payload in place, its placeholder filled in."""
    settings = recipe()
    *parents, last = place.split(".")
    inner = settings
    for name in parents:
        inner = inner.setdefault(name, {})
    inner[last] = json.loads(json.dumps(payload).replace(SHELL, canary.shell))
    return settings


def assert_refused(
    canary: Canary, capsys: pytest.CaptureFixture[str], settings: Any, *words: str
) -> str:
    (canary.folder / "recipe.yaml").write_text(
        settings if isinstance(settings, str) else yaml.safe_dump(settings)
    )
    assert cli.main(["train", "recipe.yaml", *words]) == 2
    line = capsys.readouterr().err
    assert line.startswith("dualenc: error: ")
    assert line.count("\n") == 1
    canary.assert_silent()
    assert not (canary.folder / "run").exists()
    return line


@pytest.mark.slow
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_refused_before_anything_runs(
    name: str, canary: Canary, capsys: pytest.CaptureFixture[str]
) -> None:
    (canary.folder / "keep").write_text("")
    assert_refused(canary, capsys, placed(*PAYLOADS[name], canary))
    assert (canary.folder / "keep").exists()


def test_plain_data_is_never_made_into_a_class(canary: Canary) -> None:
    """Neither where any data may stand, nor in a table of texts; nor if a check ever let it
    pass."""
    settings = recipe()
    popen = call("subprocess.Popen", args=canary.shell, shell=True)
    settings["model"]["init_args"]["backbone_args"] = popen
    with pytest.raises(
        DualencError, match=r"model\.backbone_args contains class_path, but must not name a class"
    ):
        make_recipe(settings)
    mixture = call(
        "Mixture", sources={}, left_prompts={"class_path": f"{EVIL}.X", "init_args": "x"}
    )
    with pytest.raises(
        DualencError, match=r"data\.left_prompts contains class_path, but must not name a class"
    ):
        make_recipe(recipe() | {"data": mixture})
    for value in (popen, {"class_path": f"{EVIL}.X"}):
        assert build(value, "recipe", {}) == value
    canary.assert_silent()


def test_the_payloads_would_run(canary: Canary) -> None:
    """The tables prove nothing unless the module and the command do leave the canary."""
    os.system(canary.shell)
    assert canary.path.exists()
    canary.path.unlink()
    __import__(EVIL)
    assert canary.path.exists()
    del sys.modules[EVIL]


@pytest.mark.slow
@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "trainer"])
@pytest.mark.parametrize(
    "value", [f"{EVIL}.X", {"class_path": f"{EVIL}.X"}, [f"{EVIL}.X"], {"x": f"{EVIL}.X"}]
)
def test_no_argument_of_any_class_imports_what_it_names(
    section: str, value: Any, canary: Canary
) -> None:
    package_name, _, base_name = SECTIONS[section].rpartition(".")
    package = importlib.import_module(package_name)
    base = getattr(package, base_name)
    classes = [
        cls for cls in vars(package).values() if isinstance(cls, type) and issubclass(cls, base)
    ]
    for cls in classes:
        taken = parameters(cls)
        required = {
            name: "x" for name, parameter in taken.items() if parameter.default is parameter.empty
        }
        for name in taken:
            settings = recipe() | {section: call(cls.__name__, **required | {name: value})}
            with contextlib.suppress(DualencError):
                make_recipe(settings)
            canary.assert_silent()


@pytest.mark.parametrize(
    "override",
    [
        f"objective.class_path={EVIL}.X",
        f"model.augment={{class_path: {EVIL}.X}}",
        f"trainer.epochs=!!python/object/apply:{EVIL}.run []",
        f"model.backbone_args.x.class_path={EVIL}.X",
    ],
)
def test_overrides_are_checked_likewise(
    override: str, canary: Canary, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(canary, capsys, recipe(), override)


@pytest.mark.parametrize(
    "text", [f"model: !!python/object/apply:{EVIL}.run []", "model: !include inner.yaml"]
)
def test_yaml_makes_no_objects(
    text: str, canary: Canary, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(canary, capsys, text)


OWN = """
from collections.abc import Callable
from PIL import Image
from torch import Tensor
from torch.nn import Linear
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

class NotCallable:
    pass

class Odd(DCL):
    def __init__(
        self,
        *,
        a: DCL | str = "",
        b: type[DCL] = DCL,
        c: Callable | str = "",
        d: list[type] = (),
        **common
    ):
        super().__init__(**common)
"""


@pytest.mark.slow
def test_modules_that_the_user_allows(canary: Canary) -> None:
    package = canary.folder / "dualenc_own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(OWN)
    parts = "dualenc_own_package.parts"
    settings = recipe() | {"objective": call(f"{parts}.Mine", sharpness=2)}
    settings["model"]["init_args"]["augment"] = call(
        f"{parts}.View", inner=call("dualenc.data.views.SimCLR", size=32)
    )
    for allowed in ([], ["dualenc_own"], [f"{parts[:-1]}"]):
        with pytest.raises(
            DualencError, match="outside dualenc; pass --allow-module dualenc_own_package if"
        ):
            make_recipe(settings, allow_modules=allowed)
    assert "dualenc_own_package" not in sys.modules
    for allowed in (["dualenc_own_package"], ["os", parts]):
        config = make_recipe(settings, allow_modules=allowed).settings
        assert config["objective"]["init_args"]["sharpness"] == 2
    settings["model"]["init_args"]["augment"] = call(f"{parts}.NotCallable")
    with pytest.raises(DualencError, match=r"NotCallable', which is not a class of type Callable"):
        make_recipe(settings, allow_modules=[parts])
    for name in "abcd":
        for value in (f"{EVIL}.X", [f"{EVIL}.X"], call(f"{EVIL}.X")):
            with pytest.raises(
                DualencError, match=rf"{EVIL}.*(it must name a class|outside dualenc)"
            ):
                settings = recipe() | {"objective": call(f"{parts}.Odd", **{name: value})}
                make_recipe(settings, allow_modules=[parts])
            canary.assert_silent()
    with pytest.raises(DualencError, match=r"'os\.system', which is not a class of type Objective"):
        make_recipe(
            recipe() | {"objective": call("os.system", command="true")}, allow_modules=["os"]
        )
    # A class that an allowed module only imports is not its own.
    with pytest.raises(DualencError, match=r"Linear', which is not a class of type Objective"):
        make_recipe(recipe() | {"objective": call(f"{parts}.Linear")}, allow_modules=[parts])


@pytest.mark.slow
def test_plain_recipes_pass(canary: Canary) -> None:
    """The checks refuse nothing that the parts take: nested classes, lists, free configurations,
    null."""
    settings = recipe()
    settings["model"]["init_args"] |= {
        "augment": call("dualenc.data.views.SimCLR", size=32),
        "backbone_args": {"drop_rate": 0.1, "nested": {"a.b": [1, "on", None, True]}},
        "projector_dim": None,
    }
    settings["trainer"]["freeze"] = ["left.*", "*.bias"]
    settings["evaluator"] = call(
        "KNNEvaluator", train=call("TableViews", path="x"), test=call("TableViews", path="y")
    )
    resolved = make_recipe(settings).settings
    arguments = resolved["model"]["init_args"]
    assert arguments["augment"]["class_path"] == "dualenc.data.views.SimCLR"
    assert resolved["trainer"]["freeze"] == ["left.*", "*.bias"]
    assert arguments["backbone_args"] == settings["model"]["init_args"]["backbone_args"]
    assert make_recipe(resolved).settings == resolved
    (canary.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    assert read_recipe("recipe.yaml").settings == resolved
