"""Objectives in sentence-transformers: a loss for its trainer, and ids for its data sets.

dataset, texts = with_ids(dataset)  # columns: anchor, positive and, optionally, negatives
objective = GlobalCache(num_left=texts.num_left, num_right=texts.num_right, temperature=0.05)
loss = GlobalLoss(model, objective, texts)
GlobalLossTrainer(model, args, train_dataset=dataset, loss=loss).train()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.integrations.ids import PairTexts, with_ids
from dualenc.integrations.transformers import ObjectiveStateMixin, refuse_momentum
from dualenc.objectives import InfoNCE, Objective
from dualenc.types import Side

__all__ = ["GlobalLoss", "GlobalLossTrainer", "PairTexts", "with_ids"]

Features = dict[str, Any]
"""Tokenized texts of one column, from the data collator."""


class GlobalLoss(nn.Module):
    """A dualenc objective as a sentence-transformers loss.

    The labels must be the ids that `with_ids` adds. In evaluation mode the value is in-batch
    InfoNCE with the same temperature.

    For Matryoshka training, wrap the objective and not the loss:
    `GlobalLoss(model, Matryoshka(objective, dims), texts)`. Each length needs a separate memory, so
    `MatryoshkaLoss` and `AdaptiveLayerLoss` are refused around an objective with memory.

    Example:
        dataset, texts = with_ids(dataset)
        objective = SogCLR(num_left=texts.num_left, num_right=texts.num_right)
        loss = GlobalLoss(model, objective, texts)
        GlobalLossTrainer(model, args, train_dataset=dataset, loss=loss).train()

    Args:
        model: the encoder; its embeddings are scaled to unit length.
        objective: an objective for two towers, such as `SogCLR(num_left=…, num_right=…)`.
        texts: the texts that `with_ids` returned. They keep a text's known positives out of its
            negatives. Required by objectives that encode texts outside the batch (ISIR, EMC2,
            GlobalCache, …).
        prompts: the prompts that `args.prompts` adds to anchors and to all other texts.

    Raises:
        DualencError: the objective needs texts, or was made for other texts.
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
                f"{objective.name} encodes texts outside the batch",
                fix="pass the texts that with_ids returned",
            )
        if texts is not None and objective.num_left is not None:
            if (objective.num_left, objective.num_right) != (texts.num_left, texts.num_right):
                raise DualencError(
                    f"{objective.name} was made for other texts",
                    fix=f"give num_left={texts.num_left}, num_right={texts.num_right}",
                )
            left_counts, right_counts = texts.counts
            objective.set_counts(torch.from_numpy(left_counts), torch.from_numpy(right_counts))
        self.model = model
        self.objective = objective
        self.texts = texts
        self.prompts: dict[Side, str | None] = {"left": prompts[0], "right": prompts[1]}

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None) -> Tensor:
        """Return the loss of a batch.

        Args:
            sentence_features: tokenized anchors, positives and any negatives, one entry per column.
            labels: (b, number of columns) ids of the texts. In evaluation mode they may be None;
                all texts then count as distinct.
        """
        self._refuse_decorators()
        unit_vectors = []
        columns = list(sentence_features)
        # With a `Router`, texts outside the batch must take the route of their column.
        self._tasks: dict[Side, str | None] = {
            "left": columns[0].get("task"),
            "right": columns[1].get("task"),
        }
        for features in columns:
            embeddings = self.model(features)["sentence_embedding"]
            unit_vectors.append(normalize(embeddings.float(), dim=-1))
        left, right, *negatives = unit_vectors
        self._dim = left.shape[-1]
        if labels is None and not self.model.training:
            numbers = torch.arange(len(left) * len(unit_vectors), device=left.device)
            labels = numbers.view(len(unit_vectors), len(left)).T
        if labels is None or labels.shape != (len(left), len(unit_vectors)):
            raise DualencError(
                "labels are not the ids of the texts",
                fix="train on the data set that with_ids returned",
            )
        left_id, right_id, *negative_ids = labels.T.contiguous()
        # An evaluation must neither read nor change the memory of the objective.
        if not (self.model.training and torch.is_grad_enabled()):
            in_batch = InfoNCE(temperature=self.objective.temperature.item())
            return in_batch.eval()(left, right, left_id, right_id).loss
        self.objective.train()
        others: dict[str, Tensor] = {}
        if self.texts is not None:
            others["left_positives"] = self.texts.not_negatives("left", left_id)
            others["right_positives"] = self.texts.not_negatives("right", right_id)
        if negatives:
            if not self.objective.takes_mined:
                raise DualencError(
                    f"{self.objective.name} takes no mined negatives",
                    fix="remove their columns",
                )
            others |= _distinct_negatives(negatives, torch.stack(negative_ids))
        encode = self.encode if self.objective.needs_encode else None
        return self.objective(left, right, left_id, right_id, encode, **others).loss

    def _refuse_decorators(self) -> None:
        """Refuse decorators that would write several lengths or layers into one memory."""
        if not (self.objective.needs_num_left and self.training and torch.is_grad_enabled()):
            return
        for module in (self.model, getattr(self.model, "module", self.model)):
            # MatryoshkaLoss and AdaptiveLayerLoss replace the method `forward` by an object.
            if type(vars(module).get("forward")).__name__ == "ForwardDecorator":
                raise DualencError(
                    f"{self.objective.name} keeps one memory, and MatryoshkaLoss or "
                    "AdaptiveLayerLoss would write several lengths or layers into it",
                    fix="take GlobalLoss(model, Matryoshka(objective, dims=[…]), texts), or an "
                    "objective without memory, such as InfoNCE",
                )

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """Encode texts outside the batch by their ids (n,), to unit vectors (n, D)."""
        device = self.objective.log_temperature.device
        if not len(ids):
            return torch.zeros(0, self._dim, device=device)
        assert self.texts is not None
        # Bypass DistributedDataParallel: its calls may be collective, and the processes encode
        # different numbers of texts.
        module: SentenceTransformer = getattr(self.model, "module", self.model)
        texts = self.texts(side, ids)
        features = module.preprocess(texts, prompt=self.prompts[side], task=self._tasks[side])
        embeddings = module(batch_to_device(features, device))["sentence_embedding"]
        return normalize(embeddings.float(), dim=-1)


