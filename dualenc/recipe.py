"""Recipes: YAML files that name classes and their arguments, and nothing else.

    model:      {class_path: TextEncoder, init_args: {name: …}}
    data:       {class_path: BeirPairs, init_args: {path: …}}
    objective:  {class_path: SogCLR, init_args: {temperature: 0.05}}
    batching:   {class_path: SpectralBatches}                       # optional: random batches
    evaluator:  {class_path: RetrievalEvaluator, init_args: {…}}    # optional
    trainer:    {output: runs/mine, epochs: 3, batch_size: 32}

What one part knows of another (sizes of the data, the batch size, the seed) is passed on by links and has no key.
jsonargparse turns signatures into defaults, links and instances. A recipe is untrusted input: `_Check` compares every
value with the type of the parameter that takes it before jsonargparse, which imports whatever a text names, sees it.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import yaml

from dualenc.errors import DualencError, nearest
from dualenc.files import open_regular
from dualenc.signatures import argument_names
from dualenc.terminal import printable

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from dualenc.batching import BatchSelector
    from dualenc.data import PairDataset
    from dualenc.encoders import DualEncoder
    from dualenc.objectives import Objective
    from dualenc.training.evaluators import Evaluator
    from dualenc.training.trainer import Trainer, TrainingResult

LARGEST = 256 * 1024
"""Bytes that a recipe may have; the recipes of this package have less than 2,000."""
MOST_VALUES, DEEPEST = 10_000, 40
"""How many values a recipe may hold, those behind YAML's aliases counted as often as they occur, and how deep."""
CLASS_KEYS = ("class_path", "init_args")
RESERVED = (*CLASS_KEYS, "dict_kwargs")
"""Keys that jsonargparse takes for a class; plain data must not have them, nor any that begins with two underscores."""
PLAIN = (type(None), bool, int, float, str, os.PathLike)


class Section(NamedTuple):
    """One section of a recipe.

    Attributes:
        path: of the class that its `class_path` must derive from, or that takes its keys.
        package: where a class path without a dot is looked up; None when there is one class only.
        filled: arguments that links fill in, and a recipe must leave out.
        required: whether a recipe must have the section.
    """

    path: str
    package: str | None
    filled: tuple[str, ...] = ()
    required: bool = True

    @property
    def base(self) -> Any:
        """The class; imported when asked for, since that brings all of the package."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


SECTIONS = {
    "data": Section("dualenc.data.PairDataset", "dualenc.data"),
    "model": Section("dualenc.encoders.DualEncoder", "dualenc.encoders", ("input_dim", "right_input_dim")),
    "objective": Section(
        "dualenc.objectives.Objective", "dualenc.objectives", ("num_left", "num_right", "views", "seed")
    ),
    "batching": Section(
        "dualenc.batching.BatchSelector", "dualenc.batching", ("num_pairs", "batch_size", "seed"), required=False
    ),
    "evaluator": Section("dualenc.training.evaluators.Evaluator", "dualenc.training.evaluators", required=False),
    "trainer": Section("dualenc.training.trainer.Trainer", None),
}
LEFT_TO_SUBCLASSES = {
    "dualenc.encoders.dual.DualEncoder": ("write",),
    "dualenc.objectives.base.Objective": ("anchor_losses", "forward", "losses"),
}
"""Of base classes that do not say themselves that they are abstract: methods of which one at least must be defined."""


def _objectives(settings: Any) -> Iterator[dict[str, Any]]:
    """The arguments of a recipe's objective, and of each one that it wraps, from the outside in."""
    value = settings.get("objective") if isinstance(settings, Mapping) else None
    while isinstance(value, Mapping) and isinstance(value.get("init_args"), Mapping):
        yield value["init_args"]
        value = value["init_args"].get("objective")


