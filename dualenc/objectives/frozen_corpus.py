"""FrozenCorpus: the exact softmax over all documents, for document vectors that stay fixed.

Shapes: A anchors (queries) of this rank, G of all ranks, N documents, n documents of a block, K
known positives, D dimension of the documents, d dimension of the queries (D, or less under
`Matryoshka`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import CommonArguments, Estimate, Objective
from dualenc.objectives.batch import GatheredBatch, two_towers
from dualenc.objectives.checks import are_ids, as_numbers, check_count, fail, read_extremes
from dualenc.objectives.draws import SharedRandom

Search = Callable[[np.ndarray, int], Any]
"""`search(queries (A, D) float32, nearest) -> rows (A, nearest)` returns the rows of the nearest
documents, padded with -1."""
# Largest block of float32 documents, and of their scores, in bytes: about the size of CPU caches.
BLOCK_BYTES = 2**22
NUM_CHECKED = 1024  # documents checked for NaN before the first step


class FrozenCorpus(Objective):
    """−s⁺/τ + log Σ_z exp(s_z/τ) over all N documents z that are not known positives.

    This is L(θ) itself (Yau et al. 2024, arXiv:2404.10575, Eq. 1), for queries against documents
    whose vectors stay fixed. Documents are read in blocks with a running log-sum-exp (Milakov and
    Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). Because s is linear in
    the query, the gradient of log Z in the query is m/τ, where m = Σ_z p(z)·z is the mean document
    under the softmax. A single pass gives both, without an (A, N) matrix.

    Only left items are anchors, so `per_anchor` is (b,). Every document counts once, however many
    pairs it is in. Mined negatives would add nothing, because they are documents already. Several
    ranks divide the documents.

        FrozenCorpus(np.load("documents.npy", mmap_mode="r"), temperature=0.03)

    **Weights.** With weights w_d, the log of a document's weight is added to its score, that of
    the positive included: p(d | q) = w_d·exp(s_d/τ) / Σ_z w_z·exp(s_z/τ). This is the logit
    adjustment of Menon et al. 2021 (arXiv:2007.07314, Eq. 10). The minimum of the loss over all
    functions s is where this p is the distribution of the pairs, so s_d/τ = log p(d | q) − log w_d
    + a constant of q. Without weights, s learns log p(d | q), hence also how often a document is
    clicked at all, and one without clicks is never an answer. With w_d = n_d + α, where n_d is the
    number of training pairs of document d and Σ_d n_d = M,

        w_d = n_d + α,   w_d/(M + αN) = p_α(d),   s_d/τ = log p(d | q)/p_α(d) + a constant of q,

    where p_α(d) is the frequency of d in the pairs after α further clicks on every document. So
    the score says how much the query raises the probability of d, and not how popular d is.
    α → ∞ makes all weights equal: the loss without weights. α → 0 makes p_α the frequency in the
    pairs: in-batch negatives, which are drawn in it, approach log p(d | q)/p(d) (van den Oord et
    al. 2018, arXiv:1807.03748, Eq. 5), and documents without a click leave the sum.

        clicks = np.bincount(pairs.right_id, minlength=len(documents))
        FrozenCorpus(documents, weights=clicks + 0.1, temperature=0.03)

    Args:
        documents: (N, D) float vectors by right id, used as unit vectors: an array, a memory map,
            `ShardedVectors` or a tensor. They are read in blocks, never written, and not part of
            checkpoints.
        weights: (N,) positive weights of the documents, not part of checkpoints; None weighs all
            alike. Only their ratios matter.
        max_exact: maximum number of documents for the exact sum. For more documents it is
            estimated, from the documents that `search` finds for the queries of the batch and a
            uniform sample of the others, weighted so that the estimate of Z is unbiased.
        nearest: number of documents to search for per query.
        sampled: number of documents to draw per step, shared by all queries.
        search: function that finds the nearest documents, see `Search`, such as `lambda queries,
            nearest: faiss_index.search(queries, nearest)[1]`. Required above `max_exact`.
        **common: see `Objective`; views is not supported.
    """

    takes_mined = False
    estimates_partition = True
    anchors_per_pair = 1

    def __init__(
        self,
        documents: Any,
        *,
        weights: Any = None,
        max_exact: int = 2_000_000,
        nearest: int = 256,
        sampled: int = 8192,
        search: Search | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        num_documents = _checked_size(documents)
        if common.get("views"):
            fail("views", "is True, but documents are not views of the queries", "leave it out")
        if common.get("num_right") not in (None, num_documents):
            problem = f"is {common['num_right']}, but documents have {num_documents} rows"
            fail("num_right", problem, "leave it out")
        common["num_right"] = num_documents
        super().__init__(**common)
        check_count("max_exact", max_exact)
        check_count("nearest", nearest)
        check_count("sampled", sampled)
        if search is not None and not callable(search):
            fail(
                "search", f"is of type {type(search).__name__}", "it must be a function, see Search"
            )
        if search is None and num_documents > max_exact:
            fail(
                "documents",
                f"have {num_documents} rows, more than max_exact ({max_exact})",
                "pass search, such as that of a FAISS index, "
                "or raise max_exact, which makes steps slower",
            )
        log_weights = None if weights is None else _checked_log_weights(weights, num_documents)
        self.documents = FrozenDocuments(documents, search, log_weights)
        if not self.documents.seem_finite():
            fail("documents", "hold NaN or infinite values", "leave these rows out")
        self.max_exact = max_exact
        self.nearest = nearest
        self.sampled = sampled
        self.draws = SharedRandom(self.seed)
        self.corpus.counts_pairs = False

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        log_partition, mean = self._softmax(anchors)
        self._check_values(anchors, log_partition)
        self.record(log_partition=log_partition)
        positive = anchors.positive_scores  # (1, A)
        own = self.documents.read_log_weights(_positive_rows(anchors), positive)  # (A,) or None
        weighted = positive if own is None else positive + own
        # With m constant, ∇(q·m/τ) = ∇ log Z, both in the query q and in τ. Without negatives, m =
        # 0.
        coordinates = anchors.embeddings / anchors.temperature
        return Estimate.apply(self.log_odds(log_partition, weighted), coordinates, mean, positive)

    @torch.no_grad()
    def _softmax(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Return (1, A) log Z and (1, A, d) the mean document under the softmax, or 0 for none."""
        queries = anchors.gather(anchors.embeddings)[0] / anchors.temperature  # (G, d)
        if queries.shape[1] > self.documents.dim:
            problem = f"have {self.documents.dim} components and the queries {queries.shape[1]}"
            fail("documents", problem, "pass documents embedded by the model that is trained")
        positives = anchors.gather_lists(anchors.positive_ids)[0]  # (G, K)
        highest = queries.new_full((len(queries), 1), -torch.inf)
        total = torch.zeros_like(highest)  # Σ exp(s/τ − highest)
        mean = torch.zeros_like(queries)  # Σ exp(s/τ − highest)·z
        for rows, log_weights, block in self._blocks(anchors):
            # Scaling scores by the documents' lengths costs less than scaling the documents.
            inverse_norms = block.norm(dim=1).clamp_(min=1e-12).reciprocal_()  # (n,)
            scores = (queries @ block.T).mul_(inverse_norms)  # (G, n) s/τ
            if log_weights is not None:
                scores.add_(log_weights)
            hide(scores, rows, positives)
            # Online softmax: when a block raises the maximum, the sums so far are scaled down.
            peak = torch.maximum(highest, scores.amax(dim=1, keepdim=True))
            rescale = exp_difference(highest, peak)
            weights = exp_difference(scores, peak)
            total = total * rescale + weights.sum(dim=1, keepdim=True)
            mean = torch.addmm(mean * rescale, weights.mul_(inverse_norms), block)
            highest = peak
        peak = distributed.all_reduce(highest, "max")
        rescale = exp_difference(highest, peak)
        total = distributed.all_reduce(total * rescale)
        # The sum includes exp(0) for the highest score, so it is at least 1 unless there are no
        # negatives.
        mean = distributed.all_reduce(mean * rescale) / total.clamp(min=1)
        log_partition = (peak + total.log())[:, 0]
        return log_partition[None, anchors.batch_rows], mean[None, anchors.batch_rows]

    def _blocks(self, anchors: Anchors) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield this rank's share of the documents, block by block.

        Yields:
            (n,) ascending rows; (n,) log weights, or None for weights of 1; (n, d) first d
            components.
        """
        queries = anchors.embeddings[0]
        is_exact = self.documents.num_rows <= self.max_exact
        num_rows = self.documents.num_rows
        if not is_exact:
            sample, log_weights = self._sample(anchors)
            num_rows = len(sample)
        own = distributed.rank_slice(num_rows)
        size = max(1, BLOCK_BYTES // (4 * max(self.documents.dim, anchors.num_batch)))
        for start in range(own.start, own.stop, size):
            part = slice(start, min(start + size, own.stop))
            if is_exact:
                rows = torch.arange(part.start, part.stop, device=queries.device)
                # A slice of a memory map is read in one go.
                block = self.documents.read(part, queries)
                yield rows, self.documents.read_log_weights(part, queries), block
            else:
                rows = sample[part]
                yield rows, log_weights[part], self.documents.read(rows, queries)

    def _sample(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Sample documents: the nearest ones of all queries, and a uniform sample of the others.

        Returns:
            (R,) ascending rows; (R,) log of the number of documents that each stands for (1 for the
            nearest ones, and for the others their number divided by the number of draws among
            them), plus the document's own log weight.
        """
        queries = anchors.embeddings[0]
        own_nearest = self.documents.find(queries, self.nearest)
        nearest = anchors.gather_lists(own_nearest[None]).unique()
        nearest = nearest[nearest != PADDING]
        drawn = self.draws.integers(self.documents.num_rows, self.sampled, device=queries.device)
        drawn = drawn[~torch.isin(drawn, nearest)]
        rest, copies = drawn.unique(return_counts=True)
        num_rest = self.documents.num_rows - len(nearest)
        stands_for = copies * (num_rest / max(len(drawn), 1))
        weight_one = torch.zeros(len(nearest), device=queries.device)
        log_weights = torch.cat([weight_one, stands_for.log()])
        rows, order = torch.cat([nearest, rest]).sort()
        log_weights = log_weights.to(queries)[order]
        documents_own = self.documents.read_log_weights(rows, queries)
        return rows, log_weights if documents_own is None else log_weights + documents_own

    def _check_values(self, anchors: Anchors, log_partition: Tensor) -> None:
        """Raise on NaN, and on positives that differ from the documents.

        They differ if rows are in another order or the right tower is trained.
        """
        rows = _positive_rows(anchors)
        partners = anchors.partners[0].detach()
        documents = normalize(self.documents.read(rows, partners), dim=1)
        cosines = (documents * partners).sum(dim=1)
        for name, (low, high) in read_extremes({"log Z": log_partition, "cosine": cosines}).items():
            if math.isnan(low + high):
                problem = "hold NaN or infinite values, as zero rows do after normalization"
                fail("documents", problem, "leave these rows out")
            if name == "cosine" and low < 0.99:
                fail(
                    "right",
                    f"differs from the documents of right_id (cosine {low:.2f})",
                    "right ids must be rows of documents, "
                    "and the right tower must return vectors unchanged",
                )

    def _directions(self, batch: GatheredBatch, temperature: Tensor) -> list[Anchors]:
        return [two_towers(batch, self.num_left or 0, temperature).of_direction(0)]


