"""Embedding: encode a corpus with one side of a model, in memory or on disk.

Rows are processed in windows. A text window is tokenized at once, split into batches of similar
token length (so that almost nothing is padding), encoded, and put back in order. An image
window is one batch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.data.store.identity import MAX_IMAGES, digest_of, identities, plain_values
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import (
    ZERO_VECTOR,
    Prepare,
    Tower,
    check_item,
    chunk_rows,
    take,
    unit_norm,
    window_rows,
)
from dualenc.errors import BadSample, DualencError
from dualenc.io.cpus import usable_workers
from dualenc.io.provenance import Provenance
from dualenc.search.embed.writer import EmbeddingWriter, Skipped, shard_ranges, skipped_entries
from dualenc.types import Inputs, OnError, Output

if TYPE_CHECKING:
    from dualenc.data import Corpus

Window = tuple["Inputs | None", Skipped]
"""Prepared rows, or None if there are none; unusable rows with reasons."""
Known = Callable[[Sequence[int]], Mapping[int, np.ndarray]]

MAX_WEIGHT_HASHES = 16
_WEIGHT_HASHES: dict[bytes, hashlib._Hash] = {}
"""SHA-256 states after the weights of a tower, by the xxh3 of the same bytes."""
_SEED = secrets.randbits(64)
"""Makes it infeasible to craft other weights with the same xxh3."""


class EmbeddingStopped(Exception):
    """Embedding ended between two batches because the caller's `stopped` returned True."""


def embed(
    tower: Tower,
    corpus: Corpus,
    out: str | os.PathLike[str] | None = None,
    *,
    batch_size: int = 32,
    dtype: Literal["float16", "float32"] = "float32",
    output: Output = "embedding",
    dim: int | None = None,
    autocast: Literal["bfloat16", "float16"] | None = None,
    num_workers: int | None = None,
    on_error: OnError = "skip",
    identity: dict[str, Any] | None = None,
    notes: dict[str, Any] | None = None,
    progress: bool | str = True,
    stopped: Callable[[], bool] | None = None,
    known: Known | None = None,
) -> Embeddings:
    """Embed every item of a corpus with one tower.

    Any number of workers that see `out` share the work. They may start late or die at any moment,
    and all get the finished embeddings, which equal those of one process. A run with the same
    tower, options and ids resumes; shards whose items have changed are embedded again.

    Args:
        tower: side of a model to encode with, on the device of its weights.
        corpus: N items of the tower's modality.
        out: folder to write or to resume; None keeps the vectors in memory.
        batch_size: number of items per forward pass.
        dtype: precision of the stored vectors.
        output: "embedding" for unit vectors (N, D); "features" for the features that probes use,
            (N, feature_dim).
        dim: keep only this number of leading components of unit vectors, normalized again; None
            keeps all.
        autocast: precision of the forward passes; None for that of the weights.
        num_workers: number of processes that read and prepare items; None for 0, or up to 4 for
            images.
        on_error: "skip" bad samples and count them in `provenance.skipped`, or "raise" at the first
            one.
        identity: further entries of meta.json that must be equal to resume, such as the side.
        notes: further entries of meta.json that may differ, such as the model's name.
        progress: show a progress bar; a string is its description, and makes it disappear at the
            end.
        stopped: called before each batch; if it returns True on any process, all processes raise.
        known: function that returns the vectors that the tower has given before, by row, of some of
            the rows it is called with; these are not encoded again.

    Returns:
        The embeddings of all usable items, on every process.

    Raises:
        EmbeddingStopped: `stopped` returned True.
        DualencError: corpus and tower have different modalities, or no item is usable.
    """
    if corpus.modality != tower.modality:
        raise DualencError(
            f"the data is {corpus.modality}, but this side of the model encodes {tower.modality}",
            fix="choose the other side, another model or other data",
        )
    if not len(corpus):
        raise DualencError("the data is empty", fix="give at least one item to embed")
    if batch_size < 1 or (num_workers is not None and num_workers < 0):
        raise DualencError(
            f"batch_size is {batch_size}, num_workers is {num_workers}",
            fix="give a batch_size of at least 1, and num_workers of at least 0",
        )
    encoder = _Encoder(tower, corpus, batch_size, output, dim, autocast, num_workers, on_error)
    if stopped is not None:
        encoder.stopped = stopped
    if known is not None:
        encoder.known = known
    notes = {**(notes or {}), "modality": corpus.modality, "normalized": output == "embedding"}
    identity = {**(identity or {}), "output": output}
    bar = _bar(progress)
    if out is None:
        return _embed_in_memory(encoder, dtype, {**notes, **identity}, bar)
    identity |= {"model_checksum": tower_checksum(tower), "autocast": autocast}
    embeddings = _embed_into(out, encoder, dtype, identity, notes, bar)
    distributed.barrier()
    return embeddings


