"""Dual encoders: two towers that share an embedding space."""

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
"""Settings beyond the ecosystem's own files; absent if there are none."""

MODEL_FILES = (DUALENC_FILE, "modules.json", "open_clip_config.json", "config.json")
"""Every model folder has one of these."""

TOKENS_PER_WINDOW = 2**21
"""Tokens per window of texts, padding included: 50 MB for BERT's three inputs."""
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
    "vector": "the vector consists of zeros",
}
"""Reasons for a zero vector, whose similarity to everything is 0."""


class Prepare:
    """Preprocessing for one tower: raw items in, tensors out.

    Picklable and weight-free so DataLoader workers can run it. Attributes that are strings or
    numbers are part of the model's checksum.

        class Letters(Prepare):
            modality = "text"

            def __call__(self, items, seeds=None):
                return {"letter": torch.tensor([ord(text[0]) for text in items])}
    """

    modality: Modality

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        """Collate B raw items to tensors whose first dimension is B.

        Args:
            items: B texts (`str`), RGB images (`PIL.Image`) or vectors (input_dim,).
            seeds: one seed per item for random augmentation, which must be a pure function of item
                and seed; None for evaluation.
        """
        raise NotImplementedError

    def join(self, parts: Sequence[Inputs]) -> Inputs | None:
        """Concatenate prepared batches in order; None if concatenating does not help (images)."""
        return None

    def cache_tokens(self) -> None:
        """Cache the tokens of repeated items, as in training; only texts have tokens."""


class Tower(nn.Module):
    """A module that encodes prepared inputs to unit vectors (B, dim).

    Subclasses set `modality`, `dim`, `feature_dim` (size of the features that probes use) and
    `prepare`, and implement `forward`.

        class LetterTower(Tower):
            modality, dim, feature_dim, prepare = "text", 8, 8, Letters()

            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(128, 8)

            def forward(self, inputs):
                return unit_norm(self.table(inputs["letter"]))
    """

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
        """Remove padding from B prepared items, if the tower supports packing.

        Args:
            inputs: prepared items on the CPU.
            one_by_one: the tower runs uncompiled on a CPU, where a loop over items is cheap.

        Returns:
            The items in fewer rows, or the inputs unchanged.
        """
        return inputs

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B prepared items to (B, D) unit-norm float32, also under autocast."""
        raise NotImplementedError

    def features(self, inputs: Inputs) -> Tensor:
        """Return the features (B, feature_dim) for probes, by default the vectors themselves."""
        return self(inputs)


def is_model(folder: Path) -> bool:
    """Return True if a folder holds a model; a config.json alone could belong to any program."""
    if any((folder / name).is_file() for name in MODEL_FILES if name != "config.json"):
        return True
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


class DualEncoder(nn.Module):
    """A left tower (queries, images) and a right tower (documents, texts); they may share weights.

    Subclasses build the towers and write their model folder. Any two towers of one dimension work:

        model = DualEncoder(LetterTower(), LetterTower(), kind="query-document")
        similarities = model.encode(["apple"]) @ model.encode(["ant", "bee"], "right").T

    Args:
        left: tower of the left items.
        right: tower of the right items: the same object, another one over the same weights, or an
            independent one.
        kind: kind of model, by which recipes and folders name it.
        views: True if both sides encode views of the same image.
    """

    left: Tower
    right: Tower
    ecosystem: str | None = None
    """Format of the folder, a key of `card.LIBRARIES`; None for that of the kind."""
    example_side: Side = "right"
    """Side that the model card's example encodes."""
    usage: str | None = None
    """Example in the model card's template; None for that of the format."""
    base: Mapping[str, str] = MappingProxyType({})
    """`base_model` and `license` of the model card, if known."""

    def __init__(self, left: Tower, right: Tower, kind: Kind, views: bool = False) -> None:
        super().__init__()
        if left.dim != right.dim:
            raise DualencError(
                f"the left tower has dimension {left.dim}, the right tower {right.dim}",
                fix="use the same size",
            )
        self.kind = kind
        self.views = views
        self.left = left
        weights = [p.data_ptr() for p in left.parameters()]
        if left is right or (weights and weights == [p.data_ptr() for p in right.parameters()]):
            # Bypass nn.Module's registration, so that parameters() and state_dict() contain each
            # shared weight once.
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
        """True if both towers have the same weights."""
        return "right" not in self._modules

    @property
    def num_parameters(self) -> int:
        """Number of weights, with shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def num_trainable_parameters(self) -> int:
        """Number of weights that training changes."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def train(self, mode: bool = True) -> DualEncoder:
        """Switch between training and evaluation mode, on both sides."""
        super().train(mode)
        # A right tower over the same weights is not registered, so `super()` does not reach it.
        self.right.train(mode)
        return self

    def tower(self, side: Side) -> Tower:
        """Return the tower of a side, "left" or "right"."""
        if side not in SIDES:
            raise DualencError(f"side is {str(side)[:40]!r}", fix="choose 'left' or 'right'")
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
            items: sequence of N raw items.
            side: "left" encodes queries and images, "right" documents and texts.
            batch_size: number of items per forward pass.
            show_progress_bar: show a progress bar; None for more than 1,000 items.

        Raises:
            DualencError: an item is unusable, or a vector is not finite.
        """
        tower = self.tower(side)
        is_sequence = hasattr(items, "__len__") and hasattr(items, "__getitem__")
        if not is_sequence or isinstance(items, (str, bytes, Mapping)):
            kind = type(items).__name__
            raise DualencError(
                f"items is of type {kind}",
                fix="give a list of texts, images or vectors",
            )
        if batch_size < 1:
            raise DualencError(f"batch_size is {batch_size}", fix="give at least 1")
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
        """Encode N queries to (N, D), with the query prompt.

        Args:
            items: sequence of N queries.
            options: further arguments of `encode`.
        """
        return self.encode(items, "left", **options)

    def encode_document(self, items: Sequence[Any], **options: Any) -> np.ndarray:
        """Encode N documents to (N, D), with the document prompt.

        Args:
            items: sequence of N documents.
            options: further arguments of `encode`.
        """
        return self.encode(items, "right", **options)

    def save(self, folder: str | os.PathLike[str], card: dict[str, Any] | None = None) -> None:
        """Write a model folder: the ecosystem's own format, safetensors weights and a model card.

        Args:
            folder: target; replaced if it holds a model, refused if it holds anything else.
            card: additional content of the README, see `render_card`.
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
        """Raise a `DualencError` if a library would refuse to save this model after training."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                without_weights(self).write(Path(folder))
            except Exception:
                # A user's model may compute what it writes from its weights, so an error without
                # them proves nothing. Try again with weights, which takes longer.
                shutil.rmtree(folder)
                Path(folder).mkdir()
                with explain("the model cannot be saved", "correct its config.json"):
                    self.write(Path(folder))

    def push_to_hub(
        self, repo: str, card: dict[str, Any] | None = None, private: bool = True
    ) -> str:
        """Upload the model to the Hugging Face hub and return the URL of the commit.

        Requires a login: `hf auth login`.

        Args:
            repo: owner/name; the repository is created if it does not exist.
            card: additional content of the README, see `render_card`.
            private: make a new repository private.
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
        """Render the README.md of the model folder.

        Args:
            name: name of the model: a folder, or owner/name on the hub.
            card: additional content, see `render_card`.
            on_hub: True if `name` is a repository of the hub.
        """
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
        """Store the final training temperature, in formats that have a field for it (CLIP)."""


