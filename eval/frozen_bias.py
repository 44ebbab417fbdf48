"""FrozenCorpus above `max_exact`: bias of the mean gradient of the sum over nearest and sampled
documents.

    python eval/frozen_bias.py                                        # 100,000 clustered unit
    vectors python eval/frozen_bias.py --documents emb/corpus --queries emb/queries --nearest 16
    --sampled 512

Gradients of the loss in the queries, in batches of B, against those of the exact sum. Each query's
positive is its nearest document, as for an encoder that works. Bias is freed of the noise of the
draws; step error is that of one step; both are relative to the length of the exact gradient.
"nearest alone" sums over the searched documents only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from gradient_bias import bias_of
from jsonargparse import auto_cli
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.data.store.vector_shards import Embeddings
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import FrozenCorpus

STRETCHES = 8


def clustered(
    rows: int, num_queries: int, dimension: int = 64, of_a_cluster: int = 20
) -> tuple[Tensor, Tensor]:
    """(N, D) documents in clusters and (Q, D) queries near some of them, unit vectors."""
    draw = torch.Generator().manual_seed(0)

    def near(vectors: Tensor, distance: float) -> Tensor:
        noise = torch.randn(vectors.shape, generator=draw) / dimension**0.5
        return normalize(vectors + distance * noise, dim=1)

    centres = normalize(torch.randn(rows // of_a_cluster, dimension, generator=draw), dim=1)
    documents = near(centres.repeat_interleave(of_a_cluster, 0), 0.7)
    documents = documents[torch.randperm(len(documents), generator=draw)]
    return documents, near(documents[:num_queries], 0.7)


def read(folder: Path, limit: int | None = None) -> Tensor:
    """(N, D) unit vectors of an embeddings folder."""
    vectors = np.asarray(Embeddings.open(folder).vectors[:limit], dtype=np.float32)
    return normalize(torch.from_numpy(vectors), dim=1)


def gradient(criterion: FrozenCorpus, batches: list[Any]) -> Tensor:
    """(Q, D) gradients of the queries of all batches, each of its own batch's loss."""
    return torch.cat(
        [torch.autograd.grad(criterion(**batch).loss, batch["left"])[0] for batch in batches]
    )


def main(
    rows: int = 100_000,
    num_queries: int = 256,
    batch_size: int = 32,
    nearest: int = 256,
    sampled: int = 8192,
    repeats: int = 4,
    documents: Path | None = None,
    queries: Path | None = None,
) -> None:
    """Print a row per temperature.

    Args:
        rows, num_queries, batch_size: N of the clustered vectors, queries, and B.
        nearest, sampled: see FrozenCorpus.
        repeats: draws that are averaged in each of eight independent means.
        documents, queries: embeddings folders of real vectors instead.
    """
    if documents is not None and queries is not None:
        vectors, anchors = read(documents), read(queries, num_queries)
    else:
        vectors, anchors = clustered(rows, num_queries)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors.numpy())
    positives = torch.from_numpy(index.search(anchors.numpy(), 1)[1][:, 0])
    batches = []
    for ids in torch.arange(len(anchors)).split(batch_size):
        right_id = positives[ids]
        left = anchors[ids].clone().requires_grad_()
        batches.append(
            {"left": left, "right": vectors[right_id], "left_id": ids, "right_id": right_id}
        )
    estimate = {
        "max_exact": 1,
        "nearest": nearest,
        "search": lambda queries, k: index.search(queries, k)[1],
    }
    lines = []
    for temperature in (0.02, 0.05, 0.1):
        exact = gradient(FrozenCorpus(vectors, temperature=temperature), batches)
        criterion = FrozenCorpus(vectors, temperature=temperature, sampled=sampled, **estimate)
        means, errors = [], []
        for _ in range(STRETCHES):
            draws = [gradient(criterion, batches) for _ in range(repeats)]
            means.append(torch.stack(draws).mean(dim=0))
            errors += [float((found - exact).norm() / exact.norm()) for found in draws]
        bias = bias_of(torch.stack(means), exact)
        alone = gradient(NearestAlone(vectors, temperature=temperature, **estimate), batches)
        lines.append(
            {
                "τ": temperature,
                "bias": bias.value,
                "±": bias.error,
                "step error": float(np.mean(errors)),
                "bias, nearest alone": float((alone - exact).norm() / exact.norm()),
            }
        )
    title = f"N = {len(vectors):,}, B = {batch_size}, nearest = {nearest}, sampled = {sampled}"
    print_table(Table(title, lines))


class NearestAlone(FrozenCorpus):
    """The sum over the searched documents, without the others."""

    def _sample(self, anchors: Any) -> tuple[Tensor, Tensor]:
        rows, log_weights = super()._sample(anchors)
        return rows[log_weights == 0], log_weights[log_weights == 0]


if __name__ == "__main__":
    auto_cli(main)
