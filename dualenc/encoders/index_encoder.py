"""Query encoders for an existing index. Document vectors are fixed and never re-encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualenc.encoders.dual import DUALENC_FILE, DualEncoder
from dualenc.encoders.lora import merge_adapters
from dualenc.encoders.text import TextEncoder, TextTower
from dualenc.encoders.vector import VectorEncoder, VectorTower, write_adapters
from dualenc.errors import DualencError
from dualenc.io.files import write_json
from dualenc.io.provenance import Provenance
from dualenc.io.reading import read_json_object
from dualenc.types import Side

TRAINED_FILE = "trained_documents.json"
VECTOR_FOLDER = "queries"
"""Subfolder with the adapter of query vectors."""

DEFAULT_FACTS = {"model": None, "model_checksum": None, "side": "right", "metric": "cosine"}
"""Facts about documents of which nothing is known but their size, in the order of the file."""


class IndexEncoder(DualEncoder):
    """A trainable query tower over the fixed document vectors of an index.

    Training changes queries only, so the index stays valid.

        IndexEncoder(TextEncoder("me/base"), open_documents("index").provenance)

    Args:
        queries: text or vector encoder, whose left tower is trained and right tower is not used. If
            the index holds only the leading components of a text model's vectors, the tower
            truncates its own to the same size (`truncate_dim`).
        documents: record of the document vectors: `dim`, and optionally `model` and
            `model_checksum` of the encoder that made them, with its `side` and their `metric`.

    Attributes:
        documents: these entries of the record.
        trained_ids: ids of the documents that were relevant in training; saved with the model.

    Raises:
        DualencError: the queries are neither texts nor vectors, or differ from the documents in
            size.
    """

    left: TextTower | VectorTower
    right: VectorTower
    example_side = "left"

    def __init__(self, queries: DualEncoder, documents: Provenance) -> None:
        facts = documents.only([*DEFAULT_FACTS, "dim"]).entries()
        documents = Provenance.from_entries(DEFAULT_FACTS | facts)
        documents.check("documents", [*DEFAULT_FACTS, "dim"], "correct it")
        dim = documents.dim
        left = queries.left
        if not isinstance(left, TextTower | VectorTower):
            raise DualencError(
                f"queries are {left.modality}s",
                fix="give an encoder of texts or vectors",
            )
        # Documents are vectors already.
        right = VectorTower("identity", dim, dim, None)
        if isinstance(left, TextTower) and dim < left.dim:
            left = TextTower(left.parts, left.prepare, truncate_dim=dim)
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
        if isinstance(left, VectorTower):
            self.ecosystem = "vector"
            self.usage = "query-index, vectors"

    @classmethod
    def from_folder(cls, folder: Path) -> IndexEncoder:
        """Load a folder that `save` wrote."""
        path = folder / DUALENC_FILE
        config = read_json_object(path, {"queries": str, "documents": dict})
        trained_ids = read_json_object(folder / TRAINED_FILE, {"ids": list})["ids"]
        if not all(isinstance(document_id, str) for document_id in trained_ids):
            raise DualencError(
                "ids must be strings",
                fix="save the model again",
                where=folder / TRAINED_FILE,
            )
        queries: DualEncoder
        if config["queries"] == "vector":
            queries = VectorEncoder.from_folder(folder / VECTOR_FOLDER)
        else:
            queries = TextEncoder(str(folder))
        try:
            model = cls(queries, Provenance.from_entries(config["documents"]))
        except DualencError as error:
            raise DualencError(str(error), where=path) from None
        model.trained_ids = trained_ids
        return model

    def write(self, folder: Path) -> None:
        """Write the query tower (texts: a sentence-transformers folder) and the document facts."""
        documents = self.documents.entries()
        config = {"kind": self.kind, "queries": self.left.modality, "documents": documents}
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
        else:
            (folder / VECTOR_FOLDER).mkdir()
            write_adapters(self.left, self.right, self.state_dict(), folder / VECTOR_FOLDER)

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
        return super().model_card(name, {"documents": text, **card}, on_hub)


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
