"""Hard-negative mining: highly ranked documents that are not judged relevant.

For each query: search the nearest documents, drop known positives and their copies, keep a window
of ranks, and drop candidates that score too close to the positive, which are likely false negatives
(Moreira et al. 2024, arXiv 2407.15831).

    .OUT.mining/rows-00000.jsonl    counts of a block of queries, then its lines
    .OUT.mining/settings.json       a digest of everything that the rows depend on

Each finished block is a file, so an interrupted run resumes at the next block.
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
    """Counts of a mining run.

    Queries without negatives are not written.

        report = mine_negatives(queries, documents, pairs, "mined.jsonl")
        print(report.written, report.false_negatives)

    Attributes:
        queries: number of queries in the data.
        written: number of lines written.
        negatives: number of negatives in those lines.
        candidates: number of documents in the windows of ranks.
        known_positives: number of excluded documents up to the ends of the windows.
        false_negatives: number of candidates above the score limit.
        repeated: number of candidates that repeat a better one.
        without_negatives: number of queries for which no candidate was left.
        fewer_negatives: number of queries with fewer negatives than requested.
        without_vectors: number of queries that lack a vector, or a positive with one.
    """

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
    """Mine hard negatives, and write them with positives and scores, one JSON object per line.

    The forms are:

        flagembedding            {"query", "pos": [text], "neg": [text], "pos_scores",
                                  "neg_scores", "query_id", "pos_id", "neg_id"}
        sentence-transformers    {"anchor", "positive", "negative_1", …, "negative_8"}

    For data of vectors, ids replace the texts. The second form has a row for each positive, and
    leaves out queries with fewer negatives than requested. An interrupted call is resumed.
    Processes that all call it and see the same folder share the work.

        mine_negatives(queries, documents, pairs, "mined.jsonl", rule=Rule(num_negatives=4))

    Args:
        queries: (Q, D) vectors of the pairs' left items, by the ids of
            `dualenc.data.corpus.corpora(pairs)`.
        documents: (N, D) vectors of the right items, likewise; both of length one for cosines.
        pairs: texts or vectors with their known positives.
        out: file to write; its suffix is .jsonl, .json or .ndjson.
        rule: which documents become negatives.
        form: form of the lines.
        device: device to search on (`exact_search`).
        progress: show a bar.

    Raises:
        DualencError: the data, vectors or output file do not fit.
    """
    rule = rule or Rule()
    pairs = pairs.relevant()  # pairs labeled as non-matching may be mined
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
    settings += [*_identity(queries), *_identity(documents)]
    fingerprint = {"settings": digest_of(settings)}
    is_main = distributed.is_main()
    path = folder / SETTINGS
    # Blocks of an interrupted call can only be reused for the same data, vectors and rule.
    if is_main and path.exists() and read_json(path) != fingerprint:
        remove(folder)
    with removed_if_refused(folder, "rows-*.jsonl") if is_main else nullcontext():
        if is_main:
            write_json(path, fingerprint)
        # Nobody may write a block before the main process has removed an old folder.
        distributed.barrier()
        search = NegativeSearch(
            queries, documents, pairs, left, right, rule, Exclusions(pairs, left, right), device
        )
        miner = _Miner(search, form, folder)
        num_blocks = miner.write_blocks(progress and is_main)
        distributed.barrier()
    report = miner.report(num_blocks)
    distributed.barrier()  # every process has read the files before they are removed
    if is_main:
        _join_blocks(folder, num_blocks, target)
        remove(folder)
    distributed.barrier()
    return report


def _identity(source: Embeddings) -> list[str]:
    """Return digests of the ids and the vectors of embeddings."""
    files = source.provenance.files
    # The recorded checksums of files identify vectors without reading them.
    contents = json.dumps(files) if files else digest_of(*source.blocks())
    return [digest_of(source.ids), contents]


def _join_blocks(folder: Path, num_blocks: int, target: Path) -> None:
    """Write the lines of all blocks to one file."""
    with atomic_path(target) as part, open(part, "wb") as stream:
        for number in range(num_blocks):
            with open(_block_path(folder, number), "rb") as rows:
                rows.readline()  # counts
                shutil.copyfileobj(rows, stream)


def _work_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.mining")


def _is_work(folder: Path) -> bool:
    """Return True if a folder is empty, or holds only what an interrupted call left."""
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
    """Raise unless mined negatives may be written to a path.

    Args:
        path: output file; its work folder is checked, too.

    Raises:
        DualencError: the suffix is wrong, or a file or folder exists that mining did not write.
    """
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
    # A hostile file may be one endless line.
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
            "already exists and was not written by `dualenc mine`",
            fix="choose another output file",
            where=path,
        )


def check_modalities(left: Corpus, right: Corpus, form: Form) -> None:
    """Raise if the rows of mined negatives cannot represent the items.

    Args:
        left: the queries.
        right: the documents.
        form: form of the rows.

    Raises:
        DualencError: the data has images, or vectors in a form of texts.
    """
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
    """Return the inner products (n,) float32 of n pairs of rows.

    Args:
        queries: (Q, D) vectors.
        query_rows: (n,) row of each pair's query.
        documents: (N, D) vectors.
        document_rows: (n,) row of each pair's document.

    Raises:
        DualencError: a score is not finite.
    """
    scores = np.empty(len(query_rows), np.float32)
    # In blocks, because both matrices may be memory-mapped and larger than memory.
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

    They are the positives of all queries with the same contents, copies of those, and documents
    that repeat the query.

        exclusions = Exclusions(pairs, *corpora(pairs))
        exclusions.of_query(0)  # right ids

    Args:
        pairs: the known positives.
        left: the queries.
        right: the documents.

    Attributes:
        group: (num_right,) content group of each document; copies share one.
    """

    def __init__(self, pairs: PairDataset, left: Corpus, right: Corpus) -> None:
        left_hashes = _content_hashes(left)
        contents, self.group = np.unique(_content_hashes(right), return_inverse=True)
        self._copies = Ragged.from_pairs(self.group, np.arange(len(right)), len(contents))
        # Queries with the same contents under several ids share their positives.
        groups, self._query_group = np.unique(left_hashes, return_inverse=True)
        self._positives = Ragged.from_pairs(
            self._query_group[pairs.left_id], pairs.right_id, len(groups)
        )
        # (num_left,) content group of the documents that repeat a query, or -1.
        self._repeated = np.full(len(left), -1)
        if left.modality == right.modality == "text":
            places = np.searchsorted(contents, left_hashes).clip(max=len(contents) - 1)
            self._repeated = np.where(contents[places] == left_hashes, places, -1)
        # In BEIR collections a document with the id of the query is the query itself (as in
        # ArguAna). In other data equal ids of both sides are unrelated.
        self._left_ids = left.ids
        self._right_of_id: dict[str, int] = {}
        if hasattr(pairs, "queries"):
            self._right_of_id = {name: row for row, name in enumerate(right.ids)}

    def of_query(self, query: int) -> np.ndarray:
        """Return the right ids, ascending, that cannot be negatives of a left id."""
        groups = self.group[self._positives.row(self._query_group[query])]
        if self._repeated[query] >= 0:
            groups = np.append(groups, self._repeated[query])
        ids = [self._copies.row(group) for group in np.unique(groups).tolist()]
        namesake = self._right_of_id.get(self._left_ids[query])
        if namesake is not None:
            ids.append(np.array([namesake]))
        return np.unique(np.concatenate(ids))


