"""Objectives in sentence-transformers: a loss for `SentenceTransformerTrainer`, and ids for its
data sets.

dataset, texts = with_ids(dataset)  # columns: anchor, positive, and negatives if there are any
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
"""Tokenized texts of one column, as the data collator gives them."""


class GlobalLoss(nn.Module):
    """An objective as a loss of sentence-transformers.

    Several lengths are an objective, `GlobalLoss(model, Matryoshka(objective, dims), texts)`, as
    each needs a memory of its own. `MatryoshkaLoss` and `AdaptiveLayerLoss` around it are refused
    where the objective has one.

    The labels are ids, see `with_ids`. In evaluation the value is InfoNCE's over the batch, with
    the same τ.

    Args:
        model: the encoder; its embeddings are scaled to length one.
        objective: of two towers, such as `SogCLR(num_left=…, num_right=…)`.
        texts: of `with_ids`, by which no positive of a text is its negative; needed by objectives
            that encode texts outside the batch (ISIR, EMC2, GlobalCache, …).
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
                f"{objective.name} encodes more than the batch; pass the texts of with_ids"
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

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None) -> Tensor:
        """The loss of tokenized anchors, positives and negatives with ids (b, 2 + number of
        negative columns).

        In evaluation texts without ids are taken for different ones.
        """
        self._refuse_decorators()
        unit_vectors = []
        columns = list(sentence_features)
        # The route of a `Router` that each column takes, which texts outside the batch then take.
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
                "labels are not the ids of the texts; train on what with_ids returns"
            )
        left_id, right_id, *negative_ids = labels.T.contiguous()
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
                    f"{self.objective.name} takes no mined negatives; remove their columns"
                )
            others |= _distinct_negatives(negatives, torch.stack(negative_ids))
        encode = self.encode if self.objective.needs_encode else None
        return self.objective(left, right, left_id, right_id, encode, **others).loss

    def _refuse_decorators(self) -> None:
        """Refuse calls for several lengths or layers of one batch, with one memory for all."""
        if not (self.objective.needs_num_left and self.training and torch.is_grad_enabled()):
            return
        for module in (self.model, getattr(self.model, "module", self.model)):
            # MatryoshkaLoss and AdaptiveLayerLoss put an object in place of the method.
            if type(vars(module).get("forward")).__name__ == "ForwardDecorator":
                raise DualencError(
                    f"{self.objective.name} keeps one memory, and MatryoshkaLoss or "
                    "AdaptiveLayerLoss would write several lengths or layers into it; take "
                    "GlobalLoss(model, Matryoshka(objective, dims=[…]), texts), or an objective of "
                    "the batch alone, such as InfoNCE"
                )

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) unit vectors of texts outside the batch."""
        device = self.objective.log_temperature.device
        if not len(ids):
            return torch.zeros(0, self._dim, device=device)
        assert self.texts is not None
        # Processes encode different numbers of texts, and each call of DistributedDataParallel may
        # be collective.
        module: SentenceTransformer = getattr(self.model, "module", self.model)
        texts = self.texts(side, ids)
        features = module.preprocess(texts, prompt=self.prompts[side], task=self._tasks[side])
        embeddings = module(batch_to_device(features, device))["sentence_embedding"]
        return normalize(embeddings.float(), dim=-1)


def _distinct_negatives(negatives: list[Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Mined negatives and their ids (columns, b), those that a row repeats once."""
    is_first = torch.ones_like(ids, dtype=torch.bool)
    for column in range(1, len(ids)):
        is_first[column] = (ids[:column] != ids[column]).all(dim=0)
    mask = is_first.flatten()
    return {"negatives": torch.cat(negatives)[mask], "negative_id": ids.flatten()[mask]}


class GlobalLossTrainer(ObjectiveStateMixin, SentenceTransformerTrainer):  # type: ignore[misc]
    """`SentenceTransformerTrainer` that saves and resumes the state of `GlobalLoss`, see
    `ObjectiveStateMixin`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss: Any = self.loss
        texts = getattr(loss, "texts", None)
        if (
            texts is not None
            and loss.objective.needs_encode
            and self.args.prompts
            and not any(loss.prompts.values())
        ):
            problem = "args.prompts are put before the texts of a batch alone"
            raise DualencError(
                f"{problem}; give those of anchors and of other texts as GlobalLoss(prompts=…), too"
            )
        datasets = (
            self.train_dataset if isinstance(self.train_dataset, dict) else {"": self.train_dataset}
        )
        for dataset in datasets.values():
            if texts is None or not isinstance(dataset, Dataset):
                continue
            if not texts.are_named_by(dataset):
                problem = "the training data have other ids than the texts of the loss"
                raise DualencError(
                    f"{problem}; concatenate data sets, call with_ids once, and train on what it returns"
                )
