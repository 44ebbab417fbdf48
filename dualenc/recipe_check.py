"""Checks of recipes: classes from a registry of names, arguments by pydantic from the signatures of constructors.

A recipe is untrusted input. Where a constructor expects a class, a recipe may name one of that type from `PACKAGES` or
a module that the user allows; nothing else is imported or called, and no class is made before all is checked.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import os
import pkgutil
import re
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

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
UNIONS = (typing.Union, types.UnionType)
CONTAINERS = (list, tuple, Sequence, dict, Mapping)


class CheckedClass(dict[str, Any]):
    """class_path and init_args of a class that was checked; `build` makes no other dictionary into a class."""


def build(value: Any, source: str, **filled: Any) -> Any:
    """Make the classes in a checked value, from the inside out; each takes of `filled` what its constructor has."""
    if isinstance(value, list):
        return [build(item, source, **filled) for item in value]
    if not isinstance(value, dict):
        return value
    if not isinstance(value, CheckedClass):
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


def check_value(value: Any, hint: Any, place: str, allowed: Sequence[str]) -> Any:
    """Check a value by a constructor's type: classes by name, wherever they may stand, and plain data by pydantic."""
    kind = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if _is_plain(hint):
        return _check_plain(value, hint, place)
    if kind in UNIONS:
        refusals = []
        # Refusals of classes say more than those of plain data.
        for member in sorted(inner, key=_is_plain):
            try:
                return check_value(value, member, place, allowed)
            except DualencError as error:
                refusals.append(error)
        raise refusals[0]
    if kind in (list, Sequence) and isinstance(value, list):
        return [
            check_value(item, inner[0], f"{place}[{number}]", allowed) for number, item in enumerate(value)
        ]
    if kind in (dict, Mapping) and isinstance(value, dict):
        return {key: check_value(item, inner[1], f"{place}.{key}", allowed) for key, item in value.items()}
    if kind in CONTAINERS:
        raise DualencError(f"{place} is {value!r}; it must hold several classes")
    return _check_class(value, kind, place, allowed)


def _is_plain(hint: Any) -> bool:
    """Whether a type holds plain data alone, and no class that a recipe would name."""
    kind = typing.get_origin(hint) or hint
    if kind in (*UNIONS, *CONTAINERS):
        return all(map(_is_plain, typing.get_args(hint)))
    is_path = inspect.isclass(kind) and issubclass(kind, os.PathLike)
    return is_path or kind in (bool, int, float, str, types.NoneType, Literal, Any, object, ...)


def _check_plain(value: Any, hint: Any, place: str) -> Any:
    """Check plain data as pydantic does in JSON: true is no number, nor is "3", and a list may be a tuple."""
    with explain(f"{place} is no plain data", "give texts, numbers, lists and dictionaries"):
        text = json.dumps(value)
    # A text before a colon is a key.
    for key in re.findall(r'"(class_path|init_args|dict_kwargs|__\w*)":', text):
        raise DualencError(f"{place} holds {key}, but can name no class; give plain values")
    try:
        return pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(strict=True)).validate_json(text)
    except pydantic.ValidationError as error:
        details = error.errors()
    for key in details[0]["loc"]:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break  # the name of a type, in a union
        place += f"[{key}]" if isinstance(key, int) else f".{key}"
    reasons = " or ".join(dict.fromkeys(each["msg"] for each in details))
    raise DualencError(f"{place} is {value!r}; {reasons.replace('Input should', 'it must')}")


def _check_class(value: Any, base: Any, place: str, allowed: Sequence[str]) -> CheckedClass:
    """Check a class by class_path and init_args; returns both, with the full path and all defaults."""
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        form = f"a class of type {base.__name__} by class_path and init_args"
        raise DualencError(f"{place} is {value!r}; it must name {form}")
    check_keys(value, CLASS_KEYS, "a class", f"{place}.")
    full_path, kind = _find_class(value["class_path"], base, f"{place}.class_path", allowed)
    values = {} if value.get("init_args") is None else value["init_args"]
    if not isinstance(values, Mapping):
        raise DualencError(
            f"{place}.init_args is {values!r}; it must hold the arguments of {kind.__name__}"
        )
    known = parameters(kind)
    for name in FILLED.get(base.__name__, ()):
        known.pop(name, None)
        if name in values:
            raise DualencError(f"{place}.{name} is filled in by the training; leave it out")
    check_keys(values, known, kind.__name__, f"{place}.")
    arguments = {}
    for name, parameter in known.items():
        arguments[name] = parameter.default
        if name in values:
            arguments[name] = check_value(values[name], parameter.annotation, f"{place}.{name}", allowed)
        elif parameter.default is parameter.empty:
            raise DualencError(f"{place}.{name} is missing; {kind.__name__} needs it")
    return CheckedClass(class_path=full_path, init_args=arguments)


def check_keys(values: Mapping[Any, Any], known: Collection[str], owner: str, prefix: str) -> None:
    """Refuse a key that is unknown, and name the nearest one that is known."""
    for key in values:
        if key not in known:
            raise DualencError(f"{prefix}{key} is no key of {owner}{nearest(str(key), known)}")


def _find_class(path: str, base: Any, place: str, allowed: Sequence[str]) -> tuple[str, type]:
    """The full path and the class that a recipe names, of those that fit the place: ours, or of an allowed module."""
    module, _, name = path.rpartition(".")
    ours = ("dualenc", *allowed)
    if module and not _is_within(module, ours):
        advice = f"if you trust that, allow it: --allow-module {module.partition('.')[0]}"
        raise DualencError(
            f"{place} is {path!r}, not of dualenc, and making it would run its code; {advice}"
        )
    packages = (module,) if _is_within(module, allowed) else PACKAGES
    classes = {}
    for package in packages:
        with explain(f"{place} is {path!r}; cannot import {package}", "correct it"):
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
    raise DualencError(f"{place} is {path!r}, {problem}")


def _fits(value: Any, base: Any) -> bool:
    """Whether a value is a class that can be made for a place of this type."""
    try:
        return issubclass(value, base) and not inspect.isabstract(value)
    except TypeError:
        return False  # one of the two is no class, or a protocol


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)
