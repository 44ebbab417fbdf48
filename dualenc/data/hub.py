"""Retrieval collections of the Hugging Face hub: documents, queries and judgements as configurations of a data set.

Two layouts are in use, and `datasets` loads both, by name or from a folder laid out alike. mteb's has the judgements
in the configuration `default`, split by split, with scores; NanoBEIR's in `qrels`, without scores, and calls every
split train.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dualenc.data.bad_rows import BadRows
from dualenc.data.cache import cache_option
from dualenc.data.detect import detect
from dualenc.data.line_tables import check_columns
from dualenc.data.tables import TableSource
from dualenc.errors import DualencError, explain

if TYPE_CHECKING:
    from datasets import Dataset

NANO_BEIR = "NanoBEIR"
"""Stands for the thirteen small collections below."""
_NANO_NAMES = (
    *("ClimateFEVER", "DBPedia", "FEVER", "FiQA2018", "HotpotQA", "MSMARCO", "NFCorpus", "NQ"),
    *("QuoraRetrieval", "SCIDOCS", "ArguAna", "SciFact", "Touche2020"),
)
_ADVICE = "check the name and the network"


def expand_name(source: str) -> list[str]:
    """The collections that a name stands for: NanoBEIR's thirteen, or the name itself."""
    if source != NANO_BEIR or Path(source).exists():
        return [source]
    return [f"zeta-alpha-ai/Nano{name}" for name in _NANO_NAMES]


def is_collection(source: str | Path) -> bool:
    """Whether a hub name, or a folder laid out as on the hub, has the configurations corpus and queries."""
    import datasets

    if detect(source) != "hub":
        return False
    try:
        for part in ("corpus", "queries"):
            datasets.load_dataset_builder(str(source), part, **cache_option(source))
    except Exception:  # No such configuration, or no such name: whoever opens it as a table says which.
        return False
    return True


def collection_table(source: str | Path, part: str, bad_rows: BadRows) -> TableSource:
    """The documents (part "corpus") or the queries of a collection."""
    splits = _load(source, part)
    if len(splits) > 1:
        raise DualencError(f"{source}: its {part} has splits ({', '.join(splits)}); open one as a table")
    return TableSource(f"{source} {part}", bad_rows, dataset=next(iter(splits.values())))


def hub_judgements(source: str | Path, split: str) -> Iterator[tuple[str, list[str]]]:
    """The position and [query, document, grade] of each judgement of a split; 1 where there is no score."""
    config, splits = _load_judgements(source)
    # What NanoBEIR calls train is a test: it has nothing else.
    if split == "test" and config == "qrels" and list(splits) == ["train"]:
        split = "train"
    if split not in splits:
        raise DualencError(f"{source}: no split {split!r}; there are: {', '.join(splits)}")
    name = f"{source} {config}"
    dataset = splits[split]
    check_columns(name, dataset.column_names, ["query-id", "corpus-id"])
    columns = ["query-id", "corpus-id"]
    if "score" in dataset.column_names:
        columns.append("score")
    for row, values in enumerate(zip(*(dataset.data.column(column).to_pylist() for column in columns))):
        fields = ["" if value is None else str(value) for value in values]
        yield f"{name} row {row}", fields if "score" in columns else [*fields, "1"]


def _load_judgements(source: str | Path) -> tuple[str, dict[str, Dataset]]:
    """The configuration of the judgements, `qrels` if there is one, and its splits."""
    import datasets

    try:
        datasets.load_dataset_builder(str(source), "qrels", **cache_option(source))
    except Exception:  # mteb's layout, or nothing at all, which the next call says
        return "default", _load(source, "default")
    return "qrels", _load(source, "qrels")


def _load(source: str | Path, config: str) -> dict[str, Dataset]:
    import datasets

    with explain(f"{source}: no such folder, and its {config} does not load from the hub", _ADVICE):
        return datasets.load_dataset(str(source), config, **cache_option(source))
