"""YAML of recipes: reading and writing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import yaml


class RecipeLoader(yaml.SafeLoader):
    """Loads YAML 1.2's plain values; keys must be unique, and aliases are not allowed.

    `no` is a string, 1e-3 a number, and 2001-01-01 a string.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def fetch_alias(self) -> NoReturn:
        # Nested aliases expand exponentially ("billion laughs").
        raise yaml.YAMLError("aliases (*name) are not allowed; write the value again")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            [(key, _)] = Counter(key.value for key, _ in node.value).most_common(1)
            line = node.start_mark.line + 1
            problem = f"the key {key} is given twice in line {line} ff."
            raise yaml.YAMLError(f"{problem}; remove one")
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another value, such as "1e3"."""


for _tag, _pattern in (
    ("null", r"~|null|Null|NULL|"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)"),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
):
    for _class in (RecipeLoader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None
        )


def dump_recipe(settings: Mapping[str, Any]) -> str:
    """Return the text of a YAML file from which `read_recipe` reads the same settings."""
    return str(yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True))
