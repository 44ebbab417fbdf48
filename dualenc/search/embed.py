"""Model side + corpus → embeddings, in memory or on disk, on one process or many.

Rows are taken in windows. A text window is tokenized at once, cut into batches of equal token length (so that
almost nothing is padding), encoded, and put back in order; an image window is one batch. Windows depend on the
number of items alone: every number of workers and of processes computes the same batches.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.encoders.dual import chunk_rows, placeholder, take, unit_norm
from dualenc.errors import BadSample, DualencError
from dualenc.files import removed_if_refused
from dualenc.search.embeddings import Embeddings, EmbeddingWriter, Skipped, shard_ranges, skipped_entries
from dualenc.types import Inputs, OnError, Output

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Prepare, Tower

TOKENS_PER_WINDOW = 2**21
"""Of a text window, padding included: 50 MB for BERT's three inputs."""
USUAL_LENGTH = 512
VECTORS_PER_WINDOW = 2**12

Window = tuple["Inputs | None", Skipped, "str | None"]
"""Prepared rows, if there are any; rows that cannot be used, with the reasons; and what makes going on impossible."""


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
) -> Embeddings:
    """Embed every item of a corpus with one tower.

    Any number of workers that see `out` share the work: processes of `accelerate launch`, tasks of a SLURM array, spot
    machines, actors of Ray. Each locks one shard after the other, may start late or die at any moment, and gets the
    finished embeddings, which are those of one process. A run resumes one with the same tower, options and ids; shards
    with items whose contents have changed since, bad ones that were mended included, are embedded again.

    Args:
        tower: the side of a model to encode with; it works on the device where its weights are.
        corpus: N items of the tower's modality.
        out: folder to write, or to resume if the same run was interrupted; None keeps the vectors in memory.
        batch_size: items per forward pass.
        dtype: precision of the stored vectors.
        output: "embedding" for unit vectors (N, D); "features" for what probes use (N, feature_dim).
        dim: keep only the first components of unit vectors, scaled to length one again, as models trained at several
            lengths allow; None keeps all.
        autocast: run the tower in this precision; None leaves it in that of its weights.
        num_workers: processes that read and prepare items; None chooses 0 for text (its tokenizer has threads of
            its own) and vectors, and up to 4 for images.
        on_error: leave out bad samples (counted in `meta["skipped"]`), or raise at the first one.
        identity: further entries of meta.json that a run must share to resume this one, such as the side.
        notes: further entries of meta.json that need not be equal, such as the model's name.
        progress: show a progress bar; a text describes it, and it then disappears at the end.

    Returns:
        The embeddings, with the ids of the items that could be used, on every process.

    Raises:
        BadSample: an unusable item under on_error="raise".
        DualencError: modalities differ, a batch_size below 1, vectors that are not finite, every item skipped,
            `out` holds something else, or another worker saw other data.
    """
    if corpus.modality != tower.modality:
        raise DualencError(f"the data is {corpus.modality}, but this side of the model encodes {tower.modality}")
    if not len(corpus):
        raise DualencError("the data holds no items; give at least one to embed")
    if batch_size < 1:
        raise DualencError(f"batch_size is {batch_size}; give at least 1")
    if num_workers is not None and num_workers < 0:
        raise DualencError(f"num_workers is {num_workers}; give 0 or more")
    encoder = _Encoder(tower, corpus, batch_size, output, dim, autocast, num_workers, on_error)
    if out is not None and encoder.in_step:
        raise DualencError(
            f"{out}: a sharded model embeds in memory only; leave out away, or embed with the saved model"
        )
    notes = {**(notes or {}), "modality": corpus.modality, "normalized": output == "embedding"}
    identity = {**(identity or {}), "output": output}
    shows = bool(progress) and distributed.is_main()
    description = progress if isinstance(progress, str) else "embed"
    bar_options: dict[str, Any] = {"desc": description, "unit": " items"}
    if isinstance(progress, str):
        # A log file would get a line for each update.
        bar_options |= {"leave": False, "mininterval": 0.5 if sys.stderr.isatty() else 15.0}

    if out is not None:
        identity["model_checksum"] = tower_checksum(tower)
        make_folder = removed_if_refused(out) if distributed.is_main() else contextlib.nullcontext()
        with make_folder:
            contents = functools.partial(_contents, corpus)
            texts = functools.partial(_texts, corpus) if corpus.modality == "text" else None
            snippet = corpus.text if corpus.modality == "text" else None
            how: dict[str, Any] = {"contents": contents, "texts": texts, "snippet": snippet, "columns": corpus.columns}
            writer = EmbeddingWriter(out, corpus.ids, encoder.dim, dtype, identity, notes, **how)
            with tqdm(total=len(corpus), disable=not shows, **bar_options) as bar:

                def encode(number: int) -> tuple[np.ndarray, Skipped]:
                    bar.total = bar.n + sum(len(writer.ranges[n]) for n in writer.unwritten())
                    return encoder.shard(writer.ranges[number], bar)

                try:
                    embeddings = writer.write_all(encode)
                except Exception:
                    writer.remove_if_unused()
                    raise
        distributed.barrier()
        return embeddings

    # Without a folder each process takes its share of the shards, too, and gets the whole.
    ids, ranges = corpus.ids, shard_ranges(len(corpus))
    own = range(distributed.rank(), len(ranges), distributed.world_size())
    total = sum(len(ranges[number]) for number in own)
    with tqdm(total=total, disable=not (shows and total), **bar_options) as bar:
        mine = {number: encoder.shard(ranges[number], bar) for number in own}
    encoder.keep_company()
    by_number = {number: shard for part in distributed.gather_objects(mine) for number, shard in part.items()}
    shards = [by_number[number] for number in range(len(ranges))]
    skipped = [entry for _, bad in shards for entry in bad]
    vectors = np.concatenate([part for part, _ in shards])
    if not len(vectors):
        raise DualencError(f"none of {len(ids)} items could be used; first: {skipped[0][1]}")
    unread = {row for row, _ in skipped}
    rows = [row for row in range(len(ids)) if row not in unread]
    columns = None if corpus.columns is None else corpus.columns.take(rows)
    meta = {**notes, **identity, "dim": encoder.dim, "dtype": dtype, **skipped_entries(ids, skipped)}
    return Embeddings([ids[row] for row in rows], vectors.astype(dtype, copy=False), meta, columns=columns)


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
        dim: int | None,
        autocast: str | None,
        num_workers: int | None,
        on_error: OnError,
    ) -> None:
        self.tower, self.corpus, self.batch_size, self.on_error = tower, corpus, batch_size, on_error
        self.dim = tower.feature_dim if output == "features" else tower.dim
        if dim is not None:
            if output == "features" or not 1 <= dim <= tower.dim:
                raise DualencError(f"dim is {dim}: give 1 to {tower.dim}, of embeddings; features are always whole")
            self.dim = dim
        self.forward: Callable[[Inputs], Tensor] = tower.features if output == "features" else tower
        self.device = next(itertools.chain(tower.parameters(), tower.buffers())).device
        self.in_step = any(distributed.is_sharded(parameter) for parameter in tower.parameters())
        self.autocast = getattr(torch, autocast) if autocast else None
        self.window_rows = batch_size
        if corpus.modality == "text":  # a whole number of batches
            longest = getattr(tower.prepare, "max_length", USUAL_LENGTH)
            self.window_rows *= max(1, TOKENS_PER_WINDOW // (longest * batch_size))
        elif corpus.modality == "vector":
            self.window_rows *= max(1, VECTORS_PER_WINDOW // batch_size)
        if num_workers is None:
            few = corpus.modality != "image" or len(corpus) <= 4 * batch_size
            num_workers = 0 if few else min(4, os.cpu_count() or 1)
        self.num_workers = num_workers

    def shard(self, rows: range, bar: tqdm) -> tuple[np.ndarray, Skipped]:
        """The vectors (rows, D) of a range of rows in order, float32, and the rows that were skipped."""
        starts = range(rows.start, rows.stop, self.window_rows)
        ranges = [range(start, min(start + self.window_rows, rows.stop)) for start in starts]
        windows = _Windows(self.corpus, self.tower.prepare, ranges)
        prepared: Iterable[Window] = windows.one_ahead()
        if self.num_workers:
            workers, pin = min(self.num_workers, len(ranges)), self.device.type == "cuda"
            prepared = torch.utils.data.DataLoader(windows, batch_size=None, num_workers=workers, pin_memory=pin)
        parts: list[Tensor] = []
        skipped: Skipped = []
        was_training = self.tower.training
        self.tower.eval()
        try:
            for inputs, bad, fault in prepared:
                if fault is not None:
                    raise DualencError(fault)
                if bad and self.on_error == "raise":
                    raise BadSample(bad[0][1])
                skipped.extend(bad)
                bar.update(len(bad))
                if inputs is not None:
                    parts.append(self._encode(inputs, bar))
        finally:
            self.tower.train(was_training)
        return torch.cat(parts).numpy() if parts else np.empty((0, self.dim), np.float32), skipped

    def keep_company(self) -> None:
        """Make the passes through a sharded tower that other ranks still make; each rank calls it once it is done."""
        if not self.in_step:
            return
        inputs = {name: value.to(self.device) for name, value in placeholder(self.tower).items()}
        was_training = self.tower.training
        self.tower.eval()
        with torch.no_grad():
            while self._some_rank_works(False):
                self.forward(inputs)
        self.tower.train(was_training)

    def _some_rank_works(self, this_one: bool) -> bool:
        """Whether any rank is about to encode a batch; each asks before each pass through a sharded tower."""
        return bool(distributed.all_reduce(torch.tensor(int(this_one), device=self.device), "max"))

    def _encode(self, inputs: Inputs, bar: tqdm) -> Tensor:
        """Encode prepared rows in batches of similar length; (rows, D) float32 on the CPU, in the rows' order."""
        chunks, parts = chunk_rows(inputs, self.batch_size), []
        for rows in chunks:
            batch = {name: value.to(self.device, non_blocking=True) for name, value in take(inputs, rows).items()}
            if self.in_step:
                self._some_rank_works(True)
            autocast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)
            try:
                # What a sharded tower brings together in inference mode could not be trained afterwards.
                explained = distributed.explain_lost_process()
                with explained, autocast, torch.inference_mode(not self.in_step), torch.no_grad():
                    vectors = self.forward(batch).float()
                    parts.append(unit_norm(vectors[:, : self.dim]) if self.dim < vectors.shape[1] else vectors)
            except torch.OutOfMemoryError:
                raise DualencError(f"out of memory with batch_size={self.batch_size}; give a smaller one") from None
            bar.update(len(rows))
        vectors = torch.cat(parts).cpu()
        if not torch.isfinite(vectors).all():
            raise DualencError(
                "the model gives vectors that are not finite; check its weights, or embed without autocast"
            )
        return vectors[torch.argsort(torch.cat(chunks))]


class _Windows(torch.utils.data.Dataset):
    """Reads and prepares window after window; picklable, so that DataLoader workers can do it."""

    def __init__(self, corpus: Corpus, prepare: Prepare, ranges: Sequence[range]) -> None:
        self.corpus, self.prepare, self.ranges = corpus, prepare, ranges

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, number: int) -> Window:
        """Inputs of the rows that could be read, why the others could not, and why none can any more."""
        items, skipped = [], []
        for row in self.ranges[number]:
            try:
                items.append(self.corpus[row])
            except BadSample as error:
                # A worker's exception would arrive as a traceback in one string; a message arrives as it is.
                skipped.append((row, str(error)))
            except DualencError as error:  # a server is away
                return None, [], str(error)
        return (self.prepare(items) if items else None), skipped, None

    def one_ahead(self) -> Iterator[Window]:
        """The windows in order, each prepared in a thread while the one before is encoded."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            coming = thread.submit(self.__getitem__, 0)
            for following in range(1, len(self) + 1):
                window = coming.result()
                if following < len(self):
                    coming = thread.submit(self.__getitem__, following)
                yield window


def _texts(corpus: Corpus, rows: Sequence[int]) -> str:
    from dualenc.data.identity import texts_checksum

    return texts_checksum((corpus.ids[row], corpus[row]) for row in rows)


def _contents(corpus: Corpus, rows: range) -> str:
    """Checksum of some items of a corpus, so that a changed text or image under the same id is not taken for done.

    Texts and vectors are read in full. So are images, up to `MAX_IMAGES` of them; in larger sets every sixteenth, and
    of the others size and time of change count.
    """
    from dualenc.data.identity import MAX_IMAGES, digest_of, identities

    every = np.arange(rows.start, rows.stop)
    if corpus.modality != "image" or len(corpus) <= MAX_IMAGES:
        # Few enough at a time that their contents fit into memory together.
        blocks = np.array_split(every, max(1, len(every) // 256))
        return digest_of([digest_of(*identities(corpus.items, block, True)) for block in blocks])
    unread, read = identities(corpus.items, every, False), identities(corpus.items, every[::16], True)
    return digest_of([digest_of(*unread), digest_of(*read)])