def _bar(progress: bool | str) -> dict[str, Any]:
    """Return the options of the progress bar."""
    is_step = isinstance(progress, str)
    return {
        "desc": progress if is_step else "embed",
        "unit": " items",
        "leave": not is_step,
        "disable": not (progress and distributed.is_main()),
        # In a log file each update is a new line, so write fewer.
        "mininterval": 0.5 if sys.stderr.isatty() else 15.0,
    }


def _embed_into(
    out: str | os.PathLike[str],
    encoder: _Encoder,
    dtype: str,
    identity: dict[str, Any],
    notes: dict[str, Any],
    bar_options: dict[str, Any],
) -> Embeddings:
    """Embed into a folder, together with other workers."""
    corpus = encoder.corpus
    writer = EmbeddingWriter(
        out,
        corpus.ids,
        encoder.dim,
        dtype,
        identity,
        notes,
        contents=functools.partial(_contents, corpus),
        snippet=corpus.text if corpus.modality == "text" else None,
        columns=corpus.columns,
        whole_text=corpus.items.__getitem__ if corpus.modality == "text" else None,
    )
    with tqdm(total=len(corpus), **bar_options) as bar:

        def encode(number: int) -> tuple[np.ndarray, Skipped]:
            # Other workers write shards too, so the total shrinks while they do.
            bar.total = bar.n + sum(len(writer.ranges[n]) for n in writer.unwritten())
            return encoder.shard(writer.ranges[number], bar)

        embeddings = writer.write_all(encode)
        # The rest was written by other workers, or before: a bar of no items would say nothing.
        bar.total = bar.n
        bar.leave = bar.leave and bar.n > 0
        return embeddings


def _embed_in_memory(
    encoder: _Encoder, dtype: str, meta: dict[str, Any], bar_options: dict[str, Any]
) -> Embeddings:
    """Embed without a folder: each process encodes some shards, and all get all of them."""
    ids = encoder.corpus.ids
    ranges = shard_ranges(len(ids))
    own = ranges[distributed.rank_slice(len(ranges))]
    encoded = []
    is_stopped = False
    with tqdm(total=sum(map(len, own)), **bar_options) as bar:
        try:
            encoded = [encoder.shard(rows, bar) for rows in own]
        except EmbeddingStopped:
            is_stopped = True
    # All processes take part before anyone raises; otherwise the others would wait forever.
    if any(distributed.gather_objects(is_stopped)):
        raise EmbeddingStopped
    # Gathered in rank order, which is the order of the shards.
    shards = [shard for part in distributed.gather_objects(encoded) for shard in part]
    skipped = [entry for _, bad in shards for entry in bad]
    vectors = np.concatenate([part for part, _ in shards])
    if not len(vectors):
        raise DualencError(f"none of {len(ids)} items could be used; first: {skipped[0][1]}")
    rows = np.delete(np.arange(len(ids)), [row for row, _ in skipped]).tolist()
    columns = None if encoder.corpus.columns is None else encoder.corpus.columns.take(rows)
    meta = {**meta, "dim": encoder.dim, "dtype": dtype, **skipped_entries(ids, skipped)}
    return Embeddings(
        [ids[row] for row in rows],
        vectors.astype(dtype, copy=False),
        Provenance.from_entries(meta),
        columns=columns,
    )


def tower_checksum(tower: Tower) -> str:
    """Return a tower's checksum: SHA-256 of its weights, preprocessing settings and pooling.

    Indexes and embeddings store it to recognize the model that made them. The SHA-256 of weights
    is cached by their contents: xxh3 reads 15 GB/s and SHA-256 0.6 GB/s, and whatever changes a
    weight (an optimizer, `load_state_dict`, `.data`, a NumPy view) is noticed.

    Args:
        tower: a tower on any device.
    """
    contents = xxhash.xxh3_128(seed=_SEED)
    for name, values in _weights(tower):
        contents.update(name)
        contents.update(values)
    digest = _hashed_weights(tower, contents.digest()).copy()
    digest.update(repr(sorted(plain_values(tower.prepare).items())).encode())
    modes = [
        part.pooling_mode for part in getattr(tower, "parts", ()) if hasattr(part, "pooling_mode")
    ]
    # The usual mean adds nothing, for compatibility with checksums from before pooling counted.
    if modes not in ([], ["mean"]):
        digest.update(repr(modes).encode())
    return digest.hexdigest()