def _distinct_negatives(negatives: list[Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Return mined negatives and their ids, without repetitions within a row.

    Args:
        negatives: embeddings (b, D) of each column.
        ids: (columns, b) ids of the negatives.
    """
    # A text listed twice for an anchor would count twice in its partition function.
    is_first = torch.ones_like(ids, dtype=torch.bool)
    for column in range(1, len(ids)):
        is_first[column] = (ids[:column] != ids[column]).all(dim=0)
    mask = is_first.flatten()
    return {"negatives": torch.cat(negatives)[mask], "negative_id": ids.flatten()[mask]}


class GlobalLossTrainer(ObjectiveStateMixin, SentenceTransformerTrainer):  # type: ignore[misc]
    """A `SentenceTransformerTrainer` that saves and resumes the state of `GlobalLoss`.

    It also trains a learnable temperature; see `ObjectiveStateMixin`.

    Example:
        loss = GlobalLoss(model, objective, texts)
        trainer = GlobalLossTrainer(model, args, train_dataset=dataset, loss=loss)
        trainer.train(resume_from_checkpoint=True)

    The arguments are those of `SentenceTransformerTrainer`.

    Raises:
        DualencError: the data set's ids are not those of the loss, or prompts are missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss: Any = self.loss
        texts = getattr(loss, "texts", None)
        # Any other loss needs no ids.
        if texts is None:
            return
        has_prompts = any(loss.prompts.values())
        if loss.objective.needs_encode and self.args.prompts and not has_prompts:
            raise DualencError(
                "args.prompts apply to the texts of a batch only",
                fix="pass the prompts of anchors and of other texts to GlobalLoss(prompts=…), too",
            )
        datasets = self.train_dataset
        if not isinstance(datasets, dict):
            datasets = {"": datasets}
        for dataset in datasets.values():
            # Streamed data sets can be read only once, so their ids are not checked.
            if isinstance(dataset, Dataset) and not texts.are_named_by(dataset):
                raise DualencError(
                    "the training data have other ids than the texts of the loss",
                    fix="concatenate data sets, call with_ids once, and train on the result",
                )
