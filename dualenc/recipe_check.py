"""Allow-list of recipes: jsonargparse imports whatever an untrusted recipe names where it expects a class.

`Check` therefore walks a recipe beside the types of its classes' arguments before jsonargparse sees it. A class may be
named only where one is expected, from an allowed module and of the expected type. jsonargparse then checks all other
values.
"""

from __future__ import annotations

import builtins
import enum
import importlib
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dualenc.errors import DualencError, nearest

CLASS_KEYS = ("class_path", "init_args")
RESERVED_KEYS = (*CLASS_KEYS, "dict_kwargs")  # with a meaning for jsonargparse
TEXTS = (str, os.PathLike)
LISTS = (list, tuple, Sequence)
DATA_TYPES = (type(None), bool, int, float, enum.Enum, Mapping, *TEXTS, *LISTS)


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
        """The class; imported on access, because that imports its whole package."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


SECTIONS = {
    "data": Section("dualenc.data.PairDataset", "dualenc.data"),
    "model": Section("dualenc.encoders.DualEncoder", "dualenc.encoders", ("input_dim", "right_input_dim")),
    "objective": Section(
        "dualenc.objectives.Objective", "dualenc.objectives", ("num_left", "num_right", "views", "seed")
    ),
    "batching": Section(
        "dualenc.batching.BatchSelector",
        "dualenc.batching",
        ("num_pairs", "batch_size", "seed"),
        required=False,
    ),
    "evaluator": Section(
        "dualenc.training.evaluators.Evaluator", "dualenc.training.evaluators", required=False
    ),
    "trainer": Section("dualenc.training.settings.TrainerSettings", None),
}


class Check:
    """Checks a recipe; `place` in its methods names where a value is, such as `model.augment`.

    Args:
        source: what errors call the recipe.
        allow_modules: modules other than `dualenc` whose classes it may name.
    """

    def __init__(self, source: str, allow_modules: Sequence[str] = ()) -> None:
        self.source = source
        self.allowed = ("dualenc", *allow_modules)

    def recipe(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with full class paths, after all checks."""
        for name in settings:
            self._check_known(name, SECTIONS, "section ")
        checked = {}
        for name, section in SECTIONS.items():
            value = settings.get(name)
            if value is None and not section.required:
                continue
            if not isinstance(value, Mapping):
                problem = "is missing; add it" if value is None else f"is {value!r}; it must hold keys"
                raise self._refusal(name, problem)
            # Importing a base class imports torch, which takes seconds.
            if section.package is None:
                checked[name] = self._arguments(section.base, value, name)
            else:
                checked[name] = self._class(value, [section.base], name)
        return checked

    def _class(self, value: Mapping[str, Any], bases: Sequence[Any], place: str) -> dict[str, Any]:
        """A class by `class_path` and `init_args`, which must derive from one of the base types."""
        package = "dualenc.data"
        filled: tuple[str, ...] = ()
        # An objective inside another gets its sizes from the data like one in its own section.
        for section in SECTIONS.values():
            if section.package is not None and section.base in bases:
                package = section.package
                filled = section.filled
        for key in value:
            self._check_known(key, CLASS_KEYS, f"key {place}.")
        if "class_path" not in value:
            raise DualencError(f"{self.source}: {place}.class_path is missing; name a class of {package}")
        path, resolved = self._resolve(value["class_path"], bases, f"{place}.class_path", package)
        arguments = value.get("init_args")
        if not isinstance(arguments, Mapping | None):
            raise self._refusal(
                f"{place}.init_args", f"is {arguments!r}; it must hold the arguments of {path}"
            )
        return {"class_path": path, "init_args": self._arguments(resolved, arguments or {}, place, filled)}

    def _arguments(
        self, cls: type, values: Mapping[str, Any], place: str, filled: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        hints = argument_types(cls)
        known = [name for name in hints if name not in filled]
        for name in values:
            if name in filled:
                raise self._refusal(f"{place}.{name}", "is filled in by the training; leave it out")
            self._check_known(name, known, f"key {place}.")
        for parameter, _ in _parameters(cls):
            name = parameter.name
            is_required = parameter.default is parameter.empty and name in known
            if is_required and name not in values:
                raise self._refusal(place, f"{cls.__name__} needs {name}; add {place}.{name}")
        return {name: self._value(value, hints[name], f"{place}.{name}") for name, value in values.items()}

    def _resolve(self, path: Any, bases: Sequence[Any], place: str, default: str) -> tuple[str, type]:
        """The full path and the class of a class path, which may be a name of the default package."""
        if not isinstance(path, str) or not re.fullmatch(r"([A-Za-z]\w*\.)*[A-Za-z]\w*", path):
            raise self._refusal(place, f"is {path!r}; name a class, such as {default}.NAME")
        package_name, _, name = path.rpartition(".")
        package_name = package_name or default
        if not self._is_allowed(package_name):
            root = package_name.partition(".")[0]
            problem = f"{path} is not of dualenc, and making it would run its code; if you trust that, allow it: "
            raise self._refusal(place, f"{problem}--allow-module {root}")
        try:
            package = importlib.import_module(package_name)
        except Exception as error:  # a module of the user's may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise self._refusal(
                place, f"cannot import {package_name} ({reason}); check the name"
            ) from error
        cls = getattr(package, name, None)
        if any(self._fits(cls, base) for base in bases):
            return f"{package_name}.{name}", typing.cast(type, cls)

        names = [
            key for key, value in vars(package).items() if any(self._fits(value, base) for base in bases)
        ]
        alternatives = nearest(name, names) or f"; there are {', '.join(names) or 'none'}"
        raise self._refusal(place, f"{name!r} in {package_name} is not {_described(bases)}{alternatives}")

    def _fits(self, cls: Any, base: Any) -> bool:
        """Whether an attribute of a module is a class for a place of this type: a base class, or a Callable."""
        if not inspect.isclass(cls) or inspect.isabstract(cls) or not self._is_allowed(cls.__module__):
            return False
        origin = typing.get_origin(base) or base
        if origin is Callable:
            return "__call__" in dir(cls)
        return inspect.isclass(origin) and issubclass(cls, origin)

    def _is_allowed(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self.allowed)

    def _value(self, value: Any, hint: Any, place: str) -> Any:
        """The value with full class paths; refused if it names a class where none is expected, or no class of ours."""
        choices = _alternatives(hint)
        classes = [choice for choice in choices if _is_class_place(choice)]
        if isinstance(value, Mapping):
            mapping_type = _container(choices, Mapping)
            if classes and ("class_path" in value or mapping_type is None):
                return self._class(value, classes, place)
            return self._mapping(value, mapping_type, place)
        if isinstance(value, (list, tuple)):
            item_hint, *_ = typing.get_args(_container(choices, LISTS)) or (Any,)
            return [self._value(item, item_hint, f"{place}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, str) and classes:
            # jsonargparse tries the types in order, and imports what a text names before it tries a later `str`.
            text_type = _container(choices, TEXTS)
            if text_type is None or choices.index(text_type) > choices.index(classes[0]):
                expected = f"it must name {_described(classes)}, by class_path and init_args"
                raise self._refusal(place, f"is {value!r}; {expected}")
        if value is None and not {type(None), Any, object}.intersection(choices):
            raise self._refusal(place, f"is null; it must be {_described(choices)}")
        return value

    def _mapping(self, value: Mapping[str, Any], hint: Any, place: str) -> dict[str, Any]:
        """Plain data, or classes by name if those are the items of the type."""
        *_, item_hint = typing.get_args(hint) or (Any,)
        checked = {}
        for key, item in value.items():
            if key in RESERVED_KEYS or str(key).startswith("__"):
                raise self._refusal(f"{place}.{key}", "no class can be named here; give plain values")
            checked[key] = self._value(item, item_hint, f"{place}.{key}")
        return checked

    def _check_known(self, key: str, known: Iterable[str], kind: str) -> None:
        known = list(known)
        if key not in known:
            raise DualencError(f"{self.source}: unknown {kind}{key}{nearest(str(key), known)}")

    def _refusal(self, place: str, problem: str) -> DualencError:
        joint = " " if problem.startswith("is ") else ": "
        return DualencError(f"{self.source}: {place}{joint}{problem}")


def argument_types(cls: type) -> dict[str, Any]:
    """Types of the arguments that a class takes, those behind `**arguments` of its base classes included."""
    return {parameter.name: hint for parameter, hint in _parameters(cls)}


def _parameters(cls: type) -> Iterator[tuple[inspect.Parameter, Any]]:
    """The constructor's parameters with their types; where base classes repeat a name, that of the most derived."""
    seen = set()
    for base in inspect.getmro(cls):
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        hints = _type_hints(constructor)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        passes_on = False
        for parameter in parameters:
            passes_on |= parameter.kind is parameter.VAR_KEYWORD
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if by_name and parameter.name not in seen:
                seen.add(parameter.name)
                yield parameter, hints.get(parameter.name, Any)
        if not passes_on:
            break


class _Unknown:
    """Stands for a type that is imported for type checkers only; no class of a recipe fits it."""


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _Unknown)


def _type_hints(function: Any) -> dict[str, Any]:
    module_names = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(function, localns=_Names(module_names))


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, nested ones included."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint]
    return [choice for option in typing.get_args(hint) for choice in _alternatives(option)]


def _container(choices: Iterable[Any], kinds: Any) -> Any:
    """The first of the types that is one of the kinds, or None."""
    for choice in choices:
        origin = typing.get_origin(choice) or choice
        is_text = origin is str and kinds is LISTS
        if inspect.isclass(origin) and issubclass(origin, kinds) and not is_text:
            return choice
    return None


def _is_class_place(hint: Any) -> bool:
    """Whether jsonargparse makes or imports something for a value of this type."""
    origin = typing.get_origin(hint) or hint
    if hint in (Any, object) or origin is Literal:
        return False
    return not inspect.isclass(origin) or not issubclass(origin, DATA_TYPES)


def _described(choices: Iterable[Any]) -> str:
    """Types as an error shows them."""
    words = []
    for choice in choices:
        if _is_class_place(choice) and inspect.isclass(choice):
            words.append(f"a class derived from {choice.__module__}.{choice.__qualname__}")
        else:
            words.append(getattr(choice, "__name__", str(choice)))
    return " or ".join(words)
