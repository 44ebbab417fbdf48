"""Recipes: YAML files that name classes and their arguments, and nothing else.

    model:      {class_path: TextEncoder, init_args: {name: …}}
    data:       {class_path: BeirPairs, init_args: {path: …}}
    objective:  {class_path: SogCLR, init_args: {temperature: 0.05}}
    batching:   {class_path: SpectralBatches}                       # optional: random batches
    evaluator:  {class_path: RetrievalEvaluator, init_args: {…}}    # optional
    trainer:    {output: runs/mine, epochs: 3, batch_size: 32}

A recipe is untrusted input; `dualenc.recipe_check` says what it may name. Values that one part takes from another
(sizes of the data, the batch size, the seed) have no key: `Recipe.build` fills them in.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from dualenc.errors import DualencError, nearest
from dualenc.recipe_yaml import RecipeLoader

if TYPE_CHECKING:
    from dualenc.batching import BatchSelector
    from dualenc.data import PairDataset
    from dualenc.encoders import DualEncoder
    from dualenc.objectives import Objective
    from dualenc.recipe_check import Part
    from dualenc.training.evaluators import Evaluator
    from dualenc.training.trainer import Trainer, TrainingResult

SECTIONS = {
    "data": "dualenc.data.PairDataset",
    "model": "dualenc.encoders.DualEncoder",
    "objective": "dualenc.objectives.Objective",
    "batching": "dualenc.batching.BatchSelector",
    "evaluator": "dualenc.training.evaluators.Evaluator",
    "trainer": "dualenc.training.settings.TrainerSettings",
}
"""The class that each section's class_path must derive from, or that takes its keys."""
OPTIONAL = ("batching", "evaluator")
CLASS_KEYS = ("class_path", "init_args")


class Parts(NamedTuple):
    """The parts of a training, made from a recipe; without batching the trainer draws random batches."""

    model: DualEncoder
    data: PairDataset
    objective: Objective
    batching: BatchSelector | None
    evaluator: Evaluator | None
    trainer: Trainer


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked, with every default filled in; `source` is what errors call it."""

    sections: Mapping[str, Part]
    source: str = "recipe"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved recipe as nested values of YAML, without what `build` fills in."""
        settings: dict[str, Any] = dict.fromkeys(SECTIONS)
        for name, part in self.sections.items():
            settings[name] = part.settings()
        return settings | {"trainer": settings["trainer"]["init_args"]}

    def build(self) -> Parts:
        """Make all parts; `trainer.seed` determines the model's initial weights."""
        from dualenc.recipe_check import build
        from dualenc.seeds import seed_everything
        from dualenc.training.trainer import Trainer

        def make(section: str, **filled: Any) -> Any:
            return build(self.sections.get(section), self.source, **filled)

        # The trainer's mistakes are reported before data and models are read, which takes longer.
        trainer = build(replace(self.sections["trainer"], kind=Trainer), self.source)
        seed = trainer.settings.seed
        batch_size = trainer.settings.batch_size
        seed_everything(seed)
        data = make("data")
        return Parts(
            model=make("model", input_dim=data.left_dim, right_input_dim=data.right_dim),
            data=data,
            objective=make(
                "objective", num_left=data.num_left, num_right=data.num_right, views=data.views, seed=seed
            ),
            batching=make("batching", num_pairs=len(data), batch_size=batch_size, seed=seed),
            evaluator=make("evaluator"),
            trainer=trainer,
        )

    def train(self, resume: bool = False) -> TrainingResult:
        """Make all parts and train; `resume` continues from the latest checkpoint in `trainer.output`."""
        from dualenc.training.checkpoint import check_run_folder

        # Reading the data may take long.
        check_run_folder(self.sections["trainer"].arguments["output"])
        parts = self.build()
        return parts.trainer.fit(
            parts.model,
            parts.data,
            parts.objective,
            parts.batching,
            parts.evaluator,
            resume,
            self.settings,
        )


def read_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), allow_modules: Sequence[str] = ()
) -> Recipe:
    """Read a recipe and apply changes to it; no class is made, and no other module imported, before all is checked.

    Args:
        path: YAML file.
        overrides: `section.key=value` each, such as "trainer.epochs=3" or "objective.class_path=SogCLR"; `init_args.`
            may be left out: "objective.temperature=0.05". A value is YAML, but a text without quotes is as typed.
        allow_modules: modules other than `dualenc` whose classes the recipe may name, such as "my_package".

    Raises:
        DualencError: not YAML, an unknown key or class (names the nearest valid one), a missing argument, a value of
            the wrong type, a class that is not of dualenc or an allowed module, or not of the expected type.
    """
    settings = _read_yaml(Path(path))
    for override in overrides:
        _apply(settings, override)
    return make_recipe(settings, str(path), allow_modules)


def make_recipe(
    settings: Mapping[str, Any], source: str = "recipe", allow_modules: Sequence[str] = ()
) -> Recipe:
    """A recipe from nested values, as a YAML file holds them, called `source` in errors; else as `read_recipe`."""
    for name in (*settings, *SECTIONS):
        if name not in SECTIONS:
            raise DualencError(f"{source}: {name} is no section of a recipe{nearest(str(name), SECTIONS)}")
        if settings.get(name) is None and name not in OPTIONAL:
            raise DualencError(f"{source}: {name} is missing; add it")

    # pydantic and torch, which the base classes import, take seconds: mistakes above are reported before.
    from dualenc.recipe_check import Refusal, check_class

    sections = {}
    values = {**settings, "trainer": {"class_path": "TrainerSettings", "init_args": settings["trainer"]}}
    for name, path in SECTIONS.items():
        try:
            if values.get(name) is not None:
                sections[name] = check_class(values[name], pkgutil.resolve_name(path), allow_modules)
        except Refusal as error:
            raise DualencError(f"{source}: {Refusal(error.problem, name, *error.place)}") from error
    return Recipe(sections, source)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror}); name a recipe") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DualencError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise DualencError(f"{path}: holds no sections; a recipe has model, data, objective and trainer")
    return settings


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one value in place; a new class drops the arguments of the old one."""
    key, separator, text = override.partition("=")
    names = key.split(".")
    if not separator or not all(names):
        raise DualencError(f"'{override}' is no override; write section.key=value: trainer.epochs=3")
    if names[0] != "trainer" and len(names) > 1 and names[1] not in CLASS_KEYS:
        names.insert(1, "init_args")
    *parents, name = names
    section = settings
    for position, parent in enumerate(parents):
        if not isinstance(section.get(parent), dict):
            section[parent] = {}
        section = section[parent]
        if "class_path" in section and names[position + 1] not in CLASS_KEYS:
            section = section.setdefault("init_args", {})
    if name == "class_path" and section.get("class_path") != text:
        section.pop("init_args", None)
    section[name] = _override_value(text)


def _override_value(text: str) -> Any:
    """YAML, but a text without quotes is as typed: blanks at its ends, # and : stay."""
    try:
        value = yaml.load(text, RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    is_comment = value is None and text not in ("null", "")
    is_plain = isinstance(value, (str, dict, list)) and text[0] not in "'\"[{"
    return text if is_comment or is_plain else value
