"""Two towers that share a space: what is trained, saved and loaded."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import huggingface_hub
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm.auto import tqdm

from dualenc.encoders.batchnorm import keep_frozen_statistics
from dualenc.encoders.card import render_card
from dualenc.encoders.lora import without_weights
from dualenc.errors import BadSample, DualencError, explain
from dualenc.io.decoding import rgb_item
from dualenc.io.files import atomic_folder
from dualenc.io.targets import check_outside
from dualenc.types import Inputs, Modality, Side

logger = logging.getLogger("dualenc.encoders")

SIDES: tuple[Side, Side] = ("left", "right")

Kind = Literal["image-text", "query-document", "image", "vector", "query-index"]

DUALENC_FILE = "dualenc.json"
"""What a model folder says beyond its ecosystem's own files; absent where there is nothing to
add."""

MODEL_FILES = (DUALENC_FILE, "modules.json", "open_clip_config.json", "config.json")
"""Files of which every model folder has one."""

TOKENS_PER_WINDOW = 2**21
"""Tokens in a window of texts, with padding: 50 MB for BERT's three inputs."""
DEFAULT_LENGTH = 512
VECTORS_PER_WINDOW = 2**12

ITEM_TYPES: dict[Modality, tuple[tuple[type, ...], str]] = {
    "text": ((str,), "a str"),
    "image": ((Image.Image,), "a PIL image"),
    "vector": ((np.ndarray, Tensor), "an array (D,) of finite numbers"),
}

ZERO_VECTOR: dict[Modality, str] = {
    "text": "the model knows none of the text's tokens",
    "image": "the model sees nothing in the image",
    "vector": "the vector holds zeros alone",
}
"""Why the vector of an item is zero, which is similar to nothing."""


class Prepare:
    """Raw items to the tensors of one tower: picklable and without weights, so DataLoader workers
    can run it."""

    modality: Modality

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        """Collate B raw items: `str`, RGB `PIL.Image` or arrays (input_dim,); the first dimension
        of every result is B.

        `seeds` are None for evaluation; otherwise one per item, of which an image's augmentation is
        a function.
        """
        raise NotImplementedError

    def join(self, parts: Sequence[Inputs]) -> Inputs | None:
        """Several prepared batches as one, in their order; None where that gains nothing, as with
        images."""
        return None

    def cache_tokens(self) -> None:
        """Cache what preparing an item gives, for items that come again, as in training; texts
        only."""


class Tower(nn.Module):
    """A module that encodes prepared inputs to unit vectors (B, dim); `feature_dim` is the size of
    its features."""

    modality: Modality
    dim: int
    feature_dim: int
    prepare: Prepare

    def train(self, mode: bool = True) -> Tower:
        """Switch between training and evaluation mode; frozen BatchNorm keeps its statistics."""
        super().train(mode)
        keep_frozen_statistics(self)
        return self

    def pack(self, inputs: Inputs, one_by_one: bool = False) -> Inputs:
        """B prepared items, on the CPU, without padding where the tower takes them so; not one row
        per item.

        `one_by_one`: the tower is not compiled and computes on a CPU, where a loop over items is
        cheap.
        """
        return inputs

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B prepared items to (B, D) unit-norm float32, also under autocast."""
        raise NotImplementedError

    def features(self, inputs: Inputs) -> Tensor:
        """The features (B, feature_dim) that probes use: the vectors themselves unless a projector
        follows."""
        return self(inputs)


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model; a config.json alone may be any program's."""
    if any((folder / name).is_file() for name in MODEL_FILES if name != "config.json"):
        return True
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


