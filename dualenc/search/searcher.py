"""An index or an engine together with the model that made it: texts, images and known items in, results out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dualenc.encoders.dual import num_rows, take, unit_norm
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.search.embed import tower_checksum
from dualenc.search.engines import EngineIndex, Hit, is_engine
from dualenc.search.fusion import FUSION_DEPTH, Fusion, fuse
from dualenc.search.index import Index
from dualenc.search.kept import KeptTexts, checksum_of
from dualenc.search.lexical import AGAIN, Lexical, has_lexical
from dualenc.search.rerank import Rescore, rerank
from dualenc.search.where import Condition, Kinds, column_kinds, meets, parse_conditions

if TYPE_CHECKING:
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.types import Inputs, Modality, Side


class Query(NamedTuple):
    """What to search with: an item, or ids of the index, for what is like them.

    Attributes:
        side: the side of the model that encodes the item.
        item: a text, image or vector.
        inputs: the item as that side's `prepare` has made it, where somebody did so already.
        ids: in place of an item; the mean of their vectors is the query, and they are left out of the results.
        k: how many results.
        where: conditions on columns of an index, all of which must hold.
        filter: of an engine, in its own language; "" for none.
        hybrid: how to fuse what the vectors find with what BM25 finds for a text; None: vectors alone.
        weight: of the vectors in that, from 0 to 1; BM25 has the rest.
        rerank: so many of the best are scored again by the cross-encoder, for a text; its scores order what is found,
            and nothing else is. 0: none.
    """

    side: Side = "left"
    item: Any = None
    inputs: Inputs | None = None
    ids: tuple[str, ...] = ()
    k: int = 10
    where: tuple[Condition, ...] = ()
    filter: str = ""
    hybrid: Fusion | None = None
    weight: float = 0.5
    rerank: int = 0


class Searcher:
    """An open index with its model.

    Make one with `Searcher.open`. It is for one thread at a time.

    Attributes:
        folder: of the index.
        index: what is searched.
        encoder: the model that made it, in evaluation mode.
        lexical: BM25 over its texts, if it was opened with that.
        judge: the cross-encoder that scores again, if it was opened with one.
        texts: what that reads.
        nprobe: lists that an IVF index visits; None: what the build or the engine chose.
        ef_search: candidates that an HNSW index keeps; None: likewise.
    """

    def __init__(
        self,
        folder: Path,
        index: Index | EngineIndex,
        encoder: DualEncoder,
        lexical: Lexical | None = None,
        *,
        judge: Rescore | None = None,
        texts: KeptTexts | None = None,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> None:
        self.folder, self.index, self.encoder, self.lexical = folder, index, encoder, lexical
        self.judge, self.texts = judge, texts
        self.nprobe, self.ef_search = nprobe, ef_search
        self.side: Side = index.meta.get("side", "right")

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: str | None = None,
        *,
        device: str | torch.device = "cpu",
        before: Searcher | None = None,
        hybrid: bool | None = None,
        judge: Rescore | None = None,
        nprobe: int | None = None,
        ef_search: int | None = None,
        qdrant_path: str | None = None,
    ) -> Searcher:
        """Open an index, or an engine that a folder remembers, and the model that made it.

        Args:
            folder: that `dualenc index` or `dualenc push` wrote.
            model: its model folder or name; by default the recorded one, or one of that name beside the index.
            device: where to put the model.
            before: an earlier searcher whose model is used again where the index was made with the same weights.
            hybrid: open BM25 over the texts, too; None: if it is there.
            judge: a cross-encoder (`open_cross_encoder`) for `Query.rerank`; the texts that it reads are opened, too.
            nprobe: lists that an IVF index visits.
            ef_search: candidates that an HNSW index keeps.
            qdrant_path: the store of an embedded Qdrant, see `EngineIndex.open`.

        Raises:
            DualencError: no index, no model, no BM25 or texts where they are needed, a search parameter that the index
                does not have, or the model has other weights than the index was made with.
        """
        folder = Path(folder)
        index: Index | EngineIndex
        if is_engine(folder):
            index = EngineIndex.open(folder, qdrant_path)
        elif qdrant_path is not None:
            raise DualencError(f"{folder}: remembers no engine; leave --qdrant-path out")
        else:
            index = Index.open(folder)
        if nprobe is not None or ef_search is not None:  # one that does not apply is refused now, not at every query
            dim = index.about.dim if isinstance(index, EngineIndex) else index.dim
            index.search(np.eye(1, dim, dtype=np.float32), 1, nprobe=nprobe, ef_search=ef_search)
        recorded, side = index.meta.get("model_checksum"), index.meta.get("side", "right")
        how: dict[str, Any] = {"nprobe": nprobe, "ef_search": ef_search, "judge": judge}
        if judge is not None:
            if index.meta.get("modality") == "image":
                raise DualencError(f"{folder}: holds images, and a cross-encoder reads texts; leave reranking out")
            how["texts"] = KeptTexts(folder, checksum_of(index))
        if hybrid and isinstance(index, EngineIndex):
            raise DualencError(f"{folder}: an engine is searched by vectors alone; search a FAISS index for hybrid")
        if isinstance(index, Index) and (hybrid or (hybrid is None and has_lexical(folder))):
            how["lexical"] = Lexical.open(folder, index.items_checksum)
        if before is not None and recorded and tower_checksum(before.encoder.tower(side)) == recorded:
            return cls(folder, index, before.encoder, **how)
        encoder = load_model(model or _recorded_model(index, folder), device=device)
        if recorded is not None and tower_checksum(encoder.tower(side)) != recorded:
            raise DualencError(f"{folder}: was built with other weights than the model has now; build the index again")
        return cls(folder, index, encoder, **how)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def columns(self) -> Kinds:
        """What the columns hold that results can be filtered by, by name."""
        if isinstance(self.index, EngineIndex):
            return self.index.about.columns
        return column_kinds(self.index.columns)

    @property
    def has_snippets(self) -> bool:
        """Whether there is a text to show with each id."""
        return self.index.about.has_snippets if isinstance(self.index, EngineIndex) else self.index.snippets is not None

    @property
    def takes(self) -> tuple[Modality, ...]:
        """What can be searched with: "text", "image", "vector"."""
        if self.encoder.kind in ("query-document", "vector"):
            return (self.encoder.tower(self._other_side).modality,)
        return tuple(sorted({self.encoder.left.modality, self.encoder.right.modality}))

    @property
    def _other_side(self) -> Side:
        return "left" if self.side == "right" else "right"

    def query_side(self, modality: Modality) -> Side:
        """The side that encodes a query: the other one than the index's, or, with images and texts, whatever it is.

        Raises:
            DualencError: the model encodes no such query.
        """
        if modality not in self.takes:
            wanted = " or ".join({"text": "a text", "image": "an image", "vector": "a vector"}[t] for t in self.takes)
            raise DualencError(f"the query is {modality}, and the model of this index takes {wanted}; search with that")
        if self.encoder.kind in ("query-document", "vector"):
            return self._other_side
        return "left" if self.encoder.left.modality == modality else "right"

    def conditions(self, words: Sequence[str]) -> tuple[Condition, ...]:
        """Read conditions such as year>=2020.

        Raises:
            DualencError: a condition that cannot be read, an index that keeps no columns, or an engine.
        """
        if words and isinstance(self.index, EngineIndex):
            language = self.index.engine.filter_language
            raise DualencError(f"{self.folder}: an engine filters in its own language ({language}); give --filter")
        if words and not self.columns:
            raise DualencError(
                f"{self.folder}: keeps no columns for --where; embed with --columns, and index or push that"
            )
        return tuple(parse_conditions(words, self.columns))

    @property
    def filter_language(self) -> str:
        """The language of `Query.filter`: "SQL" or "JSON"; "" where the index is no engine."""
        return self.index.engine.filter_language if isinstance(self.index, EngineIndex) else ""

    def check_filter(self, filter: str) -> None:
        """Refuse a stranger's filter that is harmful or cannot be evaluated; no message holds a path."""
        if not filter:
            return
        if not isinstance(self.index, EngineIndex):
            raise DualencError("only an engine takes a filter; give where")
        self.index.engine.check_filter(filter)

    @torch.inference_mode()
    def encode(self, side: Side, inputs: Inputs) -> np.ndarray:
        """Encode n prepared items to what the index holds: (n, D) float32.

        Raises:
            DualencError: the vectors are not finite.
        """
        tower: Tower = self.encoder.tower(side)
        forward = tower.features if self.index.meta.get("output", "embedding") == "features" else tower
        device = next((tensor.device for tensor in tower.state_dict().values()), torch.device("cpu"))
        chunks, parts = _even_chunks(inputs), []
        for rows in chunks:
            parts.append(forward({name: tensor.to(device) for name, tensor in take(inputs, rows).items()}).float())
        whole = torch.cat(parts)
        if self._dim < whole.shape[1]:  # the index holds first components only
            whole = unit_norm(whole[:, : self._dim])
        vectors = whole.cpu()[torch.argsort(torch.cat(chunks))].numpy()
        if not np.isfinite(vectors).all():
            raise DualencError("the model gives vectors that are not finite; check its weights")
        return vectors

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """The best items for each query, best first.

        Args:
            queries: Q of them; those that agree in k and conditions are searched together.

        Raises:
            DualencError: an id that is not there, an index that does not give its vectors back, an engine that does
                not answer, hybrid search or a cross-encoder without a text or where there is none.
        """
        vectors = self._vectors(queries)
        found: list[list[Hit]] = [[] for _ in queries]
        alike: dict[tuple[int, tuple[Condition, ...], str], list[int]] = {}
        for place, query in enumerate(queries):
            # Items of the query are left out, so as many more are asked for.
            wanted = (query.rerank or query.k) + len(query.ids)
            wanted = wanted if query.hybrid is None else max(wanted, FUSION_DEPTH)
            alike.setdefault((min(wanted, len(self)), query.where, query.filter), []).append(place)
        for (k, where, filter), places in alike.items():
            kept = self._kept(where)
            for place, hits in zip(places, self._nearest(vectors[places], k, filter, kept)):
                query = queries[place]
                if query.hybrid is not None:
                    hits = self._fused(query, hits, k, kept)
                found[place] = [hit for hit in hits if hit.id not in query.ids][: query.rerank or query.k]
        judged = [place for place, query in enumerate(queries) if query.rerank]
        if judged:
            again = self._judged([queries[place] for place in judged], [found[place] for place in judged])
            for place, hits in zip(judged, again):
                found[place] = hits[: queries[place].k]
        return found

    def _judged(self, queries: list[Query], found: list[list[Hit]]) -> list[list[Hit]]:
        """What each query has found, in the order and with the scores of the cross-encoder."""
        if self.judge is None or self.texts is None:
            raise DualencError(f"{self.folder}: was opened without a cross-encoder; name one to rerank")
        pairs: list[list[tuple[str, str]]] = []
        for query, hits in zip(queries, found):
            if not isinstance(query.item, str):
                raise DualencError("a cross-encoder reads texts; search with a text, or without reranking")
            pairs.append([(query.item, text) for text in self.texts.of([hit.id for hit in hits])])
        return [
            [hits[place]._replace(score=score) for place, score in zip(order.tolist(), scores.tolist())]
            for hits, (order, scores) in zip(found, rerank(self.judge, pairs))
        ]

    def _kept(self, where: Sequence[Condition]) -> np.ndarray | None:
        """Which rows of a FAISS index meet some conditions (N,) bool; None: there are none, or an engine sees to it."""
        if not where or isinstance(self.index, EngineIndex) or self.index.columns is None:
            return None
        return meets(where, self.index.columns)

    def _fused(self, query: Query, hits: list[Hit], depth: int, kept: np.ndarray | None) -> list[Hit]:
        """What the vectors and what BM25 found, as one ranking."""
        if not isinstance(query.item, str) or not isinstance(self.index, Index):
            raise DualencError("hybrid search needs a text; leave it out to search with anything else")
        if self.lexical is None:
            raise DualencError(f"{self.folder}: has no BM25 beside its vectors; {AGAIN}")
        found = self.lexical.search(query.item, depth, kept)
        names = self.index.ids_at(np.array([row for row, _ in found], dtype=np.int64)).tolist()
        words = [_hit(self.index, name, row, score) for name, (row, score) in zip(names, found, strict=True)]
        known = {hit.id: hit for hit in (*words, *hits)}
        rankings = [[(hit.id, hit.score) for hit in ranking] for ranking in (hits, words)]
        fused = fuse(rankings, query.hybrid or "rrf", weights=[query.weight, 1 - query.weight])
        return [known[name]._replace(score=score) for name, score in fused]

    def _vectors(self, queries: Sequence[Query]) -> np.ndarray:
        """The vector of each query (Q, D), those of one side encoded together."""
        vectors = np.zeros((len(queries), self._dim), np.float32)
        sides: tuple[Side, Side] = ("left", "right")
        for side in sides:
            raw = [n for n, query in enumerate(queries) if query.item is not None and query.side == side]
            ready = [n for n, query in enumerate(queries) if query.inputs is not None and query.side == side]
            if raw:
                vectors[raw] = self.encode(side, self.encoder.tower(side).prepare([queries[n].item for n in raw]))
            if ready:
                parts = [queries[n].inputs or {} for n in ready]
                vectors[ready] = self.encode(side, {name: torch.cat([p[name] for p in parts]) for name in parts[0]})
        for place, query in enumerate(queries):
            if query.ids:
                known = self.index.engine if isinstance(self.index, EngineIndex) else self.index
                vectors[place] = known.vectors(query.ids).mean(axis=0)
        return vectors

    @property
    def _dim(self) -> int:
        return self.index.about.dim if isinstance(self.index, EngineIndex) else self.index.dim

    def _nearest(self, vectors: np.ndarray, k: int, filter: str, kept: np.ndarray | None) -> list[list[Hit]]:
        how = {"nprobe": self.nprobe, "ef_search": self.ef_search}
        if isinstance(self.index, EngineIndex):
            return self.index.search(vectors, k, filter, **how)
        index = self.index
        scores, rows = index.search_rows(vectors, k, kept=kept, **how)
        return [
            [_hit(index, name, row, score) for name, row, score in zip(*own) if row >= 0]
            for own in zip(index.ids_at(rows).tolist(), rows.tolist(), scores.tolist())
        ]


