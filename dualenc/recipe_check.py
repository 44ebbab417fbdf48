"""Checks of recipes: classes from a registry of names, arguments by pydantic from the signatures of constructors.

A recipe is untrusted input. Where a constructor expects a class, a recipe may name one of that type from `PACKAGES` or
a module that the user allows; nothing else is imported or called, and no class is made before all is checked.
The text of a refusal begins with the keys that lead to the value: `.temperature is …`, `.freeze[0] is …`.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import json
import operator
import os
import pkgutil
import re
import types
import typing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from dualenc.errors import DualencError, explain, nearest

PACKAGES = (
    *("dualenc.data", "dualenc.data.views", "dualenc.encoders", "dualenc.objectives", "dualenc.batching"),
    *("dualenc.training.evaluators", "dualenc.training.trainer"),
)
"""The registry: a recipe may name the classes of these packages, with or without the package."""
FILLED = {
    "DualEncoder": ("input_dim", "right_input_dim"),
    "Objective": ("num_left", "num_right", "views", "seed"),
    "BatchSelector": ("num_pairs", "batch_size", "seed"),
}
"""Arguments that `Recipe.build` fills in and a recipe must leave out, by base class."""
CLASS_KEYS = ("class_path", "init_args")
CONTAINERS: dict[Any, Any] = {list: list, Sequence: list, tuple: tuple, dict: dict, Mapping: dict}
"""What pydantic checks in place of a type that holds others: YAML has lists and dictionaries."""


def build(value: Any, source: str, **filled: Any) -> Any:
    """Make the classes in a checked value, from the inside out; each takes of `filled` what its constructor has."""
    if isinstance(value, list):
        return [build(item, source, **filled) for item in value]
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {key: build(item, source, **filled) for key, item in value.items()}
    kind = pkgutil.resolve_name(value["class_path"])
    taken = {name: filled[name] for name in parameters(kind).keys() & filled.keys()}
    arguments = build(value["init_args"], source, **filled)
    try:
        return kind(**taken | arguments)
    except (DualencError, OSError) as error:
        message = str(error).removeprefix(f"{kind.__name__}: ")
        raise DualencError(f"{source}: {kind.__name__}: {message}") from error


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    """The parameters of a constructor with their types, those behind `**arguments` of its base classes included."""
    known: dict[str, inspect.Parameter] = {}
    for base in inspect.getmro(kind):
        constructor = vars(base).get("__init__", object.__init__)
        names = vars(builtins) | getattr(inspect.unwrap(constructor), "__globals__", {})
        # A type that is imported for type checkers only is none that a recipe can give.
        hints = typing.get_type_hints(constructor, localns=defaultdict(lambda: type(None), names))
        _, *declared = inspect.signature(constructor).parameters.values()
        for parameter in declared:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                typed = parameter.replace(annotation=hints.get(parameter.name, Any))
                known.setdefault(parameter.name, typed)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in declared):
            break
    return known


def check_arguments(
    owner: str, known: Mapping[str, inspect.Parameter], values: Mapping[Any, Any], allowed: Sequence[str]
) -> dict[str, Any]:
    """Check values strictly by the parameters of `owner` that take them, and add the defaults of the others."""
    for key in values:
        if key not in known:
            raise DualencError(f".{key} is no key of {owner}{nearest(str(key), known)}")
    checked = {}
    for name, parameter in known.items():
        checked[name] = parameter.default
        if name in values:
            checked[name] = _check_value(values[name], parameter.annotation, name, allowed)
        elif parameter.default is parameter.empty:
            raise DualencError(f".{name} is missing; {owner} needs it")
    return checked


def _check_value(value: Any, hint: Any, name: str, allowed: Sequence[str]) -> Any:
    """Check one value strictly by a constructor's type."""
    try:
        return pydantic.TypeAdapter(_checked_type(hint)).validate_python(value, context=allowed)
    except pydantic.ValidationError as error:
        # Refusals of classes come first: they say more than the other types of a union.
        details = sorted(error.errors(), key=lambda each: each["type"] != "value_error")
    place = f".{name}"
    for key in details[0]["loc"]:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break  # the name of a type, in a union
        place += f"[{key}]" if isinstance(key, int) else f".{key}"
    if details[0]["type"] == "value_error":
        raise DualencError(f"{place}{details[0]['ctx']['error']}")
    reasons = " or ".join(dict.fromkeys(each["msg"] for each in details))
    raise DualencError(f"{place} is {value!r}; {reasons.replace('Input should', 'it must')}")