def _parser(settings: Mapping[str, Any]) -> ArgumentParser:
    """Types and links of a recipe.

    Text stays text: by default jsonargparse would read it as YAML once more, which could name classes that were not
    checked, and where a class is expected open it as a file (hence `add_argument`, which does not).
    """
    from jsonargparse import ArgumentParser, set_loader

    set_loader("text", lambda text: text)
    parser = ArgumentParser(exit_on_error=False, parser_mode="text", default_env=False, print_config=None)
    for name, section in SECTIONS.items():
        if section.package is None:
            parser.add_class_arguments(section.base, name)
        else:
            parser.add_argument(f"--{name}", type=section.base, required=section.required)
    # Sizes belong to the innermost objective, which others may wrap.
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
        """The resolved recipe as nested values of YAML, without what links fill in."""
        from jsonargparse import strip_meta

        settings: dict[str, Any] = json.loads(json.dumps(strip_meta(self.config).as_dict(), default=os.fspath))
        for name, section in SECTIONS.items():
            filled_in = [(settings[name] or {}).get("init_args", {})]
            if name == "objective":
                filled_in = list(_objectives(settings))
            for arguments in filled_in:
                for key in section.filled:
                    arguments.pop(key, None)
        return settings

    def build(self) -> Parts:
        """Make all parts; the model's first weights are a function of `trainer.seed`.

        Raises:
            DualencError: a part does not take its arguments; begins with the source and the part's section.
        """
        from dualenc.seeds import seed_everything
        from dualenc.training.trainer import Trainer

        told: list[DualencError] = []

        def make(found: type, *positional: Any, **arguments: Any) -> Any:
            try:
                return found(*positional, **arguments)
            except (DualencError, OSError) as error:
                place = _place(self.settings, found.__name__, arguments) or found.__name__.lower()
                problem = error if isinstance(error, DualencError) else f"{type(error).__name__}: {error}"
                told.append(DualencError(f"{self.source}: {place}: {problem}"))
                raise told[-1] from error

        make(Trainer, **self.config.trainer.as_dict())  # its mistakes are told before data and models are read
        seed_everything(self.config.trainer.seed)
        try:
            built = _parser(self.settings).instantiate(self.config, instantiators=[(make, object, True)])
        except ValueError as error:  # where null is another choice, jsonargparse tells of all that it tried
            raise told[0] if told else error from None
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


def _place(value: Any, name: str, arguments: Mapping[str, Any], place: str = "") -> str | None:
    """Where a recipe names a class with these arguments, such as `evaluator.pairs`; depth first."""
    if not isinstance(value, Mapping):
        return None
    if "class_path" in value:
        given = value.get("init_args") or {}
        # Parts that are made by now are not compared; of several by name the names are.
        same = [given.get(key, item) == item for key, item in arguments.items() if isinstance(item, (str, int, float))]
        named = {key: item for key, item in arguments.items() if isinstance(item, Mapping)}
        same += [list(given.get(key) or ()) == list(item) for key, item in named.items()]
        if value["class_path"].endswith(f".{name}") and all(same):
            return place
        value = given
    places = (_place(item, name, arguments, f"{place}.{key}".lstrip(".")) for key, item in value.items())
    return next(filter(None, places), None)


