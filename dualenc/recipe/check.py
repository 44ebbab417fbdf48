"""Checks of recipes: classes from a registry of names, arguments by pydantic from the signatures of
constructors.

A recipe is untrusted input. Where a constructor expects a class, a recipe may name one of that type
from `PACKAGES` or a module that the user allows; nothing else is imported or called, and no class
is made before all is checked.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from dualenc.errors import DualencError, explain, nearest

PACKAGES = (
    *(
        "dualenc.data",
        "dualenc.data.views",
        "dualenc.encoders",
        "dualenc.objectives",
        "dualenc.batching",
    ),
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
CONTAINERS = (typing.Union, types.UnionType, list, tuple, Sequence, dict, Mapping)
PLAIN = (bool, int, float, str, Path, os.PathLike, types.NoneType, Literal, Any, object, ...)


class CheckedClass(dict[str, Any]):
    """class_path and init_args of a class that was checked; `build` makes no other dictionary into
    a class."""


def build(value: Any, place: str, filled: Mapping[str, Any]) -> Any:
    """Make the classes in a checked value, from the inside out.

    Args:
        value: of `check_value`.
        place: what errors call it, such as "recipe.yaml: data".
        filled: arguments by name, for each class that was not given them.
    """
    if not isinstance(value, dict):
        return value
    if not isinstance(value, CheckedClass):
        return {key: build(item, f"{place}.{key}", filled) for key, item in value.items()}
    kind = pkgutil.resolve_name(value["class_path"])
    arguments = {name: filled[name] for name in parameters(kind).keys() & filled.keys()}
    given = value["init_args"]
    arguments |= {name: build(item, f"{place}.{name}", filled) for name, item in given.items()}
    try:
        return kind(**arguments)
    except (DualencError, OSError) as error:
        raise DualencError(_with_key(str(error), place, kind.__name__, given)) from error


def _with_key(message: str, place: str, name: str, given: Mapping[str, Any]) -> str:
    """Return a class's error with the key of the argument that it is about, else with the class."""
    message = message.removeprefix(f"{name}: ")
    first_word = message.split(maxsplit=1)[0] if message else ""
    if first_word in given:
        return f"{place}.{message}"
    # A path or a name: short values are in any message.
    texts = {key: value for key, value in given.items() if isinstance(value, str)}
    about = [key for key, value in texts.items() if len(value) > 2 and value in message]
    if len(about) == 1:
        return f"{place}.{about[0]}: {message}"
    return f"{place}: {name}: {message}"


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    """The parameters of a constructor with their types, those behind `**arguments` of its base
    classes included."""
    known: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        # A type that is imported for type checkers only is none that a recipe can give.
        names = defaultdict(
            lambda: types.NoneType, vars(builtins) | vars(sys.modules[base.__module__])
        )
        hints = typing.get_type_hints(constructor, localns=names)
        _, *declared = inspect.signature(constructor).parameters.values()
        for parameter in declared:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                typed = parameter.replace(annotation=hints.get(parameter.name, Any))
                known.setdefault(parameter.name, typed)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in declared):
            break
    return known


def check_value(value: Any, hint: Any, place: str, allowed: Sequence[str]) -> Any:
    """Check a value by a constructor's type: a class, a class or None, a mapping of classes, or
    plain data."""
    if _is_plain(hint):
        return _check_plain(value, hint, place)
    kind = typing.get_origin(hint) or hint
    inner = [member for member in typing.get_args(hint) if member is not types.NoneType]
    if len(inner) < len(typing.get_args(hint)):
        return None if value is None else check_value(value, inner[0], place, allowed)
    if kind is Mapping:
        if not isinstance(value, dict):
            raise DualencError(f"{place} is {value!r}; it must name several classes, each by a key")
        return {
            key: check_value(item, inner[1], f"{place}.{key}", allowed)
            for key, item in value.items()
        }
    return _check_class(value, kind, place, allowed)


def _is_plain(hint: Any) -> bool:
    """Whether a type holds plain data alone, and no class that a recipe would name."""
    kind = typing.get_origin(hint) or hint
    if kind in CONTAINERS:
        return all(map(_is_plain, typing.get_args(hint)))
    return kind in PLAIN


def _check_plain(value: Any, hint: Any, place: str) -> Any:
    """Check plain data as pydantic does in JSON: true is no number, nor is "3", and a list may be a
    tuple."""
    with explain(f"{place} is no plain data", "give texts, numbers, lists and dictionaries"):
        text = json.dumps(value)
    # A text before a colon is a key.
    for key in re.findall(r'"(class_path|init_args|dict_kwargs|__\w*)":', text):
        raise DualencError(f"{place} holds {key}, but can name no class; give plain values")
    try:
        return pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(strict=True)).validate_json(
            text
        )
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
    """Check a class by class_path and init_args; returns both, with the full path and all
    defaults."""
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        form = f"a class of type {base.__name__} by class_path and init_args"
        raise DualencError(f"{place} is {value!r}; it must name {form}")
    full_path, kind = _find_class(value["class_path"], base, f"{place}.class_path", allowed)
    for key in value:
        if key not in CLASS_KEYS and key in parameters(kind):
            path = place.rpartition(": ")[2]
            problem = f"{place}.{key} is an argument of {kind.__name__}"
            raise DualencError(f"{problem}; write {path}.init_args.{key}")
    check_keys(value, CLASS_KEYS, "a class", f"{place}.")
    values = value.get("init_args") or {}
    if not isinstance(values, Mapping):
        raise DualencError(
            f"{place} has arguments {values!r}; give those of {kind.__name__} by name"
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
            arguments[name] = check_value(
                values[name], parameter.annotation, f"{place}.{name}", allowed
            )
        elif parameter.default is parameter.empty:
            raise DualencError(f"{place}.{name} is missing; {kind.__name__} needs it")
    return CheckedClass(class_path=full_path, init_args=arguments)


def check_keys(values: Mapping[Any, Any], known: Collection[str], owner: str, prefix: str) -> None:
    """Refuse a key that is unknown, and name the nearest one that is known."""
    for key in values:
        if key not in known:
            raise DualencError(f"{prefix}{key} is not a key of {owner}{nearest(str(key), known)}")


def _find_class(path: str, base: Any, place: str, allowed: Sequence[str]) -> tuple[str, type]:
    """The full path and the class that a recipe names, of those that fit the place: ours, or of an
    allowed module."""
    module, _, name = path.rpartition(".")
    if module and not _is_within(module, ("dualenc", *allowed)):
        advice = f"pass --allow-module {module.partition('.')[0]} if you trust its code"
        raise DualencError(f"{place} is {path!r}, outside dualenc; {advice}")
    packages = (module,) if _is_within(module, allowed) else PACKAGES
    names = []
    for package in packages:
        with explain(f"{place} is {path!r}; cannot import {package}", "correct it"):
            classes = vars(importlib.import_module(package))
        for key, kind in classes.items():
            if _fits(kind, base) and _is_within(kind.__module__, ("dualenc", *allowed)):
                if path in (key, f"{package}.{key}"):
                    return f"{package}.{key}", kind
                names.append(key)
    advice = nearest(name, names) or f"; there are {', '.join(dict.fromkeys(names)) or 'none'}"
    package = module or "dualenc"
    raise DualencError(
        f"{place} is {path!r}, no class of type {base.__name__} in {package}{advice}"
    )


def _fits(value: Any, base: Any) -> bool:
    """Whether a value is a class that can be made for a place of this type."""
    try:
        return issubclass(value, base) and not inspect.isabstract(value)
    except TypeError:
        return False  # one of the two is no class, or a protocol


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)
