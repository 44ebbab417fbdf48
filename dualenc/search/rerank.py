"""Cross-encoder reranking (Nogueira & Cho 2019, arXiv 1901.04085)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from dualenc.encoders.cross_encoder_folder import cross_encoder_folder
from dualenc.encoders.text import quiet_transformers
from dualenc.errors import DualencError

Rescore = Callable[[Sequence[tuple[str, str]]], np.ndarray]
"""A cross-encoder: scores (n,) of n pairs of a query's and a document's text."""


def open_cross_encoder(path: str, *, batch_size: int = 32, device: str = "cpu") -> tuple[Rescore, str]:
    """Open a cross-encoder of sentence-transformers with its own activation; returns it with a digest of its weights.

    Only safetensors are read, and no code of the folder runs.
    """
    # sentence-transformers is optional, and imports transformers, which takes seconds.
    try:
        from sentence_transformers import CrossEncoder
    except ImportError as error:
        need = "a cross-encoder needs sentence-transformers; pip install 'dualenc[mining]'"
        raise DualencError(f"{need} ({error})") from None

    folder = cross_encoder_folder(path)
    log = logging.getLogger("sentence_transformers")
    level = log.level
    log.setLevel(logging.ERROR)  # its warnings about untrained layers become errors below
    try:
        with quiet_transformers():
            model = CrossEncoder(str(folder), device=device, model_kwargs={"use_safetensors": True})
    except Exception as error:  # from transformers, safetensors, the hub and their configurations
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise DualencError(f"{path}: no cross-encoder that sentence-transformers reads ({why})") from None
    finally:
        log.setLevel(level)
    architectures = getattr(model.config, "architectures", None) or ["…ForSequenceClassification"]
    has_head = any("ForSequenceClassification" in name for name in architectures)
    if model[0].transformer_task == "sequence-classification" and not has_head:
        raise DualencError(
            f"{path}: is a {architectures[0]}; give a model that was trained as a cross-encoder"
        )
    if model.num_labels != 1:
        raise DualencError(f"{path}: gives {model.num_labels} numbers for a pair; give a model with one")

    def rescore(texts: Sequence[tuple[str, str]]) -> np.ndarray:
        if not texts:
            return np.zeros(0, np.float32)
        return np.asarray(
            model.predict(list(texts), batch_size=batch_size, show_progress_bar=False), np.float32
        )

    digest = hashlib.sha256(repr(model.activation_fn).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().float().numpy().tobytes())
    return rescore, digest.hexdigest()


def rerank(
    rescore: Rescore, candidates: Sequence[Sequence[tuple[str, str]]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions of each query's pairs, best first, and their scores in that order; equal scores keep their order."""
    scores = finite_scores(rescore([pair for pairs in candidates for pair in pairs]))
    ranked = []
    for query_scores in np.split(scores, np.cumsum([len(pairs) for pairs in candidates])[:-1]):
        order = np.argsort(-query_scores, kind="stable")
        ranked.append((order, query_scores[order]))
    return ranked[: len(candidates)]  # `np.split` gives one part even for no query


def finite_scores(scores: np.ndarray) -> np.ndarray:
    """Refuse scores that are not finite, and convert them to float32."""
    if not np.isfinite(scores).all():
        raise DualencError(
            "a score is not finite; check the weights of the model, and of the cross-encoder if one is given"
        )
    return np.asarray(scores, np.float32)
