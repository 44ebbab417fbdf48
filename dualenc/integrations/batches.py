"""Batch selection in sentence-transformers: batches that a selector chooses by the model's present embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import SequentialSampler

from dualenc import distributed
from dualenc.batching import BatchSelector, SpectralBatches


class SelectedBatchSampler(DefaultBatchSampler):
    """Batch sampler of sentence-transformers that a `BatchSelector` fills; see `selected_batches`.

    All pairs are embedded before each epoch but the first, and when a run resumes: for exact resumption save at the end
    of an epoch.
    """

    def __init__(self, dataset: Dataset, model: SentenceTransformer, selector: BatchSelector) -> None:
        per_process = selector.batch_size // distributed.world_size()
        super().__init__(SequentialSampler(dataset), batch_size=per_process, drop_last=True)
        self.dataset = dataset
        self.model = model
        self.selector = selector

    def __len__(self) -> int:
        return self.selector.num_batches * distributed.world_size()

    def __iter__(self) -> Iterator[list[int]]:
        left = None
        right = None
        if self.epoch and self.selector.needs_embeddings:
            left = self._embed(self.dataset.column_names[0])
            right = self._embed(self.dataset.column_names[1])
        for batch in self.selector.select(self.epoch, left, right):
            # The data loader deals them out to the processes in turn.
            for part in np.split(batch, distributed.world_size()):
                yield part.tolist()

    def _embed(self, column: str) -> np.ndarray:
        """(N, D) unit vectors of a column; each process encodes its share."""
        texts = self.dataset[column]
        share = distributed.rank_slice(len(texts))
        was_training = self.model.training
        part = self.model.encode(
            list(texts[share]),
            batch_size=64,
            normalize_embeddings=True,
            show_progress_bar=distributed.is_main(),
        )
        self.model.train(was_training)
        return np.concatenate([vectors for vectors in distributed.gather_objects(part) if len(vectors)])


def selected_batches(
    model: SentenceTransformer, kind: type[BatchSelector] = SpectralBatches, **options: Any
) -> Callable[..., SelectedBatchSampler]:
    """`batch_sampler` of `SentenceTransformerTrainingArguments`: batches chosen by the embeddings of the trained model.

    `kind` says how, such as `SpectralBatches` or `OSGD`; `options` are its own.
    """

    def build(dataset: Dataset, batch_size: int, seed: int = 0, **unused: Any) -> SelectedBatchSampler:
        selector = kind(len(dataset), batch_size * distributed.world_size(), seed=seed, **options)
        return SelectedBatchSampler(dataset, model, selector)

    return build
