"""Hard negatives: what a model ranks high for a query and nobody calls relevant, false negatives left out.

The nearest documents of each query are found, known positives and their copies taken out, a window of ranks kept, and
of that what scores too close to the positive left out as likely relevant (Moreira et al. 2024, arXiv 2407.15831).

    WORK/positives-00000.npy    scores of the known pairs, block by block
    WORK/rows-00000.jsonl       the finished lines of a block of queries
    WORK/rows-00000.json        what was counted there; written last: with it a block is done
    WORK/index                  a FAISS index, unless the search is exact
    WORK/settings.json          a digest of all that the rows depend on
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.data.pairs import Ragged
from dualenc.errors import DualencError
from dualenc.files import atomic_path, remove, removed_if_refused, save_array, write_json
from dualenc.reading import open_regular, read_json
from dualenc.search.exact import exact_search
from dualenc.search.rerank import Rescore, finite_scores, rerank
from dualenc.types import Metric

if TYPE_CHECKING:
    from dualenc.data import Corpus, PairDataset
    from dualenc.search.embeddings import Embeddings

Form = Literal["flagembedding", "tevatron", "sentence-transformers"]

QUERIES_PER_BLOCK = 256
PAIRS_PER_BLOCK = 4096
BIN = 0.01
"""Width of the bins that scores are counted in."""


@dataclass(frozen=True)
class Rule:
    """Which of a query's nearest documents become its negatives; of several limits on the score the lowest counts.

    Args:
        num_negatives: how many for each query at most.
        first_rank: the first rank to take, counted from 1 without the known positives; 11 skips the first ten.
        last_rank: the last rank to take.
        relative: a negative scores at most this share of its positive's score: s ≤ s⁺ − (1 − relative)·|s⁺|, which is
            relative·s⁺ for a positive score. Moreira et al. 2024 (arXiv 2407.15831, TopK-PercPos) find 0.95 best.
        margin: a negative scores at least this much less than its positive (their TopK-MarginPos).
        max_score: no negative scores more (their TopK-Abs).
        percentile: no negative scores more than this percentile, from 0 to 100, of the scores of all known pairs.
        against: which score counts where a query has several positives.
        pick: take the best of what is left, or a random sample of it.
        seed: of the random samples; each query has its own, so that they do not depend on how queries are grouped.

    Raises:
        DualencError: a number out of range.
    """

    num_negatives: int = 8
    first_rank: int = 1
    last_rank: int = 100
    relative: float | None = 0.95
    margin: float | None = None
    max_score: float | None = None
    percentile: float | None = None
    against: Literal["lowest", "mean", "highest"] = "mean"
    pick: Literal["top", "random"] = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_negatives < 1:
            raise DualencError(f"num_negatives is {self.num_negatives}; ask for at least 1")
        if not 1 <= self.first_rank <= self.last_rank:
            ranks = f"{self.first_rank} to {self.last_rank}"
            raise DualencError(f"ranks {ranks} are no window; give first_rank from 1 and last_rank not below it")
        if self.percentile is not None and not 0 <= self.percentile <= 100:
            raise DualencError(f"percentile is {self.percentile}; give a number from 0 to 100")
        for name in ("relative", "margin"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise DualencError(f"{name} is {value}; give 0 or more, or null for no such limit")
        if self.max_score is not None and not math.isfinite(self.max_score):
            raise DualencError(f"max_score is {self.max_score}; give a number, or null for no such limit")
        if self.seed < 0:
            raise DualencError(f"seed is {self.seed}; give 0 or more")

    def ceiling(self, positives: np.ndarray, all_positives: np.ndarray | None = None) -> float:
        """The highest score that a negative of one query may have.

        Args:
            positives: (P,) scores of the query's positives, at least one.
            all_positives: (M,) scores of all known pairs; needed for `percentile`.
        """
        scores = {"lowest": positives.min(), "mean": positives.mean(), "highest": positives.max()}
        positive = float(scores[self.against])
        limits = [math.inf]
        if self.relative is not None:
            limits.append(positive - (1 - self.relative) * abs(positive))
        if self.margin is not None:
            limits.append(positive - self.margin)
        if self.max_score is not None:
            limits.append(self.max_score)
        if self.percentile is not None:
            assert all_positives is not None
            limits.append(float(np.percentile(all_positives, self.percentile)))
        return min(limits)

    def choose(self, allowed: np.ndarray, query: int) -> np.ndarray:
        """The places, ascending, that are taken of a list of candidates, best first.

        Args:
            allowed: (L,) bool, which of them may be a negative.
            query: number of the query, for its random sample.
        """
        places = np.flatnonzero(allowed)
        if self.pick == "random" and len(places) > self.num_negatives:
            generator = np.random.default_rng((self.seed, query))
            return np.sort(generator.choice(places, self.num_negatives, replace=False))
        return places[: self.num_negatives]


@dataclass
class Report:
    """What was mined.

    Attributes:
        queries: how many have a known positive.
        written: rows in the file: queries with a negative; in the form of sentence-transformers the positives of those
            with as many negatives as asked for.
        negatives: in all rows together.
        candidates: documents in the windows of ranks.
        known_positives: documents that were passed over down to the end of the window: known positives of the query and
            of those with its contents, documents with the same contents, and documents with the contents or the id of
            the query.
        false_negatives: candidates above their query's limit, likely relevant.
        repeated: candidates with the contents of a better one.
        without_negatives: queries of which no candidate was left; they have no row.
        fewer_negatives: queries with some, but fewer than asked for; they have no row in the form of
            sentence-transformers.
        without_vectors: queries that were not embedded, or none of whose positives was; they have no row.
        scores: how often a score was met, by name ("positives", "negatives", "likely false negatives") and by the
            number of its bin of width `BIN`; bin 0 begins at 0.
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
    scores: dict[str, Counter[int]] = field(default_factory=dict)

    def count(self, name: str, scores: np.ndarray) -> None:
        """Add scores (n,) to a histogram."""
        bins, counts = np.unique(np.floor(np.asarray(scores, np.float64) / BIN).astype(np.int64), return_counts=True)
        self.scores.setdefault(name, Counter()).update(dict(zip(bins.tolist(), counts.tolist())))

    def add(self, other: dict[str, Any]) -> None:
        """Add what was counted in a block, its attributes as JSON tells them."""
        for name, value in other.items():
            if name != "scores":
                setattr(self, name, getattr(self, name) + value)
        for name, counts in other["scores"].items():
            self.scores.setdefault(name, Counter()).update({int(place): n for place, n in counts.items()})

    def histogram(self, most_rows: int = 16) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Edges (R + 1,) of at most so many bins of equal width, and the counts (R,) of each kind of score."""
        filled = [place for counts in self.scores.values() for place in counts]
        if not filled:
            return np.array([0.0, BIN]), {name: np.zeros(1, np.int64) for name in self.scores}
        steps = (n * 10**k for k in range(18) for n in (1, 2, 5))
        step = next(s for s in steps if max(filled) // s - min(filled) // s < most_rows)
        first, last = min(filled) // step, max(filled) // step
        counted = {name: np.zeros(last - first + 1, np.int64) for name in self.scores}
        for name, counts in self.scores.items():
            for place, number in counts.items():
                counted[name][place // step - first] += number
        return np.arange(first, last + 2) * (step * BIN), counted


def mine(
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
    work: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Report:
    """Write each query with its positives and hard negatives, one JSON object a line, and the scores of all of them.

    Documents are searched where they lie, a block of a mapped file at a time. An interrupted call goes on after the
    last block of queries that it had finished; `out` appears at the end, whole. Several processes that all call it, and
    see the same folder, share the blocks; the main one puts them together.

        {"query", "pos": [text], "neg": [text], "pos_scores", "neg_scores", "query_id", "pos_id", "neg_id"}
        {"query_id", "query", "positive_passages": [{"docid", "text", "score"}], "negative_passages": …}
        {"anchor", "positive", "negative_1", …, "negative_8"}

    `MinedPairs` reads the first two; FlagEmbedding reads the first, with its scores if told to distil; Tevatron the
    second. Where the data are vectors, ids stand in place of texts, as `MinedPairs(…, queries=…, documents=…)` reads
    them. The losses of sentence-transformers train on the third, of texts alone: a row for each positive, without
    scores, since every column is an input. All its rows have as many negatives, and queries with fewer are left out.

    Args:
        queries: (Q, D) vectors of the pairs' left items, by the ids of `dualenc.data.corpus.corpora(pairs)`.
        documents: (N, D) vectors of the right items, likewise; both of length one for cosines.
        pairs: texts or vectors, and who is known to be relevant to whom.
        out: the .jsonl file.
        rule: which documents become negatives.
        rescore: a judge that reads both texts, whose scores then order the window, are compared and written.
        rescored_by: what tells that judge from others, so that its scores are not taken for another's.
        form: "flagembedding" for the first kind of row, "tevatron" for the second, "sentence-transformers" for the
            third.
        factory: "exact", or a FAISS factory string, "auto" included: an index finds the documents.
        work: folder for unfinished work; by default beside `out`. It is removed at the end.
        progress: show a bar.

    Returns:
        What was counted, on every process.

    Raises:
        DualencError: images, vectors in the form of sentence-transformers, dimensions that differ, a factory
            string that FAISS refuses, scores that are not finite, or no query with a vector and a positive with one.
    """
    from dualenc.data.corpus import corpora
    from dualenc.data.identity import digest_of

    rule = rule or Rule()
    left, right = corpora(pairs)
    if "image" in (left.modality, right.modality):
        raise DualencError(f"{left.modality} and {right.modality}: rows hold texts or ids of vectors; mine on texts")
    if rescore is not None and (left.modality, right.modality) != ("text", "text"):
        raise DualencError("a cross-encoder reads texts, and the data holds vectors; leave it out")
    if form == "sentence-transformers" and (left.modality, right.modality) != ("text", "text"):
        raise DualencError("sentence-transformers trains on texts, and the data holds vectors; choose another form")
    if queries.dim != documents.dim:
        raise DualencError(f"queries have dimension {queries.dim} and documents {documents.dim}; embed both alike")
    check_mined(out)
    metric: Metric = "cosine" if documents.meta.get("normalized") else "ip"
    if factory not in ("exact", "auto"):
        from dualenc.search.build import new_index

        new_index(documents.dim, factory, metric, len(documents))  # refused before any work
    target = Path(out)
    folder = target.with_name(f".{target.name}.mining") if work is None else Path(work)
    # The vectors themselves decide: by the checksums of their files, or read.
    made = [e.meta.get("files") or digest_of(*e.blocks()) for e in (queries, documents)]
    settings: dict[str, Any] = {"rule": asdict(rule), "form": form, "factory": factory, "rescored_by": rescored_by}
    settings |= {"data": [pairs.identity(), digest_of(left.ids), digest_of(right.ids)], "embeddings": made}
    settings |= {"ids": [digest_of(queries.ids), digest_of(documents.ids)], "rescored": rescore is not None}
    begun = {"settings": digest_of(json.dumps(settings, sort_keys=True))}
    main, processes = distributed.is_main(), distributed.world_size()
    if main and (folder / "settings.json").exists() and read_json(folder / "settings.json") != begun:
        remove(folder)
    with removed_if_refused(folder, "positives-*.npy") if main else nullcontext():
        if main:
            write_json(folder / "settings.json", begun)
        distributed.barrier()
        miner = _Miner(queries, documents, pairs, left, right, rule, rescore, form, folder)
        find = miner.searcher(factory, metric)
        starts = range(0, len(miner.asked), QUERIES_PER_BLOCK)
        blocks = {number: miner.asked[start : start + QUERIES_PER_BLOCK] for number, start in enumerate(starts)}
        own = {number: block for number, block in blocks.items() if number % processes == distributed.rank()}
        total = sum(map(len, own.values()))
        with tqdm(total=total, desc="mine", unit=" queries", disable=not (progress and main)) as bar:
            for number, block in own.items():
                counted = folder / f"rows-{number:05d}.json"
                if not counted.exists():
                    part = Report()
                    with (
                        atomic_path(counted.with_suffix(".jsonl")) as path,
                        open(path, "w", encoding="utf-8") as stream,
                    ):
                        for row in miner.rows(block, find, part):
                            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                    write_json(counted, vars(part))
                bar.update(len(block))
        distributed.barrier()
    report = Report(queries=len(np.unique(pairs.left_id)))
    report.without_vectors = report.queries - len(miner.asked)
    report.count("positives", miner.pair_scores[np.isfinite(miner.pair_scores)])
    for number in blocks:
        report.add(read_json(folder / f"rows-{number:05d}.json"))
    distributed.barrier()  # all have read it
    if main:
        with atomic_path(target) as path, open(path, "wb") as stream:
            for number in blocks:
                with open(folder / f"rows-{number:05d}.jsonl", "rb") as rows:
                    shutil.copyfileobj(rows, stream)
        remove(folder)
    distributed.barrier()
    return report


def check_mined(path: str | os.PathLike[str]) -> None:
    """Insist that a file may be written: there is none, or an empty one, or one that `mine` wrote.

    Raises:
        DualencError: it is a folder, or holds something else.
    """
    path = Path(path)
    if path.is_dir():
        raise DualencError(f"{path}: is a folder; name a file to write, such as {path / 'mined.jsonl'}")
    if not path.exists():
        return
    with open_regular(path) as stream:
        line = stream.readline(1 << 24)
    try:
        keys = json.loads(line).keys() if line else {"query_id", "pos_id"}
    except (ValueError, AttributeError):
        keys = set()
    is_tuple = {"anchor", "positive", "negative_1"} <= keys
    if not is_tuple and ("query_id" not in keys or not keys & {"pos_id", "positive_passages"}):
        raise DualencError(f"{path}: exists and holds no mined negatives; choose another file to write")


class _Miner:
    """What the blocks of queries share.

    Attributes:
        left_row: (num_left,) row of each left item's vector, -1 without.
        right_row: (num_right,) likewise.
        document: (N,) right id of each vector.
        same: (num_right,) equal for right items of equal contents.
        pair_scores: (M,) score of each known pair, NaN without vectors.
        asked: ids of the left items to mine for.
    """

    def __init__(
        self,
        queries: Embeddings,
        documents: Embeddings,
        pairs: PairDataset,
        left: Corpus,
        right: Corpus,
        rule: Rule,
        rescore: Rescore | None,
        form: Form,
        folder: Path,
    ) -> None:
        self.queries, self.documents, self.pairs, self.left, self.right = queries, documents, pairs, left, right
        self.rule, self.rescore, self.form, self.folder = rule, rescore, form, folder
        self.left_row, self.right_row = queries.rows_of(left.ids), documents.rows_of(right.ids)
        self.document = np.empty(len(documents), np.int64)
        there = np.flatnonzero(self.right_row >= 0)
        self.document[self.right_row[there]] = there
        of_right = _contents(right)
        contents, self.same = np.unique(of_right, return_inverse=True)
        self._queries_same = np.full(len(left), -1)  # the group of documents that repeat a query
        own = _contents(left)
        # Queries of equal contents under several ids are one query, with the positives of all of them.
        distinct, self._query_group = np.unique(own, return_inverse=True)
        self._group_positives = Ragged.from_pairs(self._query_group[pairs.left_id], pairs.right_id, len(distinct))
        if left.modality == right.modality == "text":
            place = np.searchsorted(contents, own).clip(max=len(contents) - 1)
            self._queries_same = np.where(contents[place] == own, place, -1)
        self._by_group = np.argsort(self.same, kind="stable")
        self._group_starts = np.searchsorted(self.same[self._by_group], np.arange(len(contents) + 1))
        # Only in BEIR do ids of both sides name the same things.
        self._named = {name: i for i, name in enumerate(right.ids)} if hasattr(pairs, "queries") else {}
        if not ((self.left_row[pairs.left_id] >= 0) & (self.right_row[pairs.right_id] >= 0)).any():
            raise DualencError("no query and its positive both have a vector; embed the sides of these pairs")
        self.pair_scores = self._score_pairs()
        scored = np.isfinite(self.pair_scores)
        self.asked = np.unique(pairs.left_id[scored])
        self._pair_order = np.argsort(pairs.left_id, kind="stable")
        self._pair_starts = np.searchsorted(pairs.left_id[self._pair_order], np.arange(len(left) + 1))
        self._all_scores = self.pair_scores[scored]

    def searcher(self, factory: str, metric: Metric) -> Callable[[np.ndarray, int], np.ndarray]:
        """From queries (n, D) and k to rows (n, k) of the documents, best first, -1 where fewer are found."""
        from dualenc.search.index import Index, is_index

        if factory == "exact":

            def find(vectors: np.ndarray, k: int) -> np.ndarray:
                with distributed.alone():
                    return exact_search(vectors, self.documents.vectors, k)[1]

            return find
        if distributed.is_main() and not is_index(self.folder / "index"):
            vectors = self.queries.vectors[self.left_row[self.asked[:500]]]
            with distributed.alone():
                Index.build(self.documents, None, factory, metric=metric, queries=vectors, folder=self.folder / "index")
        distributed.barrier()
        index = Index.open(self.folder / "index")
        return lambda vectors, k: index.search_rows(vectors, k)[1]

    def rows(self, block: np.ndarray, find: Callable[[np.ndarray, int], np.ndarray], report: Report) -> Iterator[Any]:
        """The lines of a block of left ids; what happens is counted in `report`."""
        known = [self._known(query) for query in block.tolist()]
        depth = self.rule.last_rank + max(len(ids) for ids in known)
        vectors = np.asarray(self.queries.vectors[self.left_row[block]], np.float32)
        found = find(vectors, min(depth, len(self.documents)))
        windows: list[tuple[np.ndarray, np.ndarray]] = []  # right ids and scores, best first
        for place, rows in enumerate(found):
            rows = rows[rows >= 0]
            scores = np.asarray(self.documents.vectors[rows], np.float32) @ vectors[place]
            order = np.argsort(-scores, kind="stable")  # of an index the scores and their order are rough
            ids, scores = self.document[rows[order]], scores[order]
            is_known = np.isin(ids, known[place])
            end = np.searchsorted(np.cumsum(~is_known), self.rule.last_rank) + 1
            report.known_positives += int(is_known[:end].sum())
            inside = np.flatnonzero(~is_known)[self.rule.first_rank - 1 : self.rule.last_rank]
            windows.append((ids[inside], scores[inside]))
        if self.rescore is not None:
            texts = [[(self.left[q], self.right[d]) for d in ids] for q, (ids, _) in zip(block.tolist(), windows)]
            windows = [(ids[order], own) for (ids, _), (order, own) in zip(windows, rerank(self.rescore, texts))]
        for query, (ids, scores_of) in zip(block.tolist(), windows):
            pairs = self._pair_order[self._pair_starts[query] : self._pair_starts[query + 1]]
            pairs = pairs[np.sort(np.unique(self.pairs.right_id[pairs], return_index=True)[1])]  # each positive once
            positive_scores = self.pair_scores[pairs]
            there = np.isfinite(positive_scores)
            ceiling = self.rule.ceiling(positive_scores[there], self._all_scores)
            too_high = scores_of > ceiling
            again = np.ones(len(ids), bool)
            again[np.unique(self.same[ids], return_index=True)[1]] = False
            chosen = self.rule.choose(~too_high & ~again, query)
            report.candidates += len(ids)
            report.false_negatives += int(too_high.sum())
            report.repeated += int((again & ~too_high).sum())
            report.without_negatives += len(chosen) == 0
            report.fewer_negatives += 0 < len(chosen) < self.rule.num_negatives
            report.count("negatives", scores_of[chosen])
            report.count("likely false negatives", scores_of[too_high])
            # Columns of a table hold a value in every row.
            fewest = self.rule.num_negatives if self.form == "sentence-transformers" else 1
            if len(chosen) < fewest:
                continue
            positives = self.pairs.right_id[pairs[there]]
            if self.form == "sentence-transformers":
                lines = self._tuples(query, positives, ids[chosen])
            else:
                lines = [self._line(query, positives, positive_scores[there], ids[chosen], scores_of[chosen])]
            report.written += len(lines)
            report.negatives += len(lines) * len(chosen)
            yield from lines

    def _tuples(self, query: int, positives: np.ndarray, negatives: np.ndarray) -> list[dict[str, str]]:
        """A row for each positive, each negative in a column of its own."""
        columns = {f"negative_{place}": self.right[row] for place, row in enumerate(negatives.tolist(), start=1)}
        return [{"anchor": self.left[query], "positive": self.right[row], **columns} for row in positives.tolist()]

    def _line(
        self, query: int, pos: np.ndarray, pos_scores: np.ndarray, neg: np.ndarray, neg_scores: np.ndarray
    ) -> Any:
        def shown(corpus: Corpus, row: int) -> str:
            return corpus[row] if corpus.modality == "text" else corpus.ids[row]

        name, text = self.left.ids[query], shown(self.left, query)
        sides = [
            [(self.right.ids[i], shown(self.right, i), round(s, 6)) for i, s in zip(ids.tolist(), scores.tolist())]
            for ids, scores in ((pos, pos_scores), (neg, neg_scores))
        ]
        if self.form == "tevatron":
            passages = [[{"docid": i, "text": t, "score": s} for i, t, s in side] for side in sides]
            return {"query_id": name, "query": text, "positive_passages": passages[0], "negative_passages": passages[1]}
        columns = [[list(column) for column in zip(*side)] for side in sides]
        (pos_id, pos_text, pos_score), (neg_id, neg_text, neg_score) = columns
        row = {"query": text, "pos": pos_text, "neg": neg_text, "pos_scores": pos_score, "neg_scores": neg_score}
        return row | {"query_id": name, "pos_id": pos_id, "neg_id": neg_id}

    def _known(self, query: int) -> np.ndarray:
        """Right ids that are no candidates: positives of all queries of these contents, copies of them, the query."""
        groups = self.same[self._group_positives.row(self._query_group[query])]
        if self._queries_same[query] >= 0:
            groups = np.append(groups, self._queries_same[query])
        starts = self._group_starts
        ids = [self._by_group[starts[group] : starts[group + 1]] for group in np.unique(groups).tolist()]
        if (namesake := self._named.get(self.left.ids[query])) is not None:
            ids.append(np.array([namesake]))
        return np.unique(np.concatenate(ids))

    def _score_pairs(self) -> np.ndarray:
        """The score of each known pair (M,), NaN where a vector is missing; kept block by block."""
        pairs = self.pairs
        blocks = list(enumerate(range(0, len(pairs), PAIRS_PER_BLOCK)))
        paths = [self.folder / f"positives-{number:05d}.npy" for number, _ in blocks]
        for number, start in blocks[distributed.rank() :: distributed.world_size()]:
            path = paths[number]
            if not path.exists():
                left, right = (ids[start : start + PAIRS_PER_BLOCK] for ids in (pairs.left_id, pairs.right_id))
                scores = np.full(len(left), np.nan, np.float32)
                rows, columns = self.left_row[left], self.right_row[right]
                there = np.flatnonzero((rows >= 0) & (columns >= 0))
                if self.rescore is None:
                    a = np.asarray(self.queries.vectors[rows[there]], np.float32)
                    b = np.asarray(self.documents.vectors[columns[there]], np.float32)
                    scores[there] = finite_scores(np.einsum("nd,nd->n", a, b))
                elif len(there):
                    texts = [(self.left[q], self.right[d]) for q, d in zip(left[there], right[there])]
                    scores[there] = finite_scores(self.rescore(texts))
                with atomic_path(path) as part:
                    save_array(part, scores)
        distributed.barrier()
        return np.concatenate([np.load(path) for path in paths])


def _contents(corpus: Corpus) -> np.ndarray:
    """A 64-bit hash (N,) of what each item holds."""
    from dualenc.data.identity import identities

    hashes = np.empty(len(corpus), np.uint64)
    for start in range(0, len(corpus), 1 << 14):
        rows = np.arange(start, min(start + (1 << 14), len(corpus)))
        digests = [hashlib.blake2b(value, digest_size=8).digest() for value in identities(corpus.items, rows, True)]
        hashes[rows] = np.frombuffer(b"".join(digests), np.uint64)
    return hashes
