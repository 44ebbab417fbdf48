"""Objectives in sentence-transformers: a loss for `SentenceTransformerTrainer`, and ids for its data sets.

dataset, texts = with_ids(dataset)  # columns: anchor, positive, and negatives if there are any
objective = GlobalCache(num_left=texts.num_left, num_right=texts.num_right, temperature=0.05)
loss = GlobalLoss(model, objective, texts)
GlobalLossTrainer(model, args, train_dataset=dataset, loss=loss).train()
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.integrations.ids import PairTexts, with_ids
from dualenc.integrations.transformers import ObjectiveStateMixin, refuse_momentum
from dualenc.objectives import InfoNCE, Objective
from dualenc.objectives.items import Encode
from dualenc.types import Side

__all__ = ["CachedGlobalLoss", "GlobalLoss", "GlobalLossTrainer", "PairTexts", "with_ids"]

Features = dict[str, Any]
"""Tokenized texts of one column, as the data collator gives them."""
Outside = list[tuple[Features, RandContext, Tensor]]
"""Mini-batches outside the batch: inputs, the random state before their first pass, and (n, D) embeddings as leaves."""


class GlobalLoss(nn.Module):
    """An objective as a loss of sentence-transformers.

    The labels are ids, see `with_ids`. In evaluation the value is InfoNCE's over the batch, with the same τ.

    Args:
        model: the encoder; its embeddings are scaled to length one.
        objective: of two towers, such as `SogCLR(num_left=…, num_right=…)`.
        texts: of `with_ids`; needed by objectives that encode texts outside the batch (ISIR, EMC2, GlobalCache, …).
        prompts: put by `args.prompts` before the anchors and before the other texts, if any.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        objective: Objective,
        texts: PairTexts | None = None,
        prompts: tuple[str | None, str | None] = (None, None),
    ) -> None:
        super().__init__()
        refuse_momentum(objective)
        if objective.needs_encode and texts is None:
            raise DualencError(
                f"{objective.name} encodes texts outside the batch; pass the texts of with_ids"
            )
        if texts is not None and objective.num_left is not None:
            if (objective.num_left, objective.num_right) != (texts.num_left, texts.num_right):
                expected = f"num_left={texts.num_left}, num_right={texts.num_right}"
                raise DualencError(f"{objective.name} is of other texts; give {expected}")
            left_counts, right_counts = texts.counts
            objective.set_counts(torch.from_numpy(left_counts), torch.from_numpy(right_counts))
        self.model = model
        self.objective = objective
        self.texts = texts
        self.prompts: dict[Side, str | None] = {"left": prompts[0], "right": prompts[1]}

    def forward(self, sentence_features: Iterable[Features], labels: Tensor) -> Tensor:
        """The loss of tokenized anchors, positives and negatives with ids (b, 2 + number of negative columns)."""
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.loss(embeddings, labels, self.encode)

    def loss(self, embeddings: Sequence[Tensor], labels: Tensor, encode: Encode) -> Tensor:
        """The loss of embeddings (b, D) of each column."""
        unit_vectors = [normalize(embedding.float(), dim=-1) for embedding in embeddings]
        left, right, *negatives = unit_vectors
        self._dim = left.shape[-1]
        if labels is None or labels.shape != (len(left), len(embeddings)):
            raise DualencError(
                "labels are not the ids of the columns' texts; train on what with_ids returns"
            )
        left_id, right_id, *negative_ids = labels.T.contiguous()
        if not (self.model.training and torch.is_grad_enabled()):
            in_batch = InfoNCE(temperature=self.objective.temperature.item())
            return in_batch.eval()(left, right, left_id, right_id).loss
        self.objective.train()
        mined: dict[str, Tensor] = {}
        if negatives:
            if not self.objective.takes_mined:
                raise DualencError(f"{self.objective.name} takes no mined negatives; remove their columns")
            mined = _distinct_negatives(negatives, torch.stack(negative_ids))
        own_encode = encode if self.objective.needs_encode else None
        return self.objective(left, right, left_id, right_id, own_encode, **mined).loss

    def tokenize(self, side: Side, ids: Tensor) -> Features:
        """The model's inputs for texts outside the batch."""
        assert self.texts is not None
        texts = self.texts(side, ids)
        features = self._module().preprocess(texts, prompt=self.prompts[side])
        return batch_to_device(features, self.objective.log_temperature.device)

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) unit vectors of texts outside the batch."""
        if not len(ids):
            return self.objective.log_temperature.new_zeros(0, self._dim)
        return self._embed(self.tokenize(side, ids))

    def _embed(self, features: Features) -> Tensor:
        """(n, D) unit vectors of tokenized texts outside the batch."""
        # A copy, as modules may change their input.
        outputs = self._module()(dict(features))
        return normalize(outputs["sentence_embedding"].float(), dim=-1)

    def _module(self) -> SentenceTransformer:
        # Processes encode different numbers of texts, and each call of DistributedDataParallel may be collective.
        return getattr(self.model, "module", self.model)


def _distinct_negatives(negatives: list[Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Mined negatives and their ids (columns, b), those that a row repeats once."""
    is_first = torch.ones_like(ids, dtype=torch.bool)
    for column in range(1, len(ids)):
        is_first[column] = (ids[:column] != ids[column]).all(dim=0)
    mask = is_first.flatten()
    return {"negatives": torch.cat(negatives)[mask], "negative_id": ids.flatten()[mask]}


