"""Recipes: YAML files that name classes and their arguments, and nothing else.

    model:      {class_path: TextEncoder, init_args: {name: …}}
    data:       {class_path: BeirPairs, init_args: {path: …}}
    objective:  {class_path: SogCLR, init_args: {temperature: 0.05}}
    batching:   {class_path: SpectralBatches}                       # optional: random batches
    evaluator:  {class_path: RetrievalEvaluator, init_args: {…}}    # optional
    trainer:    {output: runs/mine, epochs: 3, batch_size: 32}

Values that one part takes from another (sizes of the data, the batch size, the seed) are passed on by links and have no
key. jsonargparse turns signatures into types, defaults, links and instances. A recipe is untrusted input:
`recipe_check.Check` first refuses everything that jsonargparse could import, open or run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from dualenc.errors import DualencError, nearest
from dualenc.recipe_check import CLASS_KEYS, SECTIONS, Check
from dualenc.recipe_yaml import RecipeLoader

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from dualenc.batching import BatchSelector
    from dualenc.data import PairDataset
    from dualenc.encoders import DualEncoder
    from dualenc.objectives import Objective
    from dualenc.training.evaluators import Evaluator
    from dualenc.training.trainer import Trainer, TrainingResult

# jsonargparse, torch and the trainer are imported inside functions: missing files and unknown keys are reported before.


def _objectives(settings: Any) -> Iterator[dict[str, Any]]:
    """The arguments of a recipe's objective, and of each one that it wraps, from the outside in."""
    value = settings.get("objective") if isinstance(settings, Mapping) else None
    while isinstance(value, Mapping) and isinstance(value.get("init_args"), Mapping):
        yield value["init_args"]
        value = value["init_args"].get("objective")


def _parser(settings: Mapping[str, Any]) -> ArgumentParser:
    """Types and links of a recipe, in a parser mode where text stays text."""
    from jsonargparse import ArgumentParser, set_loader

    # By default jsonargparse parses text as YAML, which could name unchecked classes, and opens it as a file where a
    # class is expected (hence `add_argument`, which does not).
    set_loader("text", lambda text: text)
    parser = ArgumentParser(exit_on_error=False, parser_mode="text", default_env=False, print_config=None)
    for name, section in SECTIONS.items():
        if section.package is None:
            parser.add_class_arguments(section.base, name)
        else:
            parser.add_argument(f"--{name}", type=section.base, required=section.required)
    # An objective may wrap another: sizes belong to the innermost.
    objective = "objective.init_args." * max(1, len(list(_objectives(settings))))
    for argument in ("num_left", "num_right", "views"):
        parser.link_arguments(f"data.{argument}", f"{objective}{argument}", apply_on="instantiate")
    parser.link_arguments("data.left_dim", "model.init_args.input_dim", apply_on="instantiate")
    parser.link_arguments("data.right_dim", "model.init_args.right_input_dim", apply_on="instantiate")
    parser.link_arguments("data", "batching.init_args.num_pairs", compute_fn=len, apply_on="instantiate")
    parser.link_arguments("trainer.batch_size", "batching.init_args.batch_size")
    parser.link_arguments("trainer.seed", "batching.init_args.seed")
    parser.link_arguments("trainer.seed", f"{objective}seed")
    return parser


class Parts(NamedTuple):
    """The objects that a recipe describes."""

    model: DualEncoder
    data: PairDataset
    objective: Objective
    batching: BatchSelector | None
    evaluator: Evaluator | None
    trainer: Trainer


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked, with every default filled in; `source` is what errors call it."""

    config: Namespace
    source: str = "recipe"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved recipe as nested values of YAML, without what links fill in."""
        plain = self.config.clone(with_meta=False).as_dict()
        settings: dict[str, Any] = json.loads(json.dumps(plain, default=os.fspath))
        for name, section in SECTIONS.items():
            whole = [(settings[name] or {}).get("init_args", {})]
            for arguments in _objectives(settings) if name == "objective" else whole:
                for key in section.filled:
                    arguments.pop(key, None)
        return settings

    def build(self) -> Parts:
        """Make all parts; `trainer.seed` determines the model's initial weights."""
        from dualenc.seeds import seed_everything
        from dualenc.training.trainer import Trainer

        errors: list[DualencError] = []

        def make(part: type, *positional: Any, **arguments: Any) -> Any:
            try:
                return part(*positional, **arguments)
            except (DualencError, OSError) as error:
                message = str(error).removeprefix(f"{part.__name__}: ")
                errors.append(DualencError(f"{self.source}: {part.__name__}: {message}"))
                raise errors[-1] from error

        # The trainer's mistakes are reported before data and models are read, which takes longer.
        trainer = make(Trainer, **self.config.trainer.as_dict())
        seed_everything(self.config.trainer.seed)
        try:
            built = _parser(self.settings).instantiate(self.config, instantiators=[(make, object, True)])
        except ValueError as error:
            # In a union with None, jsonargparse replaces the error by a list of all that it tried.
            raise errors[0] if errors else error from None
        return Parts(**{name: built[name] for name in Parts._fields} | {"trainer": trainer})

    def train(self, resume: bool = False) -> TrainingResult:
        """Make all parts and train; `resume` continues from the latest checkpoint in `trainer.output`."""
        from dualenc.training.checkpoint import check_run_folder

        # Reading the data may take long.
        check_run_folder(self.config.trainer.output)
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
    settings: dict[str, Any], source: str = "recipe", allow_modules: Sequence[str] = ()
) -> Recipe:
    """A recipe from nested values, as a YAML file holds them, called `source` in errors; else as `read_recipe`."""
    checked = Check(source, allow_modules).recipe(settings)
    try:
        return Recipe(_parser(checked).parse_object(checked, env=False), source)
    except Exception as error:  # jsonargparse's errors have no common base class
        raise DualencError(f"{source}: {' '.join(str(error).split())}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except OSError as error:
        raise DualencError(
            f"{path}: cannot be read ({error.strerror}); give the path of a recipe"
        ) from None
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
        raise DualencError(
            f"'{override}' is no override; write section.key=value, such as trainer.epochs=3"
        )
    if names[0] not in SECTIONS:
        raise DualencError(
            f"'{override}': a recipe has no section {names[0]!r}{nearest(names[0], SECTIONS)}"
        )
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
