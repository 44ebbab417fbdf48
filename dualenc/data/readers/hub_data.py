"""Data sets that the library `datasets` loads: by their name on the hub, or saved to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.data.readers.read_options import ONLY_SPLIT, check_split
from dualenc.data.store.cache import cache_option
from dualenc.errors import explain
from dualenc.types import StrPath

if TYPE_CHECKING:
    from datasets import Dataset


def load_from_hub(name: str, subset: str | None, split: str | None = None) -> Any:
    """Load a split of a hub data set, in the syntax of `datasets`, or all splits by name."""
    import datasets

    # Nothing distinguishes a mistyped path from a hub name, so mention both.
    failure = f"{name}: not a local file, and loading it as a hub data set fails"
    with explain(failure, "check the name, subset and split, and the network"):
        return datasets.load_dataset(name, subset, split=split, **cache_option(name))


def load_saved(folder: StrPath, split: str) -> Dataset:
    """Load a data set saved by `datasets`, or one split of several."""
    import datasets

    with explain(f"{folder}: saved data set cannot be read", "save it again"):
        loaded = datasets.load_from_disk(str(folder))
    # A `DatasetDict` is saved as one folder per split, a `Dataset` without any.
    splits = loaded if isinstance(loaded, dict) else {ONLY_SPLIT: loaded}
    check_split(folder, split, splits)
    return splits[split]


def has_configuration(source: StrPath, config: str) -> bool:
    """Return True if `datasets` finds this configuration of a hub name or folder."""
    import datasets

    try:
        datasets.load_dataset_builder(str(source), config, **cache_option(Path(source)))
    except Exception:  # Missing configuration, unknown name or no network: opening it says which.
        return False
    return True
