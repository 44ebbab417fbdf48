"""Recipes: YAML files that name classes and their arguments, and nothing else.

    model:      {class_path: TextEncoder, init_args: {name: …}}
    data:       {class_path: BeirPairs, init_args: {path: …}}
    objective:  {class_path: SogCLR, init_args: {temperature: 0.05}}
    batching:   {class_path: SpectralBatches}                       # optional: random batches
    evaluator:  {class_path: RetrievalEvaluator, init_args: {…}}    # optional
    trainer:    {output: runs/mine, epochs: 3, batch_size: 32}

What one part knows of another (sizes of the data, the batch size, the seed) is passed on by links and has no key.
jsonargparse turns signatures into types, defaults and instances; here are only the sections, the links and errors
in one line. A recipe is untrusted input: `recipe_keys` has checked every value before jsonargparse sees it, and
jsonargparse reads no text as YAML, as a path or as the name of anything.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
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

LARGEST = 256 * 1024
"""Bytes that a recipe may have; the recipes of this package have less than 2,000."""


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
        source: what errors call it.
    """

    config: Namespace
    source: str = "recipe"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved recipe as plain nested values, without what links fill in."""
        from jsonargparse import strip_meta

        settings = _plain(strip_meta(self.config).as_dict())
        for name, section in _sections().items():
            for key in section.filled:
                (settings[name] or {}).get("init_args", {}).pop(key, None)
        return settings

    def build(self) -> Parts:
        """Make all parts; the model's first weights are a function of `trainer.seed`.

        Raises:
            DualencError: a part does not take its arguments; begins with the source and the part's section.
        """
        from dualenc.training.random_state import seed_everything
        from dualenc.training.trainer import Trainer

        def make(found: type, *positional: Any, **arguments: Any) -> Any:
            try:
                return found(*positional, **arguments)
            except (DualencError, OSError) as error:
                place = _place(self.config, found, arguments)
                problem = error if isinstance(error, DualencError) else f"{type(error).__name__}: {error}"
                raise DualencError(f"{self.source}: {place}: {problem}") from error

        make(Trainer, **self.config.trainer.as_dict())  # its mistakes are told before data and models are read
        seed_everything(self.config.trainer.seed)
        built = _parser().instantiate(self.config, instantiators=[(make, object, True)])
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


def read_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), allow_modules: Sequence[str] = ()
) -> Recipe:
    """Read a recipe and apply changes to it.

    Args:
        path: YAML file.
        overrides: `section.key=value` each, the value in YAML, such as "trainer.epochs=3" or
            "objective.class_path=SogCLR"; `init_args.` may be left out: "objective.temperature=0.05".
        allow_modules: modules beside `dualenc` whose classes the recipe may name, such as "my_package".

    Raises:
        DualencError: no such file, not YAML, an unknown key or class (names the nearest valid one), a missing
            argument, a value of the wrong type, or a class that is not of dualenc or an allowed module, or not of
            the type that its place expects; nothing is made or imported before.
    """
    settings = _read_yaml(Path(path))
    for override in overrides:
        _apply(settings, override)
    return make_recipe(settings, str(path), allow_modules)


def make_recipe(settings: dict[str, Any], source: str = "recipe", allow_modules: Sequence[str] = ()) -> Recipe:
    """A recipe from nested values, as a YAML file holds them.

    Args:
        settings: sections by name.
        source: what errors call it.
        allow_modules: as of `read_recipe`.

    Raises:
        DualencError: as `read_recipe`.
    """
    settings = checked(settings, _sections(), source, allow_modules)
    try:
        return Recipe(_parser().parse_object(settings, env=False), source)
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
    """Types and links of a recipe.

    Text stays text: by default jsonargparse would read it as YAML once more, which could name classes that were not
    checked, and where a class is expected open it as a file (hence `add_argument`, which does not).
    """
    from jsonargparse import ArgumentParser, set_loader

    from dualenc.training.trainer import Trainer

    set_loader("text", lambda text: text)
    parser = ArgumentParser(exit_on_error=False, parser_mode="text", default_env=False, print_config=None)
    for name, section in _sections().items():
        if section.base is None:
            parser.add_class_arguments(Trainer, name)
        else:
            parser.add_argument(f"--{name}", type=section.base, required=section.required)
    for argument in ("num_left", "num_right", "views"):
        parser.link_arguments(f"data.{argument}", f"objective.init_args.{argument}", apply_on="instantiate")
    parser.link_arguments("data", "batching.init_args.num_pairs", compute_fn=len, apply_on="instantiate")
    parser.link_arguments("trainer.batch_size", "batching.init_args.batch_size")
    parser.link_arguments("trainer.seed", "batching.init_args.seed")
    parser.link_arguments("trainer.seed", "objective.init_args.seed")
    return parser


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values, where `no` is text, 1e-3 a number and 2001-01-01 no date; every key once."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  as in the base class

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen if isinstance(key, yaml.ScalarNode) else False:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key.value} is given twice, again in line {line}; remove one")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DualencError(f"{path}: is no regular file; give the path of a recipe")
        if status.st_size > LARGEST:
            raise DualencError(f"{path}: has {status.st_size:,} bytes; a recipe has at most {LARGEST:,}")
        settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, DualencError):
            raise
        raise DualencError(f"{path}: not valid YAML ({' '.join(str(error).split())[:300]})") from None
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
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
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


def _plain(value: Any) -> Any:
    """Tuples and paths as YAML has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _place(config: Namespace, found: type, arguments: dict[str, Any]) -> str:
    """The place of a recipe where a class with these arguments stands, such as `evaluator.pairs`."""
    from dualenc.training.trainer import Trainer

    if found is Trainer:
        return "trainer"
    name = f".{found.__name__}"
    places = [(place, node) for place, node in _classes(config.as_dict()) if node["class_path"].endswith(name)]
    plain = {key: value for key, value in arguments.items() if isinstance(value, (str, int, float))}
    for place, node in places:
        if plain.items() <= {**plain, **node.get("init_args", {})}.items():
            return place
    return places[0][0] if places else found.__name__


def _classes(value: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping that names a class, with its place; depth first."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield place, dict(value)
            value = value.get("init_args") or {}
        for key, item in value.items():
            yield from _classes(item, f"{place}.{key}".lstrip("."))


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