def _positive_rows(anchors: Anchors) -> Tensor:
    """Return (A,) rows of the anchors' own positives among the documents."""
    return anchors.candidate_ids[0][anchors.positive_column[0]]


def _checked_log_weights(weights: Any, num_documents: int) -> Tensor:
    """Return (N,) log weights in double precision; raise unless weights are positive."""
    numbers = as_numbers("weights", weights, torch.device("cpu")).detach().double().cpu()
    if numbers.shape != (num_documents,):
        problem = f"have shape {tuple(numbers.shape)}, but documents have {num_documents} rows"
        fail("weights", problem, "give a weight for each document")
    if not bool((numbers.isfinite() & (numbers > 0)).all()):
        problem = "hold values that are not finite and above 0"
        fail("weights", problem, "add a small number, as in clicks + 0.1")
    return numbers.log()


def _checked_size(documents: Any) -> int:
    """Return N; raise unless documents are a float array (N, D)."""
    shape = tuple(getattr(documents, "shape", ()))
    if len(shape) != 2 or not shape[0] or "float" not in str(documents.dtype):
        problem = "must be a float array (N, D) with N ≥ 1"
        fail("documents", problem, "pass for example the vectors of an index")
    return int(shape[0])


class FrozenDocuments:
    """Document vectors (N, D), their weights and a search; copies of an objective share them.

        documents = FrozenDocuments(vectors, search=None)
        documents.read(slice(0, 100), like=queries)

    Args:
        vectors: (N, D) array, memory map or tensor.
        search: function that finds the nearest documents, see `Search`; or None.
        log_weights: (N,) logs of the documents' weights; None for weights of 1.
    """

    def __init__(
        self, vectors: Any, search: Search | None, log_weights: Tensor | None = None
    ) -> None:
        self.vectors = vectors
        self.search = search
        self.log_weights = log_weights
        self.num_rows, self.dim = vectors.shape

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDocuments:
        return self

    def seem_finite(self) -> bool:
        """Return True if a sample of evenly spaced rows is finite."""
        places = torch.linspace(0, self.num_rows - 1, NUM_CHECKED, dtype=torch.float64)
        rows = places.long().unique()
        return bool(self.read(rows, torch.zeros(0, self.dim)).isfinite().all())

    def read(self, rows: slice | Tensor, like: Tensor) -> Tensor:
        """Return (n, d) the first d components of rows, in the precision of queries (G, d)."""
        if isinstance(self.vectors, Tensor):
            if isinstance(rows, Tensor):
                rows = rows.to(self.vectors.device)
            block = self.vectors[rows]
        else:
            index = rows if isinstance(rows, slice) else rows.cpu().numpy()
            array = np.asarray(self.vectors[index])
            with warnings.catch_warnings():
                # torch warns about read-only memory maps, but nothing writes to this one. A
                # conversion of half precision in numpy takes thirty times as long.
                warnings.filterwarnings("ignore", message=".*not writable.*")
                block = torch.from_numpy(array)
        return block[:, : like.shape[1]].to(like)

    def read_log_weights(self, rows: slice | Tensor, like: Tensor) -> Tensor | None:
        """Return (n,) log weights of rows, in the precision of `like`; None for weights of 1."""
        if self.log_weights is None:
            return None
        return self.log_weights[rows.cpu() if isinstance(rows, Tensor) else rows].to(like)

    def find(self, queries: Tensor, nearest: int) -> Tensor:
        """Search for the documents nearest to queries (A, d); return (A, nearest) rows or -1."""
        assert self.search is not None
        # Shorter queries (Matryoshka) are padded with zeros, which leaves their scores unchanged.
        whole = pad(queries, (0, self.dim - queries.shape[1])).float()
        results = as_numbers("search", self.search(whole.cpu().numpy(), nearest), queries.device)
        shape = tuple(results.shape)
        if len(shape) != 2 or shape[0] != len(queries):
            problem = f"returned shape {shape} for {len(queries)} queries"
            fail("search", problem, "it must return rows (A, nearest)")
        if not are_ids(results):
            kind = str(results.dtype).removeprefix("torch.")
            fix = "return rows, which FAISS has in search(…)[1]; [0] has the scores"
            fail("search", f"returned {kind} instead of integers", fix)
        rows = results.to(queries.device).long()
        for low, high in read_extremes({"rows": rows}).values():
            if low < PADDING or high >= self.num_rows:
                problem = f"returned rows in [{low:.0f}, {high:.0f}]"
                fail("search", problem, f"they must be in [0, {self.num_rows}) or -1")
        return rows


def hide(scores: Tensor, rows: Tensor, positives: Tensor) -> None:
    """Set scores (G, n) of positives (G, K) to -inf; rows (n,) of the scores are ascending."""
    column = torch.searchsorted(rows, positives).clamp_(max=len(rows) - 1)  # (G, K)
    anchor, number = (rows[column] == positives).nonzero(as_tuple=True)
    scores[anchor, column[anchor, number]] = -torch.inf


def exp_difference(scores: Tensor, peak: Tensor) -> Tensor:
    """Return exp(scores − peak), 0 where both are -inf."""
    return (scores - peak.nan_to_num(neginf=0.0)).exp_()
