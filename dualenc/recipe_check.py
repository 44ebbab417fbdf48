"""Checks of recipes: classes from a registry of names, arguments by pydantic from the signatures of constructors.

A recipe is untrusted input. Where a constructor expects a class, a recipe may name one of that type from `PACKAGES` or
a module that the user allows; nothing else is imported or called, and no class is made before all is checked.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import pkgutil
import re
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, Required

import pydantic
from typing_extensions import TypedDict

from dualenc.errors import DualencError, nearest

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


class Refusal(DualencError):
    """A problem of a value in a recipe, and the keys that lead to the value."""

    def __init__(self, problem: str, *place: str | int) -> None:
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
        super().__init__(f"{keys.removeprefix('.')} {problem}")
        self.problem = problem
        self.place = place


def build(value: Any, source: str, **filled: Any) -> Any:
    """Make the classes in a checked value, from the inside out; each takes of `filled` what its constructor has."""
    if isinstance(value, list):
        return [build(item, source, **filled) for item in value]
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {key: build(item, source, **filled) for key, item in value.items()}
    kind = pkgutil.resolve_name(value["class_path"])
    arguments = build(value["init_args"], source, **filled)
    for name in parameters(kind).keys() & filled.keys() - arguments.keys():
        arguments[name] = filled[name]
    try:
        return kind(**arguments)
    except (DualencError, OSError) as error:
        message = str(error).removeprefix(f"{kind.__name__}: ")
        raise DualencError(f"{source}: {kind.__name__}: {message}") from error


def check_class(value: Any, base: Any, allowed: Sequence[str]) -> dict[str, Any]:
    """Check a class by class_path and init_args; it must be of a type, and of the registry or an allowed module.

    Returns both, with the full path and all defaults, except of arguments that are filled in.
    """
    kind_name = getattr(typing.get_origin(base) or base, "__name__", str(base))
    wanted = f"class of type {kind_name}"
    if not isinstance(value, Mapping):
        raise Refusal(f"is {_shown(value)}; it must name a {wanted} by class_path and init_args")
    for key in value:
        if key not in CLASS_KEYS:
            raise Refusal(f"is no key of a class{nearest(str(key), CLASS_KEYS)}", key)
    path = value.get("class_path")
    if not isinstance(path, str) or not re.fullmatch(r"([A-Za-z]\w*\.)*[A-Za-z]\w*", path):
        raise Refusal(f"is {_shown(path)}; name a {wanted}", "class_path")
    classes = _registry(path, base, allowed)
    if path not in classes:
        names = [name for name in classes if "." not in name]
        others = nearest(path.rpartition(".")[2], names) or f"; there are {', '.join(names) or 'none'}"
        raise Refusal(f"is {path!r}, which is no {wanted} in the registry{others}", "class_path")
    full_path, kind = classes[path]
    values = {} if value.get("init_args") is None else value["init_args"]
    if not isinstance(values, Mapping):
        raise Refusal(f"is {values!r}; it must hold the arguments of {path}", "init_args")
    arguments = check_values(kind.__name__, parameters(kind), values, allowed, FILLED.get(kind_name, ()))
    return {"class_path": full_path, "init_args": arguments}


def _registry(path: str, base: Any, allowed: Sequence[str]) -> dict[str, tuple[str, type]]:
    """The classes for a place with their full paths: those of dualenc, or of the module in a path that is allowed."""
    packages: Sequence[str] = PACKAGES
    module, _, _ = path.rpartition(".")
    root = path.partition(".")[0]
    if module and root != "dualenc":
        if not _is_within(module, allowed):
            problem = f"is {path!r}, not of dualenc, and making it would run its code; if you trust that"
            raise Refusal(f"{problem}, allow it: --allow-module {root}", "class_path")
        packages = (module,)
    classes = {}
    for package in packages:
        try:
            values = vars(importlib.import_module(package))
        except Exception as error:  # a module of the user's may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise Refusal(f"is {path!r}; cannot import {package} ({reason})", "class_path") from error
        for name, value in values.items():
            if _fits(value, base) and _is_within(value.__module__, ("dualenc", *allowed)):
                classes[f"{package}.{name}"] = (f"{package}.{name}", value)
                classes.setdefault(name, (f"{package}.{name}", value))
    return classes


def _fits(value: Any, base: Any) -> bool:
    """Whether a value is a class that can be made for a place of this type."""
    kind = typing.get_origin(base) or base
    if not inspect.isclass(value) or inspect.isabstract(value) or not inspect.isclass(kind):
        return False
    return "__call__" in dir(value) if kind is Callable else issubclass(value, kind)


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def check_values(
    owner: str,
    known: Mapping[str, inspect.Parameter],
    values: Any,
    allowed: Sequence[str],
    filled: Sequence[str] = (),
) -> dict[str, Any]:
    """Check values strictly by the parameters of `owner` that take them, and add the defaults of the others."""
    known = {name: parameter for name, parameter in known.items() if name not in filled}
    fields: dict[str, Any] = {}
    for name, parameter in known.items():
        presence: Any = Required if parameter.default is parameter.empty else NotRequired
        fields[name] = presence[_checked_type(parameter.annotation)]
    make_type: Any = TypedDict  # mypy reads names and fields of the literal kind only
    model = make_type(owner, fields)
    model.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)
    try:
        checked = pydantic.TypeAdapter(model).validate_python(dict(values), context=allowed)
    except pydantic.ValidationError as error:
        # Misspelled keys are reported before what is missing.
        first = ("extra_forbidden", "value_error")
        details = sorted(error.errors(), key=lambda each: each["type"] not in first)
        if details[0]["type"] == "extra_forbidden" and details[0]["loc"][0] in filled:
            raise Refusal("is filled in by the training; leave it out", *details[0]["loc"]) from None
        raise _refusal(details, values, owner, known) from None
    return {name: checked.get(name, parameter.default) for name, parameter in known.items()}


def _refusal(details: Sequence[Any], value: Any, owner: str, known: Mapping[str, Any]) -> Refusal:
    """The first of pydantic's errors in our words."""
    keys = details[0]["loc"]
    if details[0]["type"] == "extra_forbidden":
        return Refusal(f"is no key of {owner}{nearest(str(keys[-1]), known)}", *keys)
    if details[0]["type"] == "missing":
        return Refusal(f"is missing; {owner} needs it", *keys)
    place = []
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break  # the name of a type, in a union
        place.append(key)
    if details[0]["type"] == "value_error":
        cause = details[0]["ctx"]["error"]
        return Refusal(cause.problem, *place, *cause.place)
    reasons = [each["msg"] for each in details if list(each["loc"][: len(place)]) == place]
    reason = " or ".join(dict.fromkeys(reasons)).replace("Input should be", "it must be")
    reason = reason.replace(" or it must be ", " or ")
    return Refusal(f"is {_shown(value)}; {reason}", *place)


