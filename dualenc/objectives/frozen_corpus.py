"""FrozenCorpus: the softmax over all documents, exact, where the documents are vectors that
training does not move.

Shapes: A anchors (queries) of this rank, G of all ranks, N documents, n documents of a block, K
known positives, D dimension of the documents, d that of the queries (a shorter length of
`Matryoshka`, or D).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import Estimate, Objective
from dualenc.objectives.batch import EncodedBatch, two_towers
from dualenc.objectives.checks import are_ids, as_numbers, check_count, fail, read_extremes
from dualenc.objectives.draws import SharedRandom

Search = Callable[[np.ndarray, int], Any]
"""`search(queries (A, D) float32, nearest) -> rows (A, nearest)` of the nearest documents, -1 where
there are fewer."""
BLOCK_BYTES = 2**22  # of documents in float32, and of their scores, at a time: what caches hold
NUM_CHECKED = 1024  # documents that are read before the first step


class FrozenCorpus(Objective):
    """−s⁺/τ + log Σ_z exp(s_z/τ) over all N documents z that are not known positives: L(θ) itself
    (Yau et al. 2024, arXiv:2404.10575, Eq. 1), of queries against documents that are vectors
    already.

        FrozenCorpus(np.load("documents.npy", mmap_mode="r"), temperature=0.03)

    Documents are read in blocks with a running log-sum-exp (Milakov and Gimelshein 2018,
    arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). As s is linear in the query, the gradient
    of log Z in the query is m/τ, with m = Σ_z p(z)·z the mean document under the softmax: one pass
    gives both, and no (A, N) matrix exists. One direction: left anchors only, so that `per_anchor`
    is (b,). Every document counts once, however many pairs it is in. Mined negatives are documents
    already, and add nothing. Several ranks divide the documents.

    Args:
        documents: (N, D) float vectors by right id, taken as unit vectors: an array, a memory map,
            `ShardedVectors` or a tensor. Read in blocks, never written, in no checkpoint.
        max_exact: above so many documents the sum is estimated: over the documents that `search`
            gives for the queries of the batch, and over a uniform sample of the others, weighed so
            that the estimate of Z is unbiased.
        nearest: documents that are searched for each query.
        sampled: documents that are drawn in a step, for all queries.
        search: see `Search`, such as `lambda queries, nearest: faiss_index.search(queries,
            nearest)[1]`; needed above `max_exact`.
        **common: see `Objective`; not views.
    """

    takes_mined = False
    estimates_partition = True
    anchors_per_pair = 1

    def __init__(
        self,
        documents: Any,
        *,
        max_exact: int = 2_000_000,
        nearest: int = 256,
        sampled: int = 8192,
        search: Search | None = None,
        **common: Any,
    ) -> None:
        shape = tuple(getattr(documents, "shape", ()))
        if len(shape) != 2 or not shape[0] or "float" not in str(documents.dtype):
            fail(
                "documents",
                "must be a float array (N, D) with N ≥ 1, such as the vectors of an index",
            )
        if common.get("views"):
            fail("views", "is True; documents are not views of the queries: leave it out")
        if common.get("num_right") not in (None, shape[0]):
            fail("num_right", f"is {common['num_right']}, but documents hold {shape[0]} rows")
        super().__init__(**common | {"num_right": shape[0]})
        for argument, value in (
            ("max_exact", max_exact),
            ("nearest", nearest),
            ("sampled", sampled),
        ):
            check_count(argument, value)
        if search is not None and not callable(search):
            fail("search", f"is of type {type(search).__name__}; it must be a function, see Search")
        if search is None and shape[0] > max_exact:
            advice = "pass search, such as a FAISS index's, or a higher max_exact: a step takes time with all of them"
            fail("documents", f"hold {shape[0]} rows, more than max_exact ({max_exact}); {advice}")
        self.documents = FrozenDocuments(documents, search)
        if not self.documents.seem_finite():
            fail("documents", "hold NaN or infinite values; leave these rows out")
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
        # ∇(q·m/τ) = ∇ log Z with m constant, in the query and in τ; an anchor without negatives has
        # m = 0.
        coordinates = anchors.embeddings / anchors.temperature
        return Estimate.apply(self.log_odds(log_partition, positive), coordinates, mean, positive)

    @torch.no_grad()
    def _softmax(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """(1, A) log Z and (1, A, d) the mean document under the softmax; zeros for an anchor
        without negatives."""
        queries = anchors.gather(anchors.embeddings)[0] / anchors.temperature  # (G, d)
        if queries.shape[1] > self.documents.dim:
            sizes = f"have {self.documents.dim} components and the queries {queries.shape[1]}"
            fail("documents", f"{sizes}; give those of the model that is trained")
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
            peak = torch.maximum(highest, scores.amax(dim=1, keepdim=True))
            rescale = exp_difference(highest, peak)
            weights = exp_difference(scores, peak)
            total = total * rescale + weights.sum(dim=1, keepdim=True)
            mean = torch.addmm(mean * rescale, weights.mul_(inverse_norms), block)
            highest = peak
        peak = distributed.all_reduce(highest, "max")
        rescale = exp_difference(highest, peak)
        total = distributed.all_reduce(total * rescale)
        # At least 1, the highest score's own term, unless there are no negatives.
        mean = distributed.all_reduce(mean * rescale) / total.clamp(min=1)
        log_partition = (peak + total.log())[:, 0]
        return log_partition[None, anchors.batch_rows], mean[None, anchors.batch_rows]

    def _blocks(self, anchors: Anchors) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """This rank's share of the documents, block by block: rows (n,) ascending, log weights (n,)
        or None for 1, and the first d components (n, d)."""
        queries = anchors.embeddings[0]
        is_exact = self.documents.num_rows <= self.max_exact
        sample, log_weights = (None, None) if is_exact else self._sample(anchors)
        own = distributed.rank_slice(self.documents.num_rows if sample is None else len(sample))
        size = max(1, BLOCK_BYTES // (4 * max(self.documents.dim, anchors.num_batch)))
        for start in range(own.start, own.stop, size):
            part = slice(start, min(start + size, own.stop))
            if sample is not None and log_weights is not None:
                yield sample[part], log_weights[part], self.documents.read(sample[part], queries)
            else:
                rows = torch.arange(part.start, part.stop, device=queries.device)
                yield rows, None, self.documents.read(part, queries)

    def _sample(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """(R,) rows, ascending: the nearest documents of all queries, and a uniform sample of the
        rest; (R,) the log of how many documents each stands for: 1, or the number of the rest over
        the number sampled of it."""
        queries = anchors.embeddings[0]
        own_nearest = self.documents.find(queries, self.nearest)
        nearest = anchors.gather_lists(own_nearest[None]).unique()
        nearest = nearest[nearest != PADDING]
        drawn = self.draws.integers(self.documents.num_rows, self.sampled, device=queries.device)
        drawn = drawn[~torch.isin(drawn, nearest)]
        rest, copies = drawn.unique(return_counts=True)
        stands_for = copies * ((self.documents.num_rows - len(nearest)) / max(len(drawn), 1))
        log_weights = torch.cat(
            [torch.zeros(len(nearest), device=queries.device), stands_for.log()]
        )
        rows, order = torch.cat([nearest, rest]).sort()
        return rows, log_weights.to(queries)[order]

    def _check_values(self, anchors: Anchors, log_partition: Tensor) -> None:
        """Refuse documents of NaN, and positives that are not the documents' own vectors: rows in
        another order, or a tower that moves."""
        rows = anchors.candidate_ids[0][anchors.positive_column[0]]
        partners = anchors.partners[0].detach()
        cosines = (normalize(self.documents.read(rows, partners), dim=1) * partners).sum(dim=1)
        for name, (low, high) in read_extremes({"log Z": log_partition, "cosine": cosines}).items():
            if math.isnan(low + high):
                fail(
                    "documents",
                    "hold NaN or infinite values, as rows of zeros do once divided by their length",
                )
            if name == "cosine" and low < 0.99:
                advice = "right ids must be rows of documents, and the right tower must leave vectors as they are"
                fail(
                    "right", f"differs from the documents of right_id (cosine {low:.2f}); {advice}"
                )

    def _directions(self, batch: EncodedBatch, temperature: Tensor) -> list[Anchors]:
        return [two_towers(batch, self.num_left or 0, temperature).of_direction(0)]


class FrozenDocuments:
    """Vectors (N, D) that do not change, and a search among them; copies of an objective share
    both."""

    def __init__(self, vectors: Any, search: Search | None) -> None:
        self.vectors = vectors
        self.search = search
        self.num_rows, self.dim = vectors.shape

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDocuments:
        return self

    def seem_finite(self) -> bool:
        """Whether a sample of the rows, at equal distances, is finite."""
        places = torch.linspace(0, self.num_rows - 1, NUM_CHECKED, dtype=torch.float64)
        rows = places.long().unique()
        return bool(self.read(rows, torch.zeros(0, self.dim)).isfinite().all())

    def read(self, rows: slice | Tensor, like: Tensor) -> Tensor:
        """(n, d) the first d components of rows, in the precision and on the device of queries (G,
        d)."""
        if isinstance(self.vectors, Tensor):
            block = self.vectors[rows if isinstance(rows, slice) else rows.to(self.vectors.device)]
        else:
            array = np.asarray(
                self.vectors[rows if isinstance(rows, slice) else rows.cpu().numpy()]
            )
            with warnings.catch_warnings():
                # Of a read-only map, to which nothing writes. numpy converts halves thirty times
                # slower.
                warnings.filterwarnings("ignore", message=".*not writable.*")
                block = torch.from_numpy(array)
        return block[:, : like.shape[1]].to(like)

    def find(self, queries: Tensor, nearest: int) -> Tensor:
        """(A, nearest) rows of the documents nearest to queries (A, d) by the search, padded with
        -1."""
        assert self.search is not None
        whole = pad(queries, (0, self.dim - queries.shape[1])).float()
        results = as_numbers("search", self.search(whole.cpu().numpy(), nearest), queries.device)
        shape = tuple(results.shape)
        if len(shape) != 2 or shape[0] != len(queries):
            problem = (
                f"gave shape {shape} for {len(queries)} queries; it must give rows (A, nearest)"
            )
            fail("search", problem)
        if not are_ids(results):
            kind = str(results.dtype).removeprefix("torch.")
            advice = "give rows, which FAISS has in search(…)[1]; [0] has the scores"
            fail("search", f"gave {kind} and not whole numbers; {advice}")
        rows = results.to(queries.device).long()
        for low, high in read_extremes({"rows": rows}).values():
            if low < PADDING or high >= self.num_rows:
                expected = f"they must be in [0, {self.num_rows}) or -1"
                fail("search", f"gave rows in [{low:.0f}, {high:.0f}]; {expected}")
        return rows


def hide(scores: Tensor, rows: Tensor, positives: Tensor) -> None:
    """Set the scores (G, n) of the documents in rows (n,), ascending, that are an anchor's
    positives (G, K) to -inf."""
    column = torch.searchsorted(rows, positives).clamp_(max=len(rows) - 1)  # (G, K)
    anchor, number = (rows[column] == positives).nonzero(as_tuple=True)
    scores[anchor, column[anchor, number]] = -torch.inf


def exp_difference(scores: Tensor, peak: Tensor) -> Tensor:
    """exp(scores − peak), 0 where both are -inf."""
    return (scores - peak.nan_to_num(neginf=0.0)).exp_()