def window_rows(tower: Tower, batch_size: int) -> int:
    """Return the number of items to prepare at once, a multiple of the batch size.

    Args:
        tower: the tower to encode with.
        batch_size: number of items per forward pass.
    """
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
    """Yield the vectors (n, D) of consecutive windows, batched by text length within each."""
    device = next(itertools.chain(tower.parameters(), tower.buffers())).device
    num_rows = window_rows(tower, batch_size)
    # Iterate instead of indexing: a pandas Series is indexed by label, not by position.
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
        # A NaN would win or lose every comparison in a search, depending on the library.
        vectors = torch.cat(parts)
        if not torch.isfinite(vectors).all():
            raise DualencError(
                "the model returned vectors that are not finite",
                fix="check its weights",
            )
        if num_zero := int((~vectors.any(dim=1)).sum()):
            reason = ZERO_VECTOR[tower.modality]
            logger.warning("%d of %d vectors are zero: %s", num_zero, len(vectors), reason)
        # Chunks are sorted by length; argsort of a permutation is its inverse.
        yield vectors[torch.argsort(torch.cat(chunks))].numpy()


def check_item(item: Any, modality: Modality, name: str = "an item") -> None:
    """Raise `BadSample` unless a tower of this modality can encode the raw item.

    Callers of `Prepare` check each item once as they read it, so that errors can name it.

    Args:
        item: a `str`, a `PIL.Image` or a finite numeric array (D,).
        modality: what is required.
        name: how the error refers to the item.
    """
    kinds, needed = ITEM_TYPES[modality]
    valid = isinstance(item, kinds)
    # A lone surrogate, as Python reads from broken file names, would fail in the tokenizer.
    if valid and modality == "text" and not item.isascii():
        try:
            item.encode()
        except UnicodeEncodeError:
            raise BadSample(
                f"the text {item[:40]!r} is not valid Unicode", fix="write it in UTF-8"
            ) from None
    if valid and modality == "vector":
        vector = np.asarray(item)
        valid = vector.ndim == 1 and vector.dtype.kind in "fiu" and bool(np.isfinite(vector).all())
    if not valid:
        shown = " ".join(repr(item).split())[:40]
        raise BadSample(f"{name} is {shown}, but {needed} is required", fix="correct or remove it")


def unit_norm(vectors: Tensor) -> Tensor:
    """Scale (B, D) vectors of any floating dtype to length one, in float32."""
    return nn.functional.normalize(vectors.to(torch.float32), dim=-1)


def num_rows(inputs: Inputs) -> int:
    """Return the number of prepared items; 0 for {}."""
    return len(next(iter(inputs.values()))) if inputs else 0


def chunk_rows(inputs: Inputs, chunk_size: int) -> list[Tensor]:
    """Split rows into chunks: texts by similar length, longest first; other items in order.

    Returns:
        The row numbers of each chunk, (n,) int64 each, n at most `chunk_size`.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        return list(torch.arange(num_rows(inputs)).split(chunk_size))
    lengths = mask.sum(dim=1)
    # Longest first: running out of memory then shows in the first pass. Stable for reproducibility.
    return list(torch.argsort(lengths, descending=True, stable=True).split(chunk_size))


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Select rows of prepared items, without the columns that are padding in all of them."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return {name: tensor[rows] for name, tensor in inputs.items()}
    used = torch.nonzero(mask[rows].any(dim=0)).reshape(-1)
    # One slice for both paddings. Texts without any token keep all columns.
    columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(None)
    return {
        name: t[rows, columns] if t.shape == mask.shape else t[rows] for name, t in inputs.items()
    }
