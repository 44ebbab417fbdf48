"""FrozenCorpus: the softmax over all documents, exact, where the documents are vectors that training does not move.

Shapes: A anchors (queries) of this rank, G of all ranks, N documents, n documents of a block, K known positives, D
dimension of the documents, d that of the queries (a shorter length of `Matryoshka`, or D).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import Estimate, Objective
from dualenc.objectives.batch import EncodedBatch, two_towers
from dualenc.objectives.checks import fail, names_class, read_extremes

BLOCK_BYTES = 2**23  # of the documents that are in memory in full precision at a time


class FrozenCorpus(Objective):
    """−s⁺/τ + log Σ_z exp(s_z/τ) over all N documents z that are not known positives: L(θ) itself (Yau et al. 2024,
    arXiv:2404.10575, Eq. 1), of queries against documents that are vectors already.

        FrozenCorpus(np.load("documents.npy", mmap_mode="r"), temperature=0.03)

    Documents are read in blocks with a running log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al.
    2022, arXiv:2205.14135). As s is linear in the query, the gradient of log Z in the query is m/τ, with m = Σ_z p(z)·z
    the mean document under the softmax: one pass gives both, and no (A, N) matrix exists. One direction: left anchors
    only, so that `per_anchor` is (b,). Every document counts once, however many pairs it is in. Mined negatives are
    documents already, and add nothing. Several ranks divide the documents.

    Args:
        documents: (N, D) float vectors by right id, taken as unit vectors: an array, a memory map, `ShardedVectors` or
            a tensor. Read in blocks, never written, in no checkpoint.
        **common: see `Objective`; not views.
    """

    takes_mined = False
    estimates_partition = True
    anchors_per_pair = 1

    @names_class
    def __init__(self, documents: Any, **common: Any) -> None:
        shape = tuple(getattr(documents, "shape", ()))
        if len(shape) != 2 or not shape[0] or "float" not in str(documents.dtype):
            fail("documents", "must be a float array (N, D) with N ≥ 1, such as the vectors of an index")
        if common.get("views"):
            fail("views", "is True; documents are not views of the queries: leave it out")
        if common.get("num_right") not in (None, shape[0]):
            fail("num_right", f"is {common['num_right']}, but documents hold {shape[0]} rows")
        super().__init__(**common | {"num_right": shape[0]})
        self.documents = FrozenDocuments(documents)
        self.corpus.counts_pairs = False

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        self._check_partners(anchors)
        log_partition, mean = self._softmax(anchors)
        self.record(log_partition=log_partition)
        positive = anchors.positive_scores  # (1, A)
        # ∇(q·m/τ) = ∇ log Z with m constant, in the query and in τ; an anchor without negatives has m = 0.
        mean_score = (anchors.embeddings * mean).sum(dim=-1) / anchors.temperature
        scores = torch.stack([mean_score, positive], dim=-1)
        signs = torch.tensor([1.0, -1.0]).to(scores).expand_as(scores)
        losses: Tensor = Estimate.apply(self.log_odds(log_partition, positive), scores, signs)
        return losses

    @torch.no_grad()
    def _softmax(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """(1, A) log Z and (1, A, d) the mean document under the softmax; zeros for an anchor without negatives."""
        queries = anchors.gather(anchors.embeddings)[0]  # (G, d)
        positives = anchors.gather_lists(anchors.positive_ids)[0]  # (G, K)
        highest = queries.new_full((len(queries), 1), -torch.inf)
        total = torch.zeros_like(highest)  # Σ exp(s/τ − highest)
        mean = torch.zeros_like(queries)  # Σ exp(s/τ − highest)·z
        own = distributed.rank_slice(self.documents.num_rows)
        for start in range(own.start, own.stop, self.documents.block_rows):
            block = self.documents.read(start, min(start + self.documents.block_rows, own.stop), queries)
            scores = (queries @ block.T).div_(anchors.temperature)  # (G, n)
            anchor, column = ((positives >= start) & (positives < start + len(block))).nonzero(
                as_tuple=True
            )
            scores[anchor, positives[anchor, column] - start] = -torch.inf
            peak = torch.maximum(highest, scores.amax(dim=1, keepdim=True))
            rescale = exp_difference(highest, peak)
            weights = exp_difference(scores, peak)
            total = total * rescale + weights.sum(dim=1, keepdim=True)
            mean = torch.addmm(mean * rescale, weights, block)
            highest = peak
        peak = distributed.all_reduce(highest, "max")
        rescale = exp_difference(highest, peak)
        total = distributed.all_reduce(total * rescale)
        # At least 1, the highest score's own term, unless there are no negatives.
        mean = distributed.all_reduce(mean * rescale) / total.clamp(min=1)
        log_partition = (peak + total.log())[:, 0]
        return log_partition[None, anchors.batch_rows], mean[None, anchors.batch_rows]

    def _check_partners(self, anchors: Anchors) -> None:
        """Refuse positives that are not the documents' own vectors: rows in another order, or a tower that moves."""
        rows = anchors.candidate_ids[0][anchors.positive_column[0]]
        partners = anchors.partners[0].detach()
        cosines = (self.documents.rows(rows, partners) * partners).sum(dim=1)
        for low, _ in read_extremes({"cosine": cosines}).values():
            if low < 0.99:
                advice = "right ids must be rows of documents, and the right tower must leave vectors as they are"
                fail("right", f"differs from the documents of right_id (cosine {low:.2f}); {advice}")

    def _directions(self, batch: EncodedBatch, temperature: Tensor) -> list[Anchors]:
        return [two_towers(batch, self.num_left or 0, temperature).of_direction(0)]

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the partition functions."""
        return self.spread("log_partition")


class FrozenDocuments:
    """Vectors (N, D) that do not change, read as unit vectors; copies of an objective share them."""

    def __init__(self, vectors: Any) -> None:
        self.vectors = vectors
        self.num_rows, dim = vectors.shape
        self.block_rows = max(1, BLOCK_BYTES // (4 * dim))

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDocuments:
        return self

    def read(self, start: int, stop: int, like: Tensor) -> Tensor:
        """(n, d) documents in [start, stop), in the precision, dimension and on the device of queries (G, d)."""
        return unit(self.vectors[start:stop], like)

    def rows(self, numbers: Tensor, like: Tensor) -> Tensor:
        """(n, d) documents by row (n,), likewise."""
        if isinstance(self.vectors, Tensor):
            return unit(self.vectors[numbers.to(self.vectors.device)], like)
        return unit(self.vectors[numbers.cpu().numpy()], like)


def unit(vectors: Any, like: Tensor) -> Tensor:
    """(n, d) the first d components of vectors (n, D), scaled to length one; zero stays zero."""
    if not isinstance(vectors, Tensor):
        with warnings.catch_warnings():
            # A read-only map; nothing writes to it, and numpy converts halves thirty times slower.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            vectors = torch.from_numpy(np.asarray(vectors))
    block = vectors[:, : like.shape[1]].to(like)
    return torch.nn.functional.normalize(block, dim=1)


def exp_difference(scores: Tensor, peak: Tensor) -> Tensor:
    """exp(scores − peak), 0 where both are -inf."""
    return (scores - peak.nan_to_num(neginf=0.0)).exp_()