def _checked_type(hint: Any) -> Any:
    """A constructor's type as pydantic checks it in a recipe; what is no plain data there is a class by name."""
    kind = typing.get_origin(hint) or hint
    if kind in (bool, int, float, str):
        return Annotated[hint, pydantic.Strict()]
    if kind in (types.NoneType, Literal, ...):
        return hint
    if hint in (Any, object, *CONTAINERS):
        return Annotated[hint, pydantic.AfterValidator(_plain_data)]
    if inspect.isclass(kind) and issubclass(kind, os.PathLike):
        return _checked_type(str)
    if kind not in (typing.Union, types.UnionType, *CONTAINERS):
        return Annotated[Any, pydantic.PlainValidator(functools.partial(_check_class, base=kind))]
    inner = tuple(map(_checked_type, typing.get_args(hint)))
    return CONTAINERS[kind][inner] if kind in CONTAINERS else functools.reduce(operator.or_, inner)


def _plain_data(value: Any) -> Any:
    """Refuse what looks like a class in free data."""
    # In JSON a text before a colon is a key.
    for key in re.findall(r'"(class_path|init_args|dict_kwargs|__\w*)":', json.dumps(value, default=str)):
        raise DualencError(f" holds {key}, but can name no class; give plain values")
    return value


def _check_class(value: Any, context: pydantic.ValidationInfo[Any], base: Any) -> dict[str, Any]:
    """Check a class by class_path and init_args; returns both, with the full path and all defaults."""
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        wanted = f"a class of type {base.__name__} by class_path and init_args"
        raise DualencError(f" is {value!r}; it must name {wanted}")
    for key in value:
        if key not in CLASS_KEYS:
            raise DualencError(f".{key} is no key of a class{nearest(str(key), CLASS_KEYS)}")
    full_path, kind = _find_class(value["class_path"], base, context.context)
    values = value.get("init_args")
    if not isinstance(values, (Mapping, types.NoneType)):
        raise DualencError(f".init_args is {values!r}; it must hold the arguments of {kind.__name__}")
    known = parameters(kind)
    for name in FILLED.get(base.__name__, ()):
        known.pop(name, None)
        if values and name in values:
            raise DualencError(f".{name} is filled in by the training; leave it out")
    arguments = check_arguments(kind.__name__, known, values or {}, context.context)
    return {"class_path": full_path, "init_args": arguments}


def _find_class(path: str, base: Any, allowed: Sequence[str]) -> tuple[str, type]:
    """The full path and the class that a recipe names, of those that fit the place: ours, or of an allowed module."""
    module, _, name = path.rpartition(".")
    ours = ("dualenc", *allowed)
    if module and not _is_within(module, ours):
        problem = f"is {path!r}, not of dualenc, and making it would run its code; if you trust that"
        raise DualencError(f".class_path {problem}, allow it: --allow-module {module.partition('.')[0]}")
    classes = {}
    packages = (module,) if _is_within(module, allowed) else PACKAGES
    for package in packages:
        with explain(f".class_path is {path!r}; cannot import {package}", "correct it"):
            values = vars(importlib.import_module(package))
        for key, value in values.items():
            if _fits(value, base) and _is_within(value.__module__, ours):
                classes[f"{package}.{key}"] = value
    for full_path, kind in classes.items():
        if f".{full_path}".endswith(f".{path}"):
            return full_path, kind
    names = dict.fromkeys(full_path.rpartition(".")[2] for full_path in classes)
    others = nearest(name, names) or f"; there are {', '.join(names) or 'none'}"
    problem = f"which is no class of type {base.__name__} in the registry{others}"
    raise DualencError(f".class_path is {path!r}, {problem}")


def _fits(value: Any, base: Any) -> bool:
    """Whether a value is a class that can be made for a place of this type."""
    try:
        return issubclass(value, base) and not inspect.isabstract(value)
    except TypeError:
        return False  # one of the two is no class, or a protocol


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)