def _hashed_weights(tower: Tower, contents: bytes) -> hashlib._Hash:
    """Return SHA-256 over a tower's weights, cached by their contents."""
    if contents not in _WEIGHT_HASHES:
        digest = hashlib.sha256()
        for name, values in _weights(tower):
            digest.update(name)
            digest.update(values)
        # Training produces new weights all the time, so drop the oldest.
        if len(_WEIGHT_HASHES) == MAX_WEIGHT_HASHES:
            del _WEIGHT_HASHES[next(iter(_WEIGHT_HASHES))]
        _WEIGHT_HASHES[contents] = digest
    return _WEIGHT_HASHES[contents]


def _weights(tower: Tower) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and bytes of each weight and buffer; on a CPU the bytes are not copied."""
    for name, value in sorted(tower.state_dict().items()):
        # NumPy lacks bfloat16, so reinterpret as bytes.
        values = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield name.encode(), values.numpy().data


class _Encoder:
    """Encodes ranges of a corpus with one tower."""

    def __init__(
        self,
        tower: Tower,
        corpus: Corpus,
        batch_size: int,
        output: Output,
        dim: int | None,
        autocast: str | None,
        num_workers: int | None,
        on_error: OnError,
    ) -> None:
        self.tower = tower
        self.corpus = corpus
        self.batch_size = batch_size
        self.on_error = on_error
        self.dim = tower.feature_dim if output == "features" else tower.dim
        if dim is not None:
            if output == "features" or not 1 <= dim <= tower.dim:
                raise DualencError(
                    f"dim is {dim}",
                    fix=f"give 1 to {tower.dim}, and only for output 'embedding'",
                )
            self.dim = dim
        self.forward: Callable[[Inputs], Tensor] = tower.features if output == "features" else tower
        self.device = next(itertools.chain(tower.parameters(), tower.buffers())).device
        self.autocast = getattr(torch, autocast) if autocast else None
        self.window_rows = window_rows(tower, batch_size)
        if num_workers is None:
            # Decoding images dominates; for a few batches, starting processes takes longer.
            is_cheap = corpus.modality != "image" or len(corpus) <= 4 * batch_size
            num_workers = 0 if is_cheap else usable_workers(4)
        self.num_workers = num_workers
        self.stopped: Callable[[], bool] = lambda: False
        self.known: Known = lambda rows: {}

    def shard(self, rows: range, bar: tqdm) -> tuple[np.ndarray, Skipped]:
        """Encode a range of rows: vectors (rows, D) float32, in order, and the skipped rows."""
        known = self.known(rows)
        bar.update(len(known))
        unknown = [row for row in rows if row not in known] if known else rows
        vectors, skipped = self._encoded(unknown, bar)
        if not known:
            return vectors, skipped
        bad = {row for row, _ in skipped}
        encoded = iter(vectors)
        merged = [known.get(row) for row in rows if row not in bad]
        return np.stack([next(encoded) if own is None else own for own in merged]), skipped

    def _encoded(self, rows: Sequence[int], bar: tqdm) -> tuple[np.ndarray, Skipped]:
        """Encode rows like `shard`, none of which is known."""
        starts = range(0, len(rows), self.window_rows)
        ranges = [rows[start : start + self.window_rows] for start in starts]
        windows = _Windows(self.corpus, self.tower.prepare, ranges)
        prepared: Iterable[Window] = windows.prefetched()
        if self.num_workers and ranges:
            # A window is a batch already, so `batch_size=None` turns collation off.
            prepared = torch.utils.data.DataLoader(
                windows,
                batch_size=None,
                num_workers=min(self.num_workers, len(ranges)),
                pin_memory=self.device.type == "cuda",
            )
        parts: list[Tensor] = []
        skipped: Skipped = []
        # `embed` may be called in the middle of training.
        was_training = self.tower.training
        self.tower.eval()
        try:
            for window, (inputs, bad) in zip(ranges, prepared):
                bar.update(len(bad))
                if inputs is not None:
                    vectors, zero = self._without_zeros(self._encode(inputs, bar), window, bad)
                    parts.append(vectors)
                    bad = sorted([*bad, *zero])
                if bad and self.on_error == "raise":
                    raise BadSample(bad[0][1])
                skipped.extend(bad)
        finally:
            self.tower.train(was_training)
        return torch.cat(parts).numpy() if parts else np.empty((0, self.dim), np.float32), skipped

    def _without_zeros(
        self, vectors: Tensor, window: Sequence[int], bad: Skipped
    ) -> tuple[Tensor, Skipped]:
        """Return the nonzero vectors of a window's usable rows, and the rows of the zero ones."""
        # A zero vector has cosine similarity 0 with everything, so it is never found. Features may
        # be zero: a probe can still use them.
        has_direction = vectors.any(dim=1)
        if self.forward == self.tower.features or has_direction.all():
            return vectors, []
        unusable = {row for row, _ in bad}
        usable = [row for row in window if row not in unusable]
        reason = f"its vector is zero: {ZERO_VECTOR[self.corpus.modality]}"
        marked = zip(usable, has_direction.tolist())
        zero = [(row, reason) for row, is_used in marked if not is_used]
        if self.on_error == "raise":
            raise BadSample(
                f"item {self.corpus.ids[zero[0][0]]}: {reason}",
                fix="correct or remove it",
            )
        return vectors[has_direction], zero

    def _encode(self, inputs: Inputs, bar: tqdm) -> Tensor:
        """Encode prepared rows in batches of similar length to (rows, D) float32, in order."""
        chunks = chunk_rows(inputs, self.batch_size)
        parts = []
        for rows in chunks:
            if self.stopped():
                raise EmbeddingStopped
            taken = take(inputs, rows)
            batch = {
                name: value.to(self.device, non_blocking=True) for name, value in taken.items()
            }
            autocast = torch.autocast(
                self.device.type, self.autocast, enabled=self.autocast is not None
            )
            try:
                # Truncated vectors are no longer of unit length, hence the normalization.
                with autocast, torch.inference_mode():
                    vectors = self.forward(batch).float()
                    parts.append(
                        unit_norm(vectors[:, : self.dim])
                        if self.dim < vectors.shape[1]
                        else vectors
                    )
            except torch.OutOfMemoryError:
                raise DualencError(
                    f"out of memory with batch_size={self.batch_size}",
                    fix="give a smaller one",
                ) from None
            bar.update(len(rows))
        # One transfer per window: each `.cpu()` waits for the device.
        vectors = torch.cat(parts).cpu()
        if not torch.isfinite(vectors).all():
            raise DualencError(
                "the vectors are not finite",
                fix="check the weights, or embed without autocast",
            )
        # Chunks are sorted by length; argsort of a permutation is its inverse.
        return vectors[torch.argsort(torch.cat(chunks))]


