"""Allow-list of recipes: what an untrusted recipe may name, checked before jsonargparse sees it.

jsonargparse imports whatever a text names where a class or function is expected, parses text as YAML where a number is
expected, and makes a class from any mapping that names one. `Check` therefore compares the shape of every value with
the type of its parameter. A class may be named only where one is expected, from an allowed module and of the expected
type; no other value is converted. jsonargparse's own check (4.53) also takes null for a number, a list for a path and
"3" for 3, and its errors have several lines.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from dualenc.errors import DualencError, nearest
from dualenc.signatures import argument_names
from dualenc.terminal import printable

MAX_VALUES = 10_000
"""Values in a recipe; those behind YAML's aliases count as often as they occur."""
MAX_DEPTH = 40
CLASS_KEYS = ("class_path", "init_args")
RESERVED_KEYS = (*CLASS_KEYS, "dict_kwargs")
"""Keys with a meaning for jsonargparse; plain data must not have them, nor any that begins with two underscores."""
PLAIN_TYPES = (type(None), bool, int, float, str, os.PathLike)


class TypedText(str):
    """A value from the command line, whose field's type decides between the text as typed and what it is in YAML.

    Args:
        text: as typed.
        parsed: the text read as YAML.
    """

    parsed: Any

    def __new__(cls, text: str, parsed: Any) -> TypedText:
        typed = super().__new__(cls, text)
        typed.parsed = parsed
        return typed


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
        "dualenc.batching.BatchSelector", "dualenc.batching", ("num_pairs", "batch_size", "seed"), required=False
    ),
    "evaluator": Section("dualenc.training.evaluators.Evaluator", "dualenc.training.evaluators", required=False),
    "trainer": Section("dualenc.training.trainer.Trainer", None),
}
LEFT_TO_SUBCLASSES = {
    "dualenc.encoders.dual.DualEncoder": ("write",),
    "dualenc.objectives.base.Objective": ("anchor_losses", "forward", "losses"),
}
"""For base classes that are abstract without saying so: methods of which a subclass must define at least one."""


