"""The text tower of an open_clip model, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.func import functional_call

from dualenc.encoders.tower import Prepare, Tower, unit_norm

End: TypeAlias = "int | Literal['max'] | None"


class ClipTextPrepare(Prepare):
    """Tokenize to the model's context length, then cut the columns that no text of the batch reaches.

    Args:
        tokenizer: open_clip tokenizer, texts to (B, context length) ids.
        end: the id at which the tower reads its output; "max" for the largest id of each text; None when the
            tower looks at the padding, so that nothing may be cut.
    """

    modality = "text"

    def __init__(self, tokenizer: Callable[[list[str]], Tensor], end: End) -> None:
        self.tokenizer = tokenizer
        self.end: End = end

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> dict[str, Tensor]:
        tokens = self.tokenizer(list(items))
        if self.end is None:
            return {"text": tokens}
        at_end = tokens.argmax(1) if self.end == "max" else tokens.eq(self.end).int().argmax(1)
        return {"text": tokens[:, : int(at_end.max()) + 1]}

    def lengths(self, items: Sequence[str]) -> list[int]:
        """Characters of each text."""
        return [len(text) for text in items]


class ClipTextTower(Tower):
    """The text half of an open_clip model.

    Args:
        clip: an open_clip model whose `visual` was taken out.
        prepare: its tokenizer.
        dim: D, the size of the vectors.
    """

    modality = "text"

    def __init__(self, clip: nn.Module, prepare: ClipTextPrepare, dim: int) -> None:
        super().__init__()
        self.encoder = _TextModel(clip)
        self.prepare: ClipTextPrepare = prepare
        self.dim = self.feature_dim = dim

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Encode token ids (B, T), T at most the context length, to (B, D) unit-norm float32."""
        tokens = inputs["text"]
        prefix, transformer = _causal_transformer(self.encoder.clip)
        length = tokens.shape[1]
        if transformer is None or length == len(transformer.positional_embedding):
            return unit_norm(self.encoder(tokens))
        # Under a causal mask what follows the output token is never seen: the same vectors for less work.
        shorter = {
            f"clip.{prefix}positional_embedding": transformer.positional_embedding[:length],
            f"clip.{prefix}attn_mask": transformer.attn_mask[:length, :length],
        }
        return unit_norm(functional_call(self.encoder, shorter, (tokens,)))


class _TextModel(nn.Module):
    """`encode_text` as a forward."""

    clip: Any

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, tokens: Tensor) -> Tensor:
        return self.clip.encode_text(tokens)


def _causal_transformer(clip: nn.Module) -> tuple[str, Any]:
    """Prefix and module that hold positions and causal mask; (.., None) for other kinds of text tower."""
    prefix, module = ("text.", clip.text) if hasattr(clip, "text") else ("", clip)
    causal = isinstance(getattr(module, "attn_mask", None), Tensor) and getattr(module, "cls_emb", None) is None
    return prefix, module if causal else None


def end_token(clip: nn.Module) -> End:
    """Where a causal text tower reads its output, as `ClipTextPrepare` wants it; None if nothing may be cut."""
    _, module = _causal_transformer(clip)
    if module is None:
        return None
    pooling = getattr(module, "text_pool_type", None) or getattr(module, "pool_type", None)
    if pooling == "eos":
        return int(module.text_eos_id if hasattr(module, "text_eos_id") else module.eos_id)
    return "max" if pooling == "argmax" else None
