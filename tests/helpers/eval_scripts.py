"""Scripts of the eval folder, which is no package: import them, and read their command lines."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.helpers.pages import ROOT

EVAL = ROOT / "eval"
# A command in backticks may go on in the next line; any other ends with its line.
OLD_BLOCK = re.compile(r"```\w*\n *git checkout \w+\n.*?```", re.DOTALL)
"""Commands of scripts that have gone, with the last commit that has them."""
COMMAND = re.compile(r"(`[^`\n]*)?\bpython\s+(eval/[\w/]+\.py)((?(1)[^`;&]*|[^`;&\n]*))")


def load_script(path: str) -> ModuleType:
    """Import the file at a path below eval/ under another name.

    It finds the modules beside it, as when it is run.
    """
    file = EVAL / path
    name = "script_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


@cache
def functions_of(script: Path) -> dict[str, ast.arguments]:
    """Return the functions that a script gives to `command_line`, with their arguments."""
    tree = ast.parse(script.read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [call.args for call in calls if ast.unparse(call.func).endswith("command_line")]
    names = [ast.unparse(each) for args in given for each in args]
    return {name: arguments_of(script, name) for name in names}


def arguments_of(script: Path, function: str) -> ast.arguments:
    """Return the arguments of a function that a file of eval defines or imports."""
    for node in ast.parse(script.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node.args
        if isinstance(node, ast.ImportFrom) and function in [each.name for each in node.names]:
            modules = [folder / f"{node.module}.py" for folder in (script.parent, EVAL)]
            return arguments_of(next(file for file in modules if file.is_file()), function)
    raise AssertionError(f"{script} gives {function} to command_line, and does not define it")


def commands(page: Path) -> list[tuple[str, str]]:
    """Return the commands of a page that run a script of this commit: its path and what follows."""
    text = OLD_BLOCK.sub("", page.read_text("utf-8")).replace("\\\n", " ")
    return [(match[2], " ".join(match[3].split())) for match in COMMAND.finditer(text)]


def mistake_in(script: str, arguments: str) -> str | None:
    """Return what is wrong with a command, as the program's own parser would see it."""
    command = f"{script} {arguments}"
    if not (ROOT / script).is_file():
        return f"{command}: no such script"
    functions = functions_of(ROOT / script)
    try:
        words = [word for word in shlex.split(arguments, comments=True) if word not in ("...", "…")]
    except ValueError as error:
        return f"{command}: {error}"
    if words == ["--check"]:
        return None
    name = words.pop(0) if len(functions) > 1 and words else next(iter(functions), "")
    if name not in functions or (len(functions) > 1 and not arguments):
        return f"{command}: name one of {', '.join(functions)}"
    own = functions[name]
    optional = {each.arg for each in own.args[len(own.args) - len(own.defaults) :]}
    optional |= {each.arg for each, default in zip(own.kwonlyargs, own.kw_defaults) if default}
    required = len(own.args) + len(own.kwonlyargs) - len(optional)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            required -= 1
        elif word[2:].partition("=")[0] not in optional:
            return f"{command}: {name} has no option {word}"
        elif "=" not in word and words:
            words.pop(0)
    return f"{command}: too many arguments" if required < 0 else None
