"""Recipes: YAML files that name classes and their arguments, and nothing else.

    model:      {class_path: TextEncoder, init_args: {name: …}}
    data:       {class_path: BeirPairs, init_args: {path: …}}
    objective:  {class_path: SogCLR, init_args: {temperature: 0.05}}
    batching:   {class_path: SpectralBatches}                       # optional: random batches
    evaluator:  {class_path: RetrievalEvaluator, init_args: {…}}    # optional
    trainer:    {output: runs/mine, epochs: 3, batch_size: 32}

A recipe is untrusted input; `dualenc.recipe.check` defines what it may name. Values that one part
takes from another (sizes of the data, the batch size, the seed) cannot be set: `Recipe.build` fills
them in.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dualenc.errors import DualencError, nearest
from dualenc.recipe.check import CLASS_KEYS, FILLED, build, check_keys, check_value
from dualenc.recipe.packaged import remedy_for_missing
from dualenc.recipe.yaml_files import RecipeLoader
from dualenc.types import one_or_several

if TYPE_CHECKING:
    from dualenc.training.trainer import Trainer, TrainingResult

logger = logging.getLogger("dualenc.recipe")

SECTIONS = {
    "data": "dualenc.data.PairDataset",
    "model": "dualenc.encoders.DualEncoder",
    "objective": "dualenc.objectives.Objective",
    "batching": "dualenc.batching.BatchSelector",
    "evaluator": "dualenc.training.evaluators.Evaluator",
    "trainer": "dualenc.training.trainer.Trainer",
}
"""Base class of each section's class_path; for the trainer, the class that takes its keys."""
OPTIONAL = ("batching", "evaluator")


@dataclass(frozen=True)
class Recipe:
    """A checked recipe with every default filled in.

        recipe = read_recipe("recipe.yaml", ["trainer.epochs=3"])
        recipe.train()

    Attributes:
        sections: checked classes and their arguments, by section.
        source: name of the recipe in errors.
    """

    sections: Mapping[str, Any]
    source: str = "recipe"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Resolved recipe as nested YAML values, without what `build` fills in."""
        # The round trip through JSON makes paths strings and tuples lists.
        settings: dict[str, Any] = json.loads(json.dumps(self.sections, default=str))
        return settings | {"trainer": settings["trainer"]["init_args"]}

    def build(self, **parts: Any) -> dict[str, Any]:
        """Create all parts, by section; `trainer.seed` determines the model's initial weights.

        Args:
            parts: parts that exist already, by section, such as data that several trainings share.
        """
        from dualenc.seeds import seed_everything

        # The trainer comes first, so that mistakes in it are reported before data and models are
        # read.
        trainer = build(self.sections["trainer"], f"{self.source}: trainer", {})
        seed_everything(trainer.seed)
        if "data" not in parts:
            parts["data"] = build(self.sections["data"], f"{self.source}: data", {})
        data = parts["data"]
        filled = {}
        for takes in FILLED.values():
            for name, take in takes.items():
                filled[name] = take(trainer, data)
        parts["trainer"] = trainer
        for section in ("model", "objective", "batching", "evaluator"):
            if section not in parts:
                parts[section] = build(self.sections[section], f"{self.source}: {section}", filled)
        return parts

    def train(self, resume: bool = False) -> TrainingResult:
        """Create all parts and train.

        Args:
            resume: continue from the latest checkpoint in `trainer.output`.
        """
        from dualenc.training.checkpoint import check_run_folder

        # Checked first, because reading the data may take long.
        check_run_folder(self.settings["trainer"]["output"])
        parts = self.build()
        trainer: Trainer = parts.pop("trainer")
        return trainer.fit(pairs=parts.pop("data"), **parts, resume=resume, recipe=self.settings)


def read_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), allow_modules: Sequence[str] = ()
) -> Recipe:
    """Read a recipe and apply overrides.

    No class is created, and no other module imported, before everything is checked.

    Args:
        path: path of the YAML file.
        overrides: settings `section.key=value`, such as "trainer.epochs=3" or
            "objective.class_path=SogCLR". `init_args.` may be left out after the section:
            "objective.temperature=0.05". A new class starts from its defaults; the order does not
            matter. Values are YAML, except that unquoted strings are taken literally.
        allow_modules: modules other than `dualenc` whose classes the recipe may name, such as
            "my_package".

    Raises:
        DualencError: the file is not YAML; a key or class is unknown (the error suggests the
            nearest valid one); an argument is missing; a value has the wrong type; a class is
            outside dualenc and the allowed modules, or does not have the expected type.
    """
    written = _read_yaml(Path(path))
    settings = changed(written, overrides)
    recipe = make_recipe(_with_home(settings), str(path), allow_modules)
    _report_defaults(written, settings, recipe.settings)
    return recipe


def changed(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a recipe with overrides applied.

    Args:
        settings: values by section.
        overrides: see `read_recipe`.

    Raises:
        DualencError: an override is not section.key=value.
    """
    result = copy.deepcopy(dict(settings))
    # Outer keys first, and a class before its arguments, because a new class drops the old
    # arguments.
    changes = [_parsed(override) for override in one_or_several(overrides)]
    changes.sort(key=lambda change: (len(change[0]), change[0][-1] != "class_path"))
    for names, text in changes:
        _apply(result, names, text)
    return result


