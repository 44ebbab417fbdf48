"""Encode one query with a tower, as a vector to search with; the towers that encode queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dualenc.encoders.dual import ZERO_VECTOR, DualEncoder, Tower, check_item, unit_norm
from dualenc.errors import DualencError
from dualenc.io.decoding import rgb_item
from dualenc.types import Modality, Side, opposite


@torch.inference_mode()
def query_vector(
    item: Any,
    tower: Tower,
    dim: int,
    *,
    is_features: bool = False,
    may_be_zero: bool = False,
) -> np.ndarray:
    """Encode a query as a vector (D,), truncated to the dimension of an index.

        index.search(query_vector("how do I resume?", encoder.left, index.dim))

    Args:
        item: a string, a PIL image, or a vector, as the tower takes it.
        tower: side of the model that encodes queries.
        dim: D of the index.
        is_features: return the features that probes use, rather than the embedding.
        may_be_zero: return a zero vector instead of raising.

    Raises:
        DualencError: the vector of the query is not finite, or zero.
    """
    forward = tower.features if is_features else tower
    tensors = tower.state_dict().values()
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    check_item(item, tower.modality)
    # An image may be a palette or have an alpha channel, as those of an upload often do.
    inputs = tower.prepare([rgb_item(item, "the query")])
    encoded = forward({name: tensor.to(device) for name, tensor in inputs.items()}).float()
    # A Matryoshka index has only the first components, renormalized.
    if dim < encoded.shape[1]:
        encoded = unit_norm(encoded[:, :dim])
    vector = encoded.cpu().numpy()[0]
    if not np.isfinite(vector).all():
        raise DualencError("the model gives vectors that are not finite", fix="check its weights")
    if not vector.any() and not may_be_zero:
        raise DualencError(
            f"the query has a zero vector: {ZERO_VECTOR[tower.modality]}",
            fix="search for something else",
        )
    return vector


def query_towers(encoder: DualEncoder, side: Side) -> dict[Modality, Tower]:
    """Return the towers of a model that encode queries, by modality.

    Image-text models encode each modality with its own tower. In query-document models queries take
    the side opposite to the documents.

        tower = query_towers(encoder, "left")["text"]

    Args:
        encoder: the model.
        side: side that encodes the documents.
    """
    # If both towers take images, the later entry wins: the left tower.
    sides: tuple[Side, ...] = ("right", "left")
    if encoder.kind in ("query-document", "vector"):
        sides = (opposite(side),)
    return {tower.modality: tower for tower in map(encoder.tower, sides)}


def modality_of(item: Any) -> Modality:
    """Return the modality of a query: a string, a vector (D,), or otherwise an image.

    Args:
        item: the query.
    """
    if isinstance(item, str):
        return "text"
    return "vector" if isinstance(item, np.ndarray) else "image"