class _Windows(torch.utils.data.Dataset):
    """Data set of windows of rows, read and prepared; picklable for DataLoader workers."""

    def __init__(self, corpus: Corpus, prepare: Prepare, ranges: Sequence[Sequence[int]]) -> None:
        self.corpus = corpus
        self.prepare = prepare
        self.ranges = ranges

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, number: int) -> Window:
        items = []
        skipped = []
        for row in self.ranges[number]:
            try:
                item = self.corpus[row]
                check_item(item, self.corpus.modality, f"item {self.corpus.ids[row]}")
                items.append(item)
            except BadSample as error:
                # An exception in a worker process would arrive as one string with a traceback, so
                # pass on the message only.
                skipped.append((row, str(error)))
        return (self.prepare(items) if items else None), skipped

    def prefetched(self) -> Iterator[Window]:
        """Yield the windows in order, each prepared while the previous one is encoded."""
        if not self.ranges:
            return
        # A single thread overlaps tokenization with the model and keeps the order.
        with ThreadPoolExecutor(max_workers=1) as thread:
            pending = thread.submit(self.__getitem__, 0)
            for number in range(1, len(self) + 1):
                window = pending.result()
                if number < len(self):
                    pending = thread.submit(self.__getitem__, number)
                yield window


def _contents(corpus: Corpus, rows: range) -> str:
    """Return the data fingerprint of a shard; large image sets count by file size and time."""
    read = corpus.modality != "image" or len(corpus) <= MAX_IMAGES
    # The contents of a block are in memory together, so keep blocks small.
    blocks = np.array_split(np.arange(rows.start, rows.stop), max(1, len(rows) // 256))
    return digest_of([digest_of(*identities(corpus.items, block, read)) for block in blocks])
