"""Embedding throughput against `SentenceTransformer.encode`: same model, texts, batch size and
precision.

    python eval/bench/embedding.py --texts 400 --repeats 3

The texts are docstrings from this machine: their summary lines (short) and their documents (long);
--data takes a BEIR folder instead. Both tools encode the same texts in turn, and the ratio is that
of the medians. The embeddings must agree to 1e-4.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import numpy as np
from in_turn import in_turn
from jsonargparse import auto_cli


def read_texts(data: str | None, count: int) -> dict[str, list[str]]:
    """Short and long texts."""
    if data is not None:
        from dualenc.data.readers.sources import open_corpus

        parts = {part: open_corpus(data, part=part) for part in ("queries", "corpus")}
        return {
            part: [corpus[i] for i in range(min(count, len(corpus)))]
            for part, corpus in parts.items()
        }
    from dualenc.workflows.run_quickstart import read_docstrings

    docstrings = read_docstrings(count)
    return {
        "summaries": [d.summary for d in docstrings],
        "documents": [f"{d.name}: {d.rest}" for d in docstrings],
    }


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
    from dualenc.search.embed.encode import embed

    torch.set_num_threads(threads or torch.get_num_threads())
    path = model or default_model()
    tower = load_model(path, device=device).tower("right")
    theirs = SentenceTransformer(path, device=device)
    print(
        f"{Path(path).name}, batches of {batch_size}, {device}, {torch.get_num_threads()} threads"
    )
    for name, items in read_texts(data, texts).items():
        corpus = Corpus([str(i) for i in range(len(items))], items)
        runs = {
            "ours": lambda c=corpus: embed(tower, c, batch_size=batch_size, progress=False).vectors,
            "theirs": lambda i=items: theirs.encode(
                i, batch_size=batch_size, show_progress_bar=False
            ),
        }
        embed(
            tower,
            Corpus(corpus.ids[:batch_size], items[:batch_size]),
            batch_size=batch_size,
            progress=False,
        )
        theirs.encode(items[:batch_size], batch_size=batch_size)
        times, vectors = in_turn(runs, repeats)
        np.testing.assert_allclose(vectors["ours"], vectors["theirs"], atol=1e-4)
        mine, reference = (statistics.median(times[side]) for side in ("ours", "theirs"))
        rates = (
            f"{len(items) / mine:8.1f} texts/s, "
            f"SentenceTransformer.encode {len(items) / reference:8.1f}"
        )
        print(f"{name:>10}: dualenc {rates}, ratio {reference / mine:.2f} (want ≥ 1.00)")


if __name__ == "__main__":
    auto_cli(main)
