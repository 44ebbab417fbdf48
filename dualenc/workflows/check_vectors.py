"""Check stored vectors for an alarm: the model, the vectors, ids, recall, queries, leftovers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualenc.data.readers.sources import open_corpus
from dualenc.data.store.items import rows_of
from dualenc.encoders import load_model
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.errors import BelowTarget, DualencError
from dualenc.evaluation.report_page import Table
from dualenc.io.files import consistent_read
from dualenc.search.checks.canaries import check_canaries
from dualenc.search.checks.drift import check_drift
from dualenc.search.checks.findings import Finding, alarm, ok, skipped
from dualenc.search.checks.items import check_items
from dualenc.search.checks.leftovers import check_engine, check_migration, check_swaps
from dualenc.search.checks.mixture import check_mixture
from dualenc.search.checks.recall import check_filters, check_recall
from dualenc.search.checks.stored import Sample, Stored, is_stored
from dualenc.search.checks.vector_faults import check_vectors
from dualenc.search.embed.encode import embed
from dualenc.search.engines.engine import Engine
from dualenc.search.recorded_data import open_recorded
from dualenc.search.searcher import recorded_model
from dualenc.types import StrPath, opposite
from dualenc.workflows.session import start_processes

MAX_QUERIES = 1000
"""Queries that are read at most, evenly from the whole table."""


@dataclass(frozen=True)
class CheckResult:
    """What the checks of stored vectors found.

        result = check("index")
        print(result.alarms)
        result.check()

    Attributes:
        folder: index, embeddings, or what `push` wrote.
        findings: one for each check, in a fixed order.
    """

    folder: Path
    findings: Sequence[Finding]

    @property
    def alarms(self) -> list[Finding]:
        """Findings that are alarms."""
        return [finding for finding in self.findings if finding.state == "alarm"]

    def table(self) -> Table:
        """Return the findings as a table."""
        rows = [
            {"check": each.name, "state": each.state, "finding": each.line}
            for each in self.findings
        ]
        return Table(f"Check of {self.folder}", rows)

    def as_json(self) -> dict[str, Any]:
        """Return the findings for a JSON file."""
        findings = [
            {"check": each.name, "state": each.state, "line": each.line, "numbers": each.numbers}
            for each in self.findings
        ]
        return {"folder": str(self.folder), "alarms": len(self.alarms), "findings": findings}

    def check(self) -> None:
        """Raise `BelowTarget` with the first alarm."""
        if not self.alarms:
            return
        first, *others = self.alarms
        more = f" (and {len(others)} more)" if others else ""
        raise BelowTarget(f"alarm: {first.name}{more}: {first.line}", where=self.folder)


def check(
    folder: StrPath,
    *,
    model: str | None = None,
    queries: StrPath | None = None,
    data: StrPath | None = None,
    device: str | None = None,
) -> CheckResult:
    """Check an index, embeddings or a pushed collection; nothing is written to it.

    Stored texts, or the images that vectors are of, are embedded again and compared with the stored
    vectors (canaries); vectors are read (at most 2²⁶ numbers), and ids, texts, recall, queries and
    the remains of killed commands are checked. Same as `dualenc check`, except that alarms are
    returned: call `check` of the result.

        dualenc.check("index", queries="last_week.jsonl").check()

    Args:
        folder: index, embeddings, or what `push` wrote.
        model: model folder or name; by default the recorded one.
        queries: table of recent queries as texts, images or vectors, for recall and drift.
        data: where the images of the vectors are now; by default the recorded place.
        device: device of the model; by default a GPU if there is one.

    Returns:
        A finding for each check: "ok", "alarm", or "skipped" with the reason.

    Raises:
        DualencError: the folder is of another kind, or the named model or queries cannot be opened.
    """
    folder = Path(folder)
    # Before anything else: opening a folder repairs it.
    swaps = check_swaps(folder)
    if not is_stored(folder):
        raise DualencError(
            "is neither an index nor embeddings, nor what `dualenc push` wrote",
            fix="make an index: dualenc index MODEL DATA",
            where=folder,
        )
    chosen = start_processes(device)
    migration = check_migration(folder)
    try:
        stored = consistent_read(folder, lambda: Stored.open(folder))
    except DualencError as error:
        opens = alarm("opens", str(error).removeprefix(f"{folder}: "))
        return CheckResult(folder, [opens, swaps, migration])
    with closing(stored):
        opens = ok("opens", f"{len(stored.opened):,} vectors of dimension {stored.dim}")
        described = _with_images(stored, None if data is None else str(data))
        findings = [opens, *_check_contents(described, model, queries, chosen)]
        last = [swaps, migration]
        if isinstance(stored.opened, Engine):
            last = check_engine(folder, stored.opened, swaps)
        return CheckResult(folder, [*findings, *last])


def _check_contents(
    stored: Stored, model: str | None, queries: StrPath | None, device: torch.device
) -> Iterator[Finding]:
    """Yield the findings about what is stored."""
    encoder, problem = _open_encoder(stored, model, device)
    vectors = None if queries is None else _query_vectors(stored, queries, encoder, problem)
    sample, unreadable = _read(stored)
    canaries = None
    if sample is None:
        names = ("canaries", "finite", "zero", "length", "duplicates", "mixture")
        yield from (skipped(name, unreadable) for name in names)
    else:
        finding, canaries = check_canaries(stored, encoder, problem)
        yield finding
        yield from check_vectors(stored, sample)
        yield check_mixture(stored, sample, canaries)
    yield from check_items(stored)
    yield check_recall(stored, sample, vectors)
    yield check_filters(stored)
    yield check_drift(stored, vectors)


def _with_images(stored: Stored, data: str | None) -> Stored:
    """Return stored vectors with the images that they are of, or why there are none."""
    if stored.provenance.modality != "image":
        if data is not None:
            raise DualencError(
                "--data names images, and these vectors are not of images",
                fix="leave it out",
                where=stored.folder,
            )
        return stored
    try:
        corpus = open_recorded(stored.provenance, stored.folder, data)
    except DualencError as error:
        # Images that somebody names must open; the recorded ones may be elsewhere.
        if data is not None:
            raise
        return replace(stored, image_problem=str(error).removeprefix(f"{stored.folder}: "))
    rows = rows_of(corpus.ids, stored.ids)
    is_there = rows >= 0
    if is_there.all():
        return replace(stored, images=corpus.take(rows))
    lacking = stored.ids[int(np.argmin(is_there))]
    count = f"{int((~is_there).sum()):,} of {len(rows):,} images"
    return replace(stored, image_problem=f"the data lacks {count}, such as {lacking[:40]!r}")


def _read(stored: Stored) -> tuple[Sample | None, str]:
    """Read vectors; return None and the reason if they cannot be read."""
    if stored.unlisted:
        return None, stored.unlisted
    try:
        return stored.sample(), ""
    except DualencError as error:
        return None, str(error)


def _open_encoder(
    stored: Stored, model: str | None, device: torch.device
) -> tuple[DualEncoder | None, str]:
    """Open the model; return None and the reason if the recorded one cannot be opened."""
    try:
        name = model or recorded_model(stored.provenance, stored.folder)
        encoder = load_model(name, device)
    except DualencError as error:
        # A model that somebody names must open; a recorded one may be elsewhere.
        if model is not None:
            raise
        return None, str(error).removeprefix(f"{stored.folder}: ")
    if isinstance(encoder, IndexEncoder):
        if model is not None:
            raise DualencError(
                "encodes queries alone, it was adapted to an index",
                fix="name the model that made the vectors",
                where=model,
            )
        return None, "the recorded model encodes queries alone"
    return encoder, ""


def _query_vectors(
    stored: Stored, queries: StrPath, encoder: DualEncoder | None, problem: str
) -> np.ndarray:
    """Return the vectors (Q, D) of a table of queries, at most `MAX_QUERIES`."""
    corpus = open_corpus(queries, part="queries")
    rows = np.linspace(0, len(corpus) - 1, min(MAX_QUERIES, len(corpus))).astype(int)
    corpus = corpus.take(np.unique(rows))
    if corpus.modality == "vector":
        vectors = np.stack([np.asarray(corpus.items[row]) for row in range(len(corpus))])
    elif encoder is None:
        raise DualencError(
            f"queries are {corpus.modality}s, and the model is not open: {problem}",
            fix="name it with --model",
            where=queries,
        )
    else:
        side = stored.provenance.side or "right"
        # Image-text models encode each modality by its own tower.
        sides = (opposite(side), side)
        towers = [encoder.tower(each) for each in sides]
        tower = next((each for each in towers if each.modality == corpus.modality), towers[0])
        dim = min(stored.dim, tower.dim)
        vectors = np.asarray(embed(tower, corpus, dim=dim, progress=False).vectors)
    if vectors.shape[1] != stored.dim:
        raise DualencError(
            f"queries have {vectors.shape[1]} numbers, and the stored vectors {stored.dim}",
            fix="embed them with the model of the index",
            where=queries,
        )
    return vectors.astype(np.float32)
