"""Hard-negative mining: highly ranked documents that are not judged relevant, with likely false negatives removed.

For each query: search the nearest documents, drop known positives and their copies, keep a window of ranks, and drop
candidates that score too close to the positive as likely relevant (Moreira et al. 2024, arXiv 2407.15831).

    .OUT.mining/positives-00000.npy    scores of a block of known pairs
    .OUT.mining/rows-00000.jsonl       counts of a block of queries, and its lines
    .OUT.mining/index                  a FAISS index, unless the search is exact
    .OUT.mining/settings.json          a digest of everything that the rows depend on

A finished part is a file, which the next run skips.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.data.corpus import corpora
from dualenc.data.identity import digest_of, identities
from dualenc.data.ragged import Ragged
from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.files import (
    atomic_path,
    check_file_target,
    remove,
    removed_if_refused,
    save_array,
    write_json,
)
from dualenc.hard_negatives import Negatives, Ranking, Rule, choose_negatives, search_depth
from dualenc.reading import open_regular, read_json
from dualenc.search.build import new_index
from dualenc.search.exact import exact_search
from dualenc.search.index import Index, is_index
from dualenc.search.rerank import Rescore, finite_scores, rerank
from dualenc.types import Metric, Vectors

if TYPE_CHECKING:
    from dualenc.data import Corpus, PairDataset

Form = Literal["flagembedding", "tevatron", "sentence-transformers"]
Search = Callable[[np.ndarray, int], np.ndarray]
"""From query vectors (n, D) and k to document rows (n, k), best first, -1 where fewer are found."""

QUERIES_PER_BLOCK = 256
PAIRS_PER_BLOCK = 4096
HASHED_AT_ONCE = 1 << 14
BIN = 0.01
"""Width of the histogram bins of scores."""


@dataclass
class Report:
    """Mining statistics; `scores` are histograms by name: counts by the number of a bin of width `BIN`."""

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
    scores: dict[str, Counter[int]] = field(default_factory=dict)

    def count(self, name: str, scores: np.ndarray) -> None:
        """Add scores (n,) to a histogram."""
        bins = np.floor(np.asarray(scores, np.float64) / BIN).astype(np.int64)
        self.scores.setdefault(name, Counter()).update(bins.tolist())

    def add(self, block: dict[str, Any]) -> None:
        """Add the statistics of a block, read from JSON."""
        for name, counts in block.pop("scores").items():
            self.scores.setdefault(name, Counter()).update(
                {int(number): count for number, count in counts.items()}
            )
        for name, value in block.items():
            setattr(self, name, getattr(self, name) + value)

    def histogram(self, max_bins: int = 16) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Histograms of the scores: edges (R + 1,) of bins of equal width, and the counts (R,) by name."""
        filled = [number for counts in self.scores.values() for number in counts] or [0]
        # Round widths: 1, 2, 5, 10, … fine bins.
        widths = (n * 10**k for k in range(18) for n in (1, 2, 5))
        width = next(w for w in widths if max(filled) // w - min(filled) // w < max_bins)
        first = min(filled) // width
        num_bins = max(filled) // width - first + 1
        histograms = {name: np.zeros(num_bins, np.int64) for name in self.scores}
        for name, counts in self.scores.items():
            for number, count in counts.items():
                histograms[name][number // width - first] += count
        return np.arange(first, first + num_bins + 1) * (width * BIN), histograms


def mine_negatives(
    queries: Embeddings,
    documents: Embeddings,
    pairs: PairDataset,
    out: str | os.PathLike[str],
    *,
    rule: Rule | None = None,
    rescore: Rescore | None = None,
    rescored_by: str = "",
    form: Form = "flagembedding",
    factory: str = "exact",
    progress: bool = True,
) -> Report:
    """Mine hard negatives: write each query with its positives, its negatives and all scores, one JSON object a line.

    An interrupted call is resumed. Processes that all call it, and see the same folder, share the work.

        {"query", "pos": [text], "neg": [text], "pos_scores", "neg_scores", "query_id", "pos_id", "neg_id"}
        {"query_id", "query", "positive_passages": [{"docid", "text", "score"}], "negative_passages": …}
        {"anchor", "positive", "negative_1", …, "negative_8"}

    For data of vectors ids replace the texts. The third form has a row for each positive, and leaves out queries with
    fewer negatives than requested.

    Args:
        queries: (Q, D) vectors of the pairs' left items, by the ids of `dualenc.data.corpus.corpora(pairs)`.
        documents: (N, D) vectors of the right items, likewise; both of length one for cosines.
        pairs: texts or vectors with their known positives.
        rescore: a cross-encoder, whose scores then order and limit the candidates; `rescored_by` identifies it.
        factory: "exact", or a FAISS factory string, including "auto", to search an index.
    """
    rule = rule or Rule()
    left, right = corpora(pairs)
    _check_modalities(left, right, rescore, form)
    if queries.dim != documents.dim:
        raise DualencError(
            f"queries have dimension {queries.dim} and documents {documents.dim}; embed both alike"
        )
    check_mined(out)
    metric: Metric = "cosine" if documents.meta.get("normalized") else "ip"
    # A bad factory string is refused before any work.
    if factory not in ("exact", "auto"):
        new_index(documents.dim, factory, metric, len(documents))
    target = Path(out)
    folder = target.with_name(f".{target.name}.mining")
    settings: dict[str, Any] = {
        "rule": asdict(rule),
        "form": form,
        "factory": factory,
        "rescored_by": rescored_by,
    }
    settings |= {
        "data": [pairs.identity(), digest_of(left.ids), digest_of(right.ids)],
        "rescored": rescore is not None,
    }
    for source in (queries, documents):
        # Vectors are identified by the checksums of their files, or by their values.
        settings[str(len(settings))] = [
            digest_of(source.ids),
            source.meta.get("files") or digest_of(*source.blocks()),
        ]
    fingerprint = {"settings": digest_of(json.dumps(settings, sort_keys=True))}
    is_main = distributed.is_main()
    if (
        is_main
        and (folder / "settings.json").exists()
        and read_json(folder / "settings.json") != fingerprint
    ):
        remove(folder)
    with removed_if_refused(folder, "positives-*.npy") if is_main else nullcontext():
        if is_main:
            write_json(folder / "settings.json", fingerprint)
        distributed.barrier()
        miner = _Miner(queries, documents, pairs, left, right, rule, rescore, form, folder)
        search = miner.searcher(factory, metric)
        num_blocks = miner.write_blocks(search, progress and is_main)
        distributed.barrier()
    report = miner.report(num_blocks)
    distributed.barrier()  # before the files are removed, every process has read them
    if is_main:
        with atomic_path(target) as path, open(path, "wb") as stream:
            for number in range(num_blocks):
                with open(_block_path(folder, number), "rb") as rows:
                    rows.readline()  # counts
                    shutil.copyfileobj(rows, stream)
        remove(folder)
    distributed.barrier()
    return report


def check_mined(path: str | os.PathLike[str]) -> None:
    """Refuse to write a file that exists, is not empty, and was not written by `mine_negatives`."""
    check_file_target(path)
    if not os.path.exists(path):
        return
    with open_regular(path) as stream:
        line = stream.readline(1 << 24)
    try:
        keys = json.loads(line).keys() if line else {"query_id", "pos_id"}
    except (ValueError, AttributeError):
        keys = set()
    written = (
        {"query_id", "pos_id"},
        {"query_id", "positive_passages"},
        {"anchor", "positive", "negative_1"},
    )
    if not any(names <= keys for names in written):
        raise DualencError(f"{path}: exists and holds no mined negatives; choose another file to write")


def _check_modalities(left: Corpus, right: Corpus, rescore: Rescore | None, form: Form) -> None:
    modalities = (left.modality, right.modality)
    if "image" in modalities:
        raise DualencError(
            f"{left.modality} and {right.modality}: rows hold texts or ids of vectors; mine on texts"
        )
    if modalities != ("text", "text") and (rescore is not None or form == "sentence-transformers"):
        raise DualencError(
            "a cross-encoder and the form sentence-transformers need texts, and the data holds vectors"
        )


def paired_scores(
    queries: Vectors, query_rows: np.ndarray, documents: Vectors, document_rows: np.ndarray
) -> np.ndarray:
    """(n,) float32 scores of n pairs: the products of rows (n,) of queries and of documents."""
    scores = np.empty(len(query_rows), np.float32)
    for start in range(0, len(scores), PAIRS_PER_BLOCK):
        block = slice(start, start + PAIRS_PER_BLOCK)
        left = np.asarray(queries[query_rows[block]], np.float32)
        right = np.asarray(documents[document_rows[block]], np.float32)
        scores[block] = finite_scores(np.einsum("nd,nd->n", left, right))
    return scores


class Exclusions:
    """The documents that cannot be negatives of a query.

    They are the positives of all queries with its contents, the copies of those, and documents that repeat the query.
    """

    def __init__(self, pairs: PairDataset, left: Corpus, right: Corpus) -> None:
        left_hashes = _content_hashes(left)
        contents, self.group = np.unique(_content_hashes(right), return_inverse=True)
        self._copies = Ragged.from_pairs(self.group, np.arange(len(right)), len(contents))
        # Queries of equal contents under several ids are one query, with the positives of all of them.
        distinct, self._query_group = np.unique(left_hashes, return_inverse=True)
        self._positives = Ragged.from_pairs(
            self._query_group[pairs.left_id], pairs.right_id, len(distinct)
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
class _Miner:
    queries: Embeddings
    documents: Embeddings
    pairs: PairDataset
    left: Corpus
    right: Corpus
    rule: Rule
    rescore: Rescore | None
    form: Form
    folder: Path

    def __post_init__(self) -> None:
        pairs = self.pairs
        self.left_row = self.queries.rows_of(self.left.ids)
        self.right_row = self.documents.rows_of(self.right.ids)
        self.document = np.empty(len(self.documents), np.int64)
        with_vector = np.flatnonzero(self.right_row >= 0)
        self.document[self.right_row[with_vector]] = with_vector
        self.exclusions = Exclusions(pairs, self.left, self.right)
        if not ((self.left_row[pairs.left_id] >= 0) & (self.right_row[pairs.right_id] >= 0)).any():
            raise DualencError(
                "no query and its positive both have a vector; embed the sides of these pairs"
            )
        self.pair_scores = self._score_pairs()
        is_scored = np.isfinite(self.pair_scores)
        self.query_ids = np.unique(pairs.left_id[is_scored])
        self._scores = self.pair_scores[is_scored]
        self.ceiling_of_all = self.rule.ceiling_of_all(self._scores)
        self._pairs_of = Ragged.from_pairs(pairs.left_id, np.arange(len(pairs)), len(self.left))

    def _score_pairs(self) -> np.ndarray:
        """The score of each known pair (M,), NaN without vectors; each process writes its share of the blocks."""
        num_blocks = -(-len(self.pairs) // PAIRS_PER_BLOCK)
        paths = [self.folder / f"positives-{number:05d}.npy" for number in range(num_blocks)]
        for number in range(distributed.rank(), num_blocks, distributed.world_size()):
            if paths[number].exists():
                continue
            block = slice(number * PAIRS_PER_BLOCK, (number + 1) * PAIRS_PER_BLOCK)
            left = self.pairs.left_id[block]
            right = self.pairs.right_id[block]
            scores = np.full(len(left), np.nan, np.float32)
            both = np.flatnonzero((self.left_row[left] >= 0) & (self.right_row[right] >= 0))
            left = left[both]
            right = right[both]
            if self.rescore is None:
                scores[both] = paired_scores(
                    self.queries.vectors,
                    self.left_row[left],
                    self.documents.vectors,
                    self.right_row[right],
                )
            elif len(both):
                texts = [(self.left[query], self.right[document]) for query, document in zip(left, right)]
                scores[both] = finite_scores(self.rescore(texts))
            with atomic_path(paths[number]) as part:
                save_array(part, scores)
        distributed.barrier()
        return np.concatenate([np.load(path) for path in paths])

    def searcher(self, factory: str, metric: Metric) -> Search:
        """The search of the documents: exact, or by an index that the main process builds."""
        if factory == "exact":

            def search(vectors: np.ndarray, k: int) -> np.ndarray:
                with distributed.single_process():
                    return exact_search(vectors, self.documents.vectors, k)[1]

            return search
        folder = self.folder / "index"
        if distributed.is_main() and not is_index(folder):
            vectors = self.queries.vectors[self.left_row[self.query_ids[:500]]]
            with distributed.single_process():
                Index.build(self.documents, None, factory, metric=metric, queries=vectors, folder=folder)
        distributed.barrier()
        index = Index.open(folder)
        return lambda vectors, k: index.search_rows(vectors, k)[1]

    def write_blocks(self, search: Search, progress: bool) -> int:
        """Write the unfinished blocks of queries of this process; returns the number of blocks of all processes."""
        starts = range(0, len(self.query_ids), QUERIES_PER_BLOCK)
        blocks = [self.query_ids[start : start + QUERIES_PER_BLOCK].tolist() for start in starts]
        own = range(distributed.rank(), len(blocks), distributed.world_size())
        total = sum(len(blocks[number]) for number in own)
        with tqdm(total=total, desc="mine", unit=" queries", disable=not progress) as bar:
            for number in own:
                path = _block_path(self.folder, number)
                if not path.exists():
                    report = Report()
                    rows = self._rows(blocks[number], search, report)
                    with atomic_path(path) as part, open(part, "w", encoding="utf-8") as stream:
                        for row in (vars(report), *rows):
                            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                bar.update(len(blocks[number]))
        return len(blocks)

    def report(self, num_blocks: int) -> Report:
        """The counts of all blocks, once they are finished."""
        report = Report(queries=len(np.unique(self.pairs.left_id)))
        report.without_vectors = report.queries - len(self.query_ids)
        report.count("positives", self._scores)
        for number in range(num_blocks):
            with open(_block_path(self.folder, number), encoding="utf-8") as stream:
                report.add(json.loads(stream.readline()))
        return report

    def _rows(self, queries: list[int], search: Search, report: Report) -> list[dict[str, Any]]:
        """The lines of a block of left ids, counted in `report`."""
        positives = [self._scored_pairs(query) for query in queries]
        mined = choose_negatives(
            queries,
            self._rankings(queries, search),
            [self.pair_scores[pairs] for pairs in positives],
            self.exclusions,
            self.rule,
            self.ceiling_of_all,
            None if self.rescore is None else lambda candidates: self._rerank(queries, candidates),
        )
        rows = []
        # Columns of a table hold a value in every row.
        fewest = self.rule.num_negatives if self.form == "sentence-transformers" else 1
        for query, pairs, negatives in zip(queries, positives, mined):
            report.candidates += negatives.num_candidates
            report.known_positives += negatives.num_excluded
            report.false_negatives += len(negatives.too_high)
            report.repeated += negatives.num_repeated
            report.without_negatives += len(negatives.ids) == 0
            report.fewer_negatives += 0 < len(negatives.ids) < self.rule.num_negatives
            report.count("negatives", negatives.scores)
            report.count("likely false negatives", negatives.too_high)
            if len(negatives.ids) >= fewest:
                lines = self._lines(query, pairs, negatives)
                report.written += len(lines)
                report.negatives += len(lines) * len(negatives.ids)
                rows += lines
        return rows

    def _scored_pairs(self, query: int) -> np.ndarray:
        """The pairs of a left item with a score, each positive once with the first of its pairs."""
        pairs = self._pairs_of.row(query)
        first = np.unique(self.pairs.right_id[pairs], return_index=True)[1]
        pairs = pairs[np.sort(first)]
        return pairs[np.isfinite(self.pair_scores[pairs])]

    def _rankings(self, queries: list[int], search: Search) -> list[Ranking]:
        depth = min(search_depth(queries, self.exclusions, self.rule), len(self.documents))
        vectors = np.asarray(self.queries.vectors[self.left_row[queries]], np.float32)
        rankings = []
        for vector, rows in zip(vectors, search(vectors, depth)):
            rows = rows[rows >= 0]
            # Scored again: scores of an index are approximate, and so is their order.
            scores = np.asarray(self.documents.vectors[rows], np.float32) @ vector
            order = np.argsort(-scores, kind="stable")
            rankings.append(Ranking(self.document[rows[order]], scores[order]))
        return rankings

    def _rerank(
        self, queries: list[int], candidates: list[np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        assert self.rescore is not None
        texts = []
        for query, ids in zip(queries, candidates):
            texts.append([(self.left[query], self.right[document]) for document in ids])
        return rerank(self.rescore, texts)

    def _lines(self, query: int, pairs: np.ndarray, negatives: Negatives) -> list[dict[str, Any]]:
        """The JSON objects of a query: a row for each positive for sentence-transformers, else one."""
        positives = self.pairs.right_id[pairs]
        text = _text_or_id(self.left, query)
        if self.form == "sentence-transformers":
            columns = {
                f"negative_{rank}": self.right[row]
                for rank, row in enumerate(negatives.ids.tolist(), start=1)
            }
            return [{"anchor": text, "positive": self.right[row], **columns} for row in positives.tolist()]
        name = self.left.ids[query]
        pos = self._passages(positives, self.pair_scores[pairs])
        neg = self._passages(negatives.ids, negatives.scores)
        if self.form == "tevatron":
            return [{"query_id": name, "query": text, "positive_passages": pos, "negative_passages": neg}]
        line: dict[str, Any] = {"query": text}
        for key, column in {"": "text", "_scores": "score"}.items():
            line |= {f"pos{key}": [row[column] for row in pos], f"neg{key}": [row[column] for row in neg]}
        ids = {"pos_id": [row["docid"] for row in pos], "neg_id": [row["docid"] for row in neg]}
        return [{**line, "query_id": name, **ids}]

    def _passages(self, ids: np.ndarray, scores: np.ndarray) -> list[dict[str, Any]]:
        passages = []
        for row, score in zip(ids.tolist(), scores.tolist()):
            text = _text_or_id(self.right, row)
            passages.append({"docid": self.right.ids[row], "text": text, "score": round(score, 6)})
        return passages


def _text_or_id(corpus: Corpus, row: int) -> str:
    return corpus[row] if corpus.modality == "text" else corpus.ids[row]