def read_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), allow_modules: Sequence[str] = ()
) -> Recipe:
    """Read a recipe and apply changes to it.

    Args:
        path: YAML file.
        overrides: `section.key=value` each, the value in YAML, such as "trainer.epochs=3" or
            "objective.class_path=SogCLR"; `init_args.` may be left out: "objective.temperature=0.05".
        allow_modules: modules other than `dualenc` whose classes the recipe may name, such as "my_package".

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
    checked = _Check(source, allow_modules).recipe(settings)
    try:
        return Recipe(_parser(checked).parse_object(checked, env=False), source)
    except Exception as error:  # argparse's errors have no common class of their own
        raise DualencError(f"{source}: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values, where `no` is text, 1e-3 a number and 2001-01-01 no date; every key once."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  as in the base class

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key.value} is given twice, again in line {line}; remove one")
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
        with open_regular(path) as stream:
            content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise DualencError(f"{path}: has more than {LARGEST:,} bytes; a recipe has fewer")
        settings = yaml.load(content.decode("utf-8"), _Loader)
    except DualencError:
        raise
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
    known = list(SECTIONS)
    if names[0] not in known:
        raise DualencError(f"'{override}': a recipe has no section {names[0]!r}{nearest(names[0], known)}")
    if names[0] != "trainer" and len(names) > 1 and names[1] not in CLASS_KEYS:
        names.insert(1, "init_args")
    here = settings
    for place, name in enumerate(names[:-1]):
        if not isinstance(here.get(name), dict):
            here[name] = {}
        here = here[name]
        if "class_path" in here and names[place + 1] not in CLASS_KEYS:
            here = here.setdefault("init_args", {})
    if names[-1] == "class_path" and here.get("class_path") != value:
        here.pop("init_args", None)
    here[names[-1]] = value


class _Check:
    """Walks down a recipe; `place` names where it is, such as `model.augment`.

    Args:
        source: what errors call the recipe.
        allow_modules: modules other than `dualenc` whose classes it may name.
    """

    def __init__(self, source: str, allow_modules: Sequence[str] = ()) -> None:
        modules = [allow_modules] if isinstance(allow_modules, str) else list(allow_modules)
        for name in modules:
            if not all(part.isidentifier() for part in str(name).split(".")):
                raise DualencError(f"--allow-module {name!r} is no module; give a name such as my_package")
        self.source, self.allowed = source, ("dualenc", *modules)

    def recipe(self, settings: Any) -> dict[str, Any]:
        """The same settings with full class paths, after making sure that nothing in them is out of place."""
        if not isinstance(settings, Mapping):
            raise DualencError(f"{self.source}: holds no sections; a recipe has model, data, objective and trainer")
        self._check_size(settings)
        for name in settings:
            self._check_known(name, SECTIONS, "unknown section ")
        present = {name: settings[name] for name in SECTIONS if settings.get(name) is not None}
        for name, section in SECTIONS.items():
            if section.required and name not in present:
                raise DualencError(f"{self.source}: section '{name}' is missing; add it")
        for name, value in present.items():
            if not isinstance(value, Mapping):
                raise DualencError(f"{self.source}: section '{name}' is {_shown(value)}; it must hold keys")
            self._check_names(value, name, SECTIONS[name])
        for name, value in present.items():
            base, package, filled = SECTIONS[name].base, SECTIONS[name].package, SECTIONS[name].filled
            if package is None:
                present[name] = self._arguments(base, value, name, f"{name}.")
            else:
                present[name] = self._class(value, base, name, package, filled)
        return present

    def _check_names(self, value: Mapping[str, Any], name: str, section: Section) -> None:
        """Refuse unknown keys of a section by the sources alone, before anything that takes long is imported."""
        path, prefix = section.path, f"{name}."
        given: Any = value
        if section.package is not None:
            for key in value:
                self._check_known(key, CLASS_KEYS, f"unknown key {prefix}")
            path, given = str(value.get("class_path")), value.get("init_args")
            path = path if "." in path else f"{section.package}.{path}"
            prefix = f"{prefix}init_args."
        names = argument_names(path)
        if names is None or not isinstance(given, Mapping):
            return
        for key in given.keys() - set(section.filled):
            self._check_known(key, [known for known in names if known not in section.filled], f"unknown key {prefix}")

    def _check_size(self, settings: Any) -> None:
        """Only what JSON has too, in bounds; cycles of objects end at the bounds."""
        stack, count = [(settings, "", 0)], 0
        while stack:
            value, place, depth = stack.pop()
            count += 1
            if count > MOST_VALUES or depth > DEEPEST:
                raise DualencError(
                    f"{self.source}: holds more than {MOST_VALUES:,} values or {DEEPEST} levels; a recipe names "
                    "classes and their arguments only"
                )
            if isinstance(value, Mapping):
                for key, inner in value.items():
                    if not isinstance(key, str):
                        raise self._refused(place or "recipe", f"the key {_shown(key)} is not text; quote it")
                    stack.append((inner, f"{place}.{key}".lstrip("."), depth + 1))
            elif isinstance(value, (list, tuple)):
                stack += [(inner, place, depth + 1) for inner in value]
            elif not isinstance(value, PLAIN):
                raise self._refused(
                    place, f"holds a {type(value).__name__}; give text, numbers, true, false, null or lists"
                )
            elif isinstance(value, (int, float)) and not abs(value) < 2**63:
                raise self._refused(place, f"is {_shown(value)}; give a finite number below 2^63")

    def _class(
        self, value: Any, base: Any, place: str, package: str = "dualenc.data", filled: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """A mapping with class_path and init_args, the class of the base type and its arguments of theirs."""
        if not isinstance(value, Mapping):
            raise self._refused(
                place, f"is {_shown(value)}; it must name {_described(base)}, by class_path and init_args"
            )
        for key in value:
            self._check_known(key, CLASS_KEYS, f"unknown key {place}.")
        if "class_path" not in value:
            raise DualencError(f"{self.source}: {place}.class_path is missing; name a class of {package}")
        path, found = self._resolve(value["class_path"], base, f"{place}.class_path", package)
        given = value.get("init_args")
        if not isinstance(given, Mapping | None):
            raise self._refused(f"{place}.init_args", f"is {_shown(given)}; it must hold the arguments of {path}")
        arguments = self._arguments(found, given or {}, place, f"{place}.init_args.", filled)
        return {"class_path": path, "init_args": arguments}

    def _arguments(
        self, found: type, given: Mapping[str, Any], place: str, prefix: str, filled: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        hints = argument_types(found)
        for key in given:
            if key in filled:
                raise self._refused(f"{prefix}{key}", "is filled in by the training; leave it out")
            self._check_known(key, [name for name in hints if name not in filled], f"unknown key {prefix}")
        missing = [p.name for p, _ in _parameters(found) if p.default is p.empty and p.name not in (*given, *filled)]
        if missing:
            raise self._refused(place, f"{found.__name__} needs {', '.join(missing)}; add {prefix}{missing[0]}")
        return {key: self._value(value, hints[key], f"{place}.{key}") for key, value in given.items()}

    def _resolve(self, path: Any, base: Any, place: str, default: str) -> tuple[str, type]:
        """The full path and the class of a class path, which may be a name of the default package."""
        is_name = isinstance(path, str) and all(p.isidentifier() and p[0] != "_" for p in path.split("."))
        if not is_name or len(path) > 200:
            raise self._refused(place, f"is {_shown(path)}; name a class, such as {default}.NAME")
        package_name, _, name = path.rpartition(".")
        package_name = package_name or default
        if not self._is_allowed(package_name):
            raise self._refused(
                place,
                f"{path} is not of dualenc, and making it would run its code; if you trust that, allow it: "
                f"--allow-module {package_name.partition('.')[0]}",
            )
        try:
            package = importlib.import_module(package_name)
        except Exception as error:  # a module of the user's may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise self._refused(place, f"cannot import {package_name} ({reason}); check the name") from error
        found = getattr(package, name, None)
        if not self._fits(found, base):
            names = [key for key, value in vars(package).items() if key[0] != "_" and self._fits(value, base)]
            among = nearest(name, names) or (f"; there are {', '.join(names)}" if names else "; name another class")
            if found is None:
                raise self._refused(place, f"no class {name!r} in {package_name}{among}")
            abstract = inspect.isclass(found) and _is_abstract(found, base)
            what = "abstract" if abstract else f"not {_described(base)}"
            raise self._refused(place, f"{name!r} is {what}{among}")
        return f"{package_name}.{name}", typing.cast(type, found)

    def _fits(self, found: Any, base: Any) -> bool:
        """Whether something found in a module is a class to be made where the base type is expected."""
        if not inspect.isclass(found) or _is_abstract(found, base) or not self._is_allowed(found.__module__):
            return False
        if inspect.isclass(base):
            return issubclass(found, base)
        # For a Callable, its objects must be callable by a method of the class's own, annotated with exactly these
        # arguments: the annotation is what tells a class written for the place from whatever else can be called.
        call = getattr(found, "__call__", None)  # noqa: B004  the function itself is wanted
        if not inspect.isfunction(call):
            return False
        hints = _type_hints(call)
        needed = [p for p in list(inspect.signature(call).parameters.values())[1:] if p.default is p.empty]
        return [hints.get(parameter.name) for parameter in needed] == list(typing.get_args(base)[0])

    def _is_allowed(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self.allowed)

    def _value(self, value: Any, hint: Any, place: str) -> Any:
        """The value with full class paths, if it is of the type; nothing is converted but integers to numbers."""
        origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
        if origin is Annotated:
            return self._value(value, inner[0], place)
        if origin in (typing.Union, types.UnionType):
            return self._one_of(value, hint, inner, place)
        if hint in (Any, object) or (getattr(hint, "_is_protocol", False) and isinstance(value, list)):
            return self._plain(value, place)
        if _is_class_place(hint):
            # An objective inside another has its sizes filled in as well.
            section = next((known for known in SECTIONS.values() if known.package and known.base is hint), None)
            if section is not None and section.package is not None:
                return self._class(value, hint, place, section.package, section.filled)
            return self._class(value, hint, place)
        if isinstance(value, (list, tuple)) and _holds_items(origin):
            fixed = origin is tuple and inner and inner[-1] is not Ellipsis
            if fixed and len(value) != len(inner):
                raise self._refused(place, f"has {len(value)} values; give {len(inner)}")
            of = inner if fixed else [inner[0] if inner else Any] * len(value)
            return [self._value(item, each, f"{place}[{i}]") for i, (item, each) in enumerate(zip(value, of))]
        if isinstance(value, Mapping) and _is_subclass(origin, Mapping):
            return self._plain(value, place, inner[1] if inner else Any)
        if origin is Literal:
            fits = any(type(value) is type(choice) and value == choice for choice in inner)
        elif _is_subclass(origin, enum.Enum):
            fits = isinstance(value, str) and value in origin.__members__
        elif _is_subclass(origin, os.PathLike):
            fits = isinstance(value, (str, os.PathLike))
        elif hint is float:
            fits = type(value) in (int, float)
        else:  # true is no integer, and 3 is no text
            fits = hint in (bool, int, str, type(None)) and type(value) is hint
        if not fits:
            raise self._refused(place, f"is {_shown(value)}; it must be {_described(hint)}")
        return value

    def _one_of(self, value: Any, hint: Any, options: tuple[Any, ...], place: str) -> Any:
        if isinstance(value, (Mapping, list, tuple)):  # what is wrong inside tells more than all the alternatives
            named = isinstance(value, Mapping) and "class_path" in value
            likely = [option for option in options if named and _is_class_place(option)]
            likely = likely or [option for option in options if option is not type(None)]
            if len(likely) == 1:
                return self._value(value, likely[0], place)
        for option in options:
            try:
                return self._value(value, option, place)
            except DualencError:
                continue
        raise self._refused(place, f"is {_shown(value)}; it must be {_described(hint)}")

    def _plain(self, value: Any, place: str, hint: Any = Any) -> Any:
        """Data that names no class; the values of a mapping are of the type."""
        if isinstance(value, Mapping):
            for key in value:
                if key in RESERVED or key.startswith("__"):
                    raise self._refused(f"{place}.{key}", "no class can be named here; give plain values")
            return {key: self._value(item, hint, f"{place}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(item, place) for item in value]
        return value

    def _check_known(self, key: str, known: Iterable[str], problem: str) -> None:
        known = list(known)
        if key not in known:
            raise DualencError(f"{self.source}: {problem}{printable(key)[:80]}{nearest(key, known)}")

    def _refused(self, place: str, problem: str) -> DualencError:
        place = place if len(place) <= 200 else f"{place[:196]} …"
        joint = " " if problem.startswith(("is ", "has ", "holds ")) else ": "
        return DualencError(f"{self.source}: {place}{joint}{problem}")


def _is_abstract(found: type, base: Any) -> bool:
    """Whether a class leaves to those derived from it what its base leaves to it."""
    needed = LEFT_TO_SUBCLASSES.get(f"{base.__module__}.{base.__qualname__}", ()) if inspect.isclass(base) else ()
    if needed and issubclass(found, base):
        return all(getattr(found, method) is getattr(base, method) for method in needed)
    return inspect.isabstract(found)


def argument_types(found: type) -> dict[str, Any]:
    """Types of the arguments that a class takes, those behind `**arguments` of its base classes included."""
    return {parameter.name: hint for parameter, hint in _parameters(found)}


def _parameters(found: type) -> Iterator[tuple[inspect.Parameter, Any]]:
    """The same as parameters with their types; of several of one name that of the most derived class."""
    seen = set()
    for constructor in [vars(c)["__init__"] for c in inspect.getmro(found) if "__init__" in vars(c)]:
        own = _type_hints(constructor)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for parameter in parameters:
            by_name = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            if by_name and parameter.name not in seen:
                seen.add(parameter.name)
                yield parameter, own.get(parameter.name, Any)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break


class _AnyName(type):
    """Has every public attribute and subscript, each itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Unknown(metaclass=_AnyName):
    """Stands for a type that is imported for type checkers only: nothing in a recipe can be of it."""


