"""Write docs/reference/entry-points.md, the signatures of the entry points: python
docs/entry_points.py"""

from __future__ import annotations

import inspect
import re
import sys
from collections import ChainMap
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

from hooks import help_text

from dualenc.cli import COMMANDS
from dualenc.data import TablePairs
from dualenc.encoders import TextEncoder
from dualenc.objectives import Objective, SogCLR
from dualenc.search import Index
from dualenc.search.searcher import Searcher
from dualenc.training import Trainer

PAGE = Path(__file__).parent / "reference" / "entry-points.md"
LINE_LENGTH = 100
WIDE = 1000  # columns that no usage line reaches
INTRODUCTION = """\
# Entry points

What trains a model and searches with it, with exact signatures. The references of \
[encoders](encoders.md),
[data](data.md), [objectives](objectives.md), [training](training.md) and [search](search.md) say \
what each argument
means. A whole program:

```python
from dualenc.data import TablePairs
from dualenc.encoders import TextEncoder
from dualenc.objectives import SogCLR
from dualenc.training import Trainer

pairs = TablePairs("train.csv", left_column="question", right_column="answer")
model = TextEncoder("sentence-transformers/all-MiniLM-L6-v2")
objective = SogCLR(
    num_left=pairs.num_left, num_right=pairs.num_right, gamma=0.5, positive_in_softmax=True
)
trainer = Trainer(output="runs/mine", batch_size=32, epochs=1, learning_rate=2e-5, held_out=0.1)
result = trainer.fit(model, pairs, objective)
print(result.before, result.metrics, result.model_folder)
```

Then `dualenc index runs/mine/model answers.jsonl --out index`, and

```python
from dualenc.search.searcher import Searcher

for hit in Searcher.open("index").search("how do I resume?", k=5):
    print(hit.score, hit.id, hit.snippet)
```

In the signatures `Count` is a whole number of at least 1, `Share` lies in [0, 1), `Positive` is \
above 0 and
`NotNegative` 0 or more. This page is written by `python docs/entry_points.py`."""


class EntryPoint(NamedTuple):
    """A section of the page: a class, the package that it is imported from, and its methods."""

    package: str
    cls: type
    methods: tuple[str, ...]


ENTRY_POINTS = (
    EntryPoint("dualenc.encoders", TextEncoder, ("__init__",)),
    EntryPoint("dualenc.data", TablePairs, ("__init__",)),
    EntryPoint("dualenc.objectives", Objective, ("__init__", "forward")),
    EntryPoint("dualenc.objectives", SogCLR, ("__init__",)),
    EntryPoint("dualenc.training", Trainer, ("__init__", "fit")),
    EntryPoint("dualenc.search", Index, ("build", "open", "save", "search")),
    EntryPoint("dualenc.search.searcher", Searcher, ("open", "search")),
)


def page() -> str:
    """The whole page, in Markdown."""
    parts = [INTRODUCTION, *(section(each) for each in ENTRY_POINTS)]
    parts.append(
        "## Commands\n\n[Commands](../commands.md) has their options, as `--help` prints them."
    )
    parts.append("```text\n" + "\n".join(usage(command) for command in COMMANDS) + "\n```")
    return "\n\n".join(parts) + "\n"


def section(entry: EntryPoint) -> str:
    """A class: its summary, the values of its named choices, and the signatures of its methods."""
    name = entry.cls.__name__
    bases = [
        base.__name__ for base in entry.cls.__bases__ if base in {each.cls for each in ENTRY_POINTS}
    ]
    definition = f"class {name}({', '.join(bases)}):" if bases else f"class {name}:"
    stubs = [stub(entry.cls, method) for method in entry.methods]
    code = "\n\n".join(
        [f"# from {entry.package} import {name}\n{definition}\n{stubs[0]}", *stubs[1:]]
    )
    paragraph = (inspect.getdoc(entry.cls) or "").partition("\n\n")[0].replace("\n", " ")
    return "\n\n".join([f"## {name}", paragraph, *choices(entry), f"```python\n{code}\n```"])


def stub(cls: type, method: str) -> str:
    """A method's definition without its body; an argument a line where one line is too short."""
    is_classmethod = isinstance(inspect.getattr_static(cls, method), classmethod)
    signature = inspect.signature(getattr(cls, method))
    arguments = ["cls"] if is_classmethod else []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        arguments.append(argument(parameter))
    result = f" -> {signature.return_annotation}: ..."
    line = f"    def {method}({', '.join(arguments)}){result}"
    if len(line) > LINE_LENGTH:
        rows = "".join(f"        {each},\n" for each in arguments)
        line = f"    def {method}(\n{rows}    ){result}"
    return f"    @classmethod\n{line}" if is_classmethod else line


def argument(parameter: inspect.Parameter) -> str:
    """An argument as a definition has it."""
    text = f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
    if parameter.annotation is not parameter.empty:
        # Annotations are texts: their modules import annotations from the future.
        text += f": {parameter.annotation}"
    if parameter.default is not parameter.empty:
        text += f" = {parameter.default!r}"
    return text.replace("'", '"')


def choices(entry: EntryPoint) -> list[str]:
    """A line for each type among the annotations that is a choice of texts."""
    # A method that is inherited has the types of its own module.
    names = ChainMap(*(vars(sys.modules[each.__module__]) for each in entry.cls.__mro__))
    lines = {}
    for method in entry.methods:
        for parameter in inspect.signature(getattr(entry.cls, method)).parameters.values():
            for word in re.findall(r"\w+", str(parameter.annotation)):
                if get_origin(names.get(word)) is Literal:
                    lines[word] = (
                        f"`{word}`: {', '.join(f'`{each!r}`' for each in get_args(names[word]))}."
                    )
    return list(lines.values())


def usage(command: str) -> str:
    """The first line of a command's help, and its summary."""
    first_line, _, rest = help_text(command, WIDE).partition("\n")
    summary = rest.strip().partition("\n")[0].rstrip()
    return f"{first_line.removeprefix('Usage: ')}\n    {summary}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
