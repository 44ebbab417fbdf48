"""A second look at what was found: a cross-encoder reads query and text together, and its scores order them anew.

Slower than any index by orders of magnitude, so only the best of a first search are read (Nogueira & Cho 2019,
"Passage re-ranking with BERT", arXiv 1901.04085).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from dualenc.errors import DualencError

Rescore = Callable[[Sequence[tuple[str, str]]], np.ndarray]
"""Scores (n,) of n pairs of a query's and a document's text."""


def open_cross_encoder(path: str, *, batch_size: int = 32, device: str = "cpu") -> tuple[Rescore, str]:
    """A cross-encoder of sentence-transformers as a judge of pairs, and a digest of its weights.

    Its own activation is applied: a model may give logits or numbers from 0 to 1, and limits are in their unit.

    Args:
        path: folder or name of a `CrossEncoder` with one output; only safetensors are read, and nothing in the folder
            runs code.
        batch_size: pairs per forward pass.
        device: such as cpu or cuda:0.

    Raises:
        DualencError: sentence-transformers is not installed, the model cannot be read, something in its folder could
            lead to code, it has several outputs, or none that was trained, as a bi-encoder.
    """
    try:
        from sentence_transformers import CrossEncoder
    except ImportError as error:
        told = "a cross-encoder needs sentence-transformers; pip install 'dualenc[mining]'"
        raise DualencError(f"{told} ({error})") from None
    from dualenc.encoders.cross_encoder_folder import cross_encoder_folder
    from dualenc.encoders.text import quiet_transformers

    folder = cross_encoder_folder(path)
    log = logging.getLogger("sentence_transformers")
    level = log.level
    log.setLevel(logging.ERROR)  # what it remarks on other models is told below
    try:
        with quiet_transformers():
            model = CrossEncoder(str(folder), device=device, model_kwargs={"use_safetensors": True})
    except Exception as error:  # of transformers, safetensors, the hub and their configurations
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise DualencError(f"{path}: no cross-encoder that sentence-transformers reads ({why})") from None
    finally:
        log.setLevel(level)
    made_for = getattr(model.config, "architectures", None) or ["…ForSequenceClassification"]
    is_bare = not any("ForSequenceClassification" in name for name in made_for)
    if model[0].transformer_task == "sequence-classification" and is_bare:
        told = f"is a {made_for[0]}, whose scores of pairs would be random weights'"
        raise DualencError(f"{path}: {told}; give a model that was trained as a cross-encoder")
    if model.num_labels != 1:
        raise DualencError(f"{path}: gives {model.num_labels} numbers for a pair; a judge gives one")
    digest = hashlib.sha256(repr(model.activation_fn).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().float().numpy().tobytes())

    def rescore(texts: Sequence[tuple[str, str]]) -> np.ndarray:
        if not texts:
            return np.zeros(0, np.float32)
        return np.asarray(model.predict(list(texts), batch_size=batch_size, show_progress_bar=False), np.float32)

    return rescore, digest.hexdigest()


def rerank(rescore: Rescore, candidates: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Order the candidates of several queries by a judge, who is asked about all of them at once.

    Args:
        rescore: the judge.
        candidates: of each query the pairs of its text and a document's, in any number.

    Returns:
        Of each query the places of its candidates, best first, and their scores in that order, float32; equal scores
        keep the order that they came in.

    Raises:
        DualencError: a score is not finite.
    """
    scores = finite_scores(rescore([pair for pairs in candidates for pair in pairs]))
    found, start = [], 0
    for pairs in candidates:
        own = scores[start : start + len(pairs)]
        order = np.argsort(-own, kind="stable")
        found.append((order, own[order]))
        start += len(pairs)
    return found


def finite_scores(scores: np.ndarray) -> np.ndarray:
    """Scores as float32.

    Raises:
        DualencError: one is not finite.
    """
    if not np.isfinite(scores).all():
        raise DualencError(
            "a score is not finite; check the weights of the model, and of the cross-encoder if one is given"
        )
    return np.asarray(scores, np.float32)
