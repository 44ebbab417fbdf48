"""Model side + corpus → embeddings, in memory or on disk, on one process or many.

Rows are taken in windows. A text window is tokenized at once, cut into batches of equal token length (so that
almost nothing is padding), encoded, and put back in order; an image window is one batch. Windows depend on the
number of items alone: every number of workers and of processes computes the same batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.errors import BadSample, DualencError
from dualenc.files import removed_if_refused
from dualenc.search.embeddings import Embeddings, EmbeddingWriter, Skipped, shard_ranges
from dualenc.types import Inputs, Output

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Prepare, Tower

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


def embed(
    tower: Tower,
    corpus: Corpus,
    out: str | os.PathLike[str] | None = None,
    *,
    batch_size: int = 32,
    dtype: Literal["float16", "float32"] = "float32",
    output: Output = "embedding",
    autocast: Literal["bfloat16", "float16"] | None = None,
    num_workers: int | None = None,
    on_error: Literal["skip", "raise"] = "skip",
    identity: dict[str, Any] | None = None,
    notes: dict[str, Any] | None = None,
    progress: bool = True,
) -> Embeddings:
    """Embed every item of a corpus with one tower.

    Under `accelerate launch` each process takes its share of the shards; the result is that of one process (several
    machines need a file system they share). A run resumes one with the same tower, options and ids; shards with items
    whose contents have changed since, bad ones that were mended included, are embedded again.

    Args:
        tower: the side of a model to encode with; it works on the device where its weights are.
        corpus: N items of the tower's modality.
        out: folder to write, or to resume if the same run was interrupted; None keeps the vectors in memory.
        batch_size: items per forward pass.
        dtype: precision of the stored vectors.
        output: "embedding" for unit vectors (N, D); "features" for what probes use (N, feature_dim).
        autocast: run the tower in this precision; None leaves it in that of its weights.
        num_workers: processes that read and prepare items; None chooses 0 for text (its tokenizer has threads of
            its own) and up to 4 for images.
        on_error: leave out bad samples (counted in `meta["skipped"]`), or raise at the first one.
        identity: further entries of meta.json that a run must share to resume this one, such as the side.
        notes: further entries of meta.json that need not be equal, such as the model's name.
        progress: show a progress bar.

    Returns:
        The embeddings, with the ids of the items that could be used, on every process.

    Raises:
        BadSample: an unusable item under on_error="raise".
        DualencError: modalities differ, a batch_size below 1, vectors that are not finite, every item skipped, or
            `out` holds something else.
    """
    if corpus.modality != tower.modality:
        raise DualencError(f"the data is {corpus.modality}, but this side of the model encodes {tower.modality}")
    if not len(corpus):
        raise DualencError("the data holds no items; give at least one to embed")
    if batch_size < 1:
        raise DualencError(f"batch_size is {batch_size}; give at least 1")
    if num_workers is not None and num_workers < 0:
        raise DualencError(f"num_workers is {num_workers}; give 0 or more")
    encoder = _Encoder(tower, corpus, batch_size, output, autocast, num_workers, on_error)
    notes = {**(notes or {}), "modality": corpus.modality, "normalized": output == "embedding"}
    if out is None:
        return _in_memory(encoder, {**notes, **(identity or {})}, dtype, progress)
    return _on_disk(encoder, out, identity or {}, notes, dtype, progress)


def tower_checksum(tower: Tower) -> str:
    """SHA-256 over a tower's weights and the plain settings of its preprocessing (prompt, lengths)."""
    digest = hashlib.sha256()
    for name, value in sorted(tower.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    plain = {k: v for k, v in vars(tower.prepare).items() if isinstance(v, (str, int, float))}
    digest.update(repr(sorted(plain.items())).encode())
    return digest.hexdigest()


class _Encoder:
    """Encodes ranges of rows of one corpus."""

    def __init__(
        self,
        tower: Tower,
        corpus: Corpus,
        batch_size: int,
        output: Output,
        autocast: str | None,
        num_workers: int | None,
        on_error: str,
    ) -> None:
        self.tower, self.corpus, self.batch_size, self.on_error = tower, corpus, batch_size, on_error
        self.output = output
        self.dim = tower.feature_dim if output == "features" else tower.dim
        self.forward: Callable[[Inputs], Tensor] = tower.features if output == "features" else tower
        self.device = next(tower.parameters()).device
        self.autocast = getattr(torch, autocast) if autocast else None
        self.window_rows = text_window(tower.prepare, batch_size) if corpus.modality == "text" else batch_size
        self.num_workers = _default_workers(corpus, batch_size) if num_workers is None else num_workers

    def shard(self, rows: range, bar: tqdm) -> tuple[np.ndarray, Skipped]:
        """The vectors (rows, D) of a range of rows in order, float32, and the rows that were skipped."""
        starts = range(rows.start, rows.stop, self.window_rows)
        ranges = [range(start, min(start + self.window_rows, rows.stop)) for start in starts]
        parts: list[Tensor] = []
        skipped: Skipped = []
        with _evaluating(self.tower):
            for window in self._prepared(ranges):
                self._note(window.skipped, skipped)
                if window.inputs is not None:
                    parts.append(self._encode(window.inputs, bar))
                bar.update(len(window.skipped))
        return torch.cat(parts).numpy() if parts else np.empty((0, self.dim), np.float32), skipped

    def _prepared(self, ranges: list[range]) -> Iterator[Window]:
        windows = Windows(self.corpus, self.tower.prepare, ranges)
        if not self.num_workers:
            return one_ahead(windows)
        workers = min(self.num_workers, len(ranges))
        pin = self.device.type == "cuda"
        loader = torch.utils.data.DataLoader(windows, batch_size=None, num_workers=workers, pin_memory=pin)
        return iter(loader)

    def _note(self, found: Skipped, skipped: Skipped) -> None:
        if found and self.on_error == "raise":
            raise BadSample(found[0][1])
        skipped.extend(found)

    @torch.inference_mode()
    def _encode(self, inputs: Inputs, bar: tqdm) -> Tensor:
        """Encode prepared rows in batches of similar length; (rows, D) float32 on the CPU, in the rows' order."""
        num_rows = len(next(iter(inputs.values())))
        order = by_length(inputs, num_rows)
        parts = []
        for batch_rows in order.split(self.batch_size):
            batch = {name: value.to(self.device, non_blocking=True) for name, value in take(inputs, batch_rows).items()}
            parts.append(self._forward(batch))
            bar.update(len(batch_rows))
        vectors = torch.cat(parts).cpu()
        if not torch.isfinite(vectors).all():
            raise DualencError(
                "the model gives vectors that are not finite; check its weights, or embed without autocast"
            )
        return vectors[torch.argsort(order)]

    def _forward(self, batch: Inputs) -> Tensor:
        try:
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                return self.forward(batch).float()
        except torch.OutOfMemoryError:
            raise DualencError(f"out of memory with batch_size={self.batch_size}; give a smaller one") from None


def _default_workers(corpus: Corpus, batch_size: int) -> int:
    if corpus.modality == "text" or len(corpus) <= 4 * batch_size:
        return 0
    return min(4, os.cpu_count() or 1)


@contextlib.contextmanager
def _evaluating(tower: Tower) -> Iterator[None]:
    was_training = tower.training
    tower.eval()
    try:
        yield
    finally:
        tower.train(was_training)


def _bar(ranges: Sequence[range], progress: bool) -> tqdm:
    total = sum(len(rows) for rows in ranges)
    return tqdm(total=total, desc="embed", unit=" items", disable=not (progress and total and distributed.is_main()))


def _on_disk(
    encoder: _Encoder,
    out: str | os.PathLike[str],
    identity: dict[str, Any],
    notes: dict[str, Any],
    dtype: str,
    progress: bool,
) -> Embeddings:
    """Encode what is missing in a folder; each process takes its share of the shards."""
    corpus = encoder.corpus
    identity = {
        **identity,
        "output": encoder.output,
        "model_checksum": tower_checksum(encoder.tower),
    }
    with removed_if_refused(out, "shard-*.npy") if distributed.is_main() else contextlib.nullcontext():
        writer = EmbeddingWriter(
            out, corpus.ids, encoder.dim, dtype, identity, notes, lambda rows: _contents(corpus, rows)
        )
        missing = writer.missing()
        with _bar([writer.ranges[number] for number in missing], progress) as bar:
            for number in missing:
                writer.write(number, *encoder.shard(writer.ranges[number], bar))
        return writer.finish(corpus.text if corpus.modality == "text" else None)


def _in_memory(encoder: _Encoder, meta: dict[str, Any], dtype: str, progress: bool) -> Embeddings:
    """Encode every shard's rows without a folder; each process takes its share and gets the whole."""
    corpus = encoder.corpus
    ranges = shard_ranges(len(corpus))
    own = range(distributed.rank(), len(ranges), distributed.world_size())
    with _bar([ranges[number] for number in own], progress) as bar:
        mine = {number: encoder.shard(ranges[number], bar) for number in own}
    done = {number: result for part in distributed.gather_objects(mine) for number, result in part.items()}
    skipped = [entry for number in sorted(done) for entry in done[number][1]]
    vectors = np.concatenate([done[number][0] for number in sorted(done)])
    if not len(vectors):
        raise DualencError(f"none of {len(corpus)} items could be used; first: {skipped[0][1]}")
    bad = {row for row, _ in skipped}
    ids = [name for row, name in enumerate(corpus.ids) if row not in bad]
    first = [{"id": corpus.ids[row], "reason": reason} for row, reason in skipped[:100]]
    meta = {
        **meta,
        "output": encoder.output,
        "dim": encoder.dim,
        "dtype": dtype,
        "skipped": len(skipped),
        "first_skipped": first,
    }
    return Embeddings(ids, vectors.astype(dtype, copy=False), meta)


def _contents(corpus: Corpus, rows: range) -> str:
    """Checksum of some items of a corpus, so that a changed text or image under the same id is not taken for done.

    Texts are read in full. So are images, up to `MOST_IMAGES` of them; in larger sets every sixteenth, and of the
    others size and time of change count.
    """
    from dualenc.data.identity import MOST_IMAGES, digest_of, identities

    every = np.arange(rows.start, rows.stop)
    if corpus.modality == "text" or len(corpus) <= MOST_IMAGES:
        return digest_of([digest_of(*identities(corpus.items, block, True)) for block in _blocks(every)])
    unread, read = identities(corpus.items, every, False), identities(corpus.items, every[::16], True)
    return digest_of([digest_of(*unread), digest_of(*read)])


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    """Few enough rows at a time that their contents fit into memory together."""
    return np.array_split(rows, max(1, len(rows) // 256))
