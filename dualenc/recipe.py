"""Recipes: YAML files that name classes and their arguments, and nothing else.

    model:      {class_path: TextEncoder, init_args: {name: …}}
    data:       {class_path: BeirPairs, init_args: {path: …}}
    objective:  {class_path: SogCLR, init_args: {temperature: 0.05}}
    batching:   {class_path: SpectralBatches}                       # optional: random batches
    evaluator:  {class_path: RetrievalEvaluator, init_args: {…}}    # optional
    trainer:    {output: runs/mine, epochs: 3, batch_size: 32}

What one part knows of another (sizes of the data, the batch size, the seed) is passed on by links and has no key.
jsonargparse turns signatures into types, defaults and instances; here are only the sections, the links and errors
in one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from dualenc.arguments import nearest
from dualenc.errors import DualencError
from dualenc.recipe_keys import Section, checked

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from dualenc.batching import BatchSelector
    from dualenc.data import PairDataset
    from dualenc.encoders import DualEncoder
    from dualenc.objectives import Objective
    from dualenc.training.evaluators import Evaluator
    from dualenc.training.result import TrainingResult
    from dualenc.training.trainer import Trainer


class Parts(NamedTuple):
    """What a recipe describes, made."""

    model: DualEncoder
    data: PairDataset
    objective: Objective
    batching: BatchSelector | None
    evaluator: Evaluator | None
    trainer: Trainer


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked, with every default filled in.

    Args:
        config: as jsonargparse has parsed it.
    """

    config: Namespace

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved recipe as plain nested values, without what links fill in."""
        return yaml.safe_load(_parser().dump(self.config, skip_none=False))

    def build(self) -> Parts:
        """Make all parts; the model's first weights are a function of `trainer.seed`.

        Raises:
            DualencError: a class does not take its arguments.
        """
        from dualenc.training.random_state import seed_everything

        seed_everything(self.config.trainer.seed)
        built = _parser().instantiate(self.config)
        return Parts(**{name: built[name] for name in Parts._fields})

    def train(self, resume: bool = False) -> TrainingResult:
        """Make all parts and train.

        Args:
            resume: go on from the latest checkpoint in `trainer.output`.
        """
        parts = self.build()
        return parts.trainer.fit(
            parts.model, parts.data, parts.objective, parts.batching, parts.evaluator, resume, self.settings
        )


def read_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply changes to it.

    Args:
        path: YAML file.
        overrides: `section.key=value` each, the value in YAML, such as "trainer.epochs=3" or
            "objective.class_path=SogCLR"; `init_args.` may be left out: "objective.temperature=0.05".

    Raises:
        DualencError: no such file, not YAML, an unknown key or class (names the nearest valid one), a missing
            argument or a value of the wrong type.
    """
    settings = _read_yaml(Path(path))
    for override in overrides:
        _apply(settings, override)
    return make_recipe(settings, str(path))


def make_recipe(settings: dict[str, Any], source: str = "recipe") -> Recipe:
    """A recipe from nested values, as a YAML file holds them.

    Args:
        settings: sections by name.
        source: what errors call it.

    Raises:
        DualencError: as `read_recipe`.
    """
    settings = checked(settings, _sections(), source)
    try:
        return Recipe(_parser().parse_object(settings))
    except Exception as error:  # argparse's errors have no common class of their own
        if isinstance(error, DualencError):
            raise
        raise DualencError(f"{source}: {_innermost(str(error))}") from error


def _sections() -> dict[str, Section]:
    """The sections of a recipe; imported here, since they bring all of the package."""
    from dualenc.batching import BatchSelector
    from dualenc.data import PairDataset
    from dualenc.encoders import DualEncoder
    from dualenc.objectives import Objective
    from dualenc.training.evaluators import Evaluator

    return {
        "data": Section(PairDataset, "dualenc.data"),
        "model": Section(DualEncoder, "dualenc.encoders"),
        "objective": Section(Objective, "dualenc.objectives", filled=("num_left", "num_right", "views", "seed")),
        "batching": Section(
            BatchSelector, "dualenc.batching", filled=("num_pairs", "batch_size", "seed"), required=False
        ),
        "evaluator": Section(Evaluator, "dualenc.training.evaluators", required=False),
        "trainer": Section(None, "dualenc.training.trainer"),
    }


def _parser() -> ArgumentParser:
    """Types and links of a recipe."""
    from jsonargparse import ArgumentParser

    from dualenc.training.trainer import Trainer

    parser = ArgumentParser(exit_on_error=False)
    for name, section in _sections().items():
        if section.base is None:
            parser.add_class_arguments(Trainer, name)
        else:
            parser.add_subclass_arguments(section.base, name, required=section.required)
    for argument in ("num_left", "num_right", "views"):
        parser.link_arguments(f"data.{argument}", f"objective.init_args.{argument}", apply_on="instantiate")
    parser.link_arguments("data", "batching.init_args.num_pairs", compute_fn=len, apply_on="instantiate")
    parser.link_arguments("trainer.batch_size", "batching.init_args.batch_size")
    parser.link_arguments("trainer.seed", "batching.init_args.seed")
    parser.link_arguments("trainer.seed", "objective.init_args.seed")
    return parser


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DualencError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise DualencError(f"{path}: holds no sections; a recipe has model, data, objective and trainer")
    return settings


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one value in place; a new class drops the arguments that were meant for the old one."""
    key, separator, text = override.partition("=")
    names = key.split(".")
    if not separator or not all(names):
        raise DualencError(f"'{override}' is no override; write section.key=value, such as trainer.epochs=3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    known = list(_sections())
    if names[0] not in known:
        raise DualencError(f"'{override}': a recipe has no section {names[0]!r}{nearest(names[0], known)}")
    if names[0] != "trainer" and len(names) > 1 and names[1] not in ("class_path", "init_args"):
        names.insert(1, "init_args")
    here = settings
    for name in names[:-1]:
        if not isinstance(here.get(name), dict):
            here[name] = {}
        here = here[name]
    if names[-1] == "class_path" and here.get("class_path") != value:
        here.pop("init_args", None)
    here[names[-1]] = value


def _innermost(message: str) -> str:
    """jsonargparse tells every type it tried, over many lines; what counts is the deepest key and its problem."""
    keys = re.findall(r'[Kk]ey "([^"]+)"', message)
    lines = [line.strip(" -") for line in message.splitlines()]
    noise = ("Parser key", "Does not validate", "Subtypes:", "Errors:", "Problem with", "Given value")
    problems = [line for line in lines if line and not line.startswith(noise)]
    problem = next((line for line in problems if "NoneType" not in line), lines[0])
    given = next((line for line in lines if line.startswith("Given value:") and not line.endswith(("}", ")"))), "")
    if given and "value" not in problem:
        problem += f". {given}"
    problem = re.sub(r"<class '([\w.]+)'>", r"\1", problem)
    return f"{'.'.join(dict.fromkeys(keys))}: {problem}" if keys else problem
