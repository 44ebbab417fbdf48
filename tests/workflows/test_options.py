"""Options of workflows that are passed on have the names of the command line and of the readers."""

from __future__ import annotations

import inspect
from dataclasses import fields

from dualenc.commands.options import ColumnOptions, SourceOptions
from dualenc.data.readers.sources import open_pairs
from dualenc.search.recorded_data import RECORDED
from dualenc.workflows.pair_columns import PairColumns
from dualenc.workflows.recorded_options import ReadOptions


def test_columns_of_pairs_are_options_of_the_commands_and_of_the_reader() -> None:
    names = set(PairColumns.__annotations__)
    assert names == {field.name for field in fields(ColumnOptions)}
    assert names <= set(inspect.signature(open_pairs).parameters)


def test_options_of_a_corpus_are_those_of_the_commands() -> None:
    assert set(ReadOptions.__annotations__) == {field.name for field in fields(SourceOptions)}


def test_options_that_decide_which_items_are_read_are_recorded() -> None:
    names = [
        name for name in ReadOptions.__annotations__ if name not in ("columns", "allow_outside")
    ]
    assert names == list(RECORDED)
