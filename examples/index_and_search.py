"""Embed documents, build a FAISS index, open it again and search it.

    python examples/index_and_search.py [MODEL]

The same from the command line:
    dualenc index MODEL documents.jsonl --out index
    dualenc search index "azure crystal light"
"""

from __future__ import annotations

import sys
from pathlib import Path

import text  # the example beside this one: trains a small model in seconds

from dualenc.data import open_corpus
from dualenc.encoders import load_model
from dualenc.search import Index
from dualenc.search.embed import embed


def main(folder: Path = Path("runs/example_search"), model_name: str | None = None) -> list[str]:
    # Your model: any folder that dualenc wrote, a sentence-transformers model or an open_clip name.
    model_name = model_name or str(text.main(folder / "training").model_folder)
    model = load_model(model_name)

    # Your data: a table, a BEIR folder, a folder of images, tars, a hub name.
    corpus = open_corpus(folder / "training" / "data" / "documents.jsonl")

    # On disk: numbered Arrow files; an interrupted run resumes.
    embeddings = embed(
        model.right, corpus, folder / "embeddings", notes={"model": model_name, "side": "right"}
    )

    # "auto" is exact up to 128 MiB of vectors; beyond that or with a factory string, recall@10 is
    # measured.
    index = Index.build(embeddings, factory="auto")
    index.save(folder / "index")
    built = index.provenance
    print(f"{len(index)} documents, {built.factory}, recall@10 {built.recall_at_10:.3f}")

    index = Index.open(folder / "index")
    queries = ["azure crystal light", "ebony timber sofa"]
    vectors = model.encode_query(queries)
    results = index.search(vectors, k=3)
    for query, hits in zip(queries, results, strict=True):
        print(query, "→", ", ".join(f"{hit.id} ({hit.score:.2f})" for hit in hits))
    return [hits[0].id for hits in results]


if __name__ == "__main__":
    main(model_name=sys.argv[1] if len(sys.argv) > 1 else None)