def _content_hashes(corpus: Corpus) -> np.ndarray:
    # 64 bits suffice: a collision would only drop one negative.
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
    """Finds the negatives of queries by exact search among the documents, and a rule.

    Blocks of queries are independent, so processes can share them.

        for block in search.blocks():
            for query, negatives in search.choose(block):
                print(query, negatives.ids)

    Args:
        queries: vectors of the left items.
        documents: vectors of the right items.
        pairs: known positives.
        left: the queries.
        right: the documents.
        rule: which documents become negatives.
        exclusions: documents that cannot be negatives.
        device: device to search on.

    Attributes:
        query_ids: (Q,) left ids, ascending, of queries that have a vector and a positive with one.
        pair_scores: (M,) score of each known pair, NaN without vectors.
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
        """Return the query ids in blocks to search at once.

        They are the same for any number of processes, so that a run may resume with another one.
        """
        starts = range(0, len(self.query_ids), QUERIES_PER_BLOCK)
        return [self.query_ids[start : start + QUERIES_PER_BLOCK].tolist() for start in starts]

    def choose(self, queries: list[int]) -> Iterator[tuple[int, Negatives]]:
        """Yield each query of a block with its negatives."""
        excluded = [self.exclusions.of_query(query) for query in queries]
        depth = min(search_depth(excluded, self.rule), len(self.documents))
        vectors = np.asarray(self.queries.vectors[self._left_row[queries]], np.float32)
        # Processes have different blocks here, so the search must not share its queries again.
        with distributed.single_process():
            columns = exact_search(vectors, self.documents.vectors, depth, device=self.device)[1]
        for query, vector, nearest, own_excluded in zip(queries, vectors, columns, excluded):
            # Score one query at a time: a matrix product rounds differently for other block sizes.
            scores = np.asarray(self.documents.vectors[nearest], np.float32) @ vector
            order = np.argsort(-scores, kind="stable")
            ids = self._right_id[nearest[order]]
            positives = self.pair_scores[self.scored_pairs(query)]
            candidates = (ids, scores[order], positives)
            groups = self.exclusions.group
            yield query, choose_negatives(query, *candidates, own_excluded, groups, self.rule)

    def scored_pairs(self, query: int) -> np.ndarray:
        """Return the scored pairs of a left item; each positive counts once, by its first pair."""
        pairs = self._pairs_of.row(query)
        first = np.unique(self.pairs.right_id[pairs], return_index=True)[1]
        pairs = pairs[np.sort(first)]
        return pairs[np.isfinite(self.pair_scores[pairs])]


@dataclass(eq=False)
class _Miner:
    """Writes the mined negatives of blocks of queries to a work folder."""

    search: NegativeSearch
    form: Form
    folder: Path

    def write_blocks(self, progress: bool) -> int:
        """Write this process's unfinished blocks; return the number of blocks of all processes."""
        blocks = self.search.blocks()
        own = range(distributed.rank(), len(blocks), distributed.world_size())
        total = sum(len(blocks[number]) for number in own)
        with tqdm(total=total, desc="mine", unit=" queries", disable=not progress) as bar:
            for number in own:
                # The name appears when the block is whole, so an existing file is finished.
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
        """Sum the counts of all blocks, which must be finished."""
        report = Report(queries=len(distinct(self.search.pairs.left_id)))
        report.without_vectors = report.queries - len(self.search.query_ids)
        for number in range(num_blocks):
            with open(_block_path(self.folder, number), encoding="utf-8") as stream:
                for name, count in json.loads(stream.readline()).items():
                    setattr(report, name, getattr(report, name) + count)
        return report

    def _rows(self, queries: list[int], report: Report) -> list[dict[str, Any]]:
        """Return the lines of a block of left ids, and count them in `report`."""
        # sentence-transformers reads a table, whose columns need a value in every row.
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
        """Return the JSON objects of a query: one, or one per positive (sentence-transformers)."""
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
