"""MTEB adapter: models in the Massive Text (and Image) Embedding Benchmark.

Muennighoff et al. 2022 (arXiv:2210.07316); Xiao et al. 2025 (arXiv:2504.10471).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualenc.data.corpus import Corpus
from dualenc.data.identity import digest_of
from dualenc.encoders.dual import SIDES, DualEncoder, Tower, unit_norm
from dualenc.encoders.hub import hub_name
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.search.embed import embed, tower_checksum
from dualenc.types import Modality, Side

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import ModelMeta
    from mteb.types import PromptType

MODALITIES: tuple[Modality, ...] = ("text", "image")
SIDE_OF: dict[str | None, Side] = {"query": "left", "document": "right"}
"""The side of each type of prompt in MTEB."""


class MTEBEncoder:
    """Adapter for `mteb.evaluate(model, tasks)`: the `EncoderProtocol` of mteb 2, for texts, images and both.

    The left tower encodes queries and the right one documents, each with its prompt. In an image-text model the text
    tower encodes texts, the image tower images, and an item of both is the sum of its two vectors, at length one. A
    text model's folder may hold prompts for a task, under the names that mteb defines (task or type of task, with or
    without `-query` or `-document`); they replace the side's prompt.

    Args:
        model_name: a model, its folder, or any name that `load_model` takes.
        revision: under which mteb keeps results; a checksum of the weights and prompts if None, so that the results of
            an earlier model in the same folder are never taken for those of this one.
        device: where to put the model; None: a GPU if there is one, and a model that is loaded already stays.
        dim: keep only the first components, scaled to length one again; None keeps all.
        side: of a text model whose towers or prompts differ: which side encodes the texts of tasks that tell no queries
            from documents, such as classification and similarity. The E5 models want "left" there.

    Raises:
        DualencError: mteb is missing, the model does not load or takes neither texts nor images, or dim does not fit.
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str] | DualEncoder,
        revision: str | None = None,
        *,
        device: str | None = None,
        dim: int | None = None,
        side: Side = "right",
    ) -> None:
        try:
            from mteb.models import ModelMeta
            from mteb.models.model_meta import ScoringFunction
        except ImportError:
            raise DualencError("MTEB needs the package mteb: pip install 'dualenc[mteb]'") from None
        if isinstance(model_name, DualEncoder):
            self.model = model_name if device is None else model_name.to(device)
            name = "dualenc/model"
        else:
            self.model = load_model(model_name, device or ("cuda" if torch.cuda.is_available() else "cpu"))
            # mteb names models owner/name: runs/mine/model is mine/model.
            name = hub_name(model_name) or "/".join(Path(model_name).absolute().parts[-2:])
            if "/" not in name:
                name = f"dualenc/{name}"
        towers = [self.model.tower(each) for each in SIDES]
        self.modalities = [each for each in MODALITIES if any(tower.modality == each for tower in towers)]
        if not self.modalities:
            raise DualencError(f"{name}: takes vectors, and MTEB has texts and images; evaluate the whole model")
        if dim is not None and not 1 <= dim <= self.model.dim:
            raise DualencError(f"dim is {dim}: give 1 to {self.model.dim}, the size of the model's vectors")
        if side not in SIDES:
            raise DualencError(f"side is {side!r}: choose 'left' or 'right'")
        self.dim = dim
        self.side = side
        self.prompts: dict[str, str] = getattr(self.model, "prompts", {})
        texts = [tower for tower in towers if tower.modality == "text"]
        self.mteb_model_meta: ModelMeta = ModelMeta.create_empty(
            {
                "name": name,
                "revision": revision or digest_of([*map(tower_checksum, towers), side, repr(self.prompts)])[:16],
                "modalities": self.modalities,
                "n_parameters": self.model.num_parameters,
                "embed_dim": dim or self.model.dim,
                "max_tokens": next((getattr(tower.prepare, "max_length", None) for tower in texts), None),
                "similarity_fn_name": ScoringFunction.COSINE,
                "framework": ["PyTorch"],
                "use_instructions": any(getattr(tower.prepare, "prompt", "") for tower in texts),
                "experiment_kwargs": {} if dim is None else {"dim": dim},
            }
        )

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: TaskMetadata,
        hf_split: str = "",
        hf_subset: str = "",
        prompt_type: PromptType | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = True,
        **options: Any,
    ) -> np.ndarray:
        """Encode the N items of all batches to (N, D) unit-norm float32.

        Args:
            inputs: batches, such as a DataLoader gives, with lists under "text", "image" or both.
            task_metadata: of the task; its name and type choose among the prompts.
            hf_split, hf_subset: not used.
            prompt_type: "query", "document", or None where the task knows no such difference.
            batch_size: texts per forward pass; images come in the batches that `inputs` makes.
            show_progress_bar: of texts.
            options: whatever else mteb passes on, of which "precision" must be float32.

        Raises:
            DualencError: the model takes none of the modalities, or a precision is asked for that it does not give.
        """
        if options.get("precision") not in (None, "float32"):
            raise DualencError(f"precision is {options['precision']!r}: vectors are float32 here; leave it out")
        texts: list[str] = []
        pictures: list[np.ndarray] = []
        for batch in inputs:
            if not any(each in batch for each in self.modalities):
                takes = " and ".join(self.modalities)
                raise DualencError(f"task {task_metadata.name} has {', '.join(batch)}, and the model takes {takes}")
            if "text" in batch and "text" in self.modalities:
                texts.extend(batch["text"])
            if "image" in batch and "image" in self.modalities:
                images = [image.convert("RGB") for image in batch["image"]]
                pictures.append(self._embed(self._tower("image", prompt_type), images, len(images), False))
        parts = [np.concatenate(pictures)] if pictures else []
        if texts or not pictures:
            tower = self._text_tower(task_metadata, prompt_type)
            parts.append(self._embed(tower, texts, batch_size, show_progress_bar))
        return parts[0] if len(parts) == 1 else unit_norm(torch.from_numpy(sum(parts))).numpy()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Cosines of all (N, D) with all (M, D) vectors, (N, M)."""
        first, second = (torch.atleast_2d(torch.as_tensor(each)) for each in (embeddings1, embeddings2))
        return unit_norm(first) @ unit_norm(second).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Cosines (N,) of row i of (N, D) with row i of (N, D)."""
        first, second = (torch.atleast_2d(torch.as_tensor(each)) for each in (embeddings1, embeddings2))
        return (unit_norm(first) * unit_norm(second)).sum(dim=1)

    def _tower(self, modality: Modality, prompt_type: PromptType | None) -> Tower:
        """The tower of a modality: the requested side's, if both sides have the modality."""
        side = self.side if prompt_type is None else SIDE_OF.get(prompt_type.value, self.side)
        other: Side = "left" if side == "right" else "right"
        return next(tower for tower in map(self.model.tower, (side, other)) if tower.modality == modality)

    def _text_tower(self, task_metadata: TaskMetadata, prompt_type: PromptType | None) -> Tower:
        """The tower for texts, with the prompt that the folder has for this task, if there is one."""
        # mteb is an optional package.
        from mteb.models.abs_encoder import get_prompt_name

        tower = self._tower("text", prompt_type)
        name = get_prompt_name(self.prompts, task_metadata, prompt_type)
        if name in (None, *SIDE_OF):
            return tower
        # The copies share weights and tokenizer with the model, whose own prompt stays.
        tower = copy.copy(tower)
        prepare = copy.copy(tower.prepare)
        prepare.prompt = self.prompts[name]  # type: ignore[attr-defined, index]
        tower.prepare = prepare
        return tower

    def _embed(self, tower: Tower, items: list[Any], batch_size: int, progress: bool) -> np.ndarray:
        corpus = Corpus([str(number) for number in range(len(items))], items, tower.modality)
        embedded = embed(
            tower, corpus, batch_size=batch_size, dim=self.dim, num_workers=0, on_error="raise", progress=progress
        )
        return np.asarray(embedded.vectors)
