"""Query encoders for an existing index. Document vectors are fixed and never re-encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualenc.encoders.card import base_metadata
from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Tower
from dualenc.encoders.image import ImageEncoder, ProjectedTower
from dualenc.encoders.image_text import ClipImageTower, ClipTextTower, ImageTextEncoder
from dualenc.encoders.lora import merge_adapters
from dualenc.encoders.mapped_tower import MappedTower
from dualenc.encoders.text import TextEncoder, TextTower
from dualenc.encoders.vector import VectorEncoder, VectorTower, write_adapters
from dualenc.errors import DualencError
from dualenc.io.files import write_json
from dualenc.io.provenance import Provenance
from dualenc.io.reading import check_fields, read_json_object
from dualenc.types import Modality, Output, Side

TRAINED_FILE = "trained_documents.json"
VECTOR_FOLDER = "queries"
"""Subfolder with the adapter of query vectors."""
ENCODER_FOLDER = "encoder"
"""Subfolder with the image-text or image model whose query side is adapted."""

DEFAULT_FACTS = {"model": None, "model_checksum": None, "side": "right", "metric": "cosine"}
"""Facts about documents of which nothing is known but their size, in the order of the file."""


class IndexEncoder(DualEncoder):
    """A trainable query tower over the fixed document vectors of an index.

    Training changes queries only, so the index stays valid.

        IndexEncoder(TextEncoder("me/base"), open_documents("index").provenance)

    Args:
        queries: encoder whose left tower is trained; of an image-text model, the tower of the
            modality. The other tower is not trained. If the index holds only the leading components
            of the model's vectors, the tower truncates its own to the same size.
        documents: record of the document vectors: `dim`, and optionally `model` and
            `model_checksum` of the encoder that made them, with its `side` and `output`, and their
            `metric`.
        modality: modality of the queries; None takes texts for an image-text model.
        mapping: trained map of the vectors of a model of texts or images, which is appended.

    Attributes:
        documents: these entries of the record.
        trained_ids: ids of the documents that were relevant in training; saved with the model.
        source: image-text or image model of the query tower; None for texts and vectors.

    Raises:
        DualencError: the queries are of another modality or kind, or differ from the documents in
            size.
    """

    right: VectorTower
    example_side = "left"
    source: ImageTextEncoder | ImageEncoder | None = None

    def __init__(
        self,
        queries: DualEncoder,
        documents: Provenance,
        *,
        modality: Modality | None = None,
        mapping: VectorTower | None = None,
    ) -> None:
        facts = documents.only([*DEFAULT_FACTS, "dim"]).entries()
        if documents.output == "features":
            facts["output"] = documents.output
        documents = Provenance.from_entries(DEFAULT_FACTS | facts)
        documents.check("documents", [*DEFAULT_FACTS, "dim"], "correct it")
        dim = documents.dim
        # Documents are vectors already.
        right = VectorTower("identity", dim, dim, None)
        left = _query_tower(queries, documents, modality, mapping)
        if left.dim != dim:
            raise DualencError(
                f"the index holds vectors of {dim} numbers, but the query model gives {left.dim}",
                fix="append a map of that size with with_map",
            )
        super().__init__(left, right, kind="query-index")
        self.documents = documents
        self.trained_ids: list[str] = []
        self.base = dict(queries.base)
        # Documents are never encoded here, so only prompts of queries are kept.
        prompts = getattr(queries, "prompts", {})
        self.prompts = {name: prompt for name, prompt in prompts.items() if name.endswith("_query")}
        if isinstance(queries, IndexEncoder):
            queries = queries.source or queries
        if isinstance(queries, ImageTextEncoder | ImageEncoder):
            # Bypass nn.Module's registration: the rest of the model is not trained.
            object.__setattr__(self, "source", queries)
        if not isinstance(left, TextTower):
            self.ecosystem = "vector"
            self.usage = f"query-index, {left.modality}s"

    @classmethod
    def from_folder(cls, folder: Path) -> IndexEncoder:
        """Load a folder that `save` wrote."""
        path = folder / DUALENC_FILE
        config = read_json_object(path, {"queries": str, "documents": dict})
        check_fields(config, {"encoder": str} if "encoder" in config else {}, path)
        trained_ids = read_json_object(folder / TRAINED_FILE, {"ids": list})["ids"]
        if not all(isinstance(document_id, str) for document_id in trained_ids):
            raise DualencError(
                "ids must be strings",
                fix="save the model again",
                where=folder / TRAINED_FILE,
            )
        queries: DualEncoder
        options: dict[str, Any] = {}
        if "encoder" in config:
            queries = _open_encoder(folder, config["encoder"])
            options["modality"] = config["queries"]
            if (folder / VECTOR_FOLDER).is_dir():
                options["mapping"] = VectorEncoder.from_folder(folder / VECTOR_FOLDER).left
        elif config["queries"] == "vector":
            queries = VectorEncoder.from_folder(folder / VECTOR_FOLDER)
        else:
            queries = TextEncoder(str(folder))
        try:
            model = cls(queries, Provenance.from_entries(config["documents"]), **options)
        except DualencError as error:
            raise DualencError(str(error), where=path) from None
        model.trained_ids = trained_ids
        return model

    def write(self, folder: Path) -> None:
        """Write the query tower and the document facts.

        Texts: a sentence-transformers folder. Images, and texts of an image-text model: the whole
        model in the subfolder `encoder`, and the map, if any, in `queries`.
        """
        documents = self.documents.entries()
        config = {"kind": self.kind, "queries": self.left.modality, "documents": documents}
        if self.source is not None:
            config["encoder"] = self.source.kind
        write_json(folder / DUALENC_FILE, config)
        write_json(folder / TRAINED_FILE, {"ids": self.trained_ids})
        if isinstance(self.left, TextTower):
            from dualenc.encoders.sentence_model import save_model

            prompt = self.left.prepare.prompt
            save_model(
                {"query": self.left.parts},
                folder,
                prompts={**self.prompts, "query": prompt},
                default_prompt_name="query" if prompt else None,
                truncate_dim=self.left.truncate_dim,
            )
        elif self.source is not None:
            (folder / ENCODER_FOLDER).mkdir()
            # Its query tower is the trained one.
            self.source.write(folder / ENCODER_FOLDER)
        vectors = self.left.mapping if isinstance(self.left, MappedTower) else self.left
        if isinstance(vectors, VectorTower):
            weights = {f"left.{name}": value for name, value in vectors.state_dict().items()}
            (folder / VECTOR_FOLDER).mkdir()
            write_adapters(vectors, self.right, weights, folder / VECTOR_FOLDER)

    def query_towers(self) -> dict[Modality, Tower]:
        """Return the towers that encode queries, by modality.

        An image-text model also encodes queries of the other modality, as before the training.
        """
        towers = {self.left.modality: self.left}
        if self.source is None:
            return towers
        return {tower.modality: tower for tower in (self.source.left, self.source.right)} | towers

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Move the unregistered part of the model to a device, too."""
        if self.source is not None:
            self.source._apply(*args, **options)
        return super()._apply(*args, **options)

    def encode(self, items: Sequence[Any], side: Side = "left", **options: Any) -> np.ndarray:
        """Encode N queries, or scale N document vectors (D,) to length one.

        Args:
            items: queries, or vectors of documents.
            side: "left" for queries, "right" for document vectors.
            options: further arguments of `DualEncoder.encode`.
        """
        if side == "right" and isinstance(items, Sequence) and items and isinstance(items[0], str):
            model = " ".join((self.documents.model or "the model of the index").split())
            raise DualencError(
                "documents are the vectors of the index",
                fix=f"embed new ones with {model}",
            )
        return super().encode(items, side, **options)

    def model_card(self, name: str, card: Mapping[str, Any], on_hub: bool = False) -> str:
        """Render the README.md of the model folder, with a section about the documents.

        Args:
            name: name of the model: a folder, or owner/name on the hub.
            card: additional content, see `render_card`.
            on_hub: True if `name` is a repository of the hub.
        """
        model = self.documents.model
        made_by = f"the model {model}" if model else "an unknown model"
        text = (
            f"The documents are the vectors of an index ({self.documents.metric}), made by "
            f"{made_by}. Only the query tower was trained, so the index stays valid, and new "
            f"documents must be embedded with its model. {TRAINED_FILE} lists the documents that "
            "were relevant in training."
        )
        if self.source is not None:
            text += f" The folder {ENCODER_FOLDER} holds the whole {self.source.kind} model."
        return super().model_card(name, {"documents": text, **card}, on_hub)


