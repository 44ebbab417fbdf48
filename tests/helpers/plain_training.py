"""Plain gradient descent with an objective, on any device."""

from __future__ import annotations

import torch

from tests.helpers.every import Setting, Towers, batch, momentum_keys


def train_plainly(setting: Setting, device: torch.device | str) -> list[float]:
    """The losses of some steps of plain gradient descent."""
    towers, criterion = Towers(setting.views).to(device), setting.build().to(device)
    if setting.views:
        towers.right = towers.left  # moving has made two of one
    towers.left_features, towers.right_features = (
        towers.left_features.to(device),
        towers.right_features.to(device),
    )
    parameters = [*towers.parameters(), *criterion.parameters()]
    losses = []
    for step in range(3):
        given = {name: ids.to(device) for name, ids in batch(step, setting.views).items()}
        if not criterion.takes_mined:
            given.pop("negative_id", None)
        for side in ("left", "right"):
            given[side] = towers.encode(side, given[f"{side}_id"])
        if "negative_id" in given:
            given["negatives"] = towers.encode("right", given["negative_id"])
        out = criterion(
            **given, **momentum_keys(criterion, given["left"], given["right"]), encode=towers.encode
        )
        out.loss.backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
        assert (
            {value.device for value in out.metrics.values()}
            == {out.loss.device}
            == {torch.device(device)}
        )
        losses.append(float(out.loss.detach().to("cpu")))
    return losses