class CachedGlobalLoss(CachedLossMixin, GlobalLoss):
    """`GlobalLoss` with gradient caching (Gao et al. 2021, arXiv:2101.06983), `mini_batch_size` texts at a time."""

    def __init__(
        self, *args: Any, mini_batch_size: int = 32, show_progress_bar: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.mini_batch_size = mini_batch_size
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[Features], labels: Tensor) -> Tensor:
        self._outside: Outside = []
        self._own: list[tuple[nn.Parameter, Tensor]] = []
        loss = self.forward_cached(sentence_features, labels)
        if loss.requires_grad:
            # In front of the mixin's own hook, whose last backward pass averages all gradients over processes.
            loss = loss.clone()
            loss.register_hook(partial(self._backward, self._outside, self._own))
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        assert labels is not None
        embeddings = [torch.cat(parts) for parts in reps]
        loss = self.loss(embeddings, labels, self._encode_without_graph)
        if not with_backward:
            return loss
        own = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        loss.backward()
        # Kept until the trainer's backward pass says by how much they are scaled.
        self._own = [(parameter, parameter.grad) for parameter in own if parameter.grad is not None]
        for parameter, gradient in zip(own, before, strict=True):
            parameter.grad = gradient
        return loss.detach()

    def _encode_without_graph(self, side: Side, ids: Tensor) -> Tensor:
        """As `encode`, but in mini-batches, to which `_backward` takes the gradients."""
        parts = [self.encode(side, ids[:0])]
        for start in range(0, len(ids), self.mini_batch_size):
            chunk_ids = ids[start : start + self.mini_batch_size]
            features = self.tokenize(side, chunk_ids)
            random_state = RandContext(*features.values())
            with torch.no_grad():
                embeddings = self._embed(features)
            if torch.is_grad_enabled():
                embeddings.requires_grad_()
                self._outside.append((features, random_state, embeddings))
            parts.append(embeddings)
        return torch.cat(parts)

    def _backward(
        self, outside: Outside, own: list[tuple[nn.Parameter, Tensor]], grad_output: Tensor
    ) -> None:
        """Add the gradients of the objective's parameters, and of the model by the texts outside the batch."""
        for parameter, gradient in own:
            scaled = gradient * grad_output
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        for features, random_state, cached in outside:
            if cached.grad is not None:
                with torch.enable_grad(), random_state:
                    embeddings = self._embed(features)
                    torch.autograd.backward(embeddings, cached.grad * grad_output)


class GlobalLossTrainer(ObjectiveStateMixin, SentenceTransformerTrainer):  # type: ignore[misc]
    """`SentenceTransformerTrainer` that saves and resumes the state of `GlobalLoss`, see `ObjectiveStateMixin`."""
