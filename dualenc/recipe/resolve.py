"""Recipes: YAML files that name classes and their arguments, and nothing else.

    model:      {class_path: TextEncoder, init_args: {name: …}}
    data:       {class_path: BeirPairs, init_args: {path: …}}
    objective:  {class_path: SogCLR, init_args: {temperature: 0.05}}
    batching:   {class_path: SpectralBatches}                       # optional: random batches
    evaluator:  {class_path: RetrievalEvaluator, init_args: {…}}    # optional
    trainer:    {output: runs/mine, epochs: 3, batch_size: 32}

A recipe is untrusted input; `dualenc.recipe.check` says what it may name. Values that one part
takes from another (sizes of the data, the batch size, the seed) have no key: `Recipe.build` fills
them in.
"""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dualenc.errors import DualencError
from dualenc.recipe.check import CLASS_KEYS, build, check_keys, check_value
from dualenc.recipe.yaml_files import RecipeLoader
from dualenc.types import one_or_several

if TYPE_CHECKING:
    from dualenc.training.trainer import Trainer, TrainingResult

SECTIONS = {
    "data": "dualenc.data.PairDataset",
    "model": "dualenc.encoders.DualEncoder",
    "objective": "dualenc.objectives.Objective",
    "batching": "dualenc.batching.BatchSelector",
    "evaluator": "dualenc.training.evaluators.Evaluator",
    "trainer": "dualenc.training.trainer.Trainer",
}
"""The class that each section's class_path must derive from, or that takes its keys."""
OPTIONAL = ("batching", "evaluator")


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked, with every default filled in; `source` is what errors call it."""

    sections: Mapping[str, Any]
    source: str = "recipe"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved recipe as nested values of YAML, without what `build` fills in."""
        settings: dict[str, Any] = json.loads(json.dumps(self.sections, default=str))
        return settings | {"trainer": settings["trainer"]["init_args"]}

    def build(self) -> dict[str, Any]:
        """Make all parts, by section; `trainer.seed` determines the model's initial weights."""
        from dualenc.seeds import seed_everything

        # The trainer's mistakes are reported before data and models are read, which takes longer.
        trainer = build(self.sections["trainer"], f"{self.source}: trainer", {})
        seed_everything(trainer.seed)
        data = build(self.sections["data"], f"{self.source}: data", {})
        filled = {
            "seed": trainer.seed,
            "batch_size": trainer.batch_size,
            "num_pairs": len(data),
            "num_left": data.num_left,
            "num_right": data.num_right,
            "views": data.views,
            "input_dim": data.left_dim,
            "right_input_dim": data.right_dim,
        }
        parts = {"trainer": trainer, "data": data}
        for section in ("model", "objective", "batching", "evaluator"):
            parts[section] = build(self.sections[section], f"{self.source}: {section}", filled)
        return parts

    def train(self, resume: bool = False) -> TrainingResult:
        """Make all parts and train; `resume` continues from the latest checkpoint in
        `trainer.output`."""
        from dualenc.training.checkpoint import check_run_folder

        # Reading the data may take long.
        check_run_folder(self.settings["trainer"]["output"])
        parts = self.build()
        trainer: Trainer = parts.pop("trainer")
        return trainer.fit(pairs=parts.pop("data"), **parts, resume=resume, recipe=self.settings)


def read_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), allow_modules: Sequence[str] = ()
) -> Recipe:
    """Read a recipe and apply changes to it; no class is made, and no other module imported, before
    all is checked.

    Args:
        path: YAML file.
        overrides: `section.key=value` each, such as "trainer.epochs=3" or
            "objective.class_path=SogCLR"; `init_args.` may be left out behind the section:
            "objective.temperature=0.05". A new class starts from its defaults; the order does not
            matter. A value is YAML, but a text without quotes is as typed.
        allow_modules: modules other than `dualenc` whose classes the recipe may name, such as
            "my_package".

    Raises:
        DualencError: not YAML, an unknown key or class (names the nearest valid one), a missing
            argument, a value of the wrong type, a class that is not of dualenc or an allowed
            module, or not of the expected type.
    """
    settings = _read_yaml(Path(path))
    # Outer ones first, and a class before its arguments, which it would drop.
    overrides = list(one_or_several(overrides))
    changes = sorted(
        map(_parsed, overrides), key=lambda each: (len(each[0]), each[0][-1] != "class_path")
    )
    for names, text in changes:
        _apply(settings, names, text)
    return make_recipe(_with_home(settings), str(path), allow_modules)


def make_recipe(
    settings: Mapping[str, Any], source: str = "recipe", allow_modules: Sequence[str] = ()
) -> Recipe:
    """A recipe from nested values, as a YAML file holds them, called `source` in errors; else as
    `read_recipe`."""
    allow_modules = list(one_or_several(allow_modules))
    check_keys(settings, SECTIONS, "a recipe", f"{source}: ")
    sections = {}
    for name, path in SECTIONS.items():
        base = pkgutil.resolve_name(path)
        value = settings.get(name)
        if name == "trainer":
            value = {"class_path": "Trainer", "init_args": value}
        hint = base | None if name in OPTIONAL else base
        sections[name] = check_value(value, hint, f"{source}: {name}", allow_modules)
    return Recipe(sections, source)


def _with_home(value: Any) -> Any:
    """Nested values with `~/` at the beginning of texts replaced by the user's folder, which no
    shell has done here."""
    if isinstance(value, dict):
        return {name: _with_home(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_home(inner) for inner in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise DualencError(f"{path}: cannot be read ({problem}); name a recipe in YAML") from None
    if not isinstance(settings, dict):
        raise DualencError(
            f"{path}: holds no sections; a recipe has model, data, objective and trainer"
        )
    return settings


def _parsed(override: str) -> tuple[list[str], str]:
    """The names on the way to a value, with init_args behind the section, and the value's text."""
    key, separator, text = override.partition("=")
    names = key.split(".")
    if not separator or not all(names):
        raise DualencError(
            f"'{override}' is no override; write section.key=value: trainer.epochs=3"
        )
    if len(names) > 1 and names[0] != "trainer" and names[1] not in CLASS_KEYS:
        names.insert(1, "init_args")
    return names, text


def _apply(settings: dict[str, Any], names: list[str], text: str) -> None:
    """Set one value in place; a new class drops the arguments of the old one."""
    *parents, name = names
    section = settings
    for parent in parents:
        if not isinstance(section.get(parent), dict):
            section[parent] = {}
        section = section[parent]
    if name == "class_path" and section.get("class_path") != text:
        section.pop("init_args", None)
    section[name] = _override_value(text)


def _override_value(text: str) -> Any:
    """YAML, but a text without quotes is as typed: blanks at its ends, # and : stay."""
    try:
        value = yaml.load(text, RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    is_marked = text.startswith(("'", '"', "[", "{"))
    is_plain_value = isinstance(value, (bool, int, float)) or text in ("null", "")
    return value if is_marked or is_plain_value else text