def _query_tower(
    queries: DualEncoder,
    documents: Provenance,
    modality: Modality | None,
    mapping: VectorTower | None,
) -> Tower:
    """Return the tower of queries, with the map or cut to the size of the documents.

    The arguments are those of `IndexEncoder`.
    """
    if mapping is not None and isinstance(queries, TextEncoder):
        # sentence-transformers has modules for the map.
        queries, mapping = with_map(queries, mapping), None
    is_text = isinstance(queries, ImageTextEncoder) and modality != "image"
    tower = queries.right if is_text else queries.left
    if modality not in (None, tower.modality):
        raise DualencError(
            f"the queries are of kind {modality}, but the model encodes {tower.modality}",
            fix="give queries of that kind, or another model",
        )
    dim = documents.dim
    if isinstance(tower, ClipImageTower | ClipTextTower | ProjectedTower):
        output: Output = documents.output or "embedding"
        given = tower.feature_dim if output == "features" else tower.dim
        if mapping is None and (dim < given or output == "features"):
            mapping = VectorTower("identity", dim, dim, None)
        return tower if mapping is None else MappedTower(tower, mapping, output)
    if mapping is not None:
        raise DualencError(
            "the queries are vectors, or mapped already",
            fix="leave the map out, or give a model of texts or images",
        )
    if isinstance(tower, TextTower) and dim < tower.dim:
        return TextTower(tower.parts, tower.prepare, truncate_dim=dim)
    if not isinstance(tower, TextTower | VectorTower | MappedTower):
        raise DualencError(
            f"queries are encoded by {type(tower).__name__}",
            fix="give an encoder of this package, of texts, images or vectors",
        )
    return tower


