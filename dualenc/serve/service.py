"""What answers: the index of the moment, the thread that searches it, and the change to a new one."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from dualenc.data.images import decode_upload
from dualenc.errors import BadSample, DualencError
from dualenc.search.lexical import FOLDER as LEXICAL
from dualenc.search.searcher import Query, Searcher
from dualenc.search.kept import FOLDER as TEXTS
from dualenc.serve.batching import Batcher
from dualenc.serve.metrics import Metrics
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.search.engines import Hit
    from dualenc.types import Side

log = logging.getLogger("dualenc.serve")

DECODED_AT_ONCE = 2
"""Images; one may take a GiB while it is decoded."""
THUMBNAIL_PIXELS = 384
KEPT_THUMBNAILS = 512
WATCH_EVERY_S = 2.0


class Embedded(NamedTuple):
    """A vector (D,), and how many tokens its text had."""

    vector: np.ndarray
    tokens: int


class _ToSearch(NamedTuple):
    searcher: Searcher
    query: Query


class _ToEmbed(NamedTuple):
    searcher: Searcher
    side: Side
    text: str


class Service:
    """An open index that answers many callers, and is exchanged for a new one while it does.

    Every call is answered by the index that it met when it arrived: an exchange drops none, and mixes none.

    Args:
        open_searcher: opens the index; is given the searcher before, whose model may do again.
        pictures: the images of the index by id, to show with results; None if there are none to show.
        metrics: counts.
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
        self._open, self.metrics = open_searcher, metrics
        self.searcher = open_searcher(None)
        self.generation = 1
        self.changed = time.time()
        self.pictures = pictures
        self._picture_row = {} if pictures is None else {name: row for row, name in enumerate(pictures.ids)}
        self._thumbnails: OrderedDict[str, bytes] = OrderedDict()
        self._kept = threading.Lock()
        self._decoding = threading.BoundedSemaphore(DECODED_AT_ONCE)
        self._reloading = threading.Lock()
        self._batcher = Batcher(self._work, observe=metrics.batch_size.observe, **batching)
        metrics.waiting.set_function(lambda: len(self._batcher))
        metrics.vectors.set_function(lambda: len(self.searcher))

    @property
    def queue_size(self) -> int:
        """How many texts or queries may wait."""
        return self._batcher.queue_size

    @property
    def is_alive(self) -> bool:
        """Whether the thread that answers is running."""
        return self._batcher.is_alive

    def search(self, searcher: Searcher, query: Query) -> Future[list[Hit]]:
        """Search; the future brings the results.

        Raises:
            QueueFull: too much waits.
        """
        return self._batcher.submit([_ToSearch(searcher, query)])[0]

    def embed(self, searcher: Searcher, side: Side, texts: Sequence[str]) -> list[Future[Embedded]]:
        """Encode texts; a future for each, so that searches need not wait for all of them.

        Raises:
            QueueFull: too much waits for so many.
        """
        return self._batcher.submit([_ToEmbed(searcher, side, text) for text in texts])

    def prepare_image(self, searcher: Searcher, data: bytes) -> Query:
        """Decode an uploaded image to a query, which is small whatever the image was; for any thread.

        Raises:
            BadSample: what `decode_upload` raises.
            DualencError: the model encodes no images.
        """
        side = searcher.query_side("image")
        with self._decoding:
            image = decode_upload(data, "the upload")
            return Query(side, inputs=searcher.encoder.tower(side).prepare([image]))

    def thumbnail(self, name: str) -> bytes | None:
        """A small JPEG of an image of the index; None if there is none of that id. For any thread."""
        row = self._picture_row.get(name)
        if row is None or self.pictures is None:
            return None
        with self._kept:
            if name in self._thumbnails:
                self._thumbnails.move_to_end(name)
                return self._thumbnails[name]
        with self._decoding:
            try:
                image: Image.Image = self.pictures[row]
            except BadSample:
                return None
            image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
            written = io.BytesIO()
            image.save(written, "JPEG", quality=85)
        with self._kept:
            self._thumbnails[name] = written.getvalue()
            while len(self._thumbnails) > KEPT_THUMBNAILS:
                self._thumbnails.popitem(last=False)
        return written.getvalue()

    def reload(self) -> int:
        """Open the index again and answer from it from now on; the old one answers what has arrived before.

        Returns:
            The number of the index: 1 for the first.

        Raises:
            DualencError: it does not open; the old one goes on.
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

    async def watch(self) -> None:
        """Reload whenever another index takes the folder's place; runs until it is cancelled."""
        seen = _manifest(self.searcher.folder)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            found = _manifest(self.searcher.folder)
            if found[0] is not None and found != seen:  # in the moment of a rename there is none
                seen = found
                try:
                    await asyncio.to_thread(self.reload)
                except DualencError:
                    continue  # said already; a later change is tried again

    def close(self) -> None:
        """Answer what has arrived, and end."""
        self._batcher.close()

    def _work(self, jobs: list[_ToSearch | _ToEmbed]) -> list[Any]:
        """Answer a batch, together what belongs to one index."""
        answers: list[Any] = [None] * len(jobs)
        groups: dict[tuple[int, Side | None], list[int]] = {}
        for place, job in enumerate(jobs):
            groups.setdefault((id(job.searcher), job.side if isinstance(job, _ToEmbed) else None), []).append(place)
        for (_, side), places in groups.items():
            searcher = jobs[places[0]].searcher
            if side is None:
                queries = [job.query for job in jobs if isinstance(job, _ToSearch) and job.searcher is searcher]
                found: Sequence[Any] = searcher.search(queries)
            else:
                texts = [jobs[place].text for place in places]  # type: ignore[union-attr]
                inputs = searcher.encoder.tower(side).prepare(texts)
                found = [Embedded(*pair) for pair in zip(searcher.encode(side, inputs), _tokens(inputs))]
            for place, answer in zip(places, found):
                answers[place] = answer
        return answers


def _tokens(inputs: dict[str, Any]) -> list[int]:
    """How many tokens each text has: as its mask says, or up to its last one that is not zero."""
    mask = inputs["attention_mask"] if "attention_mask" in inputs else inputs["text"] != 0
    return mask.sum(dim=1).tolist()


def _manifest(folder: Path) -> list[tuple[int, int, int] | None]:
    """What changes when a folder, or what lies in it, is written anew; begins with None while there is no folder."""
    found: list[tuple[int, int, int] | None] = []
    for path in (folder / "meta.json", folder / LEXICAL / "meta.json", folder / TEXTS / "meta.json"):
        try:
            status = path.stat()
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return found
