"""Searcher: an index, or a pushed collection, together with the model that encodes queries."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualenc.encoders.dual import DualEncoder, Tower
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.io.files import consistent_read
from dualenc.io.provenance import Provenance
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.factory import open_engine
from dualenc.search.engines.pushed_folder import is_pushed, refuse_url
from dualenc.search.fusion import FUSION_DEPTH, Fusion, fuse
from dualenc.search.index.open import Hit, Index
from dualenc.search.lexical import FOLDER as BM25_FOLDER
from dualenc.search.lexical import Lexical, has_lexical
from dualenc.search.migration.candidates import NUM_CANDIDATES, CandidateSearch
from dualenc.search.migration.migration_folder import candidates_plan
from dualenc.search.query_vectors import modality_of, query_towers, query_vector
from dualenc.search.where import Condition, parse_conditions
from dualenc.types import Modality, Side

logger = logging.getLogger("dualenc.search")


@dataclass(eq=False)
class Searcher:
    """An open index with its model: texts, images or vectors in, results out.

    Create one with `Searcher.open`, and use it from one thread at a time. If the embeddings of a
    pushed collection are replaced meanwhile, searches raise a `DualencError`; open it again.

        for hit in Searcher.open("index").search("how do I resume?", k=5):
            print(hit.score, hit.snippet)

    Attributes:
        index: FAISS index or engine.
        encoder: model that encodes queries.
        lexical: BM25 index over the same items, for hybrid search.
        settings: `nprobe` and `ef_search` for every search.
        candidates: search with the model that replaces the encoder, while a migration runs that
            answers by candidates.
    """

    index: Index | Engine
    encoder: DualEncoder
    lexical: Lexical | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    candidates: CandidateSearch | None = None

    @property
    def side(self) -> Side:
        """Side of the model that encoded the indexed items."""
        return self.index.provenance.side or "right"

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: str | None = None,
        *,
        device: str | torch.device = "cpu",
        hybrid: bool | None = None,
        **settings: Any,
    ) -> Searcher:
        """Open an index, or the collection that a folder records, and the model that made it.

        While `dualenc migrate` changes the model of an index and has found that candidates serve
        best, the new model ranks the candidates of the old one, or those of its own mapped queries
        if that is gone. Name the model of the index to search it alone.

        Args:
            folder: folder written by `dualenc index` or `dualenc push`.
            model: model folder or name; by default the recorded one, or one of that name beside the
                index. A model that was adapted for an index of the same vectors fits, too.
            device: device of the model.
            hybrid: whether to open the BM25 index; None opens it if it exists.
            settings: `nprobe` and `ef_search` for every search.

        Raises:
            DualencError: the folder or the model cannot be opened, they do not belong together, or
                a setting does not apply to the index.
        """
        refuse_url(folder)
        folder = Path(folder)
        index, lexical = consistent_read(folder, lambda: _open_files(folder, hybrid))
        # Refuse a setting that does not apply now rather than at every query.
        if any(value is not None for value in settings.values()):
            index.search(np.eye(1, index.dim, dtype=np.float32), 1, **settings)
        candidates = None
        if model is None and isinstance(index, Index):
            candidates = _open_candidates(folder, index, device)
        if candidates is not None and candidates.stand_in is not None:
            encoder = candidates.stand_in
        else:
            encoder = load_model(model or recorded_model(index.provenance, folder), device=device)
            check_encoder(encoder, index.provenance, index.dim, folder)
        return cls(index, encoder, lexical, settings, candidates)

    def __len__(self) -> int:
        return len(self.index)

    def close(self) -> None:
        """Close the index; an engine closes its connection."""
        self.index.close()

    @property
    def _query_towers(self) -> dict[Modality, Tower]:
        """The towers that encode queries, by modality."""
        if isinstance(self.encoder, IndexEncoder):
            return self.encoder.query_towers()
        return query_towers(self.encoder, self.side)

    @property
    def takes(self) -> tuple[Modality, ...]:
        """Modalities of queries that the model takes: "text", "image", "vector"."""
        return tuple(sorted(self._query_towers))

    def query_tower(self, modality: Modality) -> Tower:
        """Return the tower that encodes a query of a modality.

        Args:
            modality: modality of the query.

        Raises:
            DualencError: the model does not take it.
        """
        if modality not in self.takes:
            names = {"text": "a text", "image": "an image", "vector": "a vector"}
            accepted = " or ".join(names[name] for name in self.takes)
            raise DualencError(
                f"the query is {modality}, and the model of this index takes {accepted}",
                fix="search with that",
            )
        return self._query_towers[modality]

    def search(
        self,
        item: Any,
        k: int = 10,
        *,
        where: Sequence[str] = (),
        filter: str = "",
        hybrid: Fusion | None = None,
        weight: float = 0.5,
    ) -> list[Hit]:
        """Return the best k items for a text, an image or a vector, best first.

        Args:
            item: a string, a PIL image, or a vector (D,) for a model of vectors.
            k: number of results.
            where: conditions on columns such as "year>=2020", all of which must hold
                (`dualenc.search.where.parse_conditions`).
            filter: filter in the engine's own language, JSON for Qdrant or SQL for PostgreSQL; ""
                for none. SQL can read whatever the database user may read, so never pass on a
                filter from somebody else.
            hybrid: method that fuses dense results with those of BM25; None searches by vectors
                alone.
            weight: weight of the dense results in the fusion, 0 to 1; BM25 gets 1 - weight.

        Raises:
            DualencError: an argument does not fit the index or its model, or the vector of the
                query is zero or not finite.
        """
        tower = self.query_tower(modality_of(item))
        if hybrid is not None and not (isinstance(item, str) and self.lexical):
            raise DualencError(
                "hybrid search needs a text, and an index that was built with --bm25",
                fix="leave it out",
            )
        if where and not self.index.column_kinds:
            raise DualencError(
                "the index was built without --columns to filter by", fix="leave conditions out"
            )
        conditions = tuple(parse_conditions(where, self.index.column_kinds))
        # Fusion needs candidates beyond the k-th: a document may be good in both rankings only.
        depth = min(k if hybrid is None else max(k, FUSION_DEPTH), len(self))
        # Refuse a bad filter before the model runs.
        if filter:
            self.index.check_filter(filter)
        vector = self._vector(item, tower, may_be_zero=hybrid is not None)
        if hybrid is not None:
            return self._hybrid(item, vector, depth, conditions, hybrid, weight)[:k]
        if self.candidates is not None:
            return self._nearest(
                item, vector, depth, self.candidates.index.rows_meeting(conditions)
            )
        options = {"where": conditions, "filter": filter, **self.settings}
        return self.index.search(vector, depth, **options)[0]

    def _hybrid(
        self,
        text: str,
        vector: np.ndarray,
        depth: int,
        conditions: Sequence[Condition],
        method: Fusion,
        weight: float,
    ) -> list[Hit]:
        """Fuse the dense and the BM25 results of a text, `depth` candidates each."""
        assert isinstance(self.index, Index)
        assert self.lexical is not None
        # Evaluate the conditions once for both searches.
        allowed_rows = self.index.rows_meeting(conditions)
        hits: list[Hit] = []
        # A zero vector is equally similar to all items, so then BM25 decides alone.
        if vector.any():
            hits = self._nearest(text, vector, depth, allowed_rows)
        rows = self.lexical.search(text, depth, allowed_rows)
        lexical_hits = [self.index.hit(row, score) for row, score in rows]
        return _fused(hits, lexical_hits, method, weight)

    def _vector(self, item: Any, tower: Tower, may_be_zero: bool = False) -> np.ndarray:
        """Encode a query as a vector (D,), truncated to the dimension of the index."""
        is_features = self.index.provenance.output == "features"
        options = {"is_features": is_features, "may_be_zero": may_be_zero}
        return query_vector(item, tower, self.index.dim, **options)

    def _nearest(
        self, item: Any, vector: np.ndarray, k: int, allowed_rows: np.ndarray | None
    ) -> list[Hit]:
        """Return the best k allowed items of a FAISS index, by the model that is replacing its own
        if a migration says so."""
        assert isinstance(self.index, Index)
        if self.candidates is not None:
            return self.candidates.search(item, vector, k, allowed_rows, **self.settings)
        return self.index.search(vector, k, allowed_rows=allowed_rows, **self.settings)[0]


def _fused(hits: list[Hit], lexical_hits: list[Hit], method: Fusion, weight: float) -> list[Hit]:
    # Both searches return the same snippet and columns for an id, so either hit will do.
    hit_of = {hit.id: hit for hit in (*lexical_hits, *hits)}
    rankings = [[(hit.id, hit.score) for hit in ranking] for ranking in (hits, lexical_hits)]
    fused = fuse(rankings, method, weights=[weight, 1 - weight])
    return [hit_of[name]._replace(score=score) for name, score in fused]


def check_encoder(
    encoder: DualEncoder, provenance: Provenance, dim: int, source: str | Path
) -> None:
    """Raise unless a model made the vectors of an index, or was adapted for them.

    Args:
        encoder: the model.
        provenance: record of the vectors: `model_checksum` and `side`, if known.
        dim: D, the size of the vectors.
        source: the index, for errors.

    Raises:
        DualencError: the checksum of the weights differs from the recorded one.
    """
    recorded = provenance.model_checksum
    if isinstance(encoder, IndexEncoder):
        documents = encoder.documents
        if (documents.model_checksum, documents.dim) != (recorded, dim):
            raise DualencError(
                "the model was adapted for an index of other vectors",
                fix="name that index, or adapt a model to this one",
                where=source,
            )
    elif recorded is not None:
        if tower_checksum(encoder.tower(provenance.side or "right")) != recorded:
            raise DualencError(
                "was built with other weights than the model has now",
                fix="build the index again",
                where=source,
            )
    # Nothing proves which model made the vectors, but a shorter one may be truncated.
    elif encoder.dim > dim:
        problem = "does not record which model made its vectors"
        message = "%s: %s; comparing the first %d of the model's %d components"
        logger.warning(message, source, problem, dim, encoder.dim)


def _open_files(folder: Path, hybrid: bool | None) -> tuple[Index | Engine, Lexical | None]:
    """Open an index or engine, and its BM25 index; None opens that if it exists."""
    if is_pushed(folder):
        if hybrid:
            raise DualencError(
                "an engine is searched by vectors alone",
                fix="search a FAISS index for hybrid",
                where=folder,
            )
        return open_engine(folder), None
    index = Index.open(folder)
    if hybrid is None:
        hybrid = has_lexical(folder)
    if not hybrid:
        return index, None
    bm25 = folder / BM25_FOLDER
    return index, consistent_read(bm25, lambda: Lexical.open(folder, index.items_checksum))


def _open_candidates(
    folder: Path, index: Index, device: str | torch.device
) -> CandidateSearch | None:
    """Open what a migration needs to answer by candidates; None unless one answers so."""
    plan = candidates_plan(folder)
    if plan is None:
        return None
    try:
        name = recorded_model(Provenance(model=str(plan.get("name") or "")), folder)
        candidates = CandidateSearch(folder, plan, index, load_model(name, device=device))
    except (DualencError, OSError) as error:
        # The index still answers, as before the migration.
        logger.warning("%s: the old model answers, not candidates: %s", folder, error)
        return None
    logger.info(
        "%s: its model is being changed; %s ranks the %d best documents of %s",
        folder,
        name,
        NUM_CANDIDATES,
        "the old one" if candidates.stand_in is None else "its mapped queries",
    )
    return candidates


def recorded_model(provenance: Provenance, folder: Path) -> str:
    """Return the path or name of the model that a folder records.

    If the path is gone but the folder has a sibling of that name, both were moved together, and the
    sibling is returned.

    Args:
        provenance: record of the folder.
        folder: folder of an index or embeddings.

    Raises:
        DualencError: no model is recorded, or its folder is gone.
    """
    recorded = provenance.model
    if not recorded:
        raise DualencError(
            "does not record which model made it", fix="name one with --model", where=folder
        )
    # A relative name may be a model on the hub, which need not exist here.
    path = Path(recorded)
    sibling = folder.resolve().parent / path.name
    if path.is_absolute() and not path.exists() and not sibling.is_dir():
        raise DualencError(
            f"its model {path} is gone", fix="name its new place with --model", where=folder
        )
    return str(sibling) if not path.exists() and sibling.is_dir() else recorded
