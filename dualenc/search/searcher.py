"""Searcher: an index or a pushed collection with its model; texts, images or vectors in, results
out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualenc.encoders.dual import ZERO_VECTOR, DualEncoder, unit_norm
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.io.decoding import rgb_item
from dualenc.io.files import consistent_read
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.engines.engine import Engine, is_pushed, refuse_url
from dualenc.search.engines.factory import open_engine
from dualenc.search.fusion import FUSION_DEPTH, Fusion, fuse
from dualenc.search.index.open import Hit, Index
from dualenc.search.lexical import FOLDER as BM25_FOLDER
from dualenc.search.lexical import Lexical, has_lexical
from dualenc.search.where import meets, parse_conditions
from dualenc.types import Modality, Side

logger = logging.getLogger("dualenc.search")


@dataclass(eq=False)
class Searcher:
    """An open index with its model, for one thread at a time; create one with `Searcher.open`.

    One of a pushed collection whose embeddings are replaced raises a `DualencError`; open it again.

    Searcher.open("index").search("how do I resume?", k=5)
    """

    index: Index | Engine
    encoder: DualEncoder
    lexical: Lexical | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def side(self) -> Side:
        """The side of the model that made the index."""
        return self.index.meta.get("side", "right")

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
        """Open an index, or the collection that a folder remembers, and the model that made it.

        Args:
            folder: written by `dualenc index` or `dualenc push`.
            model: its model folder or name; by default the recorded one, or one of that name beside
                the index. Or an `IndexEncoder` that was adapted for an index of the same vectors.
            device: for the model.
            hybrid: open the BM25 index, too; None opens it if it exists.
            settings: `nprobe` and `ef_search`, as the index's `search` takes them.
        """
        refuse_url(folder)
        folder = Path(folder)
        index, lexical = consistent_read(folder, lambda: _open_files(folder, hybrid))
        # A parameter that does not apply is refused now, not at every query.
        if any(value is not None for value in settings.values()):
            index.search(np.eye(1, index.dim, dtype=np.float32), 1, **settings)
        encoder = load_model(model or recorded_model(index.meta, folder), device=device)
        check_encoder(encoder, index.meta, index.dim, folder)
        return cls(index, encoder, lexical, settings)

    def __len__(self) -> int:
        return len(self.index)

    def close(self) -> None:
        """Close the connection to an engine."""
        if isinstance(self.index, Engine):
            self.index.close()

    @property
    def _side_of(self) -> dict[Modality, Side]:
        """The side that encodes a query of each modality: not the index's; of images and texts,
        their own."""
        sides: tuple[Side, ...] = ("right", "left")  # of two image towers the left one
        if self.encoder.kind == "query-index":
            sides = ("left",)
        elif self.encoder.kind in ("query-document", "vector"):
            sides = ("left" if self.side == "right" else "right",)
        return {self.encoder.tower(side).modality: side for side in sides}

    @property
    def takes(self) -> tuple[Modality, ...]:
        """The modalities of queries: "text", "image", "vector"."""
        return tuple(sorted(self._side_of))

    def query_side(self, modality: Modality) -> Side:
        """The side that encodes a query of a modality."""
        if modality not in self.takes:
            names = {"text": "a text", "image": "an image", "vector": "a vector"}
            accepted = " or ".join(names[name] for name in self.takes)
            raise DualencError(
                f"the query is {modality}, and the model of this index takes {accepted}",
                fix="search with that",
            )
        return self._side_of[modality]

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
        """The best k items for a text, an image or a vector, best first.

        Args:
            item: a string, a PIL image, or a vector (D,) for a model of vectors.
            k: how many.
            where: conditions on columns such as year>=2020 (`parse_conditions`), all of which must
                hold.
            filter: in the engine's own language, JSON of Qdrant or SQL of PostgreSQL; "" for none.
                SQL reads whatever the user of the connection may read: only from whoever owns it.
            hybrid: how to fuse the results of a text's vector with those of BM25; None for the
                vector alone.
            weight: of the vector's results in the fusion, from 0 to 1; BM25 has the rest.
        """
        side = self.query_side(_modality(item))
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
        depth = min(k if hybrid is None else max(k, FUSION_DEPTH), len(self))
        if isinstance(self.index, Engine):
            if filter:
                self.index.check_filter(filter)
            vector = self._vector(item, side)
            return self.index.search(vector, depth, filter, conditions, **self.settings)[0]
        if filter:
            raise DualencError("only an engine takes a filter", fix="give conditions (where)")
        allowed_rows = None
        if conditions and self.index.columns is not None:
            allowed_rows = meets(conditions, self.index.columns)
        vector = self._vector(item, side, may_be_zero=hybrid is not None)
        hits = self.index.search(vector, depth, allowed_rows=allowed_rows, **self.settings)[0]
        # A zero vector is as similar to each item as to any other; BM25 alone decides then.
        hits = [hit for hit in hits if vector.any()]
        if hybrid is not None and self.lexical is not None:
            rows = self.lexical.search(item, depth, allowed_rows)
            hits = _fused(hits, [self.index.hit(row, score) for row, score in rows], hybrid, weight)
        return hits[:k]

    @torch.inference_mode()
    def _vector(self, item: Any, side: Side, may_be_zero: bool = False) -> np.ndarray:
        """The vector (D,) of a query, of the size of the index, which may contain the first
        components only."""
        tower = self.encoder.tower(side)
        forward = (
            tower.features if self.index.meta.get("output", "embedding") == "features" else tower
        )
        device = next(
            (tensor.device for tensor in tower.state_dict().values()), torch.device("cpu")
        )
        inputs = tower.prepare([rgb_item(item, "the query")])
        encoded = forward({name: tensor.to(device) for name, tensor in inputs.items()}).float()
        if self.index.dim < encoded.shape[1]:
            encoded = unit_norm(encoded[:, : self.index.dim])
        vector = encoded.cpu().numpy()[0]
        if not np.isfinite(vector).all():
            raise DualencError(
                "the model gives vectors that are not finite", fix="check its weights"
            )
        if not vector.any() and not may_be_zero:
            raise DualencError(
                f"the query has a zero vector: {ZERO_VECTOR[tower.modality]}",
                fix="search for something else",
            )
        return vector


def _modality(item: Any) -> Modality:
    if isinstance(item, str):
        return "text"
    return "vector" if isinstance(item, np.ndarray) else "image"


def _fused(hits: list[Hit], lexical_hits: list[Hit], method: Fusion, weight: float) -> list[Hit]:
    hit_of = {hit.id: hit for hit in (*lexical_hits, *hits)}
    rankings = [[(hit.id, hit.score) for hit in ranking] for ranking in (hits, lexical_hits)]
    fused = fuse(rankings, method, weights=[weight, 1 - weight])
    return [hit_of[name]._replace(score=score) for name, score in fused]


def check_encoder(
    encoder: DualEncoder, meta: Mapping[str, Any], dim: int, source: str | Path
) -> None:
    """Refuse a model that neither made the vectors of an index nor was adapted for them, by their
    checksum.

    Args:
        encoder: the model.
        meta: what is recorded with the vectors: `model_checksum` and `side`, where known.
        dim: D, the size of the vectors.
        source: the index, for the error.
    """
    recorded = meta.get("model_checksum")
    if isinstance(encoder, IndexEncoder):
        if (encoder.documents["model_checksum"], encoder.documents["dim"]) != (recorded, dim):
            raise DualencError(
                "the model was adapted for an index of other vectors",
                fix="name that index, or adapt a model to this one",
                where=source,
            )
    elif (
        recorded is not None
        and tower_checksum(encoder.tower(meta.get("side", "right"))) != recorded
    ):
        raise DualencError(
            "was built with other weights than the model has now",
            fix="build the index again",
            where=source,
        )
    elif recorded is None and encoder.dim > dim:
        problem = f"the index does not say which model made its {dim} numbers, and the model gives {encoder.dim}"
        logger.warning("%s: %s; the first %d are compared", source, problem, dim)


def _open_files(folder: Path, hybrid: bool | None) -> tuple[Index | Engine, Lexical | None]:
    index: Index | Engine = open_engine(folder) if is_pushed(folder) else Index.open(folder)
    lexical = None
    if hybrid and isinstance(index, Engine):
        raise DualencError(
            "an engine is searched by vectors alone",
            fix="search a FAISS index for hybrid",
            where=folder,
        )
    if isinstance(index, Index) and (hybrid or (hybrid is None and has_lexical(folder))):
        lexical = consistent_read(
            folder / BM25_FOLDER, lambda: Lexical.open(folder, index.items_checksum)
        )
    return index, lexical


def recorded_model(meta: Mapping[str, Any], folder: Path) -> str:
    """The path or name of the model in a meta.json, or its path beside the folder if both were
    moved together."""
    recorded = meta.get("model")
    if not recorded:
        raise DualencError(
            "does not say which model made it", fix="name one with --model", where=folder
        )
    path = Path(recorded)
    sibling = folder.resolve().parent / path.name
    if path.is_absolute() and not path.exists() and not sibling.is_dir():
        raise DualencError(
            f"its model {path} is gone", fix="name its new place with --model", where=folder
        )
    return str(sibling) if not path.exists() and sibling.is_dir() else recorded