class Check:
    """Checks a recipe; `place` in its methods names where a value is, such as `model.augment`.

    Args:
        source: what errors call the recipe.
        allow_modules: modules other than `dualenc` whose classes it may name.
    """

    def __init__(self, source: str, allow_modules: Sequence[str] = ()) -> None:
        modules = [allow_modules] if isinstance(allow_modules, str) else list(allow_modules)
        for name in modules:
            if not all(part.isidentifier() for part in str(name).split(".")):
                raise DualencError(f"--allow-module {name!r} is no module; give a name such as my_package")
        self.source = source
        self.allowed = ("dualenc", *modules)

    def recipe(self, settings: Any) -> dict[str, Any]:
        """The settings with full class paths, after all checks."""
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
                raise DualencError(f"{self.source}: section '{name}' is {_abbreviated(value)}; it must hold keys")
            self._check_names(value, name, SECTIONS[name])

        # From here on torch is imported, which takes seconds.
        checked = {}
        for name, value in present.items():
            base = SECTIONS[name].base
            if SECTIONS[name].package is None:
                checked[name] = self._arguments(base, value, name, f"{name}.")
            else:
                checked[name] = self._class(value, [base], name)
        return checked

    def _check_names(self, value: Mapping[str, Any], name: str, section: Section) -> None:
        """Refuse unknown keys of a section by the source files alone, before slow imports."""
        path = section.path
        prefix = f"{name}."
        arguments: Any = value
        if section.package is not None:
            for key in value:
                self._check_known(key, CLASS_KEYS, f"unknown key {prefix}")
            path = str(value.get("class_path"))
            if "." not in path:
                path = f"{section.package}.{path}"
            prefix = f"{prefix}init_args."
            arguments = value.get("init_args")
        names = argument_names(path)
        if names is None or not isinstance(arguments, Mapping):
            return
        for key in arguments.keys() - set(section.filled):
            self._check_known(key, [known for known in names if known not in section.filled], f"unknown key {prefix}")

    def _check_size(self, settings: Any, place: str = "") -> None:
        """Refuse what JSON does not have, and too many or too deep values; this also ends cycles of objects."""
        stack = [(settings, place, 0)]
        count = 0
        while stack:
            value, place, depth = stack.pop()
            count += 1
            if count > MAX_VALUES or depth > MAX_DEPTH:
                raise DualencError(
                    f"{self.source}: holds more than {MAX_VALUES:,} values or {MAX_DEPTH} levels; a recipe names "
                    "classes and their arguments only"
                )
            if isinstance(value, Mapping):
                for key, inner in value.items():
                    if not isinstance(key, str):
                        raise self._refusal(place or "recipe", f"the key {_abbreviated(key)} is not text; quote it")
                    stack.append((inner, f"{place}.{key}".lstrip("."), depth + 1))
            elif isinstance(value, (list, tuple)):
                stack += [(inner, place, depth + 1) for inner in value]
            elif not isinstance(value, PLAIN_TYPES):
                kind = type(value).__name__
                raise self._refusal(place, f"holds a {kind}; give text, numbers, true, false, null or lists")
            elif isinstance(value, (int, float)) and not abs(value) < 2**63:
                raise self._refusal(place, f"is {_abbreviated(value)}; give a finite number below 2^63")

    def _class(self, value: Any, bases: Sequence[Any], place: str) -> dict[str, Any]:
        """A class by `class_path` and `init_args`, which must derive from one of the base types."""
        # An objective inside another gets its sizes from the data like one in its own section.
        section = next((one for one in SECTIONS.values() if one.package and one.base in bases), None)
        package = (section.package if section else None) or "dualenc.data"
        filled = section.filled if section else ()
        if not isinstance(value, Mapping):
            expected = f"it must name {_described(bases)}, by class_path and init_args"
            raise self._refusal(place, f"is {_abbreviated(value)}; {expected}")
        for key in value:
            self._check_known(key, CLASS_KEYS, f"unknown key {place}.")
        if "class_path" not in value:
            raise DualencError(f"{self.source}: {place}.class_path is missing; name a class of {package}")
        path, found = self._resolve(value["class_path"], bases, f"{place}.class_path", package)
        arguments = value.get("init_args")
        if not isinstance(arguments, Mapping | None):
            problem = f"is {_abbreviated(arguments)}; it must hold the arguments of {path}"
            raise self._refusal(f"{place}.init_args", problem)
        checked = self._arguments(found, arguments or {}, place, f"{place}.init_args.", filled)
        return {"class_path": path, "init_args": checked}

    def _arguments(
        self, found: type, given: Mapping[str, Any], place: str, prefix: str, filled: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        hints = argument_types(found)
        for key in given:
            if key in filled:
                raise self._refusal(f"{prefix}{key}", "is filled in by the training; leave it out")
            self._check_known(key, [name for name in hints if name not in filled], f"unknown key {prefix}")
        required = [parameter.name for parameter, _ in _parameters(found) if parameter.default is parameter.empty]
        missing = [name for name in required if name not in given and name not in filled]
        if missing:
            raise self._refusal(place, f"{found.__name__} needs {', '.join(missing)}; add {prefix}{missing[0]}")
        return {key: self._value(value, hints[key], f"{place}.{key}") for key, value in given.items()}

    def _resolve(self, path: Any, bases: Sequence[Any], place: str, default: str) -> tuple[str, type]:
        """The full path and the class of a class path, which may be a name of the default package."""
        if not isinstance(path, str) or len(path) > 200 or not all(map(_is_public_name, path.split("."))):
            raise self._refusal(place, f"is {_abbreviated(path)}; name a class, such as {default}.NAME")
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
            raise self._refusal(place, f"cannot import {package_name} ({reason}); check the name") from error
        found = getattr(package, name, None)
        if any(self._fits(found, base) for base in bases):
            return f"{package_name}.{name}", typing.cast(type, found)

        problem = f"{name!r} is not {_described(bases)}"
        if found is None:
            problem = f"no class {name!r} in {package_name}"
        elif inspect.isclass(found) and any(_is_abstract(found, base) for base in bases):
            problem = f"{name!r} is abstract"
        raise self._refusal(place, f"{problem}{self._alternatives_to(name, package, bases)}")

    def _alternatives_to(self, name: str, package: Any, bases: Sequence[Any]) -> str:
        """The nearest class of a module that fits the place, or all of them."""
        names = []
        for key, value in vars(package).items():
            if _is_public_name(key) and any(self._fits(value, base) for base in bases):
                names.append(key)
        if not names:
            return "; name another class"
        return nearest(name, names) or f"; there are {', '.join(names)}"

    def _fits(self, found: Any, base: Any) -> bool:
        """Whether an attribute of a module is a class to instantiate where the base type is expected."""
        if not inspect.isclass(found) or _is_abstract(found, base) or not self._is_allowed(found.__module__):
            return False
        if inspect.isclass(base):
            return issubclass(found, base)
        # For a Callable, the class must define `__call__` with exactly these annotations: they distinguish a class
        # written for the place from everything else that can be called.
        call = getattr(found, "__call__", None)  # noqa: B004  the function itself is wanted
        if not inspect.isfunction(call):
            return False
        hints = _type_hints(call)
        _, *parameters = inspect.signature(call).parameters.values()
        annotations = [hints.get(parameter.name) for parameter in parameters if parameter.default is parameter.empty]
        return annotations == list(typing.get_args(base)[0])

    def _is_allowed(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self.allowed)

    def _value(self, value: Any, hint: Any, place: str) -> Any:
        """The value with full class paths; refused if its shape is none of the type's."""
        choices = _alternatives(hint)
        if isinstance(value, TypedText):
            value = _typed_value(value, choices)
            self._check_size(value, place)
        if value == "" and any(_is_subclass(_origin(choice), os.PathLike) for choice in choices):
            raise self._refusal(place, "is empty; name a file or folder (. is the current one)")
        if Any in choices or object in choices:
            return self._plain(value, place)
        if isinstance(value, Mapping):
            classes = [choice for choice in choices if _is_class_place(choice)]
            mappings = [choice for choice in choices if _is_subclass(_origin(choice), Mapping)]
            if mappings and not (classes and "class_path" in value):
                return self._plain(value, place, (*typing.get_args(mappings[0]), Any, Any)[1])
            if classes:
                return self._class(value, classes, place)
        elif isinstance(value, (list, tuple)):
            lists = [choice for choice in choices if _holds_items(_origin(choice)) or _is_protocol(choice)]
            if lists:
                return self._items(value, lists[0], place)
        elif any(_admits(choice, value) for choice in choices):
            return value
        if all(map(_is_class_place, choices)):
            return self._class(value, choices, place)
        raise self._refusal(place, f"is {_abbreviated(value)}; it must be {_described(choices)}")

    def _items(self, value: Sequence[Any], hint: Any, place: str) -> list[Any]:
        """The items of a list, each of its own type where the type is a tuple of fixed length."""
        types_of_items: Sequence[Any] = typing.get_args(hint)
        if _is_protocol(hint) or not types_of_items:
            return self._plain(value, place)
        if _origin(hint) is not tuple or types_of_items[-1] is Ellipsis:
            types_of_items = [types_of_items[0]] * len(value)
        if len(value) != len(types_of_items):
            raise self._refusal(place, f"has {len(value)} values; give {len(types_of_items)}")
        return [self._value(value[i], types_of_items[i], f"{place}[{i}]") for i in range(len(value))]

    def _plain(self, value: Any, place: str, hint: Any = Any) -> Any:
        """Data that names no class; the values of a mapping are of the type."""
        if isinstance(value, Mapping):
            for key in value:
                if key in RESERVED_KEYS or key.startswith("__"):
                    raise self._refusal(f"{place}.{key}", "no class can be named here; give plain values")
            return {key: self._value(item, hint, f"{place}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(item, place) for item in value]
        return value

    def _check_known(self, key: str, known: Iterable[str], problem: str) -> None:
        known = list(known)
        if key not in known:
            raise DualencError(f"{self.source}: {problem}{printable(key)[:80]}{nearest(key, known)}")

    def _refusal(self, place: str, problem: str) -> DualencError:
        if len(place) > 200:
            place = f"{place[:196]} …"
        joint = " " if problem.startswith(("is ", "has ", "holds ")) else ": "
        return DualencError(f"{self.source}: {place}{joint}{problem}")


def _is_public_name(word: str) -> bool:
    return word.isidentifier() and not word.startswith("_")


def argument_types(found: type) -> dict[str, Any]:
    """Types of the arguments that a class takes, those behind `**arguments` of its base classes included."""
    return {parameter.name: hint for parameter, hint in _parameters(found)}


def _parameters(found: type) -> Iterator[tuple[inspect.Parameter, Any]]:
    """The constructor's parameters with their types; where base classes repeat a name, that of the most derived."""
    seen = set()
    for base in inspect.getmro(found):
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        hints = _type_hints(constructor)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for parameter in parameters:
            by_name = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            if by_name and parameter.name not in seen:
                seen.add(parameter.name)
                yield parameter, hints.get(parameter.name, Any)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break


class _AnyName(type):
    """Metaclass of a class whose attributes and subscripts are the class itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Unknown(metaclass=_AnyName):
    """Stands for a type that is imported for type checkers only; no value of a recipe fits it."""


def _type_hints(function: Any) -> dict[str, Any]:
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(function, localns=unknown)
        except NameError as error:
            if not error.name or error.name in unknown:
                raise
            unknown[str(error.name)] = _Unknown


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, nested ones included, without annotations."""
    inner = typing.get_args(hint)
    if _origin(hint) is Annotated:
        return _alternatives(inner[0])
    if _origin(hint) in (typing.Union, types.UnionType):
        return [choice for option in inner for choice in _alternatives(option)]
    return [hint]


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _admits(hint: Any, value: Any) -> bool:
    """Whether a plain value is of one type: true is no integer, 3 no text, and only integers become numbers."""
    origin = _origin(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if _is_subclass(origin, enum.Enum):
        return value in origin.__members__
    if _is_subclass(origin, os.PathLike):
        return isinstance(value, (str, os.PathLike))
    return type(value) is hint or (hint is float and type(value) is int)


def _typed_value(text: TypedText, choices: Sequence[Any]) -> Any:
    """The value that an override stands for in a field of these types: the text itself if one of them is text."""
    if not any(_admits(choice, "") for choice in choices):
        return text.parsed
    if text == "null" and type(None) in choices:
        return None
    for choice in choices:
        is_list = isinstance(text.parsed, list) and _holds_items(_origin(choice))
        is_mapping = isinstance(text.parsed, dict) and (
            _is_class_place(choice) or _is_subclass(_origin(choice), Mapping)
        )
        if is_list or is_mapping:
            return text.parsed
    return str(text)


def _is_subclass(hint: Any, bases: Any) -> bool:
    # Python 3.10 takes list[int] for a class.
    return isinstance(hint, type) and typing.get_origin(hint) is None and issubclass(hint, bases)


def _is_protocol(hint: Any) -> bool:
    return getattr(hint, "_is_protocol", False)


def _is_class_place(hint: Any) -> bool:
    """Whether an object of some class must be made for a parameter of this type."""
    if typing.get_origin(hint) is Callable:
        return isinstance(typing.get_args(hint)[0], list)
    if not _is_subclass(hint, object) or hint in (Any, object, Callable, _Unknown) or _is_protocol(hint):
        return False
    return not issubclass(hint, (*PLAIN_TYPES, Mapping, enum.Enum)) and not _holds_items(hint)


def _holds_items(hint: Any) -> bool:
    return _is_subclass(hint, (list, tuple)) or (_is_subclass(hint, object) and issubclass(list, hint))


def _is_abstract(found: type, base: Any) -> bool:
    """Whether a class leaves undefined what its base leaves to subclasses."""
    needed: tuple[str, ...] = ()
    if inspect.isclass(base) and issubclass(found, base):
        needed = LEFT_TO_SUBCLASSES.get(f"{base.__module__}.{base.__qualname__}", ())
    if needed:
        return all(getattr(found, method) is getattr(base, method) for method in needed)
    return inspect.isabstract(found)


def _described(choices: Iterable[Any]) -> str:
    """Types as Python writes them, without the modules of its standard library."""
    words = []
    for choice in choices:
        if choice is not _Unknown:
            words.append(choice.__name__ if choice in PLAIN_TYPES else str(choice))
    text = " or ".join(dict.fromkeys(words)).replace("NoneType", "null").replace("<class 'pathlib.Path'>", "path")
    text = re.sub(r"<class '([\w.]+)'>", r"a class derived from \1", text)
    text = re.sub(r"\b(typing|collections\.abc|os)\.", "", text)
    text = re.sub(r"Literal\[(.*?)\]", r"one of \1", text)
    return text.replace("Callable[", "a class whose __call__ is annotated as [") or "left out"


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} …"
