"""Adapt queries to an index: what is trained, and models between the original and the adapted."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualenc.data.corpus import Corpus
from dualenc.data.item_lists import VectorItems
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.image import ImageEncoder
from dualenc.encoders.image_text import ImageTextEncoder, add_clip_adapters
from dualenc.encoders.index_encoder import IndexEncoder, interpolate, with_map
from dualenc.encoders.load import load_model
from dualenc.encoders.text import TextEncoder
from dualenc.encoders.vector import TowerKind, VectorEncoder, VectorTower
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.search.embed.encode import embed
from dualenc.search.searcher import check_encoder, recorded_model
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.types import Modality, OnError
from dualenc.workflows.session import report_skipped
from dualenc.workflows.start_map import start_map

Trained = Literal["perceptron", "linear", "lora", "all"]
"""The trained part: a map of query vectors, adapters of the query tower, or the whole tower."""
TOWERS: dict[Trained, TowerKind] = {"perceptron": "dense", "linear": "linear"}
"""Kinds of `VectorTower` for the maps."""
LORA_RANK = 16
_TAKES: dict[type, tuple[Modality, ...]] = {
    TextEncoder: ("text",),
    ImageTextEncoder: ("text", "image"),
    ImageEncoder: ("image",),
}
"""Modalities of queries by model."""
SHARES = tuple(round(step / 10, 1) for step in range(11))
"""Shares of the original weights at which an adapted model is measured."""
ORIGINAL, BASE = "original", "base"
"""The model that training begins at; the model of the index, if that is another one."""


@dataclass(eq=False)
class QuerySide:
    """The query side of an index: its model, and the part of it that is trained.

    A map is trained on query vectors, which are computed once; the model is trained on texts or
    images. Of an image-text model, the tower of the queries is trained.

        side = QuerySide(documents, "text", "perceptron", source="index", model=None,
                         work=Path("work"), device=torch.device("cpu"))
        model = side.new_model(learn_log(with_inputs(log, side), documents).pairs.left_dim)

    Args:
        documents: documents of the index, see `dualenc.search.documents.open_documents`.
        modality: modality of the queries: "text", "image" or "vector".
        trained: what is trained.
        source: path of the index, for error messages.
        model: model folder or name; None takes the one that the index records.
        work: folder for query vectors.
        device: device to compute on.
        progress: show progress bars.
        texts: (N,) texts of the documents, if `model` is to replace the model of the index; then
            training begins at a linear map from its vectors of texts to those of the documents.

    Attributes:
        encoder: model of the index, or the one that replaces it, with the map; None if queries are
            vectors.
        start: that map; None for the model of the index.

    Raises:
        DualencError: the model is missing or did not build the index, or queries of this
            modality cannot be trained this way.
    """

    documents: Embeddings
    modality: Modality
    trained: Trained
    _: KW_ONLY
    source: str
    model: str | None
    work: Path
    device: torch.device
    progress: bool = True
    texts: Sequence[str] | None = None
    encoder: DualEncoder | None = field(default=None, init=False)
    start: VectorTower | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.modality != "vector":
            self.encoder = self._open_model()
        elif self.trained not in TOWERS:
            raise DualencError(
                f"queries are vectors, and {self.trained} trains a model of texts or images",
                fix="train a perceptron",
            )

    @property
    def text(self) -> TextEncoder | None:
        """The model of the index if it is a text model."""
        return self.encoder if isinstance(self.encoder, TextEncoder) else None

    def _open_model(self) -> DualEncoder:
        """Load the model of the index; check that it encodes queries into the index's space."""
        self.model = self.model or recorded_model(self.documents.provenance, Path(self.source))
        model = load_model(self.model, self.device)
        takes = _TAKES.get(type(model), ())
        if not takes:
            raise DualencError(
                f"is of kind {model.kind}; only models of texts or images can be adapted",
                where=self.model,
            )
        if self.texts is not None:
            return self._replacement(model)
        if self.modality not in takes:
            raise DualencError(
                f"queries are {self.modality}s, and the model of the index takes "
                f"{' and '.join(f'{name}s' for name in takes)}",
                fix="give queries of that kind",
                where=self.model,
            )
        if self.trained == "lora" and isinstance(model, ImageEncoder):
            raise DualencError(
                "lora is for text and image-text models",
                fix="train a perceptron, or all",
                where=self.model,
            )
        check_encoder(model, self.documents.provenance, self.documents.dim, self.source)
        return model

    def _replacement(self, model: DualEncoder) -> TextEncoder:
        """Return another model, followed by a linear map into the space of the documents."""
        assert self.texts is not None
        if not isinstance(model, TextEncoder) or self.modality != "text":
            raise DualencError(
                f"is of kind {model.kind}, over {self.modality} queries; only a text model can "
                "replace that of an index",
                where=self.model,
            )
        start = start_map(model, self.texts, self.documents, self.work, progress=self.progress)
        self.start = start.to(self.device)
        return with_map(model, self.start)

    def _queries(self, encoder: DualEncoder, mapping: VectorTower | None = None) -> IndexEncoder:
        """Return the query side of a model, with a map if one is given."""
        facts = self.documents.provenance
        return IndexEncoder(encoder, facts, modality=self.modality, mapping=mapping)

    def inputs(self, queries: Corpus, name: str, on_error: OnError = "raise") -> Corpus:
        """Return queries as inputs of the trained model: texts or images, or vectors for a map.

        Args:
            queries: Q texts, images or vectors.
            name: name of the folder for their vectors, and in the progress bar.
            on_error: "skip" leaves out queries without a vector, such as unreadable images.
        """
        if queries.modality != self.modality:
            raise DualencError(
                f"{name} are of kind {queries.modality}, and the queries to train on "
                f"{self.modality}",
                fix="give both as one of them",
            )
        if self.encoder is None or self.trained not in TOWERS:
            return queries
        # An index of truncated vectors needs queries of the same size.
        tower = self._queries(self.encoder).left
        folder = self.work / name
        bar = f"embed {name}" if self.progress else False
        embedded = embed(tower, queries, folder, on_error=on_error, progress=bar)
        report_skipped(embedded)
        return Corpus(embedded.ids, VectorItems(embedded.vectors), "vector")

    def new_model(self, input_dim: int | None) -> DualEncoder:
        """Return the model before training.

        Args:
            input_dim: number of components of a query vector; None for texts and images.
        """
        if self.trained in TOWERS:
            dim = self.documents.dim
            model = VectorEncoder(
                input_dim or dim,
                tower=TOWERS[self.trained],
                right_tower="identity",
                right_input_dim=dim,
            )
            return model.to(self.device)
        assert self.encoder is not None
        encoder = self.encoder
        if self.trained == "lora" and isinstance(encoder, TextEncoder):
            # Adapters are added when a text model is opened, so open it again.
            encoder = TextEncoder(self.model, lora_rank=LORA_RANK)
            if self.start is not None:
                encoder = with_map(encoder.to(self.device), self.start)
        # A copy: the caller's model may embed queries while this one is trained.
        queries = self._queries(copy.deepcopy(encoder))
        if self.trained == "lora" and isinstance(encoder, ImageTextEncoder):
            add_clip_adapters(queries.left, LORA_RANK)
        return queries.to(self.device)

    def finished(self, trained: DualEncoder, ids: Sequence[str]) -> IndexEncoder:
        """Return the trained model as a query encoder of the index.

        Args:
            trained: the model that was trained.
            ids: ids of the documents in training pairs, which the model remembers.
        """
        if isinstance(trained, IndexEncoder):
            model = trained
        elif self.encoder is not None and isinstance(trained, VectorEncoder):
            # A user has texts or images: the map is saved together with the model whose vectors it
            # maps.
            model = self._queries(self.encoder, trained.left)
        else:
            model = self._queries(trained)
        model.trained_ids = list(ids)
        return model