class DualEncoder(nn.Module):
    """A left tower (queries, images) and a right one (documents, texts); they may share weights.

    Args:
        left: tower of the left items.
        right: tower of the right items: the same object, one over the same weights, or an
            independent one.
        kind: which kind of model this is.
        views: whether both sides of a pair are augmentations of one image.
    """

    left: Tower
    right: Tower
    ecosystem: str | None = None  # the folder's format, one of `card.LIBRARIES`; None: as the kind
    example_side: Side = "right"  # of the model card's example
    usage: str | None = None  # the example of the model card's template; None: as the format
    base: Mapping[str, str] = MappingProxyType(
        {}
    )  # `base_model` and `license` of the card, where known

    def __init__(self, left: Tower, right: Tower, kind: Kind, views: bool = False) -> None:
        super().__init__()
        if left.dim != right.dim:
            raise DualencError(
                f"left tower: dimension {left.dim}, right tower {right.dim}; use one size"
            )
        self.kind = kind
        self.views = views
        self.left = left
        weights = [p.data_ptr() for p in left.parameters()]
        if left is right or (weights and weights == [p.data_ptr() for p in right.parameters()]):
            # Registered once, so parameters() and state_dict() name each shared weight once.
            object.__setattr__(self, "right", right)
        else:
            self.right = right
        self.eval()

    @property
    def dim(self) -> int:
        """D, the size of the vectors."""
        return self.left.dim

    @property
    def shares_weights(self) -> bool:
        """Whether both towers have the same weights."""
        return "right" not in self._modules

    @property
    def num_parameters(self) -> int:
        """Number of weights, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def num_trainable_parameters(self) -> int:
        """Number of weights that training changes."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def train(self, mode: bool = True) -> DualEncoder:
        """Switch between training and evaluation mode, on both sides."""
        super().train(mode)
        self.right.train(mode)
        return self

    def tower(self, side: Side) -> Tower:
        """The tower of a side, "left" or "right"."""
        if side not in SIDES:
            raise DualencError(f"side is {str(side)[:40]!r}: choose 'left' or 'right'")
        return self.left if side == "left" else self.right

    def forward(self, side: Side, inputs: Inputs) -> Tensor:
        """Encode B prepared items of one side to (B, D) unit-norm float32, with gradient."""
        return self.tower(side)(inputs)

    def encode(
        self,
        items: Sequence[Any],
        side: Side = "left",
        *,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> np.ndarray:
        """Encode N texts, `PIL.Image`s or vectors (D,) to (N, D) unit vectors, float32.

        Args:
            items: a sequence.
            side: "left" encodes queries and images, "right" documents and texts.
            batch_size: items per forward pass.
            show_progress_bar: by default for more than 1,000 items.
        """
        tower = self.tower(side)
        is_sequence = hasattr(items, "__len__") and hasattr(items, "__getitem__")
        if not is_sequence or isinstance(items, (str, bytes, Mapping)):
            kind = type(items).__name__
            raise DualencError(f"items is of type {kind}; give a list of texts, images or vectors")
        if batch_size < 1:
            raise DualencError(f"batch_size is {batch_size}; give at least 1")
        shows_bar = len(items) > 1000 if show_progress_bar is None else show_progress_bar
        was_training = tower.training
        tower.eval()
        try:
            with (
                torch.inference_mode(),
                tqdm(total=len(items), desc="encode", disable=not shows_bar) as bar,
            ):
                parts = list(_encode_windows(tower, items, batch_size, bar))
        finally:
            tower.train(was_training)
        return np.concatenate(parts) if parts else np.empty((0, self.dim), np.float32)

    def encode_query(self, items: Sequence[Any], **options: Any) -> np.ndarray:
        """Encode queries, with the prompt of queries; options as of `encode`."""
        return self.encode(items, "left", **options)

    def encode_document(self, items: Sequence[Any], **options: Any) -> np.ndarray:
        """Encode documents, with the prompt of documents; options as of `encode`."""
        return self.encode(items, "right", **options)

    def save(self, folder: str | os.PathLike[str], card: dict[str, Any] | None = None) -> None:
        """Write the model folder: the ecosystem's own format, weights as safetensors, and a model
        card.

        `card` is what the README says beyond the facts, see `render_card`. Only a model is
        replaced.
        """
        folder = Path(folder)
        check_outside(folder, is_part=True)
        with atomic_folder(folder, is_model, "model") as new:
            new.mkdir()
            self.write(new)
            (new / "README.md").write_text(
                self.model_card(folder.name, card or {}), encoding="utf-8"
            )

    def write(self, folder: Path) -> None:
        """Write configuration, preprocessing and weights into an empty folder."""
        raise NotImplementedError

    def check_savable(self) -> None:
        """Raise a `DualencError` where a library refuses to save this model, before it is
        trained."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                without_weights(self).write(Path(folder))
            except Exception:
                # A model of one's own may write what it computes of its weights.
                shutil.rmtree(folder)
                Path(folder).mkdir()
                with explain("the model cannot be saved", "correct its config.json"):
                    self.write(Path(folder))

    def push_to_hub(
        self, repo: str, card: dict[str, Any] | None = None, private: bool = True
    ) -> str:
        """Upload the model to the Hugging Face hub and return the address of the commit; log in
        first: `hf auth login`.

        Args:
            repo: owner/name; a new one is made if needed.
            card: as for `save`.
            private: whether a new repository is.
        """
        failure = explain(
            f"{repo}: could not be uploaded", "give owner/name, and log in: hf auth login"
        )
        with failure, tempfile.TemporaryDirectory() as folder:
            huggingface_hub.create_repo(repo, private=private, exist_ok=True)
            self.write(Path(folder))
            text = self.model_card(repo, card or {}, on_hub=True)
            Path(folder, "README.md").write_text(text, encoding="utf-8")
            commit = huggingface_hub.upload_folder(repo_id=repo, folder_path=folder)
        return str(commit.commit_url)

    def model_card(self, name: str, card: Mapping[str, Any], on_hub: bool = False) -> str:
        """The text of the model folder's README.md; the arguments are those of `render_card`."""
        side = self.example_side
        items = {"text": '["a text"]', "image": "images", "vector": "rows_of_an_array"}
        return render_card(
            name,
            {
                "Kind": f"{self.kind} dual encoder",
                "Vector size": str(self.dim),
                "Weights": f"{self.num_parameters:,}",
            },
            {**self.base, **card},
            model_format=self.ecosystem or self.kind,
            usage=self.usage or self.ecosystem or self.kind,
            example=f'{items[self.tower(side).modality]}, "{side}"',
            on_hub=on_hub,
        )

    def set_temperature(self, temperature: float) -> None:
        """Store the temperature that training ended with, in formats with a place for it (CLIP)."""


def window_rows(tower: Tower, batch_size: int) -> int:
    """Items that are prepared at once, a whole number of batches: of images one, of texts as their
    length allows."""
    batches = 1
    if tower.modality == "text":
        max_length = getattr(tower.prepare, "max_length", DEFAULT_LENGTH)
        batches = int(TOKENS_PER_WINDOW // (max_length * batch_size))
    elif tower.modality == "vector":
        batches = VECTORS_PER_WINDOW // batch_size
    return batch_size * max(1, batches)


def _encode_windows(
    tower: Tower, items: Sequence[Any], batch_size: int, bar: tqdm
) -> Iterator[np.ndarray]:
    """Vectors (n, D) of one window of items after another; within it, texts of similar length share
    a batch."""
    device = next(itertools.chain(tower.parameters(), tower.buffers())).device
    num_rows = window_rows(tower, batch_size)
    # Iterated, because the labels of a pandas Series are no positions.
    numbered = enumerate(items)
    while window := list(itertools.islice(numbered, num_rows)):
        raw = []
        for number, item in window:
            check_item(item, tower.modality, f"item {number}")
            raw.append(rgb_item(item, f"item {number}"))
        inputs = tower.prepare(raw)
        chunks = chunk_rows(inputs, batch_size)
        parts = []
        for rows in chunks:
            batch = {name: value.to(device) for name, value in take(inputs, rows).items()}
            parts.append(tower(batch).float().cpu())
            bar.update(len(rows))
        vectors = torch.cat(parts)
        if not torch.isfinite(vectors).all():
            raise DualencError("the model gives vectors that are not finite; check its weights")
        if num_zero := int((~vectors.any(dim=1)).sum()):
            reason = ZERO_VECTOR[tower.modality]
            logger.warning("%d of %d vectors are zero: %s", num_zero, len(vectors), reason)
        yield vectors[torch.argsort(torch.cat(chunks))].numpy()


def check_item(item: Any, modality: Modality, name: str = "an item") -> None:
    """Refuse a raw item that a tower cannot take: no `str`, no `PIL.Image`, or no array (D,) of
    finite numbers."""
    kinds, needed = ITEM_TYPES[modality]
    valid = isinstance(item, kinds)
    if valid and modality == "text" and not item.isascii():
        try:
            item.encode()
        except UnicodeEncodeError:
            raise BadSample(
                f"the text {item[:40]!r} is not valid Unicode; write it in UTF-8"
            ) from None
    if valid and modality == "vector":
        vector = np.asarray(item)
        valid = vector.ndim == 1 and vector.dtype.kind in "fiu" and bool(np.isfinite(vector).all())
    if not valid:
        shown = " ".join(repr(item).split())[:40]
        raise BadSample(f"{name} is {shown}, where {needed} is needed; correct or remove it")


def check_items(items: Sequence[Any], modality: Modality) -> None:
    """Refuse a batch with an item that a tower cannot take."""
    for item in items:
        check_item(item, modality)


def unit_norm(vectors: Tensor) -> Tensor:
    """Scale (B, D) vectors of any floating dtype to length one, in float32."""
    return nn.functional.normalize(vectors.to(torch.float32), dim=-1)


def num_rows(inputs: Inputs) -> int:
    """Number of prepared items; 0 for {}."""
    return len(next(iter(inputs.values()))) if inputs else 0


def chunk_rows(inputs: Inputs, chunk_size: int) -> list[Tensor]:
    """Row numbers of each chunk: texts of similar length together, longest first; images in their
    order."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return list(torch.arange(num_rows(inputs)).split(chunk_size))
    lengths = mask.sum(dim=1)
    return list(torch.argsort(lengths, descending=True, stable=True).split(chunk_size))


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some rows of prepared items, without the columns that are padding in all of them."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return {name: tensor[rows] for name, tensor in inputs.items()}
    used = torch.nonzero(mask[rows].any(dim=0)).reshape(-1)
    columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(None)
    return {
        name: t[rows, columns] if t.shape == mask.shape else t[rows] for name, t in inputs.items()
    }
