"""Hard-negative mining: highly ranked documents that are not judged relevant, with likely false
negatives removed.

For each query: search the nearest documents, drop known positives and their copies, keep a window
of ranks, and drop candidates that score too close to the positive as likely relevant (Moreira et
al. 2024, arXiv 2407.15831).

    .OUT.mining/rows-00000.jsonl    counts of a block of queries, and its lines
    .OUT.mining/settings.json       a digest of everything that the rows depend on

A finished block is a file, which the next run skips.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.data.corpus import corpora
from dualenc.data.ragged import Ragged, distinct
from dualenc.data.store.identity import digest_of, identities
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.files import atomic_path, check_file_target, remove, removed_if_refused, write_json
from dualenc.io.reading import open_regular, read_json, read_json_object
from dualenc.io.targets import check_outside
from dualenc.search.exact_search import exact_search
from dualenc.search.hard_negatives import Negatives, Rule, choose_negatives, search_depth
from dualenc.types import Vectors

if TYPE_CHECKING:
    from dualenc.data import Corpus, PairDataset

Form = Literal["flagembedding", "sentence-transformers"]

SETTINGS = "settings.json"
_WORK_NAMES = r"settings\.json|rows-\d+\.jsonl|\..*\.part"
SUFFIXES = (".jsonl", ".json", ".ndjson")
QUERIES_PER_BLOCK = 256
PAIRS_PER_BLOCK = 4096
HASHED_AT_ONCE = 1 << 14


@dataclass
class Report:
    """Counts of a mining run."""

    queries: int = 0
    written: int = 0
    negatives: int = 0
    candidates: int = 0
    known_positives: int = 0
    false_negatives: int = 0
    repeated: int = 0
    without_negatives: int = 0
    fewer_negatives: int = 0
    without_vectors: int = 0


def mine_negatives(
    queries: Embeddings,
    documents: Embeddings,
    pairs: PairDataset,
    out: str | os.PathLike[str],
    *,
    rule: Rule | None = None,
    form: Form = "flagembedding",
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Report:
    """Mine hard negatives: write each query with its positives, its negatives and all scores, one
    JSON object a line.

    An interrupted call is resumed. Processes that all call it, and see the same folder, share the
    work.

        {"query", "pos": [text], "neg": [text], "pos_scores", "neg_scores", "query_id", "pos_id",
        "neg_id"} {"anchor", "positive", "negative_1", …, "negative_8"}

    For data of vectors ids replace the texts. The second form has a row for each positive, and
    leaves out queries with fewer negatives than requested.

    Args:
        queries: (Q, D) vectors of the pairs' left items, by the ids of
            `dualenc.data.corpus.corpora(pairs)`.
        documents: (N, D) vectors of the right items, likewise; both of length one for cosines.
        pairs: texts or vectors with their known positives.
        device: to search on, see `exact_search`.
    """
    rule = rule or Rule()
    pairs = pairs.relevant()  # what is labelled as no match may be mined
    left, right = corpora(pairs)
    check_modalities(left, right, form)
    if queries.dim != documents.dim:
        raise DualencError(
            f"queries have dimension {queries.dim} and documents {documents.dim}",
            fix="embed both alike",
        )
    check_mined(out)
    target = Path(out)
    folder = _work_folder(target)
    settings = [json.dumps(asdict(rule)), form]
    settings += [pairs.identity(), digest_of(left.ids), digest_of(right.ids)]
    for source in (queries, documents):
        # Vectors are identified by the checksums of their files, or by their values.
        files = source.meta.get("files")
        settings += [
            digest_of(source.ids),
            json.dumps(files) if files else digest_of(*source.blocks()),
        ]
    fingerprint = {"settings": digest_of(settings)}
    is_main = distributed.is_main()
    path = folder / SETTINGS
    if is_main and path.exists() and read_json(path) != fingerprint:
        remove(folder)
    with removed_if_refused(folder, "rows-*.jsonl") if is_main else nullcontext():
        if is_main:
            write_json(path, fingerprint)
        distributed.barrier()
        search = NegativeSearch(
            queries, documents, pairs, left, right, rule, Exclusions(pairs, left, right), device
        )
        miner = _Miner(search, form, folder)
        num_blocks = miner.write_blocks(progress and is_main)
        distributed.barrier()
    report = miner.report(num_blocks)
    distributed.barrier()  # before the files are removed, every process has read them
    if is_main:
        with atomic_path(target) as part, open(part, "wb") as stream:
            for number in range(num_blocks):
                with open(_block_path(folder, number), "rb") as rows:
                    rows.readline()  # counts
                    shutil.copyfileobj(rows, stream)
        remove(folder)
    distributed.barrier()
    return report


def _work_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.mining")


def _is_work(folder: Path) -> bool:
    """Whether a folder is empty, or holds what an interrupted call has left, and nothing else."""
    if not folder.is_dir():
        return False
    names = set(os.listdir(folder))
    if SETTINGS in names:
        try:
            is_known = read_json_object(folder / SETTINGS).keys() == {"settings"}
        except DualencError:
            is_known = False
        return is_known and all(re.fullmatch(_WORK_NAMES, name) for name in names)
    return names <= {f".{SETTINGS}.part"}


def check_mined(path: str | os.PathLike[str]) -> None:
    """Refuse a file, or its work folder, that exists, is not empty, and that others have
    written."""
    check_outside(path)
    check_file_target(path)
    if Path(path).suffix not in SUFFIXES:
        raise DualencError(
            "mined negatives are lines of JSON",
            fix=f"name a file {' or '.join(SUFFIXES)}",
            where=path,
        )
    work = _work_folder(Path(path))
    if os.path.lexists(work) and not _is_work(work):
        raise DualencError("exists and was not left by mining", fix="move it away", where=work)
    if not os.path.exists(path):
        return
    with open_regular(path) as stream:
        line = stream.readline(1 << 24)
    try:
        keys = json.loads(line).keys() if line else {"query_id", "pos_id"}
    except (ValueError, AttributeError):
        keys = set()
    if not any(
        names <= keys for names in ({"query_id", "pos_id"}, {"anchor", "positive", "negative_1"})
    ):
        raise DualencError(
            "exists and holds no mined negatives", fix="choose another file to write", where=path
        )


def check_modalities(left: Corpus, right: Corpus, form: Form) -> None:
    """Refuse pairs whose items the rows of mined negatives cannot hold."""
    modalities = (left.modality, right.modality)
    if "image" in modalities:
        raise DualencError(
            "the data holds images, and rows of mined negatives hold texts or ids",
            fix="give texts or vectors",
        )
    if modalities != ("text", "text") and form == "sentence-transformers":
        raise DualencError("the form sentence-transformers needs texts, and the data holds vectors")


def paired_scores(
    queries: Vectors, query_rows: np.ndarray, documents: Vectors, document_rows: np.ndarray
) -> np.ndarray:
    """(n,) float32 scores of n pairs: the products of rows (n,) of queries and of documents."""
    scores = np.empty(len(query_rows), np.float32)
    for start in range(0, len(scores), PAIRS_PER_BLOCK):
        block = slice(start, start + PAIRS_PER_BLOCK)
        left = np.asarray(queries[query_rows[block]], np.float32)
        right = np.asarray(documents[document_rows[block]], np.float32)
        scores[block] = np.einsum("nd,nd->n", left, right)
    if not np.isfinite(scores).all():
        raise DualencError("a score is not finite", fix="check the weights of the model")
    return scores


class Exclusions:
    """The documents that cannot be negatives of a query.

    They are the positives of all queries with its contents, the copies of those, and documents that
    repeat the query.
    """

    def __init__(self, pairs: PairDataset, left: Corpus, right: Corpus) -> None:
        left_hashes = _content_hashes(left)
        contents, self.group = np.unique(_content_hashes(right), return_inverse=True)
        self._copies = Ragged.from_pairs(self.group, np.arange(len(right)), len(contents))
        # Queries of equal contents under several ids are one query, with the positives of all of
        # them.
        groups, self._query_group = np.unique(left_hashes, return_inverse=True)
        self._positives = Ragged.from_pairs(
            self._query_group[pairs.left_id], pairs.right_id, len(groups)
        )
        # (num_left,) group of the documents that repeat a query, or -1.
        self._repeated = np.full(len(left), -1)
        if left.modality == right.modality == "text":
            places = np.searchsorted(contents, left_hashes).clip(max=len(contents) - 1)
            self._repeated = np.where(contents[places] == left_hashes, places, -1)
        # Only in BEIR do the ids of both sides name the same things.
        self._left_ids = left.ids
        self._right_of_id = (
            {name: i for i, name in enumerate(right.ids)} if hasattr(pairs, "queries") else {}
        )

    def of_query(self, query: int) -> np.ndarray:
        """Right ids, ascending, that are no candidates for a left id."""
        groups = self.group[self._positives.row(self._query_group[query])]
        if self._repeated[query] >= 0:
            groups = np.append(groups, self._repeated[query])
        ids = [self._copies.row(group) for group in np.unique(groups).tolist()]
        namesake = self._right_of_id.get(self._left_ids[query])
        if namesake is not None:
            ids.append(np.array([namesake]))
        return np.unique(np.concatenate(ids))

    def repeats(self, ids: np.ndarray) -> np.ndarray:
        """(n,) bool, which right items (n,) have the contents of one before them."""
        is_copy = np.ones(len(ids), bool)
        is_copy[np.unique(self.group[ids], return_index=True)[1]] = False
        return is_copy


def _content_hashes(corpus: Corpus) -> np.ndarray:
    hashes = np.empty(len(corpus), np.uint64)
    for start in range(0, len(corpus), HASHED_AT_ONCE):
        rows = np.arange(start, min(start + HASHED_AT_ONCE, len(corpus)))
        digests = [
            hashlib.blake2b(value, digest_size=8).digest()
            for value in identities(corpus.items, rows, True)
        ]
        hashes[rows] = np.frombuffer(b"".join(digests), np.uint64)
    return hashes


def _block_path(folder: Path, number: int) -> Path:
    return folder / f"rows-{number:05d}.jsonl"


@dataclass(eq=False)
class NegativeSearch:
    """The negatives of queries: an exact search among the documents, and the rule.

    Attributes:
        query_ids: (Q,) left ids, ascending, of queries that have a vector and a positive with one.
    """

    queries: Embeddings
    documents: Embeddings
    pairs: PairDataset
    left: Corpus
    right: Corpus
    rule: Rule
    exclusions: Exclusions
    device: str | torch.device

    def __post_init__(self) -> None:
        pairs = self.pairs
        self._left_row = self.queries.rows_of(self.left.ids)
        right_row = self.documents.rows_of(self.right.ids)
        # (N,) right id of each document
        self._right_id = np.empty(len(self.documents), np.int64)
        with_vector = np.flatnonzero(right_row >= 0)
        self._right_id[right_row[with_vector]] = with_vector
        is_scored = (self._left_row[pairs.left_id] >= 0) & (right_row[pairs.right_id] >= 0)
        if not is_scored.any():
            raise DualencError(
                "no query and its positive both have a vector", fix="embed the sides of these pairs"
            )
        # (M,) score of each known pair, NaN without vectors
        self.pair_scores = np.full(len(pairs), np.nan, np.float32)
        self.pair_scores[is_scored] = paired_scores(
            self.queries.vectors,
            self._left_row[pairs.left_id[is_scored]],
            self.documents.vectors,
            right_row[pairs.right_id[is_scored]],
        )
        self.query_ids = distinct(pairs.left_id[is_scored])
        self._pairs_of = Ragged.from_pairs(pairs.left_id, np.arange(len(pairs)), len(self.left))

    def blocks(self) -> list[list[int]]:
        """The query ids in blocks that are searched at once, the same for any number of
        processes."""
        starts = range(0, len(self.query_ids), QUERIES_PER_BLOCK)
        return [self.query_ids[start : start + QUERIES_PER_BLOCK].tolist() for start in starts]

    def choose(self, queries: list[int]) -> Iterator[tuple[int, Negatives]]:
        """The negatives of each query of a block."""
        depth = min(search_depth(queries, self.exclusions, self.rule), len(self.documents))
        vectors = np.asarray(self.queries.vectors[self._left_row[queries]], np.float32)
        with distributed.single_process():
            columns = exact_search(vectors, self.documents.vectors, depth, device=self.device)[1]
        for query, vector, nearest in zip(queries, vectors, columns):
            # Scored one query at a time: the result does not depend on the blocks.
            scores = np.asarray(self.documents.vectors[nearest], np.float32) @ vector
            order = np.argsort(-scores, kind="stable")
            ids = self._right_id[nearest[order]]
            positives = self.pair_scores[self.scored_pairs(query)]
            yield (
                query,
                choose_negatives(query, ids, scores[order], positives, self.exclusions, self.rule),
            )

    def scored_pairs(self, query: int) -> np.ndarray:
        """The pairs of a left item with a score, each positive once with the first of its pairs."""
        pairs = self._pairs_of.row(query)
        first = np.unique(self.pairs.right_id[pairs], return_index=True)[1]
        pairs = pairs[np.sort(first)]
        return pairs[np.isfinite(self.pair_scores[pairs])]


@dataclass(eq=False)
class _Miner:
    search: NegativeSearch
    form: Form
    folder: Path

    def write_blocks(self, progress: bool) -> int:
        """Write the unfinished blocks of queries of this process; returns the number of blocks of
        all processes."""
        blocks = self.search.blocks()
        own = range(distributed.rank(), len(blocks), distributed.world_size())
        total = sum(len(blocks[number]) for number in own)
        with tqdm(total=total, desc="mine", unit=" queries", disable=not progress) as bar:
            for number in own:
                path = _block_path(self.folder, number)
                if not path.exists():
                    report = Report()
                    rows = self._rows(blocks[number], report)
                    with atomic_path(path) as part, open(part, "w", encoding="utf-8") as stream:
                        for row in (vars(report), *rows):
                            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                bar.update(len(blocks[number]))
        return len(blocks)

    def report(self, num_blocks: int) -> Report:
        """The counts of all blocks, once they are finished."""
        report = Report(queries=len(distinct(self.search.pairs.left_id)))
        report.without_vectors = report.queries - len(self.search.query_ids)
        for number in range(num_blocks):
            with open(_block_path(self.folder, number), encoding="utf-8") as stream:
                for name, count in json.loads(stream.readline()).items():
                    setattr(report, name, getattr(report, name) + count)
        return report

    def _rows(self, queries: list[int], report: Report) -> list[dict[str, Any]]:
        """The lines of a block of left ids, counted in `report`."""
        # Columns of a table hold a value in every row.
        num_negatives = self.search.rule.num_negatives
        fewest = num_negatives if self.form == "sentence-transformers" else 1
        rows = []
        for query, negatives in self.search.choose(queries):
            report.candidates += negatives.num_candidates
            report.known_positives += negatives.num_excluded
            report.false_negatives += negatives.num_too_high
            report.repeated += negatives.num_repeated
            report.without_negatives += len(negatives.ids) == 0
            report.fewer_negatives += 0 < len(negatives.ids) < num_negatives
            if len(negatives.ids) >= fewest:
                lines = self._lines(query, negatives)
                report.written += len(lines)
                report.negatives += len(lines) * len(negatives.ids)
                rows += lines
        return rows

    def _lines(self, query: int, negatives: Negatives) -> list[dict[str, Any]]:
        """The JSON objects of a query: a row for each positive for sentence-transformers, else
        one."""
        left = self.search.left
        right = self.search.right
        pairs = self.search.scored_pairs(query)
        text = _text_or_id(left, query)
        positive_ids = self.search.pairs.right_id[pairs].tolist()
        negative_ids = negatives.ids.tolist()
        pos = [_text_or_id(right, row) for row in positive_ids]
        neg = [_text_or_id(right, row) for row in negative_ids]
        if self.form == "sentence-transformers":
            columns = {f"negative_{rank}": negative for rank, negative in enumerate(neg, start=1)}
            return [{"anchor": text, "positive": positive, **columns} for positive in pos]
        line = {
            "query": text,
            "pos": pos,
            "neg": neg,
            "pos_scores": _rounded(self.search.pair_scores[pairs]),
            "neg_scores": _rounded(negatives.scores),
            "query_id": left.ids[query],
            "pos_id": [right.ids[row] for row in positive_ids],
            "neg_id": [right.ids[row] for row in negative_ids],
        }
        return [line]


def _rounded(scores: np.ndarray) -> list[float]:
    return [round(score, 6) for score in scores.tolist()]


def _text_or_id(corpus: Corpus, row: int) -> str:
    return corpus[row] if corpus.modality == "text" else corpus.ids[row]