def _open_encoder(folder: Path, kind: str) -> DualEncoder:
    """Load the image-text or image model that `IndexEncoder.write` wrote."""
    encoder = folder / ENCODER_FOLDER
    model: DualEncoder
    if kind == "image-text":
        model = ImageTextEncoder(str(encoder))
    elif kind == "image":
        model = ImageEncoder.from_folder(encoder)
    else:
        raise DualencError(
            f"unknown encoder {kind[:40]!r}",
            fix="upgrade dualenc if a later version wrote it",
            where=folder / DUALENC_FILE,
        )
    # The model card is that of the whole folder.
    model.base = base_metadata(str(folder))
    return model


def with_map(text: TextEncoder, tower: VectorTower) -> TextEncoder:
    """Append a trained map of query vectors to the query tower of a text model.

    The result shares the transformer's weights with `text`; the map's weights are copies. Documents
    are encoded as before, except that they are truncated if the map takes fewer components than
    `text` gives, and also mapped if the map changes the size of the vectors.

        with_map(TextEncoder("me/base"), load_model("runs/adapted/model").left)

    Args:
        text: model that made the vectors; the map was trained on their leading components (B,
            input_dim).
        tower: trained tower of kind "dense", "linear" or "identity".

    Raises:
        DualencError: the sizes do not fit, the text model has a truncate_dim, or the tower is of
            kind "mlp".
    """
    from sentence_transformers.sentence_transformer.modules import Dense

    if text.left.truncate_dim is not None:
        raise DualencError(
            f"the text model truncates its vectors to {text.left.truncate_dim} numbers, "
            "after the place of a map",
            fix="give a model without truncate_dim",
        )
    dim = tower.prepare.input_dim
    if dim > text.dim:
        raise DualencError(
            f"the map takes vectors of {dim} numbers, but the text model gives {text.dim}",
            fix="give the model that made the vectors",
        )
    device = next(text.parameters()).device
    first: list[nn.Module] = []
    if dim < text.dim:
        # A rectangular identity selects the leading components.
        weight = torch.eye(dim, text.dim, device=device)
        first = [
            Dense(text.dim, dim, bias=False, activation_function=nn.Identity(), init_weight=weight)
        ]
    modules = [*first, *(module.to(device) for module in tower.as_modules())]
    left = TextTower([*text.left.parts, *modules], text.left.prepare)
    # Documents must end in the space of the mapped queries, so a map that changes the size applies
    # to them too.
    right = text.right
    if tower.dim != text.dim:
        right = TextTower([*right.parts, *(first if tower.dim == dim else modules)], right.prepare)
    return text.with_towers(left, right)


def interpolate(original: nn.Module, adapted: nn.Module, keep: float) -> dict[str, Tensor]:
    """Average two models' weights, keep·original + (1 − keep)·adapted, to reduce forgetting.

    WiSE-FT (Wortsman et al. 2022, arXiv:2109.01903, equation 1). Integer buffers are taken from
    `adapted`. LoRA adapters are merged into the weights, so the result fits a model that was saved
    and loaded.

        model = load_model("runs/adapted/model")
        model.left.load_state_dict(interpolate(load_model("me/base").left, model.left, keep=0.5))

    Args:
        original: model before training.
        adapted: model after training, of the same structure.
        keep: share of the original, 0 to 1.

    Returns:
        The averaged state dict, in float32.

    Raises:
        DualencError: names or shapes of the weights differ, or keep is not in [0, 1].
    """
    if not 0 <= keep <= 1:
        raise DualencError(f"keep is {keep}", fix="give a share of the original model from 0 to 1")
    # Adapters would have to be interpolated as the product BA, not as A and B.
    before = merge_adapters(original).state_dict()
    after = merge_adapters(adapted).state_dict()
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in state.items()} for state in (before, after)
    ]
    differing = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
    if differing:
        raise DualencError(
            f"the two models differ in {differing[0]}",
            fix="give the model that the adapted one was trained from",
        )
    state = {}
    for name, weight in after.items():
        if weight.is_floating_point():
            weight = keep * before[name].float().to(weight.device) + (1 - keep) * weight.float()
        state[name] = weight
    return state
