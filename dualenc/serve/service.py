"""The search service: the open index, its worker thread, and hot reload."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from dualenc.decoding import decode_upload, decoding_apart
from dualenc.errors import BadSample, DualencError
from dualenc.search.kept import FOLDER as TEXTS
from dualenc.search.lexical import FOLDER as LEXICAL
from dualenc.search.searcher import Query, Searcher
from dualenc.serve.batching import Batcher
from dualenc.serve.metrics import Metrics
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.search.hits import Hit
    from dualenc.types import Side

log = logging.getLogger("dualenc.serve")

MAX_DECODERS = 2
"""Images that are decoded at a time; one may take a GiB."""
THUMBNAIL_PIXELS = 384
MAX_THUMBNAILS = 512
WATCH_EVERY_S = 2.0


class Embedded(NamedTuple):
    """A vector (D,), and how many tokens its text had."""

    vector: np.ndarray
    tokens: int


class _Job(NamedTuple):
    """A query to search with, or a text for a side to encode."""

    searcher: Searcher
    side: Side | None
    item: Query | str


class Service:
    """An open index that answers many callers, and reloads while it does.

    Every call is answered by the index that was open when it arrived: a reload drops no call and mixes no indexes.

    Args:
        open_searcher: opens the index; gets the previous searcher, whose model it may use again.
        pictures: the images of the index by id, to show with results; None if there are none to show.
        metrics: counters.
        batching: arguments of `Batcher`.
    """

    def __init__(
        self,
        open_searcher: Callable[[Searcher | None], Searcher],
        *,
        pictures: Corpus | None = None,
        metrics: Metrics,
        **batching: Any,
    ) -> None:
        self._open = open_searcher
        self.metrics = metrics
        self.searcher = open_searcher(None)
        self.generation = 1
        self.changed = time.time()
        self.pictures = pictures
        self._picture_row = {} if pictures is None else {name: row for row, name in enumerate(pictures.ids)}
        self._thumbnail = lru_cache(MAX_THUMBNAILS)(self._make_thumbnail)
        self._decoders = threading.BoundedSemaphore(MAX_DECODERS)
        self._reloading = threading.Lock()
        self.batcher = Batcher(self._work, observe=metrics.batch_size.observe, **batching)
        metrics.waiting.set_function(lambda: len(self.batcher))
        metrics.vectors.set_function(lambda: len(self.searcher))

    def search(self, searcher: Searcher, query: Query) -> Future[list[Hit]]:
        """Search; the future brings the results.

        Raises:
            QueueFull: too much waits.
        """
        return self.batcher.submit([_Job(searcher, None, query)])[0]

    def embed(self, searcher: Searcher, side: Side, texts: Sequence[str]) -> list[Future[Embedded]]:
        """Encode texts; a future for each, so that searches need not wait for all of them.

        Raises:
            QueueFull: too much waits for so many.
        """
        return self.batcher.submit([_Job(searcher, side, text) for text in texts])

    def prepare_image(self, searcher: Searcher, data: bytes) -> Query:
        """Decode an uploaded image to a query, which is small whatever the image was. Thread-safe.

        Raises:
            BadSample: what `decode_upload` raises.
            DualencError: the model encodes no images.
        """
        side = searcher.query_side("image")
        with self._decoders:
            image = decode_upload(data, "the upload")
            return Query(side, inputs=searcher.encoder.tower(side).prepare([image]))

    def thumbnail(self, name: str) -> bytes | None:
        """A small JPEG of an image of the index; None if there is none with that id. Thread-safe."""
        row = self._picture_row.get(name)
        if row is None:
            return None
        try:
            return self._thumbnail(row)
        except BadSample:
            return None

    def text(self, name: str) -> str | None:
        """The whole text of an item; None if texts are not kept, or not of that id. Thread-safe."""
        texts = self.searcher.texts
        if texts is None:
            return None
        try:
            return texts.of([name])[0]
        except DualencError:
            return None

    def _make_thumbnail(self, row: int) -> bytes:
        assert self.pictures is not None
        with self._decoders, decoding_apart(THUMBNAIL_PIXELS):
            image: Image.Image = self.pictures[row]
        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
        return file.getvalue()

    def reload(self) -> int:
        """Open the index again; calls that arrived before are still answered by the old one.

        Returns:
            The number of the index: 1 for the first.

        Raises:
            DualencError: it does not open; the old one stays.
        """
        with self._reloading:
            try:
                self.searcher = self._open(self.searcher)
            except BaseException as error:  # with panics of Rust, which are no Exception
                self.metrics.reloads.labels("failed").inc()
                is_known = isinstance(error, DualencError)
                log.error("not reloaded: %s", printable(error), exc_info=not is_known)
                if is_known:
                    raise
                raise DualencError(f"the index does not open ({type(error).__name__}); see the log") from error
            self.generation += 1
            self.changed = time.time()
            self.metrics.reloads.labels("done").inc()
            log.info("reloaded: %s vectors", f"{len(self.searcher):,}")
            return self.generation

    def reload_quietly(self) -> None:
        """Reload; a failure is only logged."""
        try:
            self.reload()
        except DualencError:
            return

    async def watch(self) -> None:
        """Reload whenever another index takes the folder's place; runs until it is cancelled."""
        before = _manifest(self.searcher.folder)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            manifest = _manifest(self.searcher.folder)
            # At the moment of a rename there is no folder.
            if manifest[0] is not None and manifest != before:
                before = manifest
                await asyncio.to_thread(self.reload_quietly)

    def close(self) -> None:
        """Answer what has arrived, and end."""
        self.batcher.close()

    def _work(self, jobs: list[_Job]) -> list[Any]:
        """Answer a batch: the jobs of one index and side together."""
        answers: list[Any] = [None] * len(jobs)
        groups: dict[tuple[Searcher, Side | None], list[int]] = {}
        for place, job in enumerate(jobs):
            groups.setdefault((job.searcher, job.side), []).append(place)
        for (searcher, side), places in groups.items():
            items: list[Any] = [jobs[place].item for place in places]
            found: Sequence[Any]
            if side is None:
                found = searcher.search(items)
            else:
                inputs = searcher.encoder.tower(side).prepare(items)
                found = list(map(Embedded, searcher.encode(side, inputs), _count_tokens(inputs)))
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return answers


def _count_tokens(inputs: dict[str, Any]) -> list[int]:
    """Tokens of each text, by its mask, or by the ids that are not zero."""
    mask = inputs["attention_mask"] if "attention_mask" in inputs else inputs["text"] != 0
    return mask.sum(dim=1).tolist()


def _manifest(folder: Path) -> list[tuple[int, int, int] | None]:
    """Identity of the files that change when an index is written anew; begins with None while there is no folder."""
    manifest: list[tuple[int, int, int] | None] = []
    for path in (folder / "meta.json", folder / LEXICAL / "meta.json", folder / TEXTS / "meta.json"):
        try:
            status = path.stat()
            manifest.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            manifest.append(None)
    return manifest
