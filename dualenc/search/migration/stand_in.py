"""Search the vectors of a model that is gone: queries of another one are mapped to its space."""

from __future__ import annotations

from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.mapped_tower import MappedTower
from dualenc.search.migration.maps import LinearMap


def stand_in(encoder: DualEncoder, to_old: LinearMap) -> DualEncoder:
    """Return a model whose queries search the vectors of another one, which is gone.

        old_queries = stand_in(new_model, fit(new_vectors, old_vectors)).left

    Args:
        encoder: the new model, whose weights the result shares.
        to_old: map from its vectors (n, D) to those of the index (n, E).
    """
    mapping = to_old.tower().to(next(encoder.parameters()).device)
    left, right = (MappedTower(tower, mapping) for tower in (encoder.left, encoder.right))
    return DualEncoder(left, right, kind=encoder.kind)
