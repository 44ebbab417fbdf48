"""Search the vectors of a model that is gone: queries of another one are mapped to its space."""

from __future__ import annotations

from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.encoders.mapped_tower import MappedTower
from dualenc.encoders.vector import VectorTower
from dualenc.io.provenance import Provenance
from dualenc.search.migration.maps import LinearMap


def stand_in(encoder: DualEncoder, to_old: LinearMap, documents: Provenance) -> IndexEncoder:
    """Return a model whose queries, mapped, search the vectors of an index in place of its own.

        old_queries = stand_in(new_model, fit(new_vectors, old_vectors), index.provenance)

    Args:
        encoder: another model, whose weights the result shares.
        to_old: map from its vectors (n, D) to those of the index (n, E).
        documents: record of the index.
    """
    mapping = to_old.tower().to(next(encoder.parameters()).device)
    nothing = VectorTower("identity", mapping.dim, mapping.dim, None)
    queries = DualEncoder(MappedTower(encoder.left, mapping), nothing, kind="query-document")
    return IndexEncoder(queries, documents)