def _type_hints(function: Any) -> dict[str, Any]:
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(function, localns=unknown)
        except NameError as error:
            if not error.name or error.name in unknown:
                raise
            unknown[str(error.name)] = _Unknown


def _is_subclass(hint: Any, bases: Any) -> bool:
    # Python 3.10 takes list[int] for a class.
    return isinstance(hint, type) and typing.get_origin(hint) is None and issubclass(hint, bases)


def _is_class_place(hint: Any) -> bool:
    """Whether an object of some class must be made for a parameter of this type."""
    if typing.get_origin(hint) is Callable:
        return isinstance(typing.get_args(hint)[0], list)
    if not _is_subclass(hint, object) or hint in (Any, object, Callable) or getattr(hint, "_is_protocol", False):
        return False
    return not issubclass(hint, (*PLAIN, Mapping, enum.Enum)) and not _holds_items(hint)


def _holds_items(hint: Any) -> bool:
    return _is_subclass(hint, (list, tuple)) or (_is_subclass(hint, object) and issubclass(list, hint))


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}


def _described(hint: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is _Unknown:
        return "something that a recipe cannot hold"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_described(option) for option in inner if option is not _Unknown))
    if origin is Literal:
        return " or ".join(repr(choice) for choice in inner)
    if origin in _WORDS:
        return _WORDS[origin]
    if _is_subclass(origin, os.PathLike):
        return "text"
    if origin is Callable:
        arguments = ", ".join(getattr(argument, "__name__", str(argument)) for argument in inner[0])
        return f"a class whose objects are called with ({arguments}), so annotated"
    if getattr(hint, "_is_protocol", False) or _holds_items(origin):
        return "a list" + (f" of {len(inner)} values" if origin is tuple and Ellipsis not in inner and inner else "")
    if _is_subclass(origin, Mapping):
        return "keys and values"
    if _is_subclass(origin, enum.Enum):
        return "one of " + ", ".join(origin.__members__)
    return f"a class derived from {origin.__module__}.{origin.__qualname__}" if inspect.isclass(origin) else str(hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} …"