def _hit(index: Index, name: str, row: int, score: float) -> Hit:
    return Hit(name, score, index.snippet(row), index.columns_of(row))


def _even_chunks(inputs: Inputs) -> list[torch.Tensor]:
    """Row numbers of texts of like length: none is padded to more than twice its tokens, and sixteen."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return [torch.arange(num_rows(inputs))]
    lengths = mask.sum(dim=1)
    order = torch.argsort(lengths, descending=True, stable=True)
    chunks: list[list[int]] = [[]]
    for row in order.tolist():
        if chunks[-1] and lengths[chunks[-1][0]] > 2 * lengths[row] + 16:
            chunks.append([])
        chunks[-1].append(row)
    return [torch.tensor(chunk) for chunk in chunks]


def _recorded_model(index: Index | EngineIndex, folder: Path) -> str:
    """The model's recorded place, or beside the index if both were moved together."""
    recorded = index.meta.get("model")
    if not recorded:
        raise DualencError(f"{folder}: does not say which model made it; name one with --model")
    path = Path(recorded)
    sibling = folder.resolve().parent / path.name
    if path.is_absolute() and not path.exists() and not sibling.is_dir():
        raise DualencError(f"{folder}: its model {path} is gone; name its new place with --model")
    return str(sibling) if not path.exists() and sibling.is_dir() else recorded
