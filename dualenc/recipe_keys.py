"""Checking a recipe's keys and class names before anything is made, so that a typo is named with its cure."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dualenc.arguments import nearest
from dualenc.errors import DualencError


class Section(NamedTuple):
    """One section of a recipe.

    Attributes:
        base: class that its `class_path` must derive from; None when there is one class only, the trainer.
        package: where a class path without a dot is looked up.
        filled: arguments that links fill in, and a recipe must leave out.
        required: whether a recipe must have the section.
    """

    base: type | None
    package: str
    filled: tuple[str, ...] = ()
    required: bool = True


def checked(settings: Mapping[str, Any], sections: Mapping[str, Section], source: str) -> dict[str, Any]:
    """The same settings with full class paths, after making sure that every key is known.

    Args:
        settings: nested values of a recipe.
        sections: what it may hold.
        source: what errors call it.

    Raises:
        DualencError: an unknown section, key or class (names the nearest valid one), or a missing section.
    """
    for name in settings:
        _check_known(name, sections, f"{source}: unknown section")
    present = {name: value for name, value in settings.items() if value is not None}
    for name, section in sections.items():
        if section.required and name not in present:
            raise DualencError(f"{source}: section '{name}' is missing; add it")
    return {name: _checked_section(name, present[name], sections, source) for name in sections if name in present}


def _checked_section(name: str, value: Any, sections: Mapping[str, Section], source: str) -> Any:
    section = sections[name]
    if not isinstance(value, Mapping):
        raise DualencError(f"{source}: section '{name}' is {value!r}; it must hold keys")
    if section.base is None:
        trainer = getattr(importlib.import_module(section.package), name.capitalize())
        for key in value:
            _check_known(key, argument_names(trainer), f"{source}: unknown key {name}.")
        return dict(value)
    return _checked_class(value, section, name, sections, source)


def _checked_class(
    value: Mapping[str, Any], section: Section, place: str, sections: Mapping[str, Section], source: str
) -> dict[str, Any]:
    """A mapping with class_path and init_args; arguments that are classes themselves are checked likewise."""
    for key in value:
        _check_known(key, ("class_path", "init_args"), f"{source}: unknown key {place}.")
    if "class_path" not in value:
        raise DualencError(f"{source}: {place}.class_path is missing; name a class of {section.package}")
    path, found = _resolve(str(value["class_path"]), section, place, source)
    known = [name for name in argument_names(found) if name not in section.filled]
    arguments = {}
    for key, argument in (value.get("init_args") or {}).items():
        if key in section.filled and key not in known:
            raise DualencError(f"{source}: {place}.init_args.{key} is filled in by the training; leave it out")
        _check_known(key, known, f"{source}: unknown key {place}.init_args.")
        is_class = isinstance(argument, Mapping) and "class_path" in argument
        inner = sections["data"]._replace(base=object)
        arguments[key] = _checked_class(argument, inner, f"{place}.{key}", sections, source) if is_class else argument
    return {"class_path": path, "init_args": arguments}


def argument_names(function: Any) -> list[str]:
    """Names that a class or function takes, those behind `**arguments` of its base classes included."""
    classes = inspect.getmro(function) if inspect.isclass(function) else ()
    constructors = [vars(c)["__init__"] for c in classes if "__init__" in vars(c)] or [function]
    names: dict[str, None] = {}
    for constructor in constructors:
        parameters = inspect.signature(constructor).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names.update(dict.fromkeys(p.name for p in parameters if p.kind in named and p.name != "self"))
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _resolve(path: str, section: Section, place: str, source: str) -> tuple[str, Any]:
    """The full path and the class or function of a class path, which may be a name of the section's package."""
    package_name, _, name = path.rpartition(".")
    package_name = package_name or section.package
    try:
        package = importlib.import_module(package_name)
    except ImportError as error:
        raise DualencError(f"{source}: {place}.class_path: cannot import {package_name} ({error})") from None
    found = getattr(package, name, None)
    if found is None or not callable(found):
        names = _candidates(package, section.base)
        raise DualencError(f"{source}: {place}.class_path: no class {name!r} in {package_name}{nearest(name, names)}")
    return f"{package_name}.{name}", found


def _candidates(package: Any, base: type | None) -> list[str]:
    classes = {name: value for name, value in vars(package).items() if inspect.isclass(value)}
    return [name for name, value in classes.items() if base is None or issubclass(value, base)]


def _check_known(key: Any, known: Iterable[str], problem: str) -> None:
    names = list(known)
    if key not in names:
        gap = "" if problem.endswith(".") else " "
        raise DualencError(f"{problem}{gap}{key}{nearest(str(key), names)}")