def _report_defaults(
    written: Mapping[str, Any], settings: Mapping[str, Any], resolved: Mapping[str, Any]
) -> None:
    """Log which values of a recipe became defaults, because an override changed their class.

    Args:
        written: values in the file.
        settings: these values with overrides applied.
        resolved: all values, with defaults.
    """
    for name in SECTIONS:
        old, new = written.get(name), settings.get(name)
        if not isinstance(old, dict) or not isinstance(new, dict):
            continue
        if old.get("class_path") == new.get("class_path"):
            continue
        given, arguments = new.get("init_args") or {}, resolved[name]["init_args"]
        replaced = [
            f"{name}.{key}={json.dumps(arguments[key])}, not {json.dumps(value)}"
            for key, value in (old.get("init_args") or {}).items()
            if key in arguments and key not in given and arguments[key] != value
        ]
        if replaced:
            logger.warning(
                "%s starts from its defaults: %s", new["class_path"], "; ".join(replaced)
            )


def make_recipe(
    settings: Mapping[str, Any], source: str = "recipe", allow_modules: Sequence[str] = ()
) -> Recipe:
    """Check nested values, as a YAML file contains them, and return a recipe.

    Args:
        settings: values by section.
        source: name of the recipe in errors.
        allow_modules: see `read_recipe`.

    Raises:
        DualencError: see `read_recipe`.
    """
    allow_modules = list(one_or_several(allow_modules))
    check_keys(settings, SECTIONS, "a recipe", f"{source}: ")
    sections = {}
    for name, path in SECTIONS.items():
        base = pkgutil.resolve_name(path)
        value = settings.get(name)
        # A trainer section is written without class_path, and completed here like the others.
        if name == "trainer":
            value = {"class_path": "Trainer", "init_args": value}
        hint = base | None if name in OPTIONAL else base
        sections[name] = check_value(value, hint, f"{source}: {name}", allow_modules)
    return Recipe(sections, source)


def _with_home(value: Any) -> Any:
    """Expand `~/` at the beginning of strings in nested values; no shell has done it."""
    if isinstance(value, dict):
        return {name: _with_home(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_home(inner) for inner in value]
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except FileNotFoundError:
        # A slip in the name must not lead to writing over one's own recipe.
        alike = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")])
        problem = f"no such file{alike}"
        raise DualencError(
            problem, fix="" if alike else remedy_for_missing(path), where=path
        ) from None
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"cannot be read ({' '.join(str(error).split())})"
        fix = "name a recipe in YAML; data are given as data.path=FILE"
        raise DualencError(problem, fix=fix, where=path) from None
    if not isinstance(settings, dict):
        raise DualencError(
            "is not a mapping of sections",
            fix="a recipe needs the sections model, data, objective and trainer",
            where=path,
        )
    return settings


def _parsed(override: str) -> tuple[list[str], str]:
    """Split an override into the keys of a value, with init_args inserted, and the value's text."""
    key, separator, text = override.partition("=")
    names = key.split(".")
    if not separator or not all(names):
        raise DualencError(
            f"'{override}' is not a valid override",
            fix="expected section.key=value, e.g. trainer.epochs=3",
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
    section[name] = plain_value(text)


def plain_value(text: str) -> Any:
    """Parse a value as YAML; an unquoted string keeps its outer spaces, # and colons."""
    try:
        value = yaml.load(text, RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    is_marked = text.startswith(("'", '"', "[", "{"))
    is_plain_value = isinstance(value, (bool, int, float)) or text in ("null", "")
    return value if is_marked or is_plain_value else text
