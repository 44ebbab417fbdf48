"""Checks of recipes: class names by a registry, arguments by the signatures of constructors.

A recipe is untrusted input. Where a constructor expects a class, a recipe may name a class of that
type from `PACKAGES` or from a module that the user allows. Nothing else is imported or called, and
no class is created before everything is checked.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from dualenc.errors import DualencError, explain, nearest

if TYPE_CHECKING:
    from dualenc.data.pairs import PairDataset
    from dualenc.training.trainer import Trainer

PACKAGES = (
    "dualenc.data",
    "dualenc.data.views",
    "dualenc.encoders",
    "dualenc.objectives",
    "dualenc.batching",
    "dualenc.training.evaluators",
    "dualenc.training.trainer",
)
"""The registry: a recipe may name the classes of these packages, with or without the package."""
FILLED: Mapping[str, Mapping[str, Callable[[Trainer, PairDataset], Any]]] = {
    "DualEncoder": {
        "input_dim": lambda _, data: data.left_dim,
        "right_input_dim": lambda _, data: data.right_dim,
    },
    "Objective": {
        "num_left": lambda _, data: data.num_left,
        "num_right": lambda _, data: data.num_right,
        "views": lambda _, data: data.views,
        "seed": lambda trainer, _: trainer.seed,
    },
    "BatchSelector": {
        "num_pairs": lambda _, data: len(data),
        "batch_size": lambda trainer, _: trainer.batch_size,
        "seed": lambda trainer, _: trainer.seed,
    },
}
"""Arguments that `Recipe.build` takes from trainer and data, by base class.

