"""The linear probe trained by SGD, as papers on image representations report it (saclr.txt A.1.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from dualenc.errors import DualencError
from dualenc.evaluation.knn import Features, Labels, check_labels

Batches = Iterable[tuple[Tensor, Tensor]]


def sgd_probe(
    batches: Callable[[int], Batches],
    num_features: int,
    num_classes: int,
    *,
    steps_per_epoch: int,
    epochs: int = 100,
    learning_rate: float = 0.3,
    momentum: float = 0.9,
    weight_decay: float = 1e-6,
    device: str | torch.device = "cpu",
) -> nn.Linear:
    """Train a linear classifier by SGD with momentum; the learning rate falls along a cosine to zero.

    The defaults are those of saclr.txt A.1.4 (after Caron et al. 2020 and Zbontar et al. 2021).

    Args:
        batches: `batches(epoch)` gives that epoch's (features (B, D), labels (B,)): of freshly augmented images
            through the frozen encoder, or `feature_batches` of features computed once.
        num_features: D.
        num_classes: C.
        steps_per_epoch: Number of batches in an epoch.
        epochs: Passes over the training images.
        learning_rate: At the start.
        momentum: Of SGD.
        weight_decay: Of SGD.
        device: Where the classifier is trained.

    Returns:
        The classifier, on `device`.

    Raises:
        DualencError: nothing to train on, or the loss is not finite.
    """
    if epochs < 1 or steps_per_epoch < 1:
        raise DualencError(f"epochs={epochs}, {steps_per_epoch} batches in each: nothing to train on")
    classifier = _initial(num_features, num_classes).to(device)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
    total, step = epochs * steps_per_epoch, 0
    for epoch in range(epochs):
        for features, labels in batches(epoch):
            optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * step / total)) / 2
            loss = nn.functional.cross_entropy(classifier(features.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if not torch.isfinite(loss):
            raise DualencError(
                f"the SGD probe's loss is {loss.item()} in epoch {epoch}; choose a smaller learning_rate"
            )
    return classifier


def feature_batches(
    features: Features, labels: Labels, *, batch_size: int = 256, seed: int = 0
) -> Callable[[int], Batches]:
    """Shuffled batches of features computed once, for `sgd_probe`: the protocol without augmentation.

    Args:
        features: (N, D).
        labels: (N,) class numbers from 0.
        batch_size: B; the last batch of an epoch may be smaller.
        seed: Of the order, which differs between epochs.
    """
    rows = torch.from_numpy(np.array(features, dtype=np.float32))  # a copy: stored features are read-only
    classes = torch.from_numpy(check_labels(features, labels, "train"))

    def batches(epoch: int) -> Batches:
        order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(len(rows)))
        for chosen in order.split(batch_size):
            yield rows[chosen], classes[chosen]

    return batches


@torch.no_grad()
def predict(classifier: nn.Linear, features: Features) -> np.ndarray:
    """Class of each row of (A, D) features."""
    rows = torch.from_numpy(np.array(features, dtype=np.float32))  # a copy: stored features are read-only
    return classifier(rows.to(classifier.weight.device)).argmax(dim=1).cpu().numpy()


def _initial(num_features: int, num_classes: int) -> nn.Linear:
    """Small weights from a generator of its own: the same on every device, and nobody else's draws change."""
    classifier = nn.utils.skip_init(nn.Linear, num_features, num_classes)
    nn.init.normal_(classifier.weight, std=0.01, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(classifier.bias)
    return classifier