def _checked_type(hint: Any) -> Any:
    """A constructor's type as pydantic checks it in a recipe; what is no plain data there is a class by name."""
    kind = typing.get_origin(hint) or hint
    if kind in (bool, int, float, str, type(None), Literal, ...):
        return hint
    if kind in (Any, object):
        return Annotated[Any, pydantic.AfterValidator(_plain_data)]
    if inspect.isclass(kind) and issubclass(kind, os.PathLike):
        return str
    inner = tuple(map(_checked_type, typing.get_args(hint) or (Any,)))
    if kind in (typing.Union, types.UnionType):
        if isinstance(getattr(inner[0], "__metadata__", (None,))[0], pydantic.PlainValidator):
            # Where a class comes first, a text without keys is more likely to be meant as its name.
            inner = tuple(each for each in inner if each is not str)
        return typing.Union[inner]  # noqa: UP007  of a computed tuple
    if kind is tuple:
        return Annotated[tuple[inner], pydantic.Strict(False)]  # type: ignore[valid-type]
    if kind in (list, Sequence):
        return Annotated[list[inner[0]], pydantic.Strict(False)]  # type: ignore[valid-type]
    if kind in (dict, Mapping):
        return dict[str, inner[-1]]  # type: ignore[valid-type]
    return Annotated[Any, pydantic.PlainValidator(partial(_class_by_name, base=hint))]


def _class_by_name(value: Any, info: pydantic.ValidationInfo, base: Any) -> dict[str, Any]:
    return check_class(value, base, info.context or ())


def _plain_data(value: Any) -> Any:
    """Refuse what looks like a class in free data."""
    for key in value if isinstance(value, dict) else ():
        if key in (*CLASS_KEYS, "dict_kwargs") or str(key).startswith("__"):
            raise Refusal(f"holds {key}, but can name no class; give plain values")
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, (dict, list)) else ():
        _plain_data(item)
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    """The parameters of a constructor with their types, those behind `**arguments` of its base classes included."""
    known: dict[str, inspect.Parameter] = {}
    for base in inspect.getmro(kind):
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        names = vars(builtins) | getattr(inspect.unwrap(constructor), "__globals__", {})
        # A type that is imported for type checkers only is none that a recipe can give.
        hints = typing.get_type_hints(constructor, localns=defaultdict(lambda: type(None), names))
        kinds = set()
        for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
            kinds.add(parameter.kind)
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                known.setdefault(name, parameter.replace(annotation=hints.get(name, Any)))
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return known