A recipe must leave them out.
"""
CLASS_KEYS = ("class_path", "init_args")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
CONTAINERS = (typing.Union, types.UnionType, list, tuple, Sequence, dict, Mapping)
PLAIN = (bool, int, float, str, Path, os.PathLike, types.NoneType, Literal, Any, object, ...)


class CheckedClass(dict[str, Any]):
    """class_path and init_args of a class that passed the checks; `build` creates only these.

    CheckedClass(class_path="dualenc.objectives.SogCLR", init_args={"gamma": 0.9})
    """


def build(value: Any, place: str, filled: Mapping[str, Any]) -> Any:
    """Create the classes in a checked value, innermost first.

    Args:
        value: result of `check_value`.
        place: name of the value in errors, such as "recipe.yaml: data".
        filled: values by argument name, for every class that has such an argument.
    """
    if not isinstance(value, dict):
        return value
    given = value["init_args"] if isinstance(value, CheckedClass) else value
    built = {name: build(item, f"{place}.{name}", filled) for name, item in given.items()}
    if not isinstance(value, CheckedClass):
        return built
    kind = pkgutil.resolve_name(value["class_path"])
    taken = {name: filled[name] for name in filled.keys() & parameters(kind).keys()}
    try:
        return kind(**(taken | built))
    except (DualencError, OSError) as error:
        raise DualencError(_with_key(str(error), place, kind.__name__, given)) from error


def _with_key(message: str, place: str, name: str, given: Mapping[str, Any]) -> str:
    """Prefix a class's error with the key of the argument it mentions, or with the class."""
    message = message.removeprefix(f"{name}: ")
    first_word = message.split(maxsplit=1)[0] if message else ""
    if first_word in given:
        return f"{place}.{message}"
    about = []
    for key, value in given.items():
        # A path or a name identifies its argument; short values occur in any message.
        if isinstance(value, str) and len(value) > 2 and value in message:
            about.append(key)
    if len(about) == 1:
        return f"{place}.{about[0]}: {message}"
    return f"{place}: {name}: {message}"


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor with their types, base classes included.

    Parameters of a base class count if the constructor passes `**arguments` on to it.
    """
    known: dict[str, inspect.Parameter] = {}
    # A constructor with `**arguments` passes them on to the next class of the MRO; one without ends
    # the search.
    for base in kind.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        # A type imported only for type checkers is not importable here. None stands for it: a
        # recipe cannot give such a value.
        names = defaultdict(
            lambda: types.NoneType, vars(builtins) | vars(sys.modules[base.__module__])
        )
        hints = typing.get_type_hints(constructor, localns=names)
        _, *declared = inspect.signature(constructor).parameters.values()
        kinds = [parameter.kind for parameter in declared]
        for parameter in declared:
            if parameter.kind in NAMED:
                typed = parameter.replace(annotation=hints.get(parameter.name, Any))
                # The subclass's own declaration wins.
                known.setdefault(parameter.name, typed)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return known


def check_value(value: Any, hint: Any, place: str, allowed: Sequence[str]) -> Any:
    """Check a value against the type of an argument.

    That is a class, an optional class, a mapping of classes, or plain data.

    Args:
        value: nested values of YAML.
        hint: type of the constructor's argument.
        place: name of the value in errors.
        allowed: modules other than `dualenc` whose classes may be named.
    """
    if _is_plain(hint):
        return _check_plain(value, hint, place)
    kind = typing.get_origin(hint) or hint
    # `X | None`: the value is None or an X.
    members = typing.get_args(hint)
    if types.NoneType in members:
        inner = next(member for member in members if member is not types.NoneType)
        return None if value is None else check_value(value, inner, place, allowed)
    if kind is not Mapping:
        return _check_class(value, kind, place, allowed)
    if not isinstance(value, dict):
        fix = "it must name several classes, each by a key"
        raise DualencError(f"{place} is {value!r}", fix=fix)
    checked = {}
    for key, item in value.items():
        checked[key] = check_value(item, members[1], f"{place}.{key}", allowed)
    return checked


def _is_plain(hint: Any) -> bool:
    """Return True if a type holds plain data only, so no class that a recipe could name."""
    kind = typing.get_origin(hint) or hint
    if kind in CONTAINERS:
        return all(map(_is_plain, typing.get_args(hint)))
    return kind in PLAIN


def _check_plain(value: Any, hint: Any, place: str) -> Any:
    """Check plain data with pydantic's strict JSON mode.

    `true` and "3" are not numbers there, while a list may become a tuple.
    """
    with explain(f"{place} is not plain data", "give strings, numbers, lists and dictionaries"):
        text = json.dumps(value)
    # In JSON, a string followed by a colon is a key.
    for key in re.findall(r'"(class_path|init_args|dict_kwargs|__\w*)":', text):
        problem = f"{place} contains {key}, but must not name a class"
        raise DualencError(problem, fix="give plain values")
    adapter = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(strict=True))
    try:
        return adapter.validate_json(text)
    except pydantic.ValidationError as error:
        raise mistyped(value, place, error) from None


def mistyped(value: Any, place: str, error: pydantic.ValidationError) -> DualencError:
    """Return the error for a value that does not have the type of its argument.

    Args:
        value: value that was checked.
        place: name of the value.
        error: error of pydantic.
    """
    details = error.errors()
    for key in details[0]["loc"]:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break  # pydantic names the member of a union here
        place += f"[{key}]" if isinstance(key, int) else f".{key}"
    # A union has one message per member.
    messages = dict.fromkeys(each["msg"] for each in details)
    reasons = " or ".join(messages).replace("Input should", "it must", 1)
    return DualencError(f"{place} is {value!r}", fix=reasons.replace("Input should be ", ""))


def _check_class(value: Any, base: Any, place: str, allowed: Sequence[str]) -> CheckedClass:
    """Check a class given by class_path and init_args; return its full path and all arguments."""
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        fix = f"it must name a class of type {base.__name__} by class_path and init_args"
        raise DualencError(f"{place} is {value!r}", fix=fix)
    full_path, kind = _find_class(value["class_path"], base, f"{place}.class_path", allowed)
    known = parameters(kind)
    # A common slip: an argument beside class_path instead of inside init_args.
    for key in value:
        if key not in CLASS_KEYS and key in known:
            fix = f"write {place.rpartition(': ')[2]}.init_args.{key}"
            raise DualencError(f"{place}.{key} is an argument of {kind.__name__}", fix=fix)
    check_keys(value, CLASS_KEYS, "a class", f"{place}.")
    values = value.get("init_args") or {}
    if not isinstance(values, Mapping):
        fix = f"give those of {kind.__name__} by name"
        raise DualencError(f"{place} has arguments {values!r}", fix=fix)
    for name in FILLED.get(base.__name__, ()):
        known.pop(name, None)
        if name in values:
            raise DualencError(f"{place}.{name} is filled in by the training", fix="leave it out")
    check_keys(values, known, kind.__name__, f"{place}.")
    arguments = {name: parameter.default for name, parameter in known.items()}
    for name, item in values.items():
        hint = known[name].annotation
        arguments[name] = check_value(item, hint, f"{place}.{name}", allowed)
    for name, argument in arguments.items():
        if argument is inspect.Parameter.empty:
            raise DualencError(f"{place}.{name} is missing", fix=f"{kind.__name__} needs it")
    return CheckedClass(class_path=full_path, init_args=arguments)


def check_keys(values: Mapping[Any, Any], known: Collection[str], owner: str, prefix: str) -> None:
    """Raise on an unknown key, and suggest the nearest valid one."""
    for key in values:
        if key not in known:
            raise DualencError(f"{prefix}{key} is not a key of {owner}{nearest(str(key), known)}")


def _find_class(path: str, base: Any, place: str, allowed: Sequence[str]) -> tuple[str, type]:
    """Return the full path and the class that a recipe names: ours, or of an allowed module."""
    module, _, name = path.rpartition(".")
    trusted = ("dualenc", *allowed)
    if module and not _is_within(module, trusted):
        fix = f"pass --allow-module {module.partition('.')[0]} if you trust its code"
        raise DualencError(f"{place} is {path!r}, outside dualenc", fix=fix)
    packages = (module,) if _is_within(module, allowed) else PACKAGES
    names = []
    for package in packages:
        with explain(f"{place} is {path!r}; cannot import {package}", "correct it"):
            classes = vars(importlib.import_module(package))
        # A module also contains the classes that it imports, such as torch.nn.Linear: a class must
        # be defined in dualenc or an allowed module, too.
        for key, kind in classes.items():
            if _fits(kind, base) and _is_within(kind.__module__, trusted):
                if path in (key, f"{package}.{key}"):
                    return f"{package}.{key}", kind
                names.append(key)
    expected = f"a class of type {base.__name__} in {module or 'dualenc'}"
    suggestion = nearest(name, names)
    choices = ", ".join(dict.fromkeys(names)) or "none"
    fix = "" if suggestion else f"choose from: {choices}"
    raise DualencError(f"{place} is {path!r}, which is not {expected}{suggestion}", fix=fix)


def _fits(value: Any, base: Any) -> bool:
    """Return True if a value is a concrete class of a type."""
    try:
        return issubclass(value, base) and not inspect.isabstract(value)
    except TypeError:
        return False  # either is not a class, or `base` is a protocol


def _is_within(module: str, packages: Sequence[str]) -> bool:
    prefixes = tuple(f"{package}." for package in packages)
    return f"{module}.".startswith(prefixes)