class Interpolated(NamedTuple):
    """Scores (Q,) by task of the model with a share `keep` of the weights of a model.

    That model is `of`: the original or the base model.
    """

    keep: float
    scores: dict[str, np.ndarray]
    of: str = ORIGINAL


class Ends(NamedTuple):
    """Models between which and an adapted one the result lies.

        points = Ends(original, base).score(adapted, tasks)

    Attributes:
        original: model that training begins at.
        base: model of the index, if training begins at that of a previous run; else None.
    """

    original: DualEncoder
    base: DualEncoder | None = None

    def score(
        self,
        adapted: DualEncoder,
        tasks: Mapping[str, IndexEvaluator],
        shares: Sequence[float] = SHARES,
    ) -> list[Interpolated]:
        """Measure models on the lines from the adapted weights to each end, the original last.

        Args:
            adapted: model after training; not changed.
            tasks: evaluators by name.
            shares: shares of the weights of an end.
        """
        points: list[Interpolated] = []
        if self.base is not None:
            # Both lines begin at the adapted model, which is measured once.
            towards = [share for share in shares if share > 0]
            scored = score_interpolations(self.base, adapted, tasks, towards)
            points = [point._replace(of=BASE) for point in scored]
        return points + score_interpolations(self.original, adapted, tasks, shares)

    def mix(self, adapted: DualEncoder, keep: float, of: str) -> dict[str, Tensor]:
        """Return the weights keep·end + (1 − keep)·adapted, see `interpolate`.

        Args:
            adapted: model after training; not changed.
            keep: share of the weights of the end.
            of: which end, `ORIGINAL` or `BASE`.
        """
        end = self.original if of == ORIGINAL else self.base
        assert end is not None
        return interpolate(end, adapted, keep)


def score_interpolations(
    original: DualEncoder,
    adapted: DualEncoder,
    tasks: Mapping[str, IndexEvaluator],
    shares: Sequence[float] = SHARES,
) -> list[Interpolated]:
    """Measure models on the line between the original weights and the adapted ones.

    Wortsman et al. 2022, arXiv:2109.01903.

    Args:
        original: model before training; not changed.
        adapted: model after training, of the same architecture; not changed.
        tasks: evaluators by name.
        shares: shares of the original weights, each from 0 to 1.
    """
    # One copy serves all shares.
    model = copy.deepcopy(adapted)
    points = []
    for keep in shares:
        model.load_state_dict(interpolate(original, adapted, keep))
        scores = {
            name: np.array([row[evaluator.primary] for row in evaluator.per_query(model).values()])
            for name, evaluator in tasks.items()
        }
        points.append(Interpolated(keep, scores))
    return points


def harmless_share(points: Sequence[Interpolated], task: str) -> float:
    """Return the smallest share of the original weights from which on a task loses nothing.

    At this share and all larger ones, the paired 95% interval of the difference from the original
    reaches 0.
    """
    original = max(points, key=lambda point: point.keep)
    harmless = original.keep
    # From the original downwards; stop at the first significant loss.
    for point in sorted(points, key=lambda point: -point.keep):
        if paired_bootstrap(original.scores[task], point.scores[task]).high < 0:
            break
        harmless = point.keep
    return harmless
