"""Windows of a corpus: consecutive rows, read and prepared together, then cut into batches of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dualenc.embedding_writer import Skipped
from dualenc.errors import BadSample

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Prepare

Inputs = dict[str, Tensor]
TOKENS_PER_WINDOW = 2**21
"""Of a text window, padding included: 50 MB for BERT's three inputs."""
USUAL_LENGTH = 512


class Window(NamedTuple):
    """Consecutive rows, prepared: inputs of those that could be read, and why the others could not."""

    inputs: Inputs | None
    skipped: Skipped


class Windows(torch.utils.data.Dataset):
    """Reads and prepares window after window; picklable, so that DataLoader workers can do it."""

    def __init__(self, corpus: Corpus, prepare: Prepare, ranges: Sequence[range]) -> None:
        self.corpus, self.prepare, self.ranges = corpus, prepare, ranges

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, number: int) -> Window:
        items, skipped = [], []
        for row in self.ranges[number]:
            try:
                items.append(self.corpus[row])
            except BadSample as error:
                # A worker's exception would arrive as a traceback in one string; a message arrives as it is.
                skipped.append((row, str(error)))
        return Window(self.prepare(items) if items else None, skipped)


def text_window(prepare: Prepare, batch_size: int) -> int:
    """Texts per window: a whole number of batches of about two million tokens."""
    longest = getattr(prepare, "max_length", USUAL_LENGTH)
    return batch_size * max(1, TOKENS_PER_WINDOW // (longest * batch_size))


def by_length(inputs: Inputs, num_rows: int) -> Tensor:
    """Row numbers, longest first; in order where inputs have no lengths. Longest first: memory runs out at once."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.arange(num_rows)
    return torch.argsort(mask.sum(dim=1), descending=True, stable=True)


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some rows of prepared inputs, without the columns that are padding in all of them."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return {name: value[rows] for name, value in inputs.items()}
    columns = torch.nonzero(mask[rows].any(dim=0)).reshape(-1).tolist()
    used = slice(columns[0], columns[-1] + 1) if columns else slice(None)
    return {name: value[rows, used] if value.shape == mask.shape else value[rows] for name, value in inputs.items()}


def one_ahead(windows: Windows) -> Iterator[Window]:
    """The windows in order, each prepared in a thread while the one before is encoded."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        coming = thread.submit(windows.__getitem__, 0)
        for number in range(len(windows)):
            window = coming.result()
            if number + 1 < len(windows):
                coming = thread.submit(windows.__getitem__, number + 1)
            yield window
